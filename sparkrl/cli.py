"""The command line: `sparkrl train | eval | plan | data | report | dashboard | doctor`, and checkpoints:
`sparkrl quantize | dequantize | verify-checkpoint | export | merge`.

Heavy libraries are imported by the command that needs them, so help and configuration errors come at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparkrl import __version__
from sparkrl.errors import ConfigError, SparkrlError

if TYPE_CHECKING:
    from sparkrl.config.schema import Config

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 on success, 1 after an error that was explained, 2 for wrong usage, 130 when interrupted.
    """
    args = _parse(argv)
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
    except OSError as error:  # the machine's, such as a full disk behind `> plan.txt`
        if args.debug:
            raise
        print(f"error: {str(error) or repr(error)}\n\nhint: `--debug` shows where it happened", file=sys.stderr)
        return EXIT_ERROR


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; overrides may stand before and behind options, which argparse alone does not take."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(args, "overrides") or any(text.startswith("-") for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides += rest
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sparkrl",
        description="GRPO for large sparse models: vLLM serves, verl trains the adapter, routes are replayed.",
    )
    parser.add_argument("--version", action="version", version=f"sparkrl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    debug = argparse.ArgumentParser(add_help=False)
    debug.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    folder = Path(__file__).parent / "conf" / "recipe"
    recipes = f"recipes: {', '.join(sorted(file.stem for file in folder.glob('*.yaml')))}"

    train = _command(
        commands,
        "train",
        [debug],
        "train the adapter of a recipe",
        "sparkrl train recipe=quickstart loop.num_steps=50 trainer.optimizer.lr=1e-3",
        "Ctrl-C finishes the step, saves it and leaves (exit code 130); `loop.resume=RUN_FOLDER` goes on.\n" + recipes,
    )
    train.add_argument("overrides", nargs="*", metavar="key=value", help="recipe=NAME and any key of the configuration")
    train.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")
    train.add_argument("--dry-run", action="store_true", help="print the configuration and its plan, and stop")
    train.set_defaults(run=_train)

    evaluate = _command(
        commands,
        "eval",
        [debug],
        "evaluate an adapter beside the base model, or the base model alone",
        "sparkrl eval recipe=quickstart adapter=runs/quickstart/latest k=8",
        "A stopped evaluation goes on with `eval.resume=FOLDER`; no answered problem is asked again.\n" + recipes,
    )
    evaluate.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="recipe=NAME, adapter=FOLDER, k=8 and any key of the configuration",
    )
    evaluate.add_argument(
        "--adapter",
        metavar="FOLDER",
        help="PEFT adapter folder, or a run folder (its newest checkpoint); without it the base model alone",
    )
    evaluate.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")
    evaluate.set_defaults(run=_evaluate)

    plan = _command(
        commands,
        "plan",
        [debug],
        "what a recipe needs: bytes per GPU, layouts, what binds; exit code 1: too much",
        "sparkrl plan recipe=dapo_math cluster.gpu_memory_gb=192",
        "Nothing is started: neither a GPU nor weights nor data are needed.\n" + recipes,
    )
    plan.add_argument("overrides", nargs="*", metavar="key=value", help="recipe=NAME and any key of the configuration")
    plan.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    plan.set_defaults(run=_plan)

    example = "sparkrl data prepare dapo_math --source dapo.parquet --out dapo_math.parquet"
    data = _command(commands, "data", [debug], "make data sets ready", example)
    prepare = _command(
        data.add_subparsers(required=True, metavar="action"),
        "prepare",
        [debug],
        "deduplicate a published data set and write it as parquet with a manifest",
        example,
    )
    prepare.add_argument("name", metavar="NAME", help="dapo_math, aime2024 or aime2025")
    prepare.add_argument("--source", help="file, folder or Hugging Face id; without it the published data set")
    prepare.add_argument("--out", type=Path, required=True, metavar="FILE", help="parquet file to write")
    prepare.set_defaults(run=_prepare)

    _add_checkpoint_commands(commands, debug)

    report = _command(
        commands,
        "report",
        [debug],
        "rebuild the report.html of a run or an evaluation",
        "sparkrl report runs/quickstart/latest",
    )
    report.add_argument("folder", type=Path, metavar="RUN", help="its folder, for example runs/quickstart/latest")
    report.set_defaults(run=_report)

    dashboard = _command(
        commands, "dashboard", [debug], "make W&B's dashboard for a project", "sparkrl dashboard --entity ME"
    )
    dashboard.add_argument("--entity", required=True, help="W&B user or team")
    dashboard.add_argument("--project", default="sparkrl", help="W&B project (default: sparkrl)")
    dashboard.set_defaults(run=_dashboard)

    doctor = _command(
        commands,
        "doctor",
        [debug],
        "check versions, plugin, devices, Ray, disk, W&B; exit code 1: something is missing",
        "sparkrl doctor",
    )
    doctor.set_defaults(run=_doctor)
    return parser


