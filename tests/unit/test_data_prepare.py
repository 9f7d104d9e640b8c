"""`sparkrl data prepare`, on small files with the published schemas, through the real loader."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkrl.cli import main
from sparkrl.data import load_problems, load_tokenizer
from sparkrl.data.prepare import prepare
from sparkrl.errors import DataError

CHECKPOINT = Path(__file__).resolve().parents[2] / "recipes/quickstart/checkpoint"


def dapo_row(problem: str, answer: str, index: str = "x") -> dict:
    """As in BytedTsinghua-SIA/DAPO-Math-17k."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": f"Solve the following.\n\n{problem}", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def write(path: Path, rows: list[dict]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_repeated_and_contradictory_problems_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = [dapo_row(f"What is {i}+{i}?", str(2 * i)) for i in range(20)] * 100
    rows += [dapo_row("What is 3+3?", "7"), dapo_row("no answer", "  "), dapo_row("new", "5")]
    out = tmp_path / "made" / "dapo.parquet"
    prepared = prepare("dapo_math", source=str(write(tmp_path / "raw.parquet", rows)), out=out)
    # 19 of 20 problems agree: 99 repeats of each are left out, and all 101 rows of the one that does not
    assert prepared.counts == {
        "rows": 2003, "no_answer": 1, "duplicate": 19 * 99, "conflicting_answers": 101, "kept": 20,
    }  # fmt: skip
    assert "20 problems from 2,003 rows" in prepared.describe()
    written = pq.read_table(out).to_pylist()
    assert [row["reward_model"]["ground_truth"] for row in written] == [str(2 * i) for i in range(20) if i != 3] + ["5"]
    assert list(written[0]) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert written[0]["prompt"] == [{"role": "user", "content": "Solve the following.\n\nWhat is 0+0?"}]
    manifest = json.loads(prepared.manifest.read_text())
    assert manifest["sha256"] == hashlib.sha256(out.read_bytes()).hexdigest()
    assert (manifest["name"], manifest["counts"]) == ("dapo_math", prepared.counts)
    assert sorted(file.name for file in out.parent.iterdir()) == ["dapo.manifest.json", "dapo.parquet"]


def test_prepared_file_and_its_folder_are_what_a_run_reads(tmp_path: Path) -> None:
    rows = [dapo_row(f"{i}+1", str(i + 1)) for i in range(5)] * 3
    out = tmp_path / "made" / "dapo.parquet"
    prepare("dapo_math", source=str(write(tmp_path / "raw.jsonl", rows)), out=out)
    for path in (out, out.parent):
        loaded = load_problems(path, load_tokenizer(CHECKPOINT), max_prompt_tokens=200)
        assert [problem.answer for problem in loaded.problems] == ["1", "2", "3", "4", "5"]
        assert loaded.counts["rows"] == loaded.counts["kept"] == 5


def test_same_source_gives_the_same_bytes(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw.parquet", [dapo_row(f"{i}+1", str(i + 1)) for i in range(9)])
    first, second = (prepare("dapo_math", source=str(raw), out=tmp_path / name) for name in ("a.parquet", "b.parquet"))
    assert first.file.read_bytes() == second.file.read_bytes()


def test_processed_copy_keeps_its_chat_prompt_and_a_bare_one_gets_the_instruction(tmp_path: Path) -> None:
    processed = {
        "prompt": "What is 1+1?",
        "solution": "2",
        "data_source": "math_dapo",
        "source_prompt": [{"content": "Solve step by step: What is 1+1?", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
    }
    bare = {name: value for name, value in processed.items() if name != "source_prompt"}
    contents = []
    for name, row in (("a", processed), ("b", bare)):
        out = tmp_path / f"{name}.parquet"
        prepare("dapo_math", source=str(write(tmp_path / f"{name}.jsonl", [row])), out=out)
        contents.append(pq.read_table(out).to_pylist()[0]["prompt"][0]["content"])
    assert contents[0] == "Solve step by step: What is 1+1?"
    assert contents[1].startswith("Solve the following math problem step by step. The last line of your response")
    assert "\n\nWhat is 1+1?\n\n" in contents[1] and contents[1].endswith('on its own line after "Answer:".')


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"prompt": "What is 1+1?", "answer": "2"}, "2"),
        ({"prompt": "What is 1+1?", "solution": "2"}, "2"),
        ({"prompt": "What is 1+1?", "solution": "By induction.\nSo 2.", "answer": "2"}, "2"),
        ({"problem": "What is 1+1?", "answer": 2}, "2"),
        ({"question": "What is 1+1?", "solution": "\\frac{4}{2}"}, "\\frac{4}{2}"),
    ],
)
def test_flat_copies_are_recognised(row: dict, answer: str, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    prepare("dapo_math", source=str(write(tmp_path / "flat.jsonl", [row])), out=out)
    (written,) = pq.read_table(out).to_pylist()
    assert "\n\nWhat is 1+1?\n\n" in written["prompt"][0]["content"]
    assert written["reward_model"]["ground_truth"] == answer


def test_worked_solution_is_no_answer(tmp_path: Path) -> None:
    row = {"prompt": "What is 1+1?", "solution": "Count on your fingers.\nIt is 2."}
    with pytest.raises(DataError, match=r"row 1: no answer \(`reward_model.ground_truth` must be text or a number"):
        prepare("dapo_math", source=str(write(tmp_path / "a.jsonl", [row])), out=tmp_path / "out.parquet")


def test_aime_2024_of_30_problems_32_times_over_becomes_30(tmp_path: Path) -> None:
    rows = [dapo_row(f"AIME problem {i}", f"{i:03d}") for i in range(30)] * 32
    out = tmp_path / "aime.parquet"
    prepared = prepare("aime2024", source=str(write(tmp_path / "raw.parquet", rows)), out=out)
    assert prepared.counts == {"rows": 960, "duplicate": 930, "kept": 30}
    assert [row["reward_model"]["ground_truth"] for row in pq.read_table(out).to_pylist()] == [
        str(i) for i in range(30)
    ]


def test_aime_2025_with_problem_and_answer_columns_is_converted(tmp_path: Path) -> None:
    odd = {0: "336^\\circ", 1: "\\boxed{204}", 2: "$12^{\\circ}$"}
    rows = [{"problem": f"Find x_{i}.", "answer": odd.get(i, str(i)), "id": str(i)} for i in range(30)]
    out = tmp_path / "aime.parquet"
    prepare("aime2025", source=str(write(tmp_path / "raw.jsonl", rows)), out=out)
    written = pq.read_table(out).to_pylist()
    assert [row["reward_model"]["ground_truth"] for row in written[:4]] == ["336", "204", "12", "3"]
    assert "Find x_7." in written[7]["prompt"][0]["content"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([dapo_row(f"p{i}", str(i)) for i in range(29)], "aime2024 has 30 problems, but .* holds 29 different ones"),
        ([dapo_row(f"p{i}", str(i * 40)) for i in range(30)], "row 26: an AIME answer is a whole number from 0 to 999"),
        ([{"text": "x"}], "no usable problem in .*: row 1: no prompt"),
    ],
)
def test_wrong_aime_files_are_refused_and_nothing_is_written(rows: list[dict], message: str, tmp_path: Path) -> None:
    source = write(tmp_path / "raw.jsonl", rows)
    with pytest.raises(DataError, match=message):
        prepare("aime2024", source=str(source), out=tmp_path / "made" / "aime.parquet")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["raw.jsonl"]


