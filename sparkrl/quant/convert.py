"""Quantizing and dequantizing whole checkpoints, a few rows or one expert at a time.

Shape letters: E experts, O output rows, W input width, P parts of the rows (gate and up, or one).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparkrl.errors import CheckpointError
from sparkrl.quant import mxfp4, nvfp4
from sparkrl.quant.checkpoint import INDEX, CheckpointReader
from sparkrl.quant.declare import quantization_config
from sparkrl.quant.form import FORMS, Names, is_ignored, read_json, refuse_foreign_link
from sparkrl.quant.layout import GPT_OSS, Logical
from sparkrl.quant.nvfp4 import Scales
from sparkrl.quant.resumable import Piece, Progress, write_resumably

Edit = Callable[[int, Tensor], Tensor]
"""First row and rows of a tensor to the rows that take their place."""
SHARD_BYTES = 5 << 30
"""Default size of a shard."""
_CHUNK_BYTES = 32 << 20
"""Bytes of a tensor held at once (but at least one row of it, for routed experts one expert)."""
_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
_COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model")
_REPLACED = ("config.json", "hf_quant_config.json", INDEX)
_STACKED_FORMS = ("modelopt-stacked", "mxfp4")
_MUSE_SPARK = ("muse_spark", "muse_spark_text")


def quantize_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    form: str | None = None,
    scales: Scales = Scales.mse,
    ignore: Sequence[str] | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Write a checkpoint whose routed experts are in four bits; everything else is copied.

    Global scales are powers of two, so that the BF16 dequantization of every weight is exact. What is written is W4A16:
    nothing is calibrated on data, and the config declares that activations stay in 16 bits. The input scales of
    ModelOpt's forms are 1, which changes nothing in a server that multiplies by them without looking.

    Args:
        src: a checkpoint with plain weights.
        dst: folder to make; must not exist yet. It appears complete or not at all, and an interrupted run is finished
            by running it again.
        form: key of `form.FORMS`; None is ModelOpt's, stacked for Muse Spark and per expert for other families.
        scales: how block scales are chosen.
        ignore: patterns of experts that stay as they are; None leaves out the first and last layer's for Muse Spark, as
            it is published, and none for other families.
        shard_bytes: size of the shards.
        progress: told about every piece.
    Raises:
        CheckpointError: `src` is unusable or quantized already, has no routed experts, or does not fit the form;
            anything that keeps `dst` from being written.
    """
    reader = CheckpointReader(src)
    model_type = str(reader.config["model_type"])
    if form is None:
        form = "modelopt-stacked" if model_type in _MUSE_SPARK else "modelopt"
    if form not in FORMS:
        raise CheckpointError(f"unknown form `{form}`", hint=f"known forms: {', '.join(FORMS)}")
    if reader.scheme:
        raise CheckpointError(
            f"{src} is quantized already: {reader.scheme.title}", hint="`sparkrl dequantize` it first"
        )
    if model_type == GPT_OSS:
        raise CheckpointError(f"{src} is a gpt-oss model", hint="those are published in MXFP4; quantize other families")
    experts = [name for name in reader.names if _EXPERTS.search(name)]
    if ignore is None:
        ignore = _default_ignore(experts, model_type)
    elif unmatched := [pattern for pattern in ignore if not any(is_ignored(name, [pattern]) for name in reader.names)]:
        raise CheckpointError(
            f"no module of {src} matches `{unmatched[0]}`, which is to stay as it is",
            hint=f"a layer's experts are one module, for example `{experts[0].rsplit('.', 1)[0]}`" if experts else None,
        )
    chosen = {name for name in experts if not is_ignored(name, list(ignore))}
    if not chosen:
        found = f"all {len(experts)} are ignored" if experts else "none are there"
        raise CheckpointError(
            f"{src} has no routed experts to quantize: {found}",
            hint="only `...experts.gate_up_proj` and `...experts.down_proj` are quantized, stacked or an expert each",
        )
    pieces: list[Piece] = []
    for name in reader.names_in_file_order():
        if name in chosen:
            pieces += _quantized(reader, name, form, scales)
        else:
            pieces += _copied(reader, name)
    config = read_json(reader.path / "config.json")
    plain = [n.rsplit(".", 1)[0] for n in reader.names if n not in chosen and _is_linear(reader, n)]
    config["quantization_config"] = quantization_config(form, list(dict.fromkeys(plain)), model_type)
    identity = {"form": form, "scales": scales.value, "ignore": sorted(ignore), "source": _source(reader)}
    write_resumably(
        Path(dst), pieces, _files(reader, config), identity=identity, shard_bytes=shard_bytes, progress=progress
    )


