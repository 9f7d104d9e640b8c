"""The same loop for other families: only the configuration names another checkpoint. Real Ray, vLLM and verl on CPU."""

import asyncio
import json

import numpy as np
import peft
import pytest
import qwen3_checkpoint as tiny

from sparkrl.config.load import load
from sparkrl.loop.interrupt import Interrupt
from sparkrl.loop.parts import build_parts
from sparkrl.loop.train import run_loop
from sparkrl.quant.convert import dequantize_checkpoint, quantize_checkpoint
from sparkrl.types import Sampling

STEPS = 2
PROMPTS = 8


def overrides(checkpoint, data, folder):
    return [
        "recipe=quickstart",
        f"model.path={checkpoint}",
        "lora=all_linear",
        "lora.rank=8",
        "lora.alpha=16",
        f"data.path={data}",
        "eval.path=null",
        f"run_dir={folder}",
        f"loop.num_steps={STEPS}",
        "loop.num_prompts=8",
        "loop.group_size=4",
        "rollout.kv_cache_gib=0.1",
        "rollout.max_response_tokens=64",
        # a random model answers nothing: rewards that depend on the length give advantages all the same
        "reward.overlong_buffer=0.9",
        "trainer.optimizer.lr=1e-2",
        "trainer.compare_without_replay_every=1",
        "trainer.gradient_checkpointing=true",
        "trainer.num_threads=1",
        "trainer.num_workers=2",
        "telemetry.wandb=disabled",
    ]


async def train_and_sample(config):
    async with build_parts(config) as parts:
        problems = parts.data.take(PROMPTS)
        base = await parts.rollout.sample(problems, Sampling(num_responses=2, max_tokens=48, seed=1))
        await run_loop(parts, config, Interrupt(asyncio.current_task()))
        adapted = await parts.rollout.sample(problems, Sampling(num_responses=2, max_tokens=48, seed=2))
        return base, adapted, parts.rollout.info, parts.trainer.info


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def run(request, tmp_path_factory):
    """Family, plain checkpoint, run folder, and what was sampled before and after training.

    The sparse model is served and trained in NVFP4, an expert's matrices each on their own, the first layer's in BF16.
    """
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = plain = tiny.build(folder / "plain", request.param)
    if request.param == "qwen3_moe":
        checkpoint, plain = folder / "nvfp4", folder / "dequantized"
        quantize_checkpoint(folder / "plain", checkpoint, form="modelopt", ignore=["model.layers.0.mlp.experts*"])
        dequantize_checkpoint(checkpoint, plain)
    rng = np.random.default_rng(0)
    rows = [" ".join(f"w{i}" for i in rng.integers(2, tiny.VOCAB, rng.integers(6, 12))) for _ in range(16)]
    lines = [{"prompt": row, "reward_model": {"ground_truth": "1"}, "data_source": "random"} for row in rows]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = load(overrides(checkpoint, folder / "data.jsonl", folder / "run"))
    return request.param, plain, folder / "run", *asyncio.run(train_and_sample(config))


def compare(model, groups):
    """k3 and the largest difference of log-probs, nats; (token, layer) pairs routed alike, and all of them."""
    gaps, same, pairs = [], 0, 0
    for group in groups:
        for response in group.responses:
            log_probs, routes = tiny.score(model, group.problem.prompt_ids, response.token_ids)
            gaps.append(log_probs - response.log_probs)
            assert response.routed_experts.shape == routes.shape
            same += int((np.sort(response.routed_experts, -1) == routes).all(-1).sum())
            pairs += routes.shape[0] * routes.shape[1]
    gap = np.concatenate(gaps).astype(np.float64)
    return float((np.expm1(gap) - gap).mean()), float(np.abs(gap).max()), same, pairs


def test_family_served_log_probs_and_routes_equal_transformers(run):
    family, checkpoint, _, base, _, info, _ = run
    k3, largest, same, pairs = compare(tiny.reference(checkpoint), base)
    print(f"\n{family}: k3 {k3:.1e}, max |dlogp| {largest:.1e}, routes {same} of {pairs}")
    assert k3 <= 1e-6 and largest <= 1e-4
    assert same == pairs and (pairs > 0) == (family == "qwen3_moe")
    groups = {"qwen3": {"attention", "mlp"}, "qwen3_moe": {"attention", "experts"}}[family]
    assert {group for group, change in info["rollout/proofs"].items() if change > 1e-2} == groups


def test_family_trains_on_replayed_routes_and_agrees_with_its_server(run):
    family, _, folder, *_, info = run
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "agree/k3" in row]
    assert len(steps) == STEPS
    for row in steps:
        assert row["agree/k3"] <= 1e-6 and row["agree/dlogp_max"] <= 1e-4
    assert max(row["train/grad_norm"] for row in steps) > 1e-3
    assert steps[0]["train/ratio_mean"] == pytest.approx(1, abs=1e-6)
    if family == "qwen3":
        assert info["routing_layers"] == 0 and "off" in info["replay"]
        assert not any("agree/k3_no_replay" in row for row in steps)  # there is nothing to leave out
    else:
        assert info["routing_layers"] == len(tiny.SPARSE) and info["replay"] == "on"
        assert all(row["agree/route_agreement"] == 1.0 and row["agree/k3_no_replay"] <= 1e-6 for row in steps)


def test_family_adapter_in_stock_peft_gives_what_is_served(run):
    family, checkpoint, folder, _, adapted, *_ = run
    (saved,) = folder.glob("checkpoints/step-*2")
    base = tiny.reference(checkpoint)
    control = compare(base, adapted)[1]
    k3, largest, same, pairs = compare(peft.PeftModel.from_pretrained(base, saved).eval(), adapted)
    print(f"\n{family}: adapter k3 {k3:.1e}, max |dlogp| {largest:.1e}, without the adapter {control:.1e}")
    assert k3 <= 1e-6 and largest <= 1e-4 and same == pairs
    assert control > 1e-2