def test_broken_sources_are_explained_and_an_older_file_is_kept(tmp_path: Path, capsys) -> None:
    out = tmp_path / "out.parquet"
    out.write_text("older")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not really")
    (tmp_path / "broken.jsonl").write_text('{"prompt": \n')
    (tmp_path / "notes.txt").write_text("hello")
    for source, message in (
        ("broken.parquet", "cannot read the data set"),
        ("broken.jsonl", "cannot read the data set"),
        ("notes.txt", "no data in"),
        ("a/b/c/missing.parquet", "no data set at"),
    ):
        assert main(["data", "prepare", "dapo_math", "--source", str(tmp_path / source), "--out", str(out)]) == 1
        assert message in capsys.readouterr().err
    assert out.read_text() == "older"
    assert main(["data", "prepare", "moon", "--out", str(out)]) == 1
    assert "no data set named `moon`; there are: dapo_math, aime2024, aime2025" in capsys.readouterr().err
    assert main(["data", "prepare", "aime24", "--out", str(out)]) == 1
    assert "did you mean `aime2024`?" in capsys.readouterr().err
    assert main(["data", "prepare", "dapo_math", "--out", str(tmp_path / "x.csv")]) == 1
    assert "must end in .parquet" in capsys.readouterr().err


def test_published_data_set_without_a_network_says_what_to_do(tmp_path: Path) -> None:
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-m", "sparkrl.cli", "data", "prepare", "dapo_math", "--out", str(tmp_path / "x.parquet")],
        capture_output=True,
        text=True,
        check=False,
        env=offline,
    )
    assert result.returncode == 1
    assert "cannot read the data set BytedTsinghua-SIA/DAPO-Math-17k" in result.stderr
    assert "--source FILE" in result.stderr and "Traceback" not in result.stderr
