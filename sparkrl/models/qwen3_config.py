"""The rules that a Qwen3 config, dense or sparse, has to keep."""

from __future__ import annotations

from transformers import Qwen3Config, Qwen3MoeConfig

from sparkrl.errors import CheckpointError
from sparkrl.models.qwen3_moe import is_sparse


def check_config(config: Qwen3Config | Qwen3MoeConfig) -> None:
    """Refuse a config that trainer and server would not compute alike.

    Raises:
        CheckpointError: naming the field, its value and the rule.
    """
    rope = config.rope_parameters or {}
    if rope.get("rope_type", "default") != "default":
        _refuse(config, "rope_parameters.rope_type", rope["rope_type"], "`default`")
    if config.use_sliding_window:
        _refuse(config, "use_sliding_window", config.use_sliding_window, "false")
    if config.attention_bias:
        _refuse(config, "attention_bias", config.attention_bias, "false")
    if config.hidden_act != "silu":
        _refuse(config, "hidden_act", config.hidden_act, "`silu`")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if not kv_heads or heads % kv_heads:
        _refuse(config, "num_key_value_heads", kv_heads, f"a divisor of {heads} heads")
    if not hasattr(config, "head_dim"):  # Qwen3-MoE's own default is none at all
        _refuse(config, "head_dim", "nothing", "given")
    if config.head_dim % 2:
        _refuse(config, "head_dim", config.head_dim, "even, for the rotary embedding")
    if not isinstance(config, Qwen3MoeConfig):
        return
    if not 1 <= config.num_experts_per_tok <= config.num_experts:
        _refuse(config, "num_experts_per_tok", config.num_experts_per_tok, f"between 1 and {config.num_experts}")
    if not any(is_sparse(config, layer) for layer in range(config.num_hidden_layers)):
        _refuse(config, "decoder_sparse_step", config.decoder_sparse_step, "such that at least one layer routes")


def _refuse(config: Qwen3Config | Qwen3MoeConfig, field: str, value: object, rule: str) -> None:
    raise CheckpointError(f"config.json: `{field}` of a {config.model_type} model must be: {rule}; got: {value}")
