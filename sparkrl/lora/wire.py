"""A trainer rank's rows of the adapter, written as the server's buffers want them.

One pass over memory: a block is scaled, rounded to the type of the wire, put in place and summed up while it still lies
in the processor's cache, by as many threads as there are cores. On a GPU, or from one into host memory, a call a tensor
does the first three.

Legend: E expert, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from sparkrl.errors import AdapterError
from sparkrl.lora.device_sums import as_numbers, block_sums
from sparkrl.lora.peft_format import peft_name, rank_and_scale
from sparkrl.lora.plan import Rows, lay_out
from sparkrl.lora.threads import one_core_each, thread_count, working
from sparkrl.types import AdapterPart, DeviceMemory, SharedAdapter, SharedMemory, TensorSpec

BLOCK_BYTES = 2 << 20
"""Bytes one checksum covers, and a thread works on at once: what it reads and writes stays in the processor's cache."""
_GROUP_BYTES = 64 << 20
"""Bytes that are scaled at once on a GPU, beside what is there anyway."""
_CHUNK = 1 << 17
"""Numbers that are scaled before they are rounded, in the cache nearest to the core."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types an adapter may have, by torch's name."""


@dataclass(slots=True, kw_only=True)
class _Block:
    """One block of a part, and what is put into it."""

    start: int
    stop: int
    puts: list[tuple[Tensor, Tensor, float]] = field(default_factory=list)
    """Where to, from where (both flat), times what."""
    event: Any = None
    """Passed by the GPU once the block is complete."""


