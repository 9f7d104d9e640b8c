"""The published form of the model, vision and audio towers in the file: its text part is trained and served."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import ray
import rollout_checkpoint as tiny
import torch
from omni_checkpoint import as_omni

from sparkrl.config.schema import Config, Precision
from sparkrl.models.registry import load_config
from sparkrl.quant.checkpoint import CheckpointReader
from sparkrl.rollout import RolloutPool
from sparkrl.rollout.probe import make_adapter
from sparkrl.trainer.loading import fill_module
from sparkrl.types import Sampling

RANK, ALPHA = 8, 16


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("flat") / "tiny")


@pytest.fixture(scope="module")
def omni(flat, tmp_path_factory):
    return as_omni(flat, tmp_path_factory.mktemp("omni") / "tiny")


def test_omni_text_prompts_with_an_adapter_agree_with_transformers_and_peft(flat, omni):
    cfg = Config(recipe_name="test")
    cfg.model.path, cfg.model.max_tokens = str(omni), 128
    cfg.lora.rank, cfg.lora.alpha = RANK, ALPHA
    cfg.rollout.dtype, cfg.rollout.num_threads, cfg.rollout.kv_cache_gib = Precision.float32, 1, 0.1
    adapter = make_adapter(load_config(omni)[1], rank=RANK, alpha=ALPHA, b_std=0.05, seed=1, version=0)

    async def served():
        pool = await RolloutPool.start(cfg)
        try:
            await pool.load_adapter(adapter)
            return await pool.sample(tiny.problems(4), Sampling(num_responses=2, max_tokens=16, seed=7))
        finally:
            await pool.stop()

    ray.init(include_dashboard=False, num_cpus=8, log_to_driver=False, object_store_memory=100 << 20)
    try:
        groups = asyncio.run(served())
    finally:
        ray.shutdown()
    reference = tiny.reference(flat, adapter)
    for group in groups:
        for response in group.responses:
            log_probs, routes = tiny.score(reference, group.problem.prompt_ids, response.token_ids)
            np.testing.assert_allclose(response.log_probs, log_probs, atol=1e-4, rtol=0)
            np.testing.assert_array_equal(np.sort(response.routed_experts, -1), routes)


def test_omni_trainer_holds_the_weights_of_the_flat_form_and_no_tower(flat, omni):
    held = []
    for folder in (flat, omni):
        family, config = load_config(folder)
        model = family.build(config, torch.bfloat16).requires_grad_(False)
        fill_module(model, CheckpointReader(folder), family, config, seed=0)
        held.append(model.state_dict())
    assert held[0].keys() == held[1].keys() and not any("tower" in name for name in held[1])
    assert all(torch.equal(value, held[1][name]) for name, value in held[0].items())
