"""Rollout: vLLM servers that sample responses, with log-probs, routed experts and one hot-swapped adapter."""

from sparkrl.rollout.pool import RolloutPool

__all__ = ["RolloutPool"]
