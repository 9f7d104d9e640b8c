"""The experts' rows on CUDA in Triton: their order by expert, products with every expert's weight, and outer products.

Rows lie sorted by expert without padding. A program finds its expert from the experts' ends, so the host knows no
count and waits for nothing. A product takes its input through the order (no copy of the tokens' rows is made), adds a
low-rank product in the accumulator, and reads LoRA factors in the type in which they are trained; an outer product
writes their gradients in it. Each value is summed in one order that shapes alone decide: equal inputs, equal bits.

Legend: N pairs of token and slot, M expert rows (M = N), E expert, I in, O out, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_ORDER_BLOCK = 2048
_MIN_DOT = 16
"""Least width of a tensor core's operand."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Block sizes of a product: rows, output columns, and what one step of the sum takes."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int = 8
    """Blocks of rows that share an expert's columns in cache."""


Through = tuple[Tensor | None, int]
"""Pair of each row and slots a token, for an input by token; None for one by row."""


def _tile(rows: int, out_width: int) -> Tile:
    """For `rows` an expert on average."""
    if out_width <= 64:
        return Tile(16, 32, 256, 4, 3, 1) if rows <= 32 else Tile(64, 32, 128, 4, 3, 1)
    if rows <= 32:
        return Tile(16, 128, 64, 4, 5)
    return Tile(128, 256, 64, 8, 3)


def _outer_tile(rows: int) -> Tile:
    return Tile(16, 128, 0, 4, 2) if rows <= 32 else Tile(64, 128, 0, 4, 3)


