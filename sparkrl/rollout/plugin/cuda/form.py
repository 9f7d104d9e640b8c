"""In which form the experts are served: NVFP4 as stored, or in BF16 where Marlin cannot carry an adapter."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from sparkrl.quant.checkpoint import CheckpointReader
from sparkrl.rollout.plugin import hf_config


def serves_nvfp4(path: str, tensor_parallel_size: int) -> bool:
    """Whether the checkpoint has NVFP4 experts that can be served as such."""
    reader = CheckpointReader(path)
    if reader.quantization is None:
        return False
    inner, rest = divmod(reader.config["moe_intermediate_size"], tensor_parallel_size)
    return not rest and fits_marlin(reader.config["moe_hidden_size"], inner)


def fits_marlin(latent: int, inner: int) -> bool:
    """Whether Marlin takes these widths without padding, of which vLLM's adapter kernels would not know.

    Args:
        latent: width that the experts read and write.
        inner: width between an expert's two products, on one GPU.
    """
    return (latent % 128 == 0 and inner % 64 == 0) or (latent % 64 == 0 and inner % 128 == 0)


def adapt_nvfp4(config: PreTrainedConfig) -> PreTrainedConfig:
    """As `hf_config.adapt`, with the quantization section left for vLLM to act on."""
    section = getattr(config, "quantization_config", None)
    text: Any = hf_config.adapt(config)
    if section is not None:
        text.quantization_config = section
    return text


def load_arguments(path: str, tensor_parallel_size: int) -> dict[str, Any]:
    """The engine arguments that depend on the form: `load_format` and `hf_overrides`."""
    if serves_nvfp4(path, tensor_parallel_size):
        return {"load_format": "safetensors", "hf_overrides": adapt_nvfp4}
    return {"load_format": "sparkrl", "hf_overrides": hf_config.adapt}
