"""report.html: geometry of the charts, self-containment, escaping, unfinished runs."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from sparkrl.config.schema import Config
from sparkrl.errors import ConfigError
from sparkrl.telemetry import RunFolder, build_report
from sparkrl.telemetry.charts import Series, format_value, line_chart, stacked_chart

EVIL = "</pre><script>alert('x')</script><img src=http://example.com/a.png> {{js}} & \"quoted\""


class Page(HTMLParser):
    """Collects tags, text and charts, and checks that tags are balanced."""

    VOID = ("meta", "br", "img", "link", "line", "circle", "rect", "path", "i")

    def __init__(self, html):
        super().__init__()
        self.tags, self.texts, self.charts, self._open = [], [], {}, []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "svg":
            found = dict(attrs)
            self.charts[found["aria-label"]] = {
                step: dict(values) for _, step, values in json.loads(found["data-points"])
            }
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture
def run(tmp_path):
    cfg = Config(recipe_name="tiny", seed=1, output_dir=str(tmp_path))
    cfg.loop.num_steps = 3
    return RunFolder.create(cfg)


def record_step(run, step, **more):
    row = {"step": step, "kind": "train", "rollout/reward_mean": -0.5 + 0.1 * step, "rollout/accuracy": 0.25}
    run.append("metrics", row | {"agree/k3": 1e-4 * step, "time/rollout_s": 2.0, "time/train_s": 3.0} | more)


def record_eval(run, step, mean, **more):
    row = {"step": step, "kind": "eval", "name": "heldout", "k": 8, "num_problems": 64, "eval/pass_at_k": 0.9}
    run.append("metrics", row | {"eval/mean": mean, "eval/low": mean - 0.05, "eval/high": mean + 0.05} | more)


def record_sample(run, step, uid, correct):
    row = {"step": step, "kind": "train", "uid": uid, "prompt": f"prompt {EVIL}", "response": f"{uid} {EVIL}"}
    row |= {"answer": "7", "extracted": None, "correct": correct, "reward": 1.0, "tokens": 4, "finish_reason": "stop"}
    run.append("samples", row)


def test_report_of_a_whole_run_holds_its_figures_and_charts(run):
    record_eval(run, 0, 0.5)
    for step in (1, 2, 3):
        record_step(run, step, **({"agree/k3_no_replay": 0.02} if step == 2 else {}))
        record_sample(run, step, f"u{step}", step != 2)
    record_eval(run, 3, 0.75, **{"eval/gain": 0.25, "eval/gain_low": 0.125, "eval/gain_high": 0.375})
    text = build_report(run.path).read_text()
    page = Page(text)
    assert page.charts["Evaluation: mean@8"] == {
        0: {"mean@8": "0.5 [0.45, 0.55]", "pass@8": "0.9"},
        3: {"mean@8": "0.75 [0.7, 0.8]", "pass@8": "0.9"},
    }
    assert page.charts["k3 between trainer and rollout"] == {
        1: {"with replay": "1.00e-4"},
        2: {"with replay": "2.00e-4", "without replay": "0.02"},
        3: {"with replay": "3.00e-4"},
    }
    assert page.charts["Stage times, seconds"][1] == {"rollout": "2.00 s", "train": "3.00 s", "total": "5.00 s"}
    for part in (
        "0.500 → 0.750",
        "[0.450, 0.550] → [0.700, 0.800]",
        "+0.250",
        "[+0.125, +0.375], clear",
        "+0.250 [+0.125, +0.375]",
        "tiny, seed 1",
        "limit 0.01",
        "Step 1",
        "Step 3",
    ):
        assert any(part in found for found in page.texts)
    assert "Step 2" not in page.texts


def test_report_holds_no_address_and_no_file_of_its_own(run):
    record_step(run, 1)
    text = build_report(run.path).read_text()
    assert not re.search(r"(src|href|url|import|fetch|@import)\s*[=(]\s*[\"']?(https?:)?//", text)
    assert {tag for tag, _ in Page(text).tags} & {"link", "img", "iframe", "object", "embed"} == set()
    assert "{{" not in text


def test_report_escapes_what_models_and_data_sets_wrote(run):
    record_sample(run, 1, "u", True)
    record_step(run, 1)
    text = build_report(run.path).read_text()
    page = Page(text)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert "img" not in {tag for tag, _ in page.tags}
    assert f"u {EVIL}" in page.texts and f"prompt {EVIL}" in page.texts


def test_report_of_a_run_without_steps_says_that_nothing_was_recorded(run):
    page = Page(build_report(run.path).read_text())
    assert page.texts.count("nothing recorded") == 12
    assert "none recorded yet" in page.texts
    assert any("0 of 3 steps, unfinished" in text for text in page.texts)


def test_report_of_one_step_with_missing_figures_is_drawn(run):
    record_step(run, 1, **{"agree/k3": None})
    page = Page(build_report(run.path).read_text())
    assert page.charts["Reward and accuracy"] == {1: {"reward": "-0.4", "accuracy": "0.25"}}
    assert "k3 between trainer and rollout" not in page.charts


def test_report_of_a_folder_that_is_no_run_raises(tmp_path):
    with pytest.raises(ConfigError, match="not a run folder"):
        build_report(tmp_path)


def path_points(svg, css_class="line-0"):
    (path,) = re.findall(rf'<path class="{css_class}" d="([^"]*)"', svg)
    return [(command, float(x), float(y)) for command, x, y in re.findall(r"([ML])([\d.]+) ([\d.]+)", path)]


def test_line_chart_places_values_linearly_between_its_ticks():
    svg = line_chart("t", [Series(name="a", points=[(0, 0.0), (5, 2.0), (10, 4.0)])])
    (_, x0, y0), (_, x5, y5), (_, x10, y10) = path_points(svg)
    assert (x0, x10) == (54.0, 408.0) and x5 == (x0 + x10) / 2
    assert (y0, y10) == (204.0, 12.0) and y5 == (y0 + y10) / 2


def test_line_chart_on_a_log_axis_places_decades_evenly_and_leaves_zero_out():
    svg = line_chart("t", [Series(name="a", points=[(1, 1e-4), (2, 1e-3), (3, 0.0), (4, 1e-2)])], log=True)
    points = path_points(svg)
    assert [command for command, _, _ in points] == ["M", "L", "M"]  # the zero is a gap
    assert [y for _, _, y in points] == [204.0, 108.0, 12.0]


def test_line_chart_breaks_at_missing_values():
    svg = line_chart("t", [Series(name="a", points=[(1, 1.0), (2, None), (3, 2.0), (4, 3.0)])])
    assert [command for command, _, _ in path_points(svg)] == ["M", "M", "L"]


def test_line_chart_of_a_very_long_run_stays_small():
    svg = line_chart("t", [Series(name="a", points=[(n, float(n)) for n in range(100_000)])])
    assert len(path_points(svg)) == 1000
    assert len(svg) < 100_000


def test_stacked_chart_heights_are_proportional_and_stacked():
    a = Series(name="a", points=[(1, 1.0), (2, 2.0)])
    b = Series(name="b", points=[(1, 3.0), (2, None)])
    svg = stacked_chart("t", [a, b])
    rects = re.findall(r'<rect class="fill-(\d)" x="([\d.]+)" y="([\d.]+)" width="[\d.]+" height="([\d.]+)"/>', svg)
    heights = [(index, float(height)) for index, _, _, height in rects]
    assert heights == [("0", 48.0), ("1", 144.0), ("0", 96.0), ("1", 0.0)]  # 192 units for 0..4
    assert float(rects[1][2]) + 144.0 == float(rects[0][2])


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (0.5, "0.5"), (1234.567, "1235"), (1.234e-5, "1.23e-5"), (2.5e7, "2.50e7")]
)
def test_format_value_keeps_what_a_person_can_use(value, text):
    assert format_value(value) == text
