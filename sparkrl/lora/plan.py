"""Which bytes of an adapter each trainer rank writes, and which of them each worker of a server reads. Pure.

Trainer ranks hold rows (dimension 0: experts, or rows of a linear factor), as FSDP2 shards them. A worker of a server
wants a window of a tensor: some experts, some rows or some columns. The pieces of a window are where the two meet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparkrl.types import TensorSpec

_ALIGN = 64
"""Tensors begin at multiples of this, bytes."""
Window = tuple[tuple[int, int], ...]
"""First index and end in each dimension of a whole tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What a rank has of one tensor."""

    shape: tuple[int, ...]
    """Shape of its rows."""
    first: int
    """Place of the first row in the whole."""
    total: int
    """Rows of the whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a window that lies in one trainer rank's memory."""

    part: int
    """Number of the trainer rank."""
    spec: TensorSpec
    source: tuple[slice, ...]
    """Where in the rank's tensor."""
    target: tuple[slice, ...]
    """Where in the window."""


def shard_rows(num_rows: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """First row and end of a rank's rows as FSDP2 spreads them: equal shares, and what is left for the last ranks."""
    each = -(-num_rows // num_ranks)
    return min(rank * each, num_rows), min((rank + 1) * each, num_rows)


def lay_out(rows: Mapping[str, Rows], *, dtype: str, item_bytes: int) -> tuple[tuple[TensorSpec, ...], int]:
    """Places of a rank's tensors in its memory, back to back.

    Returns:
        The manifest, and the bytes it takes in all.
    """
    specs, offset = [], 0
    for name, mine in rows.items():
        specs.append(
            TensorSpec(
                name=name, shape=mine.shape, dtype=dtype, offset=offset, first_row=mine.first, num_rows=mine.total
            )
        )
        size = item_bytes
        for width in mine.shape:
            size *= width
        offset += -(-size // _ALIGN) * _ALIGN
    return tuple(specs), offset


def pieces(window: Window, specs: Sequence[tuple[int, TensorSpec]]) -> list[Piece]:
    """Where the window of a tensor lies.

    Args:
        specs: trainer rank and its rows of the tensor, for every rank that has any.
    """
    (first, end), *rest = window
    found = []
    for part, spec in specs:
        begin, stop = max(first, spec.first_row), min(end, spec.first_row + spec.shape[0])
        if begin >= stop:
            continue
        columns = tuple(slice(start, last) for start, last in rest)
        found.append(
            Piece(
                part=part,
                spec=spec,
                source=(slice(begin - spec.first_row, stop - spec.first_row), *columns),
                target=(slice(begin - first, stop - first), *(slice(0, last - start) for start, last in rest)),
            )
        )
    return found


def blocks_of(num_blocks: int, worker: int, num_workers: int) -> range:
    """Blocks whose checksum one of a server's workers verifies; all of them together verify each block once."""
    return range(worker, num_blocks, num_workers)
