"""A packed adapter from pinned shared memory into vLLM's stacked buffers on the GPU.

The memory is pinned once, when it is first seen. A swap copies it up in large pieces, each at the bus's speed, and
spreads a piece over the buffers by one call for all copies that only copy, and one small kernel for each of the others
(rows in another order, experts whose scale Marlin folds away). Above the buffers no more than one piece is ever held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparkrl.lora.shared_memory import Inbox
from sparkrl.lora.wire import DTYPES, summing_threads
from sparkrl.rollout.plugin.loading import AdapterLoader
from sparkrl.rollout.plugin.slots import Move
from sparkrl.types import TensorSpec

PIECE_BYTES = 512 << 20
"""Bytes that lie on the GPU beside the buffers while an adapter is loaded."""


def make_loader(manager: Any, *, worker: int, num_workers: int) -> AdapterLoader:
    """The loader of one GPU's worker."""
    from sparkrl.rollout.plugin.cuda.experts import up_over_gate

    return AdapterLoader(
        manager,
        worker=worker,
        num_workers=num_workers,
        copy=DeviceCopier(manager.device),
        ratio_of=up_over_gate,
        inbox=Inbox(pinned=True),
        num_threads=summing_threads(),
    )


class DeviceCopier:
    """Makes moves whose sources lie in host memory and whose targets on a GPU; remembers the views it has made."""

    def __init__(self, device: torch.device, *, piece_bytes: int = PIECE_BYTES) -> None:
        self._device, self._piece_bytes = device, piece_bytes
        self._known: Sequence[Move] = []
        self._piece = torch.empty(0, dtype=torch.uint8, device=device)
        self._groups: list[_Group] = []

    def __call__(self, moves: Sequence[Move], bytes_of: Sequence[Tensor], reached: Callable[[int, int], None]) -> None:
        """See `loading.Copy`; returns when the buffers hold the adapter."""
        for part, raw in enumerate(bytes_of):
            reached(part, raw.numel())  # the bus does not use the processor's cache, so all may begin at once
        if self._known is not moves:
            self._known = moves
            self._look(moves, len(bytes_of))
        for group in self._groups:
            piece = self._piece[: group.end - group.begin]
            piece.copy_(bytes_of[group.part][group.begin : group.end], non_blocking=True)
            for targets, values in (group.dense, group.strided):
                if targets:
                    torch._foreach_copy_(targets, values)
            for move, tensor, skipped in group.others:
                move.write(tensor, skipped_rows=skipped)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _look(self, moves: Sequence[Move], num_parts: int) -> None:
        """Views of every tensor in the piece that it will come in, and what is copied from there."""
        placed = []
        for part in range(num_parts):
            mine: dict[int, list[Move]] = {}
            for move in moves:
                if move.part == part:
                    mine.setdefault(move.spec.offset, []).append(move)
            placed += [(part, piece) for piece in _pieces([mine[at] for at in sorted(mine)], self._piece_bytes)]
        sizes = [max(stop for _, stop, _, _ in piece) - piece[0][0] for _, piece in placed]
        self._groups, self._piece = [], torch.empty(0, dtype=torch.uint8, device=self._device)
        self._piece = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=self._device)
        for (part, piece), size in zip(placed, sizes, strict=True):
            begin = piece[0][0]
            group = _Group(part=part, begin=begin, end=begin + size)
            for start, stop, skipped, own in piece:
                tensor = _rows(self._piece[start - begin : stop - begin], own[0].spec)
                for move in own:
                    if not move.is_plain:
                        group.others.append((move, tensor, skipped))
                        continue
                    value = move.read(tensor, skipped_rows=skipped)
                    dense = value.is_contiguous() and move.target.is_contiguous()
                    targets, values = group.dense if dense else group.strided
                    targets.append(move.target)
                    values.append(value)
            self._groups.append(group)


@dataclass(slots=True, kw_only=True)
class _Group:
    """A stretch of a part that goes up in one copy, and the copies from there into the buffers."""

    part: int
    begin: int
    end: int
    dense: tuple[list[Tensor], list[Tensor]] = field(default_factory=lambda: ([], []))
    """Targets and values without gaps: one kernel copies them all, which a single other one among them would undo."""
    strided: tuple[list[Tensor], list[Tensor]] = field(default_factory=lambda: ([], []))
    others: list[tuple[Move, Tensor, int]] = field(default_factory=list)


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
