"""Evaluation: mean@k with an interval, pass@k, maj@k."""

from __future__ import annotations

from sparkrl.evals.metrics import Interval, maj_at_k, mean_at_k, pass_at_k, t_quantile
from sparkrl.evals.runner import Rewarder, Sampler, evaluate

__all__ = ["Interval", "Rewarder", "Sampler", "evaluate", "maj_at_k", "mean_at_k", "pass_at_k", "t_quantile"]
