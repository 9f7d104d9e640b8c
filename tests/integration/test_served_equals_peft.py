"""The trained adapter, as vLLM serves it on NVFP4, against stock PEFT on the dequantized checkpoint."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import peft
import pytest
import ray
import torch
from safetensors import safe_open
from torch import nn
from training_steps import random_batch
from transformers import GenerationMixin, MuseSparkTextConfig
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkPreTrainedModel, MuseSparkTextModel

from sparkrl.config.schema import Config, Precision
from sparkrl.data import load_problems, load_tokenizer
from sparkrl.lora.merge import merge_adapter
from sparkrl.lora.zero import zero_adapter
from sparkrl.models.muse_spark import MuseSparkForCausalLM
from sparkrl.quant.convert import dequantize_checkpoint
from sparkrl.rollout import RolloutPool
from sparkrl.trainer.group import TrainerGroup
from sparkrl.types import Sampling

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart"
STEPS, SEED = 3, 11


class _StockText(MuseSparkPreTrainedModel, GenerationMixin):
    """transformers' decoder under the checkpoint's names; its own router, experts and norms, head and cap by hand."""

    def __init__(self, config: MuseSparkTextConfig) -> None:
        super().__init__(config)
        self.model = nn.Module()
        self.model.language_model = MuseSparkTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, **kwargs: object) -> torch.Tensor:
        hidden = self.model.language_model(input_ids, use_cache=False).last_hidden_state
        cap = self.config.final_logit_softcapping
        return cap * torch.tanh(self.lm_head(hidden) * self.config.output_multiplier / cap)


def _config() -> Config:
    cfg = Config(recipe_name="test", seed=SEED)
    cfg.model.path, cfg.model.max_tokens = str(RECIPE / "checkpoint"), 256
    cfg.rollout.dtype, cfg.rollout.num_threads, cfg.rollout.kv_cache_gib = Precision.float32, 1, 0.1
    cfg.rollout.max_num_seqs = 32
    cfg.trainer.dtype, cfg.trainer.num_threads = Precision.float32, 1
    cfg.trainer.optimizer.lr = 1e-3
    return cfg


async def _train_and_sample(folder: Path, max_tokens: int, cfg: Config):
    """Train on the server's own responses; save the adapter in `folder`, and sample from it as it is served."""
    problems = load_problems(RECIPE / "heldout.parquet", load_tokenizer(cfg.model.path), max_prompt_tokens=120).problems
    rng = np.random.default_rng(SEED)
    pool, group = None, None
    try:
        pool = await RolloutPool.start(cfg)
        group = await TrainerGroup.start(cfg, run_seed=SEED)
        await pool.load_adapter(await group.publish(0))
        for step in range(STEPS):
            sampling = Sampling(num_responses=2, max_tokens=max_tokens, seed=step)
            groups = await pool.sample(problems[4 * step : 4 * step + 4], sampling)
            await group.step(random_batch(groups, rng, version=step))
            await pool.load_adapter(await group.publish(step + 1))
        await group.save(folder)
        return await pool.sample(problems[-4:], Sampling(num_responses=4, max_tokens=max_tokens, seed=99))
    finally:
        if group is not None:
            await group.stop()
        if pool is not None:
            await pool.stop()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Folder of the saved adapter, and the groups that the server sampled with it."""
    folder = tmp_path_factory.mktemp("adapter")
    ray.init(include_dashboard=False, num_cpus=8, log_to_driver=False, object_store_memory=100 << 20)
    try:
        return folder, asyncio.run(_train_and_sample(folder, 64, _config()))
    finally:
        ray.shutdown()


@pytest.fixture(scope="module")
def dequantized(tmp_path_factory):
    """The published weights in plain BF16."""
    folder = tmp_path_factory.mktemp("dequantized") / "checkpoint"
    dequantize_checkpoint(RECIPE / "checkpoint", folder)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.get_slice("model.language_model.layers.3.mlp.experts.down_proj").get_dtype() == "BF16"
    return folder


def _largest_dlogp(model: nn.Module, groups) -> float:
    """Largest |dlogp| of the sampled tokens, nats; the model routes for itself."""
    largest = 0.0
    for group in groups:
        for response in group.responses:
            ids = torch.from_numpy(np.concatenate([group.problem.prompt_ids, response.token_ids]).astype(np.int64))
            with torch.no_grad():
                out = model(ids[None, :-1])
            logits = (out if isinstance(out, torch.Tensor) else out.logits)[0]
            log_probs = logits.double().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            scored = log_probs[len(group.problem.prompt_ids) - 1 :].numpy()
            largest = max(largest, float(np.abs(scored - response.log_probs).max()))
    return largest


@pytest.mark.parametrize("model_class", [MuseSparkForCausalLM, _StockText], ids=["sparkrl", "transformers"])
def test_served_adapter_in_stock_peft_gives_the_same_log_probs(served, dequantized, model_class):
    adapter, groups = served
    # the class is shared with the multimodal model, whose config it would look for otherwise
    config = MuseSparkTextConfig.from_pretrained(dequantized)
    base = model_class.from_pretrained(dequantized, config=config, dtype=torch.float32).eval()
    assert {parameter.dtype for parameter in base.parameters()} == {torch.float32}
    control = _largest_dlogp(base, groups)
    largest = _largest_dlogp(peft.PeftModel.from_pretrained(base, adapter).eval(), groups)
    tokens = sum(len(response.token_ids) for group in groups for response in group.responses)
    print(f"\n{model_class.__name__}: {tokens} tokens, max |dlogp| {largest:.1e}, without the adapter {control:.1e}")
    assert largest <= 1e-4
    assert control > 1e-2


def test_merged_checkpoint_is_served_and_scored_alike_and_near_the_adapter(served, dequantized, tmp_path):
    adapter, groups = served
    merge_adapter(adapter, tmp_path / "merged")
    cfg = _config()
    cfg.model.path = str(tmp_path / "merged")
    problems = [group.problem for group in groups]

    async def sample():
        pool = await RolloutPool.start(cfg)
        try:
            await pool.load_adapter(zero_adapter(cfg.model.path, cfg.lora))
            return await pool.sample(problems, Sampling(num_responses=4, max_tokens=64, seed=99))
        finally:
            await pool.stop()

    ray.init(include_dashboard=False, num_cpus=8, log_to_driver=False, object_store_memory=100 << 20)
    try:
        found = asyncio.run(sample())
    finally:
        ray.shutdown()
    config = MuseSparkTextConfig.from_pretrained(tmp_path / "merged")
    merged, base = (
        _StockText.from_pretrained(folder, config=config, dtype=torch.float32).eval()
        for folder in (tmp_path / "merged", dequantized)
    )
    largest, rounding, control = (
        _largest_dlogp(merged, found),
        _largest_dlogp(merged, groups),
        _largest_dlogp(base, groups),
    )
    print(f"\nserved merged {largest:.1e}, merged against the adapter {rounding:.1e}, base against it {control:.1e}")
    assert largest <= 1e-4
    assert rounding < control
