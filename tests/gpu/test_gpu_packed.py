"""`trainer.base=packed` on a GPU: the same numbers as the BF16 base, in less memory."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import gpu, gpu_model
from sparkrl.types import FinishReason, Group, Response

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
        reason="FSDP2 of older torch shards floating point parameters only; requirements/cuda.lock has a newer one",
    ),
]


def test_packed_base_scores_and_trains_as_bf16_in_less_memory(tmp_path: Path) -> None:
    fields = gpu_model.shape(experts=64)
    folder = gpu_model.build(tmp_path / "nvfp4", fields, tokenizer=gpu.TOKENIZER)
    random = np.random.default_rng(0)
    experts, top_k, layers = (fields[f"num_{n}"] for n in ("local_experts", "experts_per_tok", "hidden_layers"))
    shape = (gpu.PROMPT + gpu.NEW - 1, layers, experts)
    groups = []
    for problem in gpu_model.prompts(16, fields["vocab_size"], length=gpu.PROMPT):
        response = Response(
            uid=f"{problem.uid}/0",
            token_ids=random.integers(2, fields["vocab_size"], gpu.NEW).astype(np.int32),
            log_probs=np.full(gpu.NEW, -6.0, dtype=np.float32),
            routed_experts=random.random(shape).argsort(-1)[..., :top_k].astype(np.uint8),
            policy_version=0,
            finish_reason=FinishReason.LENGTH,
            text="",
        )
        groups.append(Group(problem=problem, responses=(response,)))
    adapter = gpu_model.adapter(fields, version=1, seed=1)
    plain = gpu.train(folder, groups, adapter)
    packed = gpu.train(folder, groups, adapter, "trainer.base=packed")
    print(plain, packed)
    assert packed["k3"] == pytest.approx(plain["k3"], rel=1e-5)
    assert packed["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-3)
    assert packed["peak_mem_gib"] < plain["peak_mem_gib"]
