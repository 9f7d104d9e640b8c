"""Adapters made up to prove that a server applies adapters at all.

Legend: E experts, R rank, in/out widths of a module.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

from sparkrl.lora.targets import find_groups
from sparkrl.models.registry import Family, family_of
from sparkrl.types import Adapter, TensorSpec

_PREFIX = "base_model.model."


def groups_of(config: Any) -> tuple[str, ...]:
    """Groups of modules that an adapter can cover in the model of this text config."""
    return tuple(find_groups(*_on_meta(config)))


def make_adapter(
    config: Any,
    *,
    rank: int,
    alpha: int,
    groups: Collection[str] | None = None,
    b_std: float,
    seed: int = 0,
    version: int,
) -> Adapter:
    """A random adapter over whole groups of modules, in PEFT's names and layouts, float32.

    Args:
        config: the model's text config.
        groups: which of `groups_of` get a nonzero B, None for all; all modules of all groups are present in any case.
        b_std: standard deviation of B; 0 gives an adapter that must change nothing.
    """
    random = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}

    def add(name: str, std: float, width_in: int, width_out: int, experts: int = 1) -> None:
        a = random.standard_normal((experts * rank, width_in)) * width_in**-0.5
        b = random.standard_normal((width_out, rank * experts)) * std
        arrays[f"{name}.lora_A.weight"] = a.astype(np.float32)
        arrays[f"{name}.lora_B.weight"] = b.astype(np.float32)

    family, model = _on_meta(config)
    for group, names in find_groups(family, model).items():
        std = b_std if groups is None or group in groups else 0.0
        for name in names:
            module: Any = model.get_submodule(name)
            if family.is_experts(module):
                width, inner, experts = module.hidden_dim, module.intermediate_dim, module.num_experts
                add(f"{_PREFIX}{name}.base_layer", std, width, 2 * inner, experts)
                add(f"{_PREFIX}{name}", std, inner, width, experts)
            else:
                add(f"{_PREFIX}{name}", std, module.in_features, module.out_features)
    return _pack(arrays, rank=rank, alpha=alpha, version=version)


def _on_meta(config: Any) -> tuple[Family, nn.Module]:
    family = family_of(config.model_type)
    with torch.device("meta"):
        return family, family.build(config, torch.float32)


def _pack(arrays: dict[str, np.ndarray], *, rank: int, alpha: int, version: int) -> Adapter:
    manifest, offset = [], 0
    for name, array in arrays.items():
        manifest.append(TensorSpec(name=name, shape=array.shape, dtype="float32", offset=offset))
        offset += array.nbytes
    buffer = np.concatenate([array.reshape(-1) for array in arrays.values()]).view(np.uint8)
    return Adapter(
        version=version,
        buffer=buffer,
        manifest=tuple(manifest),
        config={"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": [], "bias": "none"},
        checksum=xxhash.xxh3_64_hexdigest(buffer),
    )
