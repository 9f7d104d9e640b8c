"""W&B and TensorBoard beside the run folder: the same figures, without a network, and never in the run's way."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from wandb_file import history, wandb_records

from sparkrl.config.schema import Config, WandbMode
from sparkrl.telemetry import RunFolder, RunStatus, Telemetry
from sparkrl.telemetry.dashboard import load_dashboard, tensorboard_layout, wandb_workspace
from sparkrl.telemetry.histograms import mismatch_histograms, token_k3
from sparkrl.telemetry.sinks import BEST, NAMESPACES
from sparkrl.telemetry.wandb_sink import has_key
from sparkrl.types import Answer, EvalResult

ROOT = Path(__file__).resolve().parents[2]
EVALUATION = EvalResult(
    name="tiny", step=0, k=2, num_problems=1, mean=0.5, low=0.1, high=0.9, pass_at_k=1.0, mean_tokens=3.0, truncated=0.0
)
ANSWERS = tuple(
    Answer(
        problem_uid="p",
        index=index,
        prompt="2 + 2?",
        response="*4*",
        answer="4",
        extracted="4",
        correct=index == 0,
        reward=1.0,
        tokens=3,
        finish_reason="stop",
    )
    for index in range(2)
)
DLOGP = np.array([-0.5, -1e-4, 0.0, 1e-4, 0.5, np.nan], dtype=np.float32)


@pytest.fixture
def cfg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", os.devnull)
    cfg = Config(recipe_name="tiny", seed=1, output_dir=str(tmp_path))
    cfg.telemetry.wandb = WandbMode.disabled
    cfg.loop.num_steps = 3
    return cfg


def record(cfg: Config, run: RunFolder, steps: range) -> str:
    """A run of a few steps; returns what the terminal said."""
    out = io.StringIO()
    telemetry = Telemetry(cfg, run, console=Console(file=out, width=200))
    if steps.start == 1:
        telemetry.log_eval(EVALUATION, [ANSWERS])
    for step in steps:
        telemetry.log_step(step, {"agree/k3": 1e-4 * step, "train/loss": float("nan")}, dlogp=DLOGP)
    telemetry.finish(RunStatus.FINISHED)
    return out.getvalue()


def test_token_k3_equals_the_formula_in_extended_precision() -> None:
    dlogp = np.array([-3.0, -0.5, -1e-3, -9e-4, -1e-6, -1e-12, 0.0, 1e-9, 9.99e-4, 1e-3, 0.1, 2.0])
    exact = np.array([float(np.expm1(np.longdouble(d)) - np.longdouble(d)) for d in dlogp])
    tiny = np.abs(dlogp) < 1e-5  # there even extended precision cancels; the leading terms are exact to 1e-10
    exact[tiny] = dlogp[tiny] ** 2 / 2 + dlogp[tiny] ** 3 / 6
    np.testing.assert_allclose(token_k3(dlogp), exact, rtol=1e-9, atol=0)


def test_mismatch_histograms_count_every_finite_token_once() -> None:
    plain, k3 = mismatch_histograms(DLOGP)
    assert (plain.name, k3.name) == ("agree/dlogp", "agree/k3_tokens")
    assert (sum(plain.counts), plain.edges[0], plain.edges[-1]) == (5, -0.5, 0.5)
    # 0 counts at 1e-16; 1e-4 gives 5e-9, bin 1e-8.5 to 1e-8; +-0.5 give 0.149 and 0.107, bin 1e-1 to 1e-0.5.
    found = {k3.edges[n]: count for n, count in enumerate(k3.counts) if count}
    assert found == {-16.0: 1, -8.5: 2, -1.0: 2}
    assert mismatch_histograms(np.array([np.nan, np.inf])) == ()


def test_tensorboard_holds_what_metrics_jsonl_holds(cfg: Config) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    cfg.telemetry.tensorboard = True
    run = RunFolder.create(cfg)
    record(cfg, run, range(1, 4))
    events = EventAccumulator(
        str(run.path / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0, "histograms": 0}
    )
    events.Reload()
    for row in run.rows("metrics"):
        for name, value in row.items():
            if "/" in name and value is not None:
                found = {event.step: event.value for event in events.Scalars(name)}
                assert found[row["step"]] == pytest.approx(value, rel=1e-6), name
    (_, _, last) = events.Histograms("agree/k3_tokens")
    assert (last.step, last.histogram_value.num) == (3, 5.0)
    tags = events.Tags()["tensors"]
    assert {"config/text_summary", "samples/eval/text_summary", "problems/eval/text_summary"} <= set(tags)
    text = events.Tensors("samples/eval/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "    response: *4*" in text  # indented: shown as it is, not as Markdown


def test_tensorboard_of_a_resumed_run_forgets_the_steps_that_are_made_anew(cfg: Config) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    cfg.telemetry.tensorboard = True
    run = RunFolder.create(cfg)
    record(cfg, run, range(1, 4))
    run.rewind(1)
    record(cfg, RunFolder.open(run.path), range(2, 4))
    events = EventAccumulator(str(run.path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert [event.step for event in events.Scalars("agree/k3")] == [1, 2, 3]


def test_wandb_file_equals_metrics_jsonl_and_is_defined_by_namespace(cfg: Config) -> None:
    cfg.telemetry.wandb = WandbMode.offline
    run = RunFolder.create(cfg)
    record(cfg, run, range(1, 4))
    rows = history(run.path)
    for written in run.rows("metrics"):
        names = {name for name, value in written.items() if "/" in name and value is not None}
        (logged,) = [row for row in rows if row["step"] == written["step"] and names & set(row)]
        assert {name: logged[name] for name in names} == {name: written[name] for name in names}
    defined = {r.metric.glob_name or r.metric.name: r.metric for r in wandb_records(run.path) if r.HasField("metric")}
    for namespace in NAMESPACES:
        assert defined[f"{namespace}/*"].step_metric == "step"
    assert defined["eval/mean"].summary.max and defined["agree/route_agreement"].summary.min
    assert set(BEST) <= set(defined)


def test_wandb_run_is_gone_on_with_under_its_own_id(cfg: Config) -> None:
    cfg.telemetry.wandb = WandbMode.offline
    run = RunFolder.create(cfg)
    record(cfg, run, range(1, 3))
    time.sleep(1.1)  # W&B names its folders by the second
    record(cfg, RunFolder.open(run.path), range(3, 4))
    wandb_id = json.loads((run.path / "wandb_run.json").read_text())["id"]
    folders = sorted((run.path / "wandb").glob("offline-run-*"))
    assert len(folders) == 2 and all(folder.name.endswith(wandb_id) for folder in folders)


def test_k3_above_its_limit_alerts_once_until_it_was_below_again(cfg: Config) -> None:
    cfg.telemetry.wandb = WandbMode.offline
    cfg.telemetry.tensorboard = True
    run = RunFolder.create(cfg)
    out = io.StringIO()
    telemetry = Telemetry(cfg, run, console=Console(file=out, width=400))
    for step, k3 in enumerate((1e-3, 0.02, 0.03, 1e-3, 0.05), start=1):
        telemetry.log_step(step, {"agree/k3": k3})
    telemetry.finish(RunStatus.FINISHED)
    assert re.findall(r"warning: k3 between trainer and rollout is (\S+) at step (\d)", out.getvalue()) == [
        ("2.0e-02", "2"),
        ("5.0e-02", "5"),
    ]
    history(run.path)  # waits until W&B's own process has written everything
    alerts = [record.alert for record in wandb_records(run.path) if record.HasField("alert")]
    assert {alert.title for alert in alerts} == {"k3 above its limit"}
    assert "2.0e-02 at step 2" in alerts[0].text and alerts[0].level == "WARN"


def test_dashboard_names_only_metrics_that_are_documented() -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    cells = re.findall(r"^\| (`.*?) \|", text, re.M)
    documented = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    namespaces = {name.partition("/")[0] for name in documented if re.fullmatch(r"[a-z]+/\w+", name)}
    assert "correct" in namespaces and namespaces <= set(NAMESPACES)
    panels = [panel for section in load_dashboard()["sections"] for panel in section["panels"]]
    shown = {name for panel in panels for name in panel["metrics"]}
    assert shown <= documented, shown - documented
    assert set(BEST) <= documented
    layout = tensorboard_layout(load_dashboard())
    assert layout["Do trainer and rollout agree"]["k3"] == ["Multiline", ["agree/k3", "agree/k3_no_replay"]]


def test_dashboard_as_a_wandb_workspace_has_its_sections_panels_and_axis() -> None:
    pytest.importorskip("wandb_workspaces")
    workspace = wandb_workspace(load_dashboard(), entity="me", project="sparkrl")
    found = {one.name: [(p.title, list(p.y), bool(p.log_y)) for p in one.panels] for one in workspace.sections}
    for section in load_dashboard()["sections"]:
        expected = [(p["title"], p["metrics"], p.get("log", False)) for p in section["panels"]]
        assert found[section["name"]] == expected
    assert workspace.settings.x_axis == "step"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [("machine api.wandb.ai login user password k\n", True), ("machine example.com login user password k\n", False)],
)
def test_key_is_found_in_netrc_for_the_servers_own_host(
    cfg: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, expected: bool
) -> None:
    (tmp_path / "netrc").write_text(lines)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert has_key() is expected


PROGRAM = textwrap.dedent(
    """
    import os, sys, time, warnings
    from sparkrl.config.schema import Config, WandbMode
    from sparkrl.telemetry import RunFolder, RunStatus, Telemetry

    cfg = Config(recipe_name="tiny", output_dir=sys.argv[1])
    cfg.telemetry.wandb = WandbMode[sys.argv[2]]
    cfg.telemetry.wandb_timeout_s = 5.0
    began = time.perf_counter()
    telemetry = Telemetry(cfg, RunFolder.create(cfg))
    print("started", time.perf_counter() - began, flush=True)
    telemetry.log_step(1, {"agree/k3": 1e-4})
    input()  # the test may take the network away here
    began = time.perf_counter()
    for step in range(2, 52):
        telemetry.log_step(step, {"agree/k3": 1e-4})
    print("logged", time.perf_counter() - began, flush=True)
    telemetry.finish(RunStatus.FINISHED)
    """
)


class Program:
    """A run of 51 steps in a process of its own, as W&B keeps a server process and settings per process."""

    def __init__(self, folder: Path, mode: str, **environment: str) -> None:
        env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        env = {**env, "NETRC": os.devnull, **environment}
        self.folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder), mode],
            env={name: value for name, value in env.items() if value},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._began_s = time.perf_counter()
        self.lines: list[str] = []

    def wait_for(self, word: str) -> float:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)
            if line.startswith(word):
                return float(line.split()[1])
        raise AssertionError(self._process.communicate()[1])

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def finish(self) -> tuple[float, str]:
        """Seconds of the whole process, and what it wrote to stderr."""
        rest, errors = self._process.communicate(timeout=200)
        assert self._process.returncode == 0, errors
        self.lines += rest.splitlines()
        return time.perf_counter() - self._began_s, errors

    def steps(self) -> int:
        return len(RunFolder.open(self.folder / "tiny" / "latest").rows("metrics"))


def test_wandb_without_a_server_starts_within_bounds_and_writes_offline(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    program = Program(tmp_path, "auto", WANDB_BASE_URL=url, WANDB_API_KEY="a" * 40)
    assert program.wait_for("started") < 15.0
    program.go_on()
    assert program.wait_for("logged") < 5.0
    _, errors = program.finish()
    assert errors.count("W&B is not reached") == 1 and "wandb sync" in errors
    assert program.steps() == 51
    assert list(tmp_path.glob("tiny/latest/wandb/offline-run-*/run-*.wandb"))


def test_wandb_online_without_a_key_neither_asks_for_one_nor_stops(tmp_path: Path) -> None:
    program = Program(tmp_path, "online")
    program.wait_for("started")
    program.go_on()
    _, errors = program.finish()
    assert "W&B is not reached: there is no key" in errors
    assert program.steps() == 51


def test_empty_wandb_variables_count_as_unset(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg.telemetry.wandb = WandbMode.auto
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE"):
        monkeypatch.setenv(name, "")
    run = RunFolder.create(cfg)
    assert "(W&B offline)" in record(cfg, run, range(1, 2))
    assert {row["step"] for row in history(run.path)} == {0, 1}
    assert os.environ["WANDB_MODE"] == ""


def test_wandb_without_a_home_folder_prints_nothing(tmp_path: Path) -> None:
    program = Program(tmp_path, "offline", HOME="", XDG_CACHE_HOME="")
    program.wait_for("started")
    program.go_on()
    _, errors = program.finish()
    assert errors == ""


class Server(BaseHTTPRequestHandler):
    """As much of a W&B server as a run needs to start; once `gone` is set it takes requests and never answers."""

    gone = threading.Event()
    bucket: dict = {  # noqa: RUF012
        "id": "b", "name": "r", "displayName": "r", "description": "", "config": "{}", "sweepName": None,
        "historyLineCount": 0, "eventsLineCount": 0, "logLineCount": 0, "storageId": "s",
        "project": {"id": "p", "name": "sparkrl", "entity": {"id": "e", "name": "me"}},
    }  # fmt: skip

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.gone.is_set():
            time.sleep(300)
        data = {"upsertBucket": {"bucket": self.bucket, "inserted": True}, "model": {"bucket": None}, "entity": None}
        body = json.dumps({"data": data} if "graphql" in self.path else {"exitcode": None, "limits": {}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    Server.gone.clear()
    running = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    running.daemon_threads = True
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()


def test_wandb_server_that_falls_silent_slows_no_step_and_no_end(tmp_path: Path, server: str) -> None:
    program = Program(tmp_path, "auto", WANDB_BASE_URL=server, WANDB_API_KEY="a" * 40)
    program.wait_for("started")
    assert any("(W&B online)" in line for line in program.lines)
    time.sleep(2.0)
    Server.gone.set()
    program.go_on()
    assert program.wait_for("logged") < 5.0
    whole_s, _ = program.finish()
    assert whole_s < 40.0
    assert program.steps() == 51
    assert list(tmp_path.glob("tiny/latest/wandb/run-*/run-*.wandb"))  # what was not uploaded is there for `wandb sync`
