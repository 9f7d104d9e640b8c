"""Forms of an adapter on disk: round trips, and each against what reads it; export and merge for the quickstart."""

from __future__ import annotations

import dataclasses
import json
import resource
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import PackedLoRALayerWeights
from vllm.lora.peft_helper import PEFTHelper

from sparkrl.cli import main
from sparkrl.config.schema import LoraConfig
from sparkrl.errors import CheckpointError
from sparkrl.lora.forms import Form, Heads, convert, deinterleave, form_of, interleave
from sparkrl.lora.merge import export_adapter, merge_adapter
from sparkrl.lora.peft_format import load_adapter, save_adapter, unpack
from sparkrl.lora.zero import zero_adapter
from sparkrl.models.registry import load_config
from sparkrl.quant.checkpoint import CheckpointReader

E, R, H, INNER = 5, 3, 8, 6
HEADS = Heads(query=16, key=8, dim=4)
AT = "base_model.model.model.language_model.layers.2"
CONFIG = {"peft_type": "LORA", "r": R, "lora_alpha": 5, "target_modules": ["mlp.post_expert_proj"], "bias": "none"}
QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart" / "checkpoint"


def adapter(seed=0):
    random = torch.Generator().manual_seed(seed)
    widths = {f"self_attn.{name}_proj": (H, rows) for name, rows in (("q", 16), ("k", 8), ("v", 8), ("gate", 16))}
    widths |= {"self_attn.o_proj": (16, H), "mlp.pre_expert_proj": (H, H), "mlp.post_expert_proj": (H, H)}
    out = {}
    for name, (width, rows) in widths.items():
        out[f"{AT}.{name}.lora_A.weight"] = torch.randn(R, width, generator=random)
        out[f"{AT}.{name}.lora_B.weight"] = torch.randn(rows, R, generator=random)
    for name, width, rows in (("mlp.experts.base_layer", H, 2 * INNER), ("mlp.experts", INNER, H)):
        out[f"{AT}.{name}.lora_A.weight"] = torch.randn(E * R, width, generator=random)
        out[f"{AT}.{name}.lora_B.weight"] = torch.randn(rows, R * E, generator=random)
    modules = sorted({".".join(name.split(".")[-2:]) for name in widths})
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return dict(sorted(out.items())), {**CONFIG, "target_modules": modules, "target_parameters": experts}


def product(tensors, module, expert=None):
    """float64 B A of a fused module, of one expert by its rows and columns."""
    a, b = (tensors[f"{AT}.{module}.lora_{factor}.weight"].double() for factor in "AB")
    if expert is None:
        return b @ a
    return b[:, [r * E + expert for r in range(R)]] @ a[expert * R : (expert + 1) * R]


@pytest.mark.parametrize("form", [Form.peft, Form.peft_2d, Form.vllm_native])
@pytest.mark.parametrize("extra", [{}, {"rank_pattern": {"mlp.experts.down_proj": R}, "alpha_pattern": {"o_proj": 9}}])
def test_every_form_goes_there_and_back_to_the_bit(form, extra):
    tensors, config = adapter()
    config |= extra
    there, described = convert(tensors, config, form, heads=HEADS)
    assert form_of(there) is form
    back, found = convert(there, described, Form.peft, heads=HEADS)
    assert back.keys() == tensors.keys() and all(torch.equal(back[name], value) for name, value in tensors.items())
    assert found == config
    for other in Form:
        again, _ = convert(*convert(there, described, other, heads=HEADS), form, heads=HEADS)
        assert again.keys() == there.keys() and all(torch.equal(again[n], value) for n, value in there.items())


