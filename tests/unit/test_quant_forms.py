"""Every published form is read as the model's own stacked tensors, with the values that a float64 table gives."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from quant_folders import EXPERTS, IGNORED, INNER, PREFIX, SCHEMES, WIDTH, Weight, build, plain_experts, write
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from sparkrl.errors import CheckpointError
from sparkrl.quant.checkpoint import CheckpointReader
from sparkrl.quant.form import is_ignored
from sparkrl.quant.verify import verify_checkpoint

FORMS = list(SCHEMES)
STACK = PREFIX.format(1)


@pytest.mark.parametrize("form", FORMS)
def test_form_experts_equal_the_table_bit_for_bit(tmp_path, form):
    expected = build(tmp_path, form)
    reader = CheckpointReader(tmp_path)
    assert {name for name in reader.names if reader.is_quantized(name)} == set(expected)
    for name, value in expected.items():
        exact = torch.from_numpy(value)
        assert torch.equal(reader.read(name, dtype=torch.float32), exact.float())
        assert torch.equal(reader.read(name), exact.float().bfloat16())
        assert torch.equal(reader.rows(name, 1, 3), exact.float().bfloat16()[1:3])


@pytest.mark.parametrize("form", FORMS)
def test_form_rows_read_only_their_bytes(tmp_path, form):
    build(tmp_path, form)
    reader = CheckpointReader(tmp_path)
    reader.packed(f"{STACK}.gate_up_proj", 2, 3)
    block, scales = (32, 0) if "mxfp4" in form or form == "quark" else (16, 2 * 4)
    assert reader.bytes_read == 2 * INNER * (WIDTH // 2 + WIDTH // block) + scales


def test_form_plain_experts_one_by_one_are_stacked_lazily(tmp_path):
    tensors = plain_experts(STACK, torch.Generator().manual_seed(3))
    write(tmp_path, tensors, {"model_type": "qwen3_moe", "num_experts": EXPERTS})
    reader = CheckpointReader(tmp_path)
    assert reader.names == (f"{STACK}.down_proj", f"{STACK}.gate_up_proj")
    got = reader.rows(f"{STACK}.gate_up_proj", 3, 4)
    assert torch.equal(got[0], torch.cat([tensors[f"{STACK}.3.{n}_proj.weight"] for n in ("gate", "up")]))
    assert reader.bytes_read == 2 * INNER * WIDTH * 2


@pytest.mark.parametrize("form", ["modelopt", "compressed-tensors", "compressed-tensors-mxfp4", "quark"])
def test_form_linear_module_with_odd_rows_equals_the_table(tmp_path, form):
    weight = Weight(form, 7, 96, torch.Generator().manual_seed(5))
    write(tmp_path, weight.tensors("model.a.q_proj"), {"model_type": "any", "quantization_config": SCHEMES[form]})
    reader = CheckpointReader(tmp_path)
    assert reader.names == ("model.a.q_proj.weight",)
    exact = torch.from_numpy(weight.value())
    assert torch.equal(reader.rows("model.a.q_proj.weight", 2, 7, dtype=torch.float32), exact.float()[2:])


def test_form_gpt_oss_equals_transformers_layout_and_values(tmp_path):
    build(tmp_path, "mxfp4", model_type="gpt_oss", intermediate_size=INNER)
    stored = load_file(tmp_path / "model.safetensors")
    reader = CheckpointReader(tmp_path)
    for part in ("gate_up_proj", "down_proj"):
        theirs = convert_moe_packed_tensors(stored[f"{STACK}.{part}_blocks"], stored[f"{STACK}.{part}_scales"])
        assert reader.shape(f"{STACK}.{part}") == theirs.shape
        assert torch.equal(reader.read(f"{STACK}.{part}"), theirs)


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4"])
def test_form_modelopt_in_hf_quant_config_is_found(tmp_path, algorithm):
    expected = build(tmp_path, "modelopt", quantization_config=None)
    with pytest.raises(CheckpointError, match="no `quantization_config`"):
        CheckpointReader(tmp_path)
    section = {"quant_algo": algorithm, "group_size": 16, "exclude_modules": IGNORED["modelopt"][1]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": section}))
    name = f"{STACK}.down_proj"
    assert torch.equal(
        CheckpointReader(tmp_path).read(name).double(), torch.from_numpy(expected[name]).bfloat16().double()
    )


@pytest.mark.parametrize("form", FORMS)
def test_form_plain_experts_that_are_not_ignored_are_refused(tmp_path, form):
    build(tmp_path, form)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"][IGNORED[form][0]] = ["lm_head"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts.* is bfloat16, but config.json declares"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize(
    ("scheme", "named"),
    [
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt FP8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "groups of 32"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors pack-quantized"),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}}, "quark fp8_e4m3"),
        ({**SCHEMES["quark"], "layer_quant_config": {"*.q_proj": {}}}, "a scheme of its own for some layers"),
        ("nvfp4", "nvfp4"),
    ],
)
def test_form_unknown_scheme_is_named_and_known_ones_listed(tmp_path, scheme, named):
    build(tmp_path, "modelopt", quantization_config=scheme)
    with pytest.raises(CheckpointError, match=rf"{named}(?s:.*)supported: .*nvfp4-pack-quantized.*gpt-oss.*quark"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize(
    ("pattern", "covered"),
    [
        ("model.layers.*.self_attn", True),
        ("model.layers.3.self_attn.q_proj", True),
        ("*q_proj", True),
        ("re:.*self_attn.*", True),
        ("re:self_attn", False),
        ("language_model.layers.3*", False),
        ("language_model.model.layers.3*", True),
        ("model.layers.3.self_attn.q", False),
        ("lm_head", False),
    ],
)
def test_ignored_pattern_covers_modules_as_the_libraries_read_it(pattern, covered):
    assert is_ignored("model.language_model.layers.3.self_attn.q_proj.weight", [pattern]) is covered


def test_ignored_broken_expression_is_named():
    with pytest.raises(CheckpointError, match=r"`re:\(` in the list of ignored modules"):
        is_ignored("a.weight", ["re:("])


def change(folder, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(f"{STACK}.2.up_proj.weight_packed"), r"2\.up_proj\.weight_global_scale` in .* scales a"),
        (lambda t: t.pop(f"{STACK}.2.up_proj.weight_global_scale"), r"2\.up_proj\.weight_global_scale` is absent"),
        (
            lambda t: t.update({f"{STACK}.2.up_proj.weight_packed": torch.zeros(INNER, 31, dtype=torch.uint8)}),
            r"2\.up_proj\.weight_packed` in .* columns a multiple of 16, got: uint8 \(32, 31\)",
        ),
        (
            lambda t: t.update({f"{STACK}.2.up_proj.weight_scale": t[f"{STACK}.2.up_proj.weight_scale"][:-1].clone()}),
            r"2\.up_proj\.weight_scale` in .* must be float8_e4m3fn \(32, 4\), got: float8_e4m3fn \(31, 4\)",
        ),
        (
            lambda t: [t.pop(n) for n in list(t) if n.startswith(f"{STACK}.2.up_proj.")],
            r"expert 2 of `.*gate_up_proj` is absent or lacks a part",
        ),
        (
            lambda t: t.update({f"{PREFIX.format(0)}.1.down_proj.weight": torch.zeros(WIDTH, INNER)}),
            r"1\.down_proj\.weight` is float32 \(64, 32\), `.*0\.down_proj\.weight` is bfloat16",
        ),
    ],
)
def test_form_expert_that_differs_from_the_others_is_named(tmp_path, edit, message):
    build(tmp_path, "compressed-tensors")
    change(tmp_path, edit)
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize(
    ("name", "shape", "both"),
    [
        (f"{STACK}.down_proj", (EXPERTS, WIDTH, INNER), (f"{STACK}.down_proj", f"{STACK}.0.down_proj.weight_packed")),
        (f"{STACK}.2.w2.weight", (WIDTH, INNER), (f"{STACK}.2.w2.weight", f"{STACK}.2.down_proj.weight_packed")),
        (
            f"{STACK}.2.up_proj.weight",
            (INNER, WIDTH),
            (f"{STACK}.2.up_proj.weight", f"{STACK}.2.up_proj.weight_packed"),
        ),
    ],
)
def test_form_weight_stored_twice_is_refused_and_both_are_named(tmp_path, name, shape, both):
    build(tmp_path, "compressed-tensors")
    change(tmp_path, lambda tensors: tensors.update({name: torch.zeros(shape, dtype=torch.bfloat16)}))
    with pytest.raises(CheckpointError, match="are the same weight") as caught:
        CheckpointReader(tmp_path)
    assert all(f"`{one}` in model.safetensors" in caught.value.message for one in both)
    # verification lists it, and reads on
    report = verify_checkpoint(tmp_path)
    assert [found.problem for found in report.findings if "are the same weight" in found.problem]


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf, 1e-39])
def test_form_divisor_that_is_no_positive_number_is_refused_where_it_is_read(tmp_path, value):
    build(tmp_path, "compressed-tensors")
    change(tmp_path, lambda t: t[f"{STACK}.2.down_proj.weight_global_scale"].fill_(value))
    reader = CheckpointReader(tmp_path)
    assert reader.rows(f"{STACK}.down_proj", 0, 2).isfinite().all()
    with pytest.raises(CheckpointError, match="1 scales that are not positive numbers"):
        reader.rows(f"{STACK}.down_proj", 2, 3)


def test_form_mxfp4_exponent_nan_is_refused(tmp_path):
    build(tmp_path, "mxfp4")
    change(tmp_path, lambda t: t[f"{STACK}.down_proj_scales"][1, 5].fill_(255))
    with pytest.raises(CheckpointError, match="1 scales that are not positive numbers, the first is 255"):
        CheckpointReader(tmp_path).rows(f"{STACK}.down_proj", 1, 2)
