"""One place that the loop reports to; it fans out to the run folder, W&B and the terminal."""

from __future__ import annotations

import resource
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy as np
from rich.console import Console

from sparkrl.config.schema import Config
from sparkrl.telemetry.report import build_report
from sparkrl.telemetry.run_folder import RunFolder
from sparkrl.telemetry.samples import pick_samples
from sparkrl.telemetry.summary import build_summary, split_rows
from sparkrl.telemetry.terminal import Terminal
from sparkrl.telemetry.wandb_sink import WandbSink
from sparkrl.types import EvalResult, ScoredGroup


class RunStatus(str, Enum):
    """How a run ended."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


class Telemetry:
    """Records one run.

    `metrics.jsonl` is the record that everything else is made from: failing to write it is an error. W&B, the
    terminal and the report are views: a failure of theirs is counted, warned about once, and does not stop the run.

    `step` is the number of optimizer steps made: the first training row is 1, the evaluation before training is 0.
    """

    def __init__(self, cfg: Config, run: RunFolder, *, console: Console | None = None) -> None:
        self.setup: dict[str, Any] = {}
        """Facts and seconds of the set-up, for summary.json."""
        self.view_failures = 0
        """Failures of views other than W&B, which counts its own."""
        self._cfg = cfg
        self._run = run
        self._started_s = time.perf_counter()
        self._step_started_s = self._started_s
        self._stage_s: defaultdict[str, float] = defaultdict(float)
        self._k3_warned = False
        train_rows, _ = split_rows(run.rows("metrics"))  # not empty when a run is gone on with
        self._terminal = Terminal(
            title=cfg.recipe_name,
            num_steps=cfg.loop.num_steps,
            num_done=train_rows[-1]["step"] if train_rows else 0,
            k3_limit=cfg.telemetry.k3_limit,
            console=console,
        )
        self._wandb = WandbSink(cfg, run.path, config=run.config())
        self._terminal.print(f"run folder: {run.path} (W&B {self._wandb.mode})")

    @contextmanager
    def setup_stage(self, name: str, label: str) -> Iterator[None]:
        """Show a stage of the set-up ("starting server") and record its seconds as `setup.<name>_s`."""
        started_s = time.perf_counter()
        with self._terminal.stage(label, setup=True):
            yield
        self._step_started_s = time.perf_counter()
        self.setup[f"{name}_s"] = round(self._step_started_s - started_s, 3)

    def note_setup(self, **facts: Any) -> None:
        """Record facts of the set-up, plain values."""
        self.setup.update(facts)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage of a step; its seconds go into the next row as `time/<name>_s`. Repeats within a step add up."""
        started_s = time.perf_counter()
        try:
            with self._terminal.stage(name):
                yield
        finally:
            self._stage_s[name] += time.perf_counter() - started_s

    def log_step(
        self,
        step: int,
        metrics: dict[str, float],
        *,
        dlogp: np.ndarray | None = None,
        samples: Sequence[ScoredGroup] = (),
    ) -> None:
        """Record one training step.

        Args:
            step: optimizer steps made, this one included.
            metrics: flat figures, named as in docs/metrics.md.
            dlogp: float32 [tokens of the batch], trainer minus rollout log-probs, nats.
            samples: the step's responses; `telemetry.num_samples` of them are written down.
        Raises:
            SparkrlError: the run folder cannot be written to.
        """
        now_s = time.perf_counter()
        eval_s = self._stage_s.pop("eval", 0.0)  # belongs to an evaluation that was never logged
        times = {"time/step_s": now_s - self._step_started_s - eval_s, **self._take_times()}
        self._step_started_s = now_s
        metrics = {**metrics, **times, "perf/driver_peak_mem_gib": _peak_mem_gib()}
        if metrics.get("rollout/tokens") and metrics.get("time/rollout_s"):
            metrics["perf/rollout_tokens_per_s"] = metrics["rollout/tokens"] / metrics["time/rollout_s"]
        row = {"step": step, "kind": "train", **metrics}
        self._run.append("metrics", row)
        self._log_samples(step, "train", samples)
        self._wandb.log(step, metrics, dlogp=dlogp)
        self._view(lambda: self._terminal.step(row), "terminal")
        self._watch_k3(step, metrics.get("agree/k3"))

    def log_eval(self, result: EvalResult, groups: Sequence[ScoredGroup] = ()) -> None:
        """Record one evaluation.

        Raises:
            SparkrlError: the run folder cannot be written to.
        """
        metrics: dict[str, float] = {
            "eval/mean": result.mean,
            "eval/low": result.low,
            "eval/high": result.high,
            "eval/pass_at_k": result.pass_at_k,
            "eval/mean_tokens": result.mean_tokens,
            "eval/truncated": result.truncated,
            **{f"eval/{name}": value for name, value in result.extra.items()},
        }
        if (eval_s := self._stage_s.pop("eval", None)) is not None:
            metrics["time/eval_s"] = eval_s
            self._step_started_s += eval_s  # evaluations are no part of a step's time
        about = {"name": result.name, "k": result.k, "num_problems": result.num_problems}
        row = {"step": result.step, "kind": "eval", **about, **metrics}
        self._run.append("metrics", row)
        self._log_samples(result.step, "eval", groups)
        self._wandb.log(result.step, metrics)
        self._view(lambda: self._terminal.eval(row), "terminal")

    def finish(self, status: RunStatus) -> dict[str, Any]:
        """Write summary.json and report.html, close the views, return the summary.

        Raises:
            SparkrlError: the summary cannot be written.
        """
        try:
            summary = build_summary(
                self._run.rows("metrics"),
                recipe=self._cfg.recipe_name,
                seed=self._cfg.seed,
                wall_s=time.perf_counter() - self._started_s,
                setup=self.setup,
            )
            self._run.write_summary(summary)
            self._view(lambda: build_report(self._run.path), "report")
        finally:
            self._wandb.finish(failed=status is RunStatus.FAILED)
            self._terminal.close()
        self._terminal.print(f"{status.value}: {self._run.path / 'report.html'}")
        if status is not RunStatus.FINISHED and (saved := self._run.checkpoints()):
            self._terminal.print(f"to go on after step {saved[-1][0]}: loop.resume={self._run.path}")
        return summary

    def _take_times(self) -> dict[str, float]:
        times = {f"time/{name}_s": seconds for name, seconds in self._stage_s.items()}
        self._stage_s.clear()
        return times

    def _log_samples(self, step: int, kind: str, groups: Sequence[ScoredGroup]) -> None:
        samples = pick_samples(groups, step=step, kind=kind, num_samples=self._cfg.telemetry.num_samples)
        for sample in samples:
            self._run.append("samples", sample)
        self._wandb.log_samples(step, kind, samples)

    def _watch_k3(self, step: int, k3: float | None) -> None:
        limit = self._cfg.telemetry.k3_limit
        if k3 is None or k3 <= limit or self._k3_warned:
            return
        self._k3_warned = True
        self._terminal.warn(
            f"k3 between trainer and rollout is {k3:.1e} at step {step}, above `telemetry.k3_limit` ({limit:g}): "
            "the two compute different policies. Later steps above it are marked in the table."
        )

    def _view(self, call: Callable[[], object], name: str) -> None:
        try:
            call()
        except Exception as error:  # a view must not stop a run
            self.view_failures += 1
            if self.view_failures == 1:
                warnings.warn(f"the {name} failed: {type(error).__name__}: {error}. The run goes on.", stacklevel=3)


def _peak_mem_gib() -> float:
    """Peak resident memory of this process, GiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # bytes there, KiB elsewhere
