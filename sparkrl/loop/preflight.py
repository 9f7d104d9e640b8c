"""What can be known to be wrong before anything is started or written."""

from __future__ import annotations

import torch

from sparkrl.config.schema import Config
from sparkrl.lora.targets import resolve_targets
from sparkrl.models.registry import load_config
from sparkrl.quant.checkpoint import CheckpointReader


def check_model(config: Config) -> None:
    """Read the checkpoint's headers and find the adapter's targets, on the meta device: no weight is read.

    Raises:
        CheckpointError: an unknown family, a broken config, a missing or damaged file, quantization that does not fit.
        ConfigError: `lora.targets` names something the model does not have.
    """
    family, text_config = load_config(config.model.path)
    CheckpointReader(config.model.path)
    with torch.device("meta"):
        model = family.build(text_config, torch.float32)
    resolve_targets(list(config.lora.targets), family, model)
