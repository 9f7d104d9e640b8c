"""Targets, and the tables that are put into docs/benchmarks.md."""

import json

import pytest

from benchmarks.figures import Figure, write_json, write_markdown

ABOUT = {"date": "2026-01-02 03:04", "cores": 2, "processor": "x", "load_before": 0.25, "python": "3", "versions": {}}


def figure(**more):
    return Figure(benchmark="b", case="c", value=1234.5, unit="ms", **more)


@pytest.mark.parametrize(
    ("more", "met", "target"),
    [
        ({}, None, ""),
        ({"ratio": 2.0}, None, ""),
        ({"ratio": 3.0, "at_least": 3.0}, True, ">= 3"),
        ({"ratio": 2.9, "at_least": 3.0}, False, ">= 3"),
        ({"ratio": 0.3, "at_most": 1 / 3}, True, "<= 0.333"),
        ({"ratio": 0.34, "at_most": 1 / 3}, False, "<= 0.333"),
    ],
)
def test_figure_against_its_target_is_judged(more, met, target):
    assert figure(**more).met is met and figure(**more).target == target


def test_write_markdown_between_the_marks_keeps_the_rest(tmp_path):
    begin, end = "<!-- cpu table: written by `python -m benchmarks --markdown` -->", "<!-- end of cpu table -->"
    path = tmp_path / "page.md"
    path.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    write_markdown(path, [figure(ratio=2.0, meaning="m", at_least=3.0)], {"b": "sizes"}, ABOUT)
    text = path.read_text()
    assert text.startswith(f"before\n{begin}\n") and text.endswith(f"{end}\nafter\n") and "old" not in text
    assert "### `b`\n\nsizes\n\n| Case |" in text and "| c | 1,234 ms | 2 | m | >= 3 | NO |" in text
    assert "load average before the run 0.25" in text


def test_write_markdown_without_marks_changes_nothing(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("text")
    with pytest.raises(ValueError, match="lacks the lines"):
        write_markdown(path, [figure()], {"b": ""}, ABOUT)
    assert path.read_text() == "text"


def test_write_json_holds_figures_with_their_verdict(tmp_path):
    write_json(tmp_path / "new" / "one.json", [figure(ratio=1.0, at_most=2.0)], {"b": "sizes"}, ABOUT)
    (found,) = json.loads((tmp_path / "new" / "one.json").read_text())["figures"]
    assert found["value"] == 1234.5 and found["met"] is True and found["target"] == "<= 2"
