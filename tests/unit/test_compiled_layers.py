"""Compiled layers: the eager numbers, one compilation for all layers and token counts, and when they step aside."""

from __future__ import annotations

import copy
import functools
import logging
import shutil
from collections.abc import Iterator
from typing import Any

import peft
import pytest
import torch
from tiny_layers import (
    MIXED,
    TRACED,
    VOCABULARY,
    adapted_model,
    assert_near,
    distance,
    muse_spark,
    qwen3,
    training_step,
)
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import PreTrainedConfig

from sparkrl.models.compiled import compile_layers, projections
from sparkrl.models.experts import ExpertFactors, RoutedExperts, composed_experts
from sparkrl.models.fused_experts import FusedExperts
from sparkrl.models.grouped import GroupedRows
from sparkrl.models.kernel_experts import KernelExperts
from sparkrl.models.muse_spark import InputScaledNorm


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    # pytest would collect the compiler's trace, which takes longer than compiling
    logger = logging.getLogger("torch.__trace")
    before, logger.disabled = logger.disabled, True
    yield
    logger.disabled = before


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_three_layers_at_three_token_counts_compile_each_region_once(checkpointing: bool) -> None:
    torch._dynamo.reset()
    counters.clear()
    model = adapted_model(muse_spark(["sparse"] * 3), torch.float32, checkpointing=checkpointing)
    eager = {tokens: training_step(model, tokens) for tokens in (40, 77, 130)}
    compile_layers(model, TRACED)
    num_graphs = []
    for tokens, wanted in eager.items():
        assert_near(training_step(model, tokens), wanted, 3e-4)
        num_graphs.append(counters["stats"]["unique_graphs"])
    # four regions, and two of them again for the first layer, whose input wants a gradient only where it is recomputed
    assert num_graphs == [4 if checkpointing else 6] * 3


@pytest.mark.parametrize("config", [muse_spark(MIXED), qwen3()], ids=["muse_spark", "qwen3_moe"])
def test_compiled_bfloat16_is_as_near_to_float32_as_eager(config: PreTrainedConfig) -> None:
    model = adapted_model(config, torch.bfloat16)
    wide = copy.deepcopy(model).float()
    wanted = training_step(wide, 130)
    eager = training_step(model, 130)
    compile_layers(model, TRACED)
    compiled = training_step(model, 130)
    assert distance(compiled[0], wanted[0]) < 1.5 * distance(eager[0], wanted[0])
    for name, grad in wanted[1].items():
        assert distance(compiled[1][name], grad) < 1.5 * distance(eager[1][name], grad) + 0.01, name


@pytest.mark.parametrize("config", [muse_spark(MIXED), qwen3()], ids=["muse_spark", "qwen3_moe"])
def test_compiled_layers_without_adapter_or_gradient_equal_eager_ones_and_train_after(config: PreTrainedConfig) -> None:
    torch._dynamo.reset()  # what is compiled without gradients must not serve a training step
    model: Any = adapted_model(config, torch.float32)
    trained = training_step(model, 40)
    ids = torch.randint(0, VOCABULARY, (1, 51), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(50)[None] % 13

    def scores() -> Tensor:
        return model(input_ids=ids[:, :-1], position_ids=positions, targets=ids[:, 1:]).log_probs

    for backend in (None, TRACED):
        compile_layers(model, backend)
        with torch.no_grad():
            adapted = scores()
            with model.disable_adapter():
                plain = scores()
        if backend is None:
            wanted = adapted, plain
    assert not torch.allclose(wanted[0], wanted[1], atol=1e-3)
    torch.testing.assert_close((adapted, plain), wanted, rtol=1e-5, atol=1e-6)
    assert_near(training_step(model, 40), trained, 3e-4)


def test_dropout_in_training_is_left_to_the_modules_and_evaluation_compiles() -> None:
    model = adapted_model(muse_spark(MIXED), torch.float32, dropout=0.3)
    found = {}
    for backend in (None, TRACED):
        compile_layers(model, backend)
        torch.manual_seed(3)
        found[backend] = training_step(model, 40)
    assert_near(found[TRACED], found[None], 1e-9)
    torch._dynamo.reset()
    counters.clear()
    model.eval()
    evaluated = training_step(model, 40)
    assert counters["stats"]["unique_graphs"] > 0
    compile_layers(model, None)
    assert_near(evaluated, training_step(model, 40), 3e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"use_dora": True},
        {"lora_bias": True},
        {"lora_dropout": 0.1},
        "second adapter",
        "merged",
        "hook",
        "bias",
    ],
    ids=str,
)
def test_linear_layers_that_compute_more_than_lora_are_not_plain(change: Any) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(8, 8, bias=change == "bias")

    options = change if isinstance(change, dict) else {}
    if "lora_bias" in options:
        options = options | {"target_modules": ["proj"]}
    config = peft.LoraConfig(r=2, **({"target_modules": ["proj"]} | options))
    model: Any = peft.get_peft_model(Holder(), peft.LoraConfig(r=2, target_modules=["proj"])).train()
    assert projections(model.base_model.model.proj) is not None or change == "bias"
    model = peft.get_peft_model(Holder(), config).train()
    if change == "second adapter":
        model.add_adapter("other", config)
        model.base_model.set_adapter(["default", "other"])
    elif change == "merged":
        model.merge_adapter()
    elif change == "hook":
        model.base_model.model.proj.register_forward_hook(lambda *arguments: None)
    assert projections(model.base_model.model.proj) is None


