"""Verdicts of both rules on answers as models write them, each with the reason for the verdict.

RIGHT and WRONG are what a person who marks the answer would say, given DAPO's rule that the last `Answer:` line counts,
else the last box, and only the end of the response is read.
"""

from __future__ import annotations

import time

import pytest

from sparkrl.config.schema import RewardRule
from sparkrl.reward.answers import as_number, find_answer, last_boxed, tidy
from sparkrl.reward.rules import PRELOAD, math_dapo, math_verify
from sparkrl.reward.timed_scorer import Outcome, TimedScorer
from sparkrl.types import Score

RIGHT, WRONG = True, False

CASES = [
    # (response, reference, verdict, why)
    ("1+1=2\nAnswer: 2", "2", RIGHT, "the form the prompt asks for"),
    ("1+1=3\nAnswer: 3", "2", WRONG, "another number"),
    ("", "2", WRONG, "empty response"),
    ("It is 2.", "2", WRONG, "no answer line and no box"),
    ("Answer:", "2", WRONG, "nothing after the colon"),
    ("Answer: 12.", "12", RIGHT, "the full stop ends the sentence"),
    ("Answer: $12$.", "12", RIGHT, "full stop after the formula"),
    ("Answer: 12.5.", "12.5", RIGHT, "decimal point and full stop"),
    ("Answer: 12.5", "12", WRONG, "the decimals count"),
    ("Answer: 12...", "12", WRONG, "an ellipsis leaves the value open"),
    ("Answer: 007", "7", RIGHT, "leading zeros do not change a number"),
    ("Answer: 025", "25", RIGHT, "three digits as AIME's answer sheet has them"),
    ("Answer: 25", "025", RIGHT, "the reference may be the padded one"),
    ("Answer: 0", "0", RIGHT, "zero survives the stripping of zeros"),
    ("Answer: 100", "1", WRONG, "trailing zeros count"),
    ("Answer: 70", "07", WRONG, "zeros are stripped on the left only"),
    ("Answer: +5", "5", RIGHT, "a plus sign changes nothing"),
    ("Answer: -5", "-5", RIGHT, "negative number"),
    ("Answer: 5", "-5", WRONG, "the sign counts"),
    ("Answer: \u22125", "-5", RIGHT, "typographic minus"),
    ("Answer: $-\\frac{1}{2}$", "-0.5", RIGHT, "negative fraction and decimal"),
    ("Answer: - 5", "-5", RIGHT, "space after the sign"),
    ("Answer: 1,234", "1234", RIGHT, "thousands separator"),
    ("Answer: 1{,}234{,}567", "1234567", RIGHT, "LaTeX thousands separators"),
    ("Answer: $1\\,234$", "1234", RIGHT, "LaTeX thin space as thousands separator"),
    ("Answer: 12 345", "12345", RIGHT, "space as thousands separator"),
    ("Answer: 1,2", "12", WRONG, "a pair, not a thousands separator"),
    ("Answer: 12, 345", "12345", WRONG, "a pair with a space"),
    ("Answer: 1,000 dollars", "1000", RIGHT, "thousands separator and unit"),
    ("Answer: $1,\\!000$", "1000", RIGHT, "comma with a negative space"),
    ("Answer: 12,34", "1234", WRONG, "groups of two are no thousands"),
    ("Answer: 1\\,000\\,000", "1000000", RIGHT, "two thin spaces"),
    ("Answer: 0.5", "\\frac{1}{2}", RIGHT, "decimal against fraction"),
    ("Answer: \\frac{1}{2}", "0.5", RIGHT, "fraction against decimal"),
    ("Answer: 1/2", "\\frac{1}{2}", RIGHT, "slash against fraction"),
    ("Answer: \\frac{2}{4}", "\\frac{1}{2}", RIGHT, "same value, not reduced"),
    ("Answer: \\dfrac{3}{4}", "\\frac{3}{4}", RIGHT, "display fraction"),
    ("Answer: $\\frac12$", "\\frac{1}{2}", RIGHT, "fraction without braces"),
    ("Answer: \\frac{1}{3}", "\\frac{1}{2}", WRONG, "another fraction"),
    ("Answer: .5", "0.5", RIGHT, "no digit before the point"),
    ("Answer: 12.0", "12", RIGHT, "a decimal of nothing"),
    ("Answer: 0.33", "\\frac{1}{3}", WRONG, "rounded to two places"),
    ("so \\boxed{12}", "12", RIGHT, "box without an answer line"),
    ("so \\boxed{\\frac{1}{2}}", "\\frac{1}{2}", RIGHT, "nested braces in the box"),
    ("so \\boxed{\\frac{\\sqrt{3}}{2}}", "\\frac{\\sqrt{3}}{2}", RIGHT, "twice nested braces in the box"),
    ("so \\boxed{\\boxed{12}}", "12", RIGHT, "a box in a box"),
    ("so \\boxed {12}", "12", RIGHT, "space before the brace"),
    ("so \\boxed{012}", "12", RIGHT, "leading zero in the box"),
    ("so \\boxed{12.}", "12", RIGHT, "full stop in the box"),
    ("so \\boxed{11} and then \\boxed{12}", "12", RIGHT, "the last box counts"),
    ("so \\boxed{12} and then \\boxed{11}", "12", WRONG, "the last box counts"),
    ("so \\boxed{12", "12", WRONG, "the box never closes: the response was cut off"),
    ("so \\boxed{12}" + " because of this." * 12, "12", RIGHT, "box within the last 300 characters"),
    ("Answer: \\boxed{12}", "12", RIGHT, "box on the answer line"),
    ("so \\boxed{11}\nAnswer: 12", "12", RIGHT, "the answer line wins over a box"),
    ("Answer: 11\nNo.\nAnswer: 12", "12", RIGHT, "the last of two answer lines counts"),
    ("Answer: 12\nNo.\nAnswer: 11", "12", WRONG, "the last of two answer lines counts"),
    ("Answer: 12\nso \\boxed{12}\nAnswer:", "12", RIGHT, "an answer line left empty does not count"),
    ("Answer: 12" + " and so on" * 40, "12", WRONG, "the answer lies before the last 300 characters"),
    ("x" * 5000 + "\nAnswer: 12", "12", RIGHT, "long response, answer at its end"),
    ("**Answer:** 12", "12", RIGHT, "Markdown around the word"),
    ("**Answer: 12**", "12", RIGHT, "Markdown around the line"),
    ("**Answer**: $12$", "12", RIGHT, "Markdown before the colon"),
    ("## Final answer: `12`", "12", RIGHT, "heading and code marks"),
    ("answer :12", "12", RIGHT, "lower case, space before the colon"),
    ("Answer\uff1a12", "12", RIGHT, "full-width colon, as in Chinese responses"),
    ("Answer: \uff11\uff12", "12", RIGHT, "full-width digits"),
    ("Answer:\n12", "12", RIGHT, "number on the next line"),
    ("Answer:\n\n$$\n12\n$$", "12", RIGHT, "displayed formula below"),
    ("Answer: \\[\n12\n\\]", "12", RIGHT, "displayed formula in LaTeX brackets"),
    ("Answer: \\(12\\)", "12", RIGHT, "LaTeX parentheses"),
    ("Answer: $$12$$", "12", RIGHT, "double dollars"),
    ("Answer: $12", "12", RIGHT, "the prompt's own `$Answer` taken at its word"),
    ("Answer: \\text{12}", "12", RIGHT, "number in text mode"),
    ("Answer: $x = 12$", "12", RIGHT, "right side of an equation"),
    ("Answer: $x = 11$", "12", WRONG, "right side of an equation"),
    ("Answer: 12 cm", "12", RIGHT, "unit"),
    ("Answer: $12\\text{ cm}^2$", "12", RIGHT, "square unit"),
    ("Answer: 12 square units", "12", RIGHT, "unit of area in words"),
    ("Answer: 12 dollars", "12", RIGHT, "currency"),
    ("Answer: $12^\\circ$", "12", RIGHT, "degrees"),
    ("Answer: 12\u00b0", "12", RIGHT, "degree sign"),
    ("Answer: 12 apples", "12", RIGHT, "what was counted"),
    ("Answer: 12 ordered pairs.", "12", RIGHT, "what was counted, in two words"),
    ("Answer: 12 thousand", "12", WRONG, "the word changes the value"),
    ("Answer: 3 halves", "3", WRONG, "the word changes the value"),
    ("Answer: 12 or 13", "12", WRONG, "two answers are none"),
    ("Answer: 12, 13", "12", WRONG, "two answers are none"),
    ("Answer: 5x", "5", WRONG, "an expression, not the number"),
    ("Answer: 12^2", "12", WRONG, "a power, not the number"),
    ("Answer: 12!", "12", WRONG, "a factorial, not the number"),
    ("Answer: 123", "12", WRONG, "the reference as a prefix is not enough"),
    ("Answer: 2^{10}", "2^{10}", RIGHT, "power written as the reference has it"),
    ("Answer: 3\\sqrt{2}", "3\\sqrt{2}", RIGHT, "root written as the reference has it"),
    ("Answer: $\\sqrt2$", "\\sqrt{2}", RIGHT, "root without braces"),
    ("Answer: 12 \u00a0", "12", RIGHT, "space that does not break"),
    ("Answer: 9" + "9" * 200, "9" * 201, RIGHT, "very long number, compared as text"),
]

