"""Trainer state on disk: stock PEFT files for the adapter, and one safetensors file for the optimizer.

`trainer_state.safetensors` holds AdamW's moments in float32 under `<parameter>.exp_avg` and `<parameter>.exp_avg_sq`,
and the counters as metadata. Whole tensors are stored, so another world size can go on. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sparkrl.errors import CheckpointError
from sparkrl.lora.peft_format import (
    CONFIG,
    WEIGHTS,
    adapter_config,
    differences,
    from_peft,
    rank_and_scale,
    save_adapter,
    to_peft,
    why_not_open,
    write_safetensors,
)
from sparkrl.trainer.engine import AdapterEngine
from sparkrl.trainer.loading import local_rows

STATE = "trainer_state.safetensors"
_FORMAT = "1"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def save(engine: AdapterEngine, folder: str, *, adapter_config: dict[str, Any], counters: dict[str, int]) -> None:
    """Write adapter and optimizer state; every rank must call it, rank 0 writes.

    The optimizer's file is complete before the adapter's appears, and each file appears complete or not at all.
    """
    tensors = to_peft(dict(_gathered(engine.trainable().items())))  # on rank 0 alone
    moments = dict(_gathered(_moments(engine)))
    if dist.get_rank() == 0:
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        metadata = {"format": _FORMAT, "counters": json.dumps(counters), "lr_step": str(engine.lr_scheduler.last_epoch)}
        write_safetensors(target / STATE, moments, metadata)
        save_adapter(target, tensors, adapter_config)
    dist.barrier()


def load(engine: AdapterEngine, folder: str) -> dict[str, int]:
    """Take over a saved adapter and optimizer state; every rank reads its rows.

    Returns:
        The counters that were saved.
    Raises:
        CheckpointError: a file is missing, damaged, or of another model or adapter; nothing has been changed then.
    """
    target = Path(folder)
    parameters = engine.trainable()
    adapter, state = _open(target / WEIGHTS), _open(target / STATE)
    try:
        config = json.loads((target / CONFIG).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{target / CONFIG} is missing or damaged: {error}") from None
    expected = adapter_config(engine.cfg.lora, engine.targets, engine.family, base_model=engine.path)
    for key, found, asked in differences(config, expected):
        raise CheckpointError(
            f"the adapter in {folder} has `{key}` {found}, the config asks for {asked}",
            hint="resume with the config that the run was started with",
        )
    wanted = {
        name: next(iter(to_peft({name: torch.empty(p.shape, device="meta")}).items())) for name, p in parameters.items()
    }
    missing = sorted({peft_name for peft_name, _ in wanted.values()} ^ set(adapter.keys()))
    if missing:
        raise CheckpointError(
            f"the adapter in {folder} does not cover the same modules as `lora.targets`: `{missing[0]}` and "
            f"{len(missing) - 1} others differ"
        )
    metadata = state.metadata() or {}
    if metadata.get("format") != _FORMAT:
        raise CheckpointError(f"{target / STATE} has format {metadata.get('format')}, this version reads {_FORMAT}")
    saved = set(state.keys())
    for name, (peft_name, like) in wanted.items():
        found = tuple(adapter.get_slice(peft_name).get_shape())
        if found != tuple(like.shape):
            raise CheckpointError(f"`{peft_name}` in {folder} has shape {found}, the model has {tuple(like.shape)}")
        if saved and not {f"{name}.{moment}" for moment in _MOMENTS} <= saved:
            raise CheckpointError(f"{target / STATE} has no moments for `{name}`")
    counters = json.loads(metadata["counters"])
    with torch.no_grad():
        for name, parameter in parameters.items():
            stored = wanted[name][0]
            rank, _ = rank_and_scale(config, stored)
            (whole,) = from_peft({stored: adapter.get_tensor(stored)}, rank=rank).values()
            local, start = local_rows(parameter)
            local.copy_(whole[start : start + len(local)])
            if saved:
                _load_moments(engine, name, parameter, state, counters)
        if not saved:
            engine.optimizer.state.clear()
    engine.lr_scheduler.last_epoch = int(metadata["lr_step"])
    for group, lr in zip(engine.optimizer.param_groups, _rates(engine), strict=True):
        group["lr"] = lr
    dist.barrier()
    return counters


def _rates(engine: AdapterEngine) -> list[float]:
    scheduler = engine.lr_scheduler
    pairs = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    return [base * factor(scheduler.last_epoch) for base, factor in pairs]


def _moments(engine: AdapterEngine) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in engine.trainable().items():
        state = engine.optimizer.state.get(parameter)
        if state:  # empty before the first update
            for moment in _MOMENTS:
                yield f"{name}.{moment}", state[moment]


def _load_moments(
    engine: AdapterEngine, name: str, parameter: nn.Parameter, state: Any, counters: dict[str, int]
) -> None:
    entry: dict[str, Tensor] = {"step": torch.tensor(float(counters["num_updates"]))}
    for moment in _MOMENTS:
        entry[moment] = torch.zeros_like(parameter)
        local, start = local_rows(entry[moment])
        local.copy_(state.get_slice(f"{name}.{moment}")[start : start + len(local)])
    engine.optimizer.state[parameter] = entry


def _gathered(items: Any) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors, one at a time, on rank 0's CPU."""
    for name, value in items:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if dist.get_rank() == 0:
            yield name, whole.detach().cpu().clone()


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError:
        raise CheckpointError(f"{why_not_open(path)}, so this checkpoint cannot be resumed") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror or error}") from None
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
