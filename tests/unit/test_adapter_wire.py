"""Which bytes go where, the memory they lie in, and what a trainer rank writes."""

from __future__ import annotations

import multiprocessing
import os

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Shard

from sparkrl.config.load import load
from sparkrl.config.schema import Precision
from sparkrl.errors import AdapterError, ConfigError
from sparkrl.lora.peft_format import rank_and_scale
from sparkrl.lora.plan import Rows, blocks_of, lay_out, pieces, shard_rows
from sparkrl.lora.shared_memory import Inbox, Outbox, available_bytes
from sparkrl.lora.wire import BLOCK_BYTES, PartWriter, block_checksum, from_plain, gather_parts, to_plain, view

SIZES = (1, 2, 4, 8)
SHAPES = {"experts": (8, 3, 16), "rows": (24, 5), "rank": (6, 24), "few": (2, 8)}


@pytest.mark.parametrize("num_rows", [1, 3, 8, 9, 16, 250])
@pytest.mark.parametrize("num_ranks", SIZES)
def test_shard_rows_are_those_of_fsdp2(num_rows, num_ranks):
    for rank in range(num_ranks):
        size, offset = Shard.local_shard_size_and_offset(num_rows, num_ranks, rank)
        start, end = shard_rows(num_rows, rank, num_ranks)
        assert end - start == size and (size == 0 or start == offset)


