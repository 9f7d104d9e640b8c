"""Checkpoints, adapters and command lines that nobody meant are refused in words, never half taken."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from quant_folders import PREFIX, WIDTH, build
from safetensors.torch import load_file, save_file

from sparkrl.cli import main
from sparkrl.errors import CheckpointError
from sparkrl.lora.forms import Form, convert
from sparkrl.lora.merge import merge_adapter
from sparkrl.lora.peft_format import load_adapter, save_adapter
from sparkrl.lora.shared_memory import available_bytes
from sparkrl.models.registry import load_config
from sparkrl.quant.checkpoint import CheckpointReader
from sparkrl.quant.convert import dequantize_checkpoint, quantize_checkpoint
from sparkrl.quant.verify import verify_checkpoint

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart" / "checkpoint"
QUERY = "base_model.model.model.language_model.layers.0.self_attn.q_proj"
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["self_attn.q_proj"]}


def change_config(folder: Path, change) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(change(config)))


def adapter(folder: Path, extra: dict[str, torch.Tensor] | None = None, **changes: object) -> Path:
    tensors = {f"{QUERY}.lora_A.weight": torch.ones(2, 128), f"{QUERY}.lora_B.weight": torch.ones(128, 2)}
    save_adapter(folder, tensors | (extra or {}), CONFIG | changes)
    return folder


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": ["BF16"]},
        {"dtype": None},
        {"shape": [8.5, WIDTH]},
        {"shape": ["8", WIDTH]},
        {"shape": [True, 8 * WIDTH]},
        {"shape": [10**40]},
        {"shape": [2**62, 2**62]},
        {"data_offsets": ["0", "1024"]},
        {"data_offsets": [None, None]},
    ],
)
def test_header_that_cannot_be_true_is_a_damaged_file(tmp_path, entry):
    build(tmp_path, "modelopt")
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["lm_head.weight"] |= entry
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or truncated .*`lm_head\.weight`"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ignore": 5}, "list of modules that are not quantized must hold names, got: 5"),
        ({"ignore": "lm_head"}, "must hold names, got: 'lm_head'"),
        ({"quant_method": "compressed-tensors", "format": ["x"]}, "declares the quantization scheme"),
        ({"quant_method": "quark", "global_quant_config": "fp4"}, "declares the quantization scheme `quark"),
    ],
)
def test_quantization_config_of_another_shape_is_refused_in_words(tmp_path, change, message):
    build(tmp_path, "modelopt")
    change_config(tmp_path, lambda config: config | {"quantization_config": config["quantization_config"] | change})
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(tmp_path)


def test_text_config_that_is_no_object_is_refused_by_reader_and_registry(tmp_path):
    build(tmp_path, "modelopt")
    change_config(tmp_path, lambda config: config | {"model_type": "muse_spark", "text_config": "x"})
    for read in (CheckpointReader, load_config):
        with pytest.raises(CheckpointError, match=r"`text_config` in .*must be an object, got: 'x'"):
            read(tmp_path)


def test_index_with_files_in_a_folder_is_read_and_one_with_a_null_byte_refused(tmp_path):
    build(tmp_path, "modelopt")
    expected = CheckpointReader(tmp_path).read("lm_head.weight")
    names = load_file(tmp_path / "model.safetensors")
    (tmp_path / "part").mkdir()
    shutil.move(tmp_path / "model.safetensors", tmp_path / "part" / "model.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "part/model.safetensors")}))
    assert torch.equal(CheckpointReader(tmp_path).read("lm_head.weight"), expected)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "a\0b")}))
    with pytest.raises(CheckpointError, match="which cannot be"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("field", [{"layer_rope_theta": [1.0]}, {"hidden_size": -4}, {"layer_types": ["x"] * 8}])
def test_verify_config_that_no_model_has_fails(tmp_path, capsys, field):
    folder = shutil.copytree(QUICKSTART, tmp_path / "model")
    change_config(folder, lambda config: config | field)
    assert main(["verify-checkpoint", str(folder), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["findings"][-1]["file"] == "config.json" and report["coverage"].startswith("not checked: ")


def test_verify_unknown_family_is_sound_but_not_covered(tmp_path, capsys):
    build(tmp_path, "modelopt")
    change_config(tmp_path, lambda config: config | {"model_type": "nobody"})
    assert main(["verify-checkpoint", str(tmp_path)]) == 0
    assert "not checked: unknown model family" in capsys.readouterr().out


def test_verify_tied_head_may_be_stored_and_may_be_absent(tmp_path, capsys):
    fields = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1}
    fields |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 4, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **fields}))
    family, config = load_config(tmp_path)
    tensors = {name: torch.ones(shape) for name, shape in family.shapes(config).items()}
    assert "lm_head.weight" not in tensors and tensors["model.embed_tokens.weight"].shape == (8, 4)
    for more in ({}, {"lm_head.weight": torch.ones(8, 4)}):
        save_file(tensors | more, tmp_path / "model.safetensors")
        assert main(["verify-checkpoint", str(tmp_path)]) == 0, capsys.readouterr().out
    save_file(tensors | {"model.more.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    assert main(["verify-checkpoint", str(tmp_path)]) == 1


def test_verify_file_that_cannot_be_read_is_the_only_finding(tmp_path):
    build(tmp_path, "modelopt")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    (found,) = verify_checkpoint(tmp_path, {"lm_head.weight": (8, WIDTH)}).findings
    assert "is damaged or truncated" in found.problem


@pytest.mark.parametrize("size", ["nan", "inf", "1e300", "0", "-1", "many"])
def test_shard_size_that_is_none_is_wrong_usage(tmp_path, capsys, size):
    with pytest.raises(SystemExit) as stopped:
        main(["dequantize", str(QUICKSTART), "--out", str(tmp_path / "out"), "--shard-gib", size])
    assert stopped.value.code == 2 and not any(tmp_path.iterdir())
    assert f"argument --shard-gib: must be a number above 0, got: {size}" in capsys.readouterr().err


def test_target_that_is_a_link_to_nowhere_is_refused_before_the_work(tmp_path):
    os.symlink("nowhere", tmp_path / "out")
    with pytest.raises(CheckpointError, match="out exists already"):
        dequantize_checkpoint(QUICKSTART, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_shards_cut_elsewhere_are_another_conversion(tmp_path):
    def stop(file: str, done: int, total: int) -> None:
        if file.startswith("model-00002"):
            raise KeyboardInterrupt

    # 3.1 and 2.9 MB of 4.8 MB: two shards either way, cut between other tensors
    with pytest.raises(KeyboardInterrupt):
        dequantize_checkpoint(QUICKSTART, tmp_path / "out", shard_bytes=3_100_000, progress=stop)
    with pytest.raises(CheckpointError, match="another conversion, which differs in: shards"):
        dequantize_checkpoint(QUICKSTART, tmp_path / "out", shard_bytes=2_900_000)


def test_leftovers_of_a_run_that_was_killed_at_once_are_not_published(tmp_path):
    work = tmp_path / ".out.partial"
    work.mkdir()
    for name in ("model-00001-of-00009.safetensors", "model-00002-of-00009.safetensors.tmp", ".progress.json.tmp"):
        (work / name).write_bytes(b"cut off")
    dequantize_checkpoint(QUICKSTART, tmp_path / "out")
    files = {path.name for path in (tmp_path / "out").iterdir()}
    others = {path.name for path in QUICKSTART.iterdir()}
    assert files == others and "model.safetensors" in files


@pytest.mark.parametrize("pattern", ["model.layers.9.*", f"{PREFIX.format(1)}.down_proj", "re:layers"])
def test_quantize_pattern_that_matches_nothing_is_named(tmp_path, pattern):
    build(tmp_path / "four", "modelopt")
    dequantize_checkpoint(tmp_path / "four", tmp_path / "plain")
    with pytest.raises(CheckpointError) as refused:
        quantize_checkpoint(tmp_path / "plain", tmp_path / "out", ignore=["lm_head", pattern])
    assert f"matches `{pattern}`" in refused.value.message and PREFIX.format(0) in str(refused.value.hint)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 0}, "`r` in .* must be a whole number above 0, got: 0"),
        ({"r": "8"}, "`r` in .*got: '8'"),
        ({"r": None}, "`r` in .*got: None"),
        ({"lora_alpha": float("nan")}, "`lora_alpha` in .* must be a number, got: nan"),
        ({"rank_pattern": [4]}, "`rank_pattern` in .* whole numbers above 0 by module"),
        ({"rank_pattern": {"q_proj": 0}}, "`rank_pattern`"),
        ({"alpha_pattern": {"q_proj": None}}, "`alpha_pattern`"),
        ({"alpha_pattern": {"(": 1}}, r"`\(` in .* is no regular expression"),
        ({"base_model_name_or_path": 3}, "`base_model_name_or_path`"),
        ({"use_dora": True}, "not a plain LoRA: DoRA"),
    ],
)
def test_adapter_config_that_cannot_be_meant_is_refused_by_its_key(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        load_adapter(adapter(tmp_path, **changes))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (f"{QUERY}.lora_B.bias", torch.ones(128)),
        ("base_model.model.lm_head.weight", torch.ones(512, 128)),
        ("base_model.model.model.language_model.embed_tokens.lora_embedding_A", torch.ones(2, 512)),
        (f"{QUERY}.lora_A.weight", torch.ones(256)),
        (f"{QUERY}.lora_A.weight", torch.ones(2, 128, dtype=torch.int8)),
    ],
)
def test_adapter_tensor_that_would_be_left_out_of_the_merge_is_refused(tmp_path, name, value):
    folder = adapter(tmp_path / "adapter", {name: value})
    with pytest.raises(CheckpointError, match=r"is no LoRA factor"):
        merge_adapter(folder, tmp_path / "out", model=QUICKSTART)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_merge_of_an_adapter_that_is_not_finite_is_refused(tmp_path):
    b = torch.ones(128, 2)
    b[5, 1] = torch.nan
    folder = adapter(tmp_path / "adapter", {f"{QUERY}.lora_B.weight": b})
    with pytest.raises(CheckpointError, match=r"`.*q_proj\.lora_B\.weight` in .* NaN or infinite"):
        merge_adapter(folder, tmp_path / "out", model=QUICKSTART)


def test_2d_form_of_an_adapter_whose_targets_are_an_expression_lists_what_it_has_matched(tmp_path):
    tensors, config = load_adapter(adapter(tmp_path, target_modules=r".*\.self_attn\.q_proj"))
    there, described = convert(tensors, config, Form.peft_2d, heads=None)
    assert described["target_modules"] == ["self_attn.q_proj", "gate_proj", "up_proj", "down_proj"]
    assert there.keys() == tensors.keys()


def test_2d_adapter_that_claims_a_huge_expert_is_refused_without_counting_up_to_it(tmp_path):
    at = "base_model.model.model.layers.0.mlp.experts.{}.{}_proj.lora_{}.weight"
    tensors = {at.format(10**15, "gate", "A"): torch.ones(2, 4)}
    with pytest.raises(CheckpointError, match=r"lacks `.*experts\.0\.gate_proj\.lora_A\.weight`"):
        convert(tensors, CONFIG, Form.peft, heads=None)


def test_available_bytes_counts_the_pages_of_files_that_were_read_as_free(tmp_path):
    stat = {"anon": 100 << 20, "inactive_file": 300 << 20, "active_file": 200 << 20, "shmem": 50 << 20}
    (tmp_path / "memory.max").write_text(f"{700 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{650 << 20}\n")
    (tmp_path / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in stat.items()))
    assert available_bytes(tmp_path) == 550 << 20
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path) > 550 << 20
