"""report.html: one self-contained page about a run, made from its folder alone, at any time of its life."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from sparkrl.telemetry.charts import Series, format_value, line_chart, stacked_chart
from sparkrl.telemetry.run_folder import RunFolder, write_atomically
from sparkrl.telemetry.summary import Row, build_summary, split_rows

_STAGES = ("rollout", "reward", "train", "swap", "save")
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")


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
    fields = {
        "title": escape(f"{summary['recipe']}, seed {summary['seed']}"),
        "subtitle": escape(
            f"{state}{'ended' if finished else 'unfinished'}: {folder.path.parent.name}/{folder.path.name}"
        ),
        "css": _asset("report.css"),
        "js": _asset("report.js"),
        "tiles": _tiles(summary),
        "charts": _charts(train, evals, config),
        "samples": _samples(folder.rows("samples")),
        "facts": _facts("Versions", summary["versions"]) + _facts("Set-up", summary["setup"]),
        "config": escape((folder.path / "config.yaml").read_text(encoding="utf-8")),
    }
    path = folder.path / "report.html"
    # One pass over the template: a response that holds a placeholder is never expanded.
    write_atomically(path, _PLACEHOLDER.sub(lambda match: fields[match[1]], _asset("report.html")))
    return path


def _asset(name: str) -> str:
    return files("sparkrl.telemetry").joinpath(name).read_text(encoding="utf-8")


def _tiles(summary: dict[str, Any]) -> str:
    tiles = []
    scores = summary["eval"]
    start, end = scores["start"], scores["end"]
    if start["mean"] is not None:
        gain = end["mean"] - start["mean"]
        label = f"{scores['name']} mean@{scores['k']}, {scores['num_problems']} problems"
        value = f"{start['mean']:.3f} → {end['mean']:.3f}"
        note = f"[{start['low']:.3f}, {start['high']:.3f}] → [{end['low']:.3f}, {end['high']:.3f}]"
        clear = "good" if end["low"] > start["mean"] else "bad" if end["high"] < start["mean"] else ""
        tiles.append(_tile(label, value, note, wide=True))
        tiles.append(_tile("gain", f"{gain:+.3f}", "clear of noise" if clear else "within noise", style=clear))
    k3, first = summary["k3"], summary["first_step"]
    tiles.append(_tile("steps", str(summary["steps"]), f"{_duration(summary['wall_s'])} in all"))
    tiles.append(_tile("k3, mean", _figure(k3["mean"]), f"max {_figure(k3['max'])}"))
    tiles.append(_tile("|Δ log-prob|", _figure(summary["dlogp_p999_max"]), "max p99.9, nats"))
    tiles.append(_tile("route agreement", _figure(summary["route_agreement_min"]), "min over steps"))
    ratio = first["ratio_mean"]
    exact = "-" if ratio is None else f"{ratio:.6f}"
    tiles.append(_tile("first ratio", exact, f"clipped {_figure(first['clip_fraction'])}"))
    return "".join(tiles)


def _tile(label: str, value: str, note: str, *, wide: bool = False, style: str = "") -> str:
    return (
        f'<div class="tile{" wide" if wide else ""}"><b>{escape(label)}</b>'
        f'<strong class="{style}">{escape(value)}</strong><span>{escape(note)}</span></div>'
    )


def _charts(train: Sequence[Row], evals: Sequence[Row], config: dict[str, Any]) -> str:
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
    stages = [line(stage, f"time/{stage}_s") for stage in _STAGES]
    return "".join(
        (
            line_chart(
                "Reward and accuracy", [line("reward", "rollout/reward_mean"), line("accuracy", "rollout/accuracy")]
            ),
            line_chart(f"Evaluation: mean@{k}", recorded(mean, best)),
            line_chart(
                "k3 between trainer and rollout",
                recorded(line("with replay", "agree/k3"), Series(name="without replay", points=without)),
                log=True,
                limit=limit,
            ),
            line_chart(
                "|Δ log-prob|, nats", [line("p99.9", "agree/dlogp_p999"), line("max", "agree/dlogp_max")], log=True
            ),
            line_chart(
                "Response length, tokens",
                recorded(line("mean", "rollout/response_tokens_mean"), line("max", "rollout/response_tokens_max")),
            ),
            line_chart("Entropy, nats", [line("entropy", "train/entropy")]),
            line_chart("Gradient norm", [line("gradient norm", "train/grad_norm")]),
            line_chart("Clipped tokens, fraction", [line("clip fraction", "train/clip_fraction")]),
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
        cards = "".join(_sample(sample) for sample in chosen.values())
        parts.append(f'<h3>Step {step}</h3><div class="samples">{cards}</div>')
    return "".join(parts)


def _sample(sample: Row) -> str:
    verdict, style = ("right", "good") if sample["correct"] else ("wrong", "bad")
    read = "none" if sample["extracted"] is None else sample["extracted"]
    head = f"answer {sample['answer']}, read {read}, {sample['tokens']} tokens, ended by {sample['finish_reason']}"
    return (
        f'<div class="sample"><p class="head"><b class="{style}">{verdict}</b>{escape(head)}</p>'
        f'<pre class="prompt">{escape(sample["prompt"])}</pre><pre>{escape(sample["response"])}</pre></div>'
    )


def _facts(title: str, facts: dict[str, Any]) -> str:
    if not facts:
        return ""
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        nested = value.items() if isinstance(value, dict) else ()
        flat.update({f"{name}: {key}": item for key, item in nested} if nested else {name: value})
    rows = "".join(
        f"<tr><td>{escape(str(name))}</td><td>{escape(str(value))}</td></tr>" for name, value in flat.items()
    )
    return f"<table><caption>{escape(title)}</caption>{rows}</table>"


def _figure(value: float | None) -> str:
    return "-" if value is None else format_value(value)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
