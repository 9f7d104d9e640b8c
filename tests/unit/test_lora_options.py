"""Options of the adapter: rsLoRA, a rank of its own on experts, dropout, initial values, advice on learning rates."""

from __future__ import annotations

import dataclasses

import peft
import pytest
import torch
from test_expert_lora import SCALE, TOP_K, Frozen, _inputs, _routes
from test_lora_adapter import FAMILY, base_model, trainable
from torch import nn
from torch.nn.functional import dropout, linear, silu

from sparkrl.config.rules import check, learning_rate_advice
from sparkrl.config.schema import Config, LoraConfig
from sparkrl.errors import ConfigError
from sparkrl.lora import peft_format
from sparkrl.lora.targets import add_adapter, initial_rows, resolve_targets
from sparkrl.models.experts import ExpertFactors, run_experts
from sparkrl.models.grouped import GroupedRows

OPTIONS = LoraConfig(rank=4, alpha=8, rslora=True, expert_rank=3)


def adapted(lora: LoraConfig) -> tuple[nn.Module, dict[str, object]]:
    model = base_model()
    chosen = resolve_targets(list(lora.targets), FAMILY, model)
    model = add_adapter(model, lora, chosen, FAMILY)
    generator = torch.Generator().manual_seed(9)
    for value in trainable(model).values():
        value.data.copy_(torch.randn(value.shape, generator=generator) * 0.1)
    return model, peft_format.adapter_config(lora, chosen, FAMILY, base_model="tiny")


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys")  # PEFT looks for them among modules only
def test_adapter_with_rslora_and_expert_rank_is_the_same_in_stock_peft(tmp_path):
    ours, config = adapted(OPTIONS)
    tensors = peft_format.to_peft({name: value.detach() for name, value in trainable(ours).items()})
    peft_format.save_adapter(tmp_path, tensors, config)
    theirs = peft.PeftModel.from_pretrained(base_model(), tmp_path, is_trainable=True)
    ranks = {module.r["default"] for module in theirs.modules() if hasattr(module, "parameter_name")}
    assert ranks == {3}
    ids = torch.randint(1, 97, (2, 30), generator=torch.Generator().manual_seed(1))
    pull = torch.randn(2, 30, 97, generator=torch.Generator().manual_seed(2))
    mine, stock = ours(ids).logits, theirs(ids).logits
    assert (stock - base_model()(ids).logits).abs().max() > 0.1
    assert (mine - stock).abs().max() <= 1e-5
    (mine * pull).sum().backward()
    (stock * pull).sum().backward()
    got = peft_format.to_peft({name: value.grad for name, value in trainable(ours).items()})
    want = {name.replace(".default", ""): value.grad for name, value in trainable(theirs).items()}
    for name, value in want.items():
        assert (got[name] - value).abs().max() <= 1e-5 * max(1.0, float(value.abs().max())), name


def test_adapter_scales_of_its_file_are_those_it_was_trained_with():
    ours, config = adapted(OPTIONS)
    experts = ours.base_model.model.model.language_model.layers[1].mlp.experts
    linear_layer = ours.base_model.model.model.language_model.layers[1].self_attn.q_proj
    assert experts.scaling["default"] == pytest.approx(8 / 3**0.5)
    assert linear_layer.scaling["default"] == pytest.approx(8 / 2)
    at = "base_model.model.model.language_model.layers.1"
    for part in ("mlp.experts", "mlp.experts.base_layer"):
        assert peft_format.rank_and_scale(config, f"{at}.{part}.lora_B.weight") == (3, pytest.approx(8 / 3**0.5))
    assert peft_format.rank_and_scale(config, f"{at}.self_attn.q_proj.lora_B.weight") == (4, pytest.approx(4.0))


def test_adapter_differences_name_the_key():
    _, config = adapted(OPTIONS)
    _, other = adapted(LoraConfig(rank=4, alpha=16))
    assert list(peft_format.differences(config, config)) == []
    assert list(peft_format.differences(config, other)) == [
        ("lora.alpha", 8, 16),
        ("lora.rslora", True, False),
        ("lora.expert_rank", 3, None),
    ]


