"""Quantizing and dequantizing whole checkpoints: values, forms, interruption, a full disk, memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from quant_folders import EXPERTS, INNER, PREFIX, WIDTH, build, plain_experts, write
from safetensors import safe_open
from safetensors.torch import load_file

from sparkrl.errors import CheckpointError
from sparkrl.quant.checkpoint import CheckpointReader
from sparkrl.quant.convert import dequantize_checkpoint, quantize_checkpoint
from sparkrl.quant.form import FORMS
from sparkrl.quant.nvfp4 import Scales

CONFIG = {"num_local_experts": EXPERTS, "hidden_size": WIDTH, "moe_intermediate_size": INNER}
STACK = PREFIX.format(1)


def plain(folder: Path, model_type: str = "any", layers: int = 3) -> Path:
    """A checkpoint of BF16 experts, with a router, a head and a tokenizer."""
    random = torch.Generator().manual_seed(0)
    tensors = {"lm_head.weight": torch.randn(8, WIDTH, generator=random).bfloat16()}
    for layer in range(layers):
        tensors |= plain_experts(PREFIX.format(layer), random)
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = torch.randn(EXPERTS, WIDTH, generator=random)
    write(folder, tensors, {"model_type": model_type, **CONFIG})
    (folder / "tokenizer.json").write_text("{}")
    return folder


def values(folder: Path) -> dict[str, torch.Tensor]:
    reader = CheckpointReader(folder)
    return {name: reader.read(name) for name in reader.names}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("form", list(FORMS))
def test_quantize_then_dequantize_then_quantize_is_stable_in_every_form(tmp_path, form):
    source = plain(tmp_path / "source")
    quantize_checkpoint(source, tmp_path / "a", form=form)
    dequantize_checkpoint(tmp_path / "a", tmp_path / "b")
    assert same(values(tmp_path / "a"), values(tmp_path / "b"))
    quantize_checkpoint(tmp_path / "b", tmp_path / "c", form=form)
    assert same(values(tmp_path / "a"), values(tmp_path / "c"))
    before, after = values(source), values(tmp_path / "a")
    for name, value in before.items():
        quantized = "experts" in name
        assert CheckpointReader(tmp_path / "a").is_quantized(name) is quantized
        error = (after[name].float() - value.float()).square().mean() / value.float().square().mean()
        assert (0.001 < error < (0.012 if FORMS[form].scale else 0.016)) if quantized else error == 0
    assert (tmp_path / "c" / "tokenizer.json").read_text() == "{}"


def test_quantize_writes_modelopts_names_and_one_scale_for_gate_and_up(tmp_path):
    quantize_checkpoint(plain(tmp_path / "source"), tmp_path / "out", form="modelopt")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for part in ("gate_proj", "up_proj", "down_proj"):
        module = f"{STACK}.2.{part}"
        assert stored[f"{module}.weight"].dtype == torch.uint8
        assert stored[f"{module}.weight_scale"].dtype == torch.float8_e4m3fn
        assert stored[f"{module}.weight_scale_2"].shape == () and stored[f"{module}.input_scale"].item() == 1
    assert stored[f"{STACK}.2.gate_proj.weight_scale_2"] == stored[f"{STACK}.2.up_proj.weight_scale_2"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["quant_algo"], config["group_size"]) == ("modelopt", "NVFP4", 16)
    assert set(config["ignore"]) == {"lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(3))}


def test_quantize_muse_spark_leaves_out_first_and_last_layer_and_gives_halves_their_own_scale(tmp_path):
    quantize_checkpoint(plain(tmp_path / "source", "muse_spark_text"), tmp_path / "out")
    reader = CheckpointReader(tmp_path / "out")
    assert {name for name in reader.names if reader.is_quantized(name)} == {
        f"{STACK}.gate_up_proj",
        f"{STACK}.down_proj",
    }
    assert reader.stored[f"{STACK}.gate_up_proj_weight_scale_2"].shape == (EXPERTS, 2)
    assert reader.quantization and "model.layers.0.feed_forward*" in reader.quantization["ignore"]


def test_quantize_ignored_experts_stay_as_they_are(tmp_path):
    source = plain(tmp_path / "source")
    quantize_checkpoint(source, tmp_path / "out", form="quark", ignore=["re:.*layers\\.[02]\\."])
    reader = CheckpointReader(tmp_path / "out")
    assert [n for n in reader.names if reader.is_quantized(n)] == [f"{STACK}.down_proj", f"{STACK}.gate_up_proj"]
    name = f"{PREFIX.format(2)}.down_proj"
    assert torch.equal(reader.read(name), CheckpointReader(source).read(name))


def test_quantize_max_has_larger_error_than_mse(tmp_path):
    source = plain(tmp_path / "source")
    errors = []
    for scales in Scales:
        quantize_checkpoint(source, tmp_path / scales.value, scales=scales)
        got, want = values(tmp_path / scales.value), values(source)
        name = f"{STACK}.gate_up_proj"
        errors.append((got[name].float() - want[name].float()).square().mean().item())
    assert errors[1] < 0.78 * errors[0]


def test_quantize_unusable_source_is_refused(tmp_path):
    build(tmp_path / "quantized", "modelopt")
    with pytest.raises(CheckpointError, match="quantized already: ModelOpt NVFP4"):
        quantize_checkpoint(tmp_path / "quantized", tmp_path / "out")
    source = plain(tmp_path / "source")
    with pytest.raises(CheckpointError, match=r"unknown form `awq`(?s:.*)modelopt, modelopt-stacked"):
        quantize_checkpoint(source, tmp_path / "out", form="awq")
    with pytest.raises(CheckpointError, match="no routed experts to quantize: all 6 are ignored"):
        quantize_checkpoint(source, tmp_path / "out", ignore=["*"])
    odd = {f"{STACK}.0.{n}_proj.weight": torch.zeros(8, 24) for n in ("gate", "up")}
    write(tmp_path / "odd", odd, {"model_type": "any"})
    with pytest.raises(CheckpointError, match="24 columns, no multiple of 16, the block size of `modelopt`"):
        quantize_checkpoint(tmp_path / "odd", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_quantize_expert_that_is_not_finite_is_named_and_nothing_is_left(tmp_path):
    source = plain(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors[f"{STACK}.3.up_proj.weight"][4, 5] = torch.nan
    write(source, tensors, {"model_type": "any", **CONFIG})
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=r"expert 3 of `.*layers\.1.*gate_up_proj` .* not finite"):
        quantize_checkpoint(source, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_dequantize_gpt_oss_writes_transformers_own_layout_and_quantize_refuses_it(tmp_path):
    build(tmp_path / "source", "mxfp4", model_type="gpt_oss", intermediate_size=INNER)
    dequantize_checkpoint(tmp_path / "source", tmp_path / "out")
    assert same(values(tmp_path / "source"), values(tmp_path / "out"))
    plain_reader = CheckpointReader(tmp_path / "out")
    assert plain_reader.stored[f"{STACK}.gate_up_proj"].shape == (EXPERTS, WIDTH, 2 * INNER)
    with pytest.raises(CheckpointError, match="gpt-oss model"):
        quantize_checkpoint(tmp_path / "out", tmp_path / "again")


def test_code_beside_a_checkpoint_is_neither_run_nor_copied(tmp_path):
    source = plain(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
    (source / "config.json").write_text(json.dumps(config))
    (source / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (source / "training_args.bin").write_bytes(b"pickle")
    quantize_checkpoint(source, tmp_path / "a")
    dequantize_checkpoint(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "ran").exists()
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


CHILD = """
import sys, time
from sparkrl.quant.convert import quantize_checkpoint
def slowly(file, done, total):
    print(file, flush=True)
    time.sleep(float(sys.argv[3]))
