"""Small checkpoints in every published form, written by hand, and their values by a float64 table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

LAYERS, EXPERTS, WIDTH, INNER = 3, 4, 64, 32
PREFIX = "model.layers.{}.mlp.experts"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SCHEMES: dict[str, dict[str, Any]] = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    "modelopt-stacked": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    "compressed-tensors-mxfp4": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
    "mxfp4": {"quant_method": "mxfp4"},
    "quark": {
        "quant_method": "quark",
        "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}},
    },
}
IGNORED = {
    "modelopt": ("ignore", ["lm_head", "model.layers.0.mlp.experts*"]),
    "modelopt-stacked": ("ignore", ["lm_head", "model.layers.0.mlp*"]),
    "compressed-tensors": ("ignore", ["lm_head", "re:.*layers\\.0\\.mlp\\.experts.*"]),
    "compressed-tensors-mxfp4": ("ignore", ["lm_head", "model.layers.0.mlp.experts"]),
    "mxfp4": ("modules_to_not_convert", ["model.layers.0.mlp", "lm_head"]),
    "quark": ("exclude", ["lm_head", "re:model\\.layers\\.0\\.mlp.*"]),
}


def e4m3(codes: Tensor) -> np.ndarray:
    """float64 values of float8_e4m3fn bytes, from the type's definition."""
    byte = codes.view(torch.uint8).numpy().astype(np.int64)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    return np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))


def unpack(codes: Tensor) -> np.ndarray:
    """float64 [..., W] values of uint8 [..., W/2]."""
    byte = codes.numpy()
    return E2M1[np.stack([byte & 15, byte >> 4], axis=-1).reshape(*byte.shape[:-1], -1)]


