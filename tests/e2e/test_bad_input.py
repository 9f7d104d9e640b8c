"""A user's mistake, through the command line: one clear message, no foreign stack trace, nothing started or written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "recipes/quickstart/checkpoint"


def sparkrl(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "sparkrl.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def edit_config(folder: Path, change: Callable[[dict], None]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def lose_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def change_family(folder: Path) -> None:
    edit_config(folder, lambda config: config.update(model_type="llama"))


def change_scheme(folder: Path) -> None:
    edit_config(folder, lambda config: config["quantization_config"].update(quant_algo="W4A8_AWQ"))


def declare_all_quantized(folder: Path) -> None:
    edit_config(folder, lambda config: config["quantization_config"].update(ignore=["lm_head"]))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, ["model.safetensors"]),
        (lose_weights, ["safetensors"]),
        (change_family, ["unknown model family", "llama", "muse_spark"]),
        (change_scheme, ["W4A8_AWQ"]),
        (declare_all_quantized, ["experts", "NVFP4"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_damaged_checkpoint_is_named_before_anything_starts(
    tmp_path: Path, damage: Callable[[Path], None], words: list[str]
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(CHECKPOINT, folder)
    damage(folder)
    result = sparkrl("train", "recipe=quickstart", f"model.path={folder}", f"output_dir={tmp_path / 'runs'}")
    assert result.returncode == 1
    assert result.stderr.startswith("error: ") and "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr, result.stderr
    assert not (tmp_path / "runs").exists()


def test_target_that_matches_nothing_lists_near_names(tmp_path: Path) -> None:
    result = sparkrl("train", "recipe=quickstart", "lora.targets=[q_prj]", f"output_dir={tmp_path}")
    assert result.returncode == 1
    assert "`q_prj` matches no module" in result.stderr and "q_proj" in result.stderr


def test_data_without_any_answer_names_the_rows(tmp_path: Path) -> None:
    rows = pq.read_table(ROOT / "recipes/quickstart/heldout.parquet").to_pylist()[:3]
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(json.dumps({**row, "reward_model": {"style": "rule"}}) + "\n" for row in rows))
    result = sparkrl("train", "recipe=quickstart", f"data.path={path}", f"output_dir={tmp_path / 'runs'}")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "ground_truth" in result.stderr


def test_more_gpus_than_the_cluster_has_are_refused(tmp_path: Path) -> None:
    gpus = ["cluster.device=cuda", "cluster.num_gpus=2", "rollout.dtype=bfloat16", "trainer.dtype=bfloat16"]
    result = sparkrl("train", "recipe=quickstart", *gpus, f"output_dir={tmp_path}")
    assert result.returncode == 1
    assert "`cluster.num_gpus` is 2, but the Ray cluster has 0" in result.stderr, result.stderr


@pytest.mark.parametrize("arguments", [["report", "nowhere"], ["eval", "recipe=quickstart", "--adapter", "nowhere"]])
def test_folder_that_is_no_run_is_refused(arguments: list[str]) -> None:
    result = sparkrl(*arguments)
    assert result.returncode == 1
    assert "nowhere" in result.stderr and "Traceback" not in result.stderr


def test_run_without_a_checkpoint_cannot_be_resumed(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("recipe_name: quickstart\n")
    result = sparkrl("train", "recipe=quickstart", f"loop.resume={tmp_path}")
    assert result.returncode == 1
    assert "no complete checkpoint" in result.stderr and "Traceback" not in result.stderr


def test_run_cannot_be_resumed_as_another_run(tmp_path: Path) -> None:
    config = sparkrl("train", "recipe=quickstart", "loop.group_size=4", "--print-config").stdout
    (tmp_path / "config.yaml").write_text(config)
    (tmp_path / "checkpoints/step-000001").mkdir(parents=True)
    result = sparkrl("train", "recipe=quickstart", f"loop.resume={tmp_path}")
    assert result.returncode == 1
    assert "`loop.group_size` is 8, the run was started with 4" in result.stderr