GENERAL = [
    # what only math-verify can say
    ("Answer: $x^2+2x+1$", "(x+1)^2", RIGHT, WRONG, "the same polynomial"),
    ("Answer: $2^{10}$", "1024", RIGHT, WRONG, "a power worked out"),
    ("Answer: $\\frac{\\sqrt{12}}{2}$", "\\sqrt{3}", RIGHT, WRONG, "a root simplified"),
    ("Answer: $\\{3, 1, 2\\}$", "\\{1, 2, 3\\}", RIGHT, WRONG, "sets have no order"),
    ("Answer: $(3, 1)$", "(1, 3)", WRONG, WRONG, "pairs do"),
    ("Answer: $[1, 3)$", "[1, 3)", RIGHT, RIGHT, "half-open interval"),
    ("Answer: $(1, 3)$", "[1, 3)", WRONG, WRONG, "another end of the interval"),
    ("Answer: $\\frac{1}{1+x}$", "\\frac{1}{x+1}", RIGHT, WRONG, "sums have no order"),
    ("Answer: $\\pi/2$", "\\frac{\\pi}{2}", RIGHT, WRONG, "slash against fraction with a symbol"),
    ("Answer: $x+1$", "x+2", WRONG, WRONG, "another expression"),
]

# Verdicts of math-verify that a person would not share, and the reason we leave them: what it accepts is its documented
# leniency, and what it refuses it cannot parse.
MATH_VERIFY_DIFFERS = {"an ellipsis leaves the value open": "it reads the number and drops the dots"}


