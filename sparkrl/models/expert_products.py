"""What the compiled experts call on rows sorted by expert: one signature over Triton's kernels and the reference.

Kernels serve 16-bit types on CUDA. Everything else goes through `GroupedRows`, as operators that a traced
graph may hold.

Legend: T token, K routed slot, M = T * K expert rows, E expert, I in, O out, R rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparkrl.models.grouped import GroupedRows

kernels: Any
try:
    from sparkrl.models import expert_kernels as kernels
except ImportError:  # torch's CPU builds come without Triton
    kernels = None


class Order(NamedTuple):
    """Pairs of token and slot sorted by expert; integers of any width."""

    pair_M: Tensor
    """Pair of each row."""
    row_TK: Tensor
    """Row of each pair."""
    ends_E: Tensor
    """End of each expert's rows, int32."""

    @property
    def token_M(self) -> Tensor:
        """Token of each row."""
        return self.pair_M // self.row_TK.shape[1]


def order(ids_TK: Tensor, num_experts: int, dtype: torch.dtype) -> Order:
    """Sort the pairs of `ids_TK` (int64 [T, K]) for products in `dtype`; a token's order within its expert is kept."""
    if _has_kernels(ids_TK, dtype):
        pair_M, row_M, ends_E = kernels.order(ids_TK.reshape(-1), num_experts)
        return Order(pair_M, row_M.view(ids_TK.shape), ends_E)
    rows = GroupedRows.sort(ids_TK, num_experts, pad=False)
    assert rows.pair_M is not None
    return Order(rows.pair_M, rows.inverse_TK, rows.offsets_E)


def multiply(
    order: Order,
    x: Tensor,
    weight_EIO: Tensor,
    *,
    by_token: bool = False,
    scale: float = 1.0,
    low_MR: Tensor | None = None,
    b_ERO: Tensor | None = None,
) -> Tensor:
    """`scale * (x @ weight[e]) + low @ b[e]` for each row's expert e, [M, O] in the type of `x`.

    Args:
        x: [M, I], or [T, I] where `by_token`.
        weight_EIO: [E, I, O], may be a transposed view; rounded to the type of `x`, as is `b_ERO`.
        low_MR, b_ERO: a low-rank product, [M, R] and [E, R, O], or None.
    """
    if _has_kernels(x, x.dtype):
        through = (order.pair_M, order.row_TK.shape[1]) if by_token else (None, 1)
        return kernels.multiply(
            x, weight_EIO, order.ends_E, order.pair_M.shape[0], through, scale=scale, low_MR=low_MR, b_ERO=b_ERO
        )
    x_MI = x.index_select(0, order.token_M) if by_token else x
    out_MO = _multiply(x_MI, weight_EIO.to(x.dtype), order.ends_E)
    if scale != 1.0:
        out_MO = out_MO * scale
    if low_MR is not None and b_ERO is not None:
        out_MO = out_MO + _multiply(low_MR, b_ERO.to(x.dtype), order.ends_E)
    return out_MO


def outer(order: Order, y_MO: Tensor, x: Tensor, dtype: torch.dtype, *, by_token: bool = False) -> Tensor:
    """`y.T @ x` over each expert's rows, [E, O, I] in `dtype`; zeros without rows. `x` as in `multiply`."""
    if _has_kernels(x, x.dtype):
        through = (order.pair_M, order.row_TK.shape[1]) if by_token else (None, 1)
        return kernels.outer(y_MO, x, order.ends_E, dtype, through)
    return _outer(y_MO, x.index_select(0, order.token_M) if by_token else x, order.ends_E).to(dtype)


def _has_kernels(tensor: Tensor, dtype: torch.dtype) -> bool:
    return kernels is not None and tensor.is_cuda and dtype in (torch.bfloat16, torch.float16)


def _sorted_rows(ends_E: Tensor) -> GroupedRows:
    none = ends_E.new_empty(0)
    return GroupedRows(none, none, ends_E, capacity=0, padded=False, extra_counts=None)


@torch.library.custom_op("sparkrl::expert_multiply", mutates_args=())
def _multiply(x_MI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    return _sorted_rows(ends_E).multiply(x_MI, weight_EIO)


@_multiply.register_fake
def _(x_MI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    return x_MI.new_empty(x_MI.shape[0], weight_EIO.shape[2])


@torch.library.custom_op("sparkrl::expert_outer", mutates_args=())
def _outer(y_MO: Tensor, x_MI: Tensor, ends_E: Tensor) -> Tensor:
    return _sorted_rows(ends_E).outer(y_MO, x_MI)


@_outer.register_fake
def _(y_MO: Tensor, x_MI: Tensor, ends_E: Tensor) -> Tensor:
    return y_MO.new_empty(ends_E.shape[0], y_MO.shape[1], x_MI.shape[1])
