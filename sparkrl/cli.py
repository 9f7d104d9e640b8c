"""The command line: `sparkrl train | eval | plan | data | report | doctor`.

Heavy libraries are imported by the command that needs them, so help and configuration errors come at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparkrl import __version__
from sparkrl.errors import SparkrlError

if TYPE_CHECKING:
    from sparkrl.config.schema import Config

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 on success, 1 after an error that was explained, 2 for wrong usage, 130 when interrupted.
    """
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except SparkrlError as error:
        if args.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sparkrl",
        description="GRPO for large sparse models: vLLM serves, verl trains the adapter, routes are replayed.",
    )
    parser.add_argument("--version", action="version", version=f"sparkrl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    debug = argparse.ArgumentParser(add_help=False)
    debug.add_argument("--debug", action="store_true", help="show tracebacks of errors")

    train = commands.add_parser("train", parents=[debug], help="train a recipe")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="recipe=NAME and any key of the configuration")
    train.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")
    train.add_argument("--dry-run", action="store_true", help="print the configuration and its plan, and stop")
    train.set_defaults(run=_train)

    evaluate = commands.add_parser("eval", parents=[debug], help="evaluate an adapter, or the base model")
    evaluate.add_argument("overrides", nargs="*", metavar="key=value", help="recipe=NAME, eval.k=8, ...")
    evaluate.add_argument("--adapter", type=Path, help="PEFT adapter folder, or a run folder (its newest checkpoint)")
    evaluate.set_defaults(run=_evaluate)

    plan = commands.add_parser(
        "plan", parents=[debug], help="what a recipe needs: bytes per GPU, layouts, what binds; exit code 1: too much"
    )
    plan.add_argument("overrides", nargs="*", metavar="key=value", help="recipe=NAME and any key of the configuration")
    plan.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    plan.set_defaults(run=_plan)

    data = commands.add_parser("data", parents=[debug], help="make data sets ready")
    prepare = data.add_subparsers(required=True, metavar="action").add_parser(
        "prepare", parents=[debug], help="deduplicate a published data set and write it as parquet with a manifest"
    )
    prepare.add_argument("name", metavar="NAME", help="dapo_math, aime2024 or aime2025")
    prepare.add_argument("--source", help="file, folder or Hugging Face id; without it the published data set")
    prepare.add_argument("--out", type=Path, required=True, metavar="FILE", help="parquet file to write")
    prepare.set_defaults(run=_prepare)

    report = commands.add_parser("report", parents=[debug], help="rebuild a run's report.html")
    report.add_argument("folder", type=Path, metavar="RUN", help="run folder, for example runs/quickstart/latest")
    report.set_defaults(run=_report)

    doctor = commands.add_parser("doctor", parents=[debug], help="check versions, plugin, devices, Ray, disk, W&B")
    doctor.set_defaults(run=_doctor)
    return parser


def _train(args: argparse.Namespace) -> int:
    from sparkrl.config.load import dump, load

    config = load(args.overrides, check_paths=not (args.print_config or args.dry_run))
    if args.print_config or args.dry_run:
        print(dump(config), end="")
        return _show_plan(config) if args.dry_run else 0
    from sparkrl.loop.train import train

    return 0 if asyncio.run(train(config)) else EXIT_INTERRUPTED


def _evaluate(args: argparse.Namespace) -> int:
    from sparkrl.config.load import load

    config = load(args.overrides)
    from sparkrl.loop.evaluate import evaluate_adapter

    asyncio.run(evaluate_adapter(config, args.adapter))
    return 0


def _plan(args: argparse.Namespace) -> int:
    from sparkrl.config.load import load

    return _show_plan(load(args.overrides, check_paths=False), as_json=args.json)


def _show_plan(config: Config, *, as_json: bool = False) -> int:
    from sparkrl.planning import make_plan, render

    plan = make_plan(config)
    if as_json:
        print(json.dumps(plan.as_dict(), indent=2))
    else:
        from rich.console import Console

        render(plan, Console())
    return EXIT_ERROR if plan.chosen.fits is False else 0


def _prepare(args: argparse.Namespace) -> int:
    from sparkrl.data.prepare import prepare

    print(prepare(args.name, source=args.source, out=args.out).describe())
    return 0


def _report(args: argparse.Namespace) -> int:
    from sparkrl.telemetry.report import build_report

    print(build_report(args.folder))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from sparkrl.doctor import diagnose

    return diagnose()


if __name__ == "__main__":
    sys.exit(main())
