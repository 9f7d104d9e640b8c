"""An adapter that changes nothing: the base model, served on the very path that a trained adapter takes."""

from __future__ import annotations

from pathlib import Path

import torch

from sparkrl.config.schema import LoraConfig
from sparkrl.lora.peft_format import adapter_config, pack, to_peft
from sparkrl.lora.targets import add_adapter, initial_rows, is_adapter, resolve_targets
from sparkrl.models.registry import load_config
from sparkrl.types import Adapter


def zero_adapter(model_path: str | Path, lora: LoraConfig, *, seed: int = 0) -> Adapter:
    """A fresh adapter, version 0: A drawn as for training, B zero, so W + BA = W.

    Raises:
        CheckpointError, ConfigError: the checkpoint's config or `lora.targets` are unusable.
    """
    family, config = load_config(model_path)
    with torch.device("meta"):
        model = family.build(config, torch.float32)
        targets = resolve_targets(list(lora.targets), family, model)
        shapes = {
            name: parameter.shape
            for name, parameter in add_adapter(model, lora, targets, family).named_parameters()
            if is_adapter(name)
        }
    fresh = {name: initial_rows(name, shape, 0, shape[0], seed=seed) for name, shape in shapes.items()}
    return pack(to_peft(fresh), adapter_config(lora, targets, family, base_model=str(model_path)), 0)
