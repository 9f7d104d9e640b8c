"""Metrics of a step from log-probs per token, all taken before the update."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparkrl.config.schema import AlgorithmConfig, PolicyLoss
from sparkrl.types import TrainSequence


def k3(dlogp: np.ndarray) -> float:
    """Mean k3 estimate of KL(rollout || trainer), nats a token.

    Args:
        dlogp: trainer minus rollout log-probs of tokens that the rollout sampled, nats. This is verl's
            `kl_penalty(rollout, trainer, "k3")`.
    """
    # expm1 keeps the digits that exp(d) - 1 - d loses when both sides agree to float32
    wide = dlogp.astype(np.float64)
    return float(np.mean(np.expm1(wide) - wide))


def agreement(dlogp: np.ndarray, *, suffix: str = "") -> dict[str, float]:
    """How far trainer and rollout log-probs are apart: k3, and the absolute difference's maximum, 99.9th percentile
    and mean, nats."""
    size = np.abs(dlogp)
    return {
        f"agree/k3{suffix}": k3(dlogp),
        f"agree/dlogp_max{suffix}": float(size.max()),
        f"agree/dlogp_p999{suffix}": float(np.quantile(size, 0.999)),
        f"agree/dlogp_mean{suffix}": float(size.mean()),
    }


def ratio(
    log_probs: Sequence[np.ndarray],
    old_log_probs: Sequence[np.ndarray],
    sequences: Sequence[TrainSequence],
    algorithm: AlgorithmConfig,
) -> dict[str, float]:
    """The importance ratio per token, and the fraction of tokens that the loss's own clip acts on.

    `vanilla`: tokens whose gradient the clip (dual clip included) stops. `gspo`: likewise, by the ratio of the whole
    response, the geometric mean of its tokens' ratios; it has no dual clip. `cispo`: tokens whose weight is clipped;
    their gradient goes on, whatever the advantage's sign.
    """
    deltas = [new.astype(np.float64) - old for new, old in zip(log_probs, old_log_probs, strict=True)]
    ratios = np.exp(np.clip(np.concatenate(deltas), -20, 20))
    advantages = np.concatenate([sequence.advantages for sequence in sequences])
    by_clip = ratios
    if algorithm.loss is PolicyLoss.gspo:
        by_clip = np.exp(np.concatenate([np.full(len(delta), delta.mean()) for delta in deltas]))
    above, below = by_clip > 1 + algorithm.clip_high, by_clip < 1 - algorithm.clip_low
    if algorithm.loss is PolicyLoss.cispo:
        clipped = above | below
    else:
        clipped = ((advantages > 0) & above) | ((advantages < 0) & below)
    if algorithm.loss is PolicyLoss.vanilla:
        clipped |= (advantages < 0) & (by_clip > algorithm.clip_dual)
    return {
        "train/ratio_mean": float(ratios.mean()),
        "train/ratio_max": float(ratios.max()),
        "train/clip_fraction": float(clipped.mean()),
    }
