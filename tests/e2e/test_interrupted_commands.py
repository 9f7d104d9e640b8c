"""Ctrl-C in a command that converts a checkpoint: what is said, what is kept, and that the same command finishes it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sparkrl.quant.convert import quantize_checkpoint

EXPERTS, WIDTH, INNER, LAYERS = 16, 512, 256, 8
SHARD_GIB = 0.003


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """BF16 experts alone, 100 MB: they take some seconds."""
    folder = tmp_path_factory.mktemp("plain")
    random = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(LAYERS):
        for name, shape in (("gate_up_proj", (2 * INNER, WIDTH)), ("down_proj", (WIDTH, INNER))):
            value = torch.randn(EXPERTS, *shape, generator=random).bfloat16()
            tensors[f"model.layers.{layer}.mlp.experts.{name}"] = value
    save_file(tensors, folder / "model.safetensors")
    sizes = {"num_experts": EXPERTS, "hidden_size": WIDTH, "moe_intermediate_size": INNER}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_hidden_layers": LAYERS, **sizes}))
    return folder


def heed_ctrl_c() -> None:
    """As at a terminal: what a shell starts in the background inherits that Ctrl-C is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_interrupted_quantize_says_what_it_kept_and_the_same_command_finishes_it(plain: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    command = [sys.executable, "-m", "sparkrl.cli", "quantize", str(plain), "--out", str(target)]
    command += ["--shard-gib", str(SHARD_GIB)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heed_ctrl_c) as process:
        assert process.stderr is not None
        said: list[str] = []
        for line in process.stderr:
            said.append(line)
            if process.poll() is None and "model-00002-of-" in line:
                process.send_signal(signal.SIGINT)
                break  # one Ctrl-C
        said += process.stderr
    assert process.returncode == 130
    assert said[-2:] == ["finished shards are kept: the same command goes on after them\n", "interrupted\n"]
    assert not target.exists()
    kept = sorted(file.name for file in (tmp_path / ".out.partial").glob("*.safetensors"))
    assert kept and kept[0].startswith("model-00001-of-")
    made = {name: (tmp_path / ".out.partial" / name).stat().st_mtime_ns for name in kept}

    finished = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert finished.returncode == 0 and finished.stdout == f"wrote {target}\n"
    assert {name: (target / name).stat().st_mtime_ns for name in kept} == made

    quantize_checkpoint(plain, tmp_path / "at_once", shard_bytes=int(SHARD_GIB * 2**30))
    names = sorted(file.name for file in (tmp_path / "at_once").iterdir())
    assert sorted(file.name for file in target.iterdir()) == names
    assert all((target / name).read_bytes() == (tmp_path / "at_once" / name).read_bytes() for name in names)


def test_command_that_is_refused_leaves_no_progress_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sparkrl.cli", "quantize", str(tmp_path / "gone"), "--out", str(tmp_path / "out")]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert refused.returncode == 1 and refused.stderr.startswith(f"error: {tmp_path / 'gone'} is not a folder\n")
    assert list(tmp_path.iterdir()) == []
