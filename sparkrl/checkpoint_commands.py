"""`sparkrl quantize`, `dequantize`, `verify-checkpoint`, `export` and `merge`: what the command line adds to
`sparkrl.quant` and `sparkrl.lora`."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from sparkrl.errors import CheckpointError, UnknownFamilyError
from sparkrl.lora.forms import Form
from sparkrl.lora.merge import export_adapter, merge_adapter
from sparkrl.models.registry import load_config
from sparkrl.quant.convert import dequantize_checkpoint, quantize_checkpoint
from sparkrl.quant.layout import Finding
from sparkrl.quant.nvfp4 import Scales
from sparkrl.quant.resumable import Progress as Report
from sparkrl.quant.verify import verify_checkpoint
from sparkrl.telemetry import adapter_folder

_LINE_EVERY_S = 10.0
"""Seconds between progress lines where there is no terminal."""


def quantize(
    src: Path, dst: Path, *, form: str | None, scales: str, ignore: list[str] | None, shard_bytes: int
) -> None:
    """Quantize the routed experts of `src` into `dst`."""
    with _resumable("quantize") as report:
        quantize_checkpoint(
            src, dst, form=form, scales=Scales(scales), ignore=ignore, shard_bytes=shard_bytes, progress=report
        )
    print(f"wrote {dst}")


def dequantize(src: Path, dst: Path, *, shard_bytes: int) -> None:
    """Write the BF16 form of `src` into `dst`."""
    with _resumable("dequantize") as report:
        dequantize_checkpoint(src, dst, shard_bytes=shard_bytes, progress=report)
    print(f"wrote {dst}")


def export(adapter: Path, dst: Path, *, form: str, model: Path | None) -> None:
    """Write an adapter, or that of a run's newest checkpoint, in another form."""
    folder = adapter_folder(adapter)
    count = export_adapter(folder, dst, form=Form(form), model=model)
    print(f"wrote {dst}: {count} tensors of {folder} as {form}")


def merge(adapter: Path, dst: Path, *, model: Path | None, shard_bytes: int) -> None:
    """Write the BF16 checkpoint of the model with an adapter, or that of a run's newest checkpoint, added to it."""
    folder = adapter_folder(adapter)
    with _resumable("merge") as report:
        count = merge_adapter(folder, dst, model=model, shard_bytes=shard_bytes, progress=report)
    print(f"wrote {dst}: {count} weights changed by {folder}")


def verify(path: Path, *, as_json: bool) -> bool:
    """Print what is wrong with a checkpoint; True if nothing is."""
    expected, optional, unchecked = None, frozenset[str](), None
    try:
        family, config = load_config(path)
        expected = family.shapes(config)
        optional = frozenset(name for name, _ in family.tied if config.tie_word_embeddings)
    except CheckpointError as error:
        unchecked = error
    with contextlib.nullcontext() if as_json else _progress("verify") as report:
        result = verify_checkpoint(path, expected, optional=optional, progress=report)
    if unchecked:
        result.coverage = f"not checked: {unchecked.message}"
        # what keeps the folder from being opened is among the findings already
        if not isinstance(unchecked, UnknownFamilyError) and result.num_tensors:
            result.findings.append(Finding(unchecked.message, None, "config.json", unchecked.hint))
    if as_json:
        print(json.dumps(result.as_dict(), indent=2))
        return not result.findings
    if result.findings:
        table = Table(title=f"{len(result.findings)} problems in {path}", title_justify="left")
        for column in ("file", "problem", "hint"):
            table.add_column(column, overflow="fold")
        for finding in result.findings:
            table.add_row(finding.file or "-", finding.problem, finding.hint or "")
        # names hold brackets, which are no markup here; a pipe gets more than the 80 columns rich assumes
        Console(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False).print(table)
    print(
        f"{'FAIL' if result.findings else 'OK'}: {result.form}, {result.num_tensors} tensors ({result.num_quantized} "
        f"quantized), {decimal(result.bytes_read)} read, coverage by the model's config: {result.coverage}"
    )
    return not result.findings


@contextlib.contextmanager
def _progress(verb: str) -> Iterator[Report]:
    """A bar on a terminal, now and then a line elsewhere."""
    if not sys.stderr.isatty():
        last, current = time.monotonic(), ""

        def line(file: str, done: int, total: int) -> None:
            nonlocal last, current
            if done == total or file != current or time.monotonic() - last >= _LINE_EVERY_S:
                last, current = time.monotonic(), file
                print(f"{verb}: {decimal(done)} of {decimal(total)}, {file}", file=sys.stderr, flush=True)

        yield line
        return
    columns = (TextColumn(verb), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, TextColumn("{task.fields[file]}"), console=Console(stderr=True))
    task = bar.add_task("", total=None, file="")

    def draw(file: str, done: int, total: int) -> None:
        bar.start()  # only now: what is refused at once leaves no empty bar behind
        bar.update(task, completed=done, total=total, file=file)

    try:
        yield draw
    finally:
        bar.stop()


@contextlib.contextmanager
def _resumable(verb: str) -> Iterator[Report]:
    """The same for work that goes on where it was stopped."""
    try:
        with _progress(verb) as report:
            yield report
    except KeyboardInterrupt:
        print("finished shards are kept: the same command goes on after them", file=sys.stderr)
        raise
