"""The routed experts' one function as one compiled region forward and one backward, over this project's own kernels.

The computation of `fused_experts` with fewer kernels and less memory traffic: a product takes the tokens' rows through
the order and adds the low-rank product where it sums, factors are read and their gradients written in the type in which
they are trained. It is not the default: the kernels' values are checked by Triton's interpreter only, and their tiles
are not tuned. `benchmarks.gpu_expert_lora --modes compiled kernels` sets the two side by side.

Legend: T token, K routed slot, M = T * K expert rows, E expert, R rank, H width, I expert width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparkrl.models.compiled import region
from sparkrl.models.expert_products import Order, multiply, order, outer
from sparkrl.models.fused_experts import combine, combine_backward, finish, gated, gated_backward, token_sum

Norm = tuple[Tensor | None, float]
"""Weight [H] and eps of the norm of each expert's output; None without one."""
Factors = tuple[Tensor, ...]
"""A and B of gate and up, A and B of down, as in `experts.ExpertFactors`; empty without LoRA."""


class KernelExperts(torch.autograd.Function):
    """Gradients: input, routing weights, and the factors where there are any."""

    @staticmethod
    def forward(ctx, base: Any, scale: float, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, *factors: Tensor):
        out_TH, *kept = _forward(
            base.compile_backend, x_TH, ids_TK, weights_TK, *base.weights(), factors, scale, _norm(base)
        )
        ctx.base, ctx.scale = base, scale
        ctx.save_for_backward(x_TH, weights_TK, *kept, *factors)
        return out_TH

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TH: Tensor):
        base = ctx.base
        x_TH, weights_TK, pair_M, row_TK, ends_E, gate_up_MO, y_MH, *more = ctx.saved_tensors
        low_gate_up_MR, low_down_MR, *factors = more or (None, None)
        grad_x_TH, grad_weights_TK, *grads = _backward(
            base.compile_backend,
            *(grad_TH, x_TH, weights_TK, pair_M, row_TK, gate_up_MO, y_MH, low_gate_up_MR, low_down_MR),
            *(ends_E, *base.weights(), tuple(factors), ctx.scale, _norm(base), ctx.needs_input_grad[2]),
        )
        return None, None, grad_x_TH, None, grad_weights_TK, *grads


def _norm(base: Any) -> Norm:
    return (None, 0.0) if base.norm is None else (base.norm.weight, base.norm.eps)


# Inside a region the parts of `fused_experts` are called without a backend: they are traced with what is around them.


@region(0, 1, 2)
def _forward(
    x_TH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up_EOH: Tensor,
    down_EHI: Tensor,
    factors: Factors,
    scale: float,
    norm: Norm,
) -> tuple[Tensor, ...]:
    """The layer's output, then what backward needs: the order, wide products, and low-rank ones where there are any."""
    rows = order(ids_TK, down_EHI.shape[0], x_TH.dtype)
    low_gate_up_MR = low_down_MR = gate_up_b = down_b = None
    if factors:
        gate_up_a, gate_up_b, down_a, down_b = factors[0].mT, factors[1].mT, factors[2].mT, factors[3].mT
        low_gate_up_MR = multiply(rows, x_TH, gate_up_a, by_token=True, scale=scale)
    gate_up_MO = multiply(rows, x_TH, gate_up_EOH.mT, by_token=True, low_MR=low_gate_up_MR, b_ERO=gate_up_b)
    h_MI = gated(None, gate_up_MO, None)
    if factors:
        low_down_MR = multiply(rows, h_MI, down_a, scale=scale)
    y_MH = multiply(rows, h_MI, down_EHI.mT, low_MR=low_down_MR, b_ERO=down_b)
    inverse_rms_M = finish(None, y_MH, None, *norm)
    out_TH = combine(None, y_MH, rows.row_TK, weights_TK, inverse_rms_M, norm[0])
    lows = () if low_gate_up_MR is None or low_down_MR is None else (low_gate_up_MR, low_down_MR)
    return out_TH, *rows, gate_up_MO, y_MH, *lows


@region(0, 1, 2, 3, 4, 5, 6, 7, 8)
def _backward(
    grad_TH: Tensor,
    x_TH: Tensor,
    weights_TK: Tensor,
    pair_M: Tensor,
    row_TK: Tensor,
    gate_up_MO: Tensor,
    y_MH: Tensor,
    low_gate_up_MR: Tensor | None,
    low_down_MR: Tensor | None,
    ends_E: Tensor,
    gate_up_EOH: Tensor,
    down_EHI: Tensor,
    factors: Factors,
    scale: float,
    norm: Norm,
    with_x: bool,
) -> tuple[Tensor | None, ...]:
    """Gradients of input, routing weights and factors."""
    rows = Order(pair_M, row_TK, ends_E)
    grad_y_MH, grad_weights_TK = combine_backward(None, grad_TH, y_MH, rows.token_M, pair_M, row_TK, weights_TK, *norm)
    grad_low_down_MR = grad_low_gate_up_MR = gate_up_a = down_a = None
    if factors:
        gate_up_a, gate_up_b, down_a, down_b = factors
        grad_low_down_MR = multiply(rows, grad_y_MH, down_b, scale=scale)
    grad_h_MI = multiply(rows, grad_y_MH, down_EHI, low_MR=grad_low_down_MR, b_ERO=down_a)
    grad_gate_up_MO, h_MI = gated_backward(None, gate_up_MO, grad_h_MI, None, bool(factors))
    grads: tuple[Tensor, ...] = ()
    if low_gate_up_MR is not None and low_down_MR is not None and grad_low_down_MR is not None:
        grad_low_gate_up_MR = multiply(rows, grad_gate_up_MO, gate_up_b, scale=scale)
        dtype = gate_up_b.dtype
        grads = (
            outer(rows, grad_low_gate_up_MR, x_TH, dtype, by_token=True),
            outer(rows, grad_gate_up_MO, low_gate_up_MR, dtype),
            outer(rows, grad_low_down_MR, h_MI, dtype),
            outer(rows, grad_y_MH, low_down_MR, dtype),
        )
    grad_x_TH = None
    if with_x:
        grad_x_MH = multiply(rows, grad_gate_up_MO, gate_up_EOH, low_MR=grad_low_gate_up_MR, b_ERO=gate_up_a)
        grad_x_TH = token_sum(None, grad_x_MH, None, row_TK)
    return grad_x_TH, grad_weights_TK, *grads
