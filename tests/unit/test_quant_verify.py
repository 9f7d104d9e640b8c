"""`verify-checkpoint` finds everything that is wrong, says where, and finds nothing wrong with a good checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from quant_folders import EXPERTS, INNER, PREFIX, SCHEMES, WIDTH, build
from safetensors.torch import load_file, save_file

from sparkrl.cli import main
from sparkrl.quant.verify import verify_checkpoint

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart" / "checkpoint"
STACK = PREFIX.format(1)
EXPECTED = {
    "lm_head.weight": (8, WIDTH),
    **{f"{PREFIX.format(i)}.gate_up_proj": (EXPERTS, 2 * INNER, WIDTH) for i in range(3)},
    **{f"{PREFIX.format(i)}.down_proj": (EXPERTS, WIDTH, INNER) for i in range(3)},
}


def problems(folder: Path, expected: dict[str, tuple[int, ...]] | None = None) -> list[str]:
    return [finding.problem for finding in verify_checkpoint(folder, expected or EXPECTED).findings]


def edit(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("form", list(SCHEMES))
def test_verify_good_checkpoint_has_no_findings_and_everything_is_read(tmp_path, form):
    build(tmp_path, form)
    report = verify_checkpoint(tmp_path, EXPECTED)
    assert report.findings == [] and report.coverage == "checked"
    assert (report.num_tensors, report.num_quantized) == (7, 4)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert 0 < size - report.bytes_read < 20_000  # the header


def test_verify_lists_every_problem_of_one_checkpoint(tmp_path):
    build(tmp_path, "modelopt")

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][2, 3] = torch.nan
        tensors["lm_head.weight"][2, 4] = torch.inf
        tensors[f"{STACK}.1.down_proj.weight_scale_2"].fill_(0)
        tensors[f"{STACK}.2.up_proj.weight_scale"].view(torch.uint8)[0, 0] = 0x80  # -0
        tensors[f"{STACK}.3.gate_proj.input_scale"].fill_(torch.nan)
        tensors["model.extra.weight"] = torch.zeros(2, 2)
        del tensors[f"{PREFIX.format(2)}.0.up_proj.weight_scale_2"]

    edit(tmp_path, damage)
    file = tmp_path / "model.safetensors"
    found = "\n".join(problems(tmp_path, EXPECTED | {"model.norm.weight": (WIDTH,)}))
    for expected in (
        "`lm_head.weight` in model.safetensors holds 2 values that are NaN or infinite",
        f"`{STACK}.1.down_proj.weight_scale_2` in {file} has 1 scales that are not positive numbers, the first is 0.0",
        f"`{STACK}.2.up_proj.weight_scale` in {file} has 1 scales that are not positive numbers, the first is -0.0",
        f"`{STACK}.3.gate_proj.input_scale` in model.safetensors has scales that are not positive",
        "`model.extra.weight` in model.safetensors has no place in the model",
        "`model.norm.weight` (64,) is absent",
        f"`{PREFIX.format(2)}.0.up_proj.weight_scale_2` is absent",
    ):
        assert expected in found, expected


def test_verify_shape_that_the_model_does_not_have_is_named(tmp_path):
    build(tmp_path, "quark")
    found = problems(tmp_path, EXPECTED | {"lm_head.weight": (9, WIDTH)})
    assert found == ["`lm_head.weight` in model.safetensors has shape (8, 64), the model asks for (9, 64)"]


def test_verify_quantized_though_ignored_is_named(tmp_path):
    build(tmp_path, "modelopt-stacked")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["ignore"].append("model.layers.2.*")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert sorted(problems(tmp_path)) == [
        f"`{PREFIX.format(2)}.{part}` in model.safetensors is quantized, but config.json lists it as ignored"
        for part in ("down_proj", "gate_up_proj")
    ]


def test_verify_damaged_shards_and_wrong_index_are_all_named(tmp_path):
    build(tmp_path, "mxfp4")
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    index = {}
    for i, file in enumerate(("a", "b", "c")):
        part = names[i::3]
        save_file({name: tensors[name] for name in part}, tmp_path / f"{file}.safetensors")
        index |= {name: f"{file}.safetensors" for name in part}
    index["ghost"] = "a.safetensors"
    index["lost"] = "d.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    content = (tmp_path / "b.safetensors").read_bytes()
    (tmp_path / "b.safetensors").write_bytes(content[:-100])
    shutil.move(tmp_path / "c.safetensors", tmp_path.parent / f"{tmp_path.name}-c.safetensors")
    os.symlink(tmp_path.parent / f"{tmp_path.name}-c.safetensors", tmp_path / "c.safetensors")
    found = "\n".join(problems(tmp_path))
    for expected in (
        "b.safetensors is damaged or truncated",
        "c.safetensors points outside the checkpoint",
        "shard d.safetensors is missing",
        "says that a.safetensors holds `ghost`, but it does not",
    ):
        assert expected in found


def test_verify_command_prints_a_table_and_fails(tmp_path, capsys):
    assert main(["verify-checkpoint", str(QUICKSTART)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("OK: ModelOpt NVFP4, 147 tensors (12 quantized), 3.1 MB read") and "checked" in out
    bad = shutil.copytree(QUICKSTART, tmp_path / "bad")
    edit(bad, lambda t: t.pop("model.language_model.norm.weight"))
    assert main(["verify-checkpoint", str(bad)]) == 1
    out = capsys.readouterr().out
    assert "1 problems in" in out and "`model.language_model.norm.weight` (128,) is absent" in out and "FAIL: " in out


def test_verify_command_json_names_what_is_wrong(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "muse_spark_text"}')
    assert main(["verify-checkpoint", str(tmp_path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert "holds neither model.safetensors nor" in report["findings"][0]["problem"]
    assert report["findings"][0]["hint"]


def test_commands_dequantize_and_quantize_return_the_same_weights(tmp_path, capsys):
    plain, again = tmp_path / "plain", tmp_path / "again"
    assert main(["dequantize", str(QUICKSTART), "--out", str(plain)]) == 0
    assert main(["quantize", str(plain), "--out", str(again), "--form", "compressed-tensors"]) == 0
    captured = capsys.readouterr()
    assert f"wrote {again}" in captured.out and "model.safetensors" in captured.err
    assert main(["verify-checkpoint", str(again)]) == 0
    assert main(["quantize", str(QUICKSTART), "--out", str(tmp_path / "no")]) == 1
    assert "quantized already" in capsys.readouterr().err
    assert main(["dequantize", str(tmp_path / "nowhere"), "--out", str(tmp_path / "no")]) == 1
    assert "is not a folder" in capsys.readouterr().err
