"""The adapter in PEFT's own names and layouts: on disk (stock PEFT files) and on the wire (`types.Adapter`).

Linear layers already have PEFT's form. Fused experts are held as [E, R, in] and [E, out, R] while training, and are
written as PEFT's `target_parameters` writes them: A as (E * R, in) with expert-major rows, B as (out, R * E) with
rank-major columns; `experts.base_layer` is gate_up_proj (the inner wrapper), `experts` is down_proj.

Legend: E expert, R rank.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparkrl.config.schema import LoraConfig
from sparkrl.errors import AdapterError, CheckpointError
from sparkrl.lora.targets import ADAPTER, Targets, is_input_factor
from sparkrl.models.registry import Family
from sparkrl.types import Adapter, TensorSpec

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
_ALIGN = 64
_EXPERT = re.compile(rf"^(.*\.experts)\.lora_(gate_up|down)_([AB])(?:\.{ADAPTER})?$")
_EXPERT_PEFT = re.compile(r"^(.*\.experts)(\.base_layer)?\.lora_([AB])\.weight$")
_FACTOR = re.compile(r"\.lora_[AB]\.weight$")
_LINEAR = re.compile(rf"^(.*)\.lora_([AB])(?:\.{ADAPTER})?\.weight$")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def adapter_config(lora: LoraConfig, targets: Targets, family: Family, *, base_model: str) -> dict[str, Any]:
    """Content of adapter_config.json, loadable by stock PEFT."""
    patterns = family.expert_parameters if targets.experts and lora.expert_rank is not None else ()
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "rank_pattern": dict.fromkeys(patterns, lora.expert_rank),
        # PEFT refuses dropout beside adapted parameters, and whoever reads the file does not train
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": list(targets.linear),
        "target_parameters": list(family.expert_parameters) if targets.experts else None,
    }


def peft_name(name: str) -> str:
    """PEFT's name of a training parameter.

    Raises:
        AdapterError: PEFT's format has no place for it.
    """
    if found := _EXPERT.match(name):
        inner = ".base_layer" if found[2] == "gate_up" else ""
        return f"{found[1]}{inner}.lora_{found[3]}.weight"
    if found := _LINEAR.match(name):
        return f"{found[1]}.lora_{found[2]}.weight"
    raise AdapterError(f"`{name}` is not an adapter parameter that PEFT's format has a place for")


def to_peft(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Training names and layouts to PEFT's. Tensors are new and contiguous where the layout changes."""
    out: dict[str, Tensor] = {}
    for name, value in parameters.items():
        if value.ndim == 3:
            # A: [E, R, in] -> (E * R, in); B: [E, out, R] -> (out, R * E)
            value = value.flatten(0, 1) if is_input_factor(name) else value.permute(1, 2, 0).flatten(1)
        out[peft_name(name)] = value.contiguous()
    return dict(sorted(out.items()))


def rank_and_scale(config: Mapping[str, Any], name: str) -> tuple[int, float]:
    """Rank of a module's adapter and the factor on its product, as PEFT takes them from adapter_config.json.

    Args:
        name: of the module or of one of its factors, PEFT's; `experts.base_layer` is gate_up_proj, `experts` down_proj.
    """
    module = name.split(".lora_")[0].removeprefix("base_model.model.")
    if module.endswith(".experts.base_layer"):
        module = module.removesuffix(".base_layer") + ".gate_up_proj"
    elif module.endswith(".experts"):
        module += ".down_proj"

    def chosen(pattern: Mapping[str, Any] | None, otherwise: Any) -> Any:
        matching = (value for key, value in (pattern or {}).items() if re.match(rf"(.*\.)?({key})$", module))
        return next(matching, otherwise)

    rank = int(chosen(config.get("rank_pattern"), config["r"]))
    alpha = chosen(config.get("alpha_pattern"), config["lora_alpha"])
    return rank, alpha / (rank**0.5 if config.get("use_rslora") else rank)


