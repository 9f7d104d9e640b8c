"""What the served models of all families share on CPU: the dense feed-forward, and filling parameters.

Shape legend: N tokens, H hidden width.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear

from sparkrl.errors import CheckpointError

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
"""Fused modules and their parts, vLLM's `packed_modules_mapping`."""
_PACKED_IN: dict[str, dict[str, tuple[str, str | int]]] = {
    "self_attn": {"q_proj": ("qkv_proj", "q"), "k_proj": ("qkv_proj", "k"), "v_proj": ("qkv_proj", "v")},
    "mlp": {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)},
}
_PROJECTION = re.compile(r"(?P<parent>.*\.(?P<block>self_attn|mlp))\.(?P<name>\w+_proj)\.weight$")
_EXPERT = re.compile(r"(?P<parent>.*\.mlp\.experts)\.(?P<name>gate_up_proj|down_proj)$")


class DenseMlp(nn.Module):
    """`down(silu(gate x) * up x)`."""

    def __init__(self, config: Any, prefix: str) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            width, [inner, inner], bias=False, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = RowParallelLinear(inner, width, bias=False, prefix=f"{prefix}.down_proj")

    def forward(self, x_NH: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x_NH)[0].chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)[0]


def fill_parameters(
    model: nn.Module,
    weights: Iterable[tuple[str, Tensor]],
    *,
    family: str,
    prefixes: tuple[str, ...],
    unused: Collection[str] = (),
) -> set[str]:
    """Fill every parameter from logical checkpoint tensors.

    Args:
        family: the model's, for messages.
        prefixes: beginnings of the names of this model's tensors; others (vision and audio towers) are not served.
        unused: tensors that the model has no use for, though they may be there.
    Returns:
        Names of the parameters.
    Raises:
        CheckpointError: a tensor has no place here, a shape is wrong, or a parameter was left unfilled.
    """
    parameters = dict(model.named_parameters())
    missing = {name: len(PACKED.get(name.split(".")[-2], "1")) for name in parameters}
    for name, tensor in weights:
        target, shard = _place(name)
        if target not in parameters:
            if name in unused or not name.startswith(prefixes):
                continue
            raise CheckpointError(f"tensor `{name}` of the checkpoint has no place in a {family} text decoder")
        try:
            _fill(target, parameters[target], tensor, shard)
        except (AssertionError, RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"tensor `{name}` of shape {list(tensor.shape)} does not fit {target}: {error}",
                hint="config.json and the weights describe different models",
            ) from error
        missing[target] -= 1
    left = sorted(name for name, count in missing.items() if count > 0)
    if left:
        raise CheckpointError(f"the checkpoint lacks {len(left)} of the model's tensors, first: `{left[0]}`")
    return set(parameters)


def _place(name: str) -> tuple[str, str | int | None]:
    """Parameter a checkpoint tensor goes to, and its part of it."""
    if found := _EXPERT.match(name):
        stacked = "w13_weight" if found["name"] == "gate_up_proj" else "w2_weight"
        return f"{found['parent']}.routed_experts.{stacked}", None
    if name.endswith(".mlp.experts.post_expert_norm.weight"):
        return name.replace(".experts.", ".experts.routed_experts."), None
    if found := _PROJECTION.match(name):
        packed = _PACKED_IN[found["block"]].get(found["name"])
        if packed is not None:
            return f"{found['parent']}.{packed[0]}.weight", packed[1]
    return name, None


def _fill(target: str, parameter: Any, tensor: Tensor, shard: str | int | None) -> None:
    if ".routed_experts.w" in target:
        parameter.data.copy_(_expert_rows(target, tensor, len(parameter)))
    elif shard is not None:
        parameter.weight_loader(parameter, tensor, shard)
    elif hasattr(parameter, "weight_loader"):
        parameter.weight_loader(parameter, tensor)
    else:
        if parameter.shape != tensor.shape:
            raise ValueError(f"expected shape {list(parameter.shape)}")
        parameter.data.copy_(tensor)


def _expert_rows(target: str, stacked: Tensor, num_experts: int) -> Tensor:
    """This rank's share: of the experts where it holds fewer than there are (expert parallel), else of their width, of
    gate and of up alike, or of down's input."""
    ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
    if ranks == 1:
        return stacked
    if num_experts * ranks == len(stacked):
        return stacked.chunk(ranks)[rank]
    if target.endswith("w2_weight"):
        return stacked.chunk(ranks, dim=2)[rank]
    return torch.cat([half.chunk(ranks, dim=1)[rank] for half in stacked.chunk(2, dim=1)], dim=1)
