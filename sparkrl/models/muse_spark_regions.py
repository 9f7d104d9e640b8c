"""Muse Spark's layer in the parts that are compiled: everything but the attention product, experts and replay.

The arithmetic is `sparkrl.models.muse_spark`'s, which is the reference, on sequences packed into one row. The residual
stream keeps its leading 1, as FSDP2 wants no view from a layer.

Legend: T packed token, H width, N heads, D head width, L latent width, E expert, K routed slot.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.muse_spark.modeling_muse_spark import apply_rotary_pos_emb

from sparkrl.models.compiled import Projection, project, region, rms, wide

Gate = tuple[Tensor, float, float]
"""A residual gate's parameter, temperature and eps."""


@region(packed=[0, 4, 5])
def before_attention(
    hidden_1TH: Tensor,
    norm_H: Tensor,
    eps: float,
    qkvg: tuple[Projection, ...],
    cos_1TD: Tensor | None,
    sin_1TD: Tensor | None,
    head_dim: int,
    head_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Residual stream to queries [T, N, D], keys, values, and the output gate [T, N * D] before its sigmoid."""
    dtype = norm_H.dtype
    q, k, v, gate = project(_centered(hidden_1TH[0], norm_H, eps), qkvg)
    q, k, v = (x.unflatten(-1, (-1, head_dim)) for x in (q, k, v))
    q, k = rms(q, head_eps).to(dtype), rms(k, head_eps).to(dtype)
    if cos_1TD is not None and sin_1TD is not None:
        q, k = apply_rotary_pos_emb(q, k, cos_1TD[0].to(dtype), sin_1TD[0].to(dtype))
    return q, k, v, gate


@region(0, 1, packed=[2])
def before_experts(
    heads_TND: Tensor,
    gate_TO: Tensor,
    hidden_1TH: Tensor,
    outs: tuple[Projection, ...],
    head_eps: float,
    post_eps: float,
    residual_gate: Gate,
    norm_H: Tensor,
    eps: float,
    router: tuple[Tensor, Tensor, float, int],
    latent: tuple[Projection, ...],
    latent_norm_L: Tensor,
    latent_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Heads to the residual stream, the experts' input [T, L], router scores [T, E] and the live choice [T, K]."""
    hidden_1TH = _after_heads(heads_TND, gate_TO, hidden_1TH, outs, head_eps, post_eps, residual_gate)
    x_TH = _centered(hidden_1TH[0], norm_H, eps)
    weight_EH, bias_E, multiplier, top_k = router
    scores_TE = torch.sigmoid(F.linear(wide(x_TH), wide(weight_EH)) * multiplier)
    ids_TK = torch.topk((scores_TE + bias_E).detach(), k=top_k, dim=-1, sorted=False)[1]
    latent_TL = _centered(project(x_TH, latent)[0], latent_norm_L, latent_eps)
    return hidden_1TH, latent_TL, scores_TE, ids_TK


@region(0, 1)
def routing_weights(scores_TE: Tensor, ids_TK: Tensor, eps: float, factor: float) -> Tensor:
    """Weights of the chosen experts, from the live scores."""
    picked_TK = scores_TE.gather(1, ids_TK)
    return picked_TK / (picked_TK.sum(-1, keepdim=True) + eps) * factor


@region(0, packed=[1])
def after_experts(
    mixed_TL: Tensor, hidden_1TH: Tensor, out: tuple[Projection, ...], norm_H: Tensor, eps: float, residual_gate: Gate
) -> Tensor:
    """The experts' sum back into the residual stream."""
    return _after_feed(project(mixed_TL, out)[0], hidden_1TH, norm_H, eps, residual_gate)


@region(0, 1, packed=[2])
def dense_feed(
    heads_TND: Tensor,
    gate_TO: Tensor,
    hidden_1TH: Tensor,
    outs: tuple[Projection, ...],
    head_eps: float,
    post_eps: float,
    residual_gate: Gate,
    norm_H: Tensor,
    eps: float,
    gate_up: tuple[Projection, ...],
    down: tuple[Projection, ...],
    feed_norm_H: Tensor,
    feed_eps: float,
    feed_gate: Gate,
) -> Tensor:
    """Heads to the residual stream behind a dense layer's feed-forward."""
    hidden_1TH = _after_heads(heads_TND, gate_TO, hidden_1TH, outs, head_eps, post_eps, residual_gate)
    gate_TI, up_TI = project(_centered(hidden_1TH[0], norm_H, eps), gate_up)
    fed_TH = project(F.silu(gate_TI) * up_TI, down)[0]
    return _after_feed(fed_TH, hidden_1TH, feed_norm_H, feed_eps, feed_gate)


def _after_heads(
    heads_TND: Tensor,
    gate_TO: Tensor,
    hidden_1TH: Tensor,
    outs: tuple[Projection, ...],
    head_eps: float,
    post_eps: float,
    residual_gate: Gate,
) -> Tensor:
    normed = rms(heads_TND, head_eps).to(heads_TND.dtype).flatten(1)
    attended = project(normed * torch.sigmoid(gate_TO), outs)[0]
    return _gated_residual(hidden_1TH, rms(attended, post_eps), residual_gate)


def _after_feed(fed_TH: Tensor, hidden_1TH: Tensor, norm_H: Tensor, eps: float, residual_gate: Gate) -> Tensor:
    return _gated_residual(hidden_1TH, rms(wide(fed_TH) * (1 + wide(norm_H)), eps), residual_gate)


def _centered(x: Tensor, norm_H: Tensor, eps: float) -> Tensor:
    return (rms(x, eps) * (1 + wide(norm_H))).to(norm_H.dtype)


def _gated_residual(residual: Tensor, x: Tensor, residual_gate: Gate) -> Tensor:
    gate_H, temperature, eps = residual_gate
    w = wide(gate_H) / temperature
    beta = torch.sigmoid(w)
    alpha = torch.sqrt(torch.clamp(torch.sigmoid(-w) * (1.0 + beta), min=eps))
    return alpha * residual + beta * x