class Weight:
    """A random quantized matrix [rows, columns]."""

    def __init__(self, form: str, rows: int, columns: int, random: torch.Generator) -> None:
        self.form, self.mx = form, "mxfp4" in form or form == "quark"
        size = 32 if self.mx else 16
        self.codes = torch.randint(0, 256, (rows, columns // 2), generator=random, dtype=torch.uint8)
        low, high = (110, 130) if self.mx else (0x20, 0x60)
        self.block = torch.randint(low, high, (rows, columns // size), generator=random, dtype=torch.uint8)
        self.scale = torch.rand((), generator=random) * 0.01 + 0.001
        if form == "compressed-tensors":
            self.scale = 1 / self.scale

    def value(self) -> np.ndarray:
        """float64; the product or quotient of the two scales is rounded to float32, as the libraries do."""
        if self.mx:
            step = 2.0 ** (self.block.numpy().astype(np.float64) - 127)
        else:
            whole = np.float64(self.scale.numpy())
            block = e4m3(self.block)
            step = (block / whole if self.form == "compressed-tensors" else block * whole).astype(np.float32)
        return unpack(self.codes) * step.astype(np.float64).repeat(32 if self.mx else 16, axis=-1)

    def tensors(self, module: str) -> dict[str, Tensor]:
        """As a linear module's."""
        e4m3_block = self.block.view(torch.float8_e4m3fn)
        if self.form == "modelopt":
            one = torch.tensor(1.0)
            scales = {f"{module}.weight_scale_2": self.scale, f"{module}.input_scale": one}
            return {f"{module}.weight": self.codes, f"{module}.weight_scale": e4m3_block, **scales}
        if self.form == "compressed-tensors":
            scale = self.scale.view(1)
            more = {f"{module}.weight_global_scale": scale}
            return {f"{module}.weight_packed": self.codes, f"{module}.weight_scale": e4m3_block, **more}
        codes = "weight" if self.form == "quark" else "weight_packed"
        return {f"{module}.{codes}": self.codes, f"{module}.weight_scale": self.block}


def build(folder: Path, form: str, **config: Any) -> dict[str, np.ndarray]:
    """Write a checkpoint; layer 0 is plain, the others' experts are quantized.

    Returns:
        float64 values of the quantized stacks by logical name, gate rows before up rows.
    """
    random = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {"lm_head.weight": torch.randn(8, WIDTH, generator=random).bfloat16()}
    expected: dict[str, np.ndarray] = {}
    for layer in range(LAYERS):
        stack = PREFIX.format(layer)
        if layer == 0:
            tensors |= plain_experts(stack, random)
            continue
        gates, ups = ([Weight(form, INNER, WIDTH, random) for _ in range(EXPERTS)] for _ in range(2))
        downs = [Weight(form, WIDTH, INNER, random) for _ in range(EXPERTS)]
        expected[f"{stack}.gate_up_proj"] = np.stack(
            [np.concatenate([g.value(), u.value()]) for g, u in zip(gates, ups, strict=True)]
        )
        expected[f"{stack}.down_proj"] = np.stack([d.value() for d in downs])
        if form == "modelopt-stacked":
            both = [torch.cat([g.codes, u.codes]) for g, u in zip(gates, ups, strict=True)]
            blocks = [torch.cat([g.block, u.block]) for g, u in zip(gates, ups, strict=True)]
            scales = torch.stack([torch.stack([g.scale, u.scale]) for g, u in zip(gates, ups, strict=True)])
            tensors |= _stacked(f"{stack}.gate_up_proj", both, blocks, scales)
            scales = torch.stack([d.scale for d in downs])
            tensors |= _stacked(f"{stack}.down_proj", [d.codes for d in downs], [d.block for d in downs], scales)
        elif form == "mxfp4":
            both = [_alternate(g.codes, u.codes) for g, u in zip(gates, ups, strict=True)]
            blocks = [_alternate(g.block, u.block) for g, u in zip(gates, ups, strict=True)]
            tensors |= _gpt_oss(f"{stack}.gate_up_proj", both, blocks)
            tensors |= _gpt_oss(f"{stack}.down_proj", [d.codes for d in downs], [d.block for d in downs])
        else:
            for name, weights in (("gate_proj", gates), ("up_proj", ups), ("down_proj", downs)):
                for i, weight in enumerate(weights):
                    tensors |= weight.tensors(f"{stack}.{i}.{name}")
    key, patterns = IGNORED[form]
    fields = {"num_local_experts": EXPERTS, "hidden_size": WIDTH, "moe_intermediate_size": INNER}
    scheme = {**SCHEMES[form], key: patterns}
    write(folder, tensors, {"model_type": "any", **fields, "quantization_config": scheme, **config})
    return expected


def plain_experts(stack: str, random: torch.Generator) -> dict[str, Tensor]:
    """BF16 experts, one by one."""
    tensors = {}
    for i in range(EXPERTS):
        for name, shape in (("gate_proj", (INNER, WIDTH)), ("up_proj", (INNER, WIDTH)), ("down_proj", (WIDTH, INNER))):
            tensors[f"{stack}.{i}.{name}.weight"] = torch.randn(shape, generator=random).bfloat16()
    return tensors


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """A single-file checkpoint, unchecked."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def _alternate(gate: Tensor, up: Tensor) -> Tensor:
    return torch.stack([gate, up], dim=1).flatten(0, 1)


def _stacked(name: str, codes: list[Tensor], blocks: list[Tensor], scales: Tensor) -> dict[str, Tensor]:
    return {
        name: torch.stack(codes),
        f"{name}_weight_scale": torch.stack(blocks).view(torch.float8_e4m3fn),
        f"{name}_weight_scale_2": scales,
        f"{name}_input_scale": torch.ones_like(scales),
    }


def _gpt_oss(name: str, codes: list[Tensor], blocks: list[Tensor]) -> dict[str, Tensor]:
    return {f"{name}_blocks": torch.stack(codes).unflatten(-1, (-1, 16)), f"{name}_scales": torch.stack(blocks)}
