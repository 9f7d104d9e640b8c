"""report.html of an evaluation job, made from its folder alone, at any time of its life."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from sparkrl.telemetry.eval_folder import ADAPTER, BASELINE, EvalFolder
from sparkrl.telemetry.figures import figures_html, gain_text, is_clear
from sparkrl.telemetry.page import facts, how_it_was_run, page, sample_cards, section, tile, tiles
from sparkrl.telemetry.problems import problem_html, problem_rows
from sparkrl.telemetry.run_folder import write_atomically
from sparkrl.telemetry.samples import pick_answers

_NUM_SAMPLES = 6


def build_eval_report(path: Path) -> Path:
    """Write `<evaluation>/report.html` and return its path.

    Raises:
        ConfigError: not the folder of an evaluation.
    """
    folder = EvalFolder.open(path)
    record = folder.record()
    about = record.get("about", {})
    answers = {policy: folder.answers(policy) for policy in (BASELINE, ADAPTER)}
    shown = ADAPTER if answers[ADAPTER] else BASELINE
    policies = ((BASELINE, "base model"), (ADAPTER, "adapter"))
    named = [(name, record[policy]) for policy, name in policies if record.get(policy)]
    done = "ended" if record.get("seconds") else f"unfinished, {sum(map(len, answers.values()))} problems answered"
    against = answers[BASELINE] if shown == ADAPTER else ()
    body = (
        tiles(_tiles(record))
        + (section("Figures", figures_html(named)) if named else "")
        + section("Problem by problem", problem_html(problem_rows(answers[shown], against)))
        + section("Responses", sample_cards(pick_answers(answers[shown], step=0, kind="", num_samples=_NUM_SAMPLES)))
        + how_it_was_run(
            [facts("What was evaluated", about), facts("Versions", record.get("versions", {}))],
            OmegaConf.to_yaml(OmegaConf.load(folder.path / "config.yaml")),
        )
    )
    file = folder.path / "report.html"
    subtitle = f"{done}: {folder.path.parent.name}/{folder.path.name}"
    write_atomically(file, page(title=_title(about), subtitle=subtitle, body=body))
    return file


def _title(about: dict[str, Any]) -> str:
    subject = "base model"
    if about.get("adapter"):
        subject = f"adapter after {about['adapter_step']} steps" if about.get("adapter_step") else "adapter"
    return f"{about.get('evaluation', 'evaluation')}: {subject}"


def _tiles(record: dict[str, Any]) -> list[str]:
    parts = []
    for policy, name in ((BASELINE, "base model"), (ADAPTER, "adapter")):
        if figures := record.get(policy):
            interval = f"[{figures['low']:.3f}, {figures['high']:.3f}]"
            parts.append(tile(f"{name}, mean@{figures['k']}", f"{figures['mean']:.3f}", interval))
    adapter = record.get(ADAPTER) or {}
    if text := gain_text(adapter):
        clear = is_clear(adapter)
        style = {1: "good", -1: "bad", 0: ""}[clear]
        gain, interval = text.split(" ", 1)
        parts.append(tile("gain, paired", gain, f"{interval}, {'clear' if clear else 'within noise'}", style=style))
    if figures := adapter or record.get(BASELINE):
        parts.append(tile(f"pass@{figures['k']}", f"{figures['pass_at_k']:.3f}", "at least one of k right"))
        parts.append(tile(f"maj@{figures['k']}", f"{figures['maj_at_k']:.3f}", "the most frequent answer"))
        parts.append(tile("problems", str(figures["num_problems"]), f"{figures['mean_tokens']:.0f} tokens a response"))
    return parts
