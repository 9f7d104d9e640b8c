"""vLLM serves what `sparkrl quantize` writes: by way of BF16 into another form, and every log-prob is the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import ray
import rollout_checkpoint as tiny

from sparkrl.config.schema import Config, Precision
from sparkrl.models.registry import load_config
from sparkrl.quant.checkpoint import CheckpointReader
from sparkrl.quant.convert import dequantize_checkpoint, quantize_checkpoint
from sparkrl.rollout import RolloutPool
from sparkrl.rollout.probe import make_adapter

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
        groups = await pool.sample(tiny.problems(4), num_responses=2, temperature=1.0, top_p=1.0, max_tokens=24, seed=7)
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
