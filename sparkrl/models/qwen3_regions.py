"""Qwen3's layer in the parts that are compiled: everything but the attention product, experts and replay.

The arithmetic is `sparkrl.models.qwen3`'s, which is the reference, on sequences packed into one row. What the residual
stream keeps of a sum comes rounded, as an argument: a compiler may drop a rounding inside a kernel.

Legend: T packed token, H width, N heads, D head width, E expert, K routed slot.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from sparkrl.models.compiled import Projection, project, region, rms, wide

Norm = tuple[Tensor, float]
"""A norm's weight and eps."""


@region(packed=[0, 3, 4])
def before_attention(
    hidden_1TH: Tensor,
    norm: Norm,
    qkv: tuple[Projection, ...],
    cos_1TD: Tensor,
    sin_1TD: Tensor,
    head_dim: int,
    q_norm: Norm,
    k_norm: Norm,
) -> tuple[Tensor, Tensor, Tensor]:
    """Residual sum to queries [T, N, D], keys and values."""
    q, k, v = (x.unflatten(-1, (-1, head_dim)) for x in project(_normed(hidden_1TH[0], norm), qkv))
    cos_TD, sin_TD = cos_1TD[0].to(q.dtype), sin_1TD[0].to(q.dtype)
    q, k = apply_rotary_pos_emb(_normed(q, q_norm), _normed(k, k_norm), cos_TD, sin_TD)
    return q, k, v


@region(0, packed=[1])
def before_experts(
    heads_TND: Tensor,
    carried_1TH: Tensor,
    outs: tuple[Projection, ...],
    norm: Norm,
    router_EH: Tensor,
    top_k: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Heads to the residual sum, the experts' input [T, H], router probabilities [T, E] and the live choice [T, K]."""
    hidden_1TH = _after_heads(heads_TND, carried_1TH, outs)
    x_TH = _normed(hidden_1TH[0], norm)
    probs_TE = torch.softmax(F.linear(x_TH, router_EH), dim=-1, dtype=torch.float32)
    return hidden_1TH, x_TH, probs_TE, torch.topk(probs_TE.detach(), k=top_k, dim=-1, sorted=False)[1]


@region(0, 1)
def routing_weights(probs_TE: Tensor, ids_TK: Tensor, norm_topk_prob: bool) -> Tensor:
    """Weights of the chosen experts, from the live probabilities."""
    picked_TK = probs_TE.gather(1, ids_TK)
    return picked_TK / picked_TK.sum(-1, keepdim=True) if norm_topk_prob else picked_TK


@region(0, packed=[1])
def before_dense(
    heads_TND: Tensor,
    carried_1TH: Tensor,
    outs: tuple[Projection, ...],
    norm: Norm,
    gate_up: tuple[Projection, ...],
    down: tuple[Projection, ...],
) -> tuple[Tensor, Tensor]:
    """Heads to the residual sum, and the dense feed-forward's output [T, H]."""
    hidden_1TH = _after_heads(heads_TND, carried_1TH, outs)
    gate_TI, up_TI = project(_normed(hidden_1TH[0], norm), gate_up)
    return hidden_1TH, project(F.silu(gate_TI) * up_TI, down)[0]


def _after_heads(heads_TND: Tensor, carried_1TH: Tensor, outs: tuple[Projection, ...]) -> Tensor:
    return wide(carried_1TH) + project(heads_TND.flatten(1), outs)[0]


def _normed(x: Tensor, norm: Norm) -> Tensor:
    weight, eps = norm
    return weight * rms(x, eps).to(weight.dtype)
