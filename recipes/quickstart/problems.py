"""Arithmetic and small word problems with integer answers, and solutions to them in several styles.

A problem is a chain of one or two operations on operands of one or two digits, told in one of many ways. Its key is
the chain itself, so two sets that share no key share neither a text nor a calculation. `solution` writes what a
messy corpus would hold for it: careful working, working with a slip, or a bare answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

DATA_SOURCE = "sparkrl_quickstart"
INSTRUCTION = "End with a line `Answer: N`."
MAX_VALUE = 99
NUM_TRAIN = 4000
NUM_HELDOUT = 128

_KINDS = ("+", "-", "*", "++", "+-", "-+", "--", "*+", "*-", "+*", "-*")
"""Operations in the order they are written; `+*` is a + b * c."""

_NAMES = (
    "Ada",
    "Ben",
    "Cleo",
    "Dan",
    "Eva",
    "Finn",
    "Gus",
    "Hana",
    "Ivo",
    "Jo",
    "Kai",
    "Lea",
    "Max",
    "Nia",
    "Omar",
    "Pia",
)
_THINGS = ("apples", "books", "cards", "coins", "eggs", "keys", "pens", "plums", "shells", "stamps")
_PLAIN = ("What is {e}?", "Compute {e}.", "Find {e}.", "Work out {e}.", "Calculate {e}.", "How much is {e}?")
_STORIES: dict[str, tuple[str, ...]] = {
    "+": (
        "{n} has {a} {t} and gets {b} more. How many {t} now?",
        "A box holds {a} {t}, another {b}. How many {t} in all?",
        "{n} found {a} {t}, {m} found {b}. How many together?",
    ),
    "-": (
        "{n} had {a} {t} and gave {m} {b}. How many are left?",
        "Of {a} {t}, {b} broke. How many are whole?",
        "{n} has {a} {t}, {m} has {b} fewer. How many has {m}?",
    ),
    "*": (
        "{n} fills {a} bags with {b} {t} each. How many {t}?",
        "There are {a} rows of {b} {t}. How many {t} in all?",
    ),
    "++": (
        "{n} has {a} {t}, buys {b} and finds {c}. How many {t} now?",
        "Three boxes hold {a}, {b} and {c} {t}. How many in all?",
    ),
    "+-": (
        "{n} has {a} {t}, gets {b} and loses {c}. How many are left?",
        "A shop had {a} {t}, got {b} more and sold {c}. How many remain?",
    ),
    "-+": (
        "{n} had {a} {t}, gave away {b}, then bought {c}. How many {t} now?",
        "A shelf held {a} {t}. {n} took {b} and put back {c}. How many now?",
    ),
    "--": (
        "{n} had {a} {t}, lost {b} and sold {c}. How many are left?",
        "Of {a} {t}, {n} took {b} and {m} took {c}. How many remain?",
    ),
    "*+": (
        "{n} buys {a} packs of {b} {t} and finds {c} more. How many {t}?",
        "{a} boxes hold {b} {t} each, and {c} lie loose. How many {t}?",
    ),
    "*-": (
        "{n} buys {a} packs of {b} {t} and loses {c}. How many are left?",
        "There were {a} rows of {b} {t}; {c} were sold. How many remain?",
    ),
    "+*": (
        "{n} has {a} {t} and buys {b} bags of {c}. How many {t} now?",
        "{a} {t} lie loose, and {b} boxes hold {c} each. How many {t}?",
    ),
    "-*": (
        "{n} had {a} {t} and gave {b} friends {c} each. How many are left?",
        "A shop had {a} {t} and sold {b} packs of {c}. How many remain?",
    ),
}


class Step(NamedTuple):
    """One calculation; an operand of None is the result of the step before."""

    left: int | None
    op: str
    right: int | None


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem with its steps."""

    key: str
    """The calculation, for example `7*12-30`."""
    question: str
    """The text that the model is asked, instruction included."""
    steps: tuple[Step, ...]
    """Calculations in order."""

    @property
    def answer(self) -> int:
        return _follow(self.steps)[-1]


def draw(rng: random.Random) -> Problem:
    """Draw one problem; every result on the way lies between 0 and MAX_VALUE."""
    while True:
        kind = rng.choice(_KINDS)
        numbers = _operands(kind, rng)
        steps = _steps(kind, numbers)
        if all(0 <= value <= MAX_VALUE for value in _follow(steps)):
            break
    key = str(numbers[0]) + "".join(f"{op}{n}" for op, n in zip(kind, numbers[1:], strict=True))
    if rng.random() < 0.35:
        text = rng.choice(_PLAIN).format(e=key.replace("+", " + ").replace("-", " - ").replace("*", " * "))
    else:
        name, other = rng.sample(_NAMES, 2)
        values = dict(zip("abc", numbers, strict=False))
        text = rng.choice(_STORIES[kind]).format(n=name, m=other, t=rng.choice(_THINGS), **values)
    return Problem(key, f"{text} {INSTRUCTION}", steps)


