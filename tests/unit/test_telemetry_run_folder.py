"""The run folder: names, atomic writes, torn lines, checkpoints."""

from __future__ import annotations

import errno
import json

import numpy as np
import pytest
import yaml

from sparkrl.config.schema import Config
from sparkrl.errors import CheckpointError, ConfigError, SparkrlError
from sparkrl.telemetry import RunFolder


@pytest.fixture
def cfg(tmp_path):
    return Config(recipe_name="tiny", seed=7, output_dir=str(tmp_path / "runs"))


@pytest.fixture
def run(cfg):
    return RunFolder.create(cfg)


def test_create_twice_in_one_second_makes_two_folders_and_latest_is_the_newest(cfg, tmp_path):
    runs = [RunFolder.create(cfg) for _ in range(3)]
    assert len({run.path for run in runs}) == 3
    for run in runs:
        assert run.path.parent == tmp_path / "runs" / "tiny"
        stamp = run.path.name.split("-")
        assert (len(stamp[0]), len(stamp[1]), stamp[2]) == (8, 6, "7")
    latest = tmp_path / "runs" / "tiny" / "latest"
    assert latest.is_symlink() and not latest.readlink().is_absolute()
    assert RunFolder.open(latest).path == runs[-1].path.resolve()


def test_create_writes_the_resolved_configuration(cfg, run):
    written = yaml.safe_load((run.path / "config.yaml").read_text())
    assert written["recipe_name"] == "tiny"
    assert written["rollout"]["dtype"] == "bfloat16"
    assert written["algorithm"]["clip_high"] == cfg.algorithm.clip_high
    assert run.config()["seed"] == 7


def test_create_in_an_exact_folder_refuses_one_that_holds_a_run(tmp_path):
    cfg = Config(recipe_name="tiny", run_dir=str(tmp_path / "exact"))
    assert RunFolder.create(cfg).path == tmp_path / "exact"
    with pytest.raises(ConfigError, match="already holds a run"):
        RunFolder.create(cfg)


def test_create_that_fails_leaves_no_folder_and_latest_where_it_was(cfg, run, monkeypatch):
    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sparkrl.telemetry.run_folder.write_atomically", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        RunFolder.create(cfg)
    assert sorted(path.name for path in run.path.parent.iterdir()) == sorted([run.path.name, "latest"])
    assert RunFolder.open(run.path.parent / "latest").path == run.path.resolve()


def test_create_where_nothing_can_be_written_says_what_to_set(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="output_dir"):
        RunFolder.create(Config(recipe_name="tiny", output_dir=str(tmp_path / "file")))


def test_open_of_what_is_no_run_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not a run folder"):
        RunFolder.open(tmp_path)
    with pytest.raises(ConfigError, match="no run folder"):
        RunFolder.open(tmp_path / "missing")


def test_rows_come_back_as_written_with_non_finite_numbers_as_null(run):
    values = {"a": float("nan"), "b": float("inf"), "c": np.float32(0.5), "d": np.int64(3), "e": [float("-inf"), "ü"]}
    run.append("metrics", {"step": 1, **values})
    assert run.rows("metrics") == [{"step": 1, "a": None, "b": None, "c": 0.5, "d": 3, "e": [None, "ü"]}]
    assert run.rows("samples") == []


def test_rows_after_a_kill_in_mid_write_lose_only_the_torn_line(run):
    run.append("metrics", {"step": 1})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "loss": 0.')
    assert run.rows("metrics") == [{"step": 1}]
    run.append("metrics", {"step": 3})
    assert run.rows("metrics") == [{"step": 1}, {"step": 3}]


def test_append_on_a_full_disk_raises_a_clear_error(run):
    (run.path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(SparkrlError, match=r"No space left[\s\S]*loop\.resume"):
        run.append("metrics", {"step": 1})


def test_rewind_forgets_later_steps_only(run):
    for step in (0, 1, 2, 3):
        run.append("metrics", {"step": step})
        run.append("samples", {"step": step, "response": "ü"})
    run.rewind(2)
    assert [row["step"] for row in run.rows("metrics")] == [0, 1, 2]
    assert [row["step"] for row in run.rows("samples")] == [0, 1, 2]


def test_summary_is_none_until_written(run):
    assert run.summary() is None
    run.write_summary({"k3": float("nan"), "steps": 3})
    assert json.loads((run.path / "summary.json").read_text()) == run.summary() == {"k3": None, "steps": 3}
    assert not list(run.path.glob(".*"))


def save(run, step, content, *, keep=0):
    with run.checkpoint(step, keep=keep) as folder:
        (folder / "weights").write_text(content)


def names(run):
    return sorted(folder.name for folder in run.checkpoints_path.iterdir())


def test_checkpoints_beyond_keep_are_removed_oldest_first(run):
    for step in (5, 10, 100, 1_000_000):
        save(run, step, str(step), keep=2)
    assert names(run) == ["step-000100", "step-1000000"]
    step, folder = run.latest_checkpoint()
    assert (step, (folder / "weights").read_text()) == (1_000_000, "1000000")


def test_checkpoint_keep_zero_keeps_all(run):
    for step in (1, 2, 3):
        save(run, step, "")
    assert [step for step, _ in run.checkpoints()] == [1, 2, 3]


def test_checkpoint_that_fails_leaves_the_older_ones_alone(run):
    save(run, 10, "ten", keep=1)
    with pytest.raises(RuntimeError), run.checkpoint(20, keep=1) as folder:
        (folder / "weights").write_text("half")
        raise RuntimeError
    assert names(run) == ["step-000010"]


def test_checkpoint_on_a_full_disk_raises_a_clear_error_and_keeps_the_older_one(run):
    save(run, 10, "ten", keep=1)
    expected = r"cannot write the checkpoint .*step-000020: No space left[\s\S]*loop\.resume"
    with pytest.raises(SparkrlError, match=expected), run.checkpoint(20, keep=1), open("/dev/full", "w") as full:
        full.write("weights")
    assert names(run) == ["step-000010"]


def test_checkpoint_folder_of_a_killed_save_is_not_taken_for_complete(run):
    save(run, 10, "ten", keep=1)
    (run.checkpoints_path / "step-000020.unfinished").mkdir()
    assert run.latest_checkpoint()[0] == 10
    save(run, 30, "thirty", keep=1)
    assert names(run) == ["step-000030"]


def test_checkpoint_of_a_step_saved_before_replaces_it(run):
    save(run, 10, "old", keep=1)
    save(run, 10, "new", keep=1)
    assert names(run) == ["step-000010"]
    assert (run.latest_checkpoint()[1] / "weights").read_text() == "new"


def test_checkpoint_killed_between_the_renames_of_a_replacement_is_still_found(run):
    save(run, 10, "old")
    (run.checkpoints_path / "step-000010").rename(run.checkpoints_path / "step-000010.replaced")
    step, folder = run.latest_checkpoint()
    assert (step, (folder / "weights").read_text()) == (10, "old")


def test_latest_checkpoint_without_any_raises(run):
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        run.latest_checkpoint()
