"""Servers of two workers on CPU, tensor parallel and expert parallel, beside one of a single worker: the same adapter
through shared memory, each worker its own slice, and what happens when a worker dies."""

from __future__ import annotations

from typing import Any

import numpy as np
import psutil
import pytest
import ray
import rollout_checkpoint as tiny

from sparkrl.config.schema import Config, Precision
from sparkrl.errors import AdapterError
from sparkrl.lora.peft_format import from_peft, unpack
from sparkrl.lora.plan import shard_rows
from sparkrl.lora.shared_memory import Outbox
from sparkrl.lora.wire import PartWriter, gather_parts
from sparkrl.models.registry import load_config
from sparkrl.rollout.engine import RolloutServer
from sparkrl.rollout.probe import make_adapter
from sparkrl.rollout.spec import ServerSpec
from sparkrl.types import Problem, Sampling, SharedAdapter

RANK, ALPHA = 8, 16
SAMPLING = Sampling(num_responses=2, max_tokens=16, seed=7)
FP32 = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="module")
def servers(folder):
    """By name; every one has proven at its start that each group of adapters acts."""

    # local classes travel by value: Ray's workers cannot import this file
    class Reporting(RolloutServer):
        async def reports(self) -> list[dict[str, Any]]:
            return await self._rpc("sparkrl_report")

    class ExpertParallelSpec(ServerSpec):
        def engine_arguments(self) -> dict[str, Any]:
            return super().engine_arguments() | {"enable_expert_parallel": True}

    ray.init(include_dashboard=False, num_cpus=8, log_to_driver=False, object_store_memory=100 << 20)
    cfg = Config(recipe_name="test")
    cfg.model.path, cfg.model.max_tokens = str(folder), 128
    cfg.lora.rank, cfg.lora.alpha = RANK, ALPHA
    cfg.rollout.dtype, cfg.rollout.num_threads, cfg.rollout.kv_cache_gib = Precision.float32, 1, 0.05
    cfg.rollout.max_num_seqs, cfg.rollout.max_num_batched_tokens = 16, 128
    actors = {}
    for name, size, kind in (("one", 1, ServerSpec), ("tensor", 2, ServerSpec), ("expert", 2, ExpertParallelSpec)):
        cfg.rollout.tensor_parallel_size = size
        spec = kind.from_config(cfg, str(folder))
        actors[name] = (
            ray.remote(Reporting).options(num_cpus=1, runtime_env={"env_vars": spec.environment()}).remote(spec)
        )
    ray.get([actor.start.remote() for actor in actors.values()])
    yield actors
    ray.get([actor.stop.remote() for actor in actors.values()])
    ray.shutdown()


class Ranks:
    """Two trainer ranks' memory."""

    def __init__(self, folder) -> None:
        _, self._config = load_config(folder)
        self._boxes = [Outbox(f"test-{rank}") for rank in range(2)]

    def publish(self, seed: int) -> SharedAdapter:
        self.peft = make_adapter(self._config, rank=RANK, alpha=ALPHA, b_std=0.3, seed=seed, version=seed)
        factors = from_peft(unpack(self.peft), rank=RANK)
        parts = []
        for rank, box in enumerate(self._boxes):
            rows = {}
            for name, value in factors.items():
                start, end = shard_rows(len(value), rank, 2)
                rows[name] = (value[start:end], start, len(value))
            writer = PartWriter(rows, self.peft.config, "float32")
            parts.append(writer.write(box.room(writer.num_bytes), memory=box.handle()))
        return gather_parts(parts, self.peft.config, seed)


@pytest.fixture(scope="module")
def ranks(folder):
    return Ranks(folder)


def problems():
    random = np.random.default_rng(3)
    return [
        Problem(
            uid=f"p{i}",
            messages=(),
            answer="",
            data_source="test",
            prompt_ids=random.integers(2, tiny.VOCAB, 9, dtype=np.int32),
        )
        for i in range(6)
    ]


def responses(actor):
    return [r for group in ray.get(actor.sample.remote(problems(), SAMPLING)) for r in group.responses]


