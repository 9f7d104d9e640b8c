"""report.html: one self-contained page about a run, made from its folder alone, at any time of its life."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparkrl.telemetry.charts import Bars, Series, format_value, line_chart, log_histogram, stacked_chart
from sparkrl.telemetry.figures import figures_html, figures_of_row, is_clear
from sparkrl.telemetry.histograms import K3_TOKENS
from sparkrl.telemetry.page import facts, how_it_was_run, page, sample_cards, section, tile, tiles
from sparkrl.telemetry.problems import problem_html, problem_rows
from sparkrl.telemetry.run_folder import RunFolder, write_atomically
from sparkrl.telemetry.summary import Row, build_summary, split_rows

_STAGES = ("rollout", "reward", "train", "swap", "save")


def build_report(run: Path) -> Path:
    """Write `<run>/report.html` and return its path. Everything that came from a model or a data set is escaped.

    Works for a run that is unfinished, was cut short, or has no step yet.

    Raises:
        ConfigError: not a run folder.
    """
    folder = RunFolder.open(run)
    config = folder.config()
    train, evals = split_rows(folder.rows("metrics"))
    summary = folder.summary()
    finished = summary is not None
    if summary is None:
        wall_s = sum(row.get("time/step_s") or 0.0 for row in train) + sum(
            row.get("time/eval_s") or 0.0 for row in evals
        )
        summary = build_summary(
            [*train, *evals],
            recipe=config.get("recipe_name", ""),
            seed=config.get("seed", 0),
            wall_s=wall_s,
            setup={},
            versions={},
        )
    num_steps = config.get("loop", {}).get("num_steps", 0)
    state = "" if len(train) >= num_steps else f"{len(train)} of {num_steps} steps, "
    body = (
        tiles(_tiles(summary, evals))
        + f'<section class="charts">{_charts(train, evals, config, folder.rows("histograms"))}</section>\n'
        + _evaluations(folder, evals)
        + section("Sample responses", _samples(folder.rows("samples")))
        + how_it_was_run(
            [facts("Versions", summary["versions"]), facts("Set-up", summary["setup"])], folder.config_text()
        )
    )
    path = folder.path / "report.html"
    text = page(
        title=f"{summary['recipe']}, seed {summary['seed']}",
        subtitle=f"{state}{'ended' if finished else 'unfinished'}: {folder.path.parent.name}/{folder.path.name}",
        body=body,
    )
    write_atomically(path, text)
    return path


def _tiles(summary: dict[str, Any], evals: Sequence[Row]) -> list[str]:
    parts = []
    scores = summary["eval"]
    start, end = scores["start"], scores["end"]
    if start["mean"] is not None:
        label = f"{scores['name']} mean@{scores['k']}, {scores['num_problems']} problems"
        value = f"{start['mean']:.3f} → {end['mean']:.3f}"
        note = f"[{start['low']:.3f}, {start['high']:.3f}] → [{end['low']:.3f}, {end['high']:.3f}]"
        parts.append(tile(label, value, note, wide=True))
        last = figures_of_row(evals[-1])
        if last.get("gain") is not None:
            clear = is_clear(last)
            parts.append(
                tile(
                    "gain, paired",
                    f"{last['gain']:+.3f}",
                    f"[{last['gain_low']:+.3f}, {last['gain_high']:+.3f}], " + ("clear" if clear else "within noise"),
                    style={1: "good", -1: "bad", 0: ""}[clear],
                )
            )
    k3, first = summary["k3"], summary["first_step"]
    parts.append(tile("steps", str(summary["steps"]), f"{_duration(summary['wall_s'])} in all"))
    parts.append(tile("k3, mean", _figure(k3["mean"]), f"max {_figure(k3['max'])}"))
    parts.append(tile("|Δ log-prob|", _figure(summary["dlogp_p999_max"]), "max p99.9, nats"))
    parts.append(tile("route agreement", _figure(summary["route_agreement_min"]), "min over steps"))
    ratio = first["ratio_mean"]
    exact = "-" if ratio is None else f"{ratio:.6f}"
    parts.append(tile("first ratio", exact, f"clipped {_figure(first['clip_fraction'])}"))
    return parts


def _charts(
    train: Sequence[Row], evals: Sequence[Row], config: dict[str, Any], histograms: Sequence[dict[str, Any]]
) -> str:
    def line(name: str, metric: str) -> Series:
        return Series(name=name, points=[(row["step"], row.get(metric)) for row in train])

    def recorded(*lines: Series) -> list[Series]:
        """The first line, and of the others those with a value: optional figures leave no empty legend."""
        return [one for n, one in enumerate(lines) if n == 0 or any(value is not None for _, value in one.points)]

    k = evals[0].get("k", "k") if evals else "k"
    bounds = [
        (row["eval/low"], row["eval/high"]) if None not in (row.get("eval/low"), row.get("eval/high")) else None
        for row in evals
    ]
    mean = Series(name=f"mean@{k}", points=[(row["step"], row.get("eval/mean")) for row in evals], bars=bounds)
    best = Series(name=f"pass@{k}", points=[(row["step"], row.get("eval/pass_at_k")) for row in evals])
    limit = config.get("telemetry", {}).get("k3_limit")
    without = [(row["step"], row["agree/k3_no_replay"]) for row in train if row.get("agree/k3_no_replay") is not None]
    gain_bounds = [
        (row["eval/gain_low"], row["eval/gain_high"]) if row.get("eval/gain_low") is not None else None for row in evals
    ]
    gain = Series(name="gain", points=[(row["step"], row.get("eval/gain")) for row in evals], bars=gain_bounds)
    components = [
        line(name.removeprefix("reward/").removesuffix("_mean"), name)
        for name in dict.fromkeys(name for row in train for name in row)
        if name.startswith("reward/") and name.endswith("_mean")
    ]
    lost = [line("no readable answer", "rollout/extraction_failures"), line("truncated", "rollout/truncated")]
    stages = [line(stage, f"time/{stage}_s") for stage in _STAGES]
    return "".join(
        (
            line_chart(
                "Reward and accuracy", [line("reward", "rollout/reward_mean"), line("accuracy", "rollout/accuracy")]
            ),
            line_chart(f"Evaluation: mean@{k}", recorded(mean, best)),
            line_chart("Gain over the start, paired", [gain], low=0.0),
            line_chart(
                "k3 between trainer and rollout",
                recorded(line("with replay", "agree/k3"), Series(name="without replay", points=without)),
                log=True,
                limit=limit,
            ),
            line_chart(
                "|Δ log-prob|, nats", [line("p99.9", "agree/dlogp_p999"), line("max", "agree/dlogp_max")], log=True
            ),
            log_histogram("k3 of a token: first and last step", *_k3_bars(histograms)),
            line_chart("Reward by component", components) if components else "",
            line_chart("Responses lost, fraction", lost, low=0.0),
            line_chart(
                "Response length, tokens",
                recorded(line("mean", "rollout/response_tokens_mean"), line("max", "rollout/response_tokens_max")),
            ),
            line_chart("Entropy, nats", [line("entropy", "train/entropy")]),
            line_chart("Gradient norm", [line("gradient norm", "train/grad_norm")]),
            line_chart("Clipped tokens, fraction", [line("clip fraction", "train/clip_fraction")], low=0.0),
            stacked_chart("Stage times, seconds", recorded(*stages)),
        )
    )


def _samples(samples: Sequence[Row]) -> str:
    trained = [sample for sample in samples if sample.get("kind") == "train"] or list(samples)
    if not trained:
        return '<p class="empty">none recorded yet</p>'
    parts = []
    for step in dict.fromkeys((trained[0]["step"], trained[-1]["step"])):
        # A resumed run may have written a step twice; the later row of one response counts.
        chosen = {sample["uid"]: sample for sample in trained if sample["step"] == step}
        parts.append(f"<h3>Step {step}</h3>{sample_cards(list(chosen.values()))}")
    return "".join(parts)


def _evaluations(folder: RunFolder, evals: Sequence[Row]) -> str:
    if not evals:
        return ""
    named = [(f"after {row['step']} steps", figures_of_row(row)) for row in evals]
    body = figures_html(named)
    if steps := folder.eval_steps():
        first, last = steps[0], steps[-1]
        rows = problem_rows(folder.answers(last), folder.answers(first) if first != last else ())
        body += f"<h3>Problem by problem, after {last} steps against {first}</h3>{problem_html(rows)}"
    return section("Evaluations", body)


def _k3_bars(histograms: Sequence[dict[str, Any]]) -> tuple[list[float], list[Bars]]:
    """Edges of the bins, and the counts of the first and the last step."""
    rows = {row["step"]: row for row in histograms if row.get("name") == K3_TOKENS}
    if not rows:
        return [], []
    steps = dict.fromkeys((min(rows), max(rows)))
    return rows[min(rows)]["edges"], [Bars(name=f"step {step}", counts=rows[step]["counts"]) for step in steps]


def _figure(value: float | None) -> str:
    return "-" if value is None else format_value(value)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
