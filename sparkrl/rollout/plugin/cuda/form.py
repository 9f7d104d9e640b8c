"""In which form the experts are served: NVFP4 as stored, or in BF16 where Marlin cannot carry an adapter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedConfig

from sparkrl.quant.checkpoint import CheckpointReader
from sparkrl.quant.form import FORMS
from sparkrl.rollout.plugin import hf_config
from sparkrl.rollout.plugin.cuda import paths


def serves_nvfp4(path: str, tensor_parallel_size: int) -> bool:
    """Whether the checkpoint has NVFP4 experts that can be served as such."""
    reader = CheckpointReader(path)
    # vLLM's own Muse Spark knows ModelOpt's stacked form; others are dequantized by the loader
    if not any(reader.logical(name).first.names is FORMS["modelopt-stacked"] for name in reader.names):
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


def adapt(config: PreTrainedConfig) -> PreTrainedConfig:
    """As `hf_config.adapt`, with logits in float32.

    The head's product is rounded to bfloat16 by default, which at logits of ten is a step of 1/16 nat. On CUDA vLLM
    accumulates it straight into float32, and so does the trainer (`sparkrl.models.head`).
    """
    text: Any = hf_config.adapt(config)
    if text.model_type == "muse_spark_text":
        text.head_dtype = "float32"
    return text


def adapt_nvfp4(config: PreTrainedConfig) -> PreTrainedConfig:
    """As `adapt`, with the quantization section left for vLLM to act on."""
    section = getattr(config, "quantization_config", None)
    text: Any = adapt(config)
    if section is not None:
        text.quantization_config = section
    return text


def load_arguments(path: str, tensor_parallel_size: int) -> dict[str, Any]:
    """The engine arguments that depend on the form: `load_format` and `hf_overrides`.

    Raises:
        RoutingError, AdapterError: the config switches on what `paths` refuses; here, before a process is started.
    """
    paths.require_recorded(SimpleNamespace(**CheckpointReader(path).config), tensor_parallel_size=tensor_parallel_size)
    if serves_nvfp4(path, tensor_parallel_size):
        return {"load_format": "safetensors", "hf_overrides": adapt_nvfp4}
    return {"load_format": "sparkrl", "hf_overrides": adapt}
