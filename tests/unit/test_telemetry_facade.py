"""Telemetry as the loop uses it: rows, times, samples, W&B, terminal."""

from __future__ import annotations

import io
import json
import os
import time
import warnings

import numpy as np
import pytest
from rich.console import Console
from wandb_file import history, wandb_records

from sparkrl.config.schema import Config, WandbMode
from sparkrl.errors import SparkrlError
from sparkrl.evals.runner import answers_of
from sparkrl.telemetry import RunFolder, RunStatus, Telemetry
from sparkrl.telemetry.samples import pick_samples
from sparkrl.types import EvalResult, FinishReason, Group, Problem, Response, Score, ScoredGroup


def make_group(uid, verdicts):
    problem = Problem(
        uid=uid,
        messages=({"role": "user", "content": f"question {uid}"},),
        answer="7",
        data_source="d",
        prompt_ids=np.zeros(2, dtype=np.int32),
    )
    responses = tuple(
        Response(
            uid=f"{uid}/{n}",
            token_ids=np.zeros(5, dtype=np.int32),
            log_probs=np.zeros(5, dtype=np.float32),
            routed_experts=np.zeros((6, 1, 1), dtype=np.uint8),
            policy_version=0,
            finish_reason=FinishReason.STOP,
            text=f"<b>{uid}</b> {verdict}",
        )
        for n, verdict in enumerate(verdicts)
    )
    scores = tuple(Score(reward=2.0 * v - 1.0, correct=v, extracted="7" if v else None) for v in verdicts)
    return ScoredGroup(group=Group(problem=problem, responses=responses), scores=scores)


def make_eval(step, mean):
    return EvalResult(
        name="heldout",
        step=step,
        k=8,
        num_problems=4,
        mean=mean,
        low=mean - 0.1,
        high=mean + 0.1,
        pass_at_k=0.9,
        mean_tokens=12.0,
        truncated=0.0,
        extra={"maj_at_k": 0.7},
    )


@pytest.fixture
def cfg(tmp_path):
    cfg = Config(recipe_name="tiny", seed=1, output_dir=str(tmp_path))
    cfg.telemetry.wandb = WandbMode.disabled
    cfg.loop.num_steps = 2
    return cfg


@pytest.fixture
def out():
    return io.StringIO()


def start(cfg, out, *, run=None):
    run = run or RunFolder.create(cfg)
    return Telemetry(cfg, run, console=Console(file=out, width=200)), run


def test_rows_of_a_whole_run_hold_the_loop_figures_and_stage_times(cfg, out):
    telemetry, run = start(cfg, out)
    with telemetry.setup_stage("server", "starting server"):
        time.sleep(0.05)
    telemetry.note_setup(num_problems=4)
    with telemetry.stage("eval"):
        time.sleep(1.0)
    telemetry.log_eval(make_eval(0, 0.5))
    for step in (1, 2):
        for _ in range(2):
            with telemetry.stage("rollout"):
                time.sleep(0.02)
        telemetry.log_step(step, {"agree/k3": 1e-4 * step, "train/loss": float("nan")})
    telemetry.log_eval(make_eval(2, 0.8))
    summary = telemetry.finish(RunStatus.FINISHED)

    first, one, two, last = run.rows("metrics")
    assert (first["step"], first["kind"], first["k"], first["num_problems"]) == (0, "eval", 8, 4)
    assert (first["eval/mean"], first["eval/maj_at_k"], first["name"]) == (0.5, 0.7, "heldout")
    assert first["time/eval_s"] >= 1.0
    assert "time/eval_s" not in last
    assert (one["step"], one["kind"], one["agree/k3"], one["train/loss"]) == (1, "train", 1e-4, None)
    assert 0.04 <= one["time/rollout_s"] <= one["time/step_s"] < 1.0  # the evaluation is no part of step 1
    assert two["agree/k3"] == 2e-4 and two["time/rollout_s"] >= 0.04
    assert summary == json.loads((run.path / "summary.json").read_text())
    assert summary["setup"]["num_problems"] == 4 and summary["setup"]["server_s"] >= 0.05
    assert (summary["eval"]["start"]["mean"], summary["eval"]["end"]["mean"], summary["steps"]) == (0.5, 0.8, 2)
    assert (run.path / "report.html").is_file()


def test_terminal_that_is_no_terminal_prints_one_plain_line_a_step(cfg, out):
    telemetry, run = start(cfg, out)
    with telemetry.setup_stage("server", "starting server"):
        pass
    telemetry.log_eval(make_eval(0, 0.5))
    telemetry.log_step(1, {"rollout/reward_mean": -0.25, "rollout/accuracy": 0.375, "agree/k3": 2e-4})
    telemetry.finish(RunStatus.INTERRUPTED)
    lines = out.getvalue().splitlines()
    assert lines[0] == f"run folder: {run.path} (W&B disabled)"
    assert lines[1:3] == ["starting server ...", "heldout mean@8 after 0 steps: 0.500 [0.400, 0.600]"]
    assert lines[3].startswith("step 1/2  reward -0.25  acc 0.375  len -  k3 2e-04  dlogp -")
    assert lines[4] == f"interrupted: {run.path / 'report.html'}"
    assert "\x1b" not in out.getvalue()


