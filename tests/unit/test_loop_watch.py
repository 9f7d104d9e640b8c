"""When a run whose trainer and server drift apart stops."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparkrl.config.load import load
from sparkrl.data import ProblemStream
from sparkrl.errors import AgreementError
from sparkrl.loop.parts import Parts
from sparkrl.loop.train import run_loop
from sparkrl.loop.watch import AgreementWatch
from sparkrl.types import FinishReason, Group, Problem, Response, Sampling, Score, ScoredGroup, TrainBatch, TrainResult


def first_stop(patience: int, values: list[float]) -> int | None:
    """Step after which the watch stops the run, from 1."""
    watch = AgreementWatch(load(["recipe=quickstart", "telemetry.k3_limit=0.01", f"loop.k3_patience={patience}"]))
    for step, k3 in enumerate(values, start=1):
        watch.see(k3)
        if watch.exhausted:
            with pytest.raises(AgreementError):
                watch.check(step)
            return step
        watch.check(step)
    return None


@pytest.mark.parametrize(
    ("patience", "values", "expected"),
    [
        (3, [1, 1, 1, 0], 3),
        (3, [1, 1, 0, 1, 1, 0.02], 6),
        (3, [1, 1, 0.01, 1, 1, 0], None),  # at the limit is not above it
        (1, [0, 0.0101], 2),
        (2, [float("nan"), float("inf")], 2),
        (0, [1] * 50, None),
    ],
)
def test_run_stops_after_so_many_steps_in_a_row_above_the_limit(patience, values, expected):
    assert first_stop(patience, values) == expected


def test_stop_says_what_was_found_why_and_what_to_do():
    watch = AgreementWatch(load(["recipe=quickstart", "telemetry.k3_limit=0.01", "loop.k3_patience=2"]))
    for k3 in (0.5, 0.25):
        watch.see(k3)
    with pytest.raises(AgreementError) as error:
        watch.check(7)
    assert "stopped after step 7" in error.value.message and "5.0e-01, 2.5e-01" in error.value.message
    assert "for 2 steps in a row" in error.value.message and "Step 7 is saved" in error.value.message
    assert error.value.hint is not None and "loop.resume" in error.value.hint


class Trainer:
    """Makes steps whose k3 is given beforehand."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    async def step(self, batch: TrainBatch) -> TrainResult:
        return TrainResult(metrics={"agree/k3": self.values[batch.policy_version]}, dlogp=np.zeros(1, np.float32))

    async def publish(self, version: int) -> int:
        return version

    def take_warnings(self) -> list[str]:
        return []


class Rollout:
    """Answers every prompt with one right and one wrong response."""

    def __init__(self) -> None:
        self.version = 0

    async def sample(self, problems, sampling: Sampling) -> tuple[Group, ...]:
        return tuple(Group(problem=problem, responses=self._responses(sampling.num_responses)) for problem in problems)

    def _responses(self, num: int) -> tuple[Response, ...]:
        return tuple(
            Response(
                uid=f"p/{i}",
                token_ids=np.zeros(1, np.int32),
                log_probs=np.zeros(1, np.float32),
                routed_experts=np.zeros((1, 1, 1), np.uint8),
                policy_version=self.version,
                finish_reason=FinishReason.STOP,
                text=str(i),
            )
            for i in range(num)
        )

    async def load_adapter(self, version: int) -> None:
        self.version = version

    def take_warnings(self) -> list[str]:
        return []

    def metrics(self) -> dict[str, float]:
        return {}


class Rewarder:
    async def score(self, groups) -> tuple[ScoredGroup, ...]:
        right, wrong = (Score(reward=r, correct=r > 0, extracted="1") for r in (1.0, -1.0))
        return tuple(ScoredGroup(group=group, scores=(right, wrong)) for group in groups)

    def metrics(self) -> dict[str, float]:
        return {}


@pytest.mark.parametrize(
    ("values", "steps", "saved"),
    [([0, 1, 1, 1, 1], 3, [3]), ([0, 1, 0, 1, 0], 5, [5])],
)
def test_loop_saves_the_step_it_stops_after(values: list[float], steps: int, saved: list[int]) -> None:
    small = ["loop.num_prompts=1", "loop.group_size=2", "loop.num_steps=5", "loop.k3_patience=2"]
    config = load(["recipe=quickstart", *small])
    problem = Problem(uid="p", messages=(), answer="1", data_source="d", prompt_ids=np.zeros(1, np.int32))
    logged: list[int] = []
    saves: list[int] = []

    class Run(Parts):
        async def save(self, step: int) -> None:
            saves.append(step)

    telemetry: Any = SimpleNamespace(
        stage=lambda name: nullcontext(), log_step=lambda step, metrics, **more: logged.append(step)
    )
    parts = Run(
        config=config,
        data=ProblemStream((problem,), seed=0, shuffle=False),
        eval_problems=(),
        rollout=Rollout(),  # type: ignore[arg-type]
        rewarder=Rewarder(),  # type: ignore[arg-type]
        trainer=Trainer(values),  # type: ignore[arg-type]
        telemetry=telemetry,
        run=SimpleNamespace(rows=lambda name: []),  # type: ignore[arg-type]
        first_step=0,
    )
    interrupt: Any = SimpleNamespace(step=nullcontext, requested=False)
    stops = steps < config.loop.num_steps
    with pytest.raises(AgreementError, match=f"stopped after step {steps}") if stops else nullcontext():
        asyncio.run(run_loop(parts, config, interrupt))
    assert (logged, saves) == (list(range(1, steps + 1)), saved)