quantize_checkpoint(sys.argv[1], sys.argv[2], form="modelopt", shard_bytes=20_000, progress=slowly)
"""


def run(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_quantize_killed_in_the_middle_resumes_and_keeps_finished_shards(tmp_path):
    source = plain(tmp_path / "source")
    child = run(source, tmp_path / "out", 0.02)
    partial = tmp_path / ".out.partial"
    deadline = time.monotonic() + 60
    while len(list(partial.glob("*.safetensors"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    finished = {path.name: path.stat() for path in partial.glob("*.safetensors")}
    assert len(finished) >= 2 and not (tmp_path / "out").exists() and not (partial / "config.json").exists()

    # a shard that was damaged meanwhile is not kept
    listed = sorted(json.loads((partial / ".progress.json").read_text())["finished"])
    content = bytearray((partial / listed[0]).read_bytes())
    content[-1] ^= 1
    (partial / listed[0]).write_bytes(content)

    written: list[str] = []
    quantize_checkpoint(
        source, tmp_path / "out", form="modelopt", shard_bytes=20_000, progress=lambda file, *_: written.append(file)
    )
    assert all(written.count(name) == 1 for name in listed[1:])
    for name in listed[1:]:
        after = (tmp_path / "out" / name).stat()
        assert (after.st_mtime_ns, after.st_ino) == (finished[name].st_mtime_ns, finished[name].st_ino)
    quantize_checkpoint(source, tmp_path / "whole", form="modelopt", shard_bytes=20_000)
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "out").iterdir()) and len(files) > 4
    assert all((tmp_path / "whole" / name).read_bytes() == (tmp_path / "out" / name).read_bytes() for name in files)
    assert not partial.exists()


def test_quantize_start_of_another_conversion_is_not_continued(tmp_path):
    source = plain(tmp_path / "source")

    def stop(file: str, done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, tmp_path / "out", shard_bytes=20_000, progress=stop)
    with pytest.raises(CheckpointError, match=r"\.out\.partial holds the start of another conversion.* in: scales"):
        quantize_checkpoint(source, tmp_path / "out", shard_bytes=20_000, scales=Scales.max)
    os.utime(source / "model.safetensors", (1, 1))
    with pytest.raises(CheckpointError, match=r"another conversion.* in: source"):
        quantize_checkpoint(source, tmp_path / "out", shard_bytes=20_000)


def test_quantize_second_process_on_the_same_target_is_refused(tmp_path):
    source = plain(tmp_path / "source")
    child = run(source, tmp_path / "out", 5)
    assert child.stdout and child.stdout.readline()
    with pytest.raises(CheckpointError, match="another process is writing"):
        quantize_checkpoint(source, tmp_path / "out", form="modelopt", shard_bytes=20_000)
    child.kill()
    child.communicate()


def test_quantize_full_disk_keeps_what_was_finished_and_looks_incomplete(tmp_path):
    source = plain(tmp_path / "source")
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (15_000, 15_000))\n" + CHILD
    command = [sys.executable, "-c", limited, str(source), str(tmp_path / "out"), "0"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert "cannot be written: File too large" in result.stderr and "run the same command again" in result.stderr
    assert not (tmp_path / "out").exists()
    left = {path.name for path in tmp_path.glob(".out.partial/*")}
    assert not left & {"config.json", "model.safetensors.index.json"} and not any(".tmp" in name for name in left)
    quantize_checkpoint(source, tmp_path / "out", form="modelopt", shard_bytes=20_000)
    quantize_checkpoint(source, tmp_path / "whole", form="modelopt", shard_bytes=20_000)
    assert same(values(tmp_path / "out"), values(tmp_path / "whole"))


MEASURED = """
import resource, sys, torch
from sparkrl.quant.convert import dequantize_checkpoint
def memory(key):  # MiB; getrusage would report the parent's peak
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith(key))
torch.set_num_threads(1)
dequantize_checkpoint(sys.argv[1], sys.argv[2] + "/warm")  # a small one: libraries, caches, compiled loops
base = memory("VmRSS")
resource.setrlimit(resource.RLIMIT_DATA, (900 << 20, 900 << 20))
dequantize_checkpoint(sys.argv[3], sys.argv[2] + "/out")
print(memory("VmHWM") - base, base)
"""


def test_dequantize_checkpoint_larger_than_the_memory_limit_stays_far_below_it(tmp_path):
    experts, rows, width = 64, 2048, 4096
    name = f"{STACK}.down_proj"
    codes = torch.randint(0, 256, (experts, rows, width // 2), dtype=torch.uint8)
    tensors = {
        name: codes,
        f"{name}_weight_scale": torch.full((experts, rows, width // 16), 0x38, dtype=torch.uint8).view(
            torch.float8_e4m3fn
        ),
        f"{name}_weight_scale_2": torch.full((experts,), 2.0**-8),
    }
    scheme = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    write(tmp_path / "large", tensors, {"model_type": "any", "quantization_config": scheme})
    build(tmp_path / "small", "modelopt")
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "small"), str(tmp_path), str(tmp_path / "large")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    grown, base = map(float, result.stdout.split())
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    # 1 GiB is written; a chunk is 32 MiB of result and 9 MiB of codes and scales, and two chunks meet; the compiler of
    # the fast loop, which the small checkpoint does not need, takes 100 MiB
    assert size > 2**30 and grown < 280, (grown, base)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        got = file.get_slice(name)[63:64]
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    expected = table[torch.stack([codes[63] & 15, codes[63] >> 4], dim=-1).flatten(-2).int()] * 2.0**-8
    assert torch.equal(got[0].float(), expected)
