"""Muse Spark's text decoder for training: transformers' modules and names, with a float32 residual stream.

transformers 5.20.2 carries the residual stream in the model's type and has no text-only causal language model for this
family. Here the residual stream is float32 whatever the compute type, as on the server, every norm is computed in
float32 and rounded once, and the weighted sum over experts stays float32. In float32 the result equals transformers'.

Legend: B row, S position, T packed token, H heads, D head width, E expert, K routed slot, N = T * K expert rows.
Source: transformers/models/muse_spark, and vllm/models/muse_spark of vLLM 0.33.0 for where values are rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MuseSparkTextConfig
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.muse_spark import modeling_muse_spark as hf

from sparkrl.models import muse_spark_regions as regions
from sparkrl.models.causal_lm import CausalLM, Head, places
from sparkrl.models.compiled import projections
from sparkrl.models.experts import RoutedExperts
from sparkrl.models.muse_spark_config import check_config
from sparkrl.models.packing import PackedRows, packed_attention


def _rms(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class CenteredNorm(hf.MuseSparkTextCenteredRMSNorm):
    """`x / rms(x) * (1 + w)` in float32, rounded once, to `dtype`."""

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        return (_rms(x, self.eps) * (1.0 + self.weight.float())).to(dtype)


class InputScaledNorm(hf.MuseSparkTextInputScaledRMSNorm):
    """`y / rms(y)` with `y = x * (1 + w)`; float32 out, without transformers' rounding between scale and norm."""

    def forward(self, x: Tensor) -> Tensor:
        return _rms(x.float() * (1.0 + self.weight.float()), self.eps)


class FinalNorm(hf.MuseSparkRMSNorm):
    """`x / rms(x) * w` in float32, rounded once, to `dtype`."""

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        return (_rms(x, self.eps) * self.weight.float()).to(dtype)


class NormedEmbedding(nn.Embedding):
    """Embedding followed by a norm without weight; float32 out, the start of the residual stream."""

    def __init__(self, config: MuseSparkTextConfig) -> None:
        super().__init__(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.eps = config.rms_norm_eps

    def forward(self, input_ids: Tensor) -> Tensor:
        return _rms(super().forward(input_ids), self.eps)


class ResidualGate(hf.MuseSparkResidualGate):
    """Per-channel gated residual; parameter and arithmetic are float32 whatever the compute type."""

    def __init__(self, config: MuseSparkTextConfig) -> None:
        super().__init__(config)
        self.gate = nn.Parameter(torch.empty(config.hidden_size, dtype=torch.float32))

    def forward(self, residual: Tensor, hidden_states: Tensor) -> Tensor:
        w = self.gate.float() / self.temperature
        beta = torch.sigmoid(w)
        alpha = torch.sqrt(torch.clamp(torch.sigmoid(-w) * (1.0 + beta), min=self.eps))
        return alpha * residual + beta * hidden_states


class Router(hf.MuseSparkTopkRouter):
    """Sigmoid router in float32, whose choice can be replaced.

    `replay`, when set, is called as `replay(live_ids_TK)` and returns the ids to use; the weights always come from the
    live logits, so gradients still reach them.
    """

    def __init__(self, config: MuseSparkTextConfig) -> None:
        super().__init__(config)
        self.weight = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, dtype=torch.float32))
        self.e_score_correction_bias = nn.Buffer(torch.zeros(self.num_experts, dtype=torch.float32))
        self.replay: Callable[[Tensor], Tensor] | None = None

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = hidden_states.reshape(-1, self.hidden_dim).float()
        logits_TE = F.linear(x, self.weight.float()) * self.output_multiplier
        scores_TE = torch.sigmoid(logits_TE)
        choice_TE = (scores_TE + self.e_score_correction_bias).detach()
        ids_TK = torch.topk(choice_TE, k=self.top_k, dim=-1, sorted=False)[1]
        if self.replay is not None:
            ids_TK = self.replay(ids_TK)
        picked_TK = scores_TE.gather(1, ids_TK)
        weights_TK = picked_TK / (picked_TK.sum(-1, keepdim=True) + self.norm_topk_prob_eps)
        return logits_TE, weights_TK * self.routed_scaling_factor, ids_TK


class Experts(RoutedExperts, hf.MuseSparkExperts):
    """All routed experts of a layer, with a norm of each expert's output."""

    def __init__(self, config: MuseSparkTextConfig) -> None:
        super().__init__(config)
        self.post_expert_norm = InputScaledNorm(self.hidden_dim, eps=config.post_norm_eps)


