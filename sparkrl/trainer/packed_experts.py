"""Routed experts whose frozen weights stay quantized in memory and are expanded for each use.

Codes and scales are parameters of their own, sharded by expert as the weights would be, so what FSDP2 holds and gathers
is a quarter of BF16. Scales are held as bytes: FSDP2 would cast float8 parameters.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from sparkrl.errors import VersionError
from sparkrl.models.experts import RoutedExperts
from sparkrl.quant.packed import Packed

BLOCK_SCALE, SCALE = "_block_scale", "_scale"
"""Endings of the parameters that hold scales, after the weight's name."""
FIRST_TORCH = (2, 13)
"""First release in which FSDP2 was seen to shard integer parameters; 2.11 makes all it shards require gradients."""


def check_torch(found: str = torch.__version__) -> None:
    """Refuse a torch whose FSDP2 cannot hold codes.

    Raises:
        VersionError: torch is older than `FIRST_TORCH`.
    """
    if tuple(int(part) for part in found.split(".")[:2]) < FIRST_TORCH:
        raise VersionError(
            f"`trainer.base=packed` needs torch {'.'.join(map(str, FIRST_TORCH))} or newer, found {found}: older FSDP2 "
            "refuses parameters that are not floating point",
            hint="install the versions of `requirements/`, or set `trainer.base=bf16`",
        )


class PackedExperts(RoutedExperts):
    """Mixin: `gate_up_proj` and `down_proj` hold codes (or BF16 as ever, where the checkpoint does)."""

    compute_dtype: torch.dtype
    divides: dict[str, bool]
    """By weight: whether its global scale divides."""

    def weights(self) -> tuple[Tensor, Tensor]:
        """See `RoutedExperts.weights`; the values are those of a base that was dequantized when it was loaded."""
        return self._expanded("gate_up_proj"), self._expanded("down_proj")

    def packed(self, name: str) -> Packed | None:
        """Codes and scales that are held for a weight; None if it is plain."""
        if name not in self.divides:
            return None
        return Packed(
            getattr(self, name),
            getattr(self, name + BLOCK_SCALE),
            getattr(self, name + SCALE, None),
            self.divides[name],
        )

    def _expanded(self, name: str) -> Tensor:
        packed = self.packed(name)
        value = getattr(self, name) if packed is None else packed.dequantize(dtype=torch.bfloat16)
        return value.to(self.compute_dtype)


def hold_packed(experts: nn.Module, forms: dict[str, Packed], dtype: torch.dtype) -> None:
    """Replace weights of an experts module by codes and scales, in place.

    Args:
        experts: a family's experts module, before it is adapted or sharded.
        forms: by `gate_up_proj` or `down_proj`: empty codes and scales on any device.
        dtype: compute type.
    """
    module: Any = experts
    module.__class__ = _packed_class(type(module))  # type: ignore[arg-type]  # mypy: "a class has no hash"
    module.compute_dtype = dtype
    module.divides = {name: form.divide for name, form in forms.items()}
    for name, form in forms.items():
        parts = {name: form.codes, name + BLOCK_SCALE: form.block_scale.view(torch.uint8), name + SCALE: form.scale}
        for parameter, value in parts.items():
            if value is not None:
                setattr(module, parameter, nn.Parameter(value, requires_grad=False))


@functools.cache
def _packed_class(plain: type[nn.Module]) -> type[nn.Module]:
    return type(f"Packed{plain.__name__}", (PackedExperts, plain), {})
