"""Muse Spark with an adapter on vLLM's CUDA kernels, against transformers in float32 and against the trainer."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import gpu, gpu_model

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["nvfp4", "bf16"])
def figures(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict:
    fields = gpu_model.shape()
    folder = tmp_path_factory.mktemp("model") / request.param
    gpu_model.build(folder, fields, tokenizer=gpu.TOKENIZER, nvfp4=request.param == "nvfp4")
    found = asyncio.run(gpu.measure(folder, fields, with_speed=False))
    print(json.dumps(found, default=str))
    return found


def test_served_adapter_equals_merged_weights(figures: dict) -> None:
    # the base model's own distance to float32 is the yardstick: the adapter may add its rounding, no more
    assert figures["base_vs_base"]["k3"] < 1e-3
    assert figures["adapter_vs_merged"]["k3"] < 1.5 * figures["base_vs_base"]["k3"]


def test_served_adapter_is_not_the_base_model(figures: dict) -> None:
    assert figures["adapter_vs_base"]["k3"] > 30 * figures["adapter_vs_merged"]["k3"]


def test_served_adapter_after_swaps_is_the_newest(figures: dict) -> None:
    assert figures["after_swaps_vs_merged"]["k3"] < 1.5 * figures["base_vs_base"]["k3"]


def test_start_up_proofs_see_every_group_act(figures: dict) -> None:
    proofs = figures["start"]["proofs"]
    assert all(proofs[name] > 1e-3 for name in ("attention", "latent", "experts"))


def test_trainer_agrees_with_the_server_under_replay(figures: dict) -> None:
    trainer = figures["trainer"]
    assert trainer["k3"] < 2e-3 and trainer["k3"] < trainer["k3_no_replay"]


def test_swap_stays_in_memory_and_is_quick(figures: dict) -> None:
    assert figures["swap"]["into_buffers_ms"] < 200
