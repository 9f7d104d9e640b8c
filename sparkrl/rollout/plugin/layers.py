"""Norms, residual gate and router of Muse Spark, in fp32 inside, as vLLM's stock layers do not provide them.

Shape legend: N tokens, D width of the norm, H hidden width, E experts, K routed slots.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.config import RoutingMethodType, get_routing_method_type
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter


def unit_rms(x_ND: Tensor, eps: float) -> Tensor:
    """`x * rsqrt(mean(x^2) + eps)` over the last dimension; float32 whatever comes in."""
    x_ND = x_ND.float()
    return x_ND * torch.rsqrt(x_ND.square().mean(-1, keepdim=True) + eps)


class CenteredNorm(nn.Module):
    """Norm, then weight: `unit_rms(x) * (1 + w)`, rounded once."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width), requires_grad=False)
        self.eps = eps

    def forward(self, x_ND: Tensor, dtype: torch.dtype) -> Tensor:
        """`dtype` [N, D]."""
        return (unit_rms(x_ND, self.eps) * (1.0 + self.weight.float())).to(dtype)


class InputScaledNorm(CenteredNorm):
    """Weight, then norm: `unit_rms(x * (1 + w))`, rounded once."""

    def forward(self, x_ND: Tensor, dtype: torch.dtype) -> Tensor:
        """`dtype` [N, D]."""
        return unit_rms(x_ND.float() * (1.0 + self.weight.float()), self.eps).to(dtype)


class FinalNorm(CenteredNorm):
    """The last norm's weight is used as it is: `unit_rms(x) * w`."""

    def forward(self, x_ND: Tensor, dtype: torch.dtype) -> Tensor:
        """`dtype` [N, D]."""
        return (unit_rms(x_ND, self.eps) * self.weight.float()).to(dtype)


class ResidualGate(nn.Module):
    """Per-channel mix of residual and branch, `alpha * h + beta * b`, float32 in and out."""

    floor = 1e-3
    """Least value of `alpha` squared."""

    def __init__(self, width: int, temperature: float) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(width, dtype=torch.float32), requires_grad=False)
        self.temperature = temperature

    def forward(self, h_NH: Tensor, b_NH: Tensor) -> Tensor:
        """float32 [N, H]."""
        w_H = self.gate / self.temperature
        beta_H = torch.sigmoid(w_H)
        # (1 - beta)(1 + beta) keeps the digits that 1 - beta^2 loses near beta = 1.
        alpha_H = torch.sqrt(torch.clamp(torch.sigmoid(-w_H) * (1.0 + beta_H), min=self.floor))
        return alpha_H * h_NH + beta_H * b_NH


class RouterGate(nn.Module):
    """Router logits in fp32 from fp32 weights. Not a vLLM linear layer, so LoRA and quantization leave it alone."""

    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_experts, width, dtype=torch.float32), requires_grad=False)
        self.e_score_correction_bias = nn.Parameter(torch.zeros(num_experts, dtype=torch.float32), requires_grad=False)

    def forward(self, x_NH: Tensor) -> Tensor:
        """float32 [N, E]."""
        return F.linear(x_NH.float(), self.weight)


class MuseRouter(BaseRouter):
    """Choose by biased sigmoid scores, weigh by the unbiased ones. The base class hands the ids to route capture."""

    def __init__(self, gate: RouterGate, *, top_k: int, num_experts: int, multiplier: float, scale: float) -> None:
        super().__init__(top_k, num_experts)
        self.gate = gate
        self.multiplier = multiplier
        self.scale = scale

    @property
    def routing_method_type(self) -> RoutingMethodType:
        return get_routing_method_type(
            scoring_func="sigmoid", top_k=self.top_k, renormalize=True, num_expert_group=None, has_e_score_bias=True
        )

    def _compute_routing(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        score_NE = torch.sigmoid(router_logits.float() * self.multiplier)
        ids_NK = torch.topk(score_NE + self.gate.e_score_correction_bias, self.top_k, dim=-1, sorted=False)[1]
        weight_NK = score_NE.gather(1, ids_NK)
        weight_NK = weight_NK / (weight_NK.sum(-1, keepdim=True) + 1e-15) * self.scale
        return weight_NK, ids_NK.to(torch.int32 if indices_type is None else indices_type)
