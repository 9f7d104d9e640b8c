"""The trainer's ranks as real Ray actors around verl's engine."""

import asyncio
import dataclasses
import gc
import os
import shutil
import time

import numpy as np
import peft
import pytest
import ray
import torch
import trainer_checkpoint as tiny
from safetensors.torch import load_file, save_file
from training_steps import saved_adapter

from sparkrl.config.schema import OldLogProbs
from sparkrl.errors import CheckpointError, ConfigError, DataError, RoutingError, WorkerError
from sparkrl.lora.peft_format import load_adapter, unpack
from sparkrl.models.registry import load_config
from sparkrl.quant.checkpoint import CheckpointReader
from sparkrl.trainer.group import TrainerGroup

LR = 1e-3


@pytest.fixture(scope="module", autouse=True)
def ray_here(tmp_path_factory):
    ray.init(include_dashboard=False, num_cpus=8, log_to_driver=False, object_store_memory=100 << 20)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    tiny.write(folder)
    return folder


@pytest.fixture(scope="module")
def reference(path):
    return tiny.Reference(path)


@pytest.fixture(scope="module")
def batch(reference):
    return tiny.batch(reference)


@pytest.fixture(scope="module")
def frozen(path):
    """One rank with a learning rate of 0: it stays the base model whatever is trained on it."""
    group = start(tiny.config(path, compare_without_replay_every=2))
    yield group
    asyncio.run(group.stop())


def start(cfg, seed=3):
    return asyncio.run(TrainerGroup.start(cfg, run_seed=seed))


def trained(cfg, batch, folder, *, steps=2):
    """Metrics of each step, the state saved after the first and the final adapter."""

    async def go():
        group = await TrainerGroup.start(cfg, run_seed=3)
        try:
            metrics = [(await group.step(batch)).metrics]
            await group.save(folder)
            metrics += [(await group.step(batch)).metrics for _ in range(steps - 1)]
            return (
                metrics,
                load_file(folder / "trainer_state.safetensors"),
                unpack(await saved_adapter(group)),
                group.info,
            )
        finally:
            await group.stop()

    return asyncio.run(go())


@pytest.fixture(scope="module")
def one_rank(path, batch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return *trained(tiny.config(path, lr=LR), batch, folder), folder


def largest(one, other):
    assert set(one) == set(other)
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_trainer_fresh_adapter_scores_like_transformers_on_the_dequantized_weights(frozen, batch):
    got = asyncio.run(frozen.score(batch.sequences, replay=True, temperature=1.0))
    for value, sequence in zip(got, batch.sequences, strict=True):
        assert np.abs(value - sequence.rollout_log_probs).max() <= 1e-5


def test_trainer_temperature_divides_the_logits(frozen, reference):
    warm = tiny.batch(reference, num=2, seed=5, temperature=0.6)
    got = asyncio.run(frozen.score(warm.sequences, replay=False, temperature=0.6))
    assert max(np.abs(v - s.rollout_log_probs).max() for v, s in zip(got, warm.sequences, strict=True)) <= 1e-5


def test_trainer_on_policy_step_has_ratio_one_no_clip_and_full_agreement(frozen, batch):
    result = asyncio.run(frozen.step(batch))
    found = result.metrics
    assert found["train/ratio_mean"] == pytest.approx(1, abs=1e-6) and found["train/clip_fraction"] == 0
    assert found["agree/k3"] <= 1e-10 and found["agree/route_agreement"] == 1
    assert found["agree/k3_no_replay"] <= 1e-10
    assert len(result.dlogp) == sum(len(s.response_ids) for s in batch.sequences)
    assert found["perf/train_tokens"] == sum(len(s.prompt_ids) + len(s.response_ids) - 1 for s in batch.sequences)
    advantages = np.concatenate([s.advantages for s in batch.sequences])
    assert found["train/loss"] == pytest.approx(-float(advantages.mean()), abs=1e-5)
    assert found["train/grad_norm"] > 0 and found["train/lr"] == 0 and found["train/skipped_updates"] == 0
    assert "agree/k3_no_replay" not in asyncio.run(frozen.step(batch)).metrics


def test_trainer_learning_rate_zero_drifts_nowhere(frozen, batch):
    before = asyncio.run(frozen.score(batch.sequences, replay=True, temperature=1.0))
    adapter = asyncio.run(saved_adapter(frozen))
    for _ in range(3):
        asyncio.run(frozen.step(batch))
    after = asyncio.run(frozen.score(batch.sequences, replay=True, temperature=1.0))
    assert asyncio.run(saved_adapter(frozen)).checksum == adapter.checksum
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))


