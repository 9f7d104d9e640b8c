"""Checksums of an adapter that lies on a GPU, computed there by reading it twice at its memory's speed.

A block is a table of 64-bit words, and its checksum the sum of word [r, c] times (a_r + b_c) modulo 2^64, with fixed
pseudo-random weights, a odd and b even. A single word that differs is always found (its weight is odd); blocks that
differ in several, or whose words have changed places, agree by chance in about one of 2^64 cases. Unlike xxh3, which
host memory is summed up by, it is linear: whoever wants to can make another block of the same checksum, and an attacker
is no more kept out by it than by xxh3.

Legend: N blocks, W rows of a block's table, C columns.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

_COLUMNS = 512


def block_sums(raw: Tensor, block_bytes: int, *, first: int = 0, step: int = 1) -> Tensor:
    """Checksums of blocks `first`, `first + step` and so on, int64 [N], on the device of the bytes.

    Args:
        raw: uint8, a multiple of 8 bytes; the last block may be shorter, and counts as if zeros followed.
        block_bytes: a multiple of 4 KiB.
    """
    words = raw.view(torch.int64)
    length = block_bytes // 8
    whole = len(words) // length
    table_NWC = words[: whole * length].view(whole, length // _COLUMNS, _COLUMNS)[first::step]
    if whole * length < len(words) and (whole - first) % step == 0 and whole >= first:
        rest = words.new_zeros(length)
        rest[: len(words) - whole * length] = words[whole * length :]
        return torch.cat([_sums(table_NWC), _sums(rest.view(1, -1, _COLUMNS))])
    return _sums(table_NWC)


def _sums(table_NWC: Tensor) -> Tensor:
    weights_W, weights_C = _weights(table_NWC.shape[1], table_NWC.device)
    return (table_NWC.sum(2) * weights_W).sum(1) + (table_NWC.sum(1) * weights_C).sum(1)


@functools.cache
def _weights(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    random = np.random.default_rng(0x5EED).integers(0, 1 << 63, rows + _COLUMNS, dtype=np.int64)
    odd_W, even_C = random[:rows] | 1, random[rows:] << 1
    return torch.from_numpy(odd_W).to(device), torch.from_numpy(even_C).to(device)


def as_numbers(sums: Tensor) -> tuple[int, ...]:
    """Checksums as they travel: in [0, 2^64)."""
    return tuple(value % (1 << 64) for value in sums.tolist())
