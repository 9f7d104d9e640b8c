"""A packed adapter into vLLM's stacked buffers on the GPU, from wherever its bytes lie.

On this GPU, in the trainer's memory (CUDA IPC): the copies run straight from there, and checksums are computed on the
GPU. On another GPU of the machine, or in pinned shared memory: large pieces come over, each at the bus's speed, and are
spread from there; above the buffers no more than one piece is ever held. Either way one call makes all copies that only
copy, and one or two small kernels each of the others (rows in another order, experts whose scale Marlin folds away).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparkrl.lora.device_memory import DeviceInbox, RemoteMemory
from sparkrl.lora.device_sums import as_numbers, block_sums
from sparkrl.lora.shared_memory import Inbox
from sparkrl.lora.threads import thread_count, working
from sparkrl.lora.wire import DTYPES
from sparkrl.rollout.plugin.loading import AdapterLoader, Block, Intake, Remembered, is_as_sent
from sparkrl.rollout.plugin.slots import Move
from sparkrl.types import AdapterPart, DeviceMemory, TensorSpec

PIECE_BYTES = 512 << 20
"""Bytes that lie on the GPU beside the buffers while an adapter is loaded from elsewhere."""
_BLOCKS_AT_ONCE = 32
"""Blocks of another GPU that are brought here to be summed up."""


def make_loader(manager: Any, *, worker: int, num_workers: int) -> AdapterLoader:
    """The loader of one GPU's worker."""
    from sparkrl.rollout.plugin.cuda.experts import up_over_gate

    return AdapterLoader(
        manager, worker=worker, num_workers=num_workers, intake=GpuIntake(manager.device), ratio_of=up_over_gate
    )


class GpuIntake:
    """From wherever the bytes of the next adapter lie; what it has mapped of the other kind is let go of."""

    def __init__(self, device: torch.device) -> None:
        self._shared, self._mapped = SharedIntake(device, pinned=True), MappedIntake(device)
        self._chosen: Intake = self._shared

    def open(self, parts: Sequence[AdapterPart]) -> None:
        """See `Intake`."""
        on_device = any(isinstance(part.memory, DeviceMemory) for part in parts)
        self._chosen, other = (self._mapped, self._shared) if on_device else (self._shared, self._mapped)
        other.open([])
        self._chosen.open(parts)

    def take(self, moves: Sequence[Move], parts: Sequence[AdapterPart], own: Sequence[Block]) -> list[Block]:
        """See `Intake`."""
        return self._chosen.take(moves, parts, own)


class SharedIntake:
    """From shared memory; while the GPU copies, threads verify the bytes.

    Args:
        pinned: whether the memory is pinned, so that the GPU reads it by itself.
    """

    def __init__(self, device: torch.device, *, pinned: bool = False, piece_bytes: int = PIECE_BYTES) -> None:
        self._inbox = Inbox(pinned=pinned)
        self._memories: list[np.ndarray] = []
        self._spread = Spread(device, piece_bytes=piece_bytes)

    def open(self, parts: Sequence[AdapterPart]) -> None:
        """See `Intake`."""
        self._memories = self._inbox.open_all(parts)
        if not parts:
            self._spread.forget()

    def take(self, moves: Sequence[Move], parts: Sequence[AdapterPart], own: Sequence[Block]) -> list[Block]:
        """See `Intake`."""
        damaged: list[Block] = []

        def verify(block: Block) -> None:
            if not is_as_sent(parts[block[0]], self._memories[block[0]], block[1]):
                damaged.append(block)

        with working(own, verify, num_threads=thread_count(sum(part.num_bytes for part in parts))):
            self._spread(moves, [torch.from_numpy(memory) for memory in self._memories])
        return damaged


class MappedIntake:
    """From the memory of GPUs in other processes."""

    def __init__(self, device: torch.device, *, piece_bytes: int = PIECE_BYTES) -> None:
        self._device = device
        self._inbox = DeviceInbox(device)
        self._memories: list[RemoteMemory] = []
        self._spread = Spread(device, piece_bytes=piece_bytes)

    def open(self, parts: Sequence[AdapterPart]) -> None:
        """See `Intake`."""
        memories = [part.memory for part in parts if isinstance(part.memory, DeviceMemory)]
        if self._inbox.keep(memories):
            self._spread.forget()
        self._memories = [self._inbox.open(memory) for memory in memories]

    def take(self, moves: Sequence[Move], parts: Sequence[AdapterPart], own: Sequence[Block]) -> list[Block]:
        """See `Intake`."""
        self._spread(moves, [memory.tensor() if memory.is_here else memory for memory in self._memories])
        damaged = []
        for number, part in enumerate(parts):
            blocks = [block for at, block in own if at == number]
            if blocks:
                sums = as_numbers(self._sums(self._memories[number], part, blocks))
                found = zip(blocks, sums, strict=True)
                damaged += [(number, block) for block, value in found if value != part.checksums[block]]
        return damaged

    def _sums(self, memory: RemoteMemory, part: AdapterPart, blocks: Sequence[int]) -> Tensor:
        step = blocks[1] - blocks[0] if len(blocks) > 1 else len(part.checksums)
        if memory.is_here:
            return block_sums(memory.tensor()[: part.num_bytes], part.block_bytes, first=blocks[0], step=step)
        found = []
        for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
            some = blocks[start : start + _BLOCKS_AT_ONCE]
            rows = torch.zeros(len(some), part.block_bytes, dtype=torch.uint8, device=self._device)
            for row, block in zip(rows, some, strict=True):
                begin = block * part.block_bytes
                memory.copy_to(row[: min(part.block_bytes, part.num_bytes - begin)], begin)
            found.append(block_sums(rows.view(-1), part.block_bytes))
        return torch.cat(found)