def test_trainer_replay_pins_the_routes_it_is_given(frozen, batch):
    live = asyncio.run(frozen.score(batch.sequences, replay=False, temperature=1.0))
    shifted = [dataclasses.replace(s, routed_experts=(s.routed_experts + 1) % tiny.EXPERTS) for s in batch.sequences]
    moved = asyncio.run(frozen.score(shifted, replay=True, temperature=1.0))
    free = asyncio.run(frozen.score(shifted, replay=False, temperature=1.0))
    assert all(np.array_equal(one, other) for one, other in zip(live, free, strict=True))
    assert max(np.abs(one - other).max() for one, other in zip(live, moved, strict=True)) > 0.01
    # moved in the last layer only, the other three still choose as the server did
    for one, sequence in zip(shifted, batch.sequences, strict=True):
        one.routed_experts[:, :-1] = sequence.routed_experts[:, :-1]
    found = asyncio.run(frozen.step(dataclasses.replace(batch, sequences=tuple(shifted)))).metrics
    assert found["agree/route_agreement"] == 1 - 1 / tiny.LAYERS and found["agree/k3"] > 1e-5


def test_trainer_replayed_weights_come_from_live_logits(frozen, batch, reference):
    """The reference with its choice overwritten by hand equals the trainer's replay."""
    sequence = batch.sequences[0]
    wanted = (sequence.routed_experts + 3) % tiny.EXPERTS
    handles = []
    for layer, block in enumerate(reference.model.layers):
        ids = torch.from_numpy(wanted[:, layer].astype(np.int64))

        def choose(module, args, out, ids=ids):
            picked = torch.sigmoid(out[0]).gather(1, ids)
            return out[0], picked / picked.sum(-1, keepdim=True), ids

        handles.append(block.mlp.gate.register_forward_hook(choose))
    want, _ = reference(sequence.prompt_ids.tolist(), sequence.response_ids.tolist())
    for handle in handles:
        handle.remove()
    moved = dataclasses.replace(sequence, routed_experts=wanted)
    (got,) = asyncio.run(frozen.score([moved], replay=True, temperature=1.0))
    assert np.abs(got - want).max() <= 1e-5


@pytest.mark.parametrize("fault", ["zero", "short", "range", "twice"])
def test_trainer_bad_routes_are_refused_and_nothing_is_trained(frozen, batch, fault):
    routes = batch.sequences[3].routed_experts.copy()
    if fault == "zero":
        routes[:, 2] = 0
    elif fault == "short":
        routes = routes[:-1]
    elif fault == "range":
        routes[0, 1, 0] = tiny.EXPERTS
    else:
        routes[0, 1, :] = 4
    rows = list(batch.sequences)
    rows[3] = dataclasses.replace(rows[3], routed_experts=routes)
    with pytest.raises(RoutingError, match="r3"):
        asyncio.run(frozen.step(dataclasses.replace(batch, sequences=tuple(rows))))
    assert asyncio.run(frozen.step(batch)).metrics["agree/k3"] <= 1e-10


def test_trainer_inconsistent_sequences_are_data_errors(frozen, batch):
    first = batch.sequences[0]
    bad = np.full_like(first.advantages, np.nan)
    for sequences in ((), (dataclasses.replace(first, advantages=bad),)):
        with pytest.raises(DataError):
            asyncio.run(frozen.step(dataclasses.replace(batch, sequences=sequences)))
    with pytest.raises(DataError, match="log_probs"):
        short = dataclasses.replace(first, rollout_log_probs=first.rollout_log_probs[:-1])
        asyncio.run(frozen.step(dataclasses.replace(batch, sequences=(short,))))


