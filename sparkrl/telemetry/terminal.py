"""What a person sees while a run goes on: a progress bar, the last steps and the latest evaluation."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from sparkrl.telemetry.figures import figures_of_row, gain_text

Row = dict[str, Any]

_NUM_ROWS = 8
_DASH = "-"

_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("reward", "rollout/reward_mean", ".2f"),
    ("acc", "rollout/accuracy", ".3f"),
    ("len", "rollout/response_tokens_mean", ".0f"),
    ("k3", "agree/k3", ".0e"),
    ("dlogp", "agree/dlogp_p999", ".0e"),
    ("entr", "train/entropy", ".2f"),
    ("clip", "train/clip_fraction", ".3f"),
    ("grad", "train/grad_norm", ".2g"),
    ("roll s", "time/rollout_s", ".1f"),
    ("train s", "time/train_s", ".1f"),
    ("tok/s", "perf/rollout_tokens_per_s", ",.0f"),
)
"""Heading, metric, format. `dlogp` is the 99.9th percentile of |trainer - rollout log-prob|."""
_FIRST_TO_GO = ("grad", "clip", "entr", "dlogp", "tok/s", "roll s", "train s", "len", "reward")
"""Columns that a narrow terminal does without, in this order; step, acc and k3 always stay."""


class Terminal:
    """Live table on a terminal, plain lines elsewhere (a file, CI, a pipe)."""

    def __init__(
        self, *, title: str, num_steps: int, num_done: int, k3_limit: float, console: Console | None = None
    ) -> None:
        self._console = console or Console()
        self._k3_limit = k3_limit
        self._num_steps = num_steps
        self._num_done = num_done
        self._rows: deque[Row] = deque(maxlen=_NUM_ROWS)
        self._step_times_s: deque[float] = deque(maxlen=20)
        self._eval_lines: dict[str, Text] = {}
        self._stage: str | None = None
        self._spinner = Spinner("dots")
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[eta]}"),
            console=self._console,
            expand=True,
        )
        self._task: TaskID = self._progress.add_task(title, total=num_steps, completed=num_done, eta="")
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4)
            self._live.start()

    @contextmanager
    def stage(self, label: str, *, setup: bool = False) -> Iterator[None]:
        """Show what is being done; set-up stages leave a line with their time behind."""
        before, self._stage = self._stage, label
        started_s = time.perf_counter()
        if setup and self._live is None:
            self.print(f"{label} ...")
        try:
            yield
        finally:
            self._stage = before
        if setup and self._live is not None:
            self.print(Text(f"{label}: {time.perf_counter() - started_s:.1f} s", style="dim"))

    def step(self, row: Row) -> None:
        """Show one training step."""
        self._num_done = row["step"]
        self._rows.append(row)
        self._step_times_s.append(float(row.get("time/step_s") or 0.0))
        self._progress.update(self._task, completed=self._num_done, eta=self._eta())
        if self._live is None:
            cells = "  ".join(f"{name} {_format(row, metric, spec)}" for name, metric, spec in _COLUMNS)
            self.print(f"step {row['step']}/{self._num_steps}  {cells}  {self._eta()}")

    def eval(self, row: Row) -> None:
        """Show one evaluation beside the first one."""
        mean, low, high = (_format(row, f"eval/{name}", ".3f") for name in ("mean", "low", "high"))
        gain = gain_text(figures_of_row(row))
        line = Text(
            f"{row['name']} mean@{row['k']} after {row['step']} steps: {mean} [{low}, {high}]"
            + (f", gain {gain}" if gain else "")
        )
        self._eval_lines.setdefault("start", line)
        self._eval_lines["latest"] = line
        if self._live is None:
            self.print(line)

    def warn(self, message: str) -> None:
        """A line that stays."""
        self.print(Text(f"warning: {message}", style="yellow"))

    def print(self, line: RenderableType) -> None:
        """A line above the table."""
        self._console.print(line, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the last state on screen and give the terminal back."""
        self._stage = None
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def _eta(self) -> str:
        if not self._step_times_s:
            return ""
        ordered = sorted(self._step_times_s)
        rest_s = ordered[len(ordered) // 2] * max(self._num_steps - self._num_done, 0)
        minutes, seconds = divmod(math.ceil(rest_s), 60)
        hours, minutes = divmod(minutes, 60)
        return f"eta {hours}:{minutes:02d}:{seconds:02d}"

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._rows:
            parts.append(self._table())
        parts.extend(dict.fromkeys(line.plain for line in self._eval_lines.values()))
        parts.append(self._progress)
        if self._stage is not None:
            self._spinner.update(text=self._stage)
            parts.append(self._spinner)
        return Group(*parts)

    def _table(self) -> Table:
        """The last steps, in as many columns as the terminal is wide enough for."""
        steps = [str(row["step"]) for row in self._rows]
        cells = {name: [self._cell(row, metric, spec) for row in self._rows] for name, metric, spec in _COLUMNS}
        widths = {name: max(len(name), *(len(cell) for cell in column)) for name, column in cells.items()}
        room = self._console.width - max(len("step"), *map(len, steps))
        for name in _FIRST_TO_GO:
            if sum(1 + width for width in widths.values()) <= room:
                break
            del cells[name], widths[name]
        table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold cyan", expand=True)
        for name in ("step", *cells):
            table.add_column(name, justify="right", no_wrap=True)
        for step, *row in zip(steps, *cells.values(), strict=True):
            table.add_row(step, *row)
        return table

    def _cell(self, row: Row, metric: str, spec: str) -> Text:
        value = row.get(metric)
        too_high = metric == "agree/k3" and isinstance(value, int | float) and value > self._k3_limit
        return Text(_format(row, metric, spec), style="bold red" if too_high else "")


def _format(row: Row, metric: str, spec: str) -> str:
    value = row.get(metric)
    return format(value, spec) if isinstance(value, int | float) else _DASH