def differences(config: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Where two contents of adapter_config.json disagree on ranks or scales: our config's key, and both values."""

    def scales(content: Mapping[str, Any]) -> dict[str, Any]:
        ranks = [rank for key, rank in (content.get("rank_pattern") or {}).items() if ".experts" in key]
        return {
            "lora.rank": content.get("r"),
            "lora.alpha": content.get("lora_alpha"),
            "lora.rslora": bool(content.get("use_rslora")),
            "lora.expert_rank": ranks[0] if ranks else None,
        }

    found, asked = scales(config), scales(expected)
    yield from ((key, value, asked[key]) for key, value in found.items() if value != asked[key])


def from_peft(tensors: Mapping[str, Tensor], *, rank: int) -> dict[str, Tensor]:
    """Inverse of `to_peft`: PEFT's names and layouts to those of training.

    Raises:
        CheckpointError: a name or a shape that is not an adapter's of this rank.
    """
    out: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if found := _EXPERT_PEFT.match(name):
            prefix, inner, factor = found.groups()
            packed = value.shape[0 if factor == "A" else 1]
            if value.ndim != 2 or packed % rank:
                raise CheckpointError(
                    f"adapter tensor `{name}` has shape {tuple(value.shape)}, which rank {rank} cannot"
                )
            if factor == "A":
                value = value.unflatten(0, (packed // rank, rank))
            else:
                value = value.unflatten(1, (rank, packed // rank)).permute(2, 0, 1)
            part = "gate_up" if inner else "down"
            out[f"{prefix}.lora_{part}_{factor}.{ADAPTER}"] = value.contiguous()
        elif found := _LINEAR.match(name):
            out[f"{found[1]}.lora_{found[2]}.{ADAPTER}.weight"] = value.contiguous()
        else:
            raise CheckpointError(f"`{name}` in the adapter is not a LoRA tensor of PEFT's format")
    return out


def pack(tensors: Mapping[str, Tensor], config: Mapping[str, Any], version: int) -> Adapter:
    """Copy tensors (PEFT names, on the CPU) back to back into one buffer."""
    specs, offset = [], 0
    for name, value in tensors.items():
        dtype = str(value.dtype).removeprefix("torch.")
        specs.append(TensorSpec(name=name, shape=tuple(value.shape), dtype=dtype, offset=offset))
        offset += -(-value.nbytes // _ALIGN) * _ALIGN
    buffer = np.zeros(offset, dtype=np.uint8)
    for spec, value in zip(specs, tensors.values(), strict=True):
        raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        buffer[spec.offset : spec.offset + raw.size] = raw
    return Adapter(
        version=version,
        buffer=buffer,
        manifest=tuple(specs),
        config=dict(config),
        checksum=_checksum(buffer),
    )


def unpack(adapter: Adapter) -> dict[str, Tensor]:
    """The tensors of a packed adapter, each its own memory.

    Raises:
        AdapterError: the buffer does not have the checksum it was sent with.
    """
    found = _checksum(np.ascontiguousarray(adapter.buffer))
    if found != adapter.checksum:
        raise AdapterError(f"adapter version {adapter.version} arrived damaged: {found}, expected {adapter.checksum}")
    out = {}
    for spec in adapter.manifest:
        dtype = _DTYPES[spec.dtype]
        size = int(np.prod(spec.shape)) * dtype.itemsize
        raw = torch.from_numpy(adapter.buffer[spec.offset : spec.offset + size].copy())
        out[spec.name] = raw.view(dtype).view(spec.shape)
    return out


def _checksum(buffer: np.ndarray) -> str:
    return xxhash.xxh3_64(buffer.data).hexdigest()


def save_adapter(folder: str | os.PathLike[str], tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write stock PEFT files; each appears complete or not at all, the weights before the config that names them."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    write_safetensors(target / WEIGHTS, tensors, {"format": "pt"})
    scratch = target / f".{CONFIG}.{os.getpid()}"
    scratch.write_text(json.dumps(dict(config), indent=2, sort_keys=True) + "\n")
    os.replace(scratch, target / CONFIG)


def load_adapter(folder: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read stock PEFT files.

    Returns:
        Tensors under PEFT's names, and the content of adapter_config.json.
    Raises:
        CheckpointError: a file is missing or damaged, or the adapter is not a plain LoRA.
    """
    target = Path(folder)
    try:
        config = json.loads((target / CONFIG).read_text())
        tensors = load_file(target / WEIGHTS)
    except FileNotFoundError as error:
        path = Path(error.filename or target / WEIGHTS)
        raise CheckpointError(f"{why_not_open(path)}, which is part of the adapter {target}") from None
    except OSError as error:
        raise CheckpointError(f"the adapter {target} cannot be read: {error.strerror or error}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, SafetensorError) as error:
        raise CheckpointError(f"the adapter {target} is damaged: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{target / CONFIG} must hold a JSON object, got: {type(config).__name__}")
    if config.get("peft_type") != "LORA" or config.get("use_dora"):
        kind = "DoRA" if config.get("use_dora") else f"peft_type {config.get('peft_type')}"
        raise CheckpointError(f"the adapter {target} is not a plain LoRA: {kind}")
    _check_config(config, target / CONFIG)
    for name, value in tensors.items():
        if not _FACTOR.search(name) or value.ndim != 2 or not value.is_floating_point():
            raise CheckpointError(
                f"`{name}` in {target / WEIGHTS} is no LoRA factor: {value.dtype} {tuple(value.shape)}",
                hint="only `lora_A.weight` and `lora_B.weight` matrices are read, no biases or whole modules",
            )
    return tensors, config


def _check_config(config: Mapping[str, Any], path: Path) -> None:
    """Refuse ranks and scales that cannot be meant."""

    def rank(value: Any) -> bool:
        return type(value) is int and value > 0

    def alpha(value: Any) -> bool:
        return type(value) in (int, float) and math.isfinite(value)

    def pattern(valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
        return lambda value: not value or (isinstance(value, dict) and all(map(valid, value.values())))

    rules: dict[str, tuple[Callable[[Any], bool], str]] = {
        "r": (rank, "a whole number above 0"),
        "lora_alpha": (alpha, "a number"),
        "rank_pattern": (pattern(rank), "whole numbers above 0 by module"),
        "alpha_pattern": (pattern(alpha), "numbers by module"),
        "base_model_name_or_path": (lambda value: value is None or isinstance(value, str), "a name or null"),
    }
    for key, (valid, wanted) in rules.items():
        if not valid(config.get(key)):
            raise CheckpointError(f"`{key}` in {path} must be {wanted}, got: {config.get(key)!r}")
    for expression in [*(config.get("rank_pattern") or ()), *(config.get("alpha_pattern") or ())]:
        try:
            re.compile(expression)
        except re.error as error:
            raise CheckpointError(f"`{expression}` in {path} is no regular expression: {error}") from None


def why_not_open(path: Path) -> str:
    """What is wrong with a file that safetensors calls missing, which may be one that this user may not read."""
    return f"{path} cannot be opened: {os.strerror(errno.EACCES)}" if path.exists() else f"{path} is missing"


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write one safetensors file that appears complete or not at all.

    Raises:
        CheckpointError: it cannot be written (disk full, say).
    """
    scratch = None
    try:
        handle, scratch = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
        save_file({name: value.contiguous() for name, value in tensors.items()}, scratch, metadata=dict(metadata))
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {path}: {error}", hint="free disk space and run it again") from None
    finally:
        if scratch is not None:
            Path(scratch).unlink(missing_ok=True)