@pytest.mark.parametrize("num_ranks", SIZES)
def test_plan_every_byte_is_written_once_and_every_worker_gets_its_window(num_ranks):
    """By brute force, for 1 to 8 trainer ranks and servers of 1 to 8 workers, tensor or expert parallel."""
    whole, first = {}, 0
    for name, shape in SHAPES.items():
        size = int(np.prod(shape))
        whole[name] = np.arange(first, first + size, dtype=np.int32).reshape(shape)
        first += size
    memories, manifests = [], []
    for rank in range(num_ranks):
        rows = {}
        for name, shape in SHAPES.items():
            start, end = shard_rows(shape[0], rank, num_ranks)
            rows[name] = Rows(shape=(end - start, *shape[1:]), first=start, total=shape[0])
        manifest, size = lay_out(rows, dtype="int32", item_bytes=4)
        memory, uses = np.full(size // 4, -1, dtype=np.int32), np.zeros(size, dtype=int)
        for spec in manifest:
            values = whole[spec.name][spec.first_row : spec.first_row + spec.shape[0]]
            assert spec.offset % 64 == 0 and spec.num_rows == SHAPES[spec.name][0]
            memory[spec.offset // 4 : spec.offset // 4 + values.size] = values.flatten()
            uses[spec.offset : spec.offset + values.nbytes] += 1
        assert uses.max(initial=0) <= 1 and uses.sum() == sum(
            rows[name].shape[0] * 4 * int(np.prod(SHAPES[name][1:])) for name in rows
        )
        memories.append(memory)
        manifests.append(manifest)
    written = np.concatenate([memory[memory >= 0] for memory in memories])
    assert np.array_equal(np.sort(written), np.arange(first))

    def read(name, window):
        specs = [(part, spec) for part, manifest in enumerate(manifests) for spec in manifest if spec.name == name]
        out = np.full([end - start for start, end in window], -1, dtype=np.int32)
        for piece in pieces(window, specs):
            shape = piece.spec.shape
            at = piece.spec.offset // 4
            rows = memories[piece.part][at : at + int(np.prod(shape))].reshape(shape)
            out[piece.target] = rows[piece.source]
        return out

    for workers in SIZES:
        for worker in range(workers):
            windows = {  # `rows` as the B of column-parallel layers, `columns` as the A of row-parallel ones
                "by_expert": ("experts", ((worker * 8 // workers, (worker + 1) * 8 // workers), (0, 3), (0, 16))),
                "by_width": ("experts", ((0, 8), (0, 3), (worker * 16 // workers, (worker + 1) * 16 // workers))),
                "rows": ("rows", ((worker * 24 // workers, (worker + 1) * 24 // workers), (0, 5))),
                "columns": ("rank", ((0, 6), (worker * 24 // workers, (worker + 1) * 24 // workers))),
                "all": ("few", ((0, 2), (0, 8))),
            }
            for name, window in windows.values():
                expected = whole[name][tuple(slice(start, end) for start, end in window)]
                assert np.array_equal(read(name, window), expected), (name, window)
        shares = [set(blocks_of(11, worker, workers)) for worker in range(workers)]
        assert set.union(*shares) == set(range(11)) and sum(map(len, shares)) == 11


CONFIG = {"r": 4, "lora_alpha": 6, "peft_type": "LORA"}
AT = "base_model.model.model.layers.3."


def parameters(seed=0, width=16):
    random = torch.Generator().manual_seed(seed)
    shapes = {
        f"{AT}self_attn.q_proj.lora_A.default.weight": (4, width),
        f"{AT}self_attn.q_proj.lora_B.default.weight": (24, 4),
        f"{AT}mlp.experts.lora_gate_up_A.default": (6, 4, width),
        f"{AT}mlp.experts.lora_gate_up_B.default": (6, 20, 4),
        f"{AT}mlp.experts.lora_down_A.default": (6, 4, 10),
        f"{AT}mlp.experts.lora_down_B.default": (6, width, 4),
    }
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def writer(values, dtype="float32", config=CONFIG):
    return PartWriter({name: (value, 0, len(value)) for name, value in values.items()}, config, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_part_writer_scales_b_in_float32_and_rounds_once(dtype):
    values = parameters()
    made, box = writer(values, dtype), Outbox("test")
    for step in range(2):  # the second version finds the first one's memory
        for value in values.values():
            value.add_(step)
        part = made.write(box.room(made.num_bytes), memory=box.handle())
        raw = torch.from_numpy(box.room(made.num_bytes))
        found = {spec.name: view(raw, spec) for spec in part.manifest}
        assert list(found) == sorted(found)
        for name, peft in (
            ("self_attn.q_proj.lora_A.default.weight", "self_attn.q_proj.lora_A.weight"),
            ("self_attn.q_proj.lora_B.default.weight", "self_attn.q_proj.lora_B.weight"),
            ("mlp.experts.lora_gate_up_A.default", "mlp.experts.base_layer.lora_A.weight"),
            ("mlp.experts.lora_gate_up_B.default", "mlp.experts.base_layer.lora_B.weight"),
            ("mlp.experts.lora_down_A.default", "mlp.experts.lora_A.weight"),
            ("mlp.experts.lora_down_B.default", "mlp.experts.lora_B.weight"),
        ):
            scaled = values[AT + name] * (1.5 if "_B" in name else 1.0)
            assert torch.equal(found[AT + peft], scaled.to(getattr(torch, dtype))), name


def test_part_writer_checksums_cover_every_byte_in_blocks():
    values = parameters(width=1_500_000)  # several blocks, and more than is summed up without a thread
    made, box = writer(values), Outbox("test")
    memory = box.room(made.num_bytes)
    part = made.write(memory, memory=box.handle())
    assert made.num_bytes > 32 << 20 and part.block_bytes == BLOCK_BYTES
    expected = [block_checksum(memory[at : at + BLOCK_BYTES]) for at in range(0, made.num_bytes, BLOCK_BYTES)]
    assert list(part.checksums) == expected
    first = gather_parts([part], CONFIG, 1)
    assert gather_parts([made.write(memory, memory=box.handle())], CONFIG, 2).checksum == first.checksum
    next(iter(values.values()))[0, 0] += 1
    assert gather_parts([made.write(memory, memory=box.handle())], CONFIG, 3).checksum != first.checksum
    assert from_plain(to_plain([part])) == [part]


def test_rank_and_scale_follow_peft_and_vllm():
    from vllm.lora.peft_helper import PEFTHelper

    patterns = {
        "rank_pattern": {"mlp.experts.gate_up_proj": 2, "q_proj": 16},
        "alpha_pattern": {r"layers\.3\..*k_proj": 7},
    }
    for extra in ({}, {"use_rslora": True}, patterns):
        config = {**CONFIG, "target_modules": [], **extra}
        helper = PEFTHelper.from_dict(config)
        names = ("self_attn.q_proj", "self_attn.k_proj", "mlp.experts.base_layer", "mlp.experts")
        for name in names:
            rank, scale = rank_and_scale(config, f"{AT}{name}.lora_B.weight")
            assert (rank, pytest.approx(scale)) == helper.get_rank_and_scaling(f"model.layers.3.{name}"), name
    assert rank_and_scale({**CONFIG, **patterns}, f"{AT}mlp.experts.base_layer") == (2, 3.0)
    assert rank_and_scale({**CONFIG, **patterns}, f"{AT}mlp.experts") == (4, 1.5)


def _read(connection):
    inbox, seen = Inbox(), []
    while (handle := connection.recv()) is not None:
        try:
            memory = inbox.open(handle)
            seen.append(memory.ctypes.data)
            connection.send((int(memory[0]), memory.flags.writeable, len(set(seen))))
        except AdapterError as error:
            connection.send(str(error))


def test_memory_is_read_in_another_process_kept_between_versions_and_gone_with_its_writer():
    here, there = multiprocessing.Pipe()
    reader = multiprocessing.get_context("spawn").Process(target=_read, args=(there,), daemon=True)
    reader.start()
    box = Outbox("test")

    def seen(handle):
        here.send(handle)
        return here.recv()

    for value in (3, 4):
        box.room(5000)[:] = value
        assert seen(box.handle()) == (value, False, 1)  # mapped once
    assert not [name for name in os.listdir("/dev/shm") if "sparkrl" in name]
    old = box.handle()
    box.room(9000)[:] = 5  # grows: other memory
    assert seen(box.handle()) == (5, False, 2)
    box.close()
    fresh = Outbox("test")
    fresh.room(10)
    assert seen(old) == (4, False, 2)  # a reader keeps what it has
    here.send(None)
    reader.join(10)
    with pytest.raises(AdapterError, match=r"(let go of|cannot be opened)"):
        Inbox().open(old)


def test_memory_that_the_machine_lacks_is_refused_before_anything_is_written():
    with pytest.raises(
        AdapterError, match=r"takes \d+\.\d\d GiB of shared memory, the machine has .* GiB left"
    ) as caught:
        Outbox("test").room(available_bytes() + (1 << 30))
    assert "rollout.adapter_dtype=bfloat16" in caught.value.hint


def test_view_that_ends_behind_the_bytes_is_refused():
    (spec,), _ = lay_out({"a": Rows(shape=(3, 5), first=0, total=3)}, dtype="float32", item_bytes=4)
    with pytest.raises(AdapterError, match="`a` ends at byte 60 of a buffer of 59"):
        view(torch.zeros(59, dtype=torch.uint8), spec)


def test_bfloat16_adapter_on_a_float32_server_is_refused():
    with pytest.raises(ConfigError, match=r"`rollout.adapter_dtype` is bfloat16, but `rollout.dtype` is float32"):
        load(["recipe=quickstart", "rollout.dtype=float32", "rollout.adapter_dtype=bfloat16"])
    allowed = load(["recipe=quickstart", "rollout.dtype=bfloat16", "rollout.adapter_dtype=bfloat16"])
    assert allowed.rollout.adapter_dtype is Precision.bfloat16
