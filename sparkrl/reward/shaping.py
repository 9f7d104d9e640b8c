"""Rewards that depend on more than the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sparkrl.config.schema import RewardConfig
from sparkrl.types import ScoredGroup


def overlong_penalty(num_tokens: int, *, budget: int, buffer: int, penalty: float) -> float:
    """What a response's length costs: nothing up to `budget - buffer` tokens, `penalty` at the budget, in proportion
    between the two.

    Returns:
        Reward points, at most 0.
    Source: soft overlong punishment of DAPO, arXiv:2503.14476.
    """
    if buffer == 0:
        return 0.0
    over = min(max(num_tokens - (budget - buffer), 0), buffer)
    return -penalty * over / buffer


def shape(
    scored: Sequence[ScoredGroup], cfg: RewardConfig, *, max_response_tokens: int
) -> tuple[tuple[ScoredGroup, ...], dict[str, float]]:
    """Add the length's cost to each reward; verdicts, and so accuracies, stay.

    Returns:
        The groups, and the mean of each part of the reward as metrics (docs/metrics.md).
    """
    if cfg.overlong_buffer == 0:
        return tuple(scored), _means(scored)
    shaped = []
    for item in scored:
        scores = []
        for response, score in zip(item.group.responses, item.scores, strict=True):
            cost = overlong_penalty(
                len(response.token_ids),
                budget=max_response_tokens,
                buffer=round(cfg.overlong_buffer * max_response_tokens),
                penalty=cfg.overlong_penalty,
            )
            parts = {**score.parts, "overlong": cost}
            scores.append(replace(score, reward=score.reward + cost, parts=parts))
        shaped.append(replace(item, scores=tuple(scores)))
    costs = [score.parts["overlong"] for item in shaped for score in item.scores]
    paid = sum(cost < 0 for cost in costs) / max(len(costs), 1)
    return tuple(shaped), _means(shaped) | {"reward/overlong_responses": paid}


def _means(scored: Sequence[ScoredGroup]) -> dict[str, float]:
    """Mean of each part of the reward over all responses, `reward/<part>_mean`."""
    sums: dict[str, float] = {}
    for score in (score for item in scored for score in item.scores):
        for name, points in score.parts.items():
            sums[name] = sums.get(name, 0.0) + points
    num = sum(len(item.scores) for item in scored)
    return {f"reward/{name}_mean": total / num for name, total in sums.items()}
