"""Reading, cleaning and rendering of data sets."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sparkrl.data import load_problems, load_tokenizer
from sparkrl.errors import CheckpointError, DataError

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m['content'] }}>{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
CHARACTERS = "<>=abcdefghijklmnopqrstuvwxyz0123456789+ "


@pytest.fixture(scope="module")
def tokenizer():
    """One token a character, so that rendered ids can be written down by hand."""
    model = Tokenizer(
        models.WordLevel({c: i for i, c in enumerate(CHARACTERS)} | {"?": len(CHARACTERS)}, unk_token="?")
    )
    model.pre_tokenizer = pre_tokenizers.Split(pattern="", behavior="isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="?")
    fast.chat_template = TEMPLATE
    return fast


def row(prompt, answer, **more):
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return {"prompt": messages, "reward_model": {"ground_truth": answer, "style": "rule"}, "data_source": "d", **more}


def write_lines(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_load_problems_from_json_lines_renders_through_the_chat_template(tmp_path, tokenizer):
    loaded = load_problems(write_lines(tmp_path / "a.jsonl", [row("1+2", "3")]), tokenizer, max_prompt_tokens=10)
    (problem,) = loaded.problems
    assert problem.prompt_ids.dtype == np.int32
    assert problem.prompt_ids.tolist() == [CHARACTERS.index(c) for c in "<1+2>="]
    assert (problem.answer, problem.data_source) == ("3", "d")
    assert problem.messages == ({"role": "user", "content": "1+2"},)


def test_load_problems_from_parquet_equals_json_lines(tmp_path, tokenizer):
    rows = [row("1+2", "3"), row("a 4", "5")]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    from_parquet = load_problems(tmp_path / "a.parquet", tokenizer, max_prompt_tokens=10)
    from_lines = load_problems(write_lines(tmp_path / "a.jsonl", rows), tokenizer, max_prompt_tokens=10)
    assert [(p.uid, p.answer, p.prompt_ids.tolist()) for p in from_parquet.problems] == [
        (p.uid, p.answer, p.prompt_ids.tolist()) for p in from_lines.problems
    ]


def test_load_problems_from_a_folder_reads_every_file_in_name_order(tmp_path, tokenizer):
    write_lines(tmp_path / "b.jsonl", [row("2", "2")])
    pq.write_table(pa.Table.from_pylist([row("1", "1")]), tmp_path / "a.parquet")
    (tmp_path / "README.md").write_text("not data")
    assert [p.answer for p in load_problems(tmp_path, tokenizer, max_prompt_tokens=9).problems] == ["1", "2"]
    assert [p.answer for p in load_problems(tmp_path / "*.jsonl", tokenizer, max_prompt_tokens=9).problems] == ["2"]


def test_load_problems_with_bad_rows_counts_each_by_reason(tmp_path, tokenizer):
    rows = [
        row("1+2", "3"),
        row("", "3"),
        row(None, "3"),
        row([{"role": "user"}], "3"),
        row("4", None),
        row("5", "  "),
        {"prompt": "6"},
        row("x" * 50, "7"),
        row([{"role": "tool", "content": "8"}], "8"),
        row("9", 9),
    ]
    loaded = load_problems(write_lines(tmp_path / "a.jsonl", rows), tokenizer, max_prompt_tokens=20)
    assert [p.answer for p in loaded.problems] == ["3", "9"]
    assert {k: v for k, v in loaded.counts.items() if v} == {
        "rows": 10, "kept": 2, "no_prompt": 3, "no_answer": 3, "too_long": 1, "not_renderable": 1,
    }  # fmt: skip
    assert loaded.describe() == (
        "2 problems from 10 rows "
        "(left out: 3 no prompt, 3 no answer, 1 prompt too long, 1 refused by the chat template)"
    )


def test_load_problems_repeated_a_hundred_times_keeps_each_once(tmp_path, tokenizer):
    rows = [row("1+2", "3", extra_info={"index": i}) for i in range(100)] + [row("2+2", "4")]
    loaded = load_problems(write_lines(tmp_path / "a.jsonl", rows), tokenizer, max_prompt_tokens=20)
    assert [p.answer for p in loaded.problems] == ["3", "4"]
    assert (loaded.counts["duplicate"], loaded.counts["kept"], loaded.counts["rows"]) == (99, 2, 101)


def test_load_problems_with_conflicting_answers_leaves_the_problem_out(tmp_path, tokenizer):
    rows = [row("1+2", "3"), row("1+2", "4"), row("1+2", "3"), row("2+2", "4")]
    loaded = load_problems(write_lines(tmp_path / "a.jsonl", rows), tokenizer, max_prompt_tokens=20)
    assert [p.answer for p in loaded.problems] == ["4"]
    assert (loaded.counts["conflicting_answers"], loaded.counts["duplicate"]) == (3, 0)


def test_problem_uids_depend_on_the_prompt_alone(tmp_path, tokenizer):
    first = load_problems(
        write_lines(tmp_path / "a.jsonl", [row("1", "1"), row("2", "2")]), tokenizer, max_prompt_tokens=9
    )
    other = load_problems(
        write_lines(tmp_path / "b.jsonl", [row("2", "7", data_source="e")]), tokenizer, max_prompt_tokens=9
    )
    assert other.problems[0].uid == first.problems[1].uid != first.problems[0].uid


def test_load_problems_when_every_row_is_bad_names_the_rows(tmp_path, tokenizer):
    path = write_lines(tmp_path / "a.jsonl", [row("", "1"), row("2", None), row("z" * 30, "3")])
    with pytest.raises(DataError) as caught:
        load_problems(path, tokenizer, max_prompt_tokens=10)
    text = str(caught.value)
    for part in ("row 1: no prompt", "row 2: no answer", "row 3: prompt too long", "ground_truth", "max_prompt_tokens"):
        assert part in text


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row("", "1"), r"row 1: no prompt (`prompt[0].content` must be text, got: '')"),
        (
            row([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], "1"),
            "row 1: no prompt (`prompt[0].content` must be text (parts such as images and sound are not trained on), "
            "got: list)",
        ),
        (row([{"role": "user"}], "1"), "row 1: no prompt (`prompt[0].content` must be text, got: None)"),
        (
            row([{"role": "user", "content": "a"}, {"role": 3, "content": "b"}], "1"),
            "row 1: no prompt (`prompt[1].role` must be text, got: 3)",
        ),
        (row(["text"], "1"), "row 1: no prompt (`prompt[0]` must be a message with role and content, got: 'text')"),
        ({"prompt": {}}, "row 1: no prompt (`prompt` must be text or a list of messages, got: dict)"),
        ({"prompt": "a"}, "row 1: no answer (`reward_model` must be an object with ground_truth, got: None)"),
        (row("a", ["1"]), "row 1: no answer (`reward_model.ground_truth` must be text or a number, got: list)"),
    ],
)
def test_wrong_field_is_named_with_its_row_and_value(tmp_path, tokenizer, bad, message):
    with pytest.raises(DataError) as caught:
        load_problems(write_lines(tmp_path / "a.jsonl", [bad]), tokenizer, max_prompt_tokens=10)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"prompt": "1"', "line 1 is not JSON"),
        ("a.jsonl", '\n"text"\n', "line 2: expected a JSON object"),
        ("a.jsonl", "", "it has no rows"),
        ("a.parquet", "PAR1 but not really", "not a readable parquet file"),
        ("a.csv", "prompt,answer", "expected one of .parquet"),
    ],
)
def test_load_problems_from_a_damaged_file_raises_a_clear_error(tmp_path, tokenizer, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        load_problems(tmp_path / name, tokenizer, max_prompt_tokens=10)


def test_load_problems_from_parquet_without_the_columns_names_what_it_has(tmp_path, tokenizer):
    pq.write_table(pa.table({"question": ["1+1"], "reward_model": ["2"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"lacks the column\(s\) prompt; it has: question, reward_model"):
        load_problems(tmp_path / "a.parquet", tokenizer, max_prompt_tokens=10)


def test_load_problems_without_a_file_says_what_to_set(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"no data set at .*[\s\S]*data\.path"):
        load_problems(tmp_path / "missing.jsonl", tokenizer, max_prompt_tokens=10)


def test_load_tokenizer_round_trip_renders_the_same_ids(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    messages = [{"role": "user", "content": "1+2"}]
    ids = loaded.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == [CHARACTERS.index(c) for c in "<1+2>="]


def test_load_tokenizer_of_an_unusable_folder_raises_a_clear_error(tmp_path, tokenizer):
    with pytest.raises(CheckpointError, match="no checkpoint folder"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(CheckpointError, match="no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_load_tokenizer_without_a_chat_template_raises_a_clear_error(tmp_path):
    model = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=model, unk_token="?").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no chat template"):
        load_tokenizer(tmp_path)
