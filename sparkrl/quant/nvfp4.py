"""NVFP4: four-bit floats in blocks of 16 along the input dimension, each block with an e4m3 scale, all under one scale.

A weight is `E2M1[nibble] * block_scale * global_scale`. A byte holds two columns, the low nibble the even one. The
three bits under the sign code the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 16
"""Input columns under one block scale."""
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_TINY = 2.0**-9
"""Smallest positive e4m3 number."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_CHUNK_BYTES = 1 << 20
"""Packed bytes dequantized at once: bounds the fp32 and index temporaries at about 24 MiB."""


class Nvfp4(NamedTuple):
    """One quantized weight (or a stack of them)."""

    packed: Tensor
    """uint8 [..., out, in/2]."""
    block_scale: Tensor
    """float8_e4m3fn [..., out, in/16]."""
    global_scale: Tensor
    """float32 [...], one number a matrix."""


def quantize(weight: Tensor, *, power_of_two: bool = True) -> Nvfp4:
    """Round a weight to NVFP4, nearest code first, ties to the even code.

    Args:
        weight: [..., out, in], any float type; `in` a multiple of 16.
        power_of_two: round each global scale up to a power of two. Every value then has at most six significant bits,
            so the BF16 dequantization is exact. Otherwise the global scale is amax / (6 * 448), as ModelOpt chooses it.
    Returns:
        Packed codes and both scales. A block of zeros gets the smallest positive scale, never zero.
    """
    *batch, out, width = weight.shape
    if width % BLOCK:
        raise ValueError(f"the input dimension must be a multiple of {BLOCK}, got: {width}")
    blocks = weight.detach().float().reshape(*batch, out, width // BLOCK, BLOCK)
    amax = blocks.abs().amax(dim=(-3, -2, -1))
    if not torch.isfinite(amax).all():
        raise ValueError("the weight holds values that are not finite")
    ideal = (amax / (E2M1_MAX * E4M3_MAX)).clamp_min(torch.finfo(torch.float32).tiny)
    global_scale = torch.exp2(torch.ceil(torch.log2(ideal))) if power_of_two else ideal
    scaled = blocks / global_scale[..., None, None, None]
    ratio = (scaled.abs().amax(-1) / E2M1_MAX).clamp(E4M3_TINY, E4M3_MAX)
    block_scale = ratio.to(torch.float8_e4m3fn)
    codes = _encode(scaled / block_scale.float()[..., None]).reshape(*batch, out, width)
    return Nvfp4(codes[..., 0::2] | (codes[..., 1::2] << 4), block_scale, global_scale)


def dequantize(packed: Tensor, block_scale: Tensor, global_scale: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Expand NVFP4 to ordinary numbers: products in fp32, one rounding to `dtype`.

    Args:
        packed: uint8 [..., out, in/2].
        block_scale: float8_e4m3fn [..., out, in/16].
        global_scale: float32; its dimensions are matched to `packed`'s from the left ([E] for one number an expert,
            [E, out] for one a row) and broadcast.
        dtype: type of the result.
    Returns:
        `dtype` [..., out, in] on the device of `packed`.
    """
    *rows, half = packed.shape
    width = 2 * half
    if packed.dtype != torch.uint8 or block_scale.dtype != torch.float8_e4m3fn:
        raise TypeError(f"expected uint8 codes and float8_e4m3fn scales, got: {packed.dtype} and {block_scale.dtype}")
    if block_scale.shape != (*rows, width // BLOCK):
        raise ValueError(f"block scales {tuple(block_scale.shape)} do not fit codes {tuple(packed.shape)}")
    scale = global_scale.float()
    scale = scale.squeeze(-1) if scale.ndim > len(rows) else scale[(...,) + (None,) * (len(rows) - scale.ndim)]
    row_scale = scale.expand(rows).reshape(-1)
    codes, blocks = packed.reshape(-1, half), block_scale.reshape(-1, width // BLOCK)
    pairs = _pair_table(packed.device)
    out = torch.empty((codes.shape[0], width), dtype=dtype, device=packed.device)
    step = max(1, _CHUNK_BYTES // max(1, half))
    for lo in range(0, codes.shape[0], step):
        part = codes[lo : lo + step]
        value = pairs.index_select(0, part.reshape(-1).int()).view(part.shape[0], -1, BLOCK)
        # Codes times block scale is exact in fp32, so the global scale is the only rounding before `dtype`.
        value.mul_(blocks[lo : lo + step].float()[..., None]).mul_(row_scale[lo : lo + step, None, None])
        out[lo : lo + step] = value.view(part.shape[0], width)
    return out.view(*rows, width)


def _encode(values: Tensor) -> Tensor:
    """E2M1 codes of fp32 values, uint8; magnitudes above 6 saturate."""
    edges = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(_MAGNITUDES)])
    # `bucketize` counts the edges strictly below a value, which sends a tie to the lower code. Lowering every second
    # edge by one ulp sends those ties up instead, so that every tie ends at the even code.
    edges[1::2] = torch.nextafter(edges[1::2], torch.tensor(-math.inf))
    magnitude = torch.bucketize(values.abs(), edges.to(values.device), out_int32=True).to(torch.uint8)
    return magnitude | (torch.signbit(values).to(torch.uint8) << 3)


def _pair_table(device: torch.device) -> Tensor:
    """float32 [256, 2]: the two values that a byte holds, even column first."""
    magnitudes = torch.tensor(_MAGNITUDES, device=device)
    values = torch.cat([magnitudes, -magnitudes])
    byte = torch.arange(256, device=device)
    return torch.stack([values[byte & 0xF], values[byte >> 4]], dim=1)
