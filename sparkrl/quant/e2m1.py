"""E2M1, the four-bit float under NVFP4 and MXFP4: magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign in bit 3.

A byte holds two columns, the low nibble the even one.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX = 6.0
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CODE_VALUES = (*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES))
"""Value of each of the 16 codes."""


def rounded(magnitude: Tensor) -> Tensor:
    """Nearest E2M1 magnitude of float32 numbers >= 0, ties to the even code; above 6 saturates."""
    magnitude = magnitude.clamp_max(MAX)
    # The grid steps by 1/2 below 2, 1 below 4, 2 above; `round` sends ties to even multiples: the even codes.
    step = 0.5 + 0.5 * (magnitude >= 2) + (magnitude >= 4)
    return (magnitude / step).round_().mul_(step)


def encode(values: Tensor) -> Tensor:
    """E2M1 codes of float32 values, uint8, nearest first and ties to the even code; saturates at 6."""
    magnitude = rounded(values.abs())
    # Codes 0 to 4 are twice the magnitude; then 3, 4 and 6 are codes 5, 6 and 7.
    code = torch.where(magnitude <= 2, 2 * magnitude, (2 + magnitude).clamp_max(7))
    return code.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)


def pack(codes: Tensor) -> Tensor:
    """uint8 [..., W] codes to uint8 [..., W/2]."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def pair_table(device: torch.device) -> Tensor:
    """float32 [256, 2]: the two values that a byte holds, even column first."""
    values = torch.tensor(CODE_VALUES, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([values[byte & 0xF], values[byte >> 4]], dim=1)
