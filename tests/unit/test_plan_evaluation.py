"""Plans of recipes that only evaluate: servers and no trainer, without training data."""

from __future__ import annotations

import json

import pytest

from sparkrl.cli import main
from sparkrl.config.load import groups, load
from sparkrl.planning import make_plan

AIME = ["recipe=aime2024"]


def plan(*overrides: str):
    return make_plan(load(overrides, check_paths=False, trains=None))


@pytest.mark.parametrize("recipe", groups()["recipe"])
def test_every_recipe_has_a_plan_without_data_or_weights(recipe, capsys) -> None:
    assert main(["plan", f"recipe={recipe}"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("Plan: ")


def test_plan_of_an_evaluation_has_the_reference_runs_server_and_no_trainer() -> None:
    found, reference = plan(*AIME), plan("recipe=dapo_math")
    # the same checkpoint, split, cache and batch
    assert found.server == reference.server
    assert (found.trainer, found.trainer_floor_bytes, found.chosen.trainer_bytes) == ({}, 0, 0)
    assert found.chosen.fits is True and found.chosen.side == "server"
    assert found.chosen.layout.num_gpus == 4 and reference.chosen.layout.num_gpus == 16
    # a call fills the server's 256 places twice: 64 problems of 8 responses, 62 layers of 8 experts, a byte each
    assert found.responses == 512 and found.kv["concurrency"] == 256
    assert found.replay["bytes_per_step_at_most"] == 512 * 6144 * 62 * 8
    assert plan(*AIME, "eval.problems_at_once=3").responses == 24


def test_layouts_of_an_evaluation_give_every_gpu_to_servers() -> None:
    found = plan(*AIME, "rollout.num_replicas=2")
    assert found.chosen.layout.num_gpus == 8
    assert {fit.layout.num_gpus for fit in found.layouts} == {8}
    assert {fit.layout.num_ranks for fit in found.layouts} == {0}
    divisions = {(fit.layout.tensor_parallel, fit.layout.pipeline_parallel) for fit in found.layouts}
    assert {(1, 1), (8, 1), (2, 4), (1, 8)} <= divisions and (16, 1) not in divisions


def test_plan_of_an_evaluation_shows_no_trainer(capsys) -> None:
    assert main(["plan", *AIME]) == 0
    shown = capsys.readouterr().out
    assert "Trainer, each rank" not in shown and "AdamW" not in shown
    assert "routes of one call of 512 responses" in shown
    assert main(["plan", *AIME, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trainer"] == {}
    # 80 GB GPUs do not hold a quarter of the model
    assert main(["plan", *AIME, "cluster.gpu_memory_gb=80"]) == 1


def test_a_training_run_still_wants_data(capsys) -> None:
    assert main(["train", *AIME, "--dry-run"]) == 1
    assert "no value for `data.path`" in capsys.readouterr().err
