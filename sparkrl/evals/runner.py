"""Run one evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from sparkrl.config.schema import EvalConfig
from sparkrl.errors import WorkerError
from sparkrl.evals.metrics import maj_at_k, mean_at_k, pass_at_k
from sparkrl.types import EvalResult, FinishReason, Group, Problem, ScoredGroup


class Sampler(Protocol):
    """What an evaluation needs of the rollout."""

    async def sample(
        self,
        problems: Sequence[Problem],
        *,
        num_responses: int,
        temperature: float,
        top_p: float,
        max_tokens: int,
        seed: int,
    ) -> tuple[Group, ...]: ...


class Rewarder(Protocol):
    """What an evaluation needs of the reward."""

    async def score(self, groups: Sequence[Group]) -> tuple[ScoredGroup, ...]: ...


async def evaluate(
    rollout: Sampler,
    rewarder: Rewarder,
    problems: Sequence[Problem],
    cfg: EvalConfig,
    *,
    step: int,
    max_tokens: int,
    seed: int,
) -> tuple[EvalResult, tuple[ScoredGroup, ...]]:
    """Sample k responses to every evaluation problem and score them.

    Args:
        problems: the evaluation set; `cfg.num_problems` takes the first ones of it.
        step: optimizer steps made so far, written into the result.
        max_tokens: response budget where `cfg` sets none, tokens.
        seed: pass the same seed at every step of a run, so that two evaluations differ by the policy and not by
            the draw of their samples.
    Returns:
        The figures, and the scored responses for telemetry. An aborted response counts as wrong.
    Raises:
        WorkerError: the rollout did not return k responses to every problem.
    """
    chosen = tuple(problems[: cfg.num_problems])
    groups = await rollout.sample(
        chosen,
        num_responses=cfg.k,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        max_tokens=cfg.max_response_tokens or max_tokens,
        seed=seed,
    )
    expected = [(problem.uid, cfg.k) for problem in chosen]
    got = [(group.problem.uid, len(group.responses)) for group in groups]
    if got != expected:
        raise WorkerError(
            f"evaluation `{cfg.name}` asked for {cfg.k} responses to each of {len(chosen)} problems and got "
            f"{sum(num for _, num in got)} responses to {len(got)} problems"
        )
    scored = await rewarder.score(groups)
    return summarize(scored, cfg, step=step), scored


def summarize(scored: Sequence[ScoredGroup], cfg: EvalConfig, *, step: int) -> EvalResult:
    """The figures of scored responses, k to each problem."""
    correct_PK = np.array([[score.correct for score in group.scores] for group in scored], dtype=bool)
    extracted = [[score.extracted for score in group.scores] for group in scored]
    responses = [response for group in scored for response in group.group.responses]
    interval = mean_at_k(correct_PK, confidence=cfg.confidence)
    return EvalResult(
        name=cfg.name,
        step=step,
        k=cfg.k,
        num_problems=len(scored),
        mean=interval.mean,
        low=interval.low,
        high=interval.high,
        pass_at_k=pass_at_k(correct_PK, cfg.k),
        mean_tokens=float(np.mean([len(response.token_ids) for response in responses])),
        truncated=float(np.mean([response.finish_reason is FinishReason.LENGTH for response in responses])),
        extra={
            "maj_at_k": maj_at_k(extracted, correct_PK.tolist()),
            "extraction_failures": float(np.mean([answer is None for row in extracted for answer in row])),
        },
    )
