"""The routed experts of a layer, frozen, with or without LoRA factors on them: one pass forward, one backward.

Activations are what training of a large sparse model has little room for, so one autograd function covers a whole
layer's experts. It keeps the layer's input, the gate and up products, the experts' outputs and the low-rank
activations; rows, activations and norm are made again in backward, and so are frozen weights that are not held in the
compute type. Low-rank products are added in place to those of the frozen weights, so W + BA is never formed.

Legend: T token, K routed slot, M expert rows (padding included), E expert, R rank, H width, I expert width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.activations import SiLUActivation

from sparkrl.models.fused_experts import FusedExperts
from sparkrl.models.grouped import GroupedRows, grouped_linear
from sparkrl.models.kernel_experts import KernelExperts

_SILU = (nn.SiLU, SiLUActivation)
_CHUNK_BYTES = {"cpu": 2**20, "cuda": 2**28}
"""Temporaries of elementwise work: about what a core's cache holds, or little beside the GPU's memory."""


class RoutedExperts(nn.Module):
    """Base of a family's experts module: the computation, over weights that a subclass may hold in another form.

    A subclass has the attributes below (transformers' own experts classes do) and `weights()`.
    """

    num_experts: int
    hidden_dim: int
    intermediate_dim: int
    act_fn: nn.Module
    gate_up_proj: Any
    """[E, 2I, H]; gate rows come first."""
    down_proj: Any
    """[E, H, I]."""
    compile_backend: str | None = None
    """Where set, and on CUDA, `fused_experts` computes the layer."""
    own_kernels: bool = False
    """`kernel_experts` in place of `fused_experts`; see there why it is not the default."""

    @property
    def norm(self) -> nn.Module | None:
        """Norm of each expert's output before the routing weight, where the family has one, as `post_expert_norm`.

        `z / rms(z)` with `z = y * (1 + weight)` and `eps` added to the mean square.
        """
        return self._modules.get("post_expert_norm")

    def weights(self) -> tuple[Tensor, Tensor]:
        """`gate_up` [E, 2I, H] and `down` [E, H, I] in the compute type.

        Called in forward and again in backward, inside the module that FSDP gathers; nothing keeps the result between
        the two. So a subclass that holds its weights packed unpacks them here, to the same values both times.
        """
        return self.gate_up_proj, self.down_proj

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Weighted sum of the chosen experts' outputs.

        Args:
            hidden_states: [T, H] in the compute type.
            top_k_index: int64 [T, K].
            top_k_weights: float32 [T, K].
        Returns:
            [T, H] in the compute type, summed in float32.
        """
        return run_experts(self, hidden_states, top_k_index, top_k_weights)


@dataclass(frozen=True, slots=True)
class ExpertFactors:
    """LoRA factors of one layer's experts, in any floating type; they are rounded to the compute type."""

    gate_up_a: Tensor
    """[E, R, H]."""
    gate_up_b: Tensor
    """[E, 2I, R]."""
    down_a: Tensor
    """[E, R, I]."""
    down_b: Tensor
    """[E, H, R]."""
    scale: float
    dropout: float = 0.0
    """Probability that an input of A is zero; 0 where the layer is not in training."""


def run_experts(
    base: RoutedExperts,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    factors: ExpertFactors | None = None,
) -> Tensor:
    """As `RoutedExperts.forward`, with `factors` added to the weights' products.

    Whatever the one function does not cover (weights that are trained or replaced from outside, dropout, another
    activation) takes `composed_experts`, the same computation from differentiable parts.
    """
    dropout = factors is not None and factors.dropout
    if dropout or not isinstance(base.act_fn, _SILU) or (torch.is_grad_enabled() and not _is_frozen(base)):
        rows = GroupedRows.sort(top_k_index, base.num_experts)
        return composed_experts(base, hidden_states, rows, top_k_weights, factors)
    tensors = () if factors is None else (factors.gate_up_a, factors.gate_up_b, factors.down_a, factors.down_b)
    scale = 1.0 if factors is None else factors.scale
    compiled = base.compile_backend and hidden_states.is_cuda
    if compiled and base.own_kernels:
        return KernelExperts.apply(base, scale, hidden_states, top_k_index, top_k_weights, *tensors)
    rows = GroupedRows.sort(top_k_index, base.num_experts)
    function = FusedExperts if compiled else _Experts
    return function.apply(base, rows, scale, hidden_states, top_k_weights, *tensors)


def composed_experts(
    base: RoutedExperts, x_TH: Tensor, rows: GroupedRows, weights_TK: Tensor, factors: ExpertFactors | None = None
) -> Tensor:
    """The layer from parts that autograd knows; the reference of the one function."""
    gate_up_EOH, down_EHI = base.weights()
    x_MH = rows.gather(x_TH)
    gate_up_MO = grouped_linear(x_MH, gate_up_EOH, rows)
    if factors is not None:
        gate_up_MO = gate_up_MO + _delta(x_MH, factors.gate_up_a, factors.gate_up_b, factors, rows)
    gate_MI, up_MI = gate_up_MO.chunk(2, dim=-1)
    h_MI = base.act_fn(gate_MI) * up_MI
    y_MH = grouped_linear(h_MI, down_EHI, rows)
    if factors is not None:
        y_MH = y_MH + _delta(h_MI, factors.down_a, factors.down_b, factors, rows)
    normed_MH = y_MH.float() if base.norm is None else base.norm(y_MH)
    return rows.weighted_sum(normed_MH, weights_TK).to(y_MH.dtype)


def _delta(x: Tensor, a: Tensor, b: Tensor, factors: ExpertFactors, rows: GroupedRows) -> Tensor:
    x = F.dropout(x, factors.dropout)
    # the scale goes on the narrow side
    return grouped_linear(grouped_linear(x, a.to(x.dtype), rows) * factors.scale, b.to(x.dtype), rows)


def _is_frozen(base: RoutedExperts) -> bool:
    norm = base.norm
    watched = [*base.parameters(recurse=False), *([] if norm is None else norm.parameters())]
    # a parametrization makes the attribute a tensor that is no parameter
    return not any(w.requires_grad for w in watched) and "parametrizations" not in base._modules


class _Experts(torch.autograd.Function):
    """See the module's docstring. Gradients: input, routing weights, and the factors where there are any."""

    @staticmethod
    def forward(ctx, base, rows, scale, x_TH, weights_TK, *factors):
        gate_up_EOH, down_EHI = base.weights()
        x_MH = rows.take(x_TH)
        gate_up_MO = rows.multiply(x_MH, gate_up_EOH.mT)
        lows: tuple[Tensor, ...] = ()
        if factors:
            lows = (_add_delta(rows, gate_up_MO, x_MH, factors[0], factors[1], scale),)
        del x_MH
        h_MI = _gated(gate_up_MO)
        y_MH = rows.multiply(h_MI, down_EHI.mT)
        if factors:
            lows = (*lows, _add_delta(rows, y_MH, h_MI, factors[2], factors[3], scale))
        out_TH = _combine(base.norm, rows, y_MH, weights_TK)
        ctx.base, ctx.rows, ctx.scale = base, rows, scale
        ctx.save_for_backward(x_TH, weights_TK, gate_up_MO, y_MH, *lows, *factors)
        return out_TH

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TH):
        base, rows, scale = ctx.base, ctx.rows, ctx.scale
        x_TH, weights_TK, gate_up_MO, y_MH, *more = ctx.saved_tensors
        lows, factors = more[:2], more[2:]
        gate_up_EOH, down_EHI = base.weights()
        grads: list[Tensor | None] = [None] * len(factors)
        grad_y_MH, grad_weights_TK = _combine_backward(base.norm, rows, y_MH, weights_TK, grad_TH)
        grad_h_MI = rows.multiply(grad_y_MH, down_EHI)
        if factors:
            h_MI = _gated(gate_up_MO)
            grads[2:] = _delta_backward(rows, grad_h_MI, grad_y_MH, h_MI, lows[1], factors[2], factors[3], scale)
            del h_MI
        del grad_y_MH, down_EHI
        # the products' memory, as large as any here, takes their gradient unless backward is to run again
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        grad_gate_up_MO = torch.empty_like(gate_up_MO) if kept else gate_up_MO
        _gated_backward(gate_up_MO, grad_h_MI, out_MO=grad_gate_up_MO)
        del grad_h_MI
        grad_x_MH = rows.multiply(grad_gate_up_MO, gate_up_EOH)
        if factors:
            x_MH = rows.take(x_TH)
            grads[:2] = _delta_backward(rows, grad_x_MH, grad_gate_up_MO, x_MH, lows[0], factors[0], factors[1], scale)
        grad_x_TH = rows.sum(grad_x_MH).to(x_TH.dtype) if ctx.needs_input_grad[3] else None
        return None, None, None, grad_x_TH, grad_weights_TK, *grads


