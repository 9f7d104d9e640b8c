"""Two trainer ranks and two servers with two adapter slots each: every way an adapter can travel, and replicas lost."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import os
import re
import resource
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
from training_steps import random_batch, saved_adapter

from sparkrl.config.schema import Config, Device, Precision, Swap, Transport
from sparkrl.data import load_problems, load_tokenizer
from sparkrl.errors import AdapterError
from sparkrl.loop.transport import settle_transport
from sparkrl.lora.peft_format import unpack
from sparkrl.rollout import RolloutPool
from sparkrl.trainer.group import TrainerGroup
from sparkrl.types import AdapterPart, DeviceMemory, Sampling

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart"
SAMPLING = Sampling(num_responses=2, max_tokens=24, seed=5)


@pytest.fixture(scope="module")
def run():
    loop = asyncio.new_event_loop()
    yield loop.run_until_complete
    loop.close()


@pytest.fixture(scope="module")
def problems():
    return load_problems(
        RECIPE / "heldout.parquet", load_tokenizer(RECIPE / "checkpoint"), max_prompt_tokens=120
    ).problems


@pytest.fixture(scope="module")
def parts(run):
    """Pool and trainer, started side by side."""
    cfg = Config(recipe_name="test", seed=3)
    cfg.model.path, cfg.model.max_tokens = str(RECIPE / "checkpoint"), 256
    rollout, trainer = cfg.rollout, cfg.trainer
    rollout.dtype, rollout.num_threads, rollout.kv_cache_gib = Precision.float32, 1, 0.1
    rollout.max_num_seqs, rollout.num_replicas, rollout.swap = 32, 2, Swap.in_flight
    trainer.dtype, trainer.num_threads, trainer.num_workers, trainer.optimizer.lr = Precision.float32, 1, 2, 1e-2
    ray.init(include_dashboard=False, num_cpus=8, log_to_driver=False, object_store_memory=100 << 20)

    async def start():
        return await asyncio.gather(RolloutPool.start(cfg), TrainerGroup.start(cfg, run_seed=3))

    pool, group = run(start())
    yield pool, group, cfg
    run(group.stop())
    run(pool.stop())
    ray.shutdown()


def bits(groups):
    return [(r.uid, r.token_ids.tobytes(), r.log_probs.tobytes()) for group in groups for r in group.responses]


def versions(groups):
    return {r.policy_version for group in groups for r in group.responses}


def assert_close(groups, others):
    for one, other in zip(groups, others, strict=True):
        for a, b in zip(one.responses, other.responses, strict=True):
            np.testing.assert_array_equal(a.token_ids, b.token_ids)
            # batches differ, so sums are rounded otherwise; another version is off by far more
            np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-4)


@pytest.fixture(scope="module")
def adapters(run, parts, problems):
    """Version 1, from before and version 2, from after a training step, both whole; the ranks then hold version 2."""
    pool, group, _ = parts
    run(pool.load_adapter(run(saved_adapter(group))))
    groups = run(pool.sample(problems[:4], SAMPLING))

    found = []
    for version in (1, 2):
        run(group.step(random_batch(groups, np.random.default_rng(version))))
        found.append(run(saved_adapter(group, version)))
    return found


@contextlib.contextmanager
def files_of_at_most(num_bytes, pids):
    """Processes in which memory with a file descriptor cannot grow larger, as in a machine that has no more."""
    before = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
    for pid, (_, hard) in before.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, hard))
    yield
    for pid, limits in before.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


def of(link: Path) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:  # closed in between
        return ""


def test_shared_memory_that_one_rank_does_not_get_is_an_error_where_asked_for_and_passed_over_by_auto(run, parts):
    pool, group, cfg = parts
    wanted = Transport.shared_memory
    with files_of_at_most(1 << 20, group.info["pids"][1:]):
        cfg.rollout.adapter_transport = wanted
        with pytest.raises(AdapterError, match=r"no memory to hand the adapter over: it takes .* File too large"):
            run(group.publish(0))
        cfg.rollout.adapter_transport = Transport.auto
        shared = run(group.publish(0))
    (warning,) = group.take_warnings()
    assert re.match("adapters travel through object_store from here on, not shared_memory: no memory to hand", warning)
    assert len(shared.parts) == 2 and all(part.memory is None for part in shared.parts)
    run(pool.load_adapter(shared))
    assert run(group.publish(1)).parts[0].memory is None and not group.take_warnings()  # said once
    kept = [
        link for pid in group.info["pids"] for link in Path(f"/proc/{pid}/fd").iterdir() if "sparkrl-rank" in of(link)
    ]
    assert not kept  # what a rank had on the way that was left is given back
    group.auto_transport = wanted
    assert all(part.memory is not None for part in run(group.publish(2)).parts)


def test_published_parts_are_served_as_the_gathered_adapter_is_whichever_way_they_travel(
    run, parts, adapters, problems
):
    pool, group, cfg = parts
    run(pool.load_adapter(adapters[1]))
    expected = bits(run(pool.sample(problems[:6], SAMPLING)))
    for transport in (Transport.shared_memory, Transport.object_store, Transport.auto):
        run(pool.load_adapter(adapters[0]))
        assert bits(run(pool.sample(problems[:6], SAMPLING))) != expected
        cfg.rollout.adapter_transport = transport
        shared = run(group.publish(2))
        assert len(shared.parts) == 2
        assert all((part.memory is None) == (transport is Transport.object_store) for part in shared.parts)
        run(pool.load_adapter(shared))
        assert pool.version == 2 and pool.metrics()["rollout/replicas"] == 2
        assert bits(run(pool.sample(problems[:6], SAMPLING))) == expected
    assert not [name for name in os.listdir("/dev/shm") if "sparkrl" in name]


def test_transport_between_gpus_is_tried_and_where_it_fails_auto_goes_on_and_cuda_ipc_says_why(run, parts):
    """Ranks and servers of this machine have no GPU, and say so when they are asked to leave the adapter on one."""
    pool, group, cfg = parts
    asked = copy.deepcopy(cfg)
    asked.rollout.adapter_transport = Transport.auto
    assert run(settle_transport(asked, pool, group)) is None  # nothing to try on CPU
    asked.cluster.device = Device.cuda
    warning = run(settle_transport(asked, pool, group))
    assert re.fullmatch(
        r"adapters travel through shared_memory, not from GPU to GPU: torch has loaded no CUDA runtime.*", warning
    )
    assert group.auto_transport is Transport.shared_memory
    asked.rollout.adapter_transport = Transport.cuda_ipc
    with pytest.raises(AdapterError, match="cannot read the adapter from the trainer's GPUs: torch has loaded no CUDA"):
        run(settle_transport(asked, pool, group))
    memory = DeviceMemory(host="", pid=1, started=0, device="", handle="", num_bytes=64)
    left = AdapterPart(manifest=(), num_bytes=64, block_bytes=64, checksums=(0,), memory=memory)
    assert run(pool.try_on_device([left])) == "the adapter was left on a GPU, which a server on CPU cannot read"


def test_each_rank_writes_its_own_rows_and_no_other(run, parts, adapters):
    _, group, _ = parts
    whole = unpack(adapters[1])
    for rank, part in enumerate(run(group.publish(2)).parts):
        for spec in part.manifest:
            rows = whole[spec.name].shape[0]
            total = 16 if ".experts." in spec.name else rows  # experts in front instead of E * R rows
            assert (spec.num_rows, spec.shape[0], spec.first_row) == (total, total // 2, rank * total // 2), spec.name
    total = sum(tensor.nbytes for tensor in whole.values())
    assert all(part.num_bytes == total // 2 for part in run(group.publish(2)).parts)


def test_requests_in_flight_finish_under_their_version_while_the_next_is_loaded(run, parts, adapters, problems):
    pool, group, _ = parts
    long = dataclasses.replace(SAMPLING, max_tokens=80, num_responses=4)
    expected = []
    for adapter in adapters:
        run(pool.load_adapter(adapter))
        expected.append(run(pool.sample(problems[:6], long)))

    async def overlap():
        await pool.load_adapter(adapters[0])
        before = asyncio.create_task(pool.sample(problems[:6], long))
        await asyncio.sleep(0.2)  # its requests are being decoded by now
        await pool.load_adapter(await group.publish(2))
        loaded_early = not before.done()
        after = await pool.sample(problems[:6], long)
        return loaded_early, await before, after

    loaded_early, before, after = run(overlap())
    assert loaded_early
    assert (versions(before), versions(after)) == ({1}, {2})
    # the same prompts under two versions at once: batches differ, so bits may, but no version's keys serve the other
    assert_close(before, expected[0])
    assert_close(after, expected[1])


def test_replica_that_does_not_acknowledge_is_taken_out_and_the_others_go_on(run, parts, adapters, problems):
    pool, group, _ = parts
    run(pool.load_adapter(adapters[0]))
    expected = run(pool.sample(problems[:5], SAMPLING))
    psutil.Process(pool.info["rollout/replicas"][0]["pid"]).kill()
    run(pool.load_adapter(adapters[0]))
    assert pool.metrics() == {"rollout/replicas": 1.0, "rollout/replicas_lost": 1.0}
    (warning,) = pool.take_warnings()
    assert warning.startswith("replica 0 did not take adapter version 1 and is out: rollout replica 0 died")
    assert warning.endswith("1 of 2 go on") and pool.take_warnings() == []
    assert_close(run(pool.sample(problems[:5], SAMPLING)), expected)  # in other batches now
    shared = run(group.publish(2))
    wrong = dataclasses.replace(shared.parts[1], checksums=(1, *shared.parts[1].checksums[1:]))
    with pytest.raises(AdapterError, match=r"replica 1: rank 0 .* wrong checksum of block 0 in part 1"):
        run(pool.load_adapter(dataclasses.replace(shared, parts=(shared.parts[0], wrong))))
    with pytest.raises(AdapterError, match="no adapter"):
        run(pool.sample(problems[:5], SAMPLING))
    run(pool.load_adapter(shared))
    assert versions(run(pool.sample(problems[:5], SAMPLING))) == {2}
