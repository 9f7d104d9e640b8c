"""NVFP4 to ordinary numbers in one pass over device memory: 9 bytes in and 32 out for every block of 16 in BF16."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS_PER_PROGRAM = 512
_CODES_PER_WORD = 8


def expand(codes: Tensor, scales: Tensor, row_scale: Tensor, out: Tensor, divide: bool) -> None:
    """Write every value to `out`, with the same bits as on the CPU.

    Args:
        codes: uint8 [rows, half], contiguous; `half` a multiple of 8.
        scales: uint8 [rows, half / 8], contiguous: bits of the e4m3 block scales.
        row_scale: float32 [rows], contiguous.
        out: [rows, 2 half] float32, bfloat16 or float16, contiguous.
        divide: the global scale divides the block scale.
    """
    if not codes.numel():
        return
    # eight codes a thread: it reads four bytes and writes sixteen, both beside those of its neighbours
    words = (codes if codes.data_ptr() % 4 == 0 else codes.clone()).view(torch.int32)
    num_words = words.numel()
    assert num_words < 2**31 - _WORDS_PER_PROGRAM, "the index of a word has to fit in an int32"
    with torch.cuda.device_of(codes):
        _expand_kernel[(triton.cdiv(num_words, _WORDS_PER_PROGRAM),)](
            words,
            scales,
            row_scale,
            out,
            num_words,
            words.shape[1],
            WORDS=_WORDS_PER_PROGRAM,
            CODES=_CODES_PER_WORD,
            DIVIDE=divide,
        )


@triton.jit
def _expand_kernel(
    words,
    scales,
    row_scale,
    out,
    num_words,
    words_per_row,
    WORDS: tl.constexpr,
    CODES: tl.constexpr,
    DIVIDE: tl.constexpr,
):
    index = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    inside = index < num_words
    word = tl.load(words + index, mask=inside, other=0)
    scale_bits = tl.load(scales + index // 2, mask=inside, other=0).to(tl.uint16)
    scale_of_row = tl.load(row_scale + index // words_per_row, mask=inside, other=1.0)
    # Both small floats are read as float16 with their exponent fields at the bottom of its own, which divides an e4m3
    # number by 2**8 and an e2m1 number by 2**14, exactly, subnormal numbers included.
    scale_half = ((scale_bits & 0x80) << 8) | ((scale_bits & 0x7F) << 7)
    scale = scale_half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    scale = tl.where((scale_bits & 0x7F) == 0x7F, float("nan"), scale)
    # the two scales first, as ModelOpt and compressed-tensors do it
    scale = tl.div_rn(scale, scale_of_row) if DIVIDE else scale * scale_of_row
    column = tl.arange(0, CODES)[None, :]
    code = (word[:, None] >> (4 * column)) & 0xF
    half = (((code & 0x8) << 12) | ((code & 0x7) << 9)).to(tl.uint16).to(tl.float16, bitcast=True)
    value = half.to(tl.float32) * 16384.0 * scale[:, None]
    place = index.to(tl.int64)[:, None] * CODES + column  # values may be more than 2**31
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside[:, None])
