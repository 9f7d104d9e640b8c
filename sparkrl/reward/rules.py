"""Scoring rules: a function from (response text, reference answer) to a score.

A rule must be importable by name (not a lambda), because it runs in another process. What it needs is imported
inside it, so that choosing a rule does not load verl, and with it torch, into the driver. Every scoring process calls
its rule once with a short response before the time limit applies, so that those imports do not count against it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparkrl.config.schema import RewardRule
from sparkrl.reward.answers import as_number, find_answer, tidy, tidy_math
from sparkrl.types import Score

_LONG_WINDOW = 1200

Rule = Callable[[str, str], Score]


def math_dapo(text: str, answer: str) -> Score:
    """verl's rule for DAPO: the last `Answer: ...` line, else the last `\\boxed{...}`, against the reference.

    Only the last 300 characters are read. Both sides are written plainly first (`sparkrl.reward.answers`), then verl
    normalizes them (its own units, LaTeX dressing) and compares text; equal numbers are equal however they are written
    (0.5, 1/2, \\frac{1}{2}).

    Returns:
        reward +1 or -1 points. `extracted` is what was compared, normalized, None when there was nothing to read.
    Source: verl.utils.reward_score.math_dapo, verl 0.9.1.
    """
    from verl.utils.reward_score.math_dapo import compute_score, normalize_final_answer

    written = find_answer(text)
    if written is None:
        return _score(False, None)
    truth = tidy(answer)
    verdict: Any = compute_score(f"Answer: {tidy(written)}", truth)  # a dict; verl's annotation says float
    extracted = "" if verdict["pred"] == "[INVALID]" else str(verdict["pred"])
    value = as_number(extracted)
    same_number = value is not None and value == as_number(normalize_final_answer(truth))
    return _score(bool(verdict["acc"]) or same_number, extracted or None)


def math_verify(text: str, answer: str) -> Score:
    """math-verify: the same answer as for `math_dapo`, compared as mathematics: `x^2+2x+1` is `(x+1)^2`, sets and
    intervals and equations are understood, decimals may be rounded as its defaults allow.

    The last 1,200 characters are read, since general answers are longer. There is no time limit in here: the process
    that runs a rule is ended from outside, math-verify's own alarm would undo that.

    Returns:
        reward +1 or -1 points. `extracted` is the answer without its dressing, None when there was nothing to read.
    Source: math-verify 0.9, LaTeX first, then plain expressions.
    """
    import logging

    import math_verify as library

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns on every call that no time limit is set
    written = find_answer(text, window=_LONG_WINDOW)
    if written is None:
        return _score(False, None)
    extracted = tidy_math(written)
    truth, found = (library.parse(f"${side}$", parsing_timeout=None) for side in (tidy_math(answer), extracted))
    correct = truth and found and library.verify(truth, found, timeout_seconds=None)
    return _score(bool(correct), extracted)


def _score(correct: bool, extracted: str | None) -> Score:
    points = 1.0 if correct else -1.0
    return Score(reward=points, correct=correct, extracted=extracted, parts={"answer": points})


RULES: dict[RewardRule, Rule] = {RewardRule.math_dapo: math_dapo, RewardRule.math_verify: math_verify}
PRELOAD: dict[RewardRule, tuple[str, ...]] = {
    RewardRule.math_dapo: ("verl.utils.reward_score.math_dapo",),
    RewardRule.math_verify: ("math_verify", "latex2sympy2_extended"),
}
"""Modules a rule imports; the scoring processes are forked from one that has them."""