def ids(cases: list) -> list[str]:
    return [f"{number}-{case[-1]}" for number, case in enumerate(cases)]


@pytest.mark.parametrize(("text", "answer", "verdict", "why"), CASES, ids=ids(CASES))
def test_math_dapo_verdict_is_the_right_one(text: str, answer: str, verdict: bool, why: str) -> None:
    score = math_dapo(text, answer)
    assert (score.correct, score.reward) == (verdict, 1.0 if verdict else -1.0), why


@pytest.mark.parametrize(("text", "answer", "verdict", "why"), CASES, ids=ids(CASES))
def test_math_verify_verdict_is_the_right_one(text: str, answer: str, verdict: bool, why: str) -> None:
    assert math_verify(text, answer).correct == (verdict != (why in MATH_VERIFY_DIFFERS)), why


@pytest.mark.parametrize(("text", "answer", "general", "dapo", "why"), GENERAL, ids=ids(GENERAL))
def test_math_verify_compares_as_mathematics_and_math_dapo_as_text(text, answer, general, dapo, why) -> None:
    assert (math_verify(text, answer).correct, math_dapo(text, answer).correct) == (general, dapo), why


def test_there_are_enough_cases_and_no_case_twice() -> None:
    assert len(CASES) >= 60
    assert len({case[:2] for case in CASES}) == len(CASES)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Answer: 1\nAnswer: 2", "2"),
        ("Answer: 1 Answer: 2", "2"),
        ("Answer: **\n\n3", "3"),
        ("Answer:\n\n\n\n\n4", None),
        ("\\boxed{a{b}c}", "a{b}c"),
        ("\\boxed{1} \\boxed{2", "1"),
        ("\\boxed", None),
        ("", None),
    ],
)
def test_final_answer_is_found_where_it_was_written(text: str, found: str | None) -> None:
    assert find_answer(text) == found