def dequantize_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.bfloat16,
    edits: Mapping[str, Edit] | None = None,
    edit_identity: str = "",
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Write the plain form of a quantized checkpoint, experts stacked or one by one as they were.

    Args:
        src: the quantized checkpoint, in any form.
        dst: folder to make; must not exist yet. It appears complete or not at all, and an interrupted run is finished
            by running it again.
        dtype: type of the tensors that were quantized or are edited; all others keep theirs.
        edits: by logical name, what is to become of a tensor's rows on the way.
        edit_identity: tells one set of edits from another, so that an interrupted run is finished with the same ones.
        shard_bytes: size of the shards.
        progress: told about every piece.
    Raises:
        CheckpointError: `src` is unusable, or anything that keeps `dst` from being written.
    """
    reader, edits = CheckpointReader(src), edits or {}
    if absent := sorted(set(edits) - set(reader.names)):
        raise CheckpointError(f"{src} has no `{absent[0]}`")
    pieces: list[Piece] = []
    for name in reader.names_in_file_order():
        if reader.is_quantized(name) or name in edits:
            pieces += _plain(reader, name, dtype, edits.get(name))
        else:
            pieces += _copied(reader, name)
    config = read_json(reader.path / "config.json")
    for section in (config, config.get("text_config") or {}):
        section.pop("quantization_config", None)
    identity: dict[str, Any] = {"dtype": str(dtype), "source": _source(reader)}
    if edits:
        identity["edits"] = edit_identity
    write_resumably(
        Path(dst), pieces, _files(reader, config), identity=identity, shard_bytes=shard_bytes, progress=progress
    )


def _default_ignore(experts: list[str], model_type: str) -> list[str]:
    if model_type not in _MUSE_SPARK or not experts:
        return []
    layers = sorted(
        {name.rsplit(".", 1)[0] for name in experts}, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]
    )
    return list(dict.fromkeys([layers[0], layers[-1]]))


def _is_linear(reader: CheckpointReader, name: str) -> bool:
    if name.endswith("embed_tokens.weight"):
        return False
    return bool(_EXPERTS.search(name)) or (name.endswith(".weight") and len(reader.shape(name)) == 2)


def _copied(reader: CheckpointReader, name: str) -> Iterator[Piece]:
    """The stored tensors of a plain weight, as they are."""
    for matrix in (matrix for expert in reader.logical(name).experts for matrix in expert):
        stored = reader.stored[matrix.name]
        read = partial(reader.stored_rows, matrix.name)
        yield Piece(
            {matrix.name: (stored.dtype, stored.shape)},
            partial(_in_chunks, matrix.name, stored.shape, stored.dtype.itemsize, read),
        )


def _plain(reader: CheckpointReader, name: str, dtype: torch.dtype, edit: Edit | None = None) -> Iterator[Piece]:
    """The dequantized, and perhaps edited, tensors of a weight."""
    tensor = reader.logical(name)
    read = partial(_edited_rows, reader, name, dtype=dtype, edit=edit)
    if not tensor.per_expert:
        yield Piece({name: (dtype, tensor.shape)}, partial(_in_chunks, name, tensor.shape, dtype.itemsize, read))
        return
    for index, matrices in enumerate(tensor.experts):
        names = [_logical_name(matrix.name, tensor.first.names) for matrix in matrices]
        yield Piece(
            {n: (dtype, matrices[0].shape) for n in names},
            partial(_dequantized_expert, read, index, names),
        )


def _edited_rows(
    reader: CheckpointReader, name: str, start: int, stop: int, *, dtype: torch.dtype, edit: Edit | None
) -> Tensor:
    rows = reader.rows(name, start, stop, dtype=dtype)
    return rows if edit is None else edit(start, rows).to(dtype)


def _logical_name(stored: str, names: Names | None) -> str:
    return stored.removesuffix(names.codes) + names.logical if names else stored


def _dequantized_expert(
    read: Callable[[int, int], Tensor], index: int, names: list[str]
) -> Iterator[tuple[str, int, Tensor]]:
    value_OW = read(index, index + 1)[0]
    for part, rows in zip(names, value_OW.chunk(len(names)), strict=True):
        yield part, 0, rows


def _in_chunks(
    name: str, shape: tuple[int, ...], itemsize: int, read: Callable[[int, int], Tensor]
) -> Iterator[tuple[str, int, Tensor]]:
    if not shape:
        yield name, 0, read(0, 1)
        return
    step = max(1, _CHUNK_BYTES // max(1, itemsize * torch.Size(shape[1:]).numel()))
    for lo in range(0, shape[0], step):
        yield name, lo, read(lo, min(lo + step, shape[0]))


def _quantized(reader: CheckpointReader, name: str, form: str, scales: Scales) -> Iterator[Piece]:
    """The stored tensors of a routed expert weight in a form."""
    tensor, names = reader.logical(name), FORMS[form]
    experts, rows, width = tensor.shape
    halves = 2 if name.endswith("gate_up_proj") else 1
    if width % names.block_size:
        raise CheckpointError(
            f"`{name}` has {width} columns, no multiple of {names.block_size}, the block size of `{form}`",
            hint="leave it out with --ignore, or choose a form with smaller blocks",
        )
    if form in _STACKED_FORMS:
        specs = _specs(name, names, (experts, rows), width, (experts, 2) if halves == 2 else (experts,))
        yield Piece(specs, partial(_quantized_stack, reader, tensor, names, scales))
        return
    stack, part = name.rsplit(".", 1)
    modules = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
    for index in range(experts):
        bases = [f"{stack}.{index}.{module}" for module in modules]
        specs = {}
        for base in bases:
            specs |= _specs(base, names, (rows // halves,), width, (1,) if names.divide else ())
        yield Piece(specs, partial(_quantized_expert, reader, name, index, bases, names, scales))


def _specs(
    base: str, names: Names, rows: tuple[int, ...], width: int, scale: tuple[int, ...]
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Type and shape of the tensors of one weight; `scale` is the shape of its scale over the whole."""
    blocks = width // names.block_size
    codes = (*rows, blocks, names.block_size // 2) if names.alternate else (*rows, width // 2)
    block_type = torch.float8_e4m3fn if names.scale else torch.uint8
    specs = {base + names.codes: (torch.uint8, codes), base + names.block: (block_type, (*rows, blocks))}
    if names.scale:
        specs[base + names.scale] = (torch.float32, scale)
    if names.scale and not names.divide:
        specs[base + names.extras[0]] = (torch.float32, scale)
    return specs


def _quantized_stack(
    reader: CheckpointReader, tensor: Logical, names: Names, scales: Scales
) -> Iterator[tuple[str, int, Tensor]]:
    halves = 2 if tensor.name.endswith("gate_up_proj") else 1
    base = tensor.name
    for index in range(tensor.shape[0]):
        value_1OW = _finite(reader, tensor.name, index)
        if names.scale is None:
            packed, exponent = mxfp4.quantize(value_1OW, search=scales is Scales.mse)
            if halves == 2:
                packed, exponent = (torch.stack(t.chunk(2, dim=1), dim=2).flatten(1, 2) for t in (packed, exponent))
            yield base + names.codes, index, packed.unflatten(-1, (-1, names.block_size // 2))
            yield base + names.block, index, exponent
            continue
        _, rows, width = value_1OW.shape
        packed, block, scale = nvfp4.quantize(value_1OW.view(1, halves, rows // halves, width), scales=scales)
        scale = scale if halves == 2 else scale[:, 0]
        yield base + names.codes, index, packed.flatten(1, 2)
        yield base + names.block, index, block.flatten(1, 2)
        yield base + names.scale, index, scale
        yield base + names.extras[0], index, torch.ones_like(scale)


def _quantized_expert(
    reader: CheckpointReader, name: str, index: int, bases: list[str], names: Names, scales: Scales
) -> Iterator[tuple[str, int, Tensor]]:
    value_1OW = _finite(reader, name, index)
    if names.scale is None:
        packed, block = mxfp4.quantize(value_1OW[0], search=scales is Scales.mse)
    else:
        # gate and up share their scale: servers that fuse them keep only one
        packed, block, scale = nvfp4.quantize(value_1OW[0], scales=scales)
    for i, base in enumerate(bases):
        yield base + names.codes, 0, packed.chunk(len(bases))[i]
        yield base + names.block, 0, block.chunk(len(bases))[i]
        if names.scale:
            yield base + names.scale, 0, (1 / scale).view(1) if names.divide else scale
        if names.scale and not names.divide:
            yield base + names.extras[0], 0, torch.ones_like(scale)


def _finite(reader: CheckpointReader, name: str, index: int) -> Tensor:
    """One expert, [1, O, W]."""
    value = reader.rows(name, index, index + 1)
    if not torch.isfinite(value).all():
        raise CheckpointError(
            f"expert {index} of `{name}` in {reader.path / reader.file(name)} holds values that are not finite",
            hint="`sparkrl verify-checkpoint` lists every such tensor",
        )
    return value


def _files(reader: CheckpointReader, config: dict[str, Any]) -> dict[str, str | bytes]:
    """Tokenizer and the like, and config.json."""
    files: dict[str, str | bytes] = {}
    for entry in sorted(reader.path.iterdir()):
        if entry.suffix in _COPIED_SUFFIXES and entry.name not in _REPLACED and entry.is_file():
            refuse_foreign_link(reader.path, entry.name)
            files[entry.name] = entry.read_bytes()
    return files | {"config.json": json.dumps(config, indent=2) + "\n"}


def _source(reader: CheckpointReader) -> list[list[str | int]]:
    """What tells one state of the source from another without reading it."""
    names: Iterable[str] = {stored.file for stored in reader.stored.values()} | {"config.json"}
    stats = [(name, (reader.path / name).stat()) for name in sorted(names)]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
