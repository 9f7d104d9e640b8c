"""The scheduler's shortcut for decode steps, on vLLM's own block manager with a full and a window group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

from sparkrl.rollout.plugin import decode_slots

BLOCK, WINDOW, PROMPT, NEW = 4, 8, 10, 27


@pytest.fixture
def patched() -> Iterator[None]:
    decode_slots.apply()
    yield
    KVCacheManager.allocate_slots = decode_slots._stock_allocate  # type: ignore[method-assign]
    KVCacheManager.cache_blocks = decode_slots._stock_cache  # type: ignore[method-assign]


def manager() -> KVCacheManager:
    size = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    groups = [
        KVCacheGroupSpec(["full"], FullAttentionSpec(**size)),
        KVCacheGroupSpec(["window"], SlidingWindowSpec(**size, sliding_window=WINDOW)),
    ]
    config = KVCacheConfig(num_blocks=200, kv_cache_tensors=[], kv_cache_groups=groups)
    return KVCacheManager(config, max_model_len=128, scheduler_block_size=BLOCK, hash_block_size=BLOCK)


def request(name: str) -> Request:
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request(name, list(range(PROMPT)), SamplingParams(max_tokens=NEW), None, block_hasher=hasher)


def decode(blocks: KVCacheManager, asked: Request) -> tuple[list[list[int]], list[tuple[int, ...]]]:
    """Block ids handed out, by group, and how many each group really holds after every step."""
    hit, num_hit, *_ = blocks.get_computed_blocks(asked)
    handed = blocks.allocate_slots(
        asked, PROMPT - num_hit, num_new_computed_tokens=num_hit, new_computed_blocks=hit, num_lookahead_tokens=0
    )
    assert handed is not None
    ids = [list(group) for group in blocks.get_blocks(asked.request_id).get_block_ids()]
    asked.num_computed_tokens = PROMPT
    held = []
    for token in range(NEW):
        asked.append_output_token_ids(100 + token)
        handed = blocks.allocate_slots(asked, 1, num_lookahead_tokens=0)
        assert handed is not None
        for group, new in zip(ids, handed.get_block_ids(), strict=True):
            group.extend(new)
        asked.num_computed_tokens += 1
        blocks.cache_blocks(asked, asked.num_computed_tokens)
        groups = blocks.coordinator.single_type_managers
        null = blocks.block_pool.null_block
        held.append(tuple(sum(b is not null for b in g.req_to_blocks[asked.request_id]) for g in groups))
    return ids, held


def test_decode_hands_out_the_blocks_of_stock(patched: None) -> None:
    ids, held = decode(manager(), request("a"))
    KVCacheManager.allocate_slots = decode_slots._stock_allocate  # type: ignore[method-assign]
    KVCacheManager.cache_blocks = decode_slots._stock_cache  # type: ignore[method-assign]
    stock_ids, stock_held = decode(manager(), request("a"))
    assert ids == stock_ids
    # every token has a slot: 10 + 27 tokens in blocks of 4
    assert [len(group) for group in ids] == [10, 10]
    assert [full for full, _ in held] == [full for full, _ in stock_held]
    # a block that fell out of the window stays for at most one block's length
    assert all(0 <= ours - stocks <= 1 for (_, ours), (_, stocks) in zip(held, stock_held, strict=True))


def test_finished_request_is_found_in_the_prefix_cache(patched: None) -> None:
    blocks = manager()
    first = request("a")
    decode(blocks, first)
    blocks.free(first)
    again = Request("b", first.all_token_ids[:36], SamplingParams(), None, block_hasher=first._block_hasher)
    assert blocks.get_computed_blocks(again)[1] == 32


def test_several_tokens_at_once_take_stocks_way(patched: None) -> None:
    blocks, asked = manager(), request("a")
    asked.num_computed_tokens = 0
    assert blocks.allocate_slots(asked, 9, num_lookahead_tokens=0) is not None
    assert [len(group) for group in blocks.get_blocks("a").get_block_ids()] == [3, 3]
