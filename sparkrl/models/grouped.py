"""Grouped matrix products over rows sorted by expert.

Legend: T token, K routed slot, N = T * K rows sorted by expert, E expert, I in, O out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# torch 2.11, which CUDA hosts may have, may know it by its older name only
_grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """Where each (token, slot) pair lies once pairs are sorted by expert."""

    token_N: Tensor
    """int64 [N], the token of each sorted row."""
    inverse_TK: Tensor
    """int64 [T, K], the sorted row of each pair."""
    offsets_E: Tensor
    """int32 [E], end of each expert's rows."""

    @classmethod
    def sort(cls, ids_TK: Tensor, num_experts: int) -> GroupedRows:
        """Sort the pairs of `ids_TK` (int64 [T, K]) by expert; stable, so equal inputs give equal sums."""
        flat = ids_TK.reshape(-1)
        order = torch.argsort(flat, stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        counts = torch.zeros(num_experts, dtype=torch.int32, device=flat.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        return cls(order // ids_TK.shape[1], inverse.view_as(ids_TK), counts.cumsum(0, dtype=torch.int32))

    def gather(self, x_TI: Tensor) -> Tensor:
        """[T, I] -> [N, I]; backward sums each token's K rows in a fixed order instead of with atomics."""
        return _Gather.apply(x_TI, self.token_N, self.inverse_TK)

    def weighted_sum(self, y_NO: Tensor, weights_TK: Tensor) -> Tensor:
        """[N, O] and [T, K] -> [T, O], in the type of `y_NO`."""
        return torch.einsum("tko,tk->to", y_NO[self.inverse_TK], weights_TK.to(y_NO.dtype))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TI: Tensor, token_N: Tensor, inverse_TK: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_TK)
        return x_TI[token_N]

    @staticmethod
    def backward(ctx, grad_NI: Tensor):
        (inverse_TK,) = ctx.saved_tensors
        return grad_NI[inverse_TK].sum(1), None, None


def grouped_linear(x_NI: Tensor, weight_EOI: Tensor, rows: GroupedRows) -> Tensor:
    """`x @ weight[e].T` for each row's expert e.

    Args:
        x_NI: [N, I], sorted by expert.
        weight_EOI: [E, O, I], same type as `x_NI`.
    Returns:
        [N, O].
    """
    # the kernels want rows of a multiple of 16 bytes; a rank of 4 in bfloat16 has 8
    if all(width * x_NI.element_size() % 16 == 0 for width in weight_EOI.shape[1:]):
        return _grouped_mm(x_NI, weight_EOI.transpose(-2, -1), offs=rows.offsets_E)
    ends = rows.offsets_E.tolist()
    parts = zip([0, *ends], ends, weight_EOI, strict=False)
    return torch.cat([x_NI[start:end] @ weight.T for start, end, weight in parts])
