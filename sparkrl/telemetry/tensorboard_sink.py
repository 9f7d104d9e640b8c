"""TensorBoard: the same figures, histograms and samples as W&B, in files under `<run>/tensorboard`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparkrl.telemetry.dashboard import load_dashboard, tensorboard_layout
from sparkrl.telemetry.histograms import Histogram
from sparkrl.telemetry.samples import Sample
from sparkrl.telemetry.sinks import Guard

FOLDER = "tensorboard"


class TensorboardSink:
    """One TensorBoard log, of the same run when a run folder is gone on with."""

    def __init__(self, folder: Path, *, config: str, first_step: int = 0) -> None:
        """
        Args:
            folder: the run folder.
            config: resolved configuration as YAML.
            first_step: steps made so far; TensorBoard drops what an earlier log says about later ones.
        """
        self._guard = Guard("TensorBoard")
        self._writer: Any = None
        self._guard(lambda: self._open(folder, config, first_step), "start")

    @property
    def failures(self) -> int:
        """Calls that failed."""
        return self._guard.failures

    def log(self, step: int, metrics: Mapping[str, Any], histograms: Sequence[Histogram] = ()) -> None:
        """Metrics and histograms of one step."""

        def send() -> None:
            for name, value in metrics.items():
                if isinstance(value, int | float):
                    self._writer.add_scalar(name, value, step)
            for one in histograms:
                self._writer.add_histogram_raw(one.name, global_step=step, **_raw(one))
            self._writer.flush()

        self._send(send, "log")

    def log_table(self, step: int, name: str, rows: Sequence[Sample]) -> None:
        """Rows as text, each cell indented so that nothing in it is read as Markdown."""

        def send() -> None:
            blocks = ["\n".join(f"    {key}: {line}" for key, value in row.items() for line in _lines(value))
                      for row in rows]  # fmt: skip
            self._writer.add_text(name, "\n\n---\n\n".join(blocks), step)

        if rows:
            self._send(send, f"log {name}")

    def alert(self, title: str, text: str) -> None:
        """A note among the texts."""
        self._send(lambda: self._writer.add_text("alerts", f"**{title}**: {text}"), "alert")

    def finish(self, *, failed: bool) -> None:
        """Flush and close."""
        self._send(lambda: self._writer.close(), "finish")
        self._writer = None

    def _send(self, call: Callable[[], None], what: str) -> None:
        if self._writer is not None:
            self._guard(call, what)

    def _open(self, folder: Path, config: str, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / FOLDER), purge_step=first_step + 1 if first_step else None)
        self._writer.add_text("config", "\n".join(f"    {line}" for line in config.splitlines()), first_step)
        self._writer.add_custom_scalars(tensorboard_layout(load_dashboard()))


def _lines(value: Any) -> list[str]:
    return str(value).splitlines() or [""]


def _raw(one: Histogram) -> dict[str, Any]:
    """Arguments of `add_histogram_raw`; the sums take every value for the middle of its bin."""
    counts, edges = np.array(one.counts, dtype=np.float64), np.array(one.edges)
    middles = (edges[:-1] + edges[1:]) / 2
    return {
        "min": float(edges[0]),
        "max": float(edges[-1]),
        "num": int(counts.sum()),
        "sum": float((counts * middles).sum()),
        "sum_squares": float((counts * middles**2).sum()),
        "bucket_limits": edges[1:].tolist(),
        "bucket_counts": counts.tolist(),
    }