def test_trainer_two_ranks_give_the_gradients_of_one(path, batch, one_rank, tmp_path):
    metrics, state, adapter, info, _ = one_rank
    other_metrics, other_state, other_adapter, other_info = trained(
        tiny.config(path, workers=2, lr=LR), batch, tmp_path
    )
    # after one step AdamW's first moment is a tenth of the clipped gradient
    firsts = [{n: v for n, v in each.items() if n.endswith(".exp_avg")} for each in (state, other_state)]
    assert largest(*firsts) <= 1e-7 and max(float(v.abs().max()) for v in firsts[0].values()) > 1e-3
    for name in ("train/loss", "train/grad_norm", "train/entropy", "agree/dlogp_mean"):
        first, second = ((m[name], other[name]) for m, other in zip(metrics, other_metrics, strict=True))
        assert first[1] == pytest.approx(first[0], rel=1e-6, abs=1e-6)
        assert second[1] == pytest.approx(second[0], rel=1e-4, abs=1e-6)
    # where a gradient is about 0 AdamW divides noise by noise, so a few numbers may differ by a part of a step; how
    # large a part, and by how much the second step's figures differ, depends on the kernels that the processor gets
    apart = torch.cat([(adapter[name] - other_adapter[name]).abs().flatten() for name in adapter]) / LR
    assert apart.max() < 1 and (apart > 0.01).float().mean() < 5e-3
    reader = CheckpointReader(path)
    for name in reader.names:
        reader.read(name)
    everywhere = sum(
        tensor.nbytes for tensor in (reader.read(n) for n in reader.names if n.endswith("correction_bias"))
    )
    assert info["base_bytes_read"][0] == reader.bytes_read - everywhere
    assert sum(other_info["base_bytes_read"]) == info["base_bytes_read"][0] + everywhere


def test_trainer_small_micro_batches_and_checkpointing_change_nothing(path, batch, one_rank, tmp_path):
    metrics, state, _, _, _ = one_rank
    cfg = tiny.config(path, lr=LR, max_tokens_per_micro_batch=40, gradient_checkpointing=True)
    other_metrics, other_state, _, _ = trained(cfg, batch, tmp_path)
    firsts = [{n: v for n, v in each.items() if n.endswith(".exp_avg")} for each in (state, other_state)]
    assert largest(*firsts) <= 1e-7
    assert [m["train/loss"] for m in other_metrics] == pytest.approx([m["train/loss"] for m in metrics], abs=1e-5)
    assert other_metrics[0]["agree/route_agreement"] == 1  # a recomputed forward pass is not counted twice


@pytest.mark.parametrize("workers", [1, 2])
def test_trainer_resumed_run_equals_an_uninterrupted_one(path, batch, one_rank, workers):
    metrics, _, adapter, _, folder = one_rank

    async def go():
        group = await TrainerGroup.start(tiny.config(path, workers=workers, lr=LR), run_seed=99)
        try:
            await group.load(folder)
            return (await group.step(batch)).metrics, unpack(await saved_adapter(group))
        finally:
            await group.stop()

    resumed, other = asyncio.run(go())
    if workers == 1:
        assert resumed["train/loss"] == metrics[1]["train/loss"]
        assert resumed["train/grad_norm"] == metrics[1]["train/grad_norm"]
        assert largest(adapter, other) == 0
    else:
        assert resumed["train/loss"] == pytest.approx(metrics[1]["train/loss"], abs=1e-6)
        assert largest(adapter, other) <= 0.05 * LR


def test_trainer_saved_adapter_in_peft_scores_like_the_trainer(path, batch, one_rank):
    family, config = load_config(path)
    model = family.build(config, torch.float32)
    reader = CheckpointReader(path)
    model.load_state_dict({name: reader.read(name).float() for name in reader.names})
    model = peft.PeftModel.from_pretrained(model, one_rank[-1]).eval()

    async def go():
        group = await TrainerGroup.start(tiny.config(path), run_seed=99)
        try:
            await group.load(one_rank[-1])
            return await group.score(batch.sequences, replay=False, temperature=1.0)
        finally:
            await group.stop()

    for value, sequence in zip(asyncio.run(go()), batch.sequences, strict=True):
        tokens = torch.tensor(np.concatenate([sequence.prompt_ids, sequence.response_ids]).astype(np.int64))
        with torch.no_grad():
            log_p = torch.log_softmax(model(tokens[None, :-1]).logits[0], -1).gather(1, tokens[1:, None])[:, 0]
        want = log_p[len(sequence.prompt_ids) - 1 :].numpy()
        assert np.abs(value - want).max() <= 1e-5
        assert np.abs(want - sequence.rollout_log_probs).max() > 1e-4


