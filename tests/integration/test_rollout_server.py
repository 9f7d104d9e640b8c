"""One fp32 server for the whole module, against transformers and PEFT."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil

import numpy as np
import psutil
import pytest
import ray
import rollout_checkpoint as tiny
from safetensors.torch import load_file, save_file

from sparkrl.config.schema import Config, Precision
from sparkrl.errors import AdapterError, CheckpointError, DataError, WorkerError
from sparkrl.models.registry import load_config
from sparkrl.rollout import RolloutPool
from sparkrl.rollout.probe import make_adapter
from sparkrl.types import FinishReason, Sampling

CONTEXT, RANK, ALPHA = 256, 8, 16
SAMPLING = Sampling(num_responses=3, max_tokens=24, seed=7)


def config_for(folder, dtype=Precision.float32, **rollout):
    cfg = Config(recipe_name="test")
    cfg.model.path, cfg.model.max_tokens = str(folder), CONTEXT
    cfg.lora.rank, cfg.lora.alpha = RANK, ALPHA
    cfg.rollout.dtype, cfg.rollout.num_threads, cfg.rollout.kv_cache_gib = dtype, 1, 0.1
    # Smaller than the prompts of one call together: some prompts are computed in two steps.
    cfg.rollout.max_num_seqs, cfg.rollout.max_num_batched_tokens = 32, 128
    for name, value in rollout.items():
        setattr(cfg.rollout, name, value)
    return cfg


@pytest.fixture(scope="module")
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    ray.init(include_dashboard=False, num_cpus=8, log_to_driver=False, object_store_memory=100 << 20)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="module")
def pool(cluster, folder, loop):
    pool = loop.run_until_complete(RolloutPool.start(config_for(folder)))
    yield pool
    loop.run_until_complete(pool.stop())


@pytest.fixture(scope="module")
def adapters(folder):
    _, config = load_config(folder)
    return [
        make_adapter(config, rank=RANK, alpha=ALPHA, b_std=std, seed=3 + version, version=version)
        for version, std in enumerate((0.0, 0.05, 0.05))
    ]


@pytest.fixture
def sample(pool, loop):
    def call(problems, **changes):
        return loop.run_until_complete(pool.sample(problems, dataclasses.replace(SAMPLING, **changes)))

    return call


@pytest.fixture
def load(pool, loop):
    return lambda adapter: loop.run_until_complete(pool.load_adapter(adapter))


def bits(groups):
    return [
        (r.uid, r.token_ids.tobytes(), r.log_probs.tobytes(), r.routed_experts.tobytes())
        for group in groups
        for r in group.responses
    ]


def test_start_proofs_say_that_adapters_act(pool):
    proofs = pool.info["rollout/proofs"]
    assert proofs["zero"] <= 1e-6
    assert min(proofs[group] for group in ("attention", "latent", "experts", "mlp")) > 1e-2
    assert pool.info["rollout/vllm"] == "0.32.0"


def test_sample_before_any_adapter_is_refused(sample):
    with pytest.raises(AdapterError, match="no adapter"):
        sample(tiny.problems(1))


@pytest.mark.parametrize("version", [0, 1])
def test_sample_agrees_with_transformers_and_peft_in_fp32(version, adapters, folder, load, sample):
    load(adapters[version])
    groups = sample(tiny.problems(8))
    with_adapter, base = tiny.reference(folder, adapters[version]), tiny.reference(folder)
    largest = control = 0.0
    for group in groups:
        for response in group.responses:
            log_probs, routes = tiny.score(with_adapter, group.problem.prompt_ids, response.token_ids)
            largest = max(largest, np.abs(log_probs - response.log_probs).max())
            np.testing.assert_array_equal(np.sort(response.routed_experts, -1), routes)
            plain, _ = tiny.score(base, group.problem.prompt_ids, response.token_ids)
            control = max(control, np.abs(plain - response.log_probs).max())
            assert response.policy_version == version
    assert largest <= 1e-4
    assert control <= 1e-4 if version == 0 else control > 0.1


def test_sample_temperature_log_probs_are_those_of_the_sampled_distribution(adapters, folder, load, sample):
    load(adapters[1])
    model = tiny.reference(folder, adapters[1])
    for group in sample(tiny.problems(2), temperature=0.6):
        for response in group.responses:
            log_probs, _ = tiny.score(model, group.problem.prompt_ids, response.token_ids, temperature=0.6)
            np.testing.assert_allclose(response.log_probs, log_probs, atol=1e-4)


def test_sample_same_seed_is_equal_bit_for_bit_another_differs(adapters, load, sample):
    load(adapters[1])
    problems = tiny.problems(12)
    first = bits(sample(problems))
    assert bits(sample(problems)) == first
    assert bits(sample(problems, seed=8)) != first


def test_sample_returns_groups_in_order_with_reasons(adapters, load, sample):
    load(adapters[0])
    problems = tiny.problems(5)
    groups = sample(problems, max_tokens=40)
    assert [group.problem.uid for group in groups] == [problem.uid for problem in problems]
    assert [r.uid for r in groups[1].responses] == [f"{problems[1].uid}/{i}" for i in range(3)]
    assert len({r.token_ids.tobytes() for r in groups[0].responses}) == 3
    for response in (r for group in groups for r in group.responses):
        ended = response.token_ids[-1] == 1
        assert response.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert ended or len(response.token_ids) == 40
        words = [f"w{token}" for token in response.token_ids if token > 1]
        assert response.text == "".join(words)


def test_sample_near_the_end_of_the_context_is_cut_there(adapters, load, sample):
    load(adapters[0])
    (group,) = sample(tiny.problems(1, length=CONTEXT - 3), max_tokens=50, num_responses=1)
    assert len(group.responses[0].token_ids) <= 3


def test_sample_prompt_longer_than_context_names_the_problem(adapters, load, sample):
    load(adapters[0])
    with pytest.raises(DataError, match=r"problem `s0-0` has a prompt of 256 tokens"):
        sample(tiny.problems(1, length=CONTEXT))


def test_load_adapter_again_gives_the_first_answers_again(adapters, load, sample):
    problems = tiny.problems(4, length=70)  # two full cache blocks
    load(adapters[1])
    first = bits(sample(problems))
    load(adapters[2])
    assert bits(sample(problems)) != first
    load(adapters[1])
    assert bits(sample(problems)) == first


def test_load_adapter_damaged_bytes_are_refused_and_nothing_serves(adapters, load, sample):
    buffer = adapters[1].buffer.copy()
    buffer[5] ^= 1
    with pytest.raises(AdapterError, match=r"replica 0: .*checksum"):
        load(dataclasses.replace(adapters[1], buffer=buffer))
    with pytest.raises(AdapterError, match="no adapter"):
        sample(tiny.problems(1))


def test_load_adapter_for_another_model_is_refused(adapters, load):
    manifest = tuple(
        dataclasses.replace(spec, name=spec.name.replace("layers.4", "layers.9")) for spec in adapters[1].manifest
    )
    with pytest.raises(AdapterError, match=r"do not exist in the served model"):
        load(dataclasses.replace(adapters[1], manifest=manifest))


def test_start_config_outside_the_rules_fails_before_any_server(cluster, folder, loop, tmp_path):
    text = (folder / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"num_shared_experts": 0', '"num_shared_experts": 1'))
    with pytest.raises(CheckpointError, match=r"num_shared_experts"):
        loop.run_until_complete(RolloutPool.start(config_for(tmp_path)))


def test_start_weights_that_are_no_numbers_are_named_as_the_cause(cluster, folder, loop, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    tensors = load_file(damaged / "model.safetensors")
    tensors["model.language_model.layers.1.self_attn.q_proj.weight"][0, 0] = float("nan")
    save_file(tensors, damaged / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"the base model's log-probs are not numbers \(4 of 4") as caught:
        loop.run_until_complete(RolloutPool.start(config_for(damaged)))
    assert str(damaged) in caught.value.message and "verify-checkpoint" in str(caught.value.hint)


def test_two_bf16_replicas_one_killed_gives_worker_error_and_no_stray_process(cluster, folder, loop, adapters):
    run = loop.run_until_complete
    pool = run(RolloutPool.start(config_for(folder, Precision.bfloat16, num_replicas=2)))
    try:
        run(pool.load_adapter(adapters[1]))
        problems = tiny.problems(5)
        first = run(pool.sample(problems, SAMPLING))
        assert [group.problem.uid for group in first] == [problem.uid for problem in problems]
        assert bits(run(pool.sample(problems, SAMPLING))) == bits(first)
        # Two servers, started apart, answer the same problem with the same bits.
        one, other = run(pool.sample([problems[0], problems[0]], SAMPLING))
        assert bits([one]) == bits([other])
        replicas = pool.info["rollout/replicas"]
        pids = [pid for replica in replicas for pid in (replica["pid"], *replica["engine_pids"])]
        assert all(replica["engine_pids"] for replica in replicas)
        psutil.Process(replicas[1]["pid"]).kill()
        with pytest.raises(WorkerError, match="replica 1 died"):
            run(pool.sample(problems, SAMPLING))
    finally:
        run(pool.stop())
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=15)
    assert not alive