def _command(
    commands: Commands, name: str, parents: list[argparse.ArgumentParser], meaning: str, example: str, more: str = ""
) -> argparse.ArgumentParser:
    """A command whose own help says what the list of commands says, and gives an example."""
    return commands.add_parser(
        name,
        parents=parents,
        help=meaning,
        description=f"{meaning[0].upper()}{meaning[1:]}.",
        epilog="\n".join(filter(None, (f"example: {example}", more))),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_checkpoint_commands(commands: Commands, debug: argparse.ArgumentParser) -> None:
    writing = argparse.ArgumentParser(add_help=False, parents=[debug])
    writing.add_argument("source", type=Path, metavar="SRC", help="checkpoint folder")
    writing.add_argument("--out", type=Path, required=True, metavar="DST", help="folder to make; appears when complete")
    writing.add_argument(
        "--shard-gib", type=_gib, default=5.0, metavar="N", help="size of the shards, GiB (default: 5)"
    )

    quantize = _command(
        commands,
        "quantize",
        [writing],
        "write a checkpoint with routed experts in NVFP4 or MXFP4; resumes",
        "sparkrl quantize BF16_FOLDER --out NVFP4_FOLDER",
        "Weights alone are quantized (W4A16): nothing is calibrated, and servers keep activations in 16 bits.",
    )
    quantize.add_argument(
        "--form",
        help="modelopt, modelopt-stacked, compressed-tensors, compressed-tensors-mxfp4, mxfp4 or quark (default: "
        "modelopt, stacked for Muse Spark)",
    )
    quantize.add_argument(
        "--scales", choices=("mse", "max"), default="mse", help="block scales: least squared error, or ModelOpt's rule"
    )
    quantize.add_argument(
        "--ignore",
        action="append",
        metavar="PATTERN",
        help="experts that stay as they are: glob over module names, or re:EXPRESSION; repeatable "
        "(default for Muse Spark: first and last layer)",
    )
    quantize.set_defaults(run=_quantize)

    dequantize = _command(
        commands,
        "dequantize",
        [writing],
        "write a checkpoint's BF16 form; resumes",
        "sparkrl dequantize NVFP4_FOLDER --out BF16_FOLDER",
    )
    dequantize.set_defaults(run=_dequantize)

    ours = argparse.ArgumentParser(add_help=False, parents=[debug])
    ours.add_argument(
        "--adapter", type=Path, required=True, metavar="FOLDER", help="adapter, or a run (its newest checkpoint)"
    )
    ours.add_argument("--model", type=Path, metavar="FOLDER", help="its checkpoint (default: the one that it names)")
    ours.add_argument("--out", type=Path, required=True, metavar="DST", help="folder to make; appears when complete")

    export = _command(
        commands,
        "export",
        [ours],
        "write an adapter in another form",
        "sparkrl export --adapter runs/quickstart/latest --form peft-2d --out FOLDER",
    )
    export.add_argument(
        "--form",
        choices=("peft", "peft-2d", "vllm-native"),
        default="peft",
        help="fused experts, as trained; a pair of factors for each expert; vLLM's own names for Muse Spark",
    )
    export.set_defaults(run=_export)

    merge = _command(
        commands,
        "merge",
        [ours],
        "write the model in BF16 with an adapter added; resumes",
        "sparkrl merge --adapter runs/quickstart/latest --out FOLDER",
    )
    merge.add_argument("--shard-gib", type=_gib, default=5.0, metavar="N", help="size of the shards, GiB (default: 5)")
    merge.set_defaults(run=_merge)

    verify = _command(
        commands,
        "verify-checkpoint",
        [debug],
        "read every tensor and say what is wrong; exit code 1: something is",
        "sparkrl verify-checkpoint recipes/quickstart/checkpoint",
    )
    verify.add_argument("path", type=Path, metavar="PATH", help="checkpoint folder")
    verify.add_argument("--json", action="store_true", help="print JSON")
    verify.set_defaults(run=_verify)


def _gib(text: str) -> float:
    """A size that is a number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value * 2**30 < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got: {text}")
    return value


def _train(args: argparse.Namespace) -> int:
    from sparkrl.config.load import dump, load

    config = load(args.overrides, check_paths=not (args.print_config or args.dry_run))
    if args.print_config or args.dry_run:
        print(dump(config), end="")
        return _show_plan(config) if args.dry_run else 0
    from sparkrl.loop.train import train

    return 0 if asyncio.run(train(config)) else EXIT_INTERRUPTED


def _evaluate(args: argparse.Namespace) -> int:
    from sparkrl.config.load import dump, load

    # `adapter=` and `k=` are short for what every evaluation names.
    overrides = [f"eval.{text}" if text.startswith("k=") else text for text in args.overrides]
    adapter = _one_adapter([_value(text) for text in overrides if text.startswith("adapter=")], args)
    config = load(
        [text for text in overrides if not text.startswith("adapter=")],
        check_paths=not args.print_config,
        trains=False,
    )
    if args.print_config:
        print(dump(config), end="")
        return 0
    from sparkrl.loop.evaluate import evaluate_adapter

    asyncio.run(evaluate_adapter(config, adapter))
    return 0


def _value(text: str) -> str:
    """What stands behind `=`, without the quotes that the configuration's own paths may carry."""
    value = text.partition("=")[2]
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def _one_adapter(given: list[str], args: argparse.Namespace) -> Path | None:
    """The folder that `adapter=` or `--adapter` names; None where neither does."""
    folders = given if args.adapter is None else [*given, args.adapter]
    if "" in folders:
        raise ConfigError(
            "`adapter` is empty", hint="leave it out to evaluate the base model alone; is a shell variable unset?"
        )
    if len(set(folders)) > 1:
        raise ConfigError(f"one adapter is evaluated at a time, got: {', '.join(folders)}", hint="name one of them")
    return Path(folders[0]) if folders else None


def _plan(args: argparse.Namespace) -> int:
    from sparkrl.config.load import load

    return _show_plan(load(args.overrides, check_paths=False, trains=None), as_json=args.json)


def _show_plan(config: Config, *, as_json: bool = False) -> int:
    from sparkrl.planning import make_plan, render

    plan = make_plan(config)
    if as_json:
        print(json.dumps(plan.as_dict(), indent=2))
    else:
        from rich.console import Console

        # a pipe or a file gets more than the 80 columns rich assumes
        render(plan, Console(width=None if sys.stdout.isatty() else 160))
    return EXIT_ERROR if plan.chosen.fits is False else 0


def _prepare(args: argparse.Namespace) -> int:
    from sparkrl.data.prepare import prepare

    print(prepare(args.name, source=args.source, out=args.out).describe())
    return 0


def _quantize(args: argparse.Namespace) -> int:
    from sparkrl.checkpoint_commands import quantize

    shard_bytes = int(args.shard_gib * 2**30)
    quantize(args.source, args.out, form=args.form, scales=args.scales, ignore=args.ignore, shard_bytes=shard_bytes)
    return 0


def _dequantize(args: argparse.Namespace) -> int:
    from sparkrl.checkpoint_commands import dequantize

    dequantize(args.source, args.out, shard_bytes=int(args.shard_gib * 2**30))
    return 0


def _export(args: argparse.Namespace) -> int:
    from sparkrl.checkpoint_commands import export

    export(args.adapter, args.out, form=args.form, model=args.model)
    return 0


def _merge(args: argparse.Namespace) -> int:
    from sparkrl.checkpoint_commands import merge

    merge(args.adapter, args.out, model=args.model, shard_bytes=int(args.shard_gib * 2**30))
    return 0


def _verify(args: argparse.Namespace) -> int:
    from sparkrl.checkpoint_commands import verify

    return 0 if verify(args.path, as_json=args.json) else EXIT_ERROR


def _report(args: argparse.Namespace) -> int:
    from sparkrl.telemetry import build_eval_report, build_report, is_evaluation

    print((build_eval_report if is_evaluation(args.folder) else build_report)(args.folder))
    return 0


def _dashboard(args: argparse.Namespace) -> int:
    from sparkrl.telemetry.dashboard import save_wandb_workspace

    print(save_wandb_workspace(entity=args.entity, project=args.project))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from sparkrl.doctor import diagnose

    return diagnose()


if __name__ == "__main__":
    sys.exit(main())
