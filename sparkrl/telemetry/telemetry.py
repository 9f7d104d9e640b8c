"""One place that the loop reports to; it fans out to the run folder, W&B and the terminal."""

from __future__ import annotations

import resource
import shutil
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy as np
import psutil
from rich.console import Console

from sparkrl.config.schema import Config
from sparkrl.telemetry.histograms import mismatch_histograms
from sparkrl.telemetry.problems import problem_rows
from sparkrl.telemetry.report import build_report
from sparkrl.telemetry.run_folder import RunFolder
from sparkrl.telemetry.samples import Sample, pick_answers, pick_samples
from sparkrl.telemetry.sinks import Sink
from sparkrl.telemetry.summary import build_summary, split_rows
from sparkrl.telemetry.tensorboard_sink import TensorboardSink
from sparkrl.telemetry.terminal import Terminal
from sparkrl.telemetry.wandb_sink import WandbSink
from sparkrl.types import Answer, EvalResult, ScoredGroup


class RunStatus(str, Enum):
    """How a run ended."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


class Telemetry:
    """Records one run.

    `metrics.jsonl` is the record that everything else is made from: failing to write it is an error. W&B, TensorBoard,
    the terminal and the report are views: a failure of theirs is counted, warned about once, and does not stop the run.

    `step` is the number of optimizer steps made: the first training row is 1, the evaluation before training is 0.
    """

    def __init__(self, cfg: Config, run: RunFolder, *, console: Console | None = None) -> None:
        self.setup: dict[str, Any] = {}
        """Facts and seconds of the set-up, for summary.json."""
        self.view_failures = 0
        """Failures of terminal and report; W&B and TensorBoard count their own."""
        self._cfg = cfg
        self._run = run
        self._started_s = time.perf_counter()
        self._step_started_s = self._started_s
        self._stage_s: defaultdict[str, float] = defaultdict(float)
        self._k3_high = False
        train_rows, _ = split_rows(run.rows("metrics"))  # not empty when a run is gone on with
        num_done = train_rows[-1]["step"] if train_rows else 0
        self._terminal = Terminal(
            title=cfg.recipe_name,
            num_steps=cfg.loop.num_steps,
            num_done=num_done,
            k3_limit=cfg.telemetry.k3_limit,
            console=console,
        )
        wandb = WandbSink(cfg, run.path, config=run.config(), run_id=run.wandb_id())
        self._sinks: list[Sink] = [wandb]
        if cfg.telemetry.tensorboard:
            self._sinks.append(TensorboardSink(run.path, config=run.config_text(), first_step=num_done))
        self._terminal.print(f"run folder: {run.path} (W&B {wandb.mode})")
        psutil.cpu_percent()  # the first call only starts the clock

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

    def warn(self, message: str) -> None:
        """Tell the user of something that does not stop the run."""
        self._view(lambda: self._terminal.warn(message), "terminal")

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
        metrics = {**metrics, **times, "perf/driver_peak_mem_gib": _peak_mem_gib(), **self._system_metrics()}
        if metrics.get("rollout/tokens") and metrics.get("time/rollout_s"):
            metrics["perf/rollout_tokens_per_s"] = metrics["rollout/tokens"] / metrics["time/rollout_s"]
        row = {"step": step, "kind": "train", **metrics}
        self._run.append("metrics", row)
        self._log_samples(step, "train", pick_samples(samples, step=step, kind="train", num_samples=self._num_samples))
        histograms = mismatch_histograms(dlogp) if dlogp is not None else ()
        for histogram in histograms:
            self._run.append("histograms", histogram.as_row(step))
        for sink in self._sinks:
            sink.log(step, metrics, histograms)
        self._view(lambda: self._terminal.step(row), "terminal")
        self._watch_k3(step, metrics.get("agree/k3"))

    def log_eval(
        self,
        result: EvalResult,
        answers: Sequence[Sequence[Answer]] = (),
        baseline: Sequence[Sequence[Answer]] = (),
    ) -> None:
        """Record one evaluation.

        Args:
            answers: every answer, by problem; all of them are written down.
            baseline: those of the zero adapter, for the table of problems.
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
        if answers:
            self._run.write_answers(result.step, answers)
        about = {"name": result.name, "k": result.k, "num_problems": result.num_problems}
        row = {"step": result.step, "kind": "eval", **about, **metrics}
        self._run.append("metrics", row)
        chosen = pick_answers(answers, step=result.step, kind="eval", num_samples=self._num_samples)
        self._log_samples(result.step, "eval", chosen)
        problems = problem_rows(answers, baseline)
        for sink in self._sinks:
            sink.log(result.step, metrics)
            sink.log_table(result.step, "problems/eval", problems)
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
            for sink in self._sinks:
                sink.finish(failed=status is RunStatus.FAILED)
            self._terminal.close()
        self._terminal.print(f"{status.value}: {self._run.path / 'report.html'}")
        if status is not RunStatus.FINISHED and (saved := self._run.checkpoints()):
            self._terminal.print(f"to go on after step {saved[-1][0]}: loop.resume={self._run.path}")
        return summary

    def _take_times(self) -> dict[str, float]:
        times = {f"time/{name}_s": seconds for name, seconds in self._stage_s.items()}
        self._stage_s.clear()
        return times

    @property
    def _num_samples(self) -> int:
        return self._cfg.telemetry.num_samples

    def _log_samples(self, step: int, kind: str, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self._run.append("samples", sample)
        for sink in self._sinks:
            sink.log_table(step, f"samples/{kind}", samples)

    def _watch_k3(self, step: int, k3: float | None) -> None:
        """Warn when k3 passes its limit, once for as long as it stays above it."""
        limit = self._cfg.telemetry.k3_limit
        if k3 is None:
            return
        was_high, self._k3_high = self._k3_high, not k3 <= limit  # nan is above too
        if was_high or not self._k3_high:
            return
        text = (
            f"k3 between trainer and rollout is {k3:.1e} at step {step}, above `telemetry.k3_limit` ({limit:g}): "
            "the two compute different policies. Later steps above it are marked in the table."
        )
        self._terminal.warn(text)
        for sink in self._sinks:
            sink.alert("k3 above its limit", f"{self._run.path.name}: {text}")

    def _system_metrics(self) -> dict[str, float]:
        """Of the host that the driver runs on."""
        return {
            "system/cpu_percent": psutil.cpu_percent(),
            "system/mem_used_gib": psutil.virtual_memory().used / 2**30,
            "system/disk_free_gib": shutil.disk_usage(self._run.path).free / 2**30,
        }

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