def draw_sets(seed: int) -> tuple[list[Problem], list[Problem]]:
    """The train and the held-out set; no calculation occurs twice."""
    rng = random.Random(f"sets-{seed}")
    found: dict[str, Problem] = {}
    while len(found) < NUM_HELDOUT + NUM_TRAIN:
        problem = draw(rng)
        found.setdefault(problem.key, problem)
    problems = list(found.values())
    return problems[NUM_HELDOUT:], problems[:NUM_HELDOUT]


def solution(problem: Problem, rng: random.Random, *, careful: float, slip: float) -> str:
    """Write a solution the way a messy corpus would.

    Args:
        careful: share of solutions that show their working.
        slip: chance that a calculation in the working goes wrong by a digit. Without working, half of the answers are
            off: that is what people who guess write.
    """
    if rng.random() < careful:
        lines, result = [], 0
        for step in problem.steps:
            left, right = _operands_of(step, result)
            result = _value(left, step.op, right)
            if rng.random() < slip:
                result = _spoil(result, rng)
            lines.append(f"{left}{step.op}{right}={_between(left, step.op, right)}{result}")
        return "\n".join([*lines, f"Answer: {result}"])
    guess = _spoil(problem.answer, rng) if rng.random() < 0.5 else problem.answer
    return rng.choice(("", "Easy.\n", "I guess.\n", "Quick one.\n")) + f"Answer: {guess}"


def to_row(problem: Problem, index: str) -> dict[str, Any]:
    """One row in DAPO-Math's schema."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": problem.question}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(problem.answer), "style": "rule"},
        "extra_info": {"index": index},
    }


def rows(problems: list[Problem], split: str) -> list[dict[str, Any]]:
    """All rows of one set; the index names the split and the position."""
    return [to_row(problem, f"{split}-{i:05d}") for i, problem in enumerate(problems)]


def write_parquet(table: list[dict[str, Any]], path: Path) -> None:
    """Write rows as parquet; the file appears complete or not at all."""
    scratch = path.with_name(f".{path.name}.tmp")
    pq.write_table(pa.Table.from_pylist(table), scratch, compression="zstd")
    scratch.replace(path)


def _operands(kind: str, rng: random.Random) -> list[int]:
    """Operands fit for the operations: a factor has one digit, the other at most two."""
    numbers = [rng.randint(2, 9), rng.randint(3, 29)] if kind in ("*", "*+", "*-") else [rng.randint(3, 99)]
    if kind in ("+*", "-*"):
        numbers += [rng.randint(2, 9), rng.randint(3, 29)]
    while len(numbers) <= len(kind):
        numbers.append(rng.randint(2, 99))
    return numbers


def _steps(kind: str, numbers: list[int]) -> tuple[Step, ...]:
    if len(kind) == 1:
        return (Step(numbers[0], kind, numbers[1]),)
    a, b, c = numbers
    if kind[1] == "*":
        return (Step(b, "*", c), Step(a, kind[0], None))
    return (Step(a, kind[0], b), Step(None, kind[1], c))


def _operands_of(step: Step, before: int) -> tuple[int, int]:
    return (before if step.left is None else step.left, before if step.right is None else step.right)


def _follow(steps: tuple[Step, ...]) -> list[int]:
    """Results of all steps."""
    results = [0]
    for step in steps:
        left, right = _operands_of(step, results[-1])
        results.append(_value(left, step.op, right))
    return results[1:]


def _value(left: int, op: str, right: int) -> int:
    return left + right if op == "+" else left - right if op == "-" else left * right


def _between(left: int, op: str, right: int) -> str:
    """The middle of a calculation: by tens and units, as taught at school. Empty where there is nothing to split."""
    tens, units = right - right % 10, right % 10
    if not tens or not units:
        return ""
    if op == "*":
        return f"{left * tens}+{left * units}="
    return f"{left}{op}{tens}{op}{units}={_value(left, op, tens)}{op}{units}="


def _spoil(value: int, rng: random.Random) -> int:
    """A wrong answer near the right one."""
    return rng.choice([n for n in (value - 10, value - 2, value - 1, value + 1, value + 2, value + 10) if n >= 0])
