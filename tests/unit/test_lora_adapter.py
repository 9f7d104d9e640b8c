"""The adapter against PEFT itself: targets, expert layers, files, packing."""

import copy
import dataclasses
import json
import resource

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from test_models_muse_spark import randomize, tiny_config
from torch.nn.functional import linear, silu

from sparkrl.config.schema import LoraConfig
from sparkrl.errors import AdapterError, CheckpointError, ConfigError
from sparkrl.lora import peft_format
from sparkrl.lora.targets import add_adapter, initial_rows, resolve_targets
from sparkrl.models.grouped import GroupedRows, grouped_linear
from sparkrl.models.registry import family_of

FAMILY = family_of("muse_spark_text")
LORA = LoraConfig(rank=4, alpha=8)


def base_model(dtype=torch.float32):
    model = FAMILY.build(tiny_config(), dtype)
    randomize(model)
    return model


def adapted(targets=("attention", "latent", "experts"), dtype=torch.float32):
    model = base_model(dtype)
    lora = dataclasses.replace(LORA, targets=list(targets))
    chosen = resolve_targets(lora.targets, FAMILY, model)
    model = add_adapter(model, lora, chosen, FAMILY)
    generator = torch.Generator().manual_seed(9)
    for value in trainable(model).values():
        value.data.copy_(torch.randn(value.shape, generator=generator) * 0.2)
    return model, peft_format.adapter_config(lora, chosen, FAMILY, base_model="tiny")


def trainable(model):
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    model, config = adapted()
    folder = tmp_path_factory.mktemp("adapter")
    tensors = peft_format.to_peft({name: value.detach() for name, value in trainable(model).items()})
    peft_format.save_adapter(folder, tensors, config)
    return model, folder, tensors, config


def test_adapter_export_loaded_by_peft_gives_the_same_logits_and_gradients(exported):
    ours, folder, _, _ = exported
    plain = base_model()
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(plain), folder, is_trainable=True)
    ids = torch.randint(1, 97, (2, 30), generator=torch.Generator().manual_seed(1))
    pull = torch.randn(2, 30, 97, generator=torch.Generator().manual_seed(2))
    mine, stock = ours(ids).logits, theirs(ids).logits
    assert (stock - plain(ids).logits).abs().max() > 0.1
    assert (mine - stock).abs().max() <= 1e-5
    (mine * pull).sum().backward()
    (stock * pull).sum().backward()
    got = peft_format.to_peft({name: value.grad for name, value in trainable(ours).items()})
    want = {name.replace(".default", ""): value.grad for name, value in trainable(theirs).items()}
    assert set(got) == set(want)
    for name, value in want.items():
        assert (got[name] - value).abs().max() <= 1e-5 * max(1.0, float(value.abs().max())), name
    assert all(value.grad is None for name, value in ours.named_parameters() if "lora_" not in name)


def test_adapter_disabled_gives_the_base_model(exported):
    ours = exported[0]
    ids = torch.arange(1, 40)[None]
    with ours.disable_adapter(), torch.no_grad():
        assert torch.equal(ours(ids).logits, base_model()(ids).logits)


def test_expert_lora_equals_a_loop_over_merged_experts():
    model, _ = adapted(["experts"])
    layer = model.base_model.model.model.language_model.layers[2].mlp.experts
    base = layer.get_base_layer()
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(25, base.hidden_dim, generator=generator, requires_grad=True)
    ids = torch.rand(25, 8, generator=generator).argsort(-1)[:, :2]
    weights = torch.rand(25, 2, generator=generator, requires_grad=True)
    pull = torch.randn(25, base.hidden_dim, generator=generator)
    a1, b1 = layer.lora_gate_up_A["default"].double(), layer.lora_gate_up_B["default"].double()
    a2, b2 = layer.lora_down_A["default"].double(), layer.lora_down_B["default"].double()
    gate_up, down = base.gate_up_proj.double() + 2.0 * b1 @ a1, base.down_proj.double() + 2.0 * b2 @ a2
    scale = 1 + base.post_expert_norm.weight.double()
    rows = []
    for token in range(25):
        total = 0
        for slot in range(2):
            expert = int(ids[token, slot])
            gate, up = linear(x[token].double(), gate_up[expert]).chunk(2)
            y = linear(silu(gate) * up, down[expert]) * scale
            y = y / torch.sqrt((y * y).mean() + base.post_expert_norm.eps)
            total = total + weights[token, slot].double() * y
        rows.append(total)
    want = torch.stack(rows)
    got = layer(x, ids, weights)
    assert (got - want).abs().max() <= 1e-5
    wanted = torch.autograd.grad((want * pull).sum(), [x, weights, *trainable(layer).values()])
    found = torch.autograd.grad((got * pull).sum(), [x, weights, *trainable(layer).values()])
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= 2e-5 * max(1.0, float(other.abs().max()))


def test_expert_without_tokens_gets_zero_gradient():
    model, _ = adapted(["experts"])
    layer = model.base_model.model.model.language_model.layers[1].mlp.experts
    ids = torch.tensor([[0, 3], [3, 0]])
    layer(torch.randn(2, 48), ids, torch.ones(2, 2)).sum().backward()
    grad = layer.lora_down_B["default"].grad
    assert grad[[0, 3]].abs().sum() > 0 and grad[[1, 2, 4, 5, 6, 7]].abs().sum() == 0


