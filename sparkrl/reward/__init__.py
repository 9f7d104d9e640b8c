"""Rule-based rewards, scored in worker processes under a hard time limit."""

from __future__ import annotations

from sparkrl.reward.rewarder import Rewarder
from sparkrl.reward.rules import RULES, Rule

__all__ = ["RULES", "Rewarder", "Rule"]
