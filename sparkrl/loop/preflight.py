"""What can be known to be wrong before anything is started or written."""

from __future__ import annotations

from pathlib import Path

import torch

from sparkrl.config.schema import Base, Config
from sparkrl.errors import AdapterError
from sparkrl.lora.peft_format import differences
from sparkrl.lora.targets import resolve_targets
from sparkrl.models.registry import load_config
from sparkrl.models.tensor_parallel import check_tensor_parallel
from sparkrl.quant.checkpoint import CheckpointReader
from sparkrl.trainer.compiler import compile_backend
from sparkrl.trainer.loading import pack_experts
from sparkrl.types import Adapter


def check_model(config: Config) -> None:
    """Read the checkpoint's headers and find the adapter's targets, on the meta device: no weight is read.

    Raises:
        CheckpointError: an unknown family, a broken config, a missing or damaged file, quantization that does not fit.
        ConfigError: `lora.targets` names something the model does not have, `trainer.base` keeps what it has not, or
            servers cannot divide the model as they are asked to.
    """
    family, text_config = load_config(config.model.path)
    reader = CheckpointReader(config.model.path)
    shape = text_config.to_dict()
    check_tensor_parallel(
        config.rollout.tensor_parallel_size,
        num_heads=shape["num_attention_heads"],
        num_kv_heads=shape["num_key_value_heads"],
        width=shape.get("moe_intermediate_size") or shape["intermediate_size"],
    )
    with torch.device("meta"):
        model = family.build(text_config, torch.float32)
    if config.trainer.base is Base.packed:
        pack_experts(model, reader, family, torch.float32)
    resolve_targets(list(config.lora.targets), family, model)


def check_compiler(config: Config) -> None:
    """Refuse `trainer.compile=always` where this machine trains and has no compiler; on a cluster the ranks look.

    Raises:
        ConfigError: names the compiler that is missing.
    """
    if config.cluster.address is None:
        compile_backend(config, num_frozen=0)


def check_adapter(adapter: Adapter, expected: Adapter, config: Config, folder: Path) -> None:
    """Refuse an adapter that does not fit the model, or not the rank and the targets that the servers are set up for.

    Args:
        expected: a fresh adapter, made from the model and the config.
        folder: where the adapter was read from, for the message.
    Raises:
        AdapterError: names the difference and, where there is one, the key to set.
    """
    for key, theirs, ours in differences(adapter.config, expected.config):
        value = "null" if theirs is None else str(theirs).lower()
        raise AdapterError(
            f"the adapter {folder} has `{key}` {theirs}, the config says {ours}\n"
            "Servers make room for one rank, and scale every update by alpha and rank.",
            hint=f"set `{key}={value}`",
        )
    theirs_by_name = {spec.name: spec.shape for spec in adapter.manifest}
    ours_by_name = {spec.name: spec.shape for spec in expected.manifest}
    lacks, has = sorted(ours_by_name.keys() - theirs_by_name), sorted(theirs_by_name.keys() - ours_by_name)
    if lacks or has:
        examples = [f"it lacks {len(lacks)}, such as `{lacks[0]}`"] if lacks else []
        examples += [f"it has {len(has)} more, such as `{has[0]}`"] if has else []
        raise AdapterError(
            f"the adapter {folder} does not have the tensors that `lora.targets` asks for in {config.model.path}: "
            f"{'; '.join(examples)}",
            hint="set `lora.targets` as it was trained, or `model.path` to the model it was trained on",
        )
    for name, shape in ours_by_name.items():
        if theirs_by_name[name] != shape:
            raise AdapterError(
                f"the adapter {folder} is of another model: `{name}` has shape {theirs_by_name[name]}, "
                f"{config.model.path} needs {shape}",
                hint="set `model.path` to the model it was trained on",
            )
