"""Weights & Biases. It watches a run and must never stop or slow one: without a network it writes to disk."""

from __future__ import annotations

import netrc
import os
import socket
import threading
import urllib.request
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np
import psutil

from sparkrl.config.schema import Config, WandbMode
from sparkrl.telemetry.histograms import Histogram
from sparkrl.telemetry.samples import Sample
from sparkrl.telemetry.sinks import BEST, NAMESPACES, Guard

Mode = Literal["online", "offline", "disabled"]

_CONNECT_TIMEOUT_S = 5.0
_GRACE_S = 5.0
"""Added to W&B's own time-out before its process is ended."""
_ALERT_EVERY_S = 3600
_SERVICE = "wandb-core"
_PUBLIC_HOST = "api.wandb.ai"


class WandbSink:
    """One W&B run, the same one when a run folder is gone on with."""

    def __init__(
        self, cfg: Config, folder: Path, *, config: dict[str, Any], run_id: str, job_type: str = "train"
    ) -> None:
        """
        Args:
            cfg: mode, project, names.
            folder: the run folder; data goes into `<folder>/wandb`.
            config: resolved configuration as plain values.
            run_id: of the W&B run; one that exists is gone on with.
        """
        self._guard = Guard("W&B")
        self._timeout_s = cfg.telemetry.wandb_timeout_s
        self._run: Any = None
        self.mode: Mode = _resolve_mode(cfg.telemetry.wandb)
        """`online`, `offline` or `disabled`."""
        if self.mode == "disabled":
            return
        start = {
            "project": cfg.telemetry.project,
            "name": f"{cfg.recipe_name}-{folder.name}",
            "group": cfg.recipe_name,
            "job_type": job_type,
            "dir": str(folder),
            "config": config,
            "id": run_id,
            "resume": "allow",
        }
        if self.mode == "online":
            self._start_online(start)
        if self.mode == "offline" and not self._guard(lambda: self._init(start, folder), "start"):
            self._run, self.mode = None, "disabled"

    @property
    def failures(self) -> int:
        """Calls of W&B that failed."""
        return self._guard.failures

    def log(self, step: int, metrics: Mapping[str, Any], histograms: Sequence[Histogram] = ()) -> None:
        """Metrics and histograms of one step."""

        def send() -> None:
            import wandb

            values = {name: value for name, value in metrics.items() if value is not None}
            for one in histograms:
                values[one.name] = wandb.Histogram(np_histogram=(np.array(one.counts), np.array(one.edges)))
            self._run.log({"step": step, **values})

        self._send(send, "log")

    def log_table(self, step: int, name: str, rows: Sequence[Sample]) -> None:
        """A table, for example of sample responses."""

        def send() -> None:
            import wandb

            columns = list(rows[0])
            table = wandb.Table(columns=[*columns], data=[[row[column] for column in columns] for row in rows])
            self._run.log({"step": step, name: table})

        if rows:
            self._send(send, f"log {name}")

    def alert(self, title: str, text: str) -> None:
        """Sent by mail or chat, as the account's settings say; one of a title an hour."""
        self._send(lambda: self._run.alert(title=title, text=text, level="WARN", wait_duration=_ALERT_EVERY_S), "alert")

    def finish(self, *, failed: bool) -> None:
        """Flush and close, in bounded time: what is not uploaded by then stays on disk for `wandb sync`."""

        def close() -> None:
            run, self._run = self._run, None
            errors: list[Exception] = []

            def end() -> None:
                try:
                    run.finish(exit_code=1 if failed else 0)
                except Exception as error:  # border: raised below, in the thread that waits
                    errors.append(error)

            closing = threading.Thread(target=end, daemon=True)
            closing.start()
            closing.join(self._timeout_s + _GRACE_S)
            if closing.is_alive():
                # A request that a silent server never answers holds W&B back beyond its own time-out.
                _end_service()
                closing.join(_GRACE_S)
                warnings.warn(
                    f"W&B did not end within {self._timeout_s:.0f} s; `wandb sync` uploads the rest.", stacklevel=4
                )
            elif errors:
                raise errors[0]

        self._send(close, "finish")

    def _send(self, call: Any, what: str) -> None:
        if self._run is None:
            return
        self._guard(call, what)
        if self._guard.given_up:
            self._run, self.mode = None, "disabled"

    def _start_online(self, start: dict[str, Any]) -> None:
        """Start with uploads; where that fails within bounds, `mode` falls back to offline."""
        why = _unreachable() if has_key() else "there is no key"
        if why is None:
            try:
                self._init(start, Path(start["dir"]))
            except Exception as error:  # border: W&B raises dozens of types
                why = str(error).splitlines()[0]
        if why is not None:
            warnings.warn(f"W&B is not reached: {why}. Written offline; `wandb sync` uploads it later.", stacklevel=4)
            self._run, self.mode = None, "offline"

    def _init(self, start: dict[str, Any], folder: Path) -> None:
        import wandb

        settings = wandb.Settings(
            silent=True, console="off", init_timeout=self._timeout_s, finish_timeout=self._timeout_s
        )
        with _environment(folder):
            self._run = wandb.init(**start, mode=self.mode, settings=settings)
        self._run.define_metric("step", hidden=True)
        for namespace in NAMESPACES:
            self._run.define_metric(f"{namespace}/*", step_metric="step")
        for name, best in BEST.items():
            self._run.define_metric(name, step_metric="step", summary=f"{best},last")


