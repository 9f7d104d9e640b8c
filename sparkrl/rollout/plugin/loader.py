"""vLLM's model loader for sparkrl checkpoints: the same reader, so the same numbers, as the trainer's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from sparkrl.quant.checkpoint import CheckpointReader

LOAD_FORMAT = "sparkrl"


@register_model_loader(LOAD_FORMAT)
class SparkrlModelLoader(BaseModelLoader):
    """Feeds the model logical tensors; NVFP4 experts arrive dequantized to BF16, whatever the compute type.

    BF16 first, also in a float32 engine: the trainer's base is the BF16 dequantization, and both sides must hold the
    same numbers.
    """

    def download_model(self, model_config: ModelConfig) -> None:
        CheckpointReader(model_config.model)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        reader = CheckpointReader(model_config.model)
        model.load_weights(_tensors(reader))  # type: ignore[operator]


def _tensors(reader: CheckpointReader) -> Iterator[tuple[str, Tensor]]:
    for name in reader.names:
        yield name, reader.read(name, dtype=torch.bfloat16 if reader.is_quantized(name) else None)
