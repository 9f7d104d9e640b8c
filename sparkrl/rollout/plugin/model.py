"""Muse Spark's text decoder for vLLM on CPU, from vLLM's layers; module names are the checkpoint's.

Because the names match (`model.language_model.layers.N...`), PEFT's adapter names need no translation.
Source of the arithmetic: transformers/models/muse_spark of transformers 5.20.2, with the residual stream in float32.

Shape legend: N tokens, H hidden width, Q = heads * head width, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import SupportsLoRA

from sparkrl.errors import CheckpointError
from sparkrl.rollout.plugin.experts import MuseRoutedExperts
from sparkrl.rollout.plugin.layers import (
    CenteredNorm,
    FinalNorm,
    InputScaledNorm,
    MuseRouter,
    ResidualGate,
    RouterGate,
    unit_rms,
)

_PACKED = {"q_proj": ("qkv_proj", "q"), "k_proj": ("qkv_proj", "k"), "v_proj": ("qkv_proj", "v")}
_PACKED_DENSE = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}
_PROJECTION = re.compile(r"(?P<parent>.*\.(?P<block>self_attn|mlp))\.(?P<name>\w+_proj)\.weight$")
_EXPERT = re.compile(r"(?P<parent>.*\.mlp\.experts)\.(?P<name>gate_up_proj|down_proj)$")


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
            routed_experts_cls=MuseRoutedExperts,
        )
        self.experts.routed_experts.post_expert_norm = InputScaledNorm(latent, config.post_norm_eps)

    def forward(self, x_NH: Tensor) -> Tensor:
        router_logits = self.gate(x_NH)
        latent = self.pre_expert_norm(self.pre_expert_proj(x_NH)[0], x_NH.dtype)
        return self.post_expert_proj(self.experts(latent, router_logits))[0]


class MuseDenseMlp(nn.Module):
    """`down(silu(gate x) * up x)`."""

    def __init__(self, config: Any, prefix: str) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            width, [inner, inner], bias=False, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = RowParallelLinear(inner, width, bias=False, prefix=f"{prefix}.down_proj")

    def forward(self, x_NH: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x_NH)[0].chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)[0]


class MuseLayer(nn.Module):
    """One decoder layer over a float32 residual stream."""

    def __init__(self, config: Any, layer: int, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        width, self.post_eps = config.hidden_size, config.post_norm_eps
        self.self_attn = MuseAttention(config, layer, vllm_config, f"{prefix}.self_attn")
        sparse = config.mlp_layer_types[layer] == "sparse"
        self.mlp = MuseSparseMlp(config, f"{prefix}.mlp") if sparse else MuseDenseMlp(config, f"{prefix}.mlp")
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

    packed_modules_mapping = {  # noqa: RUF012 - vLLM reads a plain dict off the class
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
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
        """Fill every parameter from logical checkpoint tensors.

        Raises:
            CheckpointError: a tensor has no place here, a shape is wrong, or a parameter was left unfilled.
        """
        parameters = dict(self.named_parameters())
        missing = {name: _num_shards(name, self.packed_modules_mapping) for name in parameters}
        for name, tensor in weights:
            target, shard = _place(name, parameters)
            if target not in parameters:
                if _is_foreign(name):
                    continue
                raise CheckpointError(f"tensor `{name}` of the checkpoint has no place in a Muse Spark text decoder")
            try:
                _fill(target, parameters[target], tensor, shard)
            except (AssertionError, RuntimeError, ValueError) as error:
                raise CheckpointError(
                    f"tensor `{name}` of shape {list(tensor.shape)} does not fit {target}: {error}",
                    hint="config.json and the weights describe different models",
                ) from error
            missing[target] -= 1
        left = sorted(name for name, count in missing.items() if count > 0)
        if left:
            raise CheckpointError(f"the checkpoint lacks {len(left)} of the model's tensors, first: `{left[0]}`")
        return set(parameters)


def _place(name: str, parameters: dict[str, Any]) -> tuple[str, str | int | None]:
    """Parameter a checkpoint tensor goes to, and its part of it."""
    if found := _EXPERT.match(name):
        stacked = "w13_weight" if found["name"] == "gate_up_proj" else "w2_weight"
        return f"{found['parent']}.routed_experts.{stacked}", None
    if name.endswith(".mlp.experts.post_expert_norm.weight"):
        return name.replace(".experts.", ".experts.routed_experts."), None
    if found := _PROJECTION.match(name):
        packed = (_PACKED if found["block"] == "self_attn" else _PACKED_DENSE).get(found["name"])
        if packed is not None:
            return f"{found['parent']}.{packed[0]}.weight", packed[1]
    return name, None


def _fill(target: str, parameter: Any, tensor: Tensor, shard: str | int | None) -> None:
    if ".routed_experts.w" in target:
        parameter.data.copy_(_expert_rows(target, tensor))
    elif shard is not None:
        parameter.weight_loader(parameter, tensor, shard)
    elif hasattr(parameter, "weight_loader"):
        parameter.weight_loader(parameter, tensor)
    else:
        if parameter.shape != tensor.shape:
            raise ValueError(f"expected shape {list(parameter.shape)}")
        parameter.data.copy_(tensor)


def _expert_rows(target: str, stacked: Tensor) -> Tensor:
    """This tensor-parallel rank's share of the expert width: of gate and of up alike, or of down's input."""
    ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
    if ranks == 1:
        return stacked
    if target.endswith("w2_weight"):
        return stacked.chunk(ranks, dim=2)[rank]
    return torch.cat([half.chunk(ranks, dim=1)[rank] for half in stacked.chunk(2, dim=1)], dim=1)


def _num_shards(name: str, packed: dict[str, list[str]]) -> int:
    module = name.split(".")[-2]
    return len(packed[module]) if module in packed else 1


def _is_foreign(name: str) -> bool:
    """Vision and audio towers of the published form are not served."""
    return not name.startswith(("model.language_model.", "lm_head."))