@pytest.mark.parametrize("width", [4, 16])
def test_grouped_linear_any_width_equals_each_expert_alone(width):
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, 5, (30, 2), generator=generator)
    rows = GroupedRows.sort(ids, 6)  # expert 5 gets nothing
    x = torch.randn(30, 8, generator=generator).bfloat16()
    weight = torch.randn(6, width, 8, generator=generator).bfloat16()
    got = grouped_linear(rows.gather(x), weight, rows)[rows.inverse_TK]
    want = torch.stack([weight[expert].double() @ x[t].double() for t in range(30) for expert in ids[t]])
    assert (got.flatten(0, 1) - want).abs().max() <= 2**-8 * want.abs().max()  # one rounding to bfloat16


def test_adapter_on_bfloat16_base_is_float32():
    model, _ = adapted(dtype=torch.bfloat16)
    assert {value.dtype for value in trainable(model).values()} == {torch.float32}
    model(torch.arange(1, 20)[None]).logits.sum().backward()
    assert {value.grad.dtype for value in trainable(model).values()} == {torch.float32}


@pytest.mark.parametrize(
    ("targets", "count", "experts"),
    [(["attention"], 20, 0), (["latent"], 6, 0), (["experts"], 0, 3), (["q_proj", "mlp.experts"], 4, 3)],
)
def test_resolve_targets_group_or_name_selects_its_modules(targets, count, experts):
    with torch.device("meta"):
        model = FAMILY.build(tiny_config(), torch.float32)
    chosen = resolve_targets(targets, FAMILY, model)
    assert (len(chosen.linear_names), len(chosen.expert_names)) == (count, experts)
    assert not any("mlp.gate_proj" in name for name in chosen.linear_names)


@pytest.mark.parametrize(("target", "near"), [("q_prj", "q_proj"), ("atention", "attention"), ("expert", "experts")])
def test_resolve_targets_no_match_lists_near_names(target, near):
    with pytest.raises(ConfigError, match=target) as caught:
        resolve_targets([target], FAMILY, base_model())
    assert near in caught.value.message


@pytest.mark.parametrize("target", ["gate", "lm_head", "input_layernorm", "embed_tokens"])
def test_resolve_targets_module_without_adapter_form_is_refused(target):
    with pytest.raises(ConfigError, match="cannot carry an adapter"):
        resolve_targets([target], FAMILY, base_model())


def test_initial_rows_any_split_gives_the_same_values():
    name = "layers.0.mlp.experts.lora_gate_up_A.default"
    whole = initial_rows(name, (6, 3, 50), 0, 6, seed=7)
    split = torch.cat([initial_rows(name, (6, 3, 50), 0, 2, seed=7), initial_rows(name, (6, 3, 50), 2, 6, seed=7)])
    assert torch.equal(whole, split)
    assert not torch.equal(whole, initial_rows(name, (6, 3, 50), 0, 6, seed=8))
    bound = 50**-0.5
    assert whole.abs().max() <= bound and abs(float(whole.std()) - bound / 3**0.5) < 0.1 * bound
    assert not initial_rows(name.replace("_A", "_B"), (6, 50, 3), 0, 6, seed=7).any()


def test_peft_format_round_trip_is_exact(exported):
    model, folder, tensors, config = exported
    read, found = peft_format.load_adapter(folder)
    assert found == config and set(read) == set(tensors)
    back = peft_format.from_peft(read, rank=4)
    assert set(back) == set(trainable(model))
    for name, value in trainable(model).items():
        assert torch.equal(back[name], value), name


def test_peft_format_expert_layout_is_expert_major_rows_and_rank_major_columns():
    a = torch.arange(2 * 3 * 4.0).view(2, 3, 4)  # E 2, R 3, in 4
    b = torch.arange(2 * 5 * 3.0).view(2, 5, 3)  # E 2, out 5, R 3
    out = peft_format.to_peft({"x.experts.lora_down_A.default": a, "x.experts.lora_down_B.default": b})
    assert torch.equal(out["x.experts.lora_A.weight"][1 * 3 + 2], a[1, 2])  # expert 1, rank 2
    assert torch.equal(out["x.experts.lora_B.weight"][:, 2 * 2 + 1], b[1, :, 2])


def test_pack_round_trip_owns_its_memory_and_checks_the_sum(exported):
    _, _, tensors, config = exported
    packed = peft_format.pack(tensors, config, 5)
    assert packed.version == 5
    unpacked = peft_format.unpack(packed)
    assert all(torch.equal(unpacked[name], value) for name, value in tensors.items())
    next(iter(unpacked.values())).add_(1)
    assert all(torch.equal(peft_format.unpack(packed)[name], value) for name, value in tensors.items())
    damaged = np.array(packed.buffer)
    damaged[3] ^= 1
    with pytest.raises(AdapterError, match="damaged"):
        peft_format.unpack(dataclasses.replace(packed, buffer=damaged))


def test_load_adapter_missing_damaged_or_foreign_is_a_checkpoint_error(exported, tmp_path):
    _, _, tensors, config = exported
    with pytest.raises(CheckpointError, match="missing"):
        peft_format.load_adapter(tmp_path)
    peft_format.save_adapter(tmp_path, tensors, config)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(CheckpointError, match="plain LoRA"):
        peft_format.load_adapter(tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="damaged"):
        peft_format.load_adapter(tmp_path)


def test_write_safetensors_that_does_not_fit_is_a_checkpoint_error_and_leaves_the_older_file(tmp_path):
    path = tmp_path / "a.safetensors"
    peft_format.write_safetensors(path, {"w": torch.ones(4)}, {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write .*a\.safetensors: [\s\S]*free disk space"):
            peft_format.write_safetensors(path, {"w": torch.zeros(100_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]
    assert load_file(path)["w"].tolist() == [1.0] * 4
    with pytest.raises(CheckpointError, match="cannot write"):
        peft_format.write_safetensors(tmp_path / "missing" / "a.safetensors", {"w": torch.ones(4)}, {})
