"""Qwen3's decoder, dense and sparse, for vLLM on CPU, from vLLM's layers; module names are the checkpoint's.

Stock vLLM's own classes serve these models too, but on CPU their experts can neither carry adapters nor return routes.
Values are rounded where the stock classes round them, so a GPU that serves the stock class computes the same.

Shape legend: N tokens, H hidden width, Q = heads * head width, E experts, K routed slots.
Source: vllm/model_executor/models/qwen3.py and qwen3_moe.py of vLLM 0.32.0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.layers.fused_moe.config import RoutingMethodType, get_routing_method_type
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import SupportsLoRA

from sparkrl.rollout.plugin.common import PACKED, DenseMlp, fill_parameters
from sparkrl.rollout.plugin.experts import CpuRoutedExperts
from sparkrl.rollout.plugin.hf_config import routing


class QwenAttention(nn.Module):
    """Attention with normed queries and keys."""

    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.head_dim, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, self.head_dim, heads, kv_heads, bias=False, prefix=f"{prefix}.qkv_proj"
        )
        self.o_proj = RowParallelLinear(
            heads * self.head_dim, config.hidden_size, bias=False, prefix=f"{prefix}.o_proj"
        )
        self.heads, self.kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.rope = get_rope(
            self.head_dim, config.max_position_embeddings, is_neox_style=True, rope_parameters=config.rope_parameters
        )
        self.attn = Attention(
            self.heads,
            self.head_dim,
            self.head_dim**-0.5,
            num_kv_heads=self.kv_heads,
            cache_config=vllm_config.cache_config,
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions: Tensor, x_NH: Tensor) -> Tensor:
        widths = [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]
        q_NQ, k_NQ, v_NQ = self.qkv_proj(x_NH)[0].split(widths, dim=-1)
        q_NQ, k_NQ = (
            norm(x_NQ.unflatten(-1, (-1, self.head_dim))).flatten(-2)
            for norm, x_NQ in ((self.q_norm, q_NQ), (self.k_norm, k_NQ))
        )
        q_NQ, k_NQ = self.rope(positions, q_NQ, k_NQ)
        return self.o_proj(self.attn(q_NQ, k_NQ, v_NQ.contiguous()))[0]


class RouterGate(nn.Module):
    """Router logits in the model's type. Not a vLLM linear layer, so LoRA and quantization leave it alone."""

    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_experts, width), requires_grad=False)

    def forward(self, x_NH: Tensor) -> Tensor:
        """[N, E]."""
        return F.linear(x_NH, self.weight)


class SoftmaxRouter(BaseRouter):
    """Choose and weigh by softmax in float32. The base class hands the ids to route capture."""

    def __init__(self, *, top_k: int, num_experts: int, renormalize: bool) -> None:
        super().__init__(top_k, num_experts)
        self.renormalize = renormalize

    @property
    def routing_method_type(self) -> RoutingMethodType:
        return get_routing_method_type(
            scoring_func="softmax",
            top_k=self.top_k,
            renormalize=self.renormalize,
            num_expert_group=None,
            has_e_score_bias=False,
        )

    def _compute_routing(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        prob_NE = torch.softmax(router_logits, dim=-1, dtype=torch.float32)
        weight_NK, ids_NK = torch.topk(prob_NE, self.top_k, dim=-1, sorted=False)
        if self.renormalize:
            weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True)
        return weight_NK, ids_NK.to(torch.int32 if indices_type is None else indices_type)


class QwenSparseMlp(nn.Module):
    """Router and routed experts."""

    def __init__(self, config: Any, prefix: str) -> None:
        super().__init__()
        self.gate = RouterGate(config.num_experts, config.hidden_size)
        self.experts = FusedMoEFactory(
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            hidden_size=config.hidden_size,
            intermediate_size=config.moe_intermediate_size,
            renormalize=config.norm_topk_prob,
            prefix=f"{prefix}.experts",
            router=SoftmaxRouter(
                top_k=config.num_experts_per_tok,
                num_experts=config.num_experts,
                renormalize=config.norm_topk_prob,
            ),
            routed_experts_cls=CpuRoutedExperts,
        )

    def forward(self, x_NH: Tensor) -> Tensor:
        return self.experts(x_NH, self.gate(x_NH))


class QwenLayer(nn.Module):
    """One decoder layer; the residual stream is in the model's type, each sum is normed before it is rounded."""

    def __init__(self, config: Any, sparse: bool, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.self_attn = QwenAttention(config, vllm_config, f"{prefix}.self_attn")
        self.mlp = QwenSparseMlp(config, f"{prefix}.mlp") if sparse else DenseMlp(config, f"{prefix}.mlp")
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, positions: Tensor, x_NH: Tensor, residual_NH: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual_NH is None:
            residual_NH = x_NH
            x_NH = self.input_layernorm(x_NH)
        else:
            x_NH, residual_NH = self.input_layernorm(x_NH, residual_NH)
        x_NH = self.self_attn(positions, x_NH)
        x_NH, residual_NH = self.post_attention_layernorm(x_NH, residual_NH)
        return self.mlp(x_NH), residual_NH


class QwenDecoder(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=f"{prefix}.embed_tokens"
        )
        sparse = routing(config).layers
        self.layers = nn.ModuleList(
            [
                QwenLayer(config, layer in sparse, vllm_config, f"{prefix}.layers.{layer}")
                for layer in range(config.num_hidden_layers)
            ]
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor, inputs_embeds: Tensor | None = None) -> Tensor:
        x_NH = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        residual_NH = None
        for layer in self.layers:
            x_NH, residual_NH = layer(positions, x_NH, residual_NH)
        return self.norm(x_NH, residual_NH)[0]


class Qwen3ForCausalLM(nn.Module, SupportsLoRA):
    """Dense Qwen3 with LoRA on attention and MLP."""

    packed_modules_mapping = PACKED
    embedding_modules = {}  # noqa: RUF012 - vLLM reads a plain dict off the class

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config: Any = vllm_config.model_config.hf_config
        self.model = QwenDecoder(self.config, vllm_config, "model")
        self.lm_head = ParallelLMHead(self.config.vocab_size, self.config.hidden_size, prefix="lm_head")
        if self.config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(self.config.vocab_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        return self.model(input_ids, positions, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """[N, V] in the model's type."""
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """See `fill_parameters`."""
        unused = ("lm_head.weight",) if self.config.tie_word_embeddings else ()
        return fill_parameters(self, weights, family="Qwen3", prefixes=("model.", "lm_head."), unused=unused)


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Qwen3-MoE with LoRA on attention, all routed experts, and the MLP of dense layers."""

    is_3d_moe_weight = True
    """Expert adapters come fused, in PEFT's layout: one reshape and one permute a tensor, no loop over experts."""
    is_non_gated_moe = False
