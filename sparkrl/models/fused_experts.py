"""The routed experts' one function for a GPU: grouped products, and one compiled kernel for all that lies between two.

The same computation as `sparkrl.models.experts`, which is its reference, over rows that are sorted without padding.
A low-rank product is added inside the kernel that reads the wide one next. The LoRA scale is folded into A, so it costs
no pass of its own.

Legend: T token, K routed slot, M = T * K expert rows, E expert, R rank, H width, I expert width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparkrl.models.compiled import region, wide
from sparkrl.models.grouped import GroupedRows


class FusedExperts(torch.autograd.Function):
    """Gradients: input, routing weights, and the factors where there are any."""

    @staticmethod
    def forward(ctx, base: Any, rows: GroupedRows, scale: float, x_TH: Tensor, weights_TK: Tensor, *factors: Tensor):
        backend, norm, dtype = base.compile_backend, base.norm, x_TH.dtype
        gate_up_EOH, down_EHI = base.weights()
        delta_gate_up = delta = None
        lows: tuple[Tensor, ...] = ()
        x_MH = x_TH.index_select(0, rows.token_M)
        gate_up_MO = rows.multiply(x_MH, gate_up_EOH.mT)
        if factors:
            gate_up_a, gate_up_b, down_a, down_b = _rounded(backend, dtype, scale, *factors)
            low_gate_up_MR = rows.multiply(x_MH, gate_up_a.mT)
            delta_gate_up = rows.multiply(low_gate_up_MR, gate_up_b.mT)
        del x_MH
        h_MI = gated(backend, gate_up_MO, delta_gate_up)
        del delta_gate_up
        y_MH = rows.multiply(h_MI, down_EHI.mT)
        if factors:
            low_down_MR = rows.multiply(h_MI, down_a.mT)
            delta = rows.multiply(low_down_MR, down_b.mT)
            lows = (low_gate_up_MR, low_down_MR)
        del h_MI
        weight_H, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        inverse_rms_M = finish(backend, y_MH, delta, weight_H, eps)
        out_TH = combine(backend, y_MH, rows.inverse_TK, weights_TK, inverse_rms_M, weight_H)
        ctx.base, ctx.rows, ctx.scale = base, rows, scale
        ctx.save_for_backward(x_TH, weights_TK, gate_up_MO, y_MH, *lows, *factors)
        return out_TH

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TH: Tensor):
        base, rows = ctx.base, ctx.rows
        backend, norm = base.compile_backend, base.norm
        x_TH, weights_TK, gate_up_MO, y_MH, *more = ctx.saved_tensors
        lows, factors = more[:2], more[2:]
        gate_up_EOH, down_EHI = base.weights()
        weight_H, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        grad_y_MH, grad_weights_TK = combine_backward(
            backend, grad_TH, y_MH, rows.token_M, rows.pair_M, rows.inverse_TK, weights_TK, weight_H, eps
        )
        grad_h_MI, delta_h = rows.multiply(grad_y_MH, down_EHI), None
        if factors:
            gate_up_a, gate_up_b, down_a, down_b = _rounded(backend, x_TH.dtype, ctx.scale, *factors)
            grad_low_down_MR = rows.multiply(grad_y_MH, down_b)
            delta_h = rows.multiply(grad_low_down_MR, down_a)
        grad_gate_up_MO, h_MI = gated_backward(backend, gate_up_MO, grad_h_MI, delta_h, bool(factors))
        del grad_h_MI, delta_h, down_EHI
        grads: tuple[Tensor | None, ...] = ()
        if factors:
            of_down = rows.outer(grad_low_down_MR, h_MI), rows.outer(grad_y_MH, lows[1])
            grad_low_gate_up_MR = rows.multiply(grad_gate_up_MO, gate_up_b)
            x_MH = x_TH.index_select(0, rows.token_M)
            of_gate_up = rows.outer(grad_low_gate_up_MR, x_MH), rows.outer(grad_gate_up_MO, lows[0])
            grads = _widened(backend, factors[0].dtype, ctx.scale, *of_gate_up, *of_down)
            del x_MH, of_down, of_gate_up
        del grad_y_MH, h_MI
        grad_x_TH = None
        if ctx.needs_input_grad[3]:
            grad_x_MH = rows.multiply(grad_gate_up_MO, gate_up_EOH)
            delta_x = rows.multiply(grad_low_gate_up_MR, gate_up_a) if factors else None
            grad_x_TH = token_sum(backend, grad_x_MH, delta_x, rows.inverse_TK)
        return None, None, None, grad_x_TH, grad_weights_TK, *grads


@region()
def _rounded(dtype: torch.dtype, scale: float, *factors: Tensor) -> tuple[Tensor, ...]:
    """Factors in the compute type, A times the scale."""
    gate_up_a, gate_up_b, down_a, down_b = factors
    return (gate_up_a * scale).to(dtype), gate_up_b.to(dtype), (down_a * scale).to(dtype), down_b.to(dtype)


@region()
def _widened(dtype: torch.dtype, scale: float, *grads: Tensor) -> tuple[Tensor, ...]:
    """Gradients in the factors' type, those of A times the scale, as `_rounded` has it."""
    gate_up_a, gate_up_b, down_a, down_b = grads
    return gate_up_a.to(dtype) * scale, gate_up_b.to(dtype), down_a.to(dtype) * scale, down_b.to(dtype)