def has_key() -> bool:
    """Whether W&B would find a key by itself: in the environment, its settings or netrc."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        settings = _settings()
        if settings.api_key:
            return True
        hosts = {urlsplit(str(settings.base_url)).netloc}
        if not os.environ.get("WANDB_BASE_URL"):
            hosts.add(_PUBLIC_HOST)
        entries = netrc.netrc(_netrc_file())
    except Exception:  # no file, an unreadable one, settings that do not validate: offline is the safe answer
        return False
    return any((found := entries.authenticators(host)) and found[2] for host in hosts)


def _settings() -> Any:
    """W&B's settings, environment and settings files included."""
    import wandb

    with _environment():
        return wandb.setup(wandb.Settings(silent=True)).settings


def _netrc_file() -> Path:
    if given := os.environ.get("NETRC"):
        return Path(given).expanduser()
    home = Path.home()
    return next((home / name for name in (".netrc", "_netrc") if (home / name).is_file()), home / ".netrc")


def _resolve_mode(mode: WandbMode) -> Mode:
    if os.environ.get("WANDB_MODE", "") in ("disabled", "offline") and mode in (WandbMode.auto, WandbMode.online):
        return "offline" if os.environ["WANDB_MODE"] == "offline" else "disabled"
    if mode is WandbMode.auto:
        return "online" if has_key() else "offline"
    modes: dict[WandbMode, Mode] = {WandbMode.online: "online", WandbMode.offline: "offline"}
    return modes.get(mode, "disabled")


def _unreachable() -> str | None:
    """Why the W&B server does not answer a connection, or None. Without it W&B would retry until its own time-out."""
    url = urlsplit(str(_settings().base_url))
    host = url.hostname or ""
    if url.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
        return None  # only the proxy can tell
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return f"{host}:{port}: {error}"
    return None


def _end_service() -> None:
    """End W&B's own process, which has written everything to disk long before."""
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if child.name().startswith(_SERVICE):
                child.kill()


@contextmanager
def _environment(folder: Path | None = None) -> Iterator[None]:
    """W&B's variables as it can take them: an empty one (`WANDB_MODE=`) is unset to people and refused by W&B.

    Args:
        folder: of the run. Without HOME, W&B's own process finds no place for its log, and prints it: it goes here.
    """
    empty = [name for name, value in os.environ.items() if name.startswith("WANDB_") and not value]
    for name in empty:
        del os.environ[name]
    cache = None
    if folder is not None and not (os.environ.get("HOME") or os.environ.get("XDG_CACHE_HOME")):
        os.environ["XDG_CACHE_HOME"] = cache = str(folder / "wandb" / "cache")
    try:
        yield
    finally:
        if cache is not None:
            del os.environ["XDG_CACHE_HOME"]
        os.environ.update(dict.fromkeys(empty, ""))
