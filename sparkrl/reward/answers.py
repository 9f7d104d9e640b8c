"""Finding the final answer in a response, and writing it plainly, before any rule compares it.

verl's `math_dapo` compares text and so takes some right answers for wrong ones: `12.` with the full stop of its
sentence, `007`, a typographic minus, `**Answer:** 12` in Markdown, `\\( 12 \\)`, `Answer:` with the formula on the
next line, `\\boxed{012}`, `12 cm^2`, `12 apples`; and it takes `1,2` for 12. Both sides go through `tidy` first.
Nothing here guesses: a choice of two values or a condition stays as it is, and so stays wrong.
"""

from __future__ import annotations

import re
from fractions import Fraction

WINDOW = 300
"""Characters from the end of a response in which an answer is looked for, as in DAPO."""
_MAX_DIGITS = 60
"""Longer numbers are compared as text."""

_TYPOGRAPHY = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2013\ufe63\uff0d", "-"),  # minus sign, en dash, small and full-width hyphen
        **dict.fromkeys("\u00a0\u2009\u202f", " "),  # spaces that do not break, thin spaces
        **dict.fromkeys("\u200b\u2060", ""),  # spaces of no width
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},  # full-width forms, from here on
        "\uff1a": ":",
        "\uff0c": ",",
        "\uff0e": ".",
        "\uff08": "(",
        "\uff09": ")",
        "\uff1d": "=",
    }
)
_ANSWER = re.compile(r"answer[ \t]*(?:\*\*|__)?[ \t]*:", re.IGNORECASE)
_LINES_BELOW = 3
"""How far below its `Answer:` a formula may start."""
_ONLY_DRESSING = re.compile(r"[\s$*_`]*(?:\\\[|\\\()?[\s$*_`]*")
_WRAPPERS = (("**", "**"), ("__", "__"), ("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("`", "`"))
_SPACES = re.compile(r"\\[,;:!> ]|\\q?quad\b|~")
_FONTS = re.compile(r"\\(?:math(?:rm|bf|it|sf)|text(?:bf|it)?|mbox|operatorname)\{([^{}]*)\}")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_SPACED_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?: \d{3})+")
_NUMBER = re.compile(r"([+-]?)(\d*)(?:\.(\d*))?")
_FRACTION = re.compile(r"([+-]?)\\?[dt]?frac\{([+-]?\d+)\}\{([+-]?\d+)\}|([+-]?\d+)/(\d+)")
_UNIT = re.compile(
    r"(?:\\%|%|°|\\degree|\^\\circ|\^\{\\circ\}|"
    r"(?:square|cubic)?(?:units?|(?:milli|centi|kilo)?met(?:er|re)s?|mm|cm|km|m|inch(?:es)?|in|feet|foot|ft|miles?|degrees?|"
    r"radians?|seconds?|minutes?|hours?|days?|dollars?|cents?|percent|grams?|kg)(?:\^\{?[23]\}?|²|³)?)\.?"
)
_CHANGES_VALUE = re.compile(
    r"not|and|plus|minus|times|over|divided|modulo|mod|choose|factorial|squared|cubed|root|sqrt|log|exp|sin|cos|tan|"
    r"tens?|dozens?|hundreds?|thousands?|millions?|billions?|trillions?|half|halves|quarters?|\\w+(?:ths?|rds)|"
    r"unless|when|where|with|without|else|maybe|about|less|more|below|above|infinity|undefined|none|alpha|beta|theta"
)


def find_answer(text: str, *, window: int = WINDOW) -> str | None:
    """The final answer as it was written: what follows the last `Answer:`, else the last `\\boxed{...}`.

    A line with nothing but the start of a formula goes on below. An `Answer:` with nothing after it does not count.

    Args:
        text: the whole response; only its last `window` characters are read.
    """
    tail = text[-window:].translate(_TYPOGRAPHY)
    for match in reversed(list(_ANSWER.finditer(tail))):
        lines = tail[match.end() :].split("\n")[: 1 + _LINES_BELOW]
        written = next((line.strip() for line in lines if not _ONLY_DRESSING.fullmatch(line)), None)
        if written is not None:
            return written
    return last_boxed(tail)


def last_boxed(text: str) -> str | None:
    """Content of the last `\\boxed{...}` whose braces close, braces nested to any depth."""
    start = text.rfind("\\boxed")
    while start >= 0:
        opening = text.find("{", start)
        if opening >= 0 and not text[start + len("\\boxed") : opening].strip():
            depth = 0
            for position in range(opening, len(text)):
                depth += {"{": 1, "}": -1}.get(text[position], 0)
                if depth == 0:
                    return text[opening + 1 : position].strip()
        start = text.rfind("\\boxed", 0, start)
    return None


def tidy(answer: str) -> str:
    """The same answer without dressing: Markdown, math delimiters, a final full stop, LaTeX spaces, what a number
    counts or measures, thousands separators, leading zeros. Of an equation the right side is taken, as verl does.
    Commas that are no thousands separators become semicolons: verl's rule would drop them and read `1,2` as 12.
    """
    text = _unwrap(_unwrap(answer.translate(_TYPOGRAPHY)).rsplit("=", 1)[-1])
    boxed = last_boxed(text) if text.startswith("\\boxed") else None
    text = _unwrap(text if boxed is None else boxed)
    text = _SPACES.sub(" ", text.replace(",\\!", ",").replace("{,}", ",")).strip()
    text = _without_unit(text)
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    elif _SPACED_THOUSANDS.fullmatch(text):
        text = text.replace(" ", "")
    text = _plain_number(text)
    return re.sub(r"(?<=\d)\s*,\s*(?=[-+\d])", ";", text)


def tidy_math(answer: str) -> str:
    """As `tidy`, but commas stay what they are: in sets, tuples and intervals they part elements."""
    text = answer.translate(_TYPOGRAPHY).strip()
    plain = tidy(text)
    return plain if as_number(plain) is not None else _SPACES.sub(" ", _unwrap(text)).strip()


def as_number(text: str) -> Fraction | None:
    """The exact value of a whole number, decimal or fraction of whole numbers; None for anything else."""
    compact = text.replace(" ", "")
    if len(compact) > _MAX_DIGITS:
        return None
    if match := _FRACTION.fullmatch(compact):
        sign, top, bottom = match[1] or "", match[2] or match[4], match[3] or match[5]
        return None if int(bottom) == 0 else Fraction(int(top), int(bottom)) * (-1 if sign == "-" else 1)
    match = _NUMBER.fullmatch(compact)
    if match is None or not (match[2] or match[3]):
        return None
    return Fraction(f"{match[1]}{match[2] or 0}.{match[3] or 0}")


def _unwrap(text: str) -> str:
    """Take off Markdown and math delimiters, and full stops, from the outside in."""
    before = None
    while text != before:
        before = text
        text = text.strip().removesuffix(".").rstrip() if not text.endswith("..") else text.strip()
        for left, right in _WRAPPERS:
            inside = text[len(left) : -len(right)]
            if text.startswith(left) and text.endswith(right) and len(text) > len(left + right) and left not in inside:
                text = inside.strip()
        for mark in ("**", "__"):  # half of the pair stood before `Answer:`
            if text.count(mark) == 1:
                text = text.removesuffix(mark).removeprefix(mark).strip()
    return text


def _without_unit(text: str) -> str:
    """A number followed by a unit, or by one to three words that name what is counted, loses it. Words that change the
    value (`12 thousand`, `5 or 6`, `3 halves`) stay.
    """
    plain = _FONTS.sub(r"\1", text).replace("$", "")
    match = re.match(r"[+-]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)", plain)
    if match is None:
        return text
    rest = plain[match.end() :].strip()
    words = rest.lower().rstrip(".").split()
    counted = len(words) <= 3 and all(len(w) > 2 and w.isalpha() and not _CHANGES_VALUE.fullmatch(w) for w in words)
    return match[0] if _UNIT.fullmatch(rest.replace(" ", "")) or (words and counted) else text


def _plain_number(text: str) -> str:
    """`007` is 7, `+7` is 7, `7.0` is 7, `.50` is 0.5, `-0` is 0."""
    match = _NUMBER.fullmatch(text.replace(" ", "") if text[:1] in "+-" else text)
    if match is None or not (match[2] or match[3]) or len(text) > _MAX_DIGITS:
        return text
    whole, decimals = match[2].lstrip("0") or "0", (match[3] or "").rstrip("0")
    number = f"{whole}.{decimals}" if decimals else whole
    return f"-{number}" if match[1] == "-" and number != "0" else number
