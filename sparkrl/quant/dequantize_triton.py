"""NVFP4 to ordinary numbers in one pass over device memory: 9 bytes in and 32 out for every block of 16 in BF16."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCKS_PER_PROGRAM = 512
_CODES_PER_BLOCK = 8


def expand(codes: Tensor, scales: Tensor, row_scale: Tensor, out: Tensor, divide: bool) -> None:
    """Write every value to `out`, with the same bits as on the CPU.

    Args:
        codes: uint8 [rows, half], contiguous; `half` a multiple of 8.
        scales: uint8 [rows, half / 8], contiguous: bits of the e4m3 block scales.
        row_scale: float32 [rows], contiguous.
        out: [rows, 2 half] float32, bfloat16 or float16, contiguous.
        divide: the global scale divides the block scale.
    """
    num_blocks = scales.numel()
    if not num_blocks:
        return
    assert num_blocks < 2**31 - _BLOCKS_PER_PROGRAM, "one index for each block of 16 has to fit in an int32"
    with torch.cuda.device_of(codes):
        _expand_kernel[(triton.cdiv(num_blocks, _BLOCKS_PER_PROGRAM),)](
            codes,
            scales,
            row_scale,
            out,
            num_blocks,
            scales.shape[1],
            BLOCKS=_BLOCKS_PER_PROGRAM,
            CODES=_CODES_PER_BLOCK,
            DIVIDE=divide,
        )


@triton.jit
def _expand_kernel(
    codes,
    scales,
    row_scale,
    out,
    num_blocks,
    blocks_per_row,
    BLOCKS: tl.constexpr,
    CODES: tl.constexpr,
    DIVIDE: tl.constexpr,
):
    index = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    inside = index < num_blocks
    block = index.to(tl.int64)  # bytes and values may be more than 2**31
    byte = tl.load(codes + block[:, None] * CODES + tl.arange(0, CODES)[None, :], mask=inside[:, None], other=0)
    scale_bits = tl.load(scales + block, mask=inside, other=0).to(tl.uint16)
    scale_of_row = tl.load(row_scale + index // blocks_per_row, mask=inside, other=1.0)
    # Both small floats are read as float16 with their exponent fields at the bottom of its own, which divides an e4m3
    # number by 2**8 and an e2m1 number by 2**14, exactly, subnormal numbers included.
    scale_half = ((scale_bits & 0x80) << 8) | ((scale_bits & 0x7F) << 7)
    scale = scale_half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    scale = tl.where((scale_bits & 0x7F) == 0x7F, float("nan"), scale)
    wide = byte.to(tl.uint16)
    even = ((wide & 0x8) << 12) | ((wide & 0x7) << 9)
    odd = ((wide & 0x80) << 8) | ((wide & 0x70) << 5)
    even_value = even.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    odd_value = odd.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    # the two scales first, as ModelOpt and compressed-tensors do it
    scale = tl.div_rn(scale, scale_of_row) if DIVIDE else scale * scale_of_row
    value = tl.interleave(even_value * scale[:, None], odd_value * scale[:, None]).to(out.dtype.element_ty)
    place = block[:, None] * (2 * CODES) + tl.arange(0, 2 * CODES)[None, :]
    tl.store(out + place, value, mask=inside[:, None])
