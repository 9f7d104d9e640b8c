"""A trainer rank's rows of the adapter, written as the server's buffers want them.

Per tensor one pass over memory: scaled, rounded to the type of the wire and put in place at once, while another thread
sums up the blocks that are complete.

Legend: E expert, R rank.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from sparkrl.errors import AdapterError
from sparkrl.lora.peft_format import peft_name, rank_and_scale
from sparkrl.lora.plan import Rows, lay_out
from sparkrl.types import AdapterPart, SharedAdapter, SharedMemory, TensorSpec

BLOCK_BYTES = 4 << 20
"""Bytes one checksum covers."""
_FEW_BYTES = 32 << 20
"""Up to so many bytes are summed up without another thread."""
_CHUNK = 1 << 20
"""Numbers that are scaled before they are rounded; they stay in the processor's cache."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types an adapter may have, by torch's name."""


class PartWriter:
    """Writes one rank's part, version after version, into memory that it is given.

    Args:
        tensors: by the names of training: this rank's rows (kept, read at every `write`), the first one's place in the
            whole, and the number of rows of the whole.
        config: content of adapter_config.json.
        dtype: type on the wire, `float32` or `bfloat16`.
    """

    def __init__(self, tensors: Mapping[str, tuple[Tensor, int, int]], config: Mapping[str, Any], dtype: str) -> None:
        self._rows = {peft_name(name): rows.detach() for name, (rows, _, _) in tensors.items()}
        places = {
            peft_name(name): Rows(shape=tuple(rows.shape), first=first, total=total)
            for name, (rows, first, total) in tensors.items()
        }
        # gaps between tensors are never written, and fresh memory is zero: equal adapters have equal checksums
        self.manifest, self.num_bytes = lay_out(
            dict(sorted(places.items())), dtype=dtype, item_bytes=DTYPES[dtype].itemsize
        )
        self._scales = {name: rank_and_scale(config, name)[1] if ".lora_B." in name else 1.0 for name in places}
        self._address, self._views = 0, list[Tensor]()
        self._on_device = any(rows.device.type != "cpu" for rows in self._rows.values())

    @torch.no_grad()
    def write(self, target: np.ndarray, *, memory: SharedMemory | None) -> AdapterPart:
        """Write the current numbers.

        Args:
            target: uint8 [num_bytes].
            memory: how readers open `target`, if it is shared.
        """
        if target.ctypes.data != self._address:
            self._address, raw = target.ctypes.data, torch.from_numpy(target)
            self._views = [view(raw, spec) for spec in self.manifest]
        threads = summing_threads() if self._on_device else 1
        with summing_pool(self.num_bytes, threads) as summing:
            sums: list[Future[int]] = []
            for spec, place in zip(self.manifest, self._views, strict=True):
                _put(place, self._rows[spec.name], self._scales[spec.name])
                if not self._on_device:  # blocks that nothing is added to any more
                    sums += _sums(summing, target, len(sums), (spec.offset + _size(spec)) // BLOCK_BYTES)
            if self._on_device:
                torch.cuda.synchronize()
            sums += _sums(summing, target, len(sums), -(-self.num_bytes // BLOCK_BYTES))
            checksums = tuple(future.result() for future in sums)
        return AdapterPart(
            manifest=self.manifest,
            num_bytes=self.num_bytes,
            block_bytes=BLOCK_BYTES,
            checksums=checksums,
            memory=memory,
        )


class _InPlace(Executor):
    """Runs what it is given at once."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def summing_pool(num_bytes: int, num_threads: int) -> Executor:
    """Where checksums of so many bytes are computed: threads cost more than they save where there are few."""
    return ThreadPoolExecutor(num_threads) if num_bytes > _FEW_BYTES else _InPlace()


def _sums(summing: Executor, target: np.ndarray, first: int, end: int) -> list[Future[int]]:
    """Checksums of blocks [first, end), to come."""
    starts = range(first * BLOCK_BYTES, end * BLOCK_BYTES, BLOCK_BYTES)
    return [summing.submit(block_checksum, target[start : start + BLOCK_BYTES]) for start in starts]


def summing_threads() -> int:
    """Threads that sum up as fast as a GPU's bus moves the bytes."""
    return min(8, os.cpu_count() or 1)


def block_checksum(block: np.ndarray) -> int:
    """xxh3-64 of a block's bytes."""
    return xxhash.xxh3_64_intdigest(block.data)


def gather_parts(parts: Iterable[AdapterPart], config: Mapping[str, Any], version: int) -> SharedAdapter:
    """One version out of every rank's part."""
    parts = tuple(parts)
    sums = np.array([value for part in parts for value in part.checksums], dtype=np.uint64)
    return SharedAdapter(
        version=version, config=dict(config), parts=parts, checksum=xxhash.xxh3_64_hexdigest(sums.data)
    )


def view(raw: Tensor, spec: TensorSpec) -> Tensor:
    """The tensor of a manifest's entry inside its part's bytes.

    Raises:
        AdapterError: it ends behind the bytes, or is of a type that adapters do not have.
    """
    end = spec.offset + _size(spec)
    if end > raw.numel():
        raise AdapterError(f"tensor `{spec.name}` ends at byte {end} of a buffer of {raw.numel()}")
    return raw[spec.offset : end].view(DTYPES[spec.dtype]).view(spec.shape)


def to_plain(parts: Iterable[AdapterPart]) -> list[dict[str, Any]]:
    """Parts as plain data, for vLLM's own messages; they must lie in memory."""
    plain = []
    for part in parts:
        assert part.memory is not None
        plain.append(
            {
                "manifest": [
                    (spec.name, spec.shape, spec.dtype, spec.offset, spec.first_row, spec.num_rows)
                    for spec in part.manifest
                ],
                "num_bytes": part.num_bytes,
                "block_bytes": part.block_bytes,
                "checksums": list(part.checksums),
                "memory": asdict(part.memory),
            }
        )
    return plain


def from_plain(plain: Iterable[Mapping[str, Any]]) -> list[AdapterPart]:
    """Inverse of `to_plain`."""
    return [
        AdapterPart(
            manifest=tuple(
                TensorSpec(name=name, shape=tuple(shape), dtype=dtype, offset=offset, first_row=first, num_rows=rows)
                for name, shape, dtype, offset, first, rows in part["manifest"]
            ),
            num_bytes=part["num_bytes"],
            block_bytes=part["block_bytes"],
            checksums=tuple(part["checksums"]),
            memory=SharedMemory(**part["memory"]),
        )
        for part in plain
    ]


def _size(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * DTYPES[spec.dtype].itemsize


def _put(target: Tensor, rows: Tensor, scale: float) -> None:
    if scale == 1.0:
        target.copy_(rows, non_blocking=True)
    elif rows.device.type != "cpu":
        target.copy_((rows * scale).to(target.dtype), non_blocking=True)
    elif target.dtype == rows.dtype:
        torch.mul(rows, scale, out=target)
    else:
        # rounding the product straight into another type is six times slower
        flat, source = target.view(-1), rows.reshape(-1)
        scratch = torch.empty(min(_CHUNK, source.numel()), dtype=rows.dtype)
        for start in range(0, source.numel(), _CHUNK):
            part = source[start : start + _CHUNK]
            flat[start : start + _CHUNK].copy_(torch.mul(part, scale, out=scratch[: part.numel()]))
