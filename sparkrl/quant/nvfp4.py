"""NVFP4: four-bit floats in blocks of 16 along the input dimension, each block with an e4m3 scale, all under one scale.

A weight is `E2M1[nibble] * block_scale * global_scale`. A byte holds two columns, the low nibble the even one. The
three bits under the sign code the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sparkrl.quant import e2m1

BLOCK = 16
"""Input columns under one block scale."""
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_TINY = 2.0**-9
"""Smallest positive e4m3 number."""

_CHUNK_BYTES = 1 << 20
"""Packed bytes dequantized at once: bounds the fp32 and index temporaries at about 24 MiB."""
_COMPILED_BYTES = 1 << 18
"""Packed bytes from which the compiled loop is used on the CPU: importing and compiling it takes about a second."""
_STEPS = (0, 1, -1, 2, -2, 3, 4, 5, 6)
"""Block scales that are tried, from ModelOpt's on. Positive e4m3 numbers are ordered as their bytes, 1 to 0x7e, eight
to an octave. Six up, the largest magnitude has code 4 or 3; two down, a fifth of it is cut off."""
_LOW = 8
_LOW_STEPS = (*_STEPS, *range(7, 15))
"""Up to this byte a scale may have no half, so that a block of small codes lies on the grid only further up."""
_QUANTIZED_BLOCKS = 1 << 16
"""Blocks quantized at once: 4 MiB for each of a handful of fp32 temporaries."""


class Nvfp4(NamedTuple):
    """One quantized weight (or a stack of them)."""

    packed: Tensor
    """uint8 [..., out, in/2]."""
    block_scale: Tensor
    """float8_e4m3fn [..., out, in/16]."""
    global_scale: Tensor
    """float32 [...], one number a matrix."""


class Scales(enum.Enum):
    """How the scales are chosen."""

    max = "max"
    """Largest magnitude of a block at code 6, rounded to e4m3; largest of all at block scale 448: ModelOpt's rule."""
    mse = "mse"
    """Least squared error: in every block, among the e4m3 numbers around that; for a matrix, between the least power of
    two under which its largest magnitude fits with code 6, and with code 4. A weight on a grid stays as it is."""


def quantize(
    weight: Tensor, *, power_of_two: bool = True, scales: Scales = Scales.max, global_scale: Tensor | None = None
) -> Nvfp4:
    """Round a weight to NVFP4, nearest code first, ties to the even code.

    Args:
        weight: [..., out, in], any float type; `in` a multiple of 16.
        power_of_two: round each global scale up to a power of two. Every value then has at most six significant bits,
            so the BF16 dequantization is exact. Otherwise the global scale is amax / (6 * 448), as ModelOpt chooses it.
        scales: how block scales (and, if they are powers of two, global scales) are chosen.
        global_scale: float32 [...], use these instead.
    Returns:
        Packed codes and both scales. A block of zeros gets the smallest positive scale, never zero.
    """
    width = weight.shape[-1]
    if width % BLOCK:
        raise ValueError(f"the input dimension must be a multiple of {BLOCK}, got: {width}")
    if global_scale is not None:
        return _quantize_under(weight, global_scale, scales)[0]
    amax = weight.detach().abs().amax(dim=(-2, -1)).float()
    if not torch.isfinite(amax).all():
        raise ValueError("the weight holds values that are not finite")
    least = (amax / (E2M1_MAX * E4M3_MAX)).clamp_min(torch.finfo(torch.float32).tiny)
    if not power_of_two:
        return _quantize_under(weight, least, scales)[0]
    tight, wide = (torch.exp2(torch.ceil(torch.log2(scale))) for scale in (least, 1.5 * least))
    first, error = _quantize_under(weight, tight, scales)
    if scales is Scales.max or torch.equal(tight, wide):
        return first
    second, other = _quantize_under(weight, wide, scales)
    better = other < error

    def pick(old: Tensor, new: Tensor) -> Tensor:
        return torch.where(better[(...,) + (None,) * (old.ndim - better.ndim)], new, old)

    # `where` has no float8
    block = pick(first.block_scale.view(torch.uint8), second.block_scale.view(torch.uint8))
    return Nvfp4(
        pick(first.packed, second.packed),
        block.view(torch.float8_e4m3fn),
        pick(first.global_scale, second.global_scale),
    )


