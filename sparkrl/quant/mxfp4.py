"""MXFP4 (OCP microscaling): E2M1 codes in blocks of 32 along the input dimension, each under a power of two (E8M0).

A weight is `E2M1[nibble] * 2**(byte - 127)`; byte 255 is NaN. Codes are packed as in NVFP4, the low nibble the even
column. There is no scale over the whole tensor, and products are exact in bfloat16 as long as they are normal numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparkrl.quant import e2m1

BLOCK = 32
"""Input columns under one exponent."""
BIAS = 127
NAN = 255
"""Exponent byte that stands for NaN."""
_CHUNK_BYTES = 1 << 20
"""Packed bytes dequantized at once."""


class Mxfp4(NamedTuple):
    """One quantized weight (or a stack of them)."""

    packed: Tensor
    """uint8 [..., out, in/2]."""
    exponent: Tensor
    """uint8 [..., out, in/32], E8M0."""


def quantize(weight: Tensor, *, search: bool = False) -> Mxfp4:
    """Round a weight to MXFP4, nearest code first, ties to the even code.

    Args:
        weight: [..., out, in], any float type; `in` a multiple of 32.
        search: for each block take the exponent of least squared error among OCP's and its neighbours; otherwise OCP's,
            floor(log2(amax)) - 2, under which magnitudes between 6 and 8 steps saturate.
    Returns:
        Packed codes and exponents. A block of zeros gets exponent 2**0.
    """
    *batch, out, width = weight.shape
    if width % BLOCK:
        raise ValueError(f"the input dimension must be a multiple of {BLOCK}, got: {width}")
    blocks = weight.detach().float().reshape(-1, BLOCK)
    amax = blocks.abs().amax(-1)
    if not torch.isfinite(amax).all():
        raise ValueError("the weight holds values that are not finite")
    # frexp gives amax = m * 2**e with m in [0.5, 1), so floor(log2(amax)) is e - 1; 2 is the exponent of 6.
    base = torch.where(amax > 0, torch.frexp(amax).exponent - 3, 0)
    best = base.clamp(-BIAS, BIAS)
    if search:
        least = torch.full_like(amax, torch.inf)
        # OCP's own comes first, so that equal errors keep it. A step less clips, a step more never does.
        for shift in (0, 1, -1):
            trial = (base + shift).clamp(-BIAS, BIAS)
            scale = torch.ldexp(torch.ones_like(amax), trial)[:, None]
            error = (e2m1.rounded(blocks.abs() / scale) * scale - blocks.abs()).square().sum(-1)
            better = error < least
            least, best = torch.where(better, error, least), torch.where(better, trial, best)
    codes = e2m1.encode(torch.ldexp(blocks, -best[:, None])).reshape(*batch, out, width)
    exponent = (best + BIAS).to(torch.uint8).reshape(*batch, out, width // BLOCK)
    return Mxfp4(e2m1.pack(codes), exponent)


def dequantize(packed: Tensor, exponent: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Expand MXFP4 to ordinary numbers.

    Args:
        packed: uint8 [..., out, in/2].
        exponent: uint8 (or float8_e8m0fnu) [..., out, in/32].
        dtype: type of the result.
    Returns:
        `dtype` [..., out, in]; NaN where the exponent says so.
    """
    *rows, half = packed.shape
    width = 2 * half
    if packed.dtype != torch.uint8 or exponent.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise TypeError(f"expected uint8 codes and E8M0 exponents, got: {packed.dtype} and {exponent.dtype}")
    if exponent.shape != (*rows, width // BLOCK) or width % BLOCK:
        raise ValueError(f"exponents {tuple(exponent.shape)} do not fit codes {tuple(packed.shape)}")
    table = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - BIAS).float()
    table[NAN] = torch.nan
    table, pairs = table.to(packed.device), e2m1.pair_table(packed.device)
    codes, bytes_ = packed.reshape(-1, half), exponent.view(torch.uint8).reshape(-1, width // BLOCK)
    out = torch.empty((codes.shape[0], width), dtype=dtype, device=packed.device)
    step = max(1, _CHUNK_BYTES // max(1, half))
    for lo in range(0, codes.shape[0], step):
        part = codes[lo : lo + step]
        value = pairs.index_select(0, part.reshape(-1).int()).view(part.shape[0], -1, BLOCK)
        value.mul_(table[bytes_[lo : lo + step].int()][..., None])
        out[lo : lo + step] = value.view(part.shape[0], width)
    return out.view(*rows, width)
