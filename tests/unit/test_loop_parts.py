"""When a run evaluates, over a real run folder; a policy whose responses are all right answers."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparkrl.config.load import dump, load
from sparkrl.data import ProblemStream
from sparkrl.errors import ConfigError
from sparkrl.loop.parts import Parts, build_parts, eval_seed
from sparkrl.loop.preflight import check_compiler
from sparkrl.telemetry import RunFolder
from sparkrl.types import Answer, EvalResult, FinishReason, Group, Problem, Response, Sampling, Score, ScoredGroup

MESSAGES = ({"role": "user", "content": "1?"},)
OTHERS = ("data", "eval_problems", "rollout", "rewarder", "trainer", "telemetry", "run")
"""Parts that a test leaves out."""
PROBLEMS = (Problem(uid="p", messages=MESSAGES, answer="1", data_source="d", prompt_ids=np.zeros(1, np.int32)),)


class Policy:
    async def sample(self, problems, sampling: Sampling) -> tuple[Group, ...]:
        response = Response(
            uid="p/0",
            token_ids=np.zeros(1, np.int32),
            log_probs=np.zeros(1, np.float32),
            routed_experts=np.zeros((1, 1, 1), np.uint8),
            policy_version=0,
            finish_reason=FinishReason.STOP,
            text="",
        )
        return tuple(Group(problem=problem, responses=(response,) * sampling.num_responses) for problem in problems)


class Scorer:
    async def score(self, groups) -> tuple[ScoredGroup, ...]:
        right = Score(reward=1.0, correct=True, extracted="1")
        return tuple(ScoredGroup(group=group, scores=(right,) * len(group.responses)) for group in groups)


def answer_of(index: int, correct: bool) -> Answer:
    return Answer(
        problem_uid="p", index=index, prompt="1?", response="", answer="1", extracted="1" if correct else "2",
        correct=correct, reward=2.0 * correct - 1.0, tokens=1, finish_reason="stop",
    )  # fmt: skip


def evaluated(tmp_path: Path, first_step: int, logged: list[int], baseline: list[bool]) -> list[EvalResult]:
    """The evaluations that a run of 25 steps, one each 10, makes before its first step.

    Args:
        baseline: verdicts on the two answers that were given before training; none were kept when empty.
    """
    run_dir = f"run_dir={tmp_path / 'run'}"
    config = load(["recipe=quickstart", "loop.num_steps=25", "eval.every=10", "eval.k=2", run_dir])
    run = RunFolder.create(config)
    for step in logged:
        run.append("metrics", {"step": step, "kind": "eval"})
    run.append("metrics", {"step": first_step, "kind": "train"})
    if baseline:
        answers = [answer_of(index, correct) for index, correct in enumerate(baseline)]
        run.write_answers(0, [answers])
    seen: list[EvalResult] = []
    telemetry: Any = SimpleNamespace(
        stage=lambda name: nullcontext(), log_eval=lambda result, answers, before: seen.append(result)
    )
    parts = Parts(
        config=config,
        data=ProblemStream(PROBLEMS, seed=0, shuffle=False),
        eval_problems=PROBLEMS,
        rollout=Policy(),  # type: ignore[arg-type]
        rewarder=Scorer(),  # type: ignore[arg-type]
        trainer=None,  # type: ignore[arg-type]
        telemetry=telemetry,
        run=run,
        first_step=first_step,
    )
    asyncio.run(parts.evaluate_first())
    return seen


@pytest.mark.parametrize(
    ("first_step", "logged", "expected"),
    [
        (0, [], [0]),
        (10, [0, 10], []),
        (10, [0], [10]),  # stopped between the checkpoint and its evaluation
        (7, [0], []),  # stopped at a step that has none
        (25, [0, 10, 20], [25]),  # stopped before the last evaluation
        (25, [0, 10, 20, 25], []),
    ],
)
def test_resumed_run_evaluates_first_only_what_is_missing(tmp_path, first_step, logged, expected):
    assert [result.step for result in evaluated(tmp_path, first_step, logged, [])] == expected


def test_resumed_run_gains_over_the_answers_kept_from_before_training(tmp_path):
    (result,) = evaluated(tmp_path, 10, [0], [True, False])
    assert (result.mean, result.extra["gain"]) == (1.0, 0.5)
    (without,) = evaluated(tmp_path / "other", 10, [0], [])
    assert "gain" not in without.extra


@pytest.mark.parametrize("seed", [0, 1, 2, 999_999])
def test_evaluation_seed_is_none_of_the_training_steps_of_its_run(seed):
    config = load(["recipe=quickstart", f"seed={seed}"])
    parts = SimpleNamespace(config=config)
    steps = {Parts.sampling_seed(parts, step) for step in range(2_000)}  # type: ignore[arg-type]
    assert eval_seed(config) not in steps


def test_steps_before_an_evaluation_are_saved_so_that_interrupting_it_loses_none():
    saved: list[int] = []

    class Run(Parts):
        async def save(self, step: int) -> None:
            saved.append(step)

    config = load(["recipe=quickstart", "loop.save_every=10", "eval.every=4", "loop.num_steps=13"])
    parts = Run(config=config, first_step=0, **dict.fromkeys(OTHERS))

    async def steps() -> None:
        for step in range(1, 14):
            await parts.save_if_due(step, stopping=step == 7)

    asyncio.run(steps())
    assert saved == [4, 7, 8, 10, 12, 13]


@pytest.mark.parametrize(
    ("made", "evaluated_at", "num_steps", "left"),
    [(10, [10], 10, False), (12, [10], 10, False), (10, [], 10, True), (10, [10], 11, True)],
)
def test_resume_with_nothing_left_to_do_is_refused_before_anything_starts(
    tmp_path, made, evaluated_at, num_steps, left
):
    config = load(["recipe=quickstart", f"loop.resume={tmp_path}", f"loop.num_steps={num_steps}", "seed=1"])
    (tmp_path / "config.yaml").write_text(dump(load(["recipe=quickstart", "seed=0" if left else "seed=1"])))
    (tmp_path / f"checkpoints/step-{made:06d}").mkdir(parents=True)
    for step in evaluated_at:
        RunFolder(tmp_path).write_answers(step, [])

    async def start() -> None:
        async with build_parts(config):
            raise AssertionError("started")

    # where steps are left, the seed of another run is what is refused next
    message = "`seed` is 1, the run was started with 0" if left else rf"nothing is left to do: .* has made {made} steps"
    with pytest.raises(ConfigError, match=message) as caught:
        asyncio.run(start())
    assert left or "`loop.num_steps=" in str(caught.value.hint)


@pytest.mark.parametrize("address", [None, "auto"])
def test_compiling_without_a_compiler_is_refused_before_anything_is_started_or_written(tmp_path, monkeypatch, address):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    runs = tmp_path / "runs"
    config = load(["recipe=quickstart", "trainer.compile=always", f"output_dir={runs}"])
    if address:  # another machine trains, where there may be one
        config.cluster.address = address
        check_compiler(config)
        return

    async def start() -> None:
        async with build_parts(config):
            pass

    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler on the trainer's machine, and there is no g\+\+"):
        asyncio.run(start())
    assert not runs.exists()
