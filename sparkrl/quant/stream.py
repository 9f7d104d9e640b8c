"""From a checkpoint into tensors that exist already: reads run ahead of dequantization, in bounded memory.

Reader threads take the next pieces from disk while the calling thread expands the last one, so that a disk and a
processor (or a GPU) work at the same time. Whatever goes wrong in a reader comes out of `fill` as it was raised.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkrl.quant.checkpoint import CheckpointReader
from sparkrl.quant.packed import Packed

PIECE_BYTES = 32 << 20
"""BF16 bytes of a piece (but at least one row): large enough for a disk, small enough to hold several."""
_READERS = 2
_AHEAD = 4
"""Pieces that are read or wait while one is expanded."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a run of rows of one logical tensor goes."""

    name: str
    """Logical name in the checkpoint."""
    start: int
    """Its first row there; as many rows as `into` has are taken."""
    into: Tensor | Packed
    """Numbers, or codes and scales as they are stored. Any device."""

    @property
    def rows(self) -> int:
        return len(self.into.codes if isinstance(self.into, Packed) else self.into)


@dataclass(frozen=True, slots=True)
class _Piece:
    whole: Destination
    lo: int
    hi: int


def fill(reader: CheckpointReader, destinations: Iterable[Destination], *, piece_bytes: int = PIECE_BYTES) -> None:
    """Read, and dequantize where the destination asks for numbers; every byte of a file is read at most once.

    Quantized weights become bfloat16 first, for a float32 destination too: those are the weights a BF16 server holds.

    Args:
        reader: the checkpoint.
        destinations: taken one by one, as reading gets to them.
        piece_bytes: BF16 bytes read at once, but at least a row.
    Raises:
        CheckpointError: a tensor is absent, damaged or has scales that are not positive.
    """
    waiting: deque[tuple[_Piece, Future[Tensor | Packed]]] = deque()
    pieces = (piece for whole in destinations for piece in _pieces(reader, whole, piece_bytes))
    pool = ThreadPoolExecutor(_READERS, thread_name_prefix="read-checkpoint")
    try:
        for piece in pieces:
            waiting.append((piece, pool.submit(_read, reader, piece)))
            if len(waiting) > _AHEAD:
                _put(*_next(waiting))
        while waiting:
            _put(*_next(waiting))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def packed_like(reader: CheckpointReader, name: str) -> Packed:
    """Codes and scales of a quantized tensor on the meta device; nothing is read."""
    tensor = reader.logical(name)
    names, codes = tensor.first.names, (*tensor.shape[:-1], tensor.shape[-1] // 2)
    assert names, name
    blocks = (*tensor.shape[:-1], tensor.shape[-1] // names.block_size)
    scale = None
    if names.scale:
        stored = reader.stored[str(tensor.first.scale)].shape
        shape = (len(tensor.experts), len(tensor.experts[0])) if tensor.per_expert else stored
        scale = torch.empty(shape, dtype=torch.float32, device="meta")
    return Packed(
        torch.empty(codes, dtype=torch.uint8, device="meta"),
        torch.empty(blocks, dtype=torch.float8_e4m3fn if names.scale else torch.uint8, device="meta"),
        scale,
        names.divide,
    )


def _pieces(reader: CheckpointReader, whole: Destination, piece_bytes: int) -> Iterator[_Piece]:
    row = 2 * torch.Size(reader.shape(whole.name)[1:]).numel()
    step = max(1, piece_bytes // max(1, row))
    for lo in range(0, whole.rows, step):
        yield _Piece(whole, lo, min(lo + step, whole.rows))


def _read(reader: CheckpointReader, piece: _Piece) -> Tensor | Packed:
    name, start = piece.whole.name, piece.whole.start
    lo, hi = start + piece.lo, start + piece.hi
    if reader.is_quantized(name) and not reader.logical(name).transposed:
        return reader.packed(name, lo, hi)
    return reader.rows(name, lo, hi)


def _next(waiting: deque[tuple[_Piece, Future[Tensor | Packed]]]) -> tuple[_Piece, Tensor | Packed]:
    piece, future = waiting.popleft()
    return piece, future.result()


def _put(piece: _Piece, value: Tensor | Packed) -> None:
    into, rows = piece.whole.into, slice(piece.lo, piece.hi)
    if isinstance(into, Packed):
        assert isinstance(value, Packed)
        for target, part in ((into.codes, value.codes), (into.block_scale, value.block_scale)):
            target[rows].view(torch.uint8).copy_(part.view(torch.uint8))
        if into.scale is not None and value.scale is not None:
            into.scale[rows] = value.scale.to(into.scale.device)
        return
    target = into[rows]
    if isinstance(value, Tensor):
        target.copy_(value)
        return
    value = value.to(target.device)
    if target.dtype == torch.bfloat16:
        value.dequantize(dtype=torch.bfloat16, out=target)
    else:
        target.copy_(value.dequantize(dtype=torch.bfloat16))
