"""The compiled layers and the packed attention kernel on CUDA, against float32 on the CPU."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from transformers import MuseSparkTextConfig

from sparkrl.config.schema import LoraConfig
from sparkrl.lora.targets import add_adapter, resolve_targets
from sparkrl.models.compiled import compile_layers
from sparkrl.models.packing import PackedRows, packed_attention
from sparkrl.models.registry import family_of

pytestmark = pytest.mark.gpu


def _distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.cpu().double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("window", [None, 9])
def test_gpu_packed_attention_is_near_float32_with_grouped_queries_and_a_window(window: int | None) -> None:
    torch.manual_seed(0)
    positions = torch.cat([torch.arange(n) for n in (40, 1, 77, 12)])[None]
    leaves = [torch.randn(1, heads, 130, 64).bfloat16() for heads in (8, 2, 2)]
    weights = torch.randn(1, 130, 8, 64)

    def run(device: str, dtype: torch.dtype) -> list[Tensor]:
        q, k, v = (leaf.to(device, dtype).requires_grad_() for leaf in leaves)
        rows = PackedRows.from_position_ids(positions.to(device))
        out = packed_attention(q, k, v, rows, scale=0.2, window=window)
        return [out.detach(), *torch.autograd.grad((out * weights.to(out)).sum(), (q, k, v))]

    for found, wanted in zip(run("cuda", torch.bfloat16), run("cpu", torch.float32), strict=True):
        assert _distance(found, wanted) < 0.01


def test_gpu_compiled_model_is_as_near_to_float32_as_the_eager_one() -> None:
    torch.manual_seed(0)
    family = family_of("muse_spark_text")
    config = MuseSparkTextConfig(
        vocab_size=64,
        hidden_size=128,
        num_hidden_layers=3,
        mlp_layer_types=["sparse", "dense", "sparse"],
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        layer_rope_theta=[10000.0, 0.0, 10000.0],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=128,
        moe_hidden_size=128,
        moe_intermediate_size=64,
        num_local_experts=16,
        num_experts_per_tok=2,
        sliding_window=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=0,
        eos_token_id=1,
    )
    model: Any = family.build(config, torch.bfloat16)
    lora = LoraConfig(rank=8, alpha=8)
    model = add_adapter(model, lora, resolve_targets(lora.targets, family, model), family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.05)
    ids = torch.randint(0, 64, (1, 301))
    routes = [torch.rand(300, 16).argsort(-1)[:, :2] for _ in range(2)]

    def run(model: nn.Module, device: str, backend: str | None) -> tuple[Tensor, dict[str, Tensor]]:
        model = copy.deepcopy(model).to(device)
        compile_layers(model, backend)
        routers = [module for module in model.modules() if isinstance(module, family.router_class)]
        for router, ids_TK in zip(routers, routes, strict=True):
            router.replay = functools.partial(lambda ids_TK, live_TK: ids_TK, ids_TK.to(device))
        out = model(
            input_ids=ids[:, :-1].to(device),
            position_ids=(torch.arange(300)[None] % 37).to(device),
            targets=ids[:, 1:].to(device),
        )
        out.log_probs.mean().backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        return out.log_probs.detach(), grads

    wanted = run(copy.deepcopy(model).float(), "cpu", None)
    eager, compiled = run(model, "cuda", None), run(model, "cuda", "inductor")
    assert _distance(compiled[0], wanted[0]) < 1.5 * _distance(eager[0], wanted[0])
    for name, grad in wanted[1].items():
        assert _distance(compiled[1][name], grad) < 1.5 * _distance(eager[1][name], grad) + 0.01, name
