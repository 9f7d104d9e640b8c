"""The responses of one step: sampled and scored, and with dynamic sampling until enough prompts have both outcomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkrl.loop.batch import rollout_metrics
from sparkrl.reward.shaping import shape
from sparkrl.types import Problem, ScoredGroup

if TYPE_CHECKING:
    from sparkrl.loop.parts import Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What one step's sampling brought."""

    kept: tuple[ScoredGroup, ...]
    """The groups to train on."""
    all: tuple[ScoredGroup, ...]
    """Every group that was sampled."""
    metrics: dict[str, float]
    """Over every group, so that accuracy is the policy's and not that of a selection; names as in docs/metrics.md."""


async def sample_step(parts: Parts, step: int) -> Sampled:
    """Take the step's prompts, sample and score their responses.

    With `algorithm.dynamic_sampling` the groups whose responses are all right or all wrong (their advantages are all 0)
    make room for other prompts, as many as are missing, at most `algorithm.max_refills` times. Refills stay inside the
    data's epoch, so no problem comes twice in a step, and a prompt that was taken is never put back: the position in
    the data is the one thing a checkpoint has to hold. A step without any mixed group keeps what it has, and trains on
    advantages of 0.
    """
    cfg = parts.config
    wanted = cfg.loop.num_prompts
    scored = await _sample(parts, parts.data.take(wanted), step)
    if not cfg.algorithm.dynamic_sampling:
        return _sampled(parts, scored, scored, {})
    kept = tuple(item for item in scored if is_mixed(item))
    refills = 0
    while len(kept) < wanted and refills < cfg.algorithm.max_refills and parts.data.remaining:
        missing = min(wanted - len(kept), parts.data.remaining)
        more = await _sample(parts, parts.data.take(missing), step)
        scored += more
        kept += tuple(item for item in more if is_mixed(item))
        refills += 1
    figures = {"rollout/refills": float(refills), "rollout/kept_groups": float(len(kept))}
    return _sampled(parts, kept or scored[:wanted], scored, figures)


def is_mixed(item: ScoredGroup) -> bool:
    """Whether a group has right and wrong responses. Verdicts count, not rewards: length alone is no reason to learn."""
    return len({score.correct for score in item.scores}) == 2


async def _sample(parts: Parts, problems: tuple[Problem, ...], step: int) -> tuple[ScoredGroup, ...]:
    cfg = parts.config
    with parts.telemetry.stage("rollout"):
        groups = await parts.rollout.sample(
            problems,
            num_responses=cfg.loop.group_size,
            temperature=cfg.rollout.temperature,
            top_p=cfg.rollout.top_p,
            max_tokens=cfg.rollout.max_response_tokens,
            # a response's noise depends on its problem too, so refills may share the step's seed
            seed=parts.sampling_seed(step),
        )
    with parts.telemetry.stage("reward"):
        return await parts.rewarder.score(groups)


def _sampled(
    parts: Parts, kept: tuple[ScoredGroup, ...], scored: tuple[ScoredGroup, ...], figures: dict[str, float]
) -> Sampled:
    cfg = parts.config
    budget = cfg.rollout.max_response_tokens
    everything, components = shape(scored, cfg.reward, max_response_tokens=budget)
    chosen, _ = shape(kept, cfg.reward, max_response_tokens=budget)
    metrics = rollout_metrics(everything) | components | figures | parts.rewarder.metrics()
    return Sampled(kept=chosen, all=everything, metrics=metrics)
