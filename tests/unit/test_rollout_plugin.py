"""The plugin's parts without an engine: arithmetic against loops in float64, guards, configs, bytes."""

from __future__ import annotations

import pkgutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    MuseSparkConfig,
    MuseSparkTextConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from sparkrl.errors import VersionError
from sparkrl.lora.peft_format import unpack
from sparkrl.models.registry import FAMILIES
from sparkrl.rollout import plugin
from sparkrl.rollout.engine import response_seed
from sparkrl.rollout.last_words import last_words
from sparkrl.rollout.plugin import route_capture, seeded_sampling
from sparkrl.rollout.plugin.experts import CpuExperts
from sparkrl.rollout.plugin.hf_config import CPU_CLASSES, CUDA_CLASSES, adapt, routing
from sparkrl.rollout.plugin.layers import CenteredNorm, FinalNorm, InputScaledNorm, ResidualGate, unit_rms
from sparkrl.rollout.plugin.punica import active_slots, add_lora
from sparkrl.rollout.plugin.qwen3 import SoftmaxRouter
from sparkrl.rollout.plugin.versions import require_checked
from sparkrl.rollout.probe import make_adapter
from sparkrl.rollout.spec import CUDA_TARGETS

EPS = 1e-5


def rms(x, eps=EPS):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def test_norms_weight_before_or_after_match_float64():
    random = np.random.default_rng(0)
    x, w = random.standard_normal((5, 16)), random.standard_normal(16) * 0.3
    expected = {
        CenteredNorm: rms(x) * (1 + w),
        InputScaledNorm: rms(x * (1 + w)),
        FinalNorm: rms(x) * w,
    }
    for kind, value in expected.items():
        norm = kind(16, EPS)
        norm.weight.data = torch.from_numpy(w).float()
        found = norm(torch.from_numpy(x).float(), torch.float32)
        np.testing.assert_allclose(found.numpy(), value, atol=2e-6)


def test_norm_of_bfloat16_input_is_rounded_once():
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    norm = InputScaledNorm(32, EPS)
    norm.weight.data = torch.randn(32, generator=torch.Generator().manual_seed(1))
    exact = rms(x.double().numpy() * (1 + norm.weight.double().numpy()))
    assert torch.equal(norm(x, torch.bfloat16), torch.from_numpy(exact).float().bfloat16())
    assert unit_rms(x, EPS).dtype == torch.float32


def test_residual_gate_saturated_keeps_the_floor():
    gate = ResidualGate(2, 0.5)
    gate.gate.data = torch.tensor([0.0, 100.0])
    found = gate(torch.ones(1, 2), torch.zeros(1, 2))[0]
    # sigmoid(0) = 1/2, so alpha = sqrt(3/4); at saturation alpha^2 stops at 1e-3.
    np.testing.assert_allclose(found.numpy(), [np.sqrt(0.75), np.sqrt(1e-3)], rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_lora_mixed_slots_match_float64(dtype):
    random = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, generator=random).to(dtype) for n in ((6, 8), (6, 5)))
    a = tuple(torch.randn(2, 1, 4, 8, generator=random) for _ in range(2))
    b = tuple(torch.randn(2, 1, width, 4, generator=random) for width in (3, 2))
    slots = torch.tensor([0, 1, -1, 0, 1, 0])
    expected = y.double().clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            parts = [
                b_[slot, 0].double() @ (a_[slot, 0].double() @ x[row].double()) for a_, b_ in zip(a, b, strict=True)
            ]
            expected[row] += 0.5 * torch.cat(parts)
    add_lora(y, x, a, b, (3, 2), active_slots(slots), 0.5)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(y.double(), expected, atol=tolerance, rtol=tolerance)


def test_active_slots_one_adapter_for_all_needs_no_rows():
    assert active_slots(torch.tensor([2, 2, 2])) == [(2, None)]
    assert active_slots(torch.tensor([-1, -1])) == []
    ((slot, rows),) = active_slots(torch.tensor([-1, 0, -1, 0]))
    assert slot == 0 and rows.tolist() == [1, 3]


