"""Parts of a layer that torch.compile turns into few kernels: plain functions of tensors, shared by all layers.

A training step of few tokens is bound by the host, which starts thousands of small kernels; one of many tokens by
elementwise work that passes over memory again and again. A `Region` is a function without state, so one compilation
serves every layer, whatever wraps the modules (PEFT, FSDP2, checkpointing); the number of tokens is a symbol in it. The
experts' grouped products and the attention product lie between regions.

Legend: T token, H width of a layer's input, O of its output, R LoRA rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import peft.tuners.lora as peft_lora
import torch
import torch.nn.functional as F
from torch import Tensor, nn

RECOMPILE_LIMIT = 64
"""Variants of a region: with and without gradients, adapter, rotary embedding, and a first layer without input's."""

INDUCTOR = {"emulate_precision_casts": True, "size_asserts": False, "alignment_asserts": False, "scalar_asserts": False}
"""Round to the compute type between fused operators, where eager and the server do; and spend no time on the host for
checks of what the compiler itself allocated."""

Projection = tuple[Tensor, Tensor | None, Tensor | None, float]
"""Weight [O, H]; A [R, H] and B [O, R] in any type, or None without an adapter; the update's scale."""


class Region:
    """A function of tensors that is compiled when it is first called with a backend.

    Args:
        function: reads nothing but its arguments.
        counted: position of each argument that has a dimension which counts tokens or expert rows, and that dimension.
    """

    def __init__(self, function: Callable[..., Any], counted: dict[int, int]) -> None:
        self.function, self.counted = function, counted
        functools.update_wrapper(self, function)
        self._compiled: dict[str, Callable[..., Any]] = {}

    def __call__(self, backend: str | None, *args: Any) -> Any:
        """The function's value; `backend` is a name that torch.compile knows, None runs the function as it is."""
        if backend is None:
            return self.function(*args)
        if backend not in self._compiled:
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
            # a region reads nothing global, so that nothing global need be checked at each call
            options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_guard_on_globals_unsafe}
            if backend == "inductor":
                options |= INDUCTOR
            self._compiled[backend] = torch.compile(self.function, backend=backend, fullgraph=True, options=options)
        for index, dimension in self.counted.items():
            if args[index] is not None:
                # torch._dynamo.maybe_mark_dynamic, which takes longer than some kernels
                args[index]._dynamo_weak_dynamic_indices = {dimension}
        return self._compiled[backend](*args)


def region(*rows: int, packed: Sequence[int] = ()) -> Callable[[Callable[..., Any]], Region]:
    """Decorator that makes a `Region`: `rows` are [T, ...] or [M, ...], `packed` are [1, T, ...]."""
    return lambda function: Region(function, dict.fromkeys(rows, 0) | dict.fromkeys(packed, 1))


def compile_layers(model: nn.Module, backend: str | None = "inductor", *, own_kernels: bool = False) -> None:
    """Let every layer of `model` that has regions compile them; None goes back to eager.

    Args:
        own_kernels: routed experts take `sparkrl.models.kernel_experts`, which has not run on a GPU yet.
    """
    for module in model.modules():
        if hasattr(type(module), "own_kernels"):
            module.own_kernels = own_kernels  # type: ignore[assignment]
        if hasattr(type(module), "compile_backend"):
            module.compile_backend = backend  # type: ignore[assignment]


def projections(*modules: nn.Module) -> tuple[Projection, ...] | None:
    """The tensors of linear layers, adapted by PEFT or not; None if one of them computes anything else.

    Bias, dropout in training, merged or several adapters, variants of LoRA, hooks and replaced weights are left to the
    modules themselves.
    """
    found = tuple(_projection(module) for module in modules)
    return None if None in found else found  # type: ignore[return-value]


def _projection(module: Any) -> Projection | None:
    if type(module) is nn.Linear:
        plain = module.bias is None and not module._forward_hooks and not module._forward_pre_hooks
        return (module.weight, None, None, 0.0) if plain else None
    if type(module) is not peft_lora.Linear or module._forward_hooks or module._forward_pre_hooks:
        return None
    base = _projection(module.base_layer)
    if base is None or module.merged:
        return None
    active = [name for name in module.active_adapters if name in module.lora_A]
    if module.disable_adapters or not active:
        return base
    name = active[0]
    dropout = module.lora_dropout[name]
    drops = module.training and not isinstance(dropout, nn.Identity)
    if len(active) > 1 or drops or name in module.lora_variant or module.lora_bias[name]:
        return None
    a: Any = module.lora_A[name]
    b: Any = module.lora_B[name]
    return base[0], a.weight, b.weight, module.scaling[name]


def project(x_TH: Tensor, many: tuple[Projection, ...]) -> list[Tensor]:
    """[T, H] through several linear layers of one input, [T, O] each; factors are rounded to the type of `x_TH`.

    As on the server, which holds them in its compute type. One product takes all A.
    """
    out = [F.linear(x_TH, weight) for weight, *_ in many]
    adapted = [(index, a, b, scale) for index, (_, a, b, scale) in enumerate(many) if a is not None and b is not None]
    if not adapted:
        return out
    low_TR = F.linear(x_TH, torch.cat([a for _, a, _, _ in adapted]).to(x_TH.dtype))
    lows = low_TR.split([a.shape[0] for _, a, _, _ in adapted], dim=-1)
    for (index, _, b, scale), low in zip(adapted, lows, strict=True):
        # the scale goes on the narrow side
        out[index] = out[index] + F.linear(low * scale, b.to(x_TH.dtype))
    return out


def wide(x: Tensor) -> Tensor:
    """float32, or float64 where `x` is."""
    return x if x.dtype == torch.float64 else x.float()


def rms(x: Tensor, eps: float) -> Tensor:
    """`x / rms(x)` in float32."""
    x = wide(x)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