def test_2d_form_is_packed_by_vllm_as_the_fused_one_is_stacked():
    tensors, config = adapter()
    single, described = convert(tensors, config, Form.peft_2d, heads=None)
    lora = LoRAModel.from_lora_tensors(1, single, PEFTHelper.from_dict(described), device="cpu")
    at = "model.language_model.layers.2.mlp.experts"
    order = [f"{at}.{e}.{part}_proj" for e in range(E) for part in ("gate", "down", "up")]
    assert set(order) <= set(lora.loras)
    packed = PackedLoRALayerWeights.pack_moe([lora.loras[name] for name in order], at)
    packed.optimize()
    for e in range(E):
        gate, up = product(tensors, "mlp.experts.base_layer", e).chunk(2)
        for i, expected in enumerate((gate, product(tensors, "mlp.experts", e), up)):
            found = packed.lora_b[i][e].double() @ packed.lora_a[i][e].double()
            torch.testing.assert_close(found, expected * 5 / R, rtol=1e-5, atol=1e-6)


class SingleExperts(nn.Module):
    """A layer whose experts are modules of their own, under the names that PEFT finds them by."""

    def __init__(self):
        super().__init__()
        experts = nn.ModuleList()
        for _ in range(E):
            expert = nn.Module()
            expert.gate_proj, expert.up_proj = (nn.Linear(H, INNER, bias=False) for _ in range(2))
            expert.down_proj = nn.Linear(INNER, H, bias=False)
            experts.append(expert)
        mlp = nn.Module()
        mlp.experts = experts
        layer = nn.Module()
        layer.mlp = mlp
        self.model = nn.Module()
        self.model.language_model = nn.Module()
        self.model.language_model.layers = nn.ModuleList([nn.Module(), nn.Module(), layer])


def test_2d_form_is_loaded_by_stock_peft(tmp_path):
    tensors, config = adapter()
    experts = {name: value for name, value in tensors.items() if ".experts" in name}
    single, described = convert(experts, config | {"target_modules": []}, Form.peft_2d, heads=None)
    save_adapter(tmp_path, single, described | {"task_type": None})
    plain = SingleExperts()
    weights = {name: value.detach().clone() for name, value in plain.named_parameters()}
    merged = peft.PeftModel.from_pretrained(plain, tmp_path).merge_and_unload()
    for name, value in merged.named_parameters():
        *_, e, part, _ = name.split(".")
        if part == "down_proj":
            added = product(tensors, "mlp.experts", int(e))
        else:
            added = product(tensors, "mlp.experts.base_layer", int(e)).chunk(2)[part == "up_proj"]
        torch.testing.assert_close(
            value.detach().double(), weights[name].double() + added * 5 / R, rtol=1e-5, atol=1e-5
        )