@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("slots", [[-1] * 6, [0] * 6, [0, -1, 1, 1, 0, -1]])
def test_experts_adapter_norm_and_weights_match_a_loop_in_float64(slots, with_norm):
    experts, tokens, top_k, width, inner, rank = 4, 6, 2, 16, 24, 8
    random = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=random)

    x, w13, w2, w = randn(tokens, width), randn(experts, 2 * inner, width), randn(experts, width, inner), randn(width)
    a13, b13 = randn(2, experts, rank, width), randn(2, experts, 2 * inner, rank) * 0.2
    a2, b2 = randn(2, experts, rank, inner), randn(2, experts, width, rank) * 0.2
    ids = torch.stack([torch.randperm(experts, generator=random)[:top_k] for _ in range(tokens)])
    weights = torch.rand(tokens, top_k, generator=random)
    layer = CpuExperts.__new__(CpuExperts)
    layer.moe_config = SimpleNamespace(moe_parallel_config=SimpleNamespace(tp_size=1))
    norm = InputScaledNorm(width, EPS)
    norm.weight.data = w
    layer.process_weights_after_loading(SimpleNamespace(**({"post_expert_norm": norm} if with_norm else {})))
    layer._lora_context = SimpleNamespace(
        punica_wrapper=SimpleNamespace(token_lora_indices=torch.tensor(slots)),
        adapter_enabled=torch.tensor([1, 1, 0]),
        w13_lora_a_stacked=(a13,),
        w13_lora_b_stacked=(b13,),
        w2_lora_a_stacked=(a2,),
        w2_lora_b_stacked=(b2,),
    )
    output = torch.empty(tokens, width)
    none = (None, None, None, None, None, None)
    layer.apply(output, x, w13, w2, weights, ids, None, experts, *none, False)

    expected = np.zeros((tokens, width))
    for token, slot in enumerate(slots):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            up, down = w13[expert].double(), w2[expert].double()
            if slot >= 0:
                up = up + b13[slot, expert].double() @ a13[slot, expert].double()
                down = down + b2[slot, expert].double() @ a2[slot, expert].double()
            gate, value = (up @ x[token].double()).chunk(2)
            y = (down @ (torch.nn.functional.silu(gate) * value)).numpy()
            expected[token] += weight * (rms(y * (1 + w.double().numpy())) if with_norm else y)
    np.testing.assert_allclose(output.numpy(), expected, atol=2e-5 * max(1.0, np.abs(expected).max()))


def test_adapt_nested_config_becomes_the_text_part_without_quantization():
    text = MuseSparkTextConfig(num_hidden_layers=4, mlp_layer_types=["dense", "sparse", "sparse", "dense"])
    nested = MuseSparkConfig(text_config=text.to_dict(), quantization_config={"quant_method": "modelopt"})
    found = adapt(nested)
    assert found.model_type == "muse_spark_text"
    assert found.architectures == ["MuseSpark1xForCausalLM"]
    assert getattr(found, "quantization_config", None) is None
    assert routing(found).layers == (1, 2)


def test_adapt_other_families_keep_their_architecture_and_unknown_ones_are_left_alone():
    config = adapt(Qwen3MoeConfig(quantization_config={"quant_method": "modelopt"}, mlp_only_layers=[0, 2]))
    assert config.architectures == ["Qwen3MoeForCausalLM"] and getattr(config, "quantization_config", None) is None
    assert routing(config).layers == (1, *range(3, 24))
    assert routing(adapt(Qwen3Config())).layers == ()
    foreign = LlamaConfig(architectures=["LlamaForCausalLM"])
    assert adapt(foreign) is foreign and foreign.architectures == ["LlamaForCausalLM"]


def test_every_family_has_a_class_for_each_device_and_what_carries_its_adapters():
    names = {family.name for family in FAMILIES}
    assert set(CPU_CLASSES) == set(CUDA_CLASSES) == set(CUDA_TARGETS) == names
    for architecture, served_class in CPU_CLASSES.values():
        found = pkgutil.resolve_name(served_class)
        assert found.supports_lora and found.__module__.startswith("sparkrl.")
        assert getattr(found, "is_3d_moe_weight", False) == (architecture != "Qwen3ForCausalLM")
    stock = pkgutil.resolve_name(CUDA_CLASSES["qwen3_moe"][1])  # Muse Spark's needs the CUDA release of vLLM
    assert stock.is_3d_moe_weight and stock.__mro__[1].__module__ == "vllm.model_executor.models.qwen3_moe"


