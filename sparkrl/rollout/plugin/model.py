"""Muse Spark's text decoder for vLLM on CPU, from vLLM's layers; module names are the checkpoint's.

Because the names match (`model.language_model.layers.N...`), PEFT's adapter names need no translation.
Source of the arithmetic: transformers/models/muse_spark of transformers 5.20.2, with the residual stream in float32.

Shape legend: N tokens, H hidden width, Q = heads * head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import SupportsLoRA

from sparkrl.rollout.plugin.common import PACKED, DenseMlp, fill_parameters
from sparkrl.rollout.plugin.experts import CpuRoutedExperts
from sparkrl.rollout.plugin.layers import (
    CenteredNorm,
    FinalNorm,
    InputScaledNorm,
    MuseRouter,
    ResidualGate,
    RouterGate,
    unit_rms,
)


class MuseAttention(nn.Module):
    """Attention with normed queries, keys and outputs and a sigmoid output gate."""

    def __init__(self, config: Any, layer: int, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        width, self.head_dim, self.eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.qkv_proj = QKVParallelLinear(
            width, self.head_dim, heads, kv_heads, bias=False, prefix=f"{prefix}.qkv_proj"
        )
        self.gate_proj = ColumnParallelLinear(width, heads * self.head_dim, bias=False, prefix=f"{prefix}.gate_proj")
        self.o_proj = RowParallelLinear(heads * self.head_dim, width, bias=False, prefix=f"{prefix}.o_proj")
        self.heads, self.kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        theta = float(config.layer_rope_theta[layer])
        self.rope = (
            get_rope(
                self.head_dim,
                config.max_position_embeddings,
                is_neox_style=True,
                rope_parameters={"rope_type": "default", "rope_theta": theta},
            )
            if theta
            else None
        )
        sliding = config.layer_types[layer] == "sliding_attention"
        self.attn = Attention(
            self.heads,
            self.head_dim,
            self.head_dim**-0.5 * config.qk_scale_factor,
            num_kv_heads=self.kv_heads,
            cache_config=vllm_config.cache_config,
            per_layer_sliding_window=config.sliding_window if sliding else None,
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions: Tensor, x_NH: Tensor) -> Tensor:
        dtype = x_NH.dtype
        widths = [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]
        q_NQ, k_NQ, v_NQ = self.qkv_proj(x_NH)[0].split(widths, dim=-1)
        q_NQ, k_NQ = self._head_norm(q_NQ, dtype), self._head_norm(k_NQ, dtype)
        if self.rope is not None:
            q_NQ, k_NQ = self.rope(positions, q_NQ, k_NQ)
        o_NQ = self._head_norm(self.attn(q_NQ, k_NQ, v_NQ.contiguous()), dtype)
        return self.o_proj(o_NQ * torch.sigmoid(self.gate_proj(x_NH)[0]))[0]

    def _head_norm(self, x_NQ: Tensor, dtype: torch.dtype) -> Tensor:
        return unit_rms(x_NQ.unflatten(-1, (-1, self.head_dim)), self.eps).to(dtype).flatten(-2)


class MuseSparseMlp(nn.Module):
    """Router, latent in, routed experts, latent out."""

    def __init__(self, config: Any, prefix: str) -> None:
        super().__init__()
        width, latent, experts = config.hidden_size, config.moe_hidden_size, config.num_local_experts
        self.gate = RouterGate(experts, width)
        self.pre_expert_proj = ReplicatedLinear(width, latent, bias=False, prefix=f"{prefix}.pre_expert_proj")
        self.pre_expert_norm = CenteredNorm(latent, config.rms_norm_eps)
        self.post_expert_proj = ReplicatedLinear(latent, width, bias=False, prefix=f"{prefix}.post_expert_proj")
        self.experts = FusedMoEFactory(
            num_experts=experts,
            top_k=config.num_experts_per_tok,
            hidden_size=latent,
            intermediate_size=config.moe_intermediate_size,
            renormalize=True,
            prefix=f"{prefix}.experts",
            router=MuseRouter(
                self.gate,
                top_k=config.num_experts_per_tok,
                num_experts=experts,
                multiplier=config.output_multiplier,
                scale=config.routed_scaling_factor,
            ),
            routed_experts_cls=CpuRoutedExperts,
        )
        self.experts.routed_experts.post_expert_norm = InputScaledNorm(latent, config.post_norm_eps)

    def forward(self, x_NH: Tensor) -> Tensor:
        router_logits = self.gate(x_NH)
        latent = self.pre_expert_norm(self.pre_expert_proj(x_NH)[0], x_NH.dtype)
        return self.post_expert_proj(self.experts(latent, router_logits))[0]


class MuseLayer(nn.Module):
    """One decoder layer over a float32 residual stream."""

    def __init__(self, config: Any, layer: int, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        width, self.post_eps = config.hidden_size, config.post_norm_eps
        self.self_attn = MuseAttention(config, layer, vllm_config, f"{prefix}.self_attn")
        sparse = config.mlp_layer_types[layer] == "sparse"
        self.mlp = MuseSparseMlp(config, f"{prefix}.mlp") if sparse else DenseMlp(config, f"{prefix}.mlp")
        self.input_layernorm = CenteredNorm(width, config.rms_norm_eps)
        self.pre_feedforward_layernorm = CenteredNorm(width, config.rms_norm_eps)
        self.post_feedforward_layernorm = InputScaledNorm(width, config.post_norm_eps)
        self.post_attention_residual_gate = ResidualGate(width, config.residual_gate_temperature)
        self.post_feedforward_residual_gate = ResidualGate(width, config.residual_gate_temperature)

    def forward(self, positions: Tensor, h_NH: Tensor, dtype: torch.dtype) -> Tensor:
        b_NH = self.self_attn(positions, self.input_layernorm(h_NH, dtype))
        h_NH = self.post_attention_residual_gate(h_NH, unit_rms(b_NH, self.post_eps))
        b_NH = self.mlp(self.pre_feedforward_layernorm(h_NH, dtype))
        return self.post_feedforward_residual_gate(h_NH, self.post_feedforward_layernorm(b_NH, torch.float32))


class MuseDecoder(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=f"{prefix}.embed_tokens"
        )
        self.layers = nn.ModuleList(
            [MuseLayer(config, i, vllm_config, f"{prefix}.layers.{i}") for i in range(config.num_hidden_layers)]
        )
        self.norm = FinalNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor, inputs_embeds: Tensor | None = None) -> Tensor:
        embedded = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        h_NH = unit_rms(embedded, self.eps)
        for layer in self.layers:
            h_NH = layer(positions, h_NH, embedded.dtype)
        return self.norm(h_NH, embedded.dtype)


class _Wrapper(nn.Module):
    """Holds the decoder under the checkpoint's prefix `model.language_model`."""

    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.language_model = MuseDecoder(config, vllm_config, f"{prefix}.language_model")


class MuseSparkForCausalLM(nn.Module, SupportsLoRA):
    """Text-only Muse Spark with LoRA on attention, latent projections and all routed experts."""

    packed_modules_mapping = PACKED
    embedding_modules = {}  # noqa: RUF012
    is_3d_moe_weight = True
    """Expert adapters come fused, in PEFT's layout: one reshape and one permute a tensor, no loop over experts."""
    is_non_gated_moe = False

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config: Any = vllm_config.model_config.hf_config
        self.model = _Wrapper(self.config, vllm_config, "model")
        self.lm_head = ParallelLMHead(self.config.vocab_size, self.config.hidden_size, prefix="lm_head")
        self.logits_processor = LogitsProcessor(self.config.vocab_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.language_model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        return self.model.language_model(input_ids, positions, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """float32 [N, V], soft-capped."""
        logits_NV = self.logits_processor(self.lm_head, hidden_states)
        if logits_NV is None:
            return None
        cap = self.config.final_logit_softcapping
        return cap * torch.tanh(logits_NV.float() * self.config.output_multiplier / cap)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """See `fill_parameters`."""
        return fill_parameters(self, weights, family="Muse Spark", prefixes=("model.language_model.", "lm_head."))
