"""Checkpoints on disk: a reader that dequantizes NVFP4 row by row, and writers whose output appears complete or not.

A checkpoint is a folder with config.json and safetensors files. A routed expert tensor in NVFP4 is stored as four:
`<name>` (packed codes), `<name>_weight_scale`, `<name>_weight_scale_2` and `<name>_input_scale`. The reader shows them
as one logical tensor `<name>`. Nothing in a checkpoint is ever executed or unpickled.

Shape letters: E experts, O output rows, W input width.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sparkrl.errors import CheckpointError
from sparkrl.quant.form import (
    dump_json,
    is_ignored,
    load_config,
    quantization_scheme,
    read_json,
    refuse_foreign_link,
    text_config,
)
from sparkrl.quant.nvfp4 import BLOCK, dequantize

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_COMPANIONS = ("_weight_scale", "_weight_scale_2", "_input_scale")
_EXPERT = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
_TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}
_SAFETENSORS = {dtype: code for code, dtype in _TORCH.items()}
_COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model")
_CHUNK_BYTES = 64 << 20
"""Output bytes that `dequantize_checkpoint` holds at once (but at least one row)."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """One tensor as a file holds it."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class CheckpointReader:
    """Opens a checkpoint, checks its form against its own config, and reads rows of logical tensors.

    Opening reads headers only. Scale values are checked as their rows are read. The folder may be in the nested
    form (`text_config` inside config.json) or in the flat text-only one.

    Args:
        path: the folder.
    Raises:
        CheckpointError: the folder, its config, its quantization scheme or one of its tensors is unusable; the message
            names the file and the tensor.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        raw = load_config(self.path)
        self.config: dict[str, Any] = text_config(raw, self.path)
        """The text model's fields, without `quantization_config`."""
        self.quantization: dict[str, Any] | None = quantization_scheme(raw, self.path)
        """`quantization_config` as published, or None for plain weights."""
        self.bytes_read = 0
        """Tensor bytes read from the files so far."""
        self._files: dict[str, Any] = {}
        self._stored: dict[str, _Stored] = {}
        self._open_files()
        stored = self._stored
        companions = {n + s for n in stored for s in _COMPANIONS if n + s in stored}
        self.names: tuple[str, ...] = tuple(sorted(n for n in stored if n not in companions))
        """Logical tensor names, sorted."""
        self._check_tensors()

    def is_quantized(self, name: str) -> bool:
        """Whether this logical tensor is stored as NVFP4."""
        self._entry(name)
        return name + "_weight_scale" in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape: that of the dequantized tensor."""
        shape = self._entry(name).shape
        return (*shape[:-1], 2 * shape[-1]) if self.is_quantized(name) else shape

    def dtype(self, name: str) -> torch.dtype:
        """Type that `rows` returns by default: bfloat16 for NVFP4, else the stored one."""
        return torch.bfloat16 if self.is_quantized(name) else self._entry(name).dtype

    def file(self, name: str) -> str:
        """Name of the file that holds this tensor."""
        return self._entry(name).file

    def rows(self, name: str, start: int, stop: int, *, dtype: torch.dtype | None = None) -> Tensor:
        """Read rows [start, stop) along dimension 0, and no other byte of the tensor.

        Args:
            name: logical name.
            start, stop: as in a slice, but within the tensor.
            dtype: type of the result; None is `self.dtype(name)`. NVFP4 is computed in fp32 and rounded once.
        Returns:
            [stop - start, ...] on the CPU. Plain tensors may share memory with the mapped file: do not write to them.
        Raises:
            CheckpointError: the name is absent, or a scale among these rows is zero, negative or not a number.
        """
        full = self.shape(name)
        if not 0 <= start <= stop <= full[0]:
            raise IndexError(f"rows [{start}, {stop}) of {name}, which has {full[0]}")
        dtype = dtype or self.dtype(name)
        if start == stop:
            return torch.empty((0, *full[1:]), dtype=dtype)
        if not self.is_quantized(name):
            return self._slice(name, start, stop).to(dtype)
        packed_EOW = self._slice(name, start, stop)
        block_EOW = self._slice(name + "_weight_scale", start, stop)
        scale_E = self._slice(name + "_weight_scale_2", start, stop)
        self._check_scales(name, block_EOW, scale_E)
        # One number an expert, or one for each of gate and up: spread the latter over the rows of its half.
        if scale_E.ndim == 2:
            scale_E = scale_E.repeat_interleave(packed_EOW.shape[1] // scale_E.shape[1], dim=1)
        return dequantize(packed_EOW, block_EOW, scale_E, dtype=dtype)

    def read(self, name: str, *, dtype: torch.dtype | None = None) -> Tensor:
        """Read a whole logical tensor; see `rows`."""
        return self.rows(name, 0, self.shape(name)[0], dtype=dtype)

    def _entry(self, name: str) -> _Stored:
        if name not in self._stored:
            raise CheckpointError(f"tensor `{name}` is not in the checkpoint {self.path}")
        return self._stored[name]

    def _slice(self, name: str, start: int, stop: int) -> Tensor:
        part = self._files[self._stored[name].file].get_slice(name)[start:stop]
        self.bytes_read += part.nbytes
        return part

    def _open_files(self) -> None:
        index_path = self.path / INDEX
        index: dict[str, str] | None = None
        if index_path.is_file():
            refuse_foreign_link(self.path, INDEX)
            index = read_json(index_path).get("weight_map")
            if not isinstance(index, dict) or not index or not all(isinstance(f, str) for f in index.values()):
                raise CheckpointError(f"{index_path} has no usable `weight_map`")
            files = sorted(set(index.values()))
        elif (self.path / SINGLE).exists() or (self.path / SINGLE).is_symlink():
            files = [SINGLE]
        else:
            raise CheckpointError(
                f"{self.path} holds neither {SINGLE} nor {INDEX}", hint="give the folder of a safetensors checkpoint"
            )
        for file in files:
            self._open(file)
        for name, file in (index or {}).items():
            if name not in self._stored or self._stored[name].file != file:
                raise CheckpointError(f"{index_path} says that {file} holds `{name}`, but it does not")

    def _open(self, file: str) -> None:
        target = self.path / file
        refuse_foreign_link(self.path, file)
        if not target.is_file():
            raise CheckpointError(
                f"shard {file} is missing from {self.path}", hint="download the checkpoint again; it is incomplete"
            )
        try:
            handle = safe_open(target, framework="pt", device="cpu")
        except SafetensorError as error:
            raise CheckpointError(
                f"{target} is damaged or truncated ({target.stat().st_size} bytes): {error}",
                hint="download this file again",
            ) from None
        for name in handle.keys():  # noqa: SIM118 - a safetensors handle is not a mapping
            part = handle.get_slice(name)
            dtype = _TORCH.get(part.get_dtype())
            if dtype is None:
                raise CheckpointError(f"`{name}` in {target} has the unsupported type {part.get_dtype()}")
            if name in self._stored:
                raise CheckpointError(f"`{name}` is both in {self._stored[name].file} and in {file} of {self.path}")
            self._stored[name] = _Stored(file, tuple(part.get_shape()), dtype)
        self._files[file] = handle

    def _check_tensors(self) -> None:
        sizes: list[Any] = [
            self.config.get(key) for key in ("num_local_experts", "moe_hidden_size", "moe_intermediate_size")
        ]
        for name in self.names:
            stored = self._stored[name]
            found = _EXPERT.search(name)
            if any(name.endswith(suffix) for suffix in _COMPANIONS) and _EXPERT.search(name.rsplit("_weight", 1)[0]):
                raise CheckpointError(f"`{name}` in {stored.file} scales a tensor that is absent")
            if self.is_quantized(name):
                self._check_companions(name)
            elif stored.dtype == torch.uint8:
                raise CheckpointError(
                    f"`{name}` in {stored.file} holds packed codes, but `{name}_weight_scale` is absent"
                )
            elif found and self.quantization and not is_ignored(name, self.quantization.get("ignore") or []):
                raise CheckpointError(
                    f"`{name}` in {stored.file} is {_short(stored.dtype)}, but config.json declares NVFP4 for it",
                    hint="list its module under `quantization_config.ignore`, or quantize it",
                )
            if found and all(isinstance(size, int) for size in sizes):
                experts, width, inner = sizes
                wanted = (experts, 2 * inner, width) if found[1] == "gate_up_proj" else (experts, width, inner)
                if self.shape(name) != wanted:
                    raise CheckpointError(
                        f"`{name}` in {stored.file} has shape {self.shape(name)}, config.json says {wanted}"
                    )

    def _check_companions(self, name: str) -> None:
        packed = self._stored[name]
        if self.quantization is None:
            raise CheckpointError(
                f"`{name}` in {packed.file} is stored as NVFP4, but config.json has no `quantization_config`"
            )
        if packed.dtype != torch.uint8 or len(packed.shape) != 3 or packed.shape[-1] * 2 % BLOCK:
            raise CheckpointError(
                f"`{name}` in {packed.file} must be uint8 [experts, rows, columns / 2] with columns a multiple of "
                f"{BLOCK}, got: {_short(packed.dtype)} {packed.shape}"
            )
        experts, rows, half = packed.shape
        expected: dict[str, tuple[torch.dtype, tuple[tuple[int, ...], ...]]] = {
            "_weight_scale": (torch.float8_e4m3fn, ((experts, rows, 2 * half // BLOCK),)),
            "_weight_scale_2": (torch.float32, ((experts,), (experts, 2))),
        }
        for suffix, (dtype, shapes) in expected.items():
            stored = self._stored.get(name + suffix)
            if stored is None:
                raise CheckpointError(f"`{name}{suffix}` is absent, though `{name}` in {packed.file} is quantized")
            if stored.dtype != dtype or stored.shape not in shapes:
                raise CheckpointError(
                    f"`{name}{suffix}` in {stored.file} must be {_short(dtype)} "
                    f"{' or '.join(map(str, shapes))}, got: {_short(stored.dtype)} {stored.shape}",
                    hint="only ModelOpt's NVFP4 form with stacked experts is read",
                )
        if len(self._stored[name + "_weight_scale_2"].shape) == 2 and rows % 2:
            raise CheckpointError(f"`{name}` in {packed.file} has {rows} rows, which gate and up cannot share")

    def _check_scales(self, name: str, block_EOW: Tensor, scale_E: Tensor) -> None:
        # As bytes, positive finite e4m3 numbers are exactly 0x01 .. 0x7e; the sign is bit 7 and 0x7f is NaN.
        code = block_EOW.view(torch.uint8)
        for suffix, values, bad in (
            ("_weight_scale", block_EOW, (code == 0) | (code >= 0x7F)),
            ("_weight_scale_2", scale_E, ~(torch.isfinite(scale_E) & (scale_E > 0))),
        ):
            if bad.any():
                first = values.float()[bad][0].item()
                raise CheckpointError(
                    f"`{name}{suffix}` in {self.path / self._stored[name + suffix].file} has {int(bad.sum())} scales "
                    f"that are not positive numbers, the first is {first}",
                    hint="the checkpoint is damaged or was quantized wrongly",
                )


def dequantize_checkpoint(
    src: str | os.PathLike[str], dst: str | os.PathLike[str], *, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write the plain form of an NVFP4 checkpoint, one piece at a time.

    Args:
        src: the quantized checkpoint.
        dst: folder to make; must not exist yet. It appears complete or not at all.
        dtype: type of the tensors that were quantized; all others keep theirs.
    Raises:
        CheckpointError: `src` is unusable or `dst` exists.
    """
    reader, target = CheckpointReader(src), Path(dst)
    config = read_json(reader.path / "config.json")
    for section in (config, config.get("text_config") or {}):
        section.pop("quantization_config", None)
    by_file: dict[str, list[str]] = {}
    for name in reader.names:
        by_file.setdefault(reader.file(name), []).append(name)
    with _appearing(target) as folder:
        for file, names in by_file.items():
            _stream_file(reader, folder / file, names, dtype)
        if INDEX in os.listdir(reader.path):
            index = {name: file for file, names in by_file.items() for name in names}
            size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
            dump_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": index})
        for entry in reader.path.iterdir():
            if entry.suffix in _COPIED_SUFFIXES and entry.name not in ("config.json", INDEX):
                refuse_foreign_link(reader.path, entry.name)
                shutil.copyfile(entry, folder / entry.name)
        dump_json(folder / "config.json", config)


