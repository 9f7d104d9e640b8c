"""From a checkpoint's config.json to the config vLLM builds the model from.

Two things are settled before vLLM reads anything else: the nested multimodal form (`muse_spark`) is reduced to its text
part, and the quantization section is taken out. `loader.py` dequantizes the experts while reading, so vLLM, which has
no NVFP4 on CPU, need not be told that there is any.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

ARCHITECTURE = "MuseSpark1xForCausalLM"


def adapt(config: PreTrainedConfig) -> PreTrainedConfig:
    """vLLM's `hf_overrides`: the text config without its quantization section.

    The family's rules are checked before, by `sparkrl.models.registry.load_config`. Anything but a Muse Spark config is
    returned as it came: vLLM also calls this with a placeholder, to see whether it changes the model type.

    Args:
        config: as transformers read it, `muse_spark_text` or `muse_spark` with `text_config`.
    Returns:
        A text config whose architecture is the one this plugin registers.
    """
    if config.model_type not in ("muse_spark", "muse_spark_text"):
        return config
    text: Any = getattr(config, "text_config", config)
    if text is not config:
        # Generation and padding ids may lie outside the text part in the published form.
        for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
            if getattr(text, name, None) is None:
                setattr(text, name, getattr(config, name, None))
    if getattr(text, "quantization_config", None) is not None:
        del text.quantization_config
    text.architectures = [ARCHITECTURE]
    return text


def sparse_layers(config: Any) -> list[int]:
    """Indices of the layers that route, in order: the L of every routes array."""
    return [index for index, kind in enumerate(config.mlp_layer_types) if kind == "sparse"]