@pytest.mark.parametrize("depth", [0, 1, 30])
def test_box_of_any_depth_is_read_whole(depth: int) -> None:
    content = "{" * depth + "7" + "}" * depth
    assert last_boxed(f"so \\boxed{{{content}}} it is") == content


@pytest.mark.parametrize("text", ["x+1", "\\frac{a}{b}", "3\\sqrt{2}", "[1;3)", "12 or 13", "12 thousand", ""])
def test_tidy_leaves_what_it_does_not_know_alone(text: str) -> None:
    assert tidy(text) == text


def test_tidy_twice_is_tidy_once() -> None:
    for text, answer, *_ in CASES:
        for side in (text[-60:], answer):
            assert tidy(tidy(side)) == tidy(side)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1/2", 0.5), ("-\\frac{3}{4}", -0.75), ("0.125", 0.125), ("-7", -7), ("1/0", None), ("x", None), (".", None)],
)
def test_number_has_its_exact_value(text: str, value: float | None) -> None:
    assert as_number(text) == value


def burn_memory(text: str, answer: str) -> Score:
    """A rule that takes more memory than it may."""
    return Score(reward=1.0, correct=text == "big" and bool(bytearray(8 * 2**30)), extracted=None)


NASTY = {
    "power tower": "Answer: $9^{9^{9^9}}$",
    "factorial": "Answer: $(10^9)!$",
    "1 MB of open fractions": "\\frac{1}{" * 110_000 + "\nAnswer: 4",
    "1 MB formula on the answer line": "Answer: " + "x+" * 500_000,
    "1 MB of braces": "{" * 1_000_000,
    "unclosed boxes": "\\boxed{" * 150_000,
    "nested brackets": "Answer: " + "(" * 140 + "1" + ")" * 140,
}


@pytest.mark.parametrize("rule", [math_dapo, math_verify])
def test_nasty_answers_are_wrong_in_time_and_do_not_harm_the_next_one(rule) -> None:
    limit_s = 3.0
    scorer = TimedScorer(
        rule,
        timeout_s=limit_s,
        wrong=Score(reward=-1.0, correct=False, extracted=None),
        preload=PRELOAD[RewardRule(rule.__name__)],
    )
    try:
        scorer.start()
        items = [(text, "3") for nasty in NASTY.values() for text in (nasty, "Answer: 3")]
        started_s = time.perf_counter()
        verdicts = scorer.score(items)
        elapsed_s = time.perf_counter() - started_s
    finally:
        scorer.close()
    assert [verdict.score.correct for verdict in verdicts] == [False, True] * len(NASTY)
    assert all(verdict.outcome is Outcome.SCORED for verdict in verdicts[1::2])
    assert elapsed_s < (limit_s + 10.0) * len(NASTY)  # the limit, and a new process each time


def test_rule_that_takes_too_much_memory_is_a_crash_and_not_the_machines_end() -> None:
    scorer = TimedScorer(burn_memory, timeout_s=20.0, wrong=Score(reward=-1.0, correct=False, extracted=None))
    try:
        verdicts = scorer.score([("big", "1")])
    finally:
        scorer.close()
    assert [verdict.outcome for verdict in verdicts] == [Outcome.CRASHED]
