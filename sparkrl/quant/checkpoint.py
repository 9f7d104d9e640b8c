"""Checkpoints on disk: a reader that shows every published form as the model's own tensors, dequantized row by row.

A checkpoint is a folder with config.json and safetensors files; `form.py` lists the forms. Nothing in a checkpoint is
ever executed or unpickled.

Shape letters: E experts, O output rows, W input width.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sparkrl.errors import CheckpointError
from sparkrl.quant import mxfp4
from sparkrl.quant.folder import appearing
from sparkrl.quant.form import (
    Scheme,
    dump_json,
    load_config,
    quantization_scheme,
    read_json,
    refuse_foreign_link,
    text_config,
)
from sparkrl.quant.layout import Finding, Logical, Matrix, arrange
from sparkrl.quant.packed import Packed
from sparkrl.quant.shards import Shard, Stored

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class CheckpointReader:
    """Opens a checkpoint, checks its form against its own config, and reads rows of logical tensors.

    Opening reads headers only. Scale values are checked as their rows are read. The folder may be in the nested
    form (`text_config` inside config.json) or in the flat text-only one. Reading is safe from several threads.

    Args:
        path: the folder.
        lenient: collect what is wrong with index, tensors and scales in `findings` instead of raising it.
    Raises:
        CheckpointError: the folder, its config, its quantization scheme or one of its tensors is unusable; the message
            names the file and the tensor.
    """

    def __init__(self, path: str | os.PathLike[str], *, lenient: bool = False) -> None:
        self.path = Path(path)
        raw = load_config(self.path)
        self.config: dict[str, Any] = text_config(raw, self.path)
        """The text model's fields, without `quantization_config`."""
        self.scheme: Scheme | None = quantization_scheme(raw, self.path)
        """What config.json declares about quantization; None for plain weights."""
        self.findings: list[Finding] = []
        """What is wrong, if `lenient`."""
        self.bytes_read = 0
        """Tensor bytes read from the files so far."""
        self._count = threading.Lock()
        self._shards: dict[str, Shard] = {}
        self.stored: dict[str, Stored] = {}
        """Every tensor of the files, scales included."""
        self._open_files()
        self._logical, found = arrange(self.stored, self.scheme, self.config)
        self.findings += found
        if self.findings and not lenient:
            first = self.findings[0]
            more = f"\nand {len(self.findings) - 1} more problems" if len(self.findings) > 1 else ""
            raise CheckpointError(
                f"{first.problem}{more}\nin {self.path}", hint=first.hint or "`sparkrl verify-checkpoint` lists all"
            )
        self.names: tuple[str, ...] = tuple(self._logical)
        """Logical tensor names, sorted."""

    @property
    def quantization(self) -> dict[str, Any] | None:
        """`quantization_config` as published, or None for plain weights."""
        return self.scheme.section if self.scheme else None

    def names_in_file_order(self) -> list[str]:
        """Logical names in the order in which the files are best read."""
        firsts = {name: self.stored[tensor.first.name] for name, tensor in self._logical.items()}
        return sorted(firsts, key=lambda name: (firsts[name].file, firsts[name].offset))

    def is_quantized(self, name: str) -> bool:
        """Whether this logical tensor is stored in four bits."""
        return self.logical(name).first.names is not None

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape: that of the dequantized tensor."""
        return self.logical(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Type that `rows` returns by default: bfloat16 for quantized weights, else the stored one."""
        return torch.bfloat16 if self.is_quantized(name) else self.stored[self.logical(name).first.name].dtype

    def file(self, name: str) -> str:
        """Name of the file that holds this tensor, or the first expert of it."""
        return self.stored[self.logical(name).first.name].file

    def logical(self, name: str) -> Logical:
        """How a logical tensor is put together."""
        if name not in self._logical:
            raise CheckpointError(
                f"tensor `{name}` is not in the checkpoint {self.path}", hint="config.json may belong to another model"
            )
        return self._logical[name]

    def rows(self, name: str, start: int, stop: int, *, dtype: torch.dtype | None = None) -> Tensor:
        """Read rows [start, stop) along dimension 0, and no other byte of the tensor.

        Args:
            name: logical name.
            start, stop: as in a slice, but within the tensor.
            dtype: type of the result; None is `self.dtype(name)`. Quantized weights are computed in fp32 and rounded
                once.
        Returns:
            [stop - start, ...] on the CPU, in memory of its own.
        Raises:
            CheckpointError: the name is absent, or a scale among these rows is zero, negative or not a number.
        """
        tensor, dtype = self._bounded(name, start, stop), dtype or self.dtype(name)
        if start == stop:
            return torch.empty((0, *tensor.shape[1:]), dtype=dtype)
        if self.is_quantized(name):
            value = self.packed(name, start, stop).dequantize(dtype=dtype)
        else:
            value = self._join(tensor, start, stop, lambda matrix: matrix.name).to(dtype)
        return value.transpose(-1, -2).contiguous() if tensor.transposed else value

    def read(self, name: str, *, dtype: torch.dtype | None = None) -> Tensor:
        """Read a whole logical tensor; see `rows`."""
        shape = self.shape(name)
        if shape:
            return self.rows(name, 0, shape[0], dtype=dtype)
        return self._slice(self.logical(name).first.name, 0, 1).to(dtype or self.dtype(name))

    def packed(self, name: str, start: int, stop: int) -> Packed:
        """Read rows [start, stop) of a quantized tensor as they are stored; see `rows`.

        A tensor that the model holds transposed (gpt-oss) comes as stored: rows are outputs.
        """
        tensor = self._bounded(name, start, stop)
        names = tensor.first.names
        assert names, name
        codes = self._join(tensor, start, stop, lambda matrix: matrix.name)
        blocks = self._join(tensor, start, stop, lambda matrix: matrix.block)
        if codes.ndim == 4:
            codes = codes.flatten(-2)
        if tensor.alternate:
            codes, blocks = (torch.cat([t[:, 0::2], t[:, 1::2]], dim=1) for t in (codes, blocks))
        if names.scale is None:
            packed = Packed(codes, blocks.view(torch.uint8), None)
        elif tensor.per_expert:
            scales = [self._slice(str(m.scale), 0, 1).view(()) for e in tensor.experts[start:stop] for m in e]
            packed = Packed(codes, blocks, torch.stack(scales).view(stop - start, -1), names.divide)
        else:
            scale_name, single = str(tensor.first.scale), len(tensor.shape) == 2
            scale = self._slice(scale_name, 0, 1).view(()) if single else self._slice(scale_name, start, stop)
            packed = Packed(codes, blocks, scale, names.divide)
        self._check_scales(tensor, packed, start)
        return packed

    def stored_rows(self, stored: str, start: int, stop: int) -> Tensor:
        """Read rows [start, stop) of a tensor of the files, whatever its part in a logical one."""
        return self._slice(stored, start, stop)

    def _bounded(self, name: str, start: int, stop: int) -> Logical:
        tensor = self.logical(name)
        if not tensor.shape or not 0 <= start <= stop <= tensor.shape[0]:
            raise IndexError(f"rows [{start}, {stop}) of {name}, which has shape {tensor.shape}")
        return tensor

    def _join(self, tensor: Logical, start: int, stop: int, name_of: Callable[[Matrix], str]) -> Tensor:
        """Rows of one of the stored parts, experts stacked."""
        if not tensor.per_expert:
            return self._slice(name_of(tensor.first), start, stop)
        example = self.stored[name_of(tensor.first)]
        rows, width = example.shape
        out = torch.empty((stop - start, len(tensor.experts[0]) * rows, width), dtype=example.dtype)
        for i, matrices in enumerate(tensor.experts[start:stop]):
            for j, matrix in enumerate(matrices):
                self._slice(name_of(matrix), 0, rows, out=out[i, j * rows : (j + 1) * rows])
        return out

    def _slice(self, name: str, start: int, stop: int, *, out: Tensor | None = None) -> Tensor:
        part = self._shards[self.stored[name].file].read(name, start, stop, out=out)
        with self._count:
            self.bytes_read += part.nbytes
        return part

    def _open_files(self) -> None:
        index: dict[str, str] = {}
        if (self.path / INDEX).exists():
            refuse_foreign_link(self.path, INDEX)
            index = read_json(self.path / INDEX).get("weight_map") or {}
            if not isinstance(index, dict) or not index or not all(isinstance(f, str) for f in index.values()):
                raise CheckpointError(
                    f"{self.path / INDEX} has no usable `weight_map`", hint="download this file again"
                )
            files = sorted(set(index.values()))
        elif (self.path / SINGLE).exists() or (self.path / SINGLE).is_symlink():
            files = [SINGLE]
            # without an index vLLM's own loaders read every one of them, in an order of their choice
            for file in sorted({path.name for path in self.path.glob("*.safetensors")} - {SINGLE}):
                problem = f"{file} lies beside {SINGLE}, and without an index vLLM serves what either holds"
                self.findings.append(Finding(problem, None, file, "move it out of the folder"))
        else:
            raise self._no_weights()
        for file in files:
            self._open(file)
        if not index:
            return
        for name, file in index.items():
            if file in self._shards and (name not in self.stored or self.stored[name].file != file):
                problem = f"{INDEX} says that {file} holds `{name}`, but it does not"
                self.findings.append(Finding(problem, name, file, "index and shards are of different checkpoints"))
        for name in self.stored.keys() - index.keys():
            file = self.stored[name].file
            problem = f"{file} holds `{name}`, which {INDEX} does not list"
            self.findings.append(Finding(problem, name, file, "index and shards are of different checkpoints"))

    def _open(self, file: str) -> None:
        try:
            refuse_foreign_link(self.path, file)
            if not (self.path / file).is_file():
                raise CheckpointError(
                    f"shard {file} is missing from {self.path}", hint="download the checkpoint again; it is incomplete"
                )
            shard = Shard(self.path / file, name=file)
        except CheckpointError as error:
            self.findings.append(Finding(error.message, None, file, error.hint))
            return
        for name, stored in shard.tensors.items():
            if name in self.stored:
                problem = f"`{name}` is both in {self.stored[name].file} and in {file}"
                self.findings.append(Finding(problem, name, file, "remove the shard that the index does not name"))
            else:
                self.stored[name] = stored
        self._shards[file] = shard

    def _no_weights(self) -> CheckpointError:
        pickles = sorted(path.name for pattern in _PICKLES for path in self.path.glob(pattern))
        if pickles:
            return CheckpointError(
                f"{self.path} holds its weights as pickles ({pickles[0]}), which can run code when they are read",
                hint="get or make the safetensors form of this checkpoint; pickles are never loaded",
            )
        return CheckpointError(
            f"{self.path} holds neither {SINGLE} nor {INDEX}", hint="give the folder of a safetensors checkpoint"
        )

    def _check_scales(self, tensor: Logical, packed: Packed, start: int) -> None:
        code = packed.block_scale.view(torch.uint8)
        # As bytes, positive finite e4m3 numbers are exactly 0x01 .. 0x7e: the sign is bit 7 and 0x7f is NaN.
        bad_blocks = code == mxfp4.NAN if packed.scale is None else (code == 0) | (code >= 0x7F)
        checks: list[tuple[Callable[[Matrix], str | None], Tensor, Tensor]] = [
            (lambda matrix: matrix.block, packed.block_scale, bad_blocks)
        ]
        if packed.scale is not None:
            # a divisor may be so small that its reciprocal overflows, which is no less wrong
            finite = torch.isfinite(packed.scale) & torch.isfinite(1 / packed.scale)
            checks.append((lambda matrix: matrix.scale, packed.scale, ~(finite & (packed.scale > 0))))
        for name_of, values, bad in checks:
            if bad.any():
                matrix = tensor.first
                if tensor.per_expert:
                    expert, row = bad.nonzero()[0][:2].tolist()
                    matrices = tensor.experts[start + expert]
                    matrix = matrices[row * len(matrices) // bad.shape[1]]
                stored = str(name_of(matrix))
                raise CheckpointError(
                    f"`{stored}` in {self.path / self.stored[stored].file} has {int(bad.sum())} scales "
                    f"that are not positive numbers, the first is {values[bad][0].float().item()}",
                    hint="the checkpoint is damaged or was quantized wrongly",
                )


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
    with appearing(Path(dst), overwrite=overwrite) as folder:
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / SINGLE, metadata={"format": "pt"})
        (folder / SINGLE).chmod(0o644)  # the library makes it private to the user
        dump_json(folder / "config.json", dict(config))
        for name, text in (files or {}).items():
            (folder / name).write_text(text, encoding="utf-8")
        CheckpointReader(folder)