def test_live_terminal_shows_the_table_and_survives_output_of_others(cfg, out):
    run = RunFolder.create(cfg)
    telemetry = Telemetry(cfg, run, console=Console(file=out, width=100, force_terminal=True))
    print("a line of somebody else")
    telemetry.log_step(1, {"rollout/accuracy": 0.375, "agree/k3": 0.5})
    telemetry.finish(RunStatus.FINISHED)
    text = out.getvalue()
    for part in ("reward", "0.375", "1/2", "a line of somebody else", "above `telemetry.k3_limit`"):
        assert part in text


def test_k3_above_its_limit_is_warned_about_once(cfg, out):
    telemetry, _ = start(cfg, out)
    for step, k3 in enumerate((1e-3, 0.02, 0.03), start=1):
        telemetry.log_step(step, {"agree/k3": k3})
    telemetry.finish(RunStatus.FINISHED)
    assert out.getvalue().count("warning: k3 between trainer and rollout is 2.0e-02 at step 2") == 1
    assert out.getvalue().count("warning:") == 1


def test_resumed_run_counts_the_steps_it_already_made(cfg, out):
    telemetry, run = start(cfg, out)
    telemetry.log_step(1, {})
    again = io.StringIO()
    resumed, _ = start(cfg, again, run=RunFolder.open(run.path))
    resumed.log_step(2, {})
    assert resumed.finish(RunStatus.FINISHED)["steps"] == 2
    telemetry.finish(RunStatus.FAILED)


def test_metrics_that_cannot_be_written_stop_the_run_with_a_clear_error(cfg, out):
    telemetry, run = start(cfg, out)
    (run.path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(SparkrlError, match="No space left"):
        telemetry.log_step(1, {})
    telemetry.finish(RunStatus.FAILED)


def test_report_that_fails_costs_a_warning_and_not_the_summary(cfg, out):
    telemetry, run = start(cfg, out)
    (run.path / "report.html").mkdir()
    with pytest.warns(UserWarning, match="the report failed"):
        telemetry.finish(RunStatus.FINISHED)
    assert telemetry.view_failures == 1
    assert run.summary() is not None


def test_samples_are_right_and_wrong_in_turn_from_different_problems(cfg, out):
    groups = [make_group("a", [True, True]), make_group("b", [True, False]), make_group("c", [False, False])]
    picked = pick_samples(groups, step=3, kind="train", num_samples=4)
    assert [(s["uid"], s["correct"]) for s in picked] == [("a/0", True), ("b/1", False), ("b/0", True), ("c/0", False)]
    assert picked[0] == {
        "step": 3, "kind": "train", "uid": "a/0", "prompt": "question a", "response": "<b>a</b> True", "answer": "7",
        "extracted": "7", "correct": True, "reward": 1.0, "tokens": 5, "finish_reason": "stop",
    }  # fmt: skip
    only_wrong = pick_samples([groups[2]], step=3, kind="train", num_samples=4)
    assert [s["uid"] for s in only_wrong] == ["c/0", "c/1"]


def test_wandb_offline_records_metrics_histogram_and_samples(cfg, out, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", os.devnull)
    cfg.telemetry.wandb = WandbMode.auto
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        telemetry, run = start(cfg, out)
        telemetry.log_eval(make_eval(0, 0.5), [answers_of(make_group("a", [True, False]))])
        dlogp = np.array([-0.5, 0.0, 0.0, 0.5, np.nan], dtype=np.float32)
        telemetry.log_step(1, {"agree/k3": 1e-4}, dlogp=dlogp, samples=[make_group("b", [True])])
        telemetry.finish(RunStatus.FINISHED)
    assert "(W&B offline)" in out.getvalue()
    rows = history(run.path)
    (evaluated,) = [row for row in rows if "eval/mean" in row]
    assert (evaluated["step"], evaluated["eval/mean"]) == (0, 0.5)
    (trained,) = [row for row in rows if "agree/k3" in row]
    assert (trained["step"], trained["agree/k3"]) == (1, 1e-4)
    counts, edges = trained["agree/dlogp/values"], trained["agree/dlogp/bins"]
    assert (sum(counts), edges[0], edges[-1]) == (4, -0.5, 0.5)
    (table,) = [row for row in rows if "samples/eval/_type" in row]
    assert (table["samples/eval/_type"], table["samples/eval/nrows"]) == ("table-file", 2)
    defined = {r.metric.name or r.metric.glob_name for r in wandb_records(run.path) if r.HasField("metric")}
    assert {"step", "eval/mean", "agree/k3"} <= defined


def test_wandb_that_cannot_start_costs_one_warning_and_the_run_goes_on(cfg, out):
    cfg.telemetry.wandb = WandbMode.offline
    cfg.telemetry.project = "not/a:valid?name"
    with pytest.warns(UserWarning, match="W&B could not start") as caught:
        telemetry, run = start(cfg, out)
        telemetry.log_step(1, {"agree/k3": 1e-4})
        telemetry.finish(RunStatus.FINISHED)
    assert len(caught) == 1
    assert "(W&B disabled)" in out.getvalue()
    assert [row["agree/k3"] for row in run.rows("metrics")] == [1e-4]


def test_wandb_that_breaks_during_the_run_costs_one_warning_and_is_given_up(cfg, out):
    import wandb

    cfg.telemetry.wandb = WandbMode.offline
    telemetry, run = start(cfg, out)
    wandb.finish()
    with pytest.warns(UserWarning, match="W&B could not log") as caught:
        for step in range(1, 7):
            telemetry.log_step(step, {"agree/k3": 1e-4})
        telemetry.finish(RunStatus.FINISHED)
    assert len(caught) == 1
    assert len(run.rows("metrics")) == 6
