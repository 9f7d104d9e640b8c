"""rsLoRA and a rank of its own on the experts, trained and served, against stock PEFT on the dequantized checkpoint."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import peft
import pytest
import ray
import torch
from test_served_equals_peft import RECIPE, _config, _largest_dlogp, _StockText, _train_and_sample
from transformers import MuseSparkTextConfig

from sparkrl.quant.convert import dequantize_checkpoint


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys")  # PEFT looks for them among modules only
def test_served_adapter_with_rslora_and_expert_rank_in_stock_peft_gives_the_same_log_probs(tmp_path: Path):
    cfg = _config()
    cfg.lora.rank, cfg.lora.alpha, cfg.lora.rslora, cfg.lora.expert_rank = 12, 8, True, 20
    adapter = tmp_path / "adapter"
    ray.init(include_dashboard=False, num_cpus=8, log_to_driver=False, object_store_memory=100 << 20)
    try:
        groups = asyncio.run(_train_and_sample(adapter, 32, cfg))
    finally:
        ray.shutdown()
    saved = json.loads((adapter / "adapter_config.json").read_text())
    assert saved["use_rslora"] and set(saved["rank_pattern"].values()) == {20}
    dequantize_checkpoint(RECIPE / "checkpoint", tmp_path / "plain")
    config = MuseSparkTextConfig.from_pretrained(tmp_path / "plain")
    base = _StockText.from_pretrained(tmp_path / "plain", config=config, dtype=torch.float32).eval()
    control = _largest_dlogp(base, groups)
    largest = _largest_dlogp(peft.PeftModel.from_pretrained(base, adapter).eval(), groups)
    print(f"\nmax |dlogp| {largest:.1e}, without the adapter {control:.1e}")
    assert largest <= 1e-4
    assert control > 1e-2
