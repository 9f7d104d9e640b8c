"""Where a bfloat16 server's distance to float32 comes from, one rounding at a time.

transformers in float32 scores given tokens over given routes; then again with one kind of value rounded to bfloat16 as
the server rounds it. Each kind's share of the distance shows where higher precision would pay.

Legend: B sequence, T token, L layer, K routed slot, N expert row, E expert, H latent width, I inner width.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_model import Reference, gap
from sparkrl.types import Adapter

KINDS = {
    "final norm": ("norm",),
    "inputs of q, k, v, gate": ("input_layernorm",),
    "outputs of q, k, v, gate": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.gate_proj"),
    "normed q, k": ("self_attn.qk_norm",),
    "attention output": ("attention",),
    "gated heads": ("gated",),
    "o_proj output": ("self_attn.o_proj",),
    "router input": ("router",),
    "latent projection, in and out": ("pooler", "mlp.pre_expert_proj", "mlp.pre_expert_norm"),
    "experts: gate and up": ("gate_up",),
    "experts: activation": ("activation",),
    "experts: down": ("down",),
    "sum over experts": ("mlp.experts",),
    "post_expert_proj output": ("mlp.post_expert_proj",),
}
"""Values that vLLM and the trainer round to bfloat16."""
AVOIDED = {
    "head output": ("head",),
    "residual gates (stock vLLM's load)": ("gates",),
    "residual stream (transformers in bfloat16)": (
        "post_attention_residual_gate",
        "post_feedforward_residual_gate",
        "embed_tokens",
    ),
}
"""Roundings that other stacks do and neither side here does."""


class RoundingReference(Reference):
    """transformers in float32 with some of its values rounded to bfloat16 on the way."""

    def __init__(
        self, folder: Path, fields: Mapping[str, Any], adapter: Adapter | None = None, device: str = "cuda"
    ) -> None:
        super().__init__(folder, fields, adapter, device)
        self.rounded: frozenset[str] = frozenset()
        self._out(self.body.norm, "norm")
        self._out(self.body.embed_tokens, "embed_tokens")
        for layer in self.body.layers:
            for name, module in layer.named_modules():
                self._out(module, name)
            self._in(layer.self_attn.o_norm, "attention")
            self._in(layer.self_attn.o_proj, "gated")
            self._in(layer.mlp.pre_expert_proj, "pooler")
            route = layer.mlp.gate.forward
            layer.mlp.gate.forward = lambda hidden, route=route: route(self._round(hidden, "router"))
            experts = layer.mlp.experts
            experts.forward = lambda x, ids, weights, experts=experts: self._experts(experts, x, ids, weights)
            for connection in (layer.post_attention_residual_gate, layer.post_feedforward_residual_gate):
                self._gates(connection)

    def _round(self, value: Any, kind: str) -> Any:
        return value.bfloat16().float() if kind in self.rounded else value

    def _out(self, module: torch.nn.Module, kind: str) -> None:
        def hook(_: Any, __: Any, out: Any) -> Any:
            return self._round(out, kind) if isinstance(out, Tensor) else out

        module.register_forward_hook(hook)

    def _in(self, module: torch.nn.Module, kind: str) -> None:
        module.register_forward_pre_hook(lambda _, args: tuple(self._round(value, kind) for value in args))

    def _gates(self, connection: Any) -> None:
        exact = connection.gate.data.clone()

        def hook(module: Any, _: Any) -> None:
            module.gate.data.copy_(self._round(exact, "gates"))

        connection.register_forward_pre_hook(hook)

    def _experts(self, experts: Any, x_NH: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
        out_NH = torch.zeros_like(x_NH)
        for expert in range(experts.num_experts):
            rows, slots = torch.where(ids_NK == expert)
            gate, up = self._round(F.linear(x_NH[rows], experts.gate_up_proj[expert]), "gate_up").chunk(2, -1)
            inner = self._round(experts.act_fn(gate) * up, "activation")
            down = experts.post_expert_norm(self._round(F.linear(inner, experts.down_proj[expert]), "down"))
            out_NH.index_add_(0, rows, down * weights_NK[rows, slots, None])
        return self._round(out_NH, "mlp.experts")

    def head(self, hidden: Tensor) -> Tensor:
        return self._round(super().head(hidden), "head")


def table(
    reference: RoundingReference, ids_BT: Tensor, num_prompt: int, routes_BTLK: Tensor, served_BT: Tensor | None
) -> dict[str, dict[str, float]]:
    """Distance to float32 of each rounding alone, of all the server does, and of the served log-probs."""
    every = frozenset(name for names in KINDS.values() for name in names)
    cases = {kind: frozenset(names) for kind, names in (KINDS | AVOIDED).items()}
    cases["all of the server's"] = every
    reference.rounded = frozenset()
    exact = reference.score(ids_BT, num_prompt, routes_BTLK)
    out = {}
    for name, rounded in cases.items():
        reference.rounded = rounded
        out[name] = gap(exact, reference.score(ids_BT, num_prompt, routes_BTLK))
    reference.rounded = frozenset()
    return out if served_BT is None else out | {"served": gap(exact, served_BT)}