@pytest.mark.parametrize("name", ["tensor", "expert"])
def test_two_workers_serve_each_version_as_one_worker_does(servers, ranks, name):
    served = {}
    for version in (1, 2, 1):  # the last is an older one again
        sent = ranks.publish(version)
        for actor in (servers["one"], servers[name]):
            assert ray.get(actor.load_adapter.remote(sent)) == (version, sent.checksum)
        ours, theirs = responses(servers[name]), responses(servers["one"])
        for a, b in zip(ours, theirs, strict=True):
            assert a.policy_version == version
            np.testing.assert_array_equal(a.token_ids, b.token_ids)
            # sums over two workers are rounded otherwise; another version is off by far more
            np.testing.assert_allclose(a.log_probs, b.log_probs, atol=2e-4)
            assert (np.sort(a.routed_experts) == np.sort(b.routed_experts)).mean() > 0.999
        first = np.concatenate([r.log_probs[:1] for r in ours])
        np.testing.assert_allclose(first, served.setdefault(version, first), atol=2e-5)
    assert np.abs(served[1] - served[2]).max() > 0.05
    # the same adapter in PEFT's form, from one piece of memory
    assert ray.get(servers[name].load_adapter.remote(ranks.peft))[0] == 1
    found = np.concatenate([r.log_probs[:1] for r in responses(servers[name])])
    np.testing.assert_allclose(found, served[1], atol=2e-5)


def test_each_worker_fills_its_own_slice(servers, ranks):
    sent = ranks.publish(3)
    ray.get([actor.load_adapter.remote(sent) for actor in servers.values()])
    (one,), tensor, expert = (ray.get(actor.reports.remote()) for actor in servers.values())
    assert [report["rank"] for report in (*tensor, *expert)] == [0, 1, 0, 1]
    width, inner = tiny.FIELDS["moe_hidden_size"], tiny.FIELDS["moe_intermediate_size"]
    experts = len(tiny.SPARSE) * tiny.EXPERTS * RANK * FP32
    # of one expert and rank: A and B of gate and up, A and B of down; two workers share out its width, or the experts
    whole, half = width + 2 * inner + inner + width, width + inner + inner // 2 + width
    rest = one["swap_bytes"] - experts * whole
    assert rest > 0
    for report in tensor:
        assert 0 < report["swap_bytes"] - experts * half < rest
    for report in expert:
        assert 0 < report["swap_bytes"] - experts // 2 * whole < rest
    assert all(report["swap_s"] > 0 for report in (one, *tensor, *expert))


def test_byte_that_changed_on_the_way_is_found_by_the_worker_that_verifies_it(servers, ranks):
    sent = ranks.publish(4)
    for part in range(2):
        memory = ranks._boxes[part].room(sent.parts[part].num_bytes)
        memory[100] ^= 1
        with pytest.raises(AdapterError, match=rf"rank {part} of the server refused .* block 0 in part {part}"):
            ray.get(servers["tensor"].load_adapter.remote(sent))
        with pytest.raises(AdapterError, match="no adapter"):
            ray.get(servers["tensor"].sample.remote(problems(), SAMPLING))
        memory[100] ^= 1
    assert ray.get(servers["tensor"].load_adapter.remote(sent)) == (4, sent.checksum)


def test_worker_that_dies_in_the_middle_of_a_load_ends_it_with_an_error(servers, ranks):
    reports = ray.get(servers["tensor"].reports.remote())
    worker = psutil.Process(reports[1]["pid"])
    worker.suspend()  # the other worker loads, this one never answers
    loading = servers["tensor"].load_adapter.remote(ranks.publish(5))
    assert ray.wait([loading], timeout=1.0)[0] == []
    worker.kill()
    with pytest.raises(Exception, match=r"(?i)dead|died|failed"):
        ray.get(loading, timeout=60)
    with pytest.raises(AdapterError, match="no adapter"):
        ray.get(servers["tensor"].sample.remote(problems(), SAMPLING))
