"""Scoring rules: a function from (response text, reference answer) to a score.

A rule must be importable by name (not a lambda), because it runs in another process. What it needs is imported
inside it, so that choosing a rule does not load verl, and with it torch, into the driver. Every scoring process calls
its rule once with an empty response before the time limit applies, so that those imports do not count against it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparkrl.config.schema import RewardRule
from sparkrl.types import Score

Rule = Callable[[str, str], Score]


def math_dapo(text: str, answer: str) -> Score:
    """verl's rule for DAPO: the last `Answer: ...` line, else the last `\\boxed{...}`, against the reference.

    Only the last 300 characters are read (100 for a boxed answer). Both sides of an `Answer:` line are normalized
    (units, thousands separators, LaTeX dressing); a boxed answer has to equal the reference to the letter.

    Returns:
        reward +1 or -1 points. `extracted` is what verl compared, normalized, None when there was nothing to read.
    Source: verl.utils.reward_score.math_dapo, verl 0.9.1.
    """
    from verl.utils.reward_score.math_dapo import compute_score

    verdict: Any = compute_score(text, answer)  # a dict; verl's annotation says float
    extracted = None if verdict["pred"] in (None, "[INVALID]") else str(verdict["pred"])
    return Score(reward=float(verdict["score"]), correct=bool(verdict["acc"]), extracted=extracted)


RULES: dict[RewardRule, Rule] = {RewardRule.math_dapo: math_dapo}
