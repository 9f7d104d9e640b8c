"""LoRA of linear layers on CPU as plain matrix products.

Stock `PunicaWrapperCPU` gathers one [rank, in] and one [out, rank] matrix per token before multiplying, which moves the
whole adapter through memory once a token (measured: 2,055 tokens/s against 4,153 with products per adapter). It also
wants activations and adapter in one dtype. Here every active adapter is multiplied once, in the adapter's own dtype,
and the sum is rounded once.

Shape legend: N tokens, I in, O out, R rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkrl.rollout.plugin.versions import require_checked

NAME = "LoRA of linear layers on CPU"
_WRAPPER = "sparkrl.rollout.plugin.punica_wrapper.DensePunicaWrapper"


def apply() -> None:
    """Make vLLM's CPU platform hand out the wrapper below; a second call does nothing."""
    require_checked(NAME)
    from vllm.platforms.cpu import CpuPlatform

    platform: Any = CpuPlatform
    platform.get_punica_wrapper = classmethod(lambda cls: _WRAPPER)


def is_applied() -> bool:
    from vllm.platforms import current_platform

    return current_platform.get_punica_wrapper() == _WRAPPER


def add_lora(
    y_NO: Tensor,
    x_NI: Tensor,
    lora_a: tuple[Tensor, ...],
    lora_b: tuple[Tensor, ...],
    slices: tuple[int, ...],
    slots: list[tuple[int, Tensor | None]],
    scale: float,
) -> None:
    """Add every active adapter's product to `y_NO` in place.

    Args:
        lora_a: a tensor [slots, 1, R, I] for each slice of the output.
        lora_b: a tensor [slots, 1, O, R] for each slice.
        slices: widths of the slices, from the left.
        slots: adapter slot and the int64 rows that use it, None for all.
        scale: factor on the product.
    """
    for slot, rows in slots:
        x = x_NI if rows is None else x_NI[rows]
        x = x.to(lora_a[0].dtype)
        start = 0
        for a, b, width in zip(lora_a, lora_b, slices, strict=True):
            delta = F.linear(F.linear(x, a[slot, 0]), b[slot, 0])
            if scale != 1.0:
                delta = delta * scale
            part = y_NO[:, start : start + width]
            if rows is None:
                part.copy_(part.to(delta.dtype).add_(delta) if part.dtype != delta.dtype else part + delta)
            else:
                part[rows] = (part[rows].to(delta.dtype) + delta).to(part.dtype)
            start += width


def active_slots(indices_N: Tensor) -> list[tuple[int, Tensor | None]]:
    """Group tokens by adapter slot.

    Args:
        indices_N: int64 [N], slot of each token, -1 for the base model.
    Returns:
        Slot and int64 row indices of its tokens; None instead of indices when all tokens use one slot.
    """
    found = torch.unique(indices_N).tolist()
    if len(found) == 1:
        return [(found[0], None)] if found[0] >= 0 else []
    return [(slot, (indices_N == slot).nonzero()[:, 0]) for slot in found if slot >= 0]