def test_trainer_bfloat16_mini_batches_kl_and_own_old_log_probs_train(path, batch):
    cfg = tiny.config(path, workers=2, dtype="bfloat16", lr=LR, num_mini_batches=2, old_log_probs=OldLogProbs.trainer)
    cfg.algorithm.kl_coef, cfg.algorithm.entropy_coef = 0.1, 0.01
    group = start(cfg)
    try:
        found = asyncio.run(group.step(batch)).metrics
        assert found["train/ratio_mean"] == pytest.approx(1, abs=1e-6) and found["train/clip_fraction"] == 0
        assert 0 < found["agree/k3"] < 1e-2
        first = asyncio.run(saved_adapter(group))
        asyncio.run(group.step(batch))
        tensors, second = unpack(first), unpack(asyncio.run(saved_adapter(group)))
        assert {value.dtype for value in tensors.values()} == {torch.float32}
        assert all((tensors[name] != second[name]).any() for name in tensors if ".lora_B" in name)
        # fewer sequences than ranks: one rank gets a filler
        one = asyncio.run(group.score(batch.sequences[:1], replay=True, temperature=1.0))
        assert len(one) == 1 and len(one[0]) == len(batch.sequences[0].response_ids)
    finally:
        asyncio.run(group.stop())


def test_trainer_warmup_raises_the_learning_rate_from_zero(path, batch, tmp_path):
    cfg = tiny.config(path, lr=LR)
    cfg.trainer.optimizer.warmup_steps = 2
    metrics, *_ = trained(cfg, batch, tmp_path, steps=4)
    assert [m["train/lr"] for m in metrics] == pytest.approx([0, LR / 2, LR, LR])


def test_trainer_not_finite_gradient_is_skipped_then_an_error(path, batch):
    group = start(tiny.config(path, lr=LR))
    huge = [dataclasses.replace(s, advantages=np.full_like(s.advantages, 3e38)) for s in batch.sequences]
    bad = dataclasses.replace(batch, sequences=tuple(huge))
    try:
        before = asyncio.run(saved_adapter(group)).checksum
        assert asyncio.run(group.step(bad)).metrics["train/skipped_updates"] == 1
        assert asyncio.run(saved_adapter(group)).checksum == before
        asyncio.run(group.step(bad))
        with pytest.raises(WorkerError, match="not finite"):
            asyncio.run(group.step(bad))
    finally:
        asyncio.run(group.stop())


def test_trainer_unknown_target_is_a_config_error(path):
    cfg = tiny.config(path, workers=2)
    cfg.lora.targets = ["atention"]
    with pytest.raises(ConfigError, match="atention"):
        start(cfg)


def test_trainer_checkpoint_without_a_tensor_is_a_checkpoint_error(path, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(path, broken)
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.language_model.layers.2.self_attn.k_proj.weight"]
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.2\.self_attn\.k_proj\.weight"):
        start(tiny.config(broken, workers=2))


def test_trainer_damaged_state_is_refused_and_the_group_names_the_file(path, one_rank, tmp_path):
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        shutil.copy(one_rank[-1] / name, tmp_path / name)
    (tmp_path / "trainer_state.safetensors").write_bytes(b"\x10")
    group = start(tiny.config(path))
    try:
        with pytest.raises(CheckpointError, match="trainer_state"):
            asyncio.run(group.load(tmp_path))
    finally:
        asyncio.run(group.stop())


def test_trainer_dead_rank_is_named_and_the_other_ends_too(path, batch):
    group = start(tiny.config(path, workers=2))
    pids = group.info["pids"]
    os.kill(pids[1], 9)
    began = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1 died"):
        asyncio.run(group.step(batch))
    assert time.monotonic() - began < 60
    asyncio.run(group.stop())
    for _ in range(100):
        if not any(os.path.exists(f"/proc/{pid}") for pid in pids):
            break
        time.sleep(0.1)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@ray.remote
class BusyRank:
    def stop(self):
        time.sleep(60)


def test_trainer_busy_rank_is_killed_and_nothing_is_complained_of(path):
    complaints = []

    async def stop():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context["message"]))
        await TrainerGroup(tiny.config(path), [BusyRank.remote()]).stop()
        await asyncio.sleep(1)  # its call fails now
        gc.collect()

    began = time.perf_counter()
    asyncio.run(stop())
    assert complaints == [] and time.perf_counter() - began < 30


def test_trainer_saved_files_are_stock_peft_and_complete(one_rank):
    folder = one_rank[-1]
    assert sorted(os.listdir(folder)) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "trainer_state.safetensors",
    ]
    tensors, config = load_adapter(folder)
    assert config["target_parameters"] == ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in tensors)
