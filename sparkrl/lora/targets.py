"""From `lora.targets` to modules, and the adapter put into a model."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import peft
import torch
from torch import Tensor, nn

from sparkrl.config.schema import LoraConfig
from sparkrl.errors import ConfigError
from sparkrl.lora.experts import ExpertsLora
from sparkrl.models.registry import Family

ADAPTER = "default"
"""PEFT's name of the one adapter."""


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What the adapter covers."""

    linear: tuple[str, ...]
    """Name endings of the linear layers, unique in the model, as PEFT's `target_modules`."""
    experts: bool
    """Whether the routed experts are covered."""
    linear_names: tuple[str, ...]
    """Full names of the linear layers."""
    expert_names: tuple[str, ...]
    """Full names of the expert modules."""


def resolve_targets(targets: Sequence[str], family: Family, model: nn.Module) -> Targets:
    """Find the modules that `lora.targets` names.

    Args:
        targets: group names of the family, or endings of module names (`q_proj`, `self_attn.q_proj`).
        model: any instance, on the meta device too.
    Raises:
        ConfigError: a target matches nothing (near names are listed) or something that cannot carry an adapter.
    """
    if not targets:
        raise ConfigError(
            "`lora.targets` is empty, so there is nothing to train",
            hint=f"name groups ({', '.join(family.lora_groups)}) or modules",
        )
    adaptable = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, family.experts_class)
        or (isinstance(module, nn.Linear) and ".layers." in name and not name.endswith("lm_head"))
    }
    endings: dict[str, list[str]] = {}
    for target in targets:
        for ending in family.lora_groups.get(target, (target,)):
            names = [name for name in adaptable if name == ending or name.endswith("." + ending)]
            if not names and target not in family.lora_groups:
                _refuse(target, family, model, adaptable)
            for name in names:
                endings.setdefault(_ending(name), []).append(name)
    if not endings:
        raise ConfigError(f"`lora.targets`: no module of the model belongs to {', '.join(targets)}")
    chosen = {name for names in endings.values() for name in names}
    experts = tuple(name for name in adaptable if name in chosen and isinstance(adaptable[name], family.experts_class))
    linear = tuple(name for name in adaptable if name in chosen and name not in experts)
    return Targets(
        linear=_shortest(linear, [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]),
        experts=bool(experts),
        linear_names=linear,
        expert_names=experts,
    )


def _ending(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _shortest(chosen: Sequence[str], linear: Iterable[str]) -> tuple[str, ...]:
    """Two-part endings where they select exactly `chosen`, else full names (PEFT matches endings)."""
    wanted, endings = set(chosen), sorted({_ending(name) for name in chosen})
    selected = {name for name in linear if _ending(name) in endings}
    return tuple(endings) if selected == wanted else tuple(chosen)


def _refuse(target: str, family: Family, model: nn.Module, adaptable: dict[str, nn.Module]) -> None:
    known = sorted({_ending(name) for name in adaptable} | {name.rsplit(".", 1)[-1] for name in adaptable})
    others = [name for name, _ in model.named_modules() if name == target or name.endswith("." + target)]
    if others:
        kind = type(model.get_submodule(others[0])).__name__
        raise ConfigError(
            f"`lora.targets`: `{target}` names a {kind} ({others[0]}), which cannot carry an adapter",
            hint=f"groups: {', '.join(family.lora_groups)}; modules: {', '.join(known)}",
        )
    near = difflib.get_close_matches(target, [*family.lora_groups, *known], n=3)
    raise ConfigError(
        f"`lora.targets`: `{target}` matches no module of this {family.name} model"
        + (f"\nnear names: {', '.join(near)}" if near else ""),
        hint=f"groups: {', '.join(family.lora_groups)}; modules: {', '.join(known)}",
    )


def add_adapter(model: nn.Module, lora: LoraConfig, targets: Targets, family: Family) -> peft.PeftModel:
    """Put one trainable adapter into a model; everything else is frozen. The factors are float32.

    Linear layers become PEFT's own LoRA layers, routed experts become `ExpertsLora`.
    """
    names = [*targets.linear_names, *targets.expert_names]
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=names, bias="none", task_type="CAUSAL_LM", lora_dropout=0.0
    )
    config._register_custom_module({family.experts_class: ExpertsLora})
    return peft.get_peft_model(model, config, autocast_adapter_dtype=True)


def initial_rows(name: str, shape: Sequence[int], start: int, stop: int, *, seed: int) -> Tensor:
    """Rows [start, stop) of a fresh factor: A uniform as PEFT's (Kaiming, a = sqrt 5), B zero.

    Every row has its own generator, seeded by run seed, parameter name and row, so any sharding gives the same values
    and no rank draws more than its part.

    Args:
        name: the parameter's name.
        shape: its full shape; dimension 0 is the sharded one, the last is the input width.
    Returns:
        float32 [stop - start, *shape[1:]].
    """
    rows = torch.zeros((stop - start, *shape[1:]), dtype=torch.float32)
    if not is_input_factor(name):
        return rows
    bound = shape[-1] ** -0.5
    for i in range(start, stop):
        digest = hashlib.blake2b(f"{seed}/{name}/{i}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        rows[i - start].uniform_(-bound, bound, generator=generator)
    return rows


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to the adapter."""
    return ".lora_" in name


def is_input_factor(name: str) -> bool:
    """Whether an adapter parameter is an A (input side) factor."""
    return ".lora_A." in name or name.endswith(("_A.default", "_A"))
