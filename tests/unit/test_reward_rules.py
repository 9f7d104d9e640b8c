"""Scoring rules and their time limit, without Ray."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest

from sparkrl.errors import WorkerError
from sparkrl.reward.rules import math_dapo
from sparkrl.reward.timed_scorer import Outcome, TimedScorer
from sparkrl.types import Score

WRONG = Score(reward=-1.0, correct=False, extracted=None)


@pytest.mark.parametrize(
    ("text", "answer", "correct", "extracted"),
    [
        ("1+2=3\nAnswer: 3", "3", True, "3"),
        ("Answer: 4\nno, wait.\nAnswer: 3", "3", True, "3"),
        ("Answer: 3\nno, wait.\nAnswer: 4", "3", False, "4"),
        ("answer : 1,000 dollars", "1000", True, "1000"),
        ("Answer: \\boxed{7}", "7", True, "7"),
        ("so \\boxed{7}", "7", True, "7"),
        ("so \\boxed{8}", "7", False, "8"),
        ("Answer: $\\frac12$", "\\frac{1}{2}", True, "\\frac{1}{2}"),
        ("it is 3", "3", False, None),
        ("", "3", False, None),
        ("Answer: 3" + " and on" * 60, "3", False, None),  # the answer lies outside the 300 characters that are read
    ],
)
def test_math_dapo_verdicts_follow_the_dapo_rule(text, answer, correct, extracted):
    points = 1.0 if correct else -1.0
    assert math_dapo(text, answer) == Score(
        reward=points, correct=correct, extracted=extracted, parts={"answer": points}
    )


def test_importing_the_reward_package_loads_neither_torch_nor_verl():
    code = "import sys, sparkrl.reward; print([m for m in ('torch', 'verl', 'vllm') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def fragile(text, answer):
    """A rule that fails in every way there is."""
    if text == "backtrack":
        re.match(r"(a+)+$", "a" * 60 + "b")  # stays in C code for ages
    if text == "loop":
        while True:
            pass
    if text == "raise":
        raise ZeroDivisionError
    if text == "exit":
        os._exit(3)
    return Score(reward=1.0, correct=text == answer, extracted=text)


@pytest.fixture(scope="module")
def scorer():
    scorer = TimedScorer(fragile, timeout_s=0.3, wrong=WRONG)
    yield scorer
    scorer.close()


def test_timed_scorer_with_stuck_and_crashing_responses_scores_the_others(scorer):
    texts = ["1", "backtrack", "2", "raise", "3", "exit", "loop", "4"]
    started_s = time.perf_counter()
    verdicts = scorer.score([(text, text) for text in texts])
    elapsed_s = time.perf_counter() - started_s
    assert [v.outcome for v in verdicts] == [
        Outcome.SCORED, Outcome.TIMED_OUT, Outcome.SCORED, Outcome.CRASHED,
        Outcome.SCORED, Outcome.CRASHED, Outcome.TIMED_OUT, Outcome.SCORED,
    ]  # fmt: skip
    assert [v.score.extracted for v in verdicts] == ["1", None, "2", None, "3", None, None, "4"]
    assert all(v.score == WRONG for v in verdicts if v.outcome is not Outcome.SCORED)
    assert elapsed_s < 15.0  # two limits of 0.3 s and four starts of a process


def test_timed_scorer_limit_is_for_one_response_and_not_for_the_batch(scorer):
    verdicts = scorer.score([("1", "1")] * 3000)
    assert {v.outcome for v in verdicts} == {Outcome.SCORED}


def needs_a_missing_package(text, answer):
    import no_such_package_anywhere  # noqa: F401


def test_timed_scorer_whose_rule_cannot_start_says_why():
    with pytest.raises(WorkerError, match="no_such_package_anywhere"):
        TimedScorer(needs_a_missing_package, timeout_s=1.0, wrong=WRONG).score([("1", "1")])
