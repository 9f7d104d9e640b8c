"""Evaluation: mean@k with an interval, pass@k, maj@k, and the paired gain over a baseline."""

from __future__ import annotations

from sparkrl.evals.metrics import Interval, maj_at_k, mean_at_k, paired_gain, pass_at_k, t_quantile
from sparkrl.evals.runner import Answers, Evaluation, Rewarder, Sampler, evaluate, evaluation_of, with_gain

__all__ = [
    "Answers",
    "Evaluation",
    "Interval",
    "Rewarder",
    "Sampler",
    "evaluate",
    "evaluation_of",
    "maj_at_k",
    "mean_at_k",
    "paired_gain",
    "pass_at_k",
    "t_quantile",
    "with_gain",
]