def order(ids_N: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """A stable sort of pairs by expert: pair of each row [N], row of each pair [N], end of each expert's rows [E].

    All int32. One program an expert counts and places its pairs, which for few pairs is one start of a kernel instead
    of ten.
    """
    ids_N = ids_N.contiguous()  # replayed ids of one slot are a view of all layers'
    pair_M, row_N = (torch.empty(ids_N.shape, dtype=torch.int32, device=ids_N.device) for _ in range(2))
    ends_E = torch.empty(num_experts, dtype=torch.int32, device=ids_N.device)
    _order_kernel[(num_experts,)](ids_N, pair_M, row_N, ends_E, ids_N.numel(), BLOCK=_ORDER_BLOCK)
    return pair_M, row_N, ends_E


@triton.jit
def _order_kernel(ids, pair, row, ends, num_pairs, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    smaller = tl.zeros((BLOCK,), tl.int32)
    equal = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_pairs, BLOCK):
        index = start + tl.arange(0, BLOCK)
        found = tl.load(ids + index, mask=index < num_pairs, other=2147483647)
        smaller += (found < expert).to(tl.int32)
        equal += (found == expert).to(tl.int32)
    place = tl.sum(smaller, 0)
    tl.store(ends + expert, place + tl.sum(equal, 0))
    for start in range(0, num_pairs, BLOCK):
        index = start + tl.arange(0, BLOCK)
        mine = tl.load(ids + index, mask=index < num_pairs, other=2147483647) == expert
        places = place + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(pair + places, index, mask=mine)
        tl.store(row + index, places, mask=mine)
        place += tl.sum(mine.to(tl.int32), 0)


def multiply(
    x: Tensor,
    weight_EIO: Tensor,
    ends_E: Tensor,
    num_rows: int,
    through: Through = (None, 1),
    *,
    scale: float = 1.0,
    low_MR: Tensor | None = None,
    b_ERO: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """`scale * (x @ weight[e]) + low @ b[e]` for each row's expert e, [M, O], summed in float32 and rounded once.

    Args:
        x: [M, I] in a 16-bit type; where `through` holds the rows' pairs and K, [T, I]: row m
            is token `pair[m] // K`.
        weight_EIO: [E, I, O], any strides; rounded to the type of `x`.
        low_MR, b_ERO: the low-rank product, `b` as `weight`; both or none.
        tile: None is the one for such shapes.
    """
    pair_M, top_k = through
    num_experts, width, out_width = weight_EIO.shape
    x, low_MR = x.contiguous(), None if low_MR is None else low_MR.contiguous()
    tile = tile or _tile(num_rows // num_experts, out_width)
    out_MO = x.new_empty(num_rows, out_width)
    rank = 0 if low_MR is None else low_MR.shape[1]
    has_low = low_MR is not None and b_ERO is not None
    b = b_ERO if b_ERO is not None and has_low else weight_EIO
    slots = triton.cdiv(num_rows // tile.rows + num_experts, tile.group) * tile.group
    _multiply_kernel[(slots * triton.cdiv(out_width, tile.columns),)](
        x,
        weight_EIO,
        low_MR if has_low else x,
        b,
        out_MO,
        pair_M if pair_M is not None else ends_E,
        ends_E,
        weight_EIO.stride(0),
        b.stride(0),
        scale,
        IN_STRIDE=weight_EIO.stride(1),
        OUT_STRIDE=weight_EIO.stride(2),
        B_RANK_STRIDE=b.stride(1),
        B_OUT_STRIDE=b.stride(2),
        EXPERTS=num_experts,
        EXPERTS_PADDED=triton.next_power_of_2(num_experts),
        IN=width,
        OUT=out_width,
        RANK=rank,
        RANK_PADDED=max(_MIN_DOT, triton.next_power_of_2(max(rank, 1))),
        TOP_K=top_k if pair_M is not None else 0,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        GROUP=tile.group,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out_MO


@triton.jit
def _multiply_kernel(
    x,
    weight,
    low,
    b,
    out,
    pair,
    ends,
    expert_stride,
    b_expert_stride,
    scale,
    IN_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    B_RANK_STRIDE: tl.constexpr,
    B_OUT_STRIDE: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    num_columns = (OUT + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    slot = program // (GROUP * num_columns) * GROUP + program % GROUP
    column_block = program % (GROUP * num_columns) // GROUP
    # Expert e has the slots from `start // ROWS + e` on: as many as its rows can need, some of which stay idle.
    experts = tl.arange(0, EXPERTS_PADDED)
    starts = tl.load(ends + experts - 1, mask=(experts > 0) & (experts < EXPERTS), other=0)
    first_slots = tl.where(experts < EXPERTS, starts // ROWS + experts, 2147483647)
    expert = tl.sum((first_slots <= slot).to(tl.int32), 0) - 1
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    first = start + (slot - start // ROWS - expert) * ROWS
    if first >= end:
        return
    rows = first + tl.arange(0, ROWS)
    inside = rows < end
    rows = tl.minimum(rows, end - 1)  # what lies beyond reads the last row again and writes nothing
    columns = column_block * COLUMNS + tl.arange(0, COLUMNS)
    kept = columns < OUT
    columns = tl.minimum(columns, OUT - 1) if OUT % COLUMNS else columns
    source = tl.load(pair + rows) // TOP_K if TOP_K else rows
    depth = tl.arange(0, DEPTH)
    x_at = x + source.to(tl.int64)[:, None] * IN + depth[None, :]
    weight_at = (
        weight + expert.to(tl.int64) * expert_stride + depth[:, None] * IN_STRIDE + columns[None, :] * OUT_STRIDE
    )
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(0, IN, DEPTH):
        if IN % DEPTH:
            left = IN - step
            x_part = tl.load(x_at, mask=depth[None, :] < left, other=0.0)
            weight_part = tl.load(weight_at, mask=depth[:, None] < left, other=0.0)
        else:
            x_part = tl.load(x_at)
            weight_part = tl.load(weight_at)
        total = tl.dot(x_part, weight_part.to(x_part.dtype), total)
        x_at += DEPTH
        weight_at += DEPTH * IN_STRIDE
    total *= scale
    if RANK:
        ranks = tl.arange(0, RANK_PADDED)
        low_at = low + rows.to(tl.int64)[:, None] * RANK + ranks[None, :]
        b_at = (
            b + expert.to(tl.int64) * b_expert_stride + ranks[:, None] * B_RANK_STRIDE + columns[None, :] * B_OUT_STRIDE
        )
        low_part = tl.load(low_at, mask=ranks[None, :] < RANK, other=0.0)
        b_part = tl.load(b_at, mask=ranks[:, None] < RANK, other=0.0)
        total = tl.dot(low_part, b_part.to(low_part.dtype), total)
    out_at = out + rows.to(tl.int64)[:, None] * OUT + columns[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=inside[:, None] & kept[None, :])


def outer(
    y: Tensor,
    x: Tensor,
    ends_E: Tensor,
    dtype: torch.dtype,
    through: Through = (None, 1),
    *,
    tile: Tile | None = None,
) -> Tensor:
    """`y.T @ x` over each expert's rows, [E, O, I] in `dtype`, summed in float32; zeros for an expert without rows.

    Args:
        y: [M, O].
        x: [M, I] or [T, I], as in `multiply`.
        tile: `rows` of the sum at a time; `columns` of the wider side, all of the narrower one (LoRA's rank).
    """
    pair_M, top_k = through
    y, x = y.contiguous(), x.contiguous()
    num_experts, out_width, width = len(ends_E), y.shape[1], x.shape[1]
    tile = tile or _outer_tile(y.shape[0] // num_experts)
    out = torch.empty((num_experts, out_width, width), dtype=dtype, device=y.device)
    narrow = max(_MIN_DOT, triton.next_power_of_2(min(out_width, width)))
    block_out, block_in = (tile.columns, narrow) if out_width > width else (narrow, tile.columns)
    grid = (triton.cdiv(out_width, block_out) * triton.cdiv(width, block_in), num_experts)
    _outer_kernel[grid](
        y,
        x,
        out,
        pair_M if pair_M is not None else ends_E,
        ends_E,
        IN=width,
        OUT=out_width,
        TOP_K=top_k if pair_M is not None else 0,
        ROWS=tile.rows,
        BLOCK_OUT=block_out,
        BLOCK_IN=block_in,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


@triton.jit
def _outer_kernel(
    y,
    x,
    out,
    pair,
    ends,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    num_in = (IN + BLOCK_IN - 1) // BLOCK_IN
    expert = tl.program_id(1)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    outs = tl.program_id(0) // num_in * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    ins = tl.program_id(0) % num_in * BLOCK_IN + tl.arange(0, BLOCK_IN)
    total = tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    for first in range(start, end, ROWS):
        rows = first + tl.arange(0, ROWS)
        inside = rows < end
        source = tl.load(pair + rows, mask=inside, other=0) // TOP_K if TOP_K else rows
        y_at = y + rows.to(tl.int64)[None, :] * OUT + outs[:, None]
        x_at = x + source.to(tl.int64)[:, None] * IN + ins[None, :]
        y_part = tl.load(y_at, mask=inside[None, :] & (outs[:, None] < OUT), other=0.0)
        x_part = tl.load(x_at, mask=inside[:, None] & (ins[None, :] < IN), other=0.0)
        total = tl.dot(y_part, x_part, total)
    place = expert.to(tl.int64) * OUT * IN + outs.to(tl.int64)[:, None] * IN + ins[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(outs[:, None] < OUT) & (ins[None, :] < IN))
