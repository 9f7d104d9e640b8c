"""A quantized weight in memory, in whichever form it was stored.

Shape letters: E experts, O output rows, W input width, P equal parts of the rows (gate and up, or one).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparkrl.quant import mxfp4, nvfp4


@dataclass(frozen=True, slots=True)
class Packed:
    """Codes and scales; gate rows come before up rows."""

    codes: Tensor
    """uint8 [..., O, W/2]."""
    block_scale: Tensor
    """NVFP4: float8_e4m3fn [..., O, W/16]. MXFP4: uint8 [..., O, W/32], exponents."""
    scale: Tensor | None
    """NVFP4: float32, [E] or [E, P] for stacked experts, [] for one matrix. MXFP4: None."""
    divide: bool = False
    """The block scale is divided by `scale`, not multiplied."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dequantized weight."""
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    def to(self, device: torch.device) -> Packed:
        """The same on another device."""
        scale = None if self.scale is None else self.scale.to(device)
        return Packed(self.codes.to(device), self.block_scale.to(device), scale, self.divide)

    def dequantize(self, *, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """`dtype` [..., O, W]; written to `out` where given."""
        if self.scale is None:
            value = mxfp4.dequantize(self.codes, self.block_scale, dtype=dtype)
            return value if out is None else out.copy_(value)
        return nvfp4.dequantize(self.codes, self.block_scale, self.scale, dtype=dtype, divide=self.divide, out=out)
