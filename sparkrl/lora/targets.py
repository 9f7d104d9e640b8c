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
from sparkrl.models.registry import FAMILIES, Family

ADAPTER = "default"
"""PEFT's name of the one adapter."""
ALL_LINEAR = "all_linear"
"""Target that stands for every group of the family: all linear layers that the server can carry an adapter on."""


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
        targets: group names of the family, `all_linear` for all of its groups, or endings of module names (`q_proj`,
            `self_attn.q_proj`).
        model: any instance, on the meta device too.
    Raises:
        ConfigError: a target matches nothing (near names are listed) or something that cannot carry an adapter.
    """
    adaptable = _adaptable(family, model)
    groups = find_groups(family, model)
    groups[ALL_LINEAR] = [name for names in groups.values() for name in names]
    if not targets:
        raise ConfigError(
            "`lora.targets` is empty, so there is nothing to train",
            hint=f"name groups ({', '.join(groups)}) or modules",
        )
    chosen: set[str] = set()
    for target in targets:
        names = groups.get(target) or _matching(target, adaptable)
        if not names:
            raise _unmatched(target, family, model, groups, adaptable)
        chosen.update(names)
    experts = tuple(name for name in adaptable if name in chosen and family.is_experts(adaptable[name]))
    linear = tuple(name for name in adaptable if name in chosen and name not in experts)
    return Targets(
        linear=_shortest(linear, [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]),
        experts=bool(experts),
        linear_names=linear,
        expert_names=experts,
    )


def find_groups(family: Family, model: nn.Module) -> dict[str, list[str]]:
    """The family's groups that this model has, each with the full names of its modules in layer order."""
    adaptable = _adaptable(family, model)
    endings = family.lora_groups.items()
    found = {group: [n for n in adaptable if any(_matching(part, [n]) for part in parts)] for group, parts in endings}
    return {group: names for group, names in found.items() if names}


def _adaptable(family: Family, model: nn.Module) -> dict[str, nn.Module]:
    endings = [ending for group in family.lora_groups.values() for ending in group]
    return {
        name: module
        for name, module in model.named_modules()
        if (family.is_experts(module) or isinstance(module, nn.Linear))
        and any(_matching(ending, [name]) for ending in endings)
    }


def _matching(ending: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name == ending or name.endswith("." + ending)]


def _ending(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _shortest(chosen: Sequence[str], linear: Iterable[str]) -> tuple[str, ...]:
    """Two-part endings where they select exactly `chosen`, else full names (PEFT matches endings)."""
    wanted, endings = set(chosen), sorted({_ending(name) for name in chosen})
    selected = {name for name in linear if _ending(name) in endings}
    return tuple(endings) if selected == wanted else tuple(chosen)


def _unmatched(
    target: str, family: Family, model: nn.Module, groups: Iterable[str], adaptable: Iterable[str]
) -> ConfigError:
    known = sorted({_ending(name) for name in adaptable} | {name.rsplit(".", 1)[-1] for name in adaptable})
    hint = f"groups: {', '.join(groups)}; modules: {', '.join(known)}"
    others = _matching(target, (name for name, _ in model.named_modules()))
    if target in {group for other in FAMILIES for group in other.lora_groups}:
        what = f"this {family.name} model has no module of the group `{target}`"
        return ConfigError(f"`lora.targets`: {what}", hint=f"{hint}; `lora=all_linear` takes every group that exists")
    if others:
        kind = type(model.get_submodule(others[0])).__name__
        return ConfigError(
            f"`lora.targets`: `{target}` names a {kind} ({others[0]}), which cannot carry an adapter", hint=hint
        )
    near = difflib.get_close_matches(target, [*groups, *known], n=3)
    return ConfigError(
        f"`lora.targets`: `{target}` matches no module of this {family.name} model"
        + (f"\nnear names: {', '.join(near)}" if near else ""),
        hint=hint,
    )


def add_adapter(model: nn.Module, lora: LoraConfig, targets: Targets, family: Family) -> peft.PeftModel:
    """Put one trainable adapter into a model; everything else is frozen. The factors are float32.

    Linear layers become PEFT's own LoRA layers, routed experts become `ExpertsLora`.
    """
    names = [*targets.linear_names, *targets.expert_names]
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        use_rslora=lora.rslora,
        lora_dropout=lora.dropout,
        rank_pattern={} if lora.expert_rank is None else dict.fromkeys(targets.expert_names, lora.expert_rank),
        target_modules=names,
        bias="none",
        task_type="CAUSAL_LM",
    )
    if family.experts_class is not None:
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
