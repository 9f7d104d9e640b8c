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
        The groups, and the reward's components as metrics (docs/metrics.md); none where shaping is off.
    """
    if cfg.overlong_buffer_tokens == 0:
        return tuple(scored), {}
    shaped, answers, costs = [], [], []
    for item in scored:
        scores = []
        for response, score in zip(item.group.responses, item.scores, strict=True):
            cost = overlong_penalty(
                len(response.token_ids),
                budget=max_response_tokens,
                buffer=cfg.overlong_buffer_tokens,
                penalty=cfg.overlong_penalty,
            )
            scores.append(replace(score, reward=score.reward + cost))
            answers.append(score.reward)
            costs.append(cost)
        shaped.append(replace(item, scores=tuple(scores)))
    num = max(len(costs), 1)
    return tuple(shaped), {
        "reward/answer_mean": sum(answers) / num,
        "reward/overlong_mean": sum(costs) / num,
        "reward/overlong_responses": sum(cost < 0 for cost in costs) / num,
    }