class Spread:
    """Makes moves whose targets lie on a GPU; remembers the views it has made."""

    def __init__(self, device: torch.device, *, piece_bytes: int = PIECE_BYTES) -> None:
        self._device, self._piece_bytes = device, piece_bytes
        self._piece = torch.empty(0, dtype=torch.uint8, device=device)
        self._known = Remembered[list["_Group"]]()

    def __call__(self, moves: Sequence[Move], sources: Sequence[Tensor | RemoteMemory]) -> None:
        """Returns when the buffers hold the adapter.

        Args:
            sources: bytes of each part: uint8 on the host or on the device itself, or another GPU's.
        """
        places = [source.data_ptr() if isinstance(source, Tensor) else source.address for source in sources]
        for group in self._known(moves, places, lambda: self._look(moves, sources)):
            source = sources[group.part]
            if group.piece is not None:
                if isinstance(source, Tensor):
                    group.piece.copy_(source[group.begin : group.end], non_blocking=True)
                else:
                    source.copy_to(group.piece, group.begin)
            for targets, values in (group.dense, group.strided):
                if targets:
                    torch._foreach_copy_(targets, values)
            for move in group.others:
                move()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def forget(self) -> None:
        """Drop all views, and the piece that some of them are of."""
        self._known = Remembered[list["_Group"]]()
        self._piece = torch.empty(0, dtype=torch.uint8, device=self._device)

    def _look(self, moves: Sequence[Move], sources: Sequence[Tensor | RemoteMemory]) -> list[_Group]:
        """Views of every tensor in the piece that it comes in, or in its own place, and what is copied from there."""
        placed: list[tuple[int, Tensor | None, Any]] = []
        for part, source in enumerate(sources):
            mine: dict[int, list[Move]] = {}
            for move in moves:
                if move.part == part:
                    mine.setdefault(move.spec.offset, []).append(move)
            here = source if isinstance(source, Tensor) and source.is_cuda else None
            limit = self._piece_bytes if here is None else here.numel()
            placed += [(part, here, piece) for piece in _pieces([mine[at] for at in sorted(mine)], limit)]
        sizes = [max(stop for _, stop, _, _ in piece) - piece[0][0] for _, _, piece in placed]
        needed = max((size for size, (_, here, _) in zip(sizes, placed, strict=True) if here is None), default=0)
        if needed > len(self._piece):
            self.forget()
            self._piece = torch.empty(needed, dtype=torch.uint8, device=self._device)
        groups = []
        for (part, here, piece), size in zip(placed, sizes, strict=True):
            begin = piece[0][0]
            place = self._piece[:size] if here is None else here[begin : begin + size]
            group = _Group(part=part, begin=begin, end=begin + size, piece=place if here is None else None)
            for start, stop, skipped, own in piece:
                tensor = _rows(place[start - begin : stop - begin], own[0].spec)
                for move in own:
                    if not move.is_plain:
                        group.others.append(move.prepare(tensor, skipped_rows=skipped))
                        continue
                    value = move.view(tensor, skipped_rows=skipped)
                    dense = value.is_contiguous() and move.target.is_contiguous()
                    targets, values = group.dense if dense else group.strided
                    targets.append(move.target)
                    values.append(value)
            groups.append(group)
        return groups


@dataclass(slots=True, kw_only=True)
class _Group:
    """A stretch of a part that goes up in one copy, and the copies from there into the buffers."""

    part: int
    begin: int
    end: int
    piece: Tensor | None
    """Where it goes up to; None where it is read in its own place."""
    dense: tuple[list[Tensor], list[Tensor]] = field(default_factory=lambda: ([], []))
    """Targets and values without gaps: one kernel copies them all, which a single other one among them would undo."""
    strided: tuple[list[Tensor], list[Tensor]] = field(default_factory=lambda: ([], []))
    others: list[Callable[[], Any]] = field(default_factory=list)


def _pieces(by_tensor: Sequence[list[Move]], piece_bytes: int) -> list[list[tuple[int, int, int, list[Move]]]]:
    """Neighbouring tensors that go up together: first byte, end, rows skipped, moves of each."""
    groups: list[list[tuple[int, int, int, list[Move]]]] = []
    for moves in by_tensor:
        spec = moves[0].spec
        first, last = _needed(moves)
        row_bytes = DTYPES[spec.dtype].itemsize
        for width in spec.shape[1:]:
            row_bytes *= width
        begin, end = spec.offset + first * row_bytes, spec.offset + last * row_bytes
        if not groups or end - groups[-1][0][0] > piece_bytes:
            groups.append([])
        groups[-1].append((begin, end, first, moves))
    return groups


def _needed(moves: Sequence[Move]) -> tuple[int, int]:
    """Rows of a tensor that any of the moves reads."""
    if moves[0].num_experts is not None:
        return 0, moves[0].spec.shape[0]
    return min(move.source[0].start for move in moves), max(move.source[0].stop for move in moves)


def _rows(raw: Tensor, spec: TensorSpec) -> Tensor:
    return raw.view(DTYPES[spec.dtype]).view(-1, *spec.shape[1:])
