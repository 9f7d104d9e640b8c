"""The quickstart at reduced size, through the command line: real Ray, vLLM and verl, as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file
from wandb_file import history, wandb_records

SMALL = [
    "recipe=quickstart",
    "loop.num_steps=3",
    "loop.num_prompts=8",
    "loop.group_size=4",
    "loop.save_every=1",
    "eval.num_problems=16",
    "eval.k=4",
    "eval.every=100",
    "trainer.compare_without_replay_every=1",
    "telemetry.wandb=offline",
]
TIMEOUT_S = 600


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sparkrl.cli", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}


def sparkrl(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=TIMEOUT_S, env=environment(), check=False
    )


def rows(run: Path, kind: str) -> list[dict]:
    parsed = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in parsed if row["kind"] == kind]


def curve(run: Path) -> list[dict]:
    """Everything a step reports but times, speeds, and the machine's load, memory and disk."""
    return [
        {name: value for name, value in row.items() if not name.startswith(("time/", "perf/", "system/"))}
        for row in rows(run, "train") + rows(run, "eval")
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    result = sparkrl("train", *SMALL, f"run_dir={run}")
    assert result.returncode == 0, result.stdout + result.stderr
    return run


def test_run_agrees_to_rounding_and_is_on_policy(finished: Path) -> None:
    steps = rows(finished, "train")
    assert [row["step"] for row in steps] == [1, 2, 3]
    for row in steps:
        assert 0 <= row["agree/k3"] <= 1e-6
        assert row["agree/route_agreement"] >= 0.999
        assert row["train/grad_norm"] > 0
        assert row["perf/rollout_tokens_per_s"] == pytest.approx(row["rollout/tokens"] / row["time/rollout_s"])
    assert steps[0]["train/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert steps[0]["train/clip_fraction"] == 0.0


def test_summary_has_every_promised_key_and_agrees_with_the_rows(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert set(summary) == {
        "recipe", "seed", "steps", "wall_s", "setup", "eval", "k3", "dlogp_p999_max", "first_step",
        "route_agreement_min", "versions",
    }  # fmt: skip
    steps, evals = rows(finished, "train"), rows(finished, "eval")
    assert (summary["recipe"], summary["seed"], summary["steps"]) == ("quickstart", 0, 3)
    assert summary["k3"]["max"] == max(row["agree/k3"] for row in steps)
    assert summary["eval"]["start"]["mean"] == evals[0]["eval/mean"]
    assert summary["eval"]["end"]["mean"] == evals[-1]["eval/mean"]
    assert (summary["eval"]["k"], summary["eval"]["num_problems"]) == (4, 16)
    assert summary["first_step"]["clip_fraction"] == 0.0


def test_run_folder_holds_config_samples_checkpoints_report_and_wandb(finished: Path) -> None:
    assert (finished / "config.yaml").read_text().count("num_prompts: 8") == 1
    assert len((finished / "samples.jsonl").read_text().splitlines()) >= 3
    assert sorted(path.name for path in (finished / "checkpoints").iterdir()) == [
        "step-000001", "step-000002", "step-000003",
    ]  # fmt: skip
    assert (finished / "checkpoints/step-000003/adapter_model.safetensors").is_file()
    page = (finished / "report.html").read_text()
    assert "<svg" in page and "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page
    assert list(finished.glob("wandb/offline-run-*/run-*.wandb"))


def test_wandb_folder_read_back_equals_metrics_jsonl(finished: Path) -> None:
    logged = history(finished)
    for row in rows(finished, "train") + rows(finished, "eval"):
        expected = {name: value for name, value in row.items() if "/" in name and value is not None}
        (found,) = [one for one in logged if one["step"] == row["step"] and expected.keys() <= one.keys()]
        assert {name: found[name] for name in expected} == expected
    histograms = [one for one in logged if "agree/k3_tokens/bins" in one]
    assert [one["step"] for one in histograms] == [1, 2, 3]
    assert sum(histograms[0]["agree/k3_tokens/values"]) == rows(finished, "train")[0]["rollout/tokens"]
    tables = {name for one in logged for name in one if name.endswith("/_type")}
    assert {"samples/train/_type", "samples/eval/_type", "problems/eval/_type"} <= tables
    assert any(record.HasField("stats") for record in wandb_records(finished))  # W&B's own system figures


def test_adapter_changes_with_every_step(finished: Path) -> None:
    first, second = (load_file(finished / f"checkpoints/step-00000{n}/adapter_model.safetensors") for n in (1, 2))
    moved = [name for name in first if not first[name].equal(second[name])]
    assert len(moved) == len(first)  # every factor of every layer and expert tensor


def test_report_command_rebuilds_the_same_page(finished: Path) -> None:
    before = (finished / "report.html").read_text()
    (finished / "report.html").unlink()
    result = sparkrl("report", str(finished))
    assert result.returncode == 0, result.stderr
    assert (finished / "report.html").read_text() == before


def responses(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "responses.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def evaluated(finished: Path) -> Path:
    """An evaluation of the finished run, spelled as short as it can be."""
    folder = finished.parent / "evaluation"
    small = [word for word in SMALL if not word.startswith(("eval.k", "loop.", "trainer."))]
    result = sparkrl("eval", *small, "k=4", f"adapter={finished}", f"run_dir={folder}")
    assert result.returncode == 0, result.stdout + result.stderr
    (folder / "stdout").write_text(result.stdout)
    return folder


def test_eval_command_scores_base_and_newest_checkpoint_as_training_did(finished: Path, evaluated: Path) -> None:
    record = json.loads((evaluated / "evaluation.json").read_text())
    first, last = rows(finished, "eval")
    for name in ("mean", "low", "high", "pass_at_k", "pass_at_2", "maj_at_k", "mean_tokens", "truncated"):
        assert record["baseline"][name] == first[f"eval/{name}"]
        assert record["adapter"][name] == last[f"eval/{name}"]
    assert record["adapter"]["step"] == 3
    for name in ("gain", "gain_low", "gain_high"):
        assert record["adapter"][name] == last[f"eval/{name}"]
    assert last["eval/gain"] == pytest.approx(last["eval/mean"] - first["eval/mean"])
    assert f"gain {last['eval/gain']:+.3f} [{last['eval/gain_low']:+.3f}" in (evaluated / "stdout").read_text()


def test_eval_command_keeps_every_response_and_a_row_a_problem(finished: Path, evaluated: Path) -> None:
    written = responses(evaluated)
    assert len(written) == 2 * 16 * 4
    trained = [json.loads(line) for line in (finished / "evals/step-000003.jsonl").read_text().splitlines()]
    assert [{"policy": "adapter", **row} for row in trained] == [row for row in written if row["policy"] == "adapter"]
    table = pq.read_table(evaluated / "problems.parquet").to_pylist()
    assert [row["problem"] for row in table] == list(dict.fromkeys(row["problem_uid"] for row in written))
    assert sum(row["right"] for row in table) == sum(row["correct"] for row in trained)
    for row in table:
        assert row["gain"] == row["mean"] - row["baseline_mean"]
    page = (evaluated / "report.html").read_text()
    assert "gain, paired" in page and "https://" not in page


def test_eval_command_gone_on_with_asks_only_what_is_left(finished: Path, evaluated: Path) -> None:
    before = json.loads((evaluated / "evaluation.json").read_text())
    kept = [row | {"response": "kept"} for row in responses(evaluated)][: 16 * 4 + 10]
    text = "".join(json.dumps(row) + "\n" for row in kept)
    torn = '{"policy": "adapter", "problem_ui'
    (evaluated / "responses.jsonl").write_text(text + torn)  # killed in mid-write
    result = sparkrl("eval", *SMALL, "--adapter", str(finished), f"eval.resume={evaluated}")
    assert result.returncode == 0, result.stdout + result.stderr
    now = json.loads((evaluated / "evaluation.json").read_text())
    assert (now["adapter"], now["baseline"]) == (before["adapter"], before["baseline"])
    # Two problems of the adapter had all four answers; the third had two, and was asked again.
    lines = (evaluated / "responses.jsonl").read_text().splitlines()
    assert lines.count(torn) == 1  # left where it is, and nothing was written behind it
    assert sum(json.loads(line)["response"] != "kept" for line in lines if line != torn) == 14 * 4

    other = sparkrl("eval", *SMALL, "k=2", "--adapter", str(finished), f"eval.resume={evaluated}")
    assert other.returncode == 1
    assert "`k` is 2, the evaluation was started with 4" in other.stderr


def test_interrupt_saves_and_resume_gives_the_same_curve_as_an_uninterrupted_run(
    finished: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = subprocess.Popen(
        command("train", *SMALL, f"run_dir={run}"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment()
    )
    deadline = time.time() + TIMEOUT_S
    metrics = run / "metrics.jsonl"
    while not (metrics.is_file() and '"kind": "train"' in metrics.read_text()):
        assert process.poll() is None and time.time() < deadline, process.communicate()[0].decode()
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=120)[0].decode()
    assert "Traceback" not in output, output
    assert process.returncode == 130
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive, [child.cmdline() for child in alive]
    saved = sorted((run / "checkpoints").glob("step-??????"))
    assert saved, output
    assert json.loads((run / "summary.json").read_text())["steps"] == len(saved)

    result = sparkrl("train", *SMALL, f"loop.resume={run}")
    assert result.returncode == 0, result.stdout + result.stderr
    assert curve(run) == curve(finished)


def test_zero_learning_rate_in_bf16_drifts_nowhere_and_replay_helps(tmp_path: Path) -> None:
    run = tmp_path / "run"
    bf16 = ["rollout.dtype=bfloat16", "trainer.dtype=bfloat16", "trainer.optimizer.lr=0"]
    result = sparkrl("train", *SMALL, *bf16, f"run_dir={run}")
    assert result.returncode == 0, result.stdout + result.stderr
    first, last = (load_file(run / f"checkpoints/step-00000{n}/adapter_model.safetensors") for n in (1, 3))
    assert all(first[name].equal(last[name]) for name in first)
    evals = rows(run, "eval")
    assert evals[0]["eval/mean"] == evals[-1]["eval/mean"]
    for row in rows(run, "train"):
        assert row["agree/k3"] <= 1e-3
        assert row["agree/k3_no_replay"] > row["agree/k3"]
