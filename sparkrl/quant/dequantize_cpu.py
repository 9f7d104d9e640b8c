"""NVFP4 to ordinary numbers on the CPU, by look-up.

Under one global scale, a code and a block scale are one of 4,096 numbers. These are worked out once, with one rounding
each, and make a table of 8 KiB in BF16, which stays in a core's first-level cache. An element of the result then costs
one load and one store, and no arithmetic.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import torch
from torch import Tensor

from sparkrl.quant.e2m1 import MAGNITUDES

_CODES_PER_SCALE = 8
"""Bytes of codes under one block scale: 16 columns, two a byte."""
_TABLE = 4096
"""Entries for one global scale: 256 block scales of 16 codes."""
_PIECES_PER_THREAD = 4
"""A thread takes its rows in so many parts, so that no thread waits long for another at the end."""
_AS_INTEGERS = {2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def pays(codes: Tensor, row_scale: Tensor) -> bool:
    """Whether making the tables is little against the work that they save."""
    num_tables = 1 + int((row_scale[1:] != row_scale[:-1]).sum())
    return codes.numel() >= num_tables * _TABLE


def expand(codes: Tensor, scales: Tensor, row_scale: Tensor, out: Tensor, divide: bool) -> None:
    """Write every value to `out`, on `torch.get_num_threads()` threads.

    Args:
        codes: uint8 [rows, half], contiguous.
        scales: uint8 [rows, half / 8], contiguous: bits of the e4m3 block scales.
        row_scale: float32 [rows].
        out: [rows, 2 half], a floating-point type of 2, 4 or 8 bytes, contiguous.
        divide: the global scale divides the block scale.
    """
    values_G, table_of_row = torch.unique_consecutive(row_scale, return_inverse=True)
    as_integers = _AS_INTEGERS[out.dtype.itemsize]
    arrays: list[Any] = [
        codes.numpy(),
        scales.numpy(),
        _tables(values_G, out.dtype, divide).view(as_integers).numpy(),
        table_of_row.numpy(),
        out.view(as_integers).numpy(),
    ]
    codes_np, scales_np, tables_np, table_np, out_np = arrays
    threads = torch.get_num_threads()
    step = -(-len(codes) // (threads * _PIECES_PER_THREAD))

    def work(lo: int) -> None:
        rows = slice(lo, lo + step)
        _look_up(codes_np[rows], scales_np[rows], tables_np, table_np[rows], out_np[rows])

    with ThreadPoolExecutor(threads, thread_name_prefix="dequantize") as pool:
        for _ in pool.map(work, range(0, len(codes), step)):
            pass


def _tables(values_G: Tensor, dtype: torch.dtype, divide: bool) -> Tensor:
    """[G, 256, 16]: by global scale, byte of the block scale, code."""
    magnitude = torch.tensor(MAGNITUDES)
    scale_S = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    code_C = torch.cat([magnitude, -magnitude])
    # the two scales first, as in the other paths
    scale_GS = scale_S / values_G[:, None] if divide else scale_S * values_G[:, None]
    return (code_C * scale_GS[..., None]).to(dtype)


@numba.njit(nogil=True)
def _look_up(codes, scales, tables, table_of_row, out):  # type: ignore[no-untyped-def]
    for row in range(codes.shape[0]):
        table = tables[table_of_row[row]]
        for block in range(scales.shape[1]):
            values = table[scales[row, block]]
            first = block * _CODES_PER_SCALE
            for byte in range(first, first + _CODES_PER_SCALE):
                code = codes[row, byte]
                out[row, 2 * byte] = values[code & 15]
                out[row, 2 * byte + 1] = values[code >> 4]
