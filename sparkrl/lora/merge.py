"""An adapter checked against its model, exported in another form, or merged into the model's weights.

Legend: E expert, R rank, O output rows, I input width.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparkrl.errors import CheckpointError
from sparkrl.lora.forms import Form, Heads, convert
from sparkrl.lora.peft_format import load_adapter, pack, rank_and_scale, save_adapter
from sparkrl.models.registry import Family, load_config
from sparkrl.quant.convert import dequantize_checkpoint
from sparkrl.quant.folder import appearing
from sparkrl.quant.resumable import Progress

_PEFT_PREFIX = "base_model.model."


def export_adapter(
    adapter: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    form: Form,
    model: str | Path | None = None,
) -> int:
    """Write an adapter of any form in another one, which appears complete or not at all.

    Args:
        adapter: folder of the adapter.
        dst: folder to make; must not exist yet.
        model: checkpoint that it is for; the adapter is then checked against it. None takes the one that the adapter
            names, where that is on this machine.
    Returns:
        Tensors written.
    Raises:
        CheckpointError: the adapter is incomplete, of another model or rank, or cannot have the form; `dst` exists or
            cannot be written.
    """
    tensors, config = load_adapter(adapter)
    named = config.get("base_model_name_or_path")
    if model is None and named and (Path(named) / "config.json").is_file():
        model = named
    heads = None
    if model is not None:
        family, text = load_config(model)
        heads = Heads.of(text)
        plain, plain_config = convert(tensors, config, Form.peft, heads=heads)
        check(plain, plain_config, family, text, f"{adapter}")
    found, described = convert(tensors, config, form, heads=heads)
    try:
        with appearing(Path(dst)) as folder:
            save_adapter(folder, found, described)
    except OSError as error:
        raise CheckpointError(f"{dst} cannot be written: {error.strerror or error}") from None
    return len(found)


def merge_adapter(
    adapter: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    model: str | Path | None = None,
    shard_bytes: int = 5 << 30,
    progress: Progress | None = None,
) -> int:
    """Write the model's checkpoint with the adapter added to its weights, in BF16.

    One expert, or a few rows, at a time: each is read (dequantized to BF16 where it is in four bits), the product of
    its factors is added in float32, and the sum is rounded once. `dst` appears complete or not at all.

    Args:
        adapter: folder of the adapter, of any form.
        dst: folder to make; must not exist yet.
        model: checkpoint to merge into; None takes the one that the adapter names.
    Returns:
        Weights that were changed.
    Raises:
        CheckpointError: as `export_adapter`, and the model is not known.
    """
    tensors, config = load_adapter(adapter)
    model = config.get("base_model_name_or_path") if model is None else model
    if not model or not (Path(model) / "config.json").is_file():
        raise CheckpointError(
            f"{adapter} is for the model `{model}`, which is not on this machine", hint="name its folder with `--model`"
        )
    family, text = load_config(model)
    tensors, config = convert(tensors, config, Form.peft, heads=Heads.of(text))
    check(tensors, config, family, text, f"{adapter}")
    products = _products(tensors, config, family)
    dequantize_checkpoint(
        model,
        dst,
        edits={name: product.add_to for name, product in products.items()},
        edit_identity=pack(tensors, config, 0).checksum,
        shard_bytes=shard_bytes,
        progress=progress,
    )
    return len(products)


def check(tensors: Mapping[str, Tensor], config: Mapping[str, Any], family: Family, text: Any, where: str) -> None:
    """Refuse an adapter, in PEFT's form, that is not complete or not for this model.

    Raises:
        CheckpointError: names the first tensor that is missing, foreign or of the wrong shape.
    """
    weights = family.shapes(text)
    modules = sorted({name.split(".lora_")[0] for name in tensors})
    for module in modules:
        names = [f"{module}.lora_{factor}.weight" for factor in "AB"]
        missing = [name for name in names if name not in tensors]
        if missing:
            raise CheckpointError(f"the adapter {where} lacks `{missing[0]}`")
        weight = weight_of(module, family)
        if weight not in weights:
            raise CheckpointError(
                f"the adapter {where} is for another model: this {family.name} has no `{weight}`, which it adapts",
                hint="name the model that it was trained on with `--model`",
            )
        rank = rank_and_scale(config, module)[0]
        *experts, rows, width = weights[weight]
        copies = experts[0] if experts else 1
        for name, shape in zip(names, ((copies * rank, width), (rows, rank * copies)), strict=True):
            if tuple(tensors[name].shape) != shape:
                raise CheckpointError(
                    f"`{name}` in {where} has shape {tuple(tensors[name].shape)}, a rank-{rank} adapter of this "
                    f"model's `{weight}` has {shape}"
                )
            if not torch.isfinite(tensors[name]).all():
                raise CheckpointError(
                    f"`{name}` in {where} holds values that are NaN or infinite", hint="take an earlier checkpoint"
                )
    gate_up = {module.removesuffix(".base_layer") for module in modules if module.endswith(".experts.base_layer")}
    if lone := sorted(gate_up ^ {module for module in modules if module.endswith(".experts")}):
        raise CheckpointError(f"the adapter {where} has only one of gate_up_proj and down_proj of `{lone[0]}`")


def weight_of(module: str, family: Family) -> str:
    """Name in the checkpoint of the weight that a module of the adapter changes."""
    module = module.removeprefix(_PEFT_PREFIX)
    gate_up, down = (parameter.rsplit(".", 1)[-1] for parameter in family.expert_parameters)
    if module.endswith(".experts.base_layer"):
        return module.removesuffix("base_layer") + gate_up
    return f"{module}.{down}" if module.endswith(".experts") else f"{module}.weight"


class _Product:
    """What an adapter adds to one weight."""

    def __init__(self, a: Tensor, b: Tensor, *, rank: int, scale: float, stacked: bool) -> None:
        # A [R, I] or [E, R, I], B [O, R] or [E, O, R]
        self.a = a.unflatten(0, (-1, rank)) if stacked else a
        self.b = b.unflatten(1, (rank, -1)).permute(2, 0, 1) if stacked else b
        self.scale, self.stacked = scale, stacked

    def add_to(self, start: int, rows: Tensor) -> Tensor:
        """Float32 sum of the weight's rows (experts, where they are stacked) from `start` on and their product."""
        b = self.b[start : start + len(rows)].float() * self.scale
        a = self.a[start : start + len(rows)] if self.stacked else self.a
        return rows.float() + b @ a.float()


def _products(tensors: Mapping[str, Tensor], config: Mapping[str, Any], family: Family) -> dict[str, _Product]:
    found = {}
    for module in sorted({name.split(".lora_")[0] for name in tensors}):
        rank, scale = rank_and_scale(config, module)
        weight = weight_of(module, family)
        found[weight] = _Product(
            tensors[f"{module}.lora_A.weight"],
            tensors[f"{module}.lora_B.weight"],
            rank=rank,
            scale=scale,
            stacked=not weight.endswith(".weight"),
        )
    return found
