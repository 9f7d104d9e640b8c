"""Matrix products of many experts at once, over rows that lie together by expert.

On CUDA rows are sorted by expert and one grouped kernel takes them all. On CPU, where that kernel is a loop of small
products whose start costs more than their work, the first `capacity` rows of every expert lie in one padded block that
a batched product takes in one go; what an expert has beyond that follows and is multiplied on its own.

Legend: T token, K routed slot, M expert rows (padding included), E expert, C capacity, I in, O out, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# torch 2.11, which CUDA hosts may have, may know it by its older name only
_grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm
_ROWS_AN_EXTRA_EXPERT = 48
"""What an expert with rows beyond the padded block costs, in rows of it: the starts of its products. Measured."""
_SUM_BYTES = 2**27
"""Bound on a sum's float32 temporaries."""


@dataclass(frozen=True)
class GroupedRows:
    """Where each (token, slot) pair lies, and the products over the experts' rows.

    Every method gives equal bits for equal inputs: sums run in an order that the ids alone decide.
    """

    token_M: Tensor
    """int64 [M], the token of each row; T, one past the last, for padding."""
    inverse_TK: Tensor
    """int64 [T, K], the row of each pair."""
    offsets_E: Tensor
    """int32 [E], end of each expert's rows once sorted, as the grouped kernel wants it."""
    capacity: int
    """Rows of each expert in the padded block; 0 means that all rows are sorted without padding."""
    padded: bool
    """Whether some rows are padding."""
    extra_counts: tuple[int, ...] | None
    """Each expert's rows beyond the padded block; None where the device knows them only (CUDA)."""
    pair_M: Tensor | None = None
    """int64 [M], the pair of each row, where no row is padding by layout."""

    @classmethod
    def sort(cls, ids_TK: Tensor, num_experts: int, *, pad: bool | None = None) -> GroupedRows:
        """Lay out the pairs of `ids_TK` (int64 [T, K]); a token's order within its expert is kept.

        Args:
            pad: whether rows may lie in a padded block; None is what suits the device.
        """
        flat = ids_TK.reshape(-1)
        if flat.is_cuda if pad is None else not pad:
            return cls._sort_unpadded(flat, ids_TK.shape, num_experts)
        order = torch.argsort(flat, stable=True)
        counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        ends = counts.cumsum(0)
        tokens = order // ids_TK.shape[1]
        capacity = _capacity(counts.tolist())
        extra = (counts - capacity).clamp_(min=0)
        num_rows = num_experts * capacity + int(extra.sum())
        expert = flat[order]
        place = torch.arange(order.numel()) - (ends - counts)[expert]
        beyond = num_experts * capacity + (extra.cumsum(0) - extra)[expert] + place - capacity
        row = torch.where(place < capacity, expert * capacity + place, beyond)
        token_M = torch.full((num_rows,), len(ids_TK))
        token_M[row] = tokens
        inverse = torch.empty_like(order)
        inverse[order] = row
        padded = num_rows > order.numel()
        return cls(token_M, inverse.view_as(ids_TK), ends.int(), capacity, padded, tuple(extra.tolist()))

    @classmethod
    def _sort_unpadded(cls, flat: Tensor, shape: torch.Size, num_experts: int) -> GroupedRows:
        # few kernels, none of which the host waits for; narrow keys take fewer passes of the radix sort
        key = torch.int16 if num_experts < 2**15 else torch.int32
        experts, order = torch.sort(flat.to(key), stable=True)
        every = torch.arange(num_experts, dtype=key, device=flat.device)
        offsets = torch.searchsorted(experts, every, right=True, out_int32=True)
        places = torch.arange(order.numel(), device=flat.device)
        inverse = torch.empty_like(order).scatter_(0, order, places)
        return cls(order // shape[1], inverse.view(shape), offsets, 0, False, None, order)

    @cached_property
    def extra(self) -> list[tuple[int, int, int]]:
        """(expert, first row, end) of the rows beyond the padded block, for the experts that have any."""
        if self.extra_counts is None:
            ends = [0, *self.offsets_E.tolist()]
        else:
            ends = [len(self.offsets_E) * self.capacity]
            for count in self.extra_counts:
                ends.append(ends[-1] + count)
        return [(expert, start, end) for expert, (start, end) in enumerate(pairwise(ends)) if end > start]

    def take(self, x_TI: Tensor) -> Tensor:
        """[T, I] -> [M, I], zeros in padding; not differentiable."""
        return (F.pad(x_TI, (0, 0, 0, 1)) if self.padded else x_TI).index_select(0, self.token_M)

    def sum(self, y_MO: Tensor, weights_TK: Tensor | None = None) -> Tensor:
        """[M, O] -> [T, O], the sum over each token's rows, times `weights_TK` where given; not differentiable."""
        if y_MO.dtype == torch.bfloat16:  # the fused sum would round the weights
            if weights_TK is None:
                return y_MO[self.inverse_TK].sum(1, dtype=torch.float32)
            step = max(1, _SUM_BYTES // (4 * self.inverse_TK.shape[1] * y_MO.shape[1]))
            parts = zip(self.inverse_TK.split(step), weights_TK.split(step), strict=True)
            return torch.cat([(y_MO[inverse] * weights.unsqueeze(-1)).sum(1) for inverse, weights in parts])
        weights = None if weights_TK is None else weights_TK.to(y_MO.dtype)
        return F.embedding_bag(self.inverse_TK, y_MO, mode="sum", per_sample_weights=weights)

    def gather(self, x_TI: Tensor) -> Tensor:
        """As `take`, differentiable; backward sums each token's K rows in a fixed order instead of with atomics."""
        return _Gather.apply(x_TI, self)

    def weighted_sum(self, y_MO: Tensor, weights_TK: Tensor) -> Tensor:
        """[M, O] and [T, K] -> [T, O], in the type of `y_MO`; differentiable."""
        return torch.einsum("tko,tk->to", y_MO[self.inverse_TK], weights_TK.to(y_MO.dtype))

    def multiply(self, x_MI: Tensor, weight_EIO: Tensor, *, add_to: Tensor | None = None) -> Tensor:
        """`x @ weight[e]` for each row's expert e; not differentiable.

        Args:
            x_MI: [M, I].
            weight_EIO: [E, I, O], same type as `x_MI`; may be a transposed view.
            add_to: [M, O], contiguous; the products are added to it in place.
        Returns:
            [M, O], `add_to` where given.
        """
        if self._has_kernel(x_MI, weight_EIO.shape[1:]):
            out = _grouped_mm(x_MI, weight_EIO, offs=self.offsets_E)
            return out if add_to is None else add_to.add_(out)
        out = x_MI.new_empty(len(x_MI), weight_EIO.shape[2]) if add_to is None else add_to
        beta = 0 if add_to is None else 1
        if self.capacity:
            block = self._block(out)
            torch.baddbmm(block, self._block(x_MI), weight_EIO, beta=beta, out=block)
        for expert, start, end in self.extra:
            part = out[start:end]
            torch.addmm(part, x_MI[start:end], weight_EIO[expert], beta=beta, out=part)
        return out

    def outer(self, y_MO: Tensor, x_MI: Tensor) -> Tensor:
        """`y.T @ x` over each expert's rows, [E, O, I]: the gradient of weights; zeros for an expert without rows."""
        if self._has_kernel(x_MI, (y_MO.shape[1], x_MI.shape[1])):
            return _grouped_mm(y_MO.t(), x_MI, offs=self.offsets_E)
        shape = (len(self.offsets_E), y_MO.shape[1], x_MI.shape[1])
        out = torch.bmm(self._block(y_MO).mT, self._block(x_MI)) if self.capacity else x_MI.new_zeros(shape)
        for expert, start, end in self.extra:
            out[expert].addmm_(y_MO[start:end].t(), x_MI[start:end])
        return out

    def _block(self, x_MI: Tensor) -> Tensor:
        num_experts = len(self.offsets_E)
        return x_MI[: num_experts * self.capacity].view(num_experts, self.capacity, x_MI.shape[1])

    def _has_kernel(self, x: Tensor, widths: tuple[int, ...]) -> bool:
        # it wants rows of a multiple of 16 bytes; a rank of 4 in bfloat16 has 8
        return x.is_cuda and x.dtype == torch.bfloat16 and all(width % 8 == 0 for width in widths)


def _capacity(counts: list[int]) -> int:
    """The padded block's rows an expert that make block, rows beyond it and products on their own cheapest in all."""
    ordered = sorted(counts, reverse=True)
    best, best_cost, above = 0, float(sum(ordered) + _ROWS_AN_EXTRA_EXPERT * sum(count > 0 for count in ordered)), 0
    for num_above, count in enumerate(ordered):
        # `num_above` experts have rows beyond a capacity of `count`
        cost = len(ordered) * count + above - num_above * count + _ROWS_AN_EXTRA_EXPERT * num_above
        if count and cost < best_cost:
            best, best_cost = count, cost
        above += count
    return best


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TI: Tensor, rows: GroupedRows) -> Tensor:
        ctx.rows = rows
        return rows.take(x_TI)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_MI: Tensor):
        return ctx.rows.sum(grad_MI).to(grad_MI.dtype), None


def grouped_linear(x_MI: Tensor, weight_EOI: Tensor, rows: GroupedRows) -> Tensor:
    """`x @ weight[e].T` for each row's expert e, differentiable.

    Args:
        x_MI: [M, I], as `rows` lays them out.
        weight_EOI: [E, O, I], same type as `x_MI`.
    Returns:
        [M, O].
    """
    return _GroupedLinear.apply(x_MI, weight_EOI, rows)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_MI: Tensor, weight_EOI: Tensor, rows: GroupedRows) -> Tensor:
        ctx.save_for_backward(x_MI, weight_EOI)
        ctx.rows = rows
        return rows.multiply(x_MI, weight_EOI.mT)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_MO: Tensor):
        x_MI, weight_EOI = ctx.saved_tensors
        grad_MO = grad_MO.contiguous()
        grad_x = ctx.rows.multiply(grad_MO, weight_EOI) if ctx.needs_input_grad[0] else None
        grad_weight = ctx.rows.outer(grad_MO, x_MI) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None