def _add_delta(rows: GroupedRows, out: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Add `scale * x A^T B^T` to `out` in place; returns the scaled low-rank activations, [M, R]."""
    # the scale goes on the narrow side
    low_MR = rows.multiply(x, a.to(x.dtype).mT).mul_(scale)
    rows.multiply(low_MR, b.to(x.dtype).mT, add_to=out)
    return low_MR


def _delta_backward(
    rows: GroupedRows, grad_x: Tensor, grad_out: Tensor, x: Tensor, low_MR: Tensor, a: Tensor, b: Tensor, scale: float
) -> list[Tensor]:
    """Add the input's gradient to `grad_x` in place; returns those of A and B, in their types."""
    grad_low_MR = rows.multiply(grad_out, b.to(x.dtype)).mul_(scale)
    rows.multiply(grad_low_MR, a.to(x.dtype), add_to=grad_x)
    return [rows.outer(grad_low_MR, x).to(a.dtype), rows.outer(grad_out, low_MR).to(b.dtype)]


def _gated(gate_up_MO: Tensor) -> Tensor:
    gate_MI, up_MI = gate_up_MO.chunk(2, dim=-1)
    h_MI = torch.empty_like(gate_MI, memory_format=torch.contiguous_format)
    for part in _chunks(h_MI):
        torch.ops.aten.silu(gate_MI[part], out=h_MI[part])
        h_MI[part].mul_(up_MI[part])
    return h_MI


def _gated_backward(gate_up_MO: Tensor, grad_h_MI: Tensor, *, out_MO: Tensor) -> None:
    """Write the gradient of the gate and up products to `out_MO`, which may be `gate_up_MO` itself."""
    width = grad_h_MI.shape[1]
    for part in _chunks(out_MO):
        (gate, up), h = gate_up_MO[part].chunk(2, dim=-1), grad_h_MI[part]
        grad_gate = torch.ops.aten.silu_backward(h * up, gate)
        torch.mul(F.silu(gate), h, out=out_MO[part, width:])
        out_MO[part, :width] = grad_gate


def _combine(norm: Any, rows: GroupedRows, y_MH: Tensor, weights_TK: Tensor) -> Tensor:
    """Per-expert norm, routing weight and sum, in float32; rounded once, at the end."""
    if norm is None:
        return rows.sum(y_MH, weights_TK).to(y_MH.dtype)
    scale_H = _scale(norm)
    inverse_rms_M = _inverse_rms(norm, scale_H, y_MH)
    # the norm's scale is the same for all rows, so it comes after the sum, over fewer values
    out_TH = rows.sum(y_MH, weights_TK * inverse_rms_M[rows.inverse_TK])
    return (out_TH * scale_H).to(y_MH.dtype)


def _combine_backward(
    norm: Any, rows: GroupedRows, y_MH: Tensor, weights_TK: Tensor, grad_TH: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the experts' outputs [M, H] and of the routing weights [T, K].

    With n = z / rms(z), z = y s, g the gradient of the token's output and w the row's weight:
    d w = n . g and d z = (w / rms) (g - n (n . g) / H).
    """
    scale_H = None if norm is None else _scale(norm)
    w_M = weights_TK.new_zeros(len(y_MH)).index_copy_(0, rows.inverse_TK.flatten(), weights_TK.flatten())
    dots_M = torch.empty_like(w_M)
    grad_y_MH = torch.empty_like(y_MH)
    padded_TH = F.pad(grad_TH, (0, 0, 0, 1)) if rows.padded else grad_TH
    for part in _chunks(y_MH):
        g = padded_TH.index_select(0, rows.token_M[part])
        if scale_H is None:
            torch.linalg.vecdot(y_MH[part].to(w_M.dtype), g.to(w_M.dtype), out=dots_M[part])
            grad_y_MH[part] = g * w_M[part, None]
            continue
        z = y_MH[part] * scale_H
        r = _rsqrt_mean(z, norm)
        dot = torch.linalg.vecdot(z, g.to(z.dtype)).mul_(r)
        dots_M[part] = dot
        z.mul_((dot * r * (-1 / z.shape[1]))[:, None]).add_(g)
        grad_y_MH[part] = z.mul_((r * w_M[part])[:, None]).mul_(scale_H)
    return grad_y_MH, dots_M[rows.inverse_TK].to(weights_TK.dtype)


def _scale(norm: Any) -> Tensor:
    return 1 + norm.weight if norm.weight.dtype == torch.float64 else 1 + norm.weight.float()


def _inverse_rms(norm: Any, scale_H: Tensor, y_MH: Tensor) -> Tensor:
    out_M = torch.empty(len(y_MH), dtype=scale_H.dtype, device=y_MH.device)
    for part in _chunks(y_MH):
        out_M[part] = _rsqrt_mean(y_MH[part] * scale_H, norm)
    return out_M


def _rsqrt_mean(z: Tensor, norm: Any) -> Tensor:
    return torch.linalg.vecdot(z, z).div_(z.shape[1]).add_(norm.eps).rsqrt_()


def _chunks(x: Tensor) -> list[slice]:
    """Ranges of rows whose float32 temporaries are small."""
    step = max(1, _CHUNK_BYTES.get(x.device.type, 2**26) // (4 * x.shape[1]))
    return [slice(start, start + step) for start in range(0, len(x), step)]
