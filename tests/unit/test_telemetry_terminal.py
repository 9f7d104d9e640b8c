"""What a terminal shows: on narrow ones fewer columns but whole figures, colours only where they are wanted."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from sparkrl.telemetry.terminal import Terminal

ROW = {
    "step": 120,
    "kind": "train",
    "rollout/reward_mean": -0.75,
    "rollout/accuracy": 0.125,
    "rollout/response_tokens_mean": 1024.0,
    "agree/k3": 8e-14,
    "agree/dlogp_p999": 4e-6,
    "train/entropy": 0.12,
    "train/clip_fraction": 0.0,
    "train/grad_norm": 0.055,
    "time/rollout_s": 0.7,
    "time/train_s": 1.2,
    "time/step_s": 2.0,
    "perf/rollout_tokens_per_s": 12345.0,
}
FIGURES = {
    "step": "120", "reward": "-0.75", "acc": "0.125", "len": "1024", "k3": "8e-14", "dlogp": "4e-06", "entr": "0.12",
    "clip": "0.000", "grad": "0.055", "roll s": "0.7", "train s": "1.2", "tok/s": "12,345",
}  # fmt: skip
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOUR = re.compile(r"\x1b\[[0-9;]*[34][0-7][0-9;]*m")


def shown(width: int, **options) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, color_system="standard", **options)
    terminal = Terminal(title="quickstart", num_steps=200, num_done=0, k3_limit=1e-3, console=console)
    terminal.step(ROW)
    terminal.warn("watch out")
    terminal.close()
    return file.getvalue()


@pytest.mark.parametrize(
    ("width", "gone"),
    [
        # 62 characters in 12 columns with 11 spaces between them; each one that goes takes its space with it
        (73, []),
        (72, ["grad"]),
        (66, ["grad", "clip"]),
        (60, ["grad", "clip", "entr"]),
        (40, ["grad", "clip", "entr", "dlogp", "tok/s", "roll s"]),
        (24, ["grad", "clip", "entr", "dlogp", "tok/s", "roll s", "train s", "len"]),
    ],
)
def test_table_on_a_narrow_terminal_has_fewer_columns_and_whole_figures(width, gone):
    lines = ESCAPES.sub("", shown(width)).splitlines()
    kept = {name: figure for name, figure in FIGURES.items() if name not in gone}
    heading = next(at for at, line in enumerate(lines) if line.split()[:1] == ["step"])
    assert " ".join(lines[heading].split()) == " ".join(kept)
    assert lines[heading + 1].split() == list(kept.values())
    assert max(map(len, lines)) <= width


def test_colours_are_left_out_where_the_user_wants_none(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert COLOUR.search(shown(120))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not COLOUR.search(shown(120))


def test_a_file_gets_one_plain_line_a_step():
    file = io.StringIO()
    terminal = Terminal(title="quickstart", num_steps=200, num_done=0, k3_limit=1e-3, console=Console(file=file))
    terminal.step(ROW)
    terminal.close()
    (line,) = file.getvalue().splitlines()
    assert line.startswith("step 120/200  ") and "\x1b" not in line and line.endswith("eta 0:02:40")
    assert all(f"{name} {figure}" in line for name, figure in FIGURES.items() if name != "step")