def test_native_form_adds_to_vllms_fused_rows_what_the_four_adapters_add():
    tensors, config = adapter()
    native, described = convert(tensors, config, Form.vllm_native, heads=HEADS)
    at = "base_model.model.model.layers.2"
    assert {name.split("layers.2.")[1].split(".lora_")[0] for name in native} == {
        "self_attn.qkv_proj",
        "self_attn.o_proj",
        "feed_forward.pooler",
        "feed_forward.unpooler",
        "feed_forward.experts",
        "feed_forward.experts.base_layer",
    }
    helper = PEFTHelper.from_dict(described)
    rank, scale = helper.get_rank_and_scaling("model.layers.2.self_attn.qkv_proj")
    assert (rank, scale) == (4 * R, pytest.approx(5 / R))
    assert helper.get_rank_and_scaling("model.layers.2.self_attn.o_proj") == (R, 5 / R)
    found = (
        native[f"{at}.self_attn.qkv_proj.lora_B.weight"].double()
        @ native[f"{at}.self_attn.qkv_proj.lora_A.weight"].double()
    )
    row = 0
    for part, rows in (("q", 16), ("k", 8), ("v", 8), ("gate", 16)):
        whole = product(tensors, f"self_attn.{part}_proj")
        for head in range(rows // 4):
            for i in range(4):
                # vLLM rotates pairs: of the halves [0 1 | 2 3] of a head it has rows 0, 2, 1, 3
                source = head * 4 + ((0, 2, 1, 3)[i] if part in "qk" else i)
                torch.testing.assert_close(found[row], whole[source])
                row += 1
    assert row == len(found)


def test_interleave_has_its_inverse():
    rows = torch.arange(24.0)[:, None]
    assert interleave(rows, 8).flatten().tolist()[:8] == [0, 4, 1, 5, 2, 6, 3, 7]
    assert torch.equal(deinterleave(interleave(rows, 8), 8), rows)


def test_forms_refuse_what_they_cannot_say():
    tensors, config = adapter()
    with pytest.raises(CheckpointError, match=r"native form depends on the widths .*\n\nhint: name its checkpoint"):
        convert(tensors, config, Form.vllm_native, heads=None)
    fewer = {name: value for name, value in tensors.items() if ".gate_proj." not in name}
    with pytest.raises(CheckpointError, match=r"lacks `.*self_attn\.gate_proj\.lora_A\.weight`; vLLM fuses"):
        convert(fewer, config, Form.vllm_native, heads=HEADS)
    with pytest.raises(CheckpointError, match="rslora"):
        convert(tensors, config | {"use_rslora": True}, Form.vllm_native, heads=HEADS)
    with pytest.raises(CheckpointError, match=r"rank 4 does not divide"):
        convert(tensors, config | {"r": 4}, Form.peft_2d, heads=None)
    single, described = convert(tensors, config, Form.peft_2d, heads=None)
    del single[f"{AT}.mlp.experts.3.up_proj.lora_B.weight"]
    with pytest.raises(CheckpointError, match=r"lacks `.*experts\.3\.up_proj\.lora_B\.weight`"):
        convert(single, described, Form.peft, heads=None)
    single, described = convert(tensors, config, Form.peft_2d, heads=None)
    single[f"{AT}.mlp.experts.3.up_proj.lora_A.weight"] = torch.ones(R, H)
    with pytest.raises(CheckpointError, match="different `lora_A`"):
        convert(single, described, Form.peft, heads=None)
    native, described = convert(tensors, config, Form.vllm_native, heads=HEADS)
    native["base_model.model.model.layers.2.self_attn.qkv_proj.lora_B.weight"][0, -1] = 1
    with pytest.raises(CheckpointError, match="not block diagonal"):
        convert(native, described, Form.peft, heads=HEADS)
    with pytest.raises(CheckpointError, match=r"expected rank 12 and 56 rows"):
        convert(native, described, Form.peft, heads=dataclasses.replace(HEADS, key=12))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A random rank-4 adapter on everything of the quickstart's model."""
    fresh = zero_adapter(QUICKSTART, LoraConfig(rank=4, alpha=8))
    random = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(value.shape, generator=random) * 0.1 for name, value in unpack(fresh).items()}
    folder = tmp_path_factory.mktemp("saved") / "adapter"
    save_adapter(folder, tensors, fresh.config)
    return folder, tensors, fresh.config


@pytest.fixture(scope="module")
def merged(saved, tmp_path_factory):
    folder = tmp_path_factory.mktemp("merged") / "model"
    assert main(["merge", "--adapter", str(saved[0]), "--out", str(folder), "--shard-gib", "0.001"]) == 0
    return folder


