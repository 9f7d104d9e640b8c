"""The sparse feed-forward of Qwen3-MoE for training: softmax router whose choice can be replaced, and fused experts.

Values are rounded where vLLM's own class for this family rounds them: router logits in the model's type, their softmax
and the weights in float32.

Legend: T token, E expert, K routed slot, H hidden width.
Source: transformers/models/qwen3_moe of transformers 5.20.2, vllm/model_executor/models/qwen3_moe.py of vLLM 0.32.0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe import modeling_qwen3_moe as hf

from sparkrl.models.experts import RoutedExperts


class Router(hf.Qwen3MoeTopKRouter):
    """Softmax router whose choice can be replaced.

    `replay`, when set, is called as `replay(live_ids_TK)` and returns the ids to use; the weights always come from the
    live logits, so gradients still reach them.
    """

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__(config)
        self.replay: Callable[[Tensor], Tensor] | None = None

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, H] to logits [T, E], float32 weights [T, K] and int64 ids [T, K]."""
        logits_TE = F.linear(hidden_states, self.weight)
        probs_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
        ids_TK = torch.topk(probs_TE.detach(), k=self.top_k, dim=-1, sorted=False)[1]
        if self.replay is not None:
            ids_TK = self.replay(ids_TK)
        weights_TK = probs_TE.gather(1, ids_TK)
        if self.norm_topk_prob:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return logits_TE, weights_TK, ids_TK


class Experts(RoutedExperts, hf.Qwen3MoeExperts):
    """All routed experts of a layer."""


class MoE(nn.Module):
    """Router and experts."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.flatten(0, -2)
        _, weights_TK, ids_TK = self.gate(x)
        return self.experts(x, ids_TK, weights_TK).view(hidden_states.shape)


def is_sparse(config: Qwen3MoeConfig, layer: int) -> bool:
    """Whether a layer routes: every `decoder_sparse_step`-th one that `mlp_only_layers` does not name."""
    return layer not in (config.mlp_only_layers or []) and (layer + 1) % config.decoder_sparse_step == 0