class _Small(RoutedExperts):
    def __init__(self, dtype: torch.dtype, *, norm: bool) -> None:
        super().__init__()
        self.num_experts, self.hidden_dim, self.intermediate_dim = 6, 24, 16
        self.act_fn = nn.SiLU()
        self.gate_up_proj = nn.Parameter(0.3 * torch.randn(6, 32, 24), requires_grad=False)
        self.down_proj = nn.Parameter(0.3 * torch.randn(6, 24, 16), requires_grad=False)
        if norm:
            self.post_expert_norm = InputScaledNorm(24, eps=1e-5)
            self.post_expert_norm.weight = nn.Parameter(0.3 * torch.randn(24), requires_grad=False)
        self.to(dtype)


def _fused_and_parts(
    dtype: torch.dtype, backend: str | None, *, norm: bool, lora: bool, own_kernels: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Value and gradients of the fused function in `dtype`, and of the differentiable parts in float64."""
    torch.manual_seed(0)
    base = _Small(dtype, norm=norm)
    base.compile_backend = backend
    ids = torch.rand(50, 5).argsort(-1)[:, :2]  # the last expert has no row
    inputs = [torch.randn(50, 24), torch.rand(50, 2)]
    if lora:
        inputs += [0.3 * torch.randn(shape) for shape in ((6, 4, 24), (6, 32, 4), (6, 4, 16), (6, 24, 4))]
    inputs = [tensor.to(dtype).requires_grad_() for tensor in inputs]
    if own_kernels:
        out = KernelExperts.apply(base, 1.5, inputs[0], ids, *inputs[1:])
    else:
        out = FusedExperts.apply(base, GroupedRows.sort(ids, 6, pad=False), 1.5, *inputs)
    found = [out.detach(), *torch.autograd.grad(out.double().square().sum(), inputs)]
    wide_base = copy.deepcopy(base).double()
    if norm:  # its own module stays in float32
        wide_base.post_expert_norm.forward = functools.partial(_norm, wide_base.post_expert_norm)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    factors = ExpertFactors(*wide[2:], scale=1.5) if lora else None
    out = composed_experts(wide_base, wide[0], GroupedRows.sort(ids, 6), wide[1], factors)
    return found, [out.detach(), *torch.autograd.grad(out.square().sum(), wide)]


def _norm(norm: Any, y: Tensor) -> Tensor:
    z = y * (1 + norm.weight)
    return z / (z.square().mean(-1, keepdim=True) + norm.eps).sqrt()


@pytest.mark.parametrize("lora", [False, True], ids=["frozen", "lora"])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("own_kernels", [False, True], ids=["regions", "one_region"])
def test_fused_experts_equal_their_parts_in_float64(
    dtype: torch.dtype, limit: float, norm: bool, lora: bool, own_kernels: bool
) -> None:
    found, wanted = _fused_and_parts(dtype, TRACED, norm=norm, lora=lora, own_kernels=own_kernels)
    if not norm:
        limit = max(limit, 1e-7)  # the parts round to float32 on the way
    for one, other in zip(found, wanted, strict=True):
        assert distance(one, other) < limit


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor runs g++, which is not here")
@pytest.mark.parametrize("own_kernels", [False, True], ids=["regions", "one_region"])
def test_fused_experts_through_inductor_equal_their_parts(own_kernels: bool) -> None:
    found, wanted = _fused_and_parts(torch.bfloat16, "inductor", norm=True, lora=True, own_kernels=own_kernels)
    for one, other in zip(found, wanted, strict=True):
        assert distance(one, other) < 0.02


def test_unpadded_rows_lie_as_a_stable_sort_by_expert() -> None:
    ids = torch.tensor([[3, 0], [0, 2], [3, 2]])
    rows = GroupedRows.sort(ids, 5, pad=False)
    assert rows.token_M.tolist() == [0, 1, 1, 2, 0, 2]
    assert rows.pair_M.tolist() == [1, 2, 3, 5, 0, 4]
    assert rows.inverse_TK.tolist() == [[4, 0], [1, 2], [5, 3]]
    assert rows.offsets_E.tolist() == [2, 2, 4, 6, 6]
