"""The figures of evaluations, side by side: on the terminal and in a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from sparkrl.telemetry.page import grid_table
from sparkrl.types import EvalResult

Figures = Mapping[str, Any]
"""Of one evaluation: `mean`, `low`, `high`, `pass_at_k`, `maj_at_k`, ... and, over a baseline, `gain`, `gain_low`,
`gain_high`. What is missing or None is shown as a dash."""


def figures_of(result: EvalResult) -> dict[str, Any]:
    """An evaluation as flat figures."""
    plain = asdict(result)
    extra = plain.pop("extra")
    return {**plain, **extra}


def figures_of_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The same, of an evaluation row of metrics.jsonl."""
    return {name.removeprefix("eval/"): value for name, value in row.items()}


def figures_table(named: Sequence[tuple[str, Figures]]) -> Table:
    """For a terminal; fits 80 columns."""
    table = Table(box=None, pad_edge=False, header_style="bold cyan")
    table.add_column("", no_wrap=True, overflow="ellipsis", max_width=14)
    for head in _heads(named):
        table.add_column(head, justify="right", no_wrap=True)
    for name, figures in named:
        table.add_row(name, *(text for text, _ in _cells(figures)))
    return table


def figures_html(named: Sequence[tuple[str, Figures]]) -> str:
    """For a page."""
    return grid_table(
        ["", *_heads(named), "gain, paired"],
        [[(name, ""), *_cells(figures), (gain_text(figures) or "-", _verdict(figures))] for name, figures in named],
    )


def gain_text(figures: Figures) -> str | None:
    """`+0.390 [+0.351, +0.429]`, or None without a baseline."""
    if figures.get("gain") is None:
        return None
    return f"{figures['gain']:+.3f} [{figures['gain_low']:+.3f}, {figures['gain_high']:+.3f}]"


def is_clear(figures: Figures) -> int:
    """1 for a gain whose interval lies above 0, -1 for one below, 0 for neither."""
    low, high = figures.get("gain_low"), figures.get("gain_high")
    return 1 if low is not None and low > 0 else -1 if high is not None and high < 0 else 0


def _verdict(figures: Figures) -> str:
    return {1: "good", -1: "bad", 0: ""}[is_clear(figures)]


def _heads(named: Sequence[tuple[str, Figures]]) -> list[str]:
    k = named[0][1].get("k", "k") if named else "k"
    return [f"mean@{k}", "interval", f"pass@{k}", f"maj@{k}", "no answer", "cut", "tokens"]


def _cells(figures: Figures) -> list[tuple[str, str]]:
    def cell(name: str, spec: str) -> str:
        value = figures.get(name)
        return format(value, spec) if isinstance(value, int | float) else "-"

    return [
        (cell("mean", ".3f"), ""),
        (f"[{cell('low', '.3f')}, {cell('high', '.3f')}]", ""),
        (cell("pass_at_k", ".3f"), ""),
        (cell("maj_at_k", ".3f"), ""),
        (cell("extraction_failures", ".1%"), ""),
        (cell("truncated", ".1%"), ""),
        (cell("mean_tokens", ".0f"), ""),
    ]
