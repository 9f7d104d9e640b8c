"""Muse Spark's text decoder for training: transformers' modules and names, with a float32 residual stream.

transformers 5.20.2 carries the residual stream in the model's type and has no text-only causal language model for this
family. Here the residual stream is float32 whatever the compute type, as on the server, every norm is computed in
float32 and rounded once, and the weighted sum over experts stays float32. In float32 the result equals transformers'.

Legend: B row, S position, T packed token, H heads, D head width, E expert, K routed slot, N = T * K expert rows.
Source: transformers/models/muse_spark, and vllm/models/muse_spark of vLLM 0.33.0 for where values are rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MuseSparkTextConfig
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, ModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.muse_spark import modeling_muse_spark as hf

from sparkrl.models.grouped import GroupedRows, grouped_linear
from sparkrl.models.head import token_log_probs
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


class Experts(hf.MuseSparkExperts):
    """All routed experts of a layer as two grouped GEMMs over rows sorted by expert."""

    def __init__(self, config: MuseSparkTextConfig) -> None:
        super().__init__(config)
        self.post_expert_norm = InputScaledNorm(self.hidden_dim, eps=config.post_norm_eps)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Weighted sum of the chosen experts' normed outputs.

        Args:
            hidden_states: [T, H] in the compute type.
            top_k_index: int64 [T, K].
            top_k_weights: float32 [T, K].
        Returns:
            [T, H] in the compute type, summed in float32.
        """
        rows = GroupedRows.sort(top_k_index, self.num_experts)
        x_NH = rows.gather(hidden_states)
        gate, up = grouped_linear(x_NH, self.gate_up_proj, rows).chunk(2, dim=-1)
        h_NI = self.act_fn(gate) * up
        return self.combine(grouped_linear(h_NI, self.down_proj, rows), rows, top_k_weights)

    def combine(self, y_NH: Tensor, rows: GroupedRows, top_k_weights: Tensor) -> Tensor:
        """Per-expert norm, routing weight and sum, in float32; rounded once at the end."""
        return rows.weighted_sum(self.post_expert_norm(y_NH), top_k_weights).to(y_NH.dtype)


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
        dtype = self.input_layernorm.weight.dtype
        attended = self.self_attn(self.input_layernorm(hidden_states, dtype), **kwargs)
        attended = _rms(attended, self.post_attention_layernorm.eps)
        hidden_states = self.post_attention_residual_gate(hidden_states, attended)
        fed = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden_states, dtype)))
        return self.post_feedforward_residual_gate(hidden_states, fed)


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
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = (torch.arange(input_ids.shape[1], device=input_ids.device) + seen).unsqueeze(0)
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


@dataclass
class CausalLMOutput(ModelOutput):
    """What the language model returns; `log_probs` and `entropy` instead of `logits` when targets are given."""

    logits: Tensor | None = None
    """float32 [B, S, V], soft-capped, before any temperature."""
    log_probs: Tensor | None = None
    """float32 [B, S], nats, of the targets at the given temperature."""
    entropy: Tensor | None = None
    """float32 [B, S], nats a token, at the given temperature."""
    past_key_values: Cache | None = None


class Head(nn.Linear):
    """Output projection; with targets, their log-probs, so that its weight is used inside its own forward only."""

    def __init__(self, config: MuseSparkTextConfig) -> None:
        super().__init__(config.hidden_size, config.vocab_size, bias=False)
        self.multiplier = config.output_multiplier
        self.cap = config.final_logit_softcapping

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        entropy_grad: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """[B, S, H] to float32 logits [B, S, V] and None, or to the targets' log-probs and entropies, both [B, S]."""
        if targets is None:
            return self.cap * torch.tanh(super().forward(hidden).float() * self.multiplier / self.cap), None
        log_probs, entropy = token_log_probs(
            hidden.flatten(0, 1),
            self.weight,
            targets.flatten(),
            multiplier=self.multiplier,
            cap=self.cap,
            temperature=temperature,
            with_entropy=with_entropy,
            entropy_grad=entropy_grad,
        )
        return log_probs.view(targets.shape), None if entropy is None else entropy.view(targets.shape)


class MuseSparkForCausalLM(hf.MuseSparkPreTrainedModel, GenerationMixin):
    """Text-only language model over the published weights.

    Takes [B, S] rows with an attention mask, or sequences packed into one row [1, T] whose `position_ids` restart at 0
    at each sequence.
    """

    config: MuseSparkTextConfig  # type: ignore[assignment]
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012 - the base class declares a list

    def __init__(self, config: MuseSparkTextConfig) -> None:
        check_config(config)
        super().__init__(config)
        self.model = MuseSparkModel(config)
        self.lm_head = Head(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.language_model.embed_tokens

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        targets: Tensor | None = None,
        temperature: float = 1.0,
        with_entropy: bool = False,
        entropy_grad: bool = False,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutput:
        """Logits, or the targets' log-probs without ever holding all logits.

        Args:
            input_ids: int64 [B, S].
            attention_mask: [B, S], 1 for real tokens, right or left padded; None when nothing is padded.
            position_ids: int64 [B, S]; restarts at 0 mark packed sequences when B is 1.
            targets: int64 [B, S], the token that each position predicts; None asks for logits.
            temperature: divides the soft-capped logits before log-probs and entropy are taken.
            with_entropy: also return the entropy.
            entropy_grad: whether the entropy is differentiated.
            logits_to_keep: only the last so many positions get logits; 0 is all.
        """
        body = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        hidden, cache = body.last_hidden_state, body.past_key_values
        if targets is not None:
            log_probs, entropy = self.lm_head(
                hidden, targets, temperature=temperature, with_entropy=with_entropy, entropy_grad=entropy_grad
            )
            return CausalLMOutput(log_probs=log_probs, entropy=entropy, past_key_values=cache)
        logits, _ = self.lm_head(hidden[:, -logits_to_keep:])
        return CausalLMOutput(logits=logits, past_key_values=cache)
