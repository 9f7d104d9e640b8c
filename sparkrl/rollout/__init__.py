"""Rollout: vLLM servers that sample responses, with log-probs, routed experts and one hot-swapped adapter."""

from sparkrl.rollout.pool import SERVER_CPUS, RolloutPool

__all__ = ["SERVER_CPUS", "RolloutPool"]
