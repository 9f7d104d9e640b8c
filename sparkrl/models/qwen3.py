"""Qwen3's decoder for training, dense (`qwen3`) and sparse (`qwen3_moe`), under transformers' parameter names.

Sums and norms are computed in float32 and rounded where vLLM's own classes round them: the residual stream once after
each addition, while the norm that follows sees the sum before that rounding. In float32 the result equals
transformers'.

Legend: B row, S position, H heads, D head width.
Source: transformers/models/qwen3 and qwen3_moe of transformers 5.20.2; `fused_add_rms_norm` of vLLM 0.32.0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config, Qwen3MoeConfig
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3 import modeling_qwen3 as hf

from sparkrl.models import qwen3_regions as regions
from sparkrl.models.causal_lm import CausalLM, Head, places
from sparkrl.models.compiled import projections
from sparkrl.models.packing import PackedRows, packed_attention
from sparkrl.models.qwen3_moe import MoE, is_sparse

Qwen3AnyConfig = Qwen3Config | Qwen3MoeConfig


class Norm(nn.Module):
    """`x / rms(x) * w`: the quotient in float32, rounded to the weight's type before the product, as vLLM does."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Any type in, the weight's type out."""
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)).to(self.weight.dtype)


class Attention(nn.Module):
    """Causal attention with normed queries and keys."""

    is_causal = True
    """For transformers' attention kernels, as `num_key_value_groups`."""

    def __init__(self, config: Qwen3AnyConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = config.head_dim
        self.scaling = self.head_dim**-0.5
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
        self.num_key_value_groups = heads // kv_heads
        query, key = heads * self.head_dim, kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key, bias=False)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)
        self.q_norm = Norm(self.head_dim, config.rms_norm_eps)
        self.k_norm = Norm(self.head_dim, config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        packed: PackedRows | None = None,
        **kwargs: Any,
    ) -> Tensor:
        shape = hidden_states.shape[:-1]
        heads = (*shape, -1, self.head_dim)
        q_BHSD = self.q_norm(self.q_proj(hidden_states).view(heads)).transpose(1, 2)
        k_BHSD = self.k_norm(self.k_proj(hidden_states).view(heads)).transpose(1, 2)
        v_BHSD = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        cos, sin = (t.to(hidden_states.dtype) for t in position_embeddings)
        q_BHSD, k_BHSD = hf.apply_rotary_pos_emb(q_BHSD, k_BHSD, cos, sin)
        if past_key_values is not None:
            k_BHSD, v_BHSD = past_key_values.update(k_BHSD, v_BHSD, self.layer_idx)
        if packed is not None:
            out = packed_attention(q_BHSD, k_BHSD, v_BHSD, packed, scale=self.scaling, window=None)
        else:
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, hf.eager_attention_forward)
            out, _ = attend(self, q_BHSD, k_BHSD, v_BHSD, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(*shape, -1))


class DecoderLayer(GradientCheckpointingLayer):
    """One layer: the residual sum in float32 in and out, compute type inside attention and feed-forward."""

    compile_backend: str | None = None
    """What compiles the layer's regions where sequences are packed; see `sparkrl.models.compiled`."""

    def __init__(self, config: Qwen3AnyConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer_idx)
        if isinstance(config, Qwen3MoeConfig) and is_sparse(config, layer_idx):
            self.mlp: nn.Module = MoE(config)
        else:
            self.mlp = hf.Qwen3MLP(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        packed = kwargs.get("packed")
        if self.compile_backend is not None and packed is not None:
            out = self._compiled_forward(hidden_states, packed, *kwargs["position_embeddings"])
            if out is not None:
                return out
        attended = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = self._carried(hidden_states) + attended
        return self._carried(hidden_states) + self.mlp(self.post_attention_layernorm(hidden_states))

    def _carried(self, hidden_states: Tensor) -> Tensor:
        """What the server's residual stream keeps of a sum; float32 again, so that the next sum is."""
        return hidden_states.to(self.input_layernorm.weight.dtype).float()

    def _compiled_forward(self, hidden_1TH: Tensor, packed: PackedRows, cos: Tensor, sin: Tensor) -> Tensor | None:
        """The layer through compiled regions; None where its linear layers or its activation are not plain ones."""
        backend, attention = self.compile_backend, self.self_attn
        mlp: Any = self.mlp
        qkv = projections(attention.q_proj, attention.k_proj, attention.v_proj)
        outs = projections(attention.o_proj)
        sparse = isinstance(mlp, MoE)
        gate_up = () if sparse else projections(mlp.gate_proj, mlp.up_proj)
        down = () if sparse else projections(mlp.down_proj)
        plain = None not in (qkv, outs, gate_up, down) and attention.config.hidden_act == "silu"
        if not plain:
            return None
        norms = [_norm(n) for n in (self.input_layernorm, attention.q_norm, attention.k_norm)]
        q, k, v = regions.before_attention(backend, hidden_1TH, norms[0], qkv, cos, sin, attention.head_dim, *norms[1:])
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        heads_TND = packed_attention(q, k, v, packed, scale=attention.scaling, window=None)[0]
        dtype = self.input_layernorm.weight.dtype
        attended = heads_TND, hidden_1TH.to(dtype), outs, _norm(self.post_attention_layernorm)
        if sparse:
            router = mlp.gate
            hidden_1TH, x_TH, probs_TE, ids_TK = regions.before_experts(backend, *attended, router.weight, router.top_k)
            if router.replay is not None:
                ids_TK = router.replay(ids_TK)
            weights_TK = regions.routing_weights(backend, probs_TE, ids_TK, router.norm_topk_prob)
            fed_TH = mlp.experts(x_TH, ids_TK, weights_TK)
        else:
            hidden_1TH, fed_TH = regions.before_dense(backend, *attended, gate_up, down)
        return self._carried(hidden_1TH) + fed_TH


def _norm(norm: Any) -> regions.Norm:
    return norm.weight, norm.eps


class _Qwen3(PreTrainedModel):
    config: Qwen3AnyConfig  # type: ignore[assignment]
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012 - the base class declares a list


class Decoder(_Qwen3):
    """Embedding, layers and final norm; the names of transformers' Qwen3Model."""

    def __init__(self, config: Qwen3AnyConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([DecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = hf.Qwen3RotaryEmbedding(config)  # type: ignore[arg-type]
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        hidden_states = self.embed_tokens(input_ids)
        position_ids, past_key_values = places(input_ids, self.config, past_key_values, position_ids, use_cache)
        packed, mask = None, None
        # the variable-length kernels read the boundaries from position_ids themselves
        masked = self.config._attn_implementation in ("sdpa", "eager")
        if input_ids.shape[0] == 1 and attention_mask is None and past_key_values is None and masked:
            packed = PackedRows.from_position_ids(position_ids)
        else:
            mask = create_causal_mask(
                config=self.config,
                inputs_embeds=hidden_states,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
            )
        # in float32: each layer rounds to its own type
        cos_sin = self.rotary_emb(hidden_states.float(), position_ids)
        hidden_states = hidden_states.float()
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                position_embeddings=cos_sin,
                attention_mask=mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                packed=packed,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)


class Qwen3ForCausalLM(CausalLM, _Qwen3, GenerationMixin):
    """Qwen3 language model, dense or sparse as its config says.

    With `tie_word_embeddings` the head is a parameter of its own that is read from the embedding's tensor: both are
    frozen, and FSDP2 need not know that they are one.
    """

    def __init__(self, config: Qwen3AnyConfig) -> None:
        super().__init__(config)
        self.model = Decoder(config)
        self.lm_head = Head(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens
