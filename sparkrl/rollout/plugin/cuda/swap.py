"""A packed adapter into vLLM's stacked buffers on the GPU, one layer at a time.

vLLM's own way keeps a second copy of every adapter on the host and takes experts apart one by one. Here each module's
factors go up once, are viewed in the layout that its buffers want, and are copied in; above the buffers only one
module's factors are ever held. vLLM's manager gets a name without tensors, which fails loudly if it is ever asked for
them.

Legend: E experts, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.utils import parse_fine_tuned_lora_name

from sparkrl.errors import AdapterError

Factors = dict[str, dict[str, Tensor]]
"""Module name in vLLM to `A` and `B`, as PEFT has them."""


class BufferedAdapter(LoRAModel):
    """Stands for an adapter that lives in the buffers alone."""

    def get_lora(self, module_name: str) -> Any:
        raise AdapterError(
            f"vLLM let go of adapter {self.id} and asks for `{module_name}` again; it has to be sent anew"
        )


def load(manager: Any, lora_id: int, tensors: Mapping[str, Tensor], *, rank: int, scale: float) -> list[str]:
    """Replace every loaded adapter by this one, in slot 0.

    Args:
        manager: vLLM's adapter manager.
        lora_id: id of the new adapter.
        tensors: PEFT's names and layouts, float32, on the host.
        scale: alpha / rank.
    Returns:
        Modules of the adapter that the served model does not have; nothing has been changed if there are any.
    """
    factors = _by_module(tensors, manager.model.hf_to_vllm_mapper.get_rename_mapper())
    claimed: dict[str, tuple[Any, list[str]]] = {}
    for name, module in manager.modules.items():
        claimed[name] = (module, _parts(name, manager.packed_modules_mapping))
    stray = sorted(set(factors) - {part for _, parts in claimed.values() for part in parts})
    if stray:
        return stray
    manager.remove_all_adapters()
    for name, (module, parts) in claimed.items():
        found = [factors.get(part) for part in parts]
        if not any(found):
            module.reset_lora(0)
        elif name.endswith(".experts"):
            module.set_lora(0, *_fused(found, rank, scale, module, manager.device))
        else:
            lora_a = [None if f is None else f["A"].to(manager.device) for f in found]
            lora_b = [None if f is None else f["B"].to(manager.device) * scale for f in found]
            module.set_lora(0, *((lora_a, lora_b) if len(parts) > 1 else (lora_a[0], lora_b[0])))
    manager._registered_adapters[lora_id] = BufferedAdapter(lora_id, rank, {})
    manager._active_adapters[lora_id] = None
    manager.lora_index_to_id[0] = lora_id
    return []


def _by_module(tensors: Mapping[str, Tensor], mapper: Any) -> Factors:
    factors: Factors = {}
    for name, tensor in tensors.items():
        module, is_a = parse_fine_tuned_lora_name(name, mapper)
        factors.setdefault(module, {})["A" if is_a else "B"] = tensor
    lone = sorted(name for name, pair in factors.items() if len(pair) < 2)
    if lone:
        raise AdapterError(f"the adapter has only one of the two factors of `{lone[0]}`")
    return factors


def _parts(name: str, packed: Mapping[str, list[str]]) -> list[str]:
    """Names of the adapter's modules that one module of vLLM holds."""
    parent, _, last = name.rpartition(".")
    if last == "experts":
        return [f"{name}.base_layer", name]
    return [f"{parent}.{part}" for part in packed[last]] if last in packed else [name]


def _fused(
    found: list[dict[str, Tensor] | None], rank: int, scale: float, module: Any, device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """Expert factors [local E, R, in] and [local E, out, R] of gate_up and down, on the device."""
    gate_up, down = found
    if gate_up is None or down is None:
        raise AdapterError("an expert adapter needs factors for both gate_up_proj and down_proj")
    first = module.ep_rank * module.local_num_experts if module.use_ep else 0
    local = slice(first, first + module.local_num_experts)

    def a_ERI(pair: dict[str, Tensor]) -> Tensor:
        return pair["A"].to(device).unflatten(0, (-1, rank))[local]

    def b_EOR(pair: dict[str, Tensor]) -> Tensor:
        return pair["B"].to(device).unflatten(1, (rank, -1)).permute(2, 0, 1)[local] * scale

    return [a_ERI(gate_up), a_ERI(down)], [b_EOR(gate_up), b_EOR(down)]
