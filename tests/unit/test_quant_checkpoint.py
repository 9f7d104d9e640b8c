"""The checkpoint reader and writers, on small checkpoints made here and broken in one way each."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sparkrl.errors import CheckpointError
from sparkrl.quant.checkpoint import CheckpointReader, write_checkpoint
from sparkrl.quant.convert import dequantize_checkpoint

E, H, INNER, LAYERS = 4, 32, 16, 3
P = "model.language_model."
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
MIDDLE = f"{P}layers.1.mlp.experts."


def make_tensors() -> dict[str, torch.Tensor]:
    """Three layers; the middle one's experts hold random codes and scales."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{P}embed_tokens.weight": torch.randn(8, H, generator=generator).bfloat16(),
        "lm_head.weight": torch.randn(8, H, generator=generator).bfloat16(),
    }
    for layer in range(LAYERS):
        x = f"{P}layers.{layer}.mlp."
        tensors[x + "gate.weight"] = torch.randn(E, H, generator=generator)
        for name, out, width, halves in (("gate_up_proj", 2 * INNER, H, (2,)), ("down_proj", H, INNER, ())):
            name = x + "experts." + name
            if layer != 1:
                tensors[name] = torch.randn(E, out, width, generator=generator).bfloat16()
                continue
            tensors[name] = torch.randint(0, 256, (E, out, width // 2), generator=generator, dtype=torch.uint8)
            codes = torch.randint(0x28, 0x58, (E, out, width // 16), generator=generator, dtype=torch.uint8)
            tensors[name + "_weight_scale"] = codes.view(torch.float8_e4m3fn)
            tensors[name + "_weight_scale_2"] = torch.rand(E, *halves, generator=generator) * 0.01 + 0.001
            tensors[name + "_input_scale"] = torch.ones(E, *halves)
    return tensors


def make_config() -> dict:
    ignore = ["lm_head", "model.layers.0.feed_forward*", f"model.layers.{LAYERS - 1}.feed_forward*"]
    return {
        "model_type": "muse_spark_text",
        "num_hidden_layers": LAYERS,
        "num_local_experts": E,
        "moe_hidden_size": H,
        "moe_intermediate_size": INNER,
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "ignore": ignore,
        },
    }


def by_table(tensors: dict[str, torch.Tensor], name: str, *, halves: bool) -> torch.Tensor:
    """float64 value of a quantized tensor, one element at a time; the product of scales is rounded as libraries do."""
    packed, block, scale = tensors[name], tensors[name + "_weight_scale"], tensors[name + "_weight_scale_2"]
    experts, rows, half = packed.shape
    out = torch.empty(experts, rows, 2 * half, dtype=torch.float64)
    for e in range(experts):
        for r in range(rows):
            whole = scale[e, 2 * r // rows] if halves else scale[e]
            for c in range(2 * half):
                nibble = packed[e, r, c // 2].item() >> (4 * (c % 2)) & 0xF
                step = (block[e, r, c // 16].double() * whole.double()).float()
                out[e, r, c] = E2M1[nibble] * step.double()
    return out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "ckpt", make_tensors(), make_config())
    return tmp_path / "ckpt"


def shard(folder: Path) -> None:
    """Turn the single file into two shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    for file, part in files.items():
        save_file({n: tensors[n] for n in part}, folder / file)
    index = {n: file for file, part in files.items() for n in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, **fields) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def test_reader_names_are_logical_and_shapes_dequantized(folder):
    reader = CheckpointReader(folder)
    assert set(reader.names) == {n for n in make_tensors() if "_scale" not in n}
    assert reader.shape(MIDDLE + "gate_up_proj") == (E, 2 * INNER, H)
    assert reader.is_quantized(MIDDLE + "down_proj") and not reader.is_quantized(f"{P}layers.0.mlp.experts.down_proj")
    assert "quantization_config" not in reader.config and reader.config["num_local_experts"] == E


@pytest.mark.parametrize("sharded", [False, True])
def test_reader_quantized_rows_equal_the_table(folder, sharded):
    if sharded:
        shard(folder)
    reader, tensors = CheckpointReader(folder), make_tensors()
    for name, halves in (("gate_up_proj", True), ("down_proj", False)):
        expected = by_table(tensors, MIDDLE + name, halves=halves)
        got = reader.rows(MIDDLE + name, 1, 3, dtype=torch.float32)
        assert torch.equal(got, expected.float()[1:3])
        assert torch.equal(reader.read(MIDDLE + name), expected.float().bfloat16())


def test_reader_plain_rows_keep_their_type(folder):
    reader, tensors = CheckpointReader(folder), make_tensors()
    got = reader.rows(f"{P}layers.0.mlp.gate.weight", 2, 4)
    assert got.dtype == torch.float32 and torch.equal(got, tensors[f"{P}layers.0.mlp.gate.weight"][2:4])
    assert reader.rows("lm_head.weight", 3, 3).shape == (0, H)
    with pytest.raises(IndexError):
        reader.rows("lm_head.weight", 0, 9)


def test_reader_counts_only_the_bytes_of_the_rows(folder):
    reader = CheckpointReader(folder)
    assert reader.bytes_read == 0
    reader.rows(MIDDLE + "gate_up_proj", 1, 2)
    assert (
        reader.bytes_read == 2 * INNER * H // 2 + 2 * INNER * H // 16 + 2 * 4
    )  # codes, block scales, two global scales


def test_reader_nested_config_is_flattened(folder):
    config = make_config()
    quantization = config.pop("quantization_config")
    nested = {
        "model_type": "muse_spark",
        "text_config": config,
        "quantization_config": quantization,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(nested))
    reader = CheckpointReader(folder)
    assert reader.config["num_hidden_layers"] == LAYERS and reader.config["dtype"] == "bfloat16"
    assert reader.is_quantized(MIDDLE + "down_proj")


def test_reader_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="not a folder"):
        CheckpointReader(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        CheckpointReader(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "muse_spark_text"}')
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        CheckpointReader(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        CheckpointReader(tmp_path)


def test_reader_missing_shard_is_named(folder):
    shard(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors is missing"):
        CheckpointReader(folder)


@pytest.mark.parametrize("keep", [4, 100, -10])
def test_reader_truncated_shard_is_named(folder, keep):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or truncated"):
        CheckpointReader(folder)


def test_reader_index_naming_an_absent_tensor_is_refused(folder):
    shard(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["ghost.weight"] = "a.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"a\.safetensors holds `ghost\.weight`, but it does not"):
        CheckpointReader(folder)


def test_reader_config_without_model_type_is_refused(folder):
    (folder / "config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(CheckpointError, match="no `model_type`"):
        CheckpointReader(folder)


def test_reader_tensor_the_index_does_not_list_is_named(folder):
    shard(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["lm_head.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"a\.safetensors holds `lm_head\.weight`, which .* does not list"):
        CheckpointReader(folder)


def test_reader_tensor_in_two_shards_is_named(folder):
    shard(folder)
    a, b = (load_file(folder / f"{name}.safetensors") for name in "ab")
    save_file({**b, "lm_head.weight": a["lm_head.weight"]}, folder / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"`lm_head\.weight` is both in a\.safetensors and in b\.safetensors"):
        CheckpointReader(folder)


def test_reader_file_that_the_server_would_read_besides_is_refused(folder):
    save_file({"lm_head.weight": torch.zeros(2, 2)}, folder / "old.safetensors")
    with pytest.raises(CheckpointError, match=r"old\.safetensors lies beside model\.safetensors") as caught:
        CheckpointReader(folder)
    assert caught.value.hint == "move it out of the folder"
    (folder / "old.safetensors").unlink()
    CheckpointReader(folder)


def test_reader_file_that_the_index_leaves_out_is_left_out(folder):
    shard(folder)
    save_file({"lm_head.weight": torch.zeros(2, 2)}, folder / "old.safetensors")  # vLLM goes by the index too
    assert CheckpointReader(folder).shape("lm_head.weight") != (2, 2)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_reader_pickled_weights_are_refused_unread(folder, name):
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(CheckpointError, match=rf"as pickles \({name}\)(?s:.*)never loaded"):
        CheckpointReader(folder)


def test_reader_file_longer_than_its_header_says_is_refused(folder):
    with open(folder / "model.safetensors", "ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        CheckpointReader(folder)


def drop(suffix):
    return lambda t: t.pop(MIDDLE + "gate_up_proj" + suffix)


def put(suffix, make):
    def change(tensors):
        tensors[MIDDLE + "gate_up_proj" + suffix] = make(tensors[MIDDLE + "gate_up_proj" + suffix])

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("_weight_scale", lambda t: t.float()), r"gate_up_proj_weight_scale` in .* must be float8_e4m3fn"),
        (
            put("_weight_scale", lambda t: t[:, :-1].contiguous()),
            r"gate_up_proj_weight_scale` .* got: float8_e4m3fn \(4, 31",
        ),
        (put("_weight_scale_2", lambda t: t.bfloat16()), r"gate_up_proj_weight_scale_2` .* must be float32"),
        (put("_weight_scale_2", lambda t: t[:3]), r"gate_up_proj_weight_scale_2` .* got: float32 \(3, 2\)"),
        (drop("_weight_scale_2"), r"gate_up_proj_weight_scale_2` is absent"),
        (drop("_weight_scale"), r"gate_up_proj_weight_scale` is absent"),
        (drop(""), r"gate_up_proj_weight_scale.* scales a tensor that is absent"),
        (put("", lambda t: t[:2]), r"gate_up_proj_weight_scale` .* must be float8_e4m3fn \(2, 32, 2\)"),
        (put("", lambda t: t.short().to(torch.int32)), r"gate_up_proj` in .* must be uint8"),
    ],
)
def test_reader_wrong_quantized_tensor_is_named(folder, change, message):
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(folder)


def test_reader_unquantized_expert_under_nvfp4_is_refused(folder):
    def change(tensors):
        for suffix in ("_weight_scale", "_weight_scale_2", "_input_scale"):
            tensors.pop(MIDDLE + "down_proj" + suffix)
        tensors[MIDDLE + "down_proj"] = torch.zeros(E, H, INNER).bfloat16()

    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj` in model\.safetensors is bfloat16"):
        CheckpointReader(folder)


def test_reader_codes_without_declared_scheme_are_refused(folder):
    edit_config(folder, quantization_config=None)
    with pytest.raises(CheckpointError, match="no `quantization_config`"):
        CheckpointReader(folder)


def test_reader_shape_against_config_is_checked(folder):
    edit_config(folder, moe_intermediate_size=8)
    with pytest.raises(CheckpointError, match=r"has shape \(4, 32, 16\), config.json says \(4, 32, 8\)"):
        CheckpointReader(folder)


@pytest.mark.parametrize(
    ("suffix", "index", "value"),
    [
        *(("_weight_scale", (2, 5, 1), value) for value in (0.0, -1.0, float("nan"))),  # e4m3 has no infinity
        *(("_weight_scale_2", (2, 1), value) for value in (0.0, -1.0, float("nan"), float("inf"))),
    ],
)
def test_rows_bad_scale_value_is_refused_where_it_is_read(folder, suffix, index, value):
    def change(tensors):
        tensors[MIDDLE + "gate_up_proj" + suffix][index] = value

    rewrite(folder, change)
    reader = CheckpointReader(folder)
    assert reader.rows(MIDDLE + "gate_up_proj", 0, 2).isfinite().all()
    with pytest.raises(CheckpointError, match=rf"gate_up_proj{suffix}` in .*model\.safetensors has 1 scales"):
        reader.rows(MIDDLE + "gate_up_proj", 0, E)


def test_reader_link_out_of_the_folder_is_refused(folder, tmp_path):
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    os.symlink(tmp_path / "elsewhere.safetensors", folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="points outside the checkpoint"):
        CheckpointReader(folder)


def test_reader_link_into_a_hub_cache_entry_is_followed(folder, tmp_path):
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "abc", tmp_path / "hub" / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / name, blobs / name)
        os.symlink(f"../../blobs/{name}", snapshot / name)
    assert CheckpointReader(snapshot).shape("lm_head.weight") == (8, H)


def test_reader_index_path_out_of_the_folder_is_refused(folder, tmp_path):
    shard(folder)
    (folder / "b.safetensors").rename(tmp_path / "b.safetensors")
    path = folder / "model.safetensors.index.json"
    path.write_text(path.read_text().replace('"b.safetensors"', '"../b.safetensors"'))
    with pytest.raises(CheckpointError, match="points outside the checkpoint"):
        CheckpointReader(folder)


@pytest.mark.parametrize("sharded", [False, True])
def test_dequantize_checkpoint_equals_reader_and_drops_the_scheme(folder, tmp_path, sharded):
    if sharded:
        shard(folder)
    (folder / "tokenizer.json").write_text("{}")
    dequantize_checkpoint(folder, tmp_path / "plain")
    assert (tmp_path / "plain" / "tokenizer.json").read_text() == "{}"
    source, plain = CheckpointReader(folder), CheckpointReader(tmp_path / "plain")
    assert plain.quantization is None and plain.names == source.names
    for name in source.names:
        assert plain.dtype(name) == source.dtype(name) and torch.equal(plain.read(name), source.read(name))
    expected = by_table(make_tensors(), MIDDLE + "down_proj", halves=False).float().bfloat16()
    with safe_open(tmp_path / "plain" / plain.file(MIDDLE + "down_proj"), "pt") as file:
        assert torch.equal(file.get_tensor(MIDDLE + "down_proj"), expected)


def test_dequantize_checkpoint_failure_leaves_nothing(folder, tmp_path):
    def change(tensors):
        tensors[MIDDLE + "down_proj_weight_scale_2"][3] = -1.0

    rewrite(folder, change)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="down_proj_weight_scale_2"):
        dequantize_checkpoint(folder, tmp_path / "plain")
    assert sorted(tmp_path.iterdir()) == before


def test_dequantize_checkpoint_existing_target_is_kept(folder, tmp_path):
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "mine.txt").write_text("precious")
    with pytest.raises(CheckpointError, match="exists already"):
        dequantize_checkpoint(folder, tmp_path / "plain")
    assert (tmp_path / "plain" / "mine.txt").read_text() == "precious"


def test_write_checkpoint_invalid_content_keeps_the_old_one(folder):
    broken = make_tensors()
    del broken[MIDDLE + "down_proj_weight_scale"]
    with pytest.raises(CheckpointError, match="down_proj"):
        write_checkpoint(folder, broken, make_config(), overwrite=True)
    assert CheckpointReader(folder).shape(MIDDLE + "down_proj") == (E, H, INNER)
    assert [path.name for path in folder.parent.iterdir()] == ["ckpt"]
