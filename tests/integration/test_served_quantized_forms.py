"""vLLM serves what `sparkrl quantize` writes: by way of BF16 into another form, and every log-prob is the same.

What it makes of the declared activations is asked of vLLM's own reader of ModelOpt's config.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import ray
import rollout_checkpoint as tiny
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

from sparkrl.config.schema import Config, Precision
from sparkrl.models.registry import load_config
from sparkrl.quant.checkpoint import CheckpointReader
from sparkrl.quant.convert import dequantize_checkpoint, quantize_checkpoint
from sparkrl.rollout import RolloutPool
from sparkrl.rollout.probe import make_adapter
from sparkrl.types import Sampling

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart" / "checkpoint"


async def served(folder: Path) -> list[tuple[list[int], np.ndarray]]:
    """Tokens and log-probs of seeded responses under a random adapter."""
    cfg = Config(recipe_name="test")
    cfg.model.path, cfg.model.max_tokens = str(folder), 128
    cfg.rollout.dtype, cfg.rollout.num_threads, cfg.rollout.kv_cache_gib = Precision.float32, 1, 0.1
    pool = await RolloutPool.start(cfg)
    try:
        _, config = load_config(folder)
        await pool.load_adapter(
            make_adapter(config, rank=cfg.lora.rank, alpha=cfg.lora.alpha, b_std=0.02, seed=1, version=0)
        )
        groups = await pool.sample(tiny.problems(4), Sampling(num_responses=2, max_tokens=24, seed=7))
        return [(list(r.token_ids), np.asarray(r.log_probs)) for group in groups for r in group.responses]
    finally:
        await pool.stop()


def test_quantized_checkpoint_in_another_form_is_served_with_equal_log_probs(tmp_path):
    dequantize_checkpoint(RECIPE, tmp_path / "bf16")
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "again", form="compressed-tensors")
    assert any(CheckpointReader(tmp_path / "again").is_quantized(n) for n in CheckpointReader(RECIPE).names)
    ray.init(include_dashboard=False, num_cpus=8, log_to_driver=False, object_store_memory=100 << 20)
    try:
        first, second = (asyncio.run(served(folder)) for folder in (RECIPE, tmp_path / "again"))
    finally:
        ray.shutdown()
    assert len(first) == 8
    for (tokens, log_probs), (other_tokens, other_log_probs) in zip(first, second, strict=True):
        assert tokens == other_tokens and np.array_equal(log_probs, other_log_probs)


@pytest.mark.parametrize("form", ["modelopt", "modelopt-stacked"])
def test_vllm_takes_what_is_written_for_w4a16_and_the_published_form_for_w4a4(tmp_path, form):
    dequantize_checkpoint(RECIPE, tmp_path / "bf16")
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "again", form=form)
    written, published = (
        json.loads((folder / "config.json").read_text())["quantization_config"]
        for folder in (tmp_path / "again", RECIPE)
    )
    # without an input scale that anybody measured, activations must stay in 16 bits, on Blackwell too
    assert ModelOptNvFp4Config.from_config(written).quant_method == "W4A16_NVFP4"
    assert ModelOptNvFp4Config.from_config(published).quant_method == "NVFP4"
    # a server that multiplies by the input scales all the same multiplies by 1
    reader = CheckpointReader(tmp_path / "again")
    scales = [name for name in reader.stored if name.endswith("input_scale")]
    assert scales and all(bool((reader.stored_rows(name, 0, 1) == 1).all()) for name in scales)