def test_merge_is_the_float64_sum_rounded_once_and_leaves_the_rest_alone(saved, merged):
    _, tensors, _ = saved
    before, after = CheckpointReader(QUICKSTART), CheckpointReader(merged)
    assert before.names == after.names and not after.quantization and len(list(merged.glob("*.safetensors"))) > 2
    touched = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in tensors}
    changed = same = 0
    for name in before.names:
        stem = name.removesuffix(".weight")
        stem = stem.replace("experts.gate_up_proj", "experts.base_layer").replace("experts.down_proj", "experts")
        found = after.read(name)
        if stem not in touched:
            assert torch.equal(found, before.read(name)), name
            continue
        base = before.read(name, dtype=torch.bfloat16).double()
        a, b = (tensors[f"base_model.model.{stem}.lora_{factor}.weight"].double() for factor in "AB")
        if base.ndim == 3:
            experts = len(base)
            added = torch.stack([b[:, e::experts] @ a[4 * e : 4 * e + 4] for e in range(experts)])
        else:
            added = b @ a
        expected = (base + 2.0 * added).bfloat16()
        assert found.dtype == torch.bfloat16
        # float32 sums fall on the other side of a rounding boundary now and then
        assert ((found != expected).sum() <= 1e-3 * found.numel()) and (
            found.double() - expected.double()
        ).abs().max() < 0.02
        same += int((found == expected).sum())
        changed += 1
    assert changed == len(touched) and same > 0
    assert json.loads((merged / "config.json").read_text()).get("quantization_config") is None


def test_merged_model_has_the_log_probs_of_peft_on_the_base_and_of_pefts_own_merge(saved, merged):
    family, text = load_config(QUICKSTART)
    reader = CheckpointReader(QUICKSTART)
    ids = torch.randint(3, text.vocab_size, (4, 40), generator=torch.Generator().manual_seed(1))

    def log_probs(model):
        with torch.no_grad():
            return model(ids).logits.double().log_softmax(-1)

    def model_of(folder, dtype):
        model = family.build(text, dtype)
        found = CheckpointReader(folder)
        state = {
            name: found.read(name, dtype=torch.bfloat16) if found.is_quantized(name) else found.read(name)
            for name in found.names
        }
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert not unexpected and all("inv_freq" in name for name in missing)
        return model.eval()

    base = model_of(QUICKSTART, torch.float32)
    plain = log_probs(base)
    ours = log_probs(model_of(merged, torch.float32))
    wrapped = peft.PeftModel.from_pretrained(base, saved[0])
    theirs = log_probs(wrapped)
    stock = wrapped.merge_and_unload()
    torch.testing.assert_close(log_probs(stock), theirs, rtol=0, atol=2e-4)
    rounded = {name: value.bfloat16() for name, value in stock.state_dict().items()}
    for name in reader.names:
        if reader.is_quantized(name) or reader.dtype(name) == torch.bfloat16:
            found = load_all(merged)[name]
            assert (found != rounded[name]).sum() <= 1e-3 * found.numel(), name
    # rounding to BF16 sends a token elsewhere now and then, so a few log-probs move far
    effect = (theirs - plain).abs().median()
    assert effect > 0.5 and (ours - theirs).abs().median() < 0.05 * effect


_loaded: dict[Path, dict[str, torch.Tensor]] = {}


def load_all(folder):
    if folder not in _loaded:
        _loaded[folder] = {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
    return _loaded[folder]


def test_merged_checkpoint_loads_in_transformers(merged):
    from transformers import MuseSparkTextConfig

    from sparkrl.models.muse_spark import MuseSparkForCausalLM

    config = MuseSparkTextConfig.from_pretrained(merged)
    model = MuseSparkForCausalLM.from_pretrained(merged, config=config, dtype=torch.bfloat16)
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in load_all(merged).items())


def said(config):
    """What an adapter_config.json says, whatever the order of modules, without patterns that say nothing."""
    kept = {name: value for name, value in config.items() if value != {}}
    return kept | {"target_modules": set(config["target_modules"])}


