"""A sharded model filled from a checkpoint: every rank reads its own rows, dequantizes them, and holds nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedConfig

from sparkrl.errors import CheckpointError, ConfigError
from sparkrl.lora.targets import initial_rows, is_adapter
from sparkrl.models.registry import Family
from sparkrl.quant.checkpoint import CheckpointReader
from sparkrl.quant.packed import Packed
from sparkrl.quant.stream import Destination, fill, packed_like
from sparkrl.trainer.packed_experts import BLOCK_SCALE, SCALE, PackedExperts, hold_packed

_PEFT_PREFIX = "base_model.model."


def pack_experts(module: nn.Module, reader: CheckpointReader, family: Family, dtype: torch.dtype) -> None:
    """Make every experts module whose weights the checkpoint quantizes hold codes and scales.

    Args:
        module: the model, without adapter, on the meta device.
        dtype: compute type.
    Raises:
        ConfigError: no expert is quantized.
    """
    found = False
    for name, experts in list(module.named_modules()):
        if not family.is_experts(experts):
            continue
        weights = [parameter.rsplit(".", 1)[-1] for parameter in family.expert_parameters]
        stored = {weight: f"{name}.{weight}" for weight in weights}
        forms = {w: packed_like(reader, s) for w, s in stored.items() if s in reader.names and reader.is_quantized(s)}
        if forms:
            hold_packed(experts, forms, dtype)
            found = True
    if not found:
        raise ConfigError(
            f"`trainer.base=packed` keeps quantized experts as they are, but {reader.path} has none",
            hint="leave `trainer.base` at bf16, or quantize the checkpoint with `sparkrl quantize`",
        )


def fill_module(
    module: nn.Module, reader: CheckpointReader, family: Family, config: PreTrainedConfig, *, seed: int
) -> None:
    """Read this rank's rows of every parameter and buffer; draw those of the adapter.

    Args:
        module: the sharded model with its adapter, allocated.
        config: its text config.
        seed: of the adapter's initial values.
    Raises:
        CheckpointError: a tensor is damaged or absent, has another shape than the model's, or has no place in it.
    """
    wanted: set[str] = set()

    def destinations() -> Iterator[Destination]:
        for name, parameter in module.named_parameters():
            local, start = local_rows(parameter)
            if is_adapter(name):
                local.copy_(initial_rows(name, parameter.shape, start, start + len(local), seed=seed))
            elif (stored := _stored_name(name, family, config)) is not None:
                wanted.add(stored)
                shape = tuple(parameter.shape)
                packed = _packed(module, name)
                if packed is None:
                    _check_shape(reader, stored, shape)
                    yield Destination(stored, start, local)
                else:
                    _check_shape(reader, stored, (*shape[:-1], 2 * shape[-1]))
                    yield Destination(stored, start, packed)
        for name, buffer in module.named_buffers():
            if not name.endswith("inv_freq"):
                stored = str(_stored_name(name, family, config))
                wanted.add(stored)
                _check_shape(reader, stored, tuple(buffer.shape))
                yield Destination(stored, 0, buffer)

    fill(reader, destinations())
    rotary: list[Any] = [child for child in module.modules() if hasattr(child, "inv_freq")]
    for child in rotary:  # its buffers are not in checkpoints
        fresh, child.attention_scaling = child.compute_default_rope_parameters(child.config)
        child.inv_freq.copy_(fresh)
        child.original_inv_freq.copy_(fresh)
    spare = {parameter for parameter, _ in family.tied} if config.tie_word_embeddings else set()
    left = set(reader.names) - wanted - spare
    if unknown := sorted(name for name in left if name.startswith(family.prefixes)):
        raise CheckpointError(
            f"{reader.path} holds {len(unknown)} text tensors that a {family.name} model of this config has no "
            f"place for, the first is `{unknown[0]}`",
            hint="check that config.json belongs to these files",
        )


def local_rows(parameter: Tensor) -> tuple[Tensor, int]:
    """This rank's rows of a parameter or optimizer state, and the first one's place in the whole."""
    if not isinstance(parameter, DTensor):
        return parameter, 0
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), offset[0]


def _stored_name(name: str, family: Family, config: PreTrainedConfig) -> str | None:
    """Name in the checkpoint; None for scales, which go with their codes."""
    plain = name.removeprefix(_PEFT_PREFIX).replace(".base_layer", "")
    scales = tuple(weight + ending for weight in family.expert_parameters for ending in (BLOCK_SCALE, SCALE))
    return None if plain.endswith(scales) else family.stored_name(plain, config)


def _packed(module: nn.Module, name: str) -> Packed | None:
    """This rank's codes and scales, if the parameter holds codes."""
    parent, _, weight = name.rpartition(".")
    experts = module.get_submodule(parent)
    packed = experts.packed(weight) if isinstance(experts, PackedExperts) else None
    if packed is None:
        return None
    scale = None if packed.scale is None else local_rows(packed.scale)[0]
    return Packed(local_rows(packed.codes)[0], local_rows(packed.block_scale)[0], scale, packed.divide)


def _check_shape(reader: CheckpointReader, stored: str, shape: tuple[int, ...]) -> None:
    if reader.shape(stored) != shape:
        raise CheckpointError(
            f"`{stored}` in {reader.path}/{reader.file(stored)} has shape {reader.shape(stored)}, the config asks for "
            f"{shape}",
            hint="check that config.json belongs to these files",
        )