def write_checkpoint(
    dst: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    files: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a single-file checkpoint and check that it can be read back.

    Args:
        dst: folder to make; it appears complete or not at all.
        tensors: every stored tensor, scales included.
        config: content of config.json.
        files: further text files (tokenizer, generation_config.json) by name.
        overwrite: replace an existing folder.
    Raises:
        CheckpointError: `dst` exists, or the content is not a valid checkpoint.
    """
    with _appearing(Path(dst), overwrite=overwrite) as folder:
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / SINGLE, metadata={"format": "pt"})
        (folder / SINGLE).chmod(0o644)  # the library makes it private to the user
        dump_json(folder / "config.json", dict(config))
        for name, text in (files or {}).items():
            (folder / name).write_text(text, encoding="utf-8")
        CheckpointReader(folder)


@contextlib.contextmanager
def _appearing(dst: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A scratch folder that becomes `dst` when the block ends well, and vanishes when it does not."""
    dst = dst.absolute()
    if dst.exists() and not overwrite:
        raise CheckpointError(f"{dst} exists already", hint="remove it or choose another folder")
    dst.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{dst.name}.", dir=dst.parent))
    try:
        made = scratch / "new"
        made.mkdir()
        yield made
        if dst.exists():
            dst.rename(scratch / "old")
        made.rename(dst)
    finally:
        if (scratch / "old").exists() and not dst.exists():
            (scratch / "old").rename(dst)
        shutil.rmtree(scratch, ignore_errors=True)


def _stream_file(reader: CheckpointReader, path: Path, names: list[str], dtype: torch.dtype) -> None:
    """Write logical tensors to one safetensors file without ever holding more than a chunk of one of them."""
    types = {name: dtype if reader.is_quantized(name) else reader.dtype(name) for name in names}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    # Widest types first keeps every tensor aligned to its own width, as the library itself does.
    names = sorted(names, key=lambda name: (-types[name].itemsize, name))
    offset = 0
    for name in names:
        shape, kind = reader.shape(name), types[name]
        end = offset + kind.itemsize * torch.Size(shape).numel()
        header[name] = {"dtype": _SAFETENSORS[kind], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            _stream_tensor(reader, file, name, types[name])


def _stream_tensor(reader: CheckpointReader, file: BinaryIO, name: str, dtype: torch.dtype) -> None:
    num_rows, *rest = reader.shape(name)
    step = max(1, _CHUNK_BYTES // max(1, dtype.itemsize * torch.Size(rest).numel()))
    for lo in range(0, num_rows, step):
        rows = reader.rows(name, lo, min(lo + step, num_rows), dtype=dtype)
        file.write(rows.contiguous().view(torch.uint8).numpy().data)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
