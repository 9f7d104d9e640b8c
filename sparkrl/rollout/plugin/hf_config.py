"""From a checkpoint's config.json to the config vLLM builds the model from, and to the class that serves it.

Two things are settled before vLLM reads anything else: a nested multimodal form (`muse_spark`) is reduced to its text
part, and the quantization section is taken out. `loader.py` dequantizes the experts while reading, so vLLM, which has
no NVFP4 on CPU, need not be told that there is any.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from sparkrl.models.registry import FAMILIES, Family, RoutingShape, family_of

ARCHITECTURE = "MuseSpark1xForCausalLM"
CPU_CLASSES = {
    "muse_spark": (ARCHITECTURE, "sparkrl.rollout.plugin.model:MuseSparkForCausalLM"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "sparkrl.rollout.plugin.qwen3:Qwen3MoeForCausalLM"),
    "qwen3": ("Qwen3ForCausalLM", "sparkrl.rollout.plugin.qwen3:Qwen3ForCausalLM"),
}
"""Family to architecture and class, by name: importing a class pulls vLLM's layers in."""
CUDA_CLASSES = {
    "muse_spark": (ARCHITECTURE, "sparkrl.rollout.plugin.cuda.model:MuseSparkTextForCausalLM"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "sparkrl.rollout.plugin.cuda.qwen3:Qwen3MoeForCausalLM"),
    "qwen3": ("Qwen3ForCausalLM", "sparkrl.rollout.plugin.cuda.qwen3:Qwen3ForCausalLM"),
}


def adapt(config: PreTrainedConfig) -> PreTrainedConfig:
    """vLLM's `hf_overrides`: the text config without its quantization section.

    The family's rules are checked before, by `sparkrl.models.registry.load_config`. Any other model's config is
    returned as it came: vLLM also calls this with a placeholder, to see whether it changes the model type.

    Args:
        config: as transformers read it; of a multimodal form, with `text_config`.
    Returns:
        A text config whose architecture is one that this plugin registers.
    """
    family = _family_or_none(config)
    if family is None:
        return config
    text: Any = getattr(config, "text_config", config)
    if text is not config:
        # Generation and padding ids may lie outside the text part in the published form.
        for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
            if getattr(text, name, None) is None:
                setattr(text, name, getattr(config, name, None))
    if getattr(text, "quantization_config", None) is not None:
        del text.quantization_config
    text.architectures = [CPU_CLASSES[family.name][0]]
    return text


def routing(config: Any) -> RoutingShape:
    """How the model of this text config routes."""
    return family_of(config.model_type).routing(config)


def _family_or_none(config: PreTrainedConfig) -> Family | None:
    known = any(config.model_type in family.model_types for family in FAMILIES)
    return family_of(config.model_type) if known else None
