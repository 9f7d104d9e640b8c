"""No bookkeeping of key-value blocks for a token that falls into the middle of one.

vLLM's scheduler looks, for every running request, every step and every group of layers, whether blocks have to be
added, freed or entered into the prefix cache. For a decode step all three change only where a block begins; at hundreds
of sequences and four groups (Muse Spark's window and full layers) the look takes longer than the GPU's step. Here it is
taken at the start of a block only. A block that falls out of the window is freed at most one block's length later.
"""

from __future__ import annotations

import math
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager

_stock_allocate: Any = KVCacheManager.allocate_slots
_stock_cache: Any = KVCacheManager.cache_blocks
_DECODE = {"num_lookahead_tokens": 0}
"""How the scheduler asks for a running request's slots without speculation."""


def _mid_block(manager: Any, num_tokens: int) -> bool:
    """Whether token number `num_tokens`, counted from 0, lies in a block that is begun already, in every group.

    Asked twice a token, so one division: by what divides every group's block size. Where sizes share no divisor, every
    token is taken for the first of a block, and stock's look is taken.
    """
    divisor = manager.__dict__.get("sparkrl_block_divisor")
    if divisor is None:
        divisor = math.gcd(*(group.block_size for group in manager.coordinator.single_type_managers))
        manager.sparkrl_block_divisor = divisor
    return num_tokens % divisor != 0


def _allocate(self: Any, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
    if (
        num_new_tokens == 1
        and not args
        and kwargs == _DECODE
        and request.num_computed_tokens >= request.num_prompt_tokens
        and _mid_block(self, request.num_computed_tokens)
    ):
        return self.empty_kv_cache_blocks
    return _stock_allocate(self, request, num_new_tokens, *args, **kwargs)


def _cache(self: Any, request: Any, num_computed_tokens: int) -> None:
    # what a prompt fills was entered when its slots were allocated
    if num_computed_tokens > request.num_prompt_tokens and _mid_block(self, num_computed_tokens):
        return
    _stock_cache(self, request, num_computed_tokens)


def apply() -> None:
    """Put both in place; a second call does nothing."""
    KVCacheManager.allocate_slots = _allocate  # type: ignore[method-assign]
    KVCacheManager.cache_blocks = _cache  # type: ignore[method-assign]


def is_applied() -> bool:
    return KVCacheManager.allocate_slots is _allocate and KVCacheManager.cache_blocks is _cache
