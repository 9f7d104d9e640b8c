"""What shows a run: W&B and TensorBoard, as equals beside the run folder's JSON lines. A sink must never stop a run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from sparkrl.telemetry.histograms import Histogram
from sparkrl.telemetry.samples import Sample

MAX_FAILURES = 3

NAMESPACES = ("agree", "train", "correct", "rollout", "reward", "eval", "time", "perf", "system", "samples", "problems")
"""First part of every metric's name; all are drawn over `step`."""

BEST = {
    "eval/mean": "max",
    "eval/gain": "max",
    "eval/pass_at_k": "max",
    "eval/maj_at_k": "max",
    "rollout/accuracy": "max",
    "rollout/reward_mean": "max",
    "rollout/extraction_failures": "min",
    "agree/k3": "max",
    "agree/dlogp_p999": "max",
    "agree/dlogp_max": "max",
    "agree/route_agreement": "min",
    "train/clip_fraction": "max",
    "perf/train_peak_mem_gib": "max",
    "reward/timeouts": "max",
}
"""Metrics whose extreme over the run says more than their last value: the best of a score, the worst of a fault."""


class Sink(Protocol):
    """One place that metrics are sent to. Every method returns at once when it is off or was given up."""

    @property
    def failures(self) -> int:
        """Calls that failed."""
        ...

    def log(self, step: int, metrics: Mapping[str, Any], histograms: Sequence[Histogram] = ()) -> None: ...

    def log_table(self, step: int, name: str, rows: Sequence[Sample]) -> None:
        """Rows that all have the same keys."""
        ...

    def alert(self, title: str, text: str) -> None:
        """Something a person should look at."""
        ...

    def finish(self, *, failed: bool) -> None: ...


class Guard:
    """Runs calls of a library that must not stop the run: the first failure costs a warning, a few the library."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.failures = 0
        self.given_up = False

    def __call__(self, call: Callable[[], None], what: str) -> bool:
        """Whether the call was made and succeeded."""
        if self.given_up:
            return False
        try:
            call()
        except Exception as error:  # border: such libraries raise dozens of types
            self.failures += 1
            if self.failures == 1:
                warnings.warn(f"{self.name} could not {what}: {error}. The run goes on without it.", stacklevel=4)
            self.given_up = self.failures >= MAX_FAILURES
            return False
        return True
