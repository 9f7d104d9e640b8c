"""Adapters made up to prove that a server applies adapters at all.

Legend: E experts, R rank, in/out widths of a module.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

from sparkrl.types import Adapter, TensorSpec

GROUPS = ("attention", "latent", "experts")
_PREFIX = "base_model.model.model.language_model.layers"


def make_adapter(
    config: Any, *, rank: int, alpha: int, groups: tuple[str, ...] = GROUPS, b_std: float, seed: int = 0, version: int
) -> Adapter:
    """A random adapter over whole groups of modules, in PEFT's names and layouts, float32.

    Args:
        config: the model's text config.
        groups: which of `GROUPS` get a nonzero B; all modules of all groups are present in any case.
        b_std: standard deviation of B; 0 gives an adapter that must change nothing.
    """
    random = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}

    def add(name: str, group: str, width_in: int, width_out: int, experts: int = 1) -> None:
        std = b_std if group in groups else 0.0
        a = random.standard_normal((experts * rank, width_in)) * width_in**-0.5
        b = random.standard_normal((width_out, rank * experts)) * std
        arrays[f"{name}.lora_A.weight"] = a.astype(np.float32)
        arrays[f"{name}.lora_B.weight"] = b.astype(np.float32)

    hidden, latent = config.hidden_size, config.moe_hidden_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    for layer, kind in enumerate(config.mlp_layer_types):
        attention, mlp = f"{_PREFIX}.{layer}.self_attn", f"{_PREFIX}.{layer}.mlp"
        for part, width in (("q", q), ("k", kv), ("v", kv), ("gate", q)):
            add(f"{attention}.{part}_proj", "attention", hidden, width)
        add(f"{attention}.o_proj", "attention", q, hidden)
        if kind != "sparse":
            continue
        add(f"{mlp}.pre_expert_proj", "latent", hidden, latent)
        add(f"{mlp}.post_expert_proj", "latent", latent, hidden)
        experts, inner = config.num_local_experts, config.moe_intermediate_size
        add(f"{mlp}.experts.base_layer", "experts", latent, 2 * inner, experts)
        add(f"{mlp}.experts", "experts", inner, latent, experts)
    return _pack(arrays, rank=rank, alpha=alpha, version=version)


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
