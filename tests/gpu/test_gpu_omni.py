"""The published form, vision and audio towers in the file, on vLLM's CUDA kernels: text prompts with an adapter."""

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
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from omni_checkpoint import as_omni

from benchmarks import gpu, gpu_model
from sparkrl.rollout.engine import RolloutServer
from sparkrl.types import Group

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("form", ["nvfp4", "bf16"])
def test_omni_text_prompts_with_an_adapter_agree_with_merged_weights(form: str, tmp_path: Path) -> None:
    fields = gpu_model.shape(layers=4)
    flat = gpu_model.build(tmp_path / "flat", fields, tokenizer=gpu.TOKENIZER, nvfp4=form == "nvfp4")
    omni = as_omni(flat, tmp_path / "omni")
    adapter = gpu_model.adapter(fields, version=1, seed=1)

    async def serve() -> list[Group]:
        server = RolloutServer(gpu.spec(omni, max_num_seqs=gpu.SEQUENCES))
        try:
            await server.start()
            await server.load_adapter(adapter)
            return await gpu.sample(
                server, gpu_model.prompts(gpu.SEQUENCES, fields["vocab_size"], length=gpu.PROMPT), gpu.NEW
            )
        finally:
            await server.stop()

    groups = asyncio.run(serve())
    merged = gpu.agreement(gpu_model.Reference(flat, fields, adapter), groups)
    base = gpu.agreement(gpu_model.Reference(flat, fields, None), groups)
    print(json.dumps({"merged": merged, "base": base}))
    assert merged["k3"] < 1.5e-3
    assert base["k3"] > 30 * merged["k3"]
