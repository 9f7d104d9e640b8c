"""Command line of the benchmarks."""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import time
from pathlib import Path

import benchmarks
from sparkrl.threads import openmp_environment

NAMES = ("expert_lora", "expert_lora_growth", "dequantize", "load", "packed_base", "swap", "rollout", "train_step")
ROOT = Path(__file__).resolve().parent.parent
MARKDOWN = ROOT / "docs" / "benchmarks.md"


def main() -> None:
    """Run the benchmarks named, or all, one after the other; print tables and write `runs/bench/<time>.json`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=benchmarks.__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one or more of: {', '.join(NAMES)}; default all")
    parser.add_argument("--markdown", action="store_true", help="also renew the tables in docs/benchmarks.md")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in NAMES]:
        parser.error(f"unknown benchmark: {unknown[0]} (there are: {', '.join(NAMES)})")
    load_before = os.getloadavg()[0]
    # before torch is imported: threads wait for each other as they do in training
    for variable, value in openmp_environment(os.cpu_count() or 1).items():
        os.environ.setdefault(variable, value)

    from rich.console import Console

    from benchmarks.figures import Figure, environment, table, write_json, write_markdown

    console = Console()
    if load_before > 0.5:
        console.print(f"[yellow]The machine is busy (load average {load_before:.1f}); figures will be worse and noisy.")
    figures: list[Figure] = []
    sizes: dict[str, str] = {}
    for name in arguments.names or NAMES:
        began = time.perf_counter()
        with console.status(f"measuring {name}"):
            module = importlib.import_module(f"benchmarks.{name}")
            found = module.run()
        figures += found
        sizes[name] = module.SIZES
        console.print(table(name, module.SIZES, found))
        console.print(f"{name} took {time.perf_counter() - began:.0f} s\n")
    now = datetime.datetime.now()
    about = {"date": f"{now:%Y-%m-%d %H:%M}"} | environment(load_before)
    path = ROOT / "runs" / "bench" / f"{now:%Y%m%d-%H%M%S}.json"
    write_json(path, figures, sizes, about)
    if arguments.markdown:
        write_markdown(MARKDOWN, figures, sizes, about)
    missed = sum(figure.met is False for figure in figures)
    targets = sum(figure.met is not None for figure in figures)
    console.print(f"{targets - missed} of {targets} targets met; written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
