"""The responses of one step: sampled and scored, and with dynamic sampling until enough prompts have both outcomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkrl.loop.batch import rollout_metrics
from sparkrl.reward.shaping import shape
from sparkrl.types import Problem, Sampling, ScoredGroup

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
    passes = [await _sample(parts, parts.data.take(wanted), step)]
    if not cfg.algorithm.dynamic_sampling:
        return _sampled(parts, passes, passes[0].scored, {})
    kept = passes[0].mixed
    while len(kept) < wanted and len(passes) <= cfg.algorithm.max_refills and parts.data.remaining:
        missing = min(wanted - len(kept), parts.data.remaining)
        passes.append(await _sample(parts, parts.data.take(missing), step))
        kept += passes[-1].mixed
    figures = {"rollout/refills": float(len(passes) - 1), "rollout/kept_groups": float(len(kept))}
    return _sampled(parts, passes, kept or passes[0].scored, figures)


def is_mixed(item: ScoredGroup) -> bool:
    """Whether a group has right and wrong responses. Verdicts count and not rewards, which differ by length too."""
    return len({score.correct for score in item.scores}) == 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    scored: tuple[ScoredGroup, ...]
    reward_metrics: dict[str, float]

    @property
    def mixed(self) -> tuple[ScoredGroup, ...]:
        return tuple(item for item in self.scored if is_mixed(item))


async def _sample(parts: Parts, problems: tuple[Problem, ...], step: int) -> _Pass:
    cfg = parts.config
    sampling = Sampling(
        num_responses=cfg.loop.group_size,
        temperature=cfg.rollout.temperature,
        top_p=cfg.rollout.top_p,
        max_tokens=cfg.rollout.max_response_tokens,
        # a response's noise depends on its problem too, so refills may share the step's seed
        seed=parts.sampling_seed(step),
    )
    with parts.telemetry.stage("rollout"):
        groups = await parts.rollout.sample(problems, sampling)
    with parts.telemetry.stage("reward"):
        scored = await parts.rewarder.score(groups)
    return _Pass(scored=scored, reward_metrics=parts.rewarder.metrics())


def _sampled(parts: Parts, passes: list[_Pass], kept: tuple[ScoredGroup, ...], figures: dict[str, float]) -> Sampled:
    cfg = parts.config
    budget = cfg.rollout.max_response_tokens
    everything, components = shape(
        [item for one in passes for item in one.scored], cfg.reward, max_response_tokens=budget
    )
    chosen, _ = shape(kept, cfg.reward, max_response_tokens=budget)
    return Sampled(
        kept=chosen,
        all=everything,
        metrics=rollout_metrics(everything) | components | figures | _reward_metrics(passes),
    )


def _reward_metrics(passes: list[_Pass]) -> dict[str, float]:
    """Counts add up; the fraction is weighted by what each pass scored."""
    total = sum(len(one.scored) for one in passes)
    merged: dict[str, float] = {}
    for one in passes:
        for name, value in one.reward_metrics.items():
            weight = len(one.scored) / total if name == "rollout/extraction_failures" else 1.0
            merged[name] = merged.get(name, 0.0) + weight * value
    return merged
