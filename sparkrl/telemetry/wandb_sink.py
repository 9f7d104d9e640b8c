"""Weights & Biases. It watches a run and must never stop one: after its first failure it is given up with a warning."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sparkrl.config.schema import Config, WandbMode
from sparkrl.telemetry.samples import Sample

Mode = Literal["online", "offline", "disabled"]

_MAX_FAILURES = 3
_INIT_TIMEOUT_S = 60.0
_NUM_BINS = 64
_BEST = {
    "eval/mean": "max",
    "rollout/accuracy": "max",
    "rollout/reward_mean": "max",
    "agree/k3": "max",
    "agree/dlogp_p999": "max",
    "agree/route_agreement": "min",
}


class WandbSink:
    """One W&B run. Every method returns at once when W&B is off or was given up."""

    def __init__(self, cfg: Config, folder: Path, *, config: dict[str, Any]) -> None:
        """
        Args:
            cfg: mode, project, names.
            folder: the run folder; offline data goes into `<folder>/wandb`.
            config: resolved configuration as plain values.
        """
        self.failures = 0
        """Calls of W&B that failed."""
        self._run: Any = None
        self.mode: Mode = self._resolve_mode(cfg.telemetry.wandb)
        """`online`, `offline` or `disabled`."""
        if self.mode != "disabled":
            self._guard(lambda: self._init(cfg, folder, config), "start")

    def log(self, step: int, metrics: dict[str, Any], *, dlogp: np.ndarray | None = None) -> None:
        """Metrics of one step, and the histogram of trainer minus rollout log-probs (float [tokens], nats)."""

        def send() -> None:
            import wandb

            values = {name: value for name, value in metrics.items() if value is not None}
            if dlogp is not None and (finite := dlogp[np.isfinite(dlogp)]).size:
                values["agree/dlogp"] = wandb.Histogram(np_histogram=np.histogram(finite, bins=_NUM_BINS))
            self._run.log({"step": step, **values})

        self._guard(send, "log")

    def log_samples(self, step: int, kind: str, samples: Sequence[Sample]) -> None:
        """A table of sample responses."""

        def send() -> None:
            import wandb

            columns = list(samples[0])
            table = wandb.Table(columns=[*columns], data=[[row[name] for name in columns] for row in samples])
            self._run.log({"step": step, f"samples/{kind}": table})

        if samples:
            self._guard(send, "log samples")

    def finish(self, *, failed: bool) -> None:
        """Flush and close."""

        def close() -> None:
            run, self._run = self._run, None
            run.finish(exit_code=1 if failed else 0)

        self._guard(close, "finish")

    def _init(self, cfg: Config, folder: Path, config: dict[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=cfg.telemetry.project,
            name=f"{cfg.recipe_name}-{folder.name}",
            group=cfg.recipe_name,
            dir=str(folder),
            mode=self.mode,
            config=config,
            settings=wandb.Settings(silent=True, console="off", init_timeout=_INIT_TIMEOUT_S),
        )
        self._run.define_metric("step")
        for name in ("*", *_BEST):
            best = {"summary": f"{_BEST[name]},last"} if name in _BEST else {}
            self._run.define_metric(name, step_metric="step", **best)

    def _guard(self, call: Callable[[], None], what: str) -> None:
        """Run one call of W&B; its failure costs a warning, and W&B itself after a few."""
        if self._run is None and what != "start":
            return
        try:
            call()
        except Exception as error:  # W&B must never stop a run, and raises dozens of types
            self.failures += 1
            if self.failures == 1:
                warnings.warn(f"W&B could not {what}: {error}. The run goes on without it.", stacklevel=3)
            if what == "start" or self.failures >= _MAX_FAILURES:
                self._run, self.mode = None, "disabled"

    def _resolve_mode(self, mode: WandbMode) -> Mode:
        if mode is WandbMode.auto:
            return "online" if has_key() else "offline"
        modes: dict[WandbMode, Mode] = {WandbMode.online: "online", WandbMode.offline: "offline"}
        return modes.get(mode, "disabled")


def has_key() -> bool:
    """Whether W&B would find a key by itself, in the environment or in netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        import wandb
        from wandb.sdk.lib import wbauth

        return bool(wbauth.read_netrc_auth(host=wandb.Settings().base_url))
    except Exception:  # not part of W&B's public interface; without it, offline is the safe answer
        return False
