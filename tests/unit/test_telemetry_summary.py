"""summary.json from metrics rows."""

from __future__ import annotations

import importlib.metadata

from sparkrl.telemetry import build_summary, installed_versions

KEYS = ["recipe", "seed", "steps", "wall_s", "setup", "eval", "k3", "dlogp_p999_max", "first_step"]
KEYS += ["route_agreement_min", "versions"]


def train(step, k3, **more):
    return {"step": step, "kind": "train", "agree/k3": k3, **more}


def evaluation(step, mean):
    about = {"name": "heldout", "k": 8, "num_problems": 128}
    return {"step": step, "kind": "eval", **about, "eval/mean": mean, "eval/low": mean - 0.1, "eval/high": mean + 0.1}


def summarize(rows):
    return build_summary(rows, recipe="tiny", seed=3, wall_s=12.3456, setup={"server_s": 1.5}, versions={"torch": "2"})


def test_summary_of_known_rows_has_exactly_the_promised_figures():
    rows = [
        evaluation(0, 0.5),
        train(1, 2**-13, **{"train/ratio_mean": 1.0, "train/clip_fraction": 0.0, "agree/dlogp_p999": 0.2}),
        train(2, 3 * 2**-13, **{"train/ratio_mean": 1.1, "agree/dlogp_p999": 0.1, "agree/route_agreement": 0.97}),
        evaluation(2, 0.6),
        train(3, None, **{"agree/route_agreement": 0.99}),
        evaluation(3, 0.75),
    ]
    summary = summarize(rows)
    assert list(summary) == KEYS
    assert summary == {
        "recipe": "tiny",
        "seed": 3,
        "steps": 3,
        "wall_s": 12.346,
        "setup": {"server_s": 1.5},
        "eval": {
            "name": "heldout",
            "k": 8,
            "num_problems": 128,
            "start": {"mean": 0.5, "low": 0.4, "high": 0.6},
            "end": {"mean": 0.75, "low": 0.65, "high": 0.85},
        },
        "k3": {"mean": 2**-12, "max": 3 * 2**-13},
        "dlogp_p999_max": 0.2,
        "first_step": {"ratio_mean": 1.0, "clip_fraction": 0.0},
        "route_agreement_min": 0.97,
        "versions": {"torch": "2"},
    }


def test_summary_of_a_run_without_steps_has_the_same_keys_and_no_figures():
    summary = summarize([])
    assert list(summary) == KEYS
    assert summary["eval"] == {
        "name": None,
        "k": None,
        "num_problems": None,
        "start": {"mean": None, "low": None, "high": None},
        "end": {"mean": None, "low": None, "high": None},
    }
    assert (summary["steps"], summary["k3"]) == (0, {"mean": None, "max": None})


def test_summary_of_a_resumed_run_counts_a_step_written_twice_once():
    summary = summarize([train(1, 1e-4), train(2, 9.0), train(2, 3e-4), train(3, 2e-4)])
    assert (summary["steps"], summary["k3"]["max"]) == (3, 3e-4)


def test_installed_versions_are_those_of_the_packages():
    versions = installed_versions()
    assert versions["transformers"] == importlib.metadata.version("transformers")
    assert sorted(versions) == ["peft", "python", "ray", "sparkrl", "torch", "transformers", "verl", "vllm"]
    assert "not installed" not in versions.values()