def test_initial_values_are_distributed_as_pefts():
    model, targets = base_model(), resolve_targets(["experts"], FAMILY, base_model())
    lora = LoraConfig(rank=16, alpha=8, targets=["experts"])
    names = {
        name: p.shape for name, p in add_adapter(model, lora, targets, FAMILY).named_parameters() if ".lora_" in name
    }
    ours = peft_format.to_peft({name: initial_rows(name, s, 0, s[0], seed=3) for name, s in names.items()})
    config = peft.LoraConfig(r=16, target_parameters=list(FAMILY.expert_parameters), target_modules=[])
    theirs = {
        name.replace(".default", ""): value.detach()
        for name, value in peft.get_peft_model(base_model(), config).named_parameters()
        if ".lora_" in name
    }
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        if ".lora_B." in name:
            assert not value.any() and not ours[name].any()
            continue
        bound = value.shape[1] ** -0.5
        for one in (value, ours[name]):  # uniform in [-bound, bound]
            assert one.abs().max() <= bound
            assert one.abs().max() == pytest.approx(bound, rel=0.01)
            assert one.square().mean() == pytest.approx(bound**2 / 3, rel=0.05)


def test_dropout_zeroes_inputs_of_each_row_and_leaves_the_base_alone():
    ids, base = _routes("spread")[:12], Frozen(torch.float32, norm=True)
    x, weights, *factors = _inputs(ids, 3, torch.float32)
    rows = GroupedRows.sort(ids, base.num_experts)
    torch.manual_seed(5)
    got = run_experts(base, x, ids, weights, ExpertFactors(*factors, scale=SCALE, dropout=0.5))
    torch.manual_seed(5)  # the same draws
    keep_x = dropout(torch.ones(len(rows.token_M), base.hidden_dim), 0.5)
    keep_h = dropout(torch.ones(len(rows.token_M), base.intermediate_dim), 0.5)
    a1, b1, a2, b2 = (factor.double() for factor in factors)
    want = torch.zeros(len(ids), base.hidden_dim, dtype=torch.float64)
    for token in range(len(ids)):
        for slot in range(TOP_K):
            e, row, value = int(ids[token, slot]), int(rows.inverse_TK[token, slot]), x[token].double()
            delta = SCALE * linear(linear(value * keep_x[row], a1[e]), b1[e])
            gate, up = (linear(value, base.gate_up_proj[e].double()) + delta).chunk(2)
            h = silu(gate) * up
            y = linear(h, base.down_proj[e].double()) + SCALE * linear(linear(h * keep_h[row], a2[e]), b2[e])
            y = y * (1 + base.norm.weight.double())
            want[token] += weights[token, slot].double() * y / torch.sqrt((y * y).mean() + base.norm.eps)
    assert (got - want).abs().max() <= 1e-5


def test_dropout_acts_in_training_only():
    model, config = adapted(dataclasses.replace(OPTIONS, dropout=0.3))
    plain, _ = adapted(OPTIONS)
    ids = torch.arange(1, 30)[None]
    assert config["lora_dropout"] == 0.0  # stock PEFT refuses any other value beside adapted parameters
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, plain.eval()(ids).logits)
        torch.manual_seed(1)
        first = model.train()(ids).logits
        torch.manual_seed(1)
        assert torch.equal(model(ids).logits, first)
        assert (model(ids).logits - first).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dropout": 0.1}, "`trainer.num_mini_batches` is 1"),
        ({"dropout": 1.0}, r"`lora.dropout` must lie in \[0, 1\)"),
        ({"expert_rank": 0}, "`lora.expert_rank` must be positive"),
    ],
)
def test_check_refuses_lora_options_that_cannot_work(changes, message):
    config = Config(recipe_name="test")
    config.trainer.num_mini_batches = 1
    for key, value in changes.items():
        setattr(config.lora, key, value)
    with pytest.raises(ConfigError, match=message):
        check(config)


@pytest.mark.parametrize(("lr", "advised"), [(1e-6, "1e-05"), (4e-6, "4e-05"), (1e-5, None), (1e-4, None), (0.0, None)])
def test_learning_rate_of_full_finetuning_gets_one_advice(lr, advised):
    config = Config(recipe_name="test")
    config.trainer.optimizer.lr = lr
    advice = learning_rate_advice(config)
    assert advice is None if advised is None else f"trainer.optimizer.lr={advised}" in advice