@pytest.mark.parametrize("form", ["peft-2d", "vllm-native"])
def test_export_and_back_writes_the_same_bytes(saved, form, tmp_path, capsys):
    folder, tensors, config = saved
    assert main(["export", "--adapter", str(folder), "--form", form, "--out", str(tmp_path / "there")]) == 0
    back = ["export", "--adapter", str(tmp_path / "there"), "--model", str(QUICKSTART), "--out", str(tmp_path / "back")]
    assert main(back) == 0
    found, described = load_adapter(tmp_path / "back")
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], value) for name, value in tensors.items())
    assert said(described) == said(config)
    assert main([*back[:-1], str(tmp_path / "back")]) == 1
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    "write", [lambda *args, **kwargs: export_adapter(*args, form=Form.peft, **kwargs), merge_adapter]
)
def test_export_and_merge_refuse_what_does_not_belong_together_and_write_nothing(saved, write, tmp_path):
    _, tensors, config = saved

    def refused(match, changed, described=config):
        bad = tmp_path / "bad"
        save_adapter(bad, changed, described)
        with pytest.raises(CheckpointError, match=match):
            write(bad, tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["bad"]

    name = next(name for name in tensors if "layers.3.self_attn.q_proj.lora_B" in name)
    refused(
        "for another model: this muse_spark has no `.*layers.9.*`",
        tensors
        | {
            name.replace("layers.3", "layers.9"): tensors[name].clone(),
            name.replace("layers.3", "layers.9").replace("_B", "_A"): tensors[name].clone(),
        },
    )
    refused(r"lacks `.*layers\.3\.self_attn\.q_proj\.lora_B\.weight`", {n: v for n, v in tensors.items() if n != name})
    refused("has shape .* a rank-8 adapter of this model's", tensors, config | {"r": 8})
    refused(
        "only one of gate_up_proj and down_proj",
        {n: v for n, v in tensors.items() if "layers.2.mlp.experts.base_layer" not in n},
    )


def test_merge_without_the_model_at_hand_names_it(saved, tmp_path):
    _, tensors, config = saved
    save_adapter(tmp_path / "a", tensors, config | {"base_model_name_or_path": "somebody/else"})
    with pytest.raises(
        CheckpointError, match=r"`somebody/else`, which is not on this machine\n\nhint: name its folder with `--model`"
    ):
        merge_adapter(tmp_path / "a", tmp_path / "out")
    assert merge_adapter(tmp_path / "a", tmp_path / "out", model=QUICKSTART) > 50


@pytest.mark.parametrize("command", ["export", "merge"])
def test_disk_that_is_full_leaves_nothing_that_looks_complete(saved, command, tmp_path, capsys):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        assert main([command, "--adapter", str(saved[0]), "--out", str(tmp_path / "out")]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.rglob("config.json")) and not list(tmp_path.rglob("adapter_config.json"))


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3"])
def test_merge_of_other_families_is_what_stock_peft_and_transformers_compute(family, tmp_path):
    """One expert a tensor in the files of the sparse one, and a tied head in the dense one."""
    fields = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    fields |= {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    torch.manual_seed(0)
    if family == "qwen3_moe":
        sparse = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**fields, **sparse))
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**fields, tie_word_embeddings=True))
    base, adapted, out = (tmp_path / name for name in ("base", "adapter", "merged"))
    model.to(torch.bfloat16).save_pretrained(base)
    fresh = zero_adapter(base, LoraConfig(rank=4, alpha=8, targets=["all_linear"]))
    random = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(value.shape, generator=random) * 0.1 for name, value in unpack(fresh).items()}
    save_adapter(adapted, tensors, fresh.config)
    assert merge_adapter(adapted, out) == len(tensors) // 2
    loaded = [
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
        for folder in (base, out)
    ]
    plain, merged = ({name: value.clone() for name, value in model.state_dict().items()} for model in loaded)
    stock = peft.PeftModel.from_pretrained(loaded[0], adapted).merge_and_unload().state_dict()
    assert stock.keys() == merged.keys() == plain.keys()
    changed = [name for name, value in stock.items() if not torch.equal(value, plain[name])]
    assert len(changed) == len(tensors) // 2
    for name, value in stock.items():
        assert (merged[name] != value.bfloat16().float()).sum() <= 1e-3 * value.numel() + 1, name