class MoE(hf.MuseSparkMoE):
    """Router, latent projections and experts."""

    def __init__(self, config: MuseSparkTextConfig) -> None:
        super().__init__(config)
        self.gate = Router(config)
        self.pre_expert_norm = CenteredNorm(config.moe_hidden_size, eps=config.rms_norm_eps)
        self.experts = Experts(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        shape = hidden_states.shape
        x = hidden_states.reshape(-1, shape[-1])
        _, weights_TK, ids_TK = self.gate(x)
        latent = self.pre_expert_norm(self.pre_expert_proj(x), x.dtype)
        return self.post_expert_proj(self.experts(latent, ids_TK, weights_TK)).view(shape)


class Attention(hf.MuseSparkTextAttention):
    """Attention with normed queries and keys, normed heads and an output gate."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        packed: PackedRows | None = None,
        **kwargs: Any,
    ) -> Tensor:
        shape = hidden_states.shape[:-1]
        dtype = hidden_states.dtype
        heads = (*shape, -1, self.head_dim)
        eps = self.qk_norm.eps
        q_BHSD = _rms(self.q_proj(hidden_states).view(heads), eps).to(dtype).transpose(1, 2)
        k_BHSD = _rms(self.k_proj(hidden_states).view(heads), eps).to(dtype).transpose(1, 2)
        v_BHSD = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        if position_embeddings is not None:
            cos, sin = (t.to(dtype) for t in position_embeddings)
            q_BHSD, k_BHSD = hf.apply_rotary_pos_emb(q_BHSD, k_BHSD, cos, sin)
        if past_key_values is not None:
            k_BHSD, v_BHSD = past_key_values.update(k_BHSD, v_BHSD, self.layer_idx)
        # one scale on the scores, as the server has it, instead of one more rounding of the queries
        scale = self.scaling * self.qk_scale_factor
        if packed is not None:
            out = packed_attention(q_BHSD, k_BHSD, v_BHSD, packed, scale=scale, window=self.sliding_window)
        else:
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, hf.eager_attention_forward)
            out, _ = attend(
                self,
                q_BHSD,
                k_BHSD,
                v_BHSD,
                attention_mask,
                scaling=scale,
                sliding_window=self.sliding_window,
                **kwargs,
            )
        out = _rms(out, self.o_norm.eps).to(dtype).reshape(*shape, -1)
        return self.o_proj(out * torch.sigmoid(self.gate_proj(hidden_states)))


class DecoderLayer(hf.MuseSparkTextDecoderLayer):
    """One layer: float32 residual stream in and out, compute type inside attention and feed-forward."""

    compile_backend: str | None = None
    """What compiles the layer's regions where sequences are packed; see `sparkrl.models.compiled`."""

    def __init__(self, config: MuseSparkTextConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = Attention(config, layer_idx)
        if (config.mlp_layer_types or [])[layer_idx] == "sparse":
            self.mlp = MoE(config)
        self.input_layernorm = CenteredNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.pre_feedforward_layernorm = CenteredNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_feedforward_layernorm = InputScaledNorm(config.hidden_size, eps=config.post_norm_eps)
        self.post_attention_residual_gate = ResidualGate(config)
        self.post_feedforward_residual_gate = ResidualGate(config)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        packed = kwargs.get("packed")
        if self.compile_backend is not None and packed is not None:
            out = self._compiled_forward(hidden_states, packed, kwargs["position_embeddings"])
            if out is not None:
                return out
        dtype = self.input_layernorm.weight.dtype
        attended = self.self_attn(self.input_layernorm(hidden_states, dtype), **kwargs)
        attended = _rms(attended, self.post_attention_layernorm.eps)
        hidden_states = self.post_attention_residual_gate(hidden_states, attended)
        fed = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden_states, dtype)))
        return self.post_feedforward_residual_gate(hidden_states, fed)

    def _compiled_forward(
        self, hidden_1TH: Tensor, packed: PackedRows, position_embeddings: tuple[Tensor, Tensor] | None
    ) -> Tensor | None:
        """The layer through compiled regions; None where its linear layers are not plain ones."""
        attention: Any = self.self_attn
        mlp: Any = self.mlp
        backend, sparse = self.compile_backend, isinstance(mlp, MoE)
        qkvg = projections(attention.q_proj, attention.k_proj, attention.v_proj, attention.gate_proj)
        outs = projections(attention.o_proj)
        ins = projections(mlp.pre_expert_proj) if sparse else projections(mlp.gate_proj, mlp.up_proj)
        down = projections(mlp.post_expert_proj if sparse else mlp.down_proj)
        if qkvg is None or outs is None or ins is None or down is None:
            return None
        cos, sin = position_embeddings or (None, None)
        norm = self.input_layernorm
        q, k, v, gate_TO = regions.before_attention(
            backend, hidden_1TH, norm.weight, norm.eps, qkvg, cos, sin, attention.head_dim, attention.qk_norm.eps
        )
        scale = attention.scaling * attention.qk_scale_factor
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        heads_TND = packed_attention(q, k, v, packed, scale=scale, window=attention.sliding_window)[0]
        norm, last = self.pre_feedforward_layernorm, self.post_feedforward_layernorm
        tail = last.weight, last.eps, _gate(self.post_feedforward_residual_gate)
        attended = (
            *(heads_TND, gate_TO, hidden_1TH, outs, attention.o_norm.eps, self.post_attention_layernorm.eps),
            *(_gate(self.post_attention_residual_gate), norm.weight, norm.eps),
        )
        if not sparse:
            return regions.dense_feed(backend, *attended, ins, down, *tail)
        router, norm = mlp.gate, mlp.pre_expert_norm
        choice = router.weight, router.e_score_correction_bias, router.output_multiplier, router.top_k
        hidden_1TH, latent_TL, scores_TE, ids_TK = regions.before_experts(
            backend, *attended, choice, ins, norm.weight, norm.eps
        )
        if router.replay is not None:
            ids_TK = router.replay(ids_TK)
        weights_TK = regions.routing_weights(
            backend, scores_TE, ids_TK, router.norm_topk_prob_eps, router.routed_scaling_factor
        )
        mixed_TL = mlp.experts(latent_TL, ids_TK, weights_TK)
        return regions.after_experts(backend, mixed_TL, hidden_1TH, down, *tail)


