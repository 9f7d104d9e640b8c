"""An evaluation problem by problem: as rows, as parquet, on the terminal and in a page."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from sparkrl.errors import SparkrlError
from sparkrl.telemetry.page import grid_table
from sparkrl.types import Answer, FinishReason

ProblemRow = dict[str, Any]

_NUM_ON_SCREEN = 30
_ANSWER_WIDTH = 9


def problem_rows(answers: Sequence[Sequence[Answer]], baseline: Sequence[Sequence[Answer]] = ()) -> list[ProblemRow]:
    """One row a problem, in the order of `answers`.

    `k` responses of which `right` are right, `mean` as a fraction; `majority` is the most frequent answer (the first
    of a tie) and `votes` its count; `no_answer` and `truncated` count responses; `tokens` is their mean length;
    `baseline_mean` and `gain` are None without a baseline.
    """
    before = {row[0].problem_uid: _mean(row) for row in baseline if row}
    rows = []
    for of_problem in answers:
        first = of_problem[0]
        votes = Counter(answer.extracted for answer in of_problem if answer.extracted is not None)
        majority, count = votes.most_common(1)[0] if votes else (None, 0)
        base = before.get(first.problem_uid)
        rows.append(
            {
                "problem": first.problem_uid,
                "prompt": first.prompt,
                "answer": first.answer,
                "k": len(of_problem),
                "right": sum(answer.correct for answer in of_problem),
                "mean": _mean(of_problem),
                "baseline_mean": base,
                "gain": None if base is None else _mean(of_problem) - base,
                "majority": majority,
                "votes": count,
                "no_answer": sum(answer.extracted is None for answer in of_problem),
                "truncated": sum(answer.finish_reason == FinishReason.LENGTH.value for answer in of_problem),
                "tokens": sum(answer.tokens for answer in of_problem) / len(of_problem),
            }
        )
    return rows


def write_problems(path: Path, rows: Sequence[ProblemRow]) -> None:
    """Write the rows as parquet, whole or not at all.

    Raises:
        SparkrlError: it cannot be written (disk full, say).
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [(name, pa.string()) for name in ("problem", "prompt", "answer", "majority")]
        + [(name, pa.int32()) for name in ("k", "right", "votes", "no_answer", "truncated")]
        + [(name, pa.float64()) for name in ("mean", "baseline_mean", "gain", "tokens")]
    )
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # Parquet's text is UTF-8, which half a surrogate pair is not.
        plain = [{name: _utf8(value) for name, value in row.items()} for row in rows]
        pq.write_table(pa.Table.from_pylist(plain, schema=schema), temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise SparkrlError(f"cannot write {path}: {error.strerror or error}", hint="free disk space") from error
    finally:
        temporary.unlink(missing_ok=True)


def problem_table(rows: Sequence[ProblemRow], *, width: int) -> Table:
    """For a terminal of so many columns: every problem of a small set, else those with the fewest right responses."""
    shown = list(rows) if len(rows) <= _NUM_ON_SCREEN else sorted(rows, key=lambda row: row["mean"])[:_NUM_ON_SCREEN]
    title = None if len(shown) == len(rows) else f"the {len(shown)} hardest of {len(rows)} problems"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold cyan")
    compared = any(row["baseline_mean"] is not None for row in rows)
    figures = ("right", *(("base", "gain") if compared else ()), "none", "cut", "tokens")
    taken = 2 * _ANSWER_WIDTH + sum(max(len(name), 5) for name in figures) + 2 * (len(figures) + 2)
    rest = max(width - taken, 10)
    table.add_column("problem", no_wrap=True, overflow="ellipsis", max_width=rest)
    for name in ("answer", "said"):
        table.add_column(name, justify="right", no_wrap=True, overflow="ellipsis", max_width=_ANSWER_WIDTH)
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    for row in shown:
        gain = row["gain"]
        cells = [Text(f"{row['right']}/{row['k']}")]
        if compared:
            style = "green" if gain and gain > 0 else "red" if gain else ""
            cells += [Text("-" if gain is None else f"{row['baseline_mean']:.2f}")]
            cells += [Text("-" if gain is None else f"{gain:+.2f}", style=style)]
        table.add_row(
            Text(_one_line(row["prompt"])),
            Text(_one_line(row["answer"])),
            Text(_one_line(_or_none(row["majority"])), style="" if row["majority"] is not None else "dim"),
            *cells,
            str(row["no_answer"]),
            str(row["truncated"]),
            f"{row['tokens']:.0f}",
        )
    return table


def problem_html(rows: Sequence[ProblemRow]) -> str:
    """For a page: every problem, those with the fewest right responses first."""
    if not rows:
        return '<p class="empty">none recorded yet</p>'
    heads = ("problem", "answer", "most said", "right", "base", "gain", "no answer", "cut", "tokens")
    cells = []
    for row in sorted(rows, key=lambda row: row["mean"]):
        gain = row["gain"]
        votes = "" if row["majority"] is None else f" ({row['votes']})"
        cells.append(
            [
                (row["prompt"], ""),
                (row["answer"], ""),
                (_or_none(row["majority"]) + votes, ""),
                (f"{row['right']}/{row['k']}", ""),
                ("-" if gain is None else f"{row['baseline_mean']:.2f}", ""),
                ("-" if gain is None else f"{gain:+.2f}", "good" if gain and gain > 0 else "bad" if gain else ""),
                (str(row["no_answer"]), ""),
                (str(row["truncated"]), ""),
                (f"{row['tokens']:.0f}", ""),
            ]
        )
    is_open = " open" if len(rows) <= _NUM_ON_SCREEN else ""
    return f"<details{is_open}><summary>{len(rows)} problems</summary>{grid_table(heads, cells)}</details>"


def _mean(answers: Sequence[Answer]) -> float:
    return sum(answer.correct for answer in answers) / len(answers)


def _one_line(text: str) -> str:
    """Without line breaks, and without the control sequences by which a data set could write on the screen."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in " ".join(text.split()))


def _utf8(value: Any) -> Any:
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _or_none(answer: str | None) -> str:
    return "none" if answer is None else answer