class PartWriter:
    """Writes one rank's part, version after version, into memory that it is given.

    Args:
        tensors: by the names of training: this rank's rows (kept, read at every `write`; without gaps), the first one's
            place in the whole, and the number of rows of the whole.
        config: content of adapter_config.json.
        dtype: type on the wire, `float32` or `bfloat16`.
    """

    def __init__(self, tensors: Mapping[str, tuple[Tensor, int, int]], config: Mapping[str, Any], dtype: str) -> None:
        self._rows = {peft_name(name): rows.detach().view(-1) for name, (rows, _, _) in tensors.items()}
        places = {
            peft_name(name): Rows(shape=tuple(rows.shape), first=first, total=total)
            for name, (rows, first, total) in tensors.items()
        }
        # gaps between tensors are never written, and fresh memory is zero: equal adapters have equal checksums
        self.manifest, self.num_bytes = lay_out(
            dict(sorted(places.items())), dtype=dtype, item_bytes=DTYPES[dtype].itemsize
        )
        self._scales = {name: rank_and_scale(config, name)[1] if ".lora_B." in name else 1.0 for name in places}
        self._address, self._blocks = 0, list[_Block]()
        self._on_device = any(rows.device.type != "cpu" for rows in self._rows.values())

    @torch.no_grad()
    def write(self, target: np.ndarray, *, memory: SharedMemory | None) -> AdapterPart:
        """Write the current numbers into this machine's memory.

        Args:
            target: uint8 [num_bytes].
            memory: how readers open `target`, if it is shared.
        """
        if target.ctypes.data != self._address:
            self._address, raw = target.ctypes.data, torch.from_numpy(target)
            self._blocks = self._from_device(raw) if self._on_device else self._in_cache(raw)
        sums = dict[int, int]()

        def fill(block: _Block) -> None:
            if self._on_device:
                block.event.synchronize()
            else:
                _put(block.puts)
            sums[block.start] = block_checksum(target[block.start : block.stop])

        for block in self._blocks if self._on_device else ():
            _put(block.puts)
            block.event = torch.cuda.Event()
            block.event.record()
        with one_core_each(), working(self._blocks, fill, num_threads=thread_count(self.num_bytes)):
            pass
        return self._part(tuple(sums[block.start] for block in self._blocks), memory)

    @torch.no_grad()
    def write_on_device(self, target: Tensor, *, memory: DeviceMemory) -> AdapterPart:
        """Write the current numbers into the memory of the device that they are on, and wait until they are there.

        Args:
            target: uint8 [num_bytes].
            memory: how readers map `target`.
        """
        if target.data_ptr() != self._address:
            self._address = target.data_ptr()
            self._blocks = [_Block(start=0, stop=self.num_bytes, puts=self._puts(target))]
        _put_on_device(self._blocks[0].puts)
        return self._part(as_numbers(block_sums(target, BLOCK_BYTES)), memory)

    def _part(self, checksums: tuple[int, ...], memory: SharedMemory | DeviceMemory | None) -> AdapterPart:
        return AdapterPart(
            manifest=self.manifest,
            num_bytes=self.num_bytes,
            block_bytes=BLOCK_BYTES,
            checksums=checksums,
            memory=memory,
        )

    def _puts(self, raw: Tensor) -> list[tuple[Tensor, Tensor, float]]:
        return [
            (view(raw, spec).view(-1), self._rows[spec.name], self._scales[spec.name])
            for spec in self.manifest
            if math.prod(spec.shape)
        ]

    def _empty_blocks(self) -> list[_Block]:
        starts = range(0, self.num_bytes, BLOCK_BYTES)
        return [_Block(start=at, stop=min(at + BLOCK_BYTES, self.num_bytes)) for at in starts]

    def _in_cache(self, raw: Tensor) -> list[_Block]:
        """Tensors cut where blocks end."""
        blocks = self._empty_blocks()
        for target, rows, scale in self._puts(raw):
            item, done = target.element_size(), 0
            offset = target.data_ptr() - raw.data_ptr()
            while done < target.numel():
                block = blocks[(offset + done * item) // BLOCK_BYTES]
                stop = min(target.numel(), (block.stop - offset) // item)
                block.puts.append((target[done:stop], rows[done:stop], scale))
                done = stop
        return blocks

    def _from_device(self, raw: Tensor) -> list[_Block]:
        """Each tensor whole, with the block that it begins in: all before a block's event have been put by then."""
        blocks = self._empty_blocks()
        for target, rows, scale in self._puts(raw):
            blocks[(target.data_ptr() - raw.data_ptr()) // BLOCK_BYTES].puts.append((target, rows, scale))
        return blocks


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
            memory=(DeviceMemory if "handle" in part["memory"] else SharedMemory)(**part["memory"]),
        )
        for part in plain
    ]


def _size(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * DTYPES[spec.dtype].itemsize


def _put(puts: Iterable[tuple[Tensor, Tensor, float]]) -> None:
    for target, rows, scale in puts:
        if scale == 1.0:
            target.copy_(rows, non_blocking=True)
        elif rows.device.type != "cpu":
            scaled = torch.mul(rows, scale, out=rows.new_empty(rows.shape, dtype=target.dtype))
            target.copy_(scaled, non_blocking=True)
        elif target.dtype == rows.dtype:
            torch.mul(rows, scale, out=target)
        else:
            # rounding the product straight into another type is six times slower
            scratch = torch.empty(min(_CHUNK, rows.numel()), dtype=rows.dtype)
            for start in range(0, rows.numel(), _CHUNK):
                part = rows[start : start + _CHUNK]
                target[start : start + _CHUNK].copy_(torch.mul(part, scale, out=scratch[: part.numel()]))


def _put_on_device(puts: Iterable[tuple[Tensor, Tensor, float]]) -> None:
    """The same where both sides lie on one device: many tensors by one kernel. What is scaled lies there a second time,
    a group after the other, in the type of training: it is rounded once."""
    plain = [(target, rows) for target, rows, scale in puts if scale == 1.0]
    if plain:
        torch._foreach_copy_([target for target, _ in plain], [rows for _, rows in plain])
    groups: list[list[tuple[Tensor, Tensor, float]]] = []
    size = _GROUP_BYTES
    for put in puts:
        if put[2] == 1.0:
            continue
        if size >= _GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(put)
        size += put[1].nbytes
    for group in groups:
        scaled = torch._foreach_mul([rows for _, rows, _ in group], [scale for _, _, scale in group])
        torch._foreach_copy_([target for target, _, _ in group], scaled)