def _gate(gate: hf.MuseSparkResidualGate) -> regions.Gate:
    return gate.gate, gate.temperature, gate.eps


class MuseSparkTextDecoder(hf.MuseSparkPreTrainedModel):
    """Embedding, layers and final norm; the names of transformers' MuseSparkTextModel."""

    config: MuseSparkTextConfig  # type: ignore[assignment]
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012 - the base class declares a list

    def __init__(self, config: MuseSparkTextConfig) -> None:
        super().__init__(config)
        self.embed_tokens = NormedEmbedding(config)
        self.layers = nn.ModuleList([DecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = FinalNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = hf.MuseSparkTextRotaryEmbedding(config)  # type: ignore[arg-type]
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
        packed, masks = None, {}
        kinds, thetas = self.config.layer_types or [], self.config.layer_rope_theta or []
        if input_ids.shape[0] == 1 and attention_mask is None and past_key_values is None and self._attends_densely:
            packed = PackedRows.from_position_ids(position_ids)
        else:
            mask_args = {
                "config": self.config,
                "inputs_embeds": hidden_states,
                "attention_mask": attention_mask,
                "past_key_values": past_key_values,
                "position_ids": position_ids,
            }
            masks["full_attention"] = create_causal_mask(**mask_args)
            if "sliding_attention" in kinds:
                masks["sliding_attention"] = create_sliding_window_causal_mask(**mask_args)
        cos_sin = self.rotary_emb(hidden_states, position_ids)
        for layer, kind, theta in zip(self.layers, kinds, thetas, strict=True):
            hidden_states = layer(
                hidden_states,
                position_embeddings=cos_sin if theta else None,
                attention_mask=masks.get(kind),
                position_ids=position_ids,
                past_key_values=past_key_values,
                packed=packed,
                **kwargs,
            )
        hidden_states = self.norm(hidden_states, self.norm.weight.dtype)
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, past_key_values=past_key_values)

    @property
    def _attends_densely(self) -> bool:
        # the variable-length kernels read the boundaries from position_ids themselves
        return self.config._attn_implementation in ("sdpa", "eager")


class MuseSparkModel(hf.MuseSparkPreTrainedModel):
    """Holds the decoder under `language_model`, so that every name equals the checkpoint's."""

    config: MuseSparkTextConfig  # type: ignore[assignment]

    def __init__(self, config: MuseSparkTextConfig) -> None:
        super().__init__(config)
        self.language_model = MuseSparkTextDecoder(config)
        self.post_init()

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPast:
        return self.language_model(*args, **kwargs)


class MuseSparkForCausalLM(CausalLM, hf.MuseSparkPreTrainedModel, GenerationMixin):
    """Text-only language model over the published weights."""

    config: MuseSparkTextConfig  # type: ignore[assignment]
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012 - the base class declares a list

    def __init__(self, config: MuseSparkTextConfig) -> None:
        check_config(config)
        super().__init__(config)
        self.model = MuseSparkModel(config)
        self.lm_head = Head(
            config.hidden_size,
            config.vocab_size,
            multiplier=config.output_multiplier,
            cap=config.final_logit_softcapping,
        )
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.language_model.embed_tokens
