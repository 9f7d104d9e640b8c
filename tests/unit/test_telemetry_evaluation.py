"""The folder of an evaluation job: answers kept and found again, the table of problems, figures, the page."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from sparkrl.config.load import from_yaml
from sparkrl.config.schema import Config
from sparkrl.errors import ConfigError, SparkrlError
from sparkrl.telemetry import (
    ADAPTER,
    BASELINE,
    EvalFolder,
    RunFolder,
    build_eval_report,
    figures_of,
    figures_table,
    gain_text,
    is_evaluation,
    problem_rows,
    problem_table,
    write_problems,
)
from sparkrl.types import Answer, EvalResult

EVIL = "</td><script>alert('x')</script> {{js}} [red]not markup[/red]"
FIGURES = {
    "k": 2, "num_problems": 2, "mean": 0.75, "low": 0.5, "high": 0.875, "pass_at_k": 1.0, "maj_at_k": 0.75,
    "mean_tokens": 12.0, "truncated": 0.25, "extraction_failures": 0.0,
}  # fmt: skip


def answers(uid: str, extracted: list[str | None], *, right: str = "4", reason: str = "stop") -> tuple[Answer, ...]:
    return tuple(
        Answer(
            problem_uid=uid,
            index=index,
            prompt=f"{uid}: 2 + 2?\n{EVIL}",
            response=f"it is {one} {EVIL}",
            answer=right,
            extracted=one,
            correct=one == right,
            reward=1.0 if one == right else -1.0,
            tokens=4 + index,
            finish_reason=reason,
        )
        for index, one in enumerate(extracted)
    )


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    cfg = Config(recipe_name="tiny", output_dir=str(tmp_path))
    cfg.eval.name = "aime"
    return cfg


def test_problem_rows_count_votes_and_compare_with_the_baseline_by_name() -> None:
    ours = [answers("a", ["4", "4", "5", None]), answers("b", ["5", "6", None, "5"], reason="length")]
    base = [answers("b", ["4", "5"]), answers("a", ["5", "5", None, "4"])]
    first, second = problem_rows(ours, base)
    assert first == {
        "problem": "a", "prompt": ours[0][0].prompt, "answer": "4", "k": 4, "right": 2, "mean": 0.5,
        "baseline_mean": 0.25, "gain": 0.25, "majority": "4", "votes": 2, "no_answer": 1, "truncated": 0, "tokens": 5.5,
    }  # fmt: skip
    assert (second["mean"], second["baseline_mean"], second["gain"]) == (0.0, 0.5, -0.5)
    assert (second["majority"], second["votes"], second["truncated"]) == ("5", 2, 4)
    assert problem_rows([answers("c", [None, None])])[0]["majority"] is None


def test_problems_written_as_parquet_are_read_back(tmp_path: Path) -> None:
    rows = problem_rows([answers("a", ["4", None])], [answers("a", ["5", "5"])]) + problem_rows([answers("b", [None])])
    write_problems(tmp_path / "problems.parquet", rows)
    assert pq.read_table(tmp_path / "problems.parquet").select(list(rows[0])).to_pylist() == rows
    assert [path.name for path in tmp_path.iterdir()] == ["problems.parquet"]


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_the_terminal_and_show_no_markup(width: int) -> None:
    rows = problem_rows([answers("a", ["4", "4"])], [answers("a", ["5", "4"])])
    out = io.StringIO()
    console = Console(file=out, width=width)
    console.print(problem_table(rows, width=width))
    console.print(figures_table([("base model", FIGURES), ("adapter", FIGURES)]))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert [name for name in lines[0].split()] == [
        "problem", "answer", "said", "right", "base", "gain", "none", "cut", "tokens",
    ]  # fmt: skip
    assert lines[1].split()[-8:] == ["4", "4", "2/2", "0.50", "+0.50", "0", "0", "4"]
    assert lines[-1].split() == [
        "adapter", "0.750", "[0.500,", "0.875]", "1.000", "0.750", "0.0%", "25.0%", "12",
    ]  # fmt: skip


def test_text_that_is_not_utf8_or_not_printable_does_no_harm(tmp_path: Path) -> None:
    rows = problem_rows([answers("\ud800\x1b[2J", ["\x1b[31m4", None])])
    write_problems(tmp_path / "problems.parquet", rows)
    assert pq.read_table(tmp_path / "problems.parquet")["problem"].to_pylist() == ["\\ud800\x1b[2J"]
    out = io.StringIO()
    Console(file=out, width=100).print(problem_table(rows, width=100))
    assert "\x1b" not in out.getvalue()


def test_table_of_a_large_set_shows_the_hardest_problems() -> None:
    rows = problem_rows([answers(f"p{n}", ["4"] if n % 2 else ["5"]) for n in range(50)])
    out = io.StringIO()
    Console(file=out, width=100).print(problem_table(rows, width=100))
    text = out.getvalue()
    assert "the 30 hardest of 50 problems" in text and text.count("0/1") == 25 and text.count("1/1") == 5


def test_gain_text_is_signed_and_absent_without_a_baseline() -> None:
    assert gain_text(FIGURES) is None
    assert gain_text(FIGURES | {"gain": 0.25, "gain_low": -0.03125, "gain_high": 0.5}) == "+0.250 [-0.031, +0.500]"


def test_folder_finds_answers_again_by_policy_after_a_kill_in_mid_write(cfg: Config) -> None:
    folder = EvalFolder.create(cfg, {"k": 2})
    assert folder.path.parent == Path(cfg.output_dir) / "evals" / "aime"
    assert (folder.path.parent / "latest").resolve() == folder.path.resolve() and is_evaluation(folder.path)
    folder.append(BASELINE, [*answers("a", ["4", "5"]), *answers("b", ["4", "4"])])
    folder.append(ADAPTER, answers("a", ["4", "4"]))
    with (folder.path / "responses.jsonl").open("a") as file:
        file.write('{"policy": "adapter", "problem_uid": "b", "in')
    again = EvalFolder.open(folder.path, {"k": 2})
    again.append(ADAPTER, answers("b", ["4", "5"]))
    assert again.answers(BASELINE) == (answers("a", ["4", "5"]), answers("b", ["4", "4"]))
    assert again.answers(ADAPTER) == (answers("a", ["4", "4"]), answers("b", ["4", "5"]))


def test_figures_of_an_evaluation_stand_in_its_record_once() -> None:
    fields = {name: value for name, value in FIGURES.items() if name not in ("maj_at_k", "extraction_failures")}
    extra = {name: FIGURES[name] for name in ("maj_at_k", "extraction_failures")}
    assert figures_of(EvalResult(name="tiny", step=3, **fields, extra=extra)) == {"name": "tiny", "step": 3, **FIGURES}


def test_folder_of_another_evaluation_is_refused(cfg: Config, tmp_path: Path) -> None:
    folder = EvalFolder.create(cfg, {"k": 2, "adapter_checksum": "ab"})
    with pytest.raises(ConfigError, match="`adapter_checksum` is cd, the evaluation was started with ab"):
        EvalFolder.open(folder.path, {"k": 2, "adapter_checksum": "cd"})
    with pytest.raises(ConfigError, match="is not the folder of an evaluation"):
        EvalFolder.open(tmp_path)


@pytest.mark.parametrize("content", ["[]", '{"about": 3}', '{"about": {}, "adapter": []}', "{"])
def test_broken_record_is_named(cfg: Config, content: str) -> None:
    folder = EvalFolder.create(cfg, {"k": 2})
    (folder.path / "evaluation.json").write_text(content)
    with pytest.raises(ConfigError, match=r"evaluation\.json (is not what `sparkrl eval` writes|cannot be read)"):
        build_eval_report(folder.path)


@pytest.mark.parametrize("content", [": [", "a: b: c", "\x00"])
def test_broken_configuration_of_a_run_is_named(cfg: Config, content: str) -> None:
    run = RunFolder.create(cfg)
    (run.path / "config.yaml").write_text(content)
    for read in (run.config, lambda: from_yaml(run.path / "config.yaml")):
        with pytest.raises(ConfigError, match=r"cannot read the run's configuration .*config\.yaml"):
            read()


def test_full_disk_is_explained_and_what_was_answered_stays(cfg: Config) -> None:
    folder = EvalFolder.create(cfg, {})
    folder.append(BASELINE, answers("a", ["4"]))
    before = (folder.path / "responses.jsonl").read_bytes()
    (folder.path / "responses.jsonl").rename(folder.path / "kept")
    (folder.path / "responses.jsonl").symlink_to("/dev/full")
    with pytest.raises(SparkrlError, match="No space left") as error:
        folder.append(BASELINE, answers("b", ["4"]))
    assert f"eval.resume={folder.path}" in str(error.value)
    assert (folder.path / "kept").read_bytes() == before


def test_report_of_an_evaluation_shows_both_policies_and_escapes_responses(cfg: Config) -> None:
    folder = EvalFolder.create(cfg, {"evaluation": "aime", "adapter": "runs/x"})
    folder.append(BASELINE, answers("a", ["5", "5"]))
    folder.append(ADAPTER, answers("a", ["4", "5"]))
    unfinished = build_eval_report(folder.path).read_text()
    assert "unfinished, 2 problems answered" in unfinished
    gained = FIGURES | {"gain": 0.5, "gain_low": 0.125, "gain_high": 0.75}
    folder.write_record({**folder.record(), BASELINE: FIGURES, ADAPTER: gained, "seconds": 3.0})
    page = build_eval_report(folder.path).read_text()
    assert "ended" in page and "+0.500" in page and "[+0.125, +0.750], clear" in page
    assert page.count("<script>") == 1 and "<td>5</td>" not in page.split("most said")[0]
    assert "it is 4 &lt;/td&gt;&lt;script&gt;" in page
    assert "<td>1/2</td><td>0.00</td>" in page and '<td class="good">+0.50</td>' in page


def test_answers_of_a_run_are_kept_by_step_and_forgotten_on_rewind(cfg: Config) -> None:
    run = RunFolder.create(cfg)
    early, late = (answers("a", ["4", None]),), (dataclasses.replace(answers("a", ["5"])[0], reward=float("nan")),)
    run.write_answers(0, early)
    run.write_answers(10, [late])
    assert (run.eval_steps(), run.answers(0)) == ([0, 10], early)
    assert run.answers(10)[0][0].reward is None  # what JSON cannot hold
    run.rewind(9)
    assert (run.eval_steps(), run.answers(10)) == ([0], ())