@pytest.mark.parametrize("renormalize", [True, False])
def test_softmax_router_weights_are_those_of_the_largest_probabilities(renormalize):
    router = SoftmaxRouter.__new__(SoftmaxRouter)
    router.top_k, router.renormalize = 3, renormalize
    logits = torch.randn(20, 8, generator=torch.Generator().manual_seed(1))
    weights, ids = router._compute_routing(None, logits, None)
    probs = torch.softmax(logits.double(), -1)
    want, chosen = probs.topk(3)
    if renormalize:
        want = want / want.sum(-1, keepdim=True)
    order = ids.sort(-1)
    assert ids.dtype == torch.int32 and torch.equal(order.values.long(), chosen.sort(-1).values)
    by_expert = want.gather(1, chosen.argsort(-1))
    assert (weights.gather(1, order.indices) - by_expert).abs().max() <= 1e-6


def test_adapt_flat_config_loses_its_quantization_section():
    flat = MuseSparkTextConfig(num_hidden_layers=4, quantization_config={"quant_method": "modelopt"})
    assert getattr(adapt(flat), "quantization_config", None) is None


def test_adapt_other_config_is_returned_as_it_came():
    other = PreTrainedConfig()
    other.model_type = "dummy_muse_spark_text"
    assert adapt(other) is other and other.architectures is None


def test_require_checked_other_version_names_both():
    with pytest.raises(VersionError, match=r"`some patch` was checked with vLLM 0\.32\.0, found: 0\.31\.9"):
        require_checked("some patch", found="0.31.9")
    require_checked("some patch", found="0.32.0")


def test_register_twice_patches_once_and_reports_all_live():
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    plugin.register()
    patched = CPUModelRunner.sample_tokens
    route_capture.apply()
    seeded_sampling.apply()
    plugin.register()
    assert CPUModelRunner.sample_tokens is patched
    report = plugin.report()
    assert report["error"] is None and all(report[name] is True for name in plugin.PATCHES)


def test_response_seed_depends_on_every_part():
    seeds = {response_seed(s, uid, i) for s in (0, 1) for uid in ("a", "b") for i in (0, 1)}
    assert len(seeds) == 8 and all(0 <= seed < 2**63 for seed in seeds)
    assert response_seed(0, "a", 1) == response_seed(0, "a", 1)


SMALL = {
    "vocab_size": 16,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "moe_hidden_size": 6,
    "moe_intermediate_size": 5,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}


def test_make_adapter_groups_left_out_have_zero_b_only():
    config = MuseSparkTextConfig(num_hidden_layers=1, **SMALL)
    adapter = make_adapter(config, rank=2, alpha=4, groups=("latent",), b_std=1.0, version=0)
    shapes = {spec.name.split("layers.0.")[1]: spec.shape for spec in adapter.manifest}
    assert shapes["mlp.experts.base_layer.lora_A.weight"] == (3 * 2, 6)
    assert shapes["mlp.experts.base_layer.lora_B.weight"] == (2 * 5, 2 * 3)
    assert shapes["mlp.experts.lora_A.weight"] == (3 * 2, 5)
    assert shapes["mlp.experts.lora_B.weight"] == (6, 2 * 3)
    nonzero = {name for name, tensor in unpack(adapter).items() if "lora_B" in name and tensor.any()}
    assert {name.split(".")[-3] for name in nonzero} == {"pre_expert_proj", "post_expert_proj"}


def test_last_words_of_a_killed_engine_do_not_point_at_a_trace_that_is_not_there():
    from vllm.v1.engine.exceptions import EngineDeadError

    found = last_words(EngineDeadError())
    assert "died without a message" in found and "stack trace" not in found
    assert last_words(ValueError("no such dtype")) == "ValueError: no such dtype"
