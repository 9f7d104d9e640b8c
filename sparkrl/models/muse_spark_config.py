"""The rules that a Muse Spark config has to keep."""

from __future__ import annotations

import math
from typing import Any

from transformers import MuseSparkTextConfig

from sparkrl.errors import CheckpointError


def check_config(config: MuseSparkTextConfig, extra: dict[str, Any] | None = None) -> None:
    """Refuse a config that breaks one of the family's rules.

    Args:
        config: the text config.
        extra: fields of config.json that transformers does not know (`num_shared_experts`).
    Raises:
        CheckpointError: naming the field, its value and the rule.
    """
    num_layers = config.num_hidden_layers
    kinds = {"layer_types": {"full_attention", "sliding_attention"}, "mlp_layer_types": {"sparse", "dense"}}
    for field, allowed in kinds.items():
        value = getattr(config, field)
        if len(value) != num_layers:
            _refuse(field, f"{len(value)} entries", f"one entry for each of the {num_layers} layers")
        if unknown := set(value) - allowed:
            _refuse(field, sorted(unknown), f"each entry is one of {sorted(allowed)}")
    layer_thetas = config.layer_rope_theta or []
    if len(layer_thetas) != num_layers:
        _refuse("layer_rope_theta", f"{len(layer_thetas)} entries", f"one for each of the {num_layers} layers")
    thetas = {float(theta) for theta in layer_thetas if theta}
    if len(thetas) > 1:
        _refuse("layer_rope_theta", sorted(thetas), "0 (no rotary embedding) or one common value")
    rope = config.rope_parameters or {}
    if rope.get("rope_type", "default") != "default":
        _refuse("rope_parameters.rope_type", rope["rope_type"], "`default`")
    if thetas and thetas != {float(rope.get("rope_theta") or 0.0)}:
        _refuse("rope_parameters.rope_theta", rope.get("rope_theta"), f"equal to layer_rope_theta ({thetas.pop()})")
    if "sliding_attention" in (config.layer_types or []) and not config.sliding_window:
        _refuse("sliding_window", config.sliding_window, "a positive number of tokens")
    shared = (extra or {}).get("num_shared_experts", getattr(config, "num_shared_experts", 0))
    if shared:
        _refuse("num_shared_experts", shared, "0")
    if config.hidden_act != "silu":
        _refuse("hidden_act", config.hidden_act, "`silu`")
    if config.attention_bias:
        _refuse("attention_bias", config.attention_bias, "false")
    if config.num_attention_heads % config.num_key_value_heads:
        _refuse("num_key_value_heads", config.num_key_value_heads, f"a divisor of {config.num_attention_heads} heads")
    if config.head_dim % 2:
        _refuse("head_dim", config.head_dim, "even, for the rotary embedding")
    if not 1 <= config.num_experts_per_tok <= config.num_local_experts:
        _refuse("num_experts_per_tok", config.num_experts_per_tok, f"between 1 and {config.num_local_experts} experts")
    for field in ("final_logit_softcapping", "residual_gate_temperature", "qk_scale_factor", "output_multiplier"):
        value = getattr(config, field)
        if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
            _refuse(field, value, "a positive number")
    if config.tie_word_embeddings:
        _refuse("tie_word_embeddings", config.tie_word_embeddings, "false; this family stores its own lm_head.weight")


def _refuse(field: str, value: object, rule: str) -> None:
    raise CheckpointError(f"config.json: `{field}` of a muse_spark model must be: {rule}; got: {value}")