def _quantize_under(weight: Tensor, global_scale: Tensor, scales: Scales) -> tuple[Nvfp4, Tensor]:
    """Codes and block scales under given global scales, and for `mse` the squared error, float32 [...]."""
    *batch, out, width = weight.shape
    scale_B = global_scale[..., None, None].expand(*batch, out, width // BLOCK).reshape(-1)
    blocks = weight.detach().reshape(-1, BLOCK)
    packed = torch.empty((len(blocks), BLOCK // 2), dtype=torch.uint8, device=weight.device)
    block_scale = torch.empty(len(blocks), dtype=torch.float8_e4m3fn, device=weight.device)
    error = torch.zeros(len(blocks), device=weight.device)
    for lo in range(0, len(blocks), _QUANTIZED_BLOCKS):
        part = slice(lo, lo + _QUANTIZED_BLOCKS)
        values = blocks[part].float()
        ratio = values.abs().amax(-1) / (E2M1_MAX * scale_B[part])
        chosen = ratio.clamp(E4M3_TINY, E4M3_MAX).to(torch.float8_e4m3fn)
        if scales is Scales.mse:
            chosen, error[part] = _search(values.abs(), scale_B[part], chosen)
        block_scale[part] = chosen
        packed[part] = e2m1.pack(e2m1.encode(values / (chosen.float() * scale_B[part])[:, None]))
    made = Nvfp4(
        packed.reshape(*batch, out, width // 2), block_scale.reshape(*batch, out, width // BLOCK), global_scale
    )
    return made, error.view(*batch, -1).sum(-1)


def _search(magnitude: Tensor, global_scale: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Block scales of least squared error, float8_e4m3fn [blocks], and that error.

    Args:
        magnitude: float32 [blocks, 16].
        global_scale: float32 [blocks].
        largest: ModelOpt's choice, float8_e4m3fn [blocks].
    """
    base = largest.view(torch.uint8).int()
    best, error = _least_error(magnitude, global_scale, base, _STEPS)
    low = base <= _LOW
    if low.any():
        best[low], error[low] = _least_error(magnitude[low], global_scale[low], base[low], _LOW_STEPS)
    return best.to(torch.uint8).view(torch.float8_e4m3fn), error


def _least_error(
    magnitude: Tensor, global_scale: Tensor, base: Tensor, steps: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Bytes of the block scales, among `base` plus each step, of least squared error; ties go to the first."""
    least, best = torch.full_like(global_scale, torch.inf), base
    for step in steps:
        trial = (base + step).clamp(1, 0x7E)
        scale = (trial.to(torch.uint8).view(torch.float8_e4m3fn).float() * global_scale)[:, None]
        error = e2m1.rounded(magnitude / scale).mul_(scale).sub_(magnitude).square_().sum(-1)
        better = error < least
        least, best = torch.where(better, error, least), torch.where(better, trial, best)
    return best, least


def dequantize(
    packed: Tensor,
    block_scale: Tensor,
    global_scale: Tensor,
    *,
    dtype: torch.dtype,
    divide: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Expand NVFP4 to ordinary numbers: products in fp32, one rounding to `dtype`.

    Large tensors go through a Triton kernel on CUDA and a numba loop on the CPU, where these are installed, everything
    else through torch operations. All give the same bits.

    Args:
        packed: uint8 [..., out, in/2].
        block_scale: float8_e4m3fn [..., out, in/16], or its bits as uint8.
        global_scale: float32; its dimensions are matched to `packed`'s from the left ([E] for one number an expert,
            [E, out] for one a row) and broadcast. One of a last dimension between them ([E, 2] for gate and up) covers
            equal parts of the rows.
        dtype: type of the result.
        divide: the global scale divides the block scale (compressed-tensors), before codes are multiplied.
        out: tensor to write the result to: of its shape and type, on the device of `packed`.
    Returns:
        `dtype` [..., out, in] on the device of `packed`; `out` if given.
    """
    *rows, half = packed.shape
    shape = (*rows, 2 * half)
    if packed.dtype != torch.uint8 or block_scale.dtype not in (torch.float8_e4m3fn, torch.uint8):
        raise TypeError(f"expected uint8 codes and float8_e4m3fn scales, got: {packed.dtype} and {block_scale.dtype}")
    if block_scale.shape != (*rows, 2 * half // BLOCK) or 2 * half % BLOCK:
        raise ValueError(f"block scales {tuple(block_scale.shape)} do not fit codes {tuple(packed.shape)}")
    if out is not None and (out.shape != shape or out.dtype != dtype or out.device != packed.device):
        raise ValueError(
            f"`out` must be {dtype} {shape} on {packed.device}, got: {out.dtype} {tuple(out.shape)} on {out.device}"
        )
    row_scale = _row_scales(global_scale, rows)
    codes = packed.reshape(len(row_scale), half)
    scales = block_scale.view(torch.uint8).reshape(len(row_scale), 2 * half // BLOCK)
    made = out if out is not None and out.is_contiguous() else torch.empty(shape, dtype=dtype, device=packed.device)
    flat = made.view(len(row_scale), 2 * half)
    kernel = _kernel(codes, row_scale) or _expand
    kernel(codes, scales, row_scale, flat, divide)
    return made if out is None or made is out else out.copy_(made)


def _kernel(codes: Tensor, row_scale: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor, bool], None] | None:
    """A faster equal of `_expand`, where its library is installed and the work is worth it."""
    with contextlib.suppress(ImportError):
        if codes.is_cuda:
            from sparkrl.quant import dequantize_triton

            return dequantize_triton.expand
        if codes.device.type == "cpu" and codes.numel() >= _COMPILED_BYTES:
            from sparkrl.quant import dequantize_cpu

            return dequantize_cpu.expand if dequantize_cpu.pays(codes, row_scale) else None
    return None


def _row_scales(global_scale: Tensor, rows: list[int]) -> Tensor:
    """The global scale of every row of the flattened codes, float32, contiguous."""
    scale = global_scale.float()
    if scale.ndim > len(rows):
        scale = scale.squeeze(-1)
    if scale.ndim == len(rows) and rows and 1 < scale.shape[-1] < rows[-1]:
        scale = scale.repeat_interleave(rows[-1] // scale.shape[-1], dim=-1)
    # one number for all rows would stay a view of itself, which the kernels would read beyond
    return scale[(...,) + (None,) * (len(rows) - scale.ndim)].expand(rows).reshape(-1).contiguous()


def _expand(codes: Tensor, scales: Tensor, row_scale: Tensor, out: Tensor, divide: bool) -> None:
    """In torch operations, on any device."""
    half = codes.shape[1]
    pairs = e2m1.pair_table(codes.device)
    step = max(1, _CHUNK_BYTES // max(1, half))
    for lo in range(0, codes.shape[0], step):
        part = codes[lo : lo + step]
        value = pairs.index_select(0, part.reshape(-1).int()).view(part.shape[0], -1, BLOCK)
        blocks = scales[lo : lo + step].view(torch.float8_e4m3fn).float()
        rows = row_scale[lo : lo + step, None]
        # The two scales first, as ModelOpt and compressed-tensors do it: any other order differs once in a million.
        value.mul_((blocks / rows if divide else blocks * rows)[..., None])
        out[lo : lo + step] = value.view(part.shape[0], 2 * half)