@region(0, 1)
def gated(gate_up_MO: Tensor, delta_MO: Tensor | None) -> Tensor:
    """`silu(gate) * up`; the delta is added to `gate_up_MO` in place."""
    if delta_MO is not None:
        gate_up_MO.add_(delta_MO)
    gate_MI, up_MI = gate_up_MO.chunk(2, dim=-1)
    return F.silu(gate_MI) * up_MI


@region(0, 1, 2)
def gated_backward(
    gate_up_MO: Tensor, grad_h_MI: Tensor, delta_MI: Tensor | None, with_h: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradient of gate and up, and, for A's own gradient, the activation once more."""
    gate_MI, up_MI = (wide(part) for part in gate_up_MO.chunk(2, dim=-1))
    grad = wide(grad_h_MI) if delta_MI is None else wide(grad_h_MI) + wide(delta_MI)
    sigmoid = torch.sigmoid(gate_MI)
    silu = gate_MI * sigmoid
    grad_gate = grad * up_MI * (sigmoid + silu * (1 - sigmoid))
    out = torch.cat([grad_gate, grad * silu], dim=-1).to(gate_up_MO.dtype)
    return out, (silu * up_MI).to(gate_up_MO.dtype) if with_h else None


@region(0, 1)
def finish(y_MH: Tensor, delta_MH: Tensor | None, weight_H: Tensor | None, eps: float) -> Tensor | None:
    """Add the delta to `y_MH` in place; the rows' 1 / rms where there is a norm."""
    if delta_MH is not None:
        y_MH.add_(delta_MH)
    return None if weight_H is None else _inverse_rms(_scaled(y_MH, weight_H), eps)


@region(0, 1, 2, 3)
def combine(
    y_MH: Tensor, inverse_TK: Tensor, weights_TK: Tensor, inverse_rms_M: Tensor | None, weight_H: Tensor | None
) -> Tensor:
    """Norm, routing weight and sum, in float32; rounded once, at the end."""
    if inverse_rms_M is not None:
        weights_TK = weights_TK * inverse_rms_M[inverse_TK]
    pairs = zip(inverse_TK.unbind(1), weights_TK.unbind(1), strict=True)
    out_TH = _added([wide(y_MH[row_T]) * weight_T.unsqueeze(-1) for row_T, weight_T in pairs])
    if weight_H is not None:
        out_TH = out_TH * (1 + wide(weight_H))
    return out_TH.to(y_MH.dtype)


@region(0, 1, 2, 3, 4, 5)
def combine_backward(
    grad_TH: Tensor,
    y_MH: Tensor,
    token_M: Tensor,
    pair_M: Tensor,
    inverse_TK: Tensor,
    weights_TK: Tensor,
    weight_H: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of the experts' outputs [M, H] and of the routing weights [T, K]; see `experts._combine_backward`."""
    g_MH = wide(grad_TH[token_M])
    w_M = weights_TK.flatten()[pair_M].unsqueeze(-1)
    if weight_H is None:
        dots_M = (wide(y_MH) * g_MH).sum(-1)
        grad_y_MH = g_MH * w_M
    else:
        z_MH = _scaled(y_MH, weight_H)
        r_M1 = _inverse_rms(z_MH, eps).unsqueeze(-1)
        dot_M1 = (z_MH * g_MH).sum(-1, keepdim=True) * r_M1
        dots_M = dot_M1.squeeze(-1)
        grad_z_MH = (g_MH - z_MH * (dot_M1 * r_M1 / y_MH.shape[1])) * (r_M1 * w_M)
        grad_y_MH = grad_z_MH * (1 + wide(weight_H))
    return grad_y_MH.to(y_MH.dtype), dots_M[inverse_TK].to(weights_TK.dtype)


@region(0, 1, 2)
def token_sum(grad_MH: Tensor, delta_MH: Tensor | None, inverse_TK: Tensor) -> Tensor:
    """Each token's rows, and the deltas', summed in a fixed order in float32; rounded once."""
    slots = inverse_TK.unbind(1)
    parts = [wide(grad_MH[row_T]) for row_T in slots]
    if delta_MH is not None:
        parts = [part + wide(delta_MH[row_T]) for part, row_T in zip(parts, slots, strict=True)]
    return _added(parts).to(grad_MH.dtype)


def _added(parts: list[Tensor]) -> Tensor:
    # slot by slot, which compiles to one pass along the rows; a sum over a dimension took four times as long on an H200
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _scaled(y_MH: Tensor, weight_H: Tensor) -> Tensor:
    return wide(y_MH) * (1 + wide(weight_H))


def _inverse_rms(z_MH: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(z_MH.pow(2).mean(-1) + eps)
