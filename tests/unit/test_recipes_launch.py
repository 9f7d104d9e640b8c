"""Launch files of the large recipes: shell syntax, manifests, and overrides that the configuration takes."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparkrl.config.load import load
from sparkrl.config.schema import Config
from sparkrl.planning import make_plan

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
NODES = {"dapo_math": 4, "qwen3_30b_a3b": 1}


def recipe(name: str, *overrides: str) -> Config:
    return load([f"recipe={name}", *overrides], check_paths=False)


def overrides_of(command: str) -> list[str]:
    """Arguments of `sparkrl train` in a shell command."""
    words = shlex.split(command)
    start = words.index("sparkrl")
    assert words[start + 1] == "train"
    return [word for word in words[start + 2 :] if "=" in word]


@pytest.mark.parametrize("name", NODES)
def test_plan_of_a_large_recipe_fits_and_its_gpus_are_all_used(name: str) -> None:
    plan = make_plan(recipe(name))
    assert plan.chosen.fits is True
    assert plan.chosen.layout.num_gpus == recipe(name).cluster.num_gpus == {"dapo_math": 16, "qwen3_30b_a3b": 8}[name]


@pytest.mark.parametrize("name", NODES)
def test_large_recipes_share_the_reference_runs_settings(name: str) -> None:
    config = recipe(name)
    assert (config.lora.rank, config.lora.alpha) == (32, 64)
    assert (config.loop.num_steps, config.loop.num_prompts, config.loop.group_size) == (150, 32, 8)
    assert (config.rollout.max_response_tokens, config.trainer.replay) == (4096, True)
    assert (config.eval.name, config.eval.k) == ("aime2024", 8)
    assert config.loop.k3_patience == 5


def check_overrides(name: str, found: list[str]) -> None:
    assert found[0] == f"recipe={name}"
    config = load(found, check_paths=False)
    assert (config.recipe_name, config.data.path) == (name, "/shared/data/dapo_math.parquet")
    assert config.model.path.startswith("/shared/")
    assert config.cluster.address == "auto"


@pytest.mark.parametrize("name", NODES)
def test_slurm_file_parses_and_gives_known_keys(name: str) -> None:
    path = RECIPES / name / "launch/slurm.sbatch"
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text().replace("\\\n", " ")
    line = next(line for line in text.splitlines() if "sparkrl train" in line)
    found = overrides_of(line.replace('"$@"', "").removesuffix("&").strip())
    check_overrides(name, [word.replace("$SHARED", "/shared") for word in found])


@pytest.mark.parametrize("name", NODES)
def test_ray_job_of_the_readme_submits_known_keys(name: str, tmp_path: Path) -> None:
    (line,) = re.findall(r"recipes/ray_job\.sh.*", (RECIPES / name / "README.md").read_text())
    ray = tmp_path / "ray"  # in place of Ray's: says what it was asked for
    ray.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    ray.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "RAY_ADDRESS": "http://head:8265", "SHARED": "/shared"}
    command = ["bash", *shlex.split(line), "seed=1"]
    asked = subprocess.run(
        command, cwd=RECIPES.parent, env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert asked[: asked.index("--")] == ["job", "submit", "--address", "http://head:8265", "--no-wait"]
    found = overrides_of(shlex.join(asked[asked.index("--") + 1 :]))
    check_overrides(name, found)
    assert found[-1] == "seed=1"


@pytest.mark.parametrize("name", NODES)
def test_slurm_asks_for_the_gpus_that_the_recipe_takes(name: str) -> None:
    text = (RECIPES / name / "launch/slurm.sbatch").read_text()
    nodes, gpus = (int(re.search(rf"--{key}=(\d+)", text)[1]) for key in ("nodes", "gpus-per-node"))  # type: ignore[index]
    assert (nodes, nodes * gpus) == (NODES[name], recipe(name).cluster.num_gpus)


@pytest.mark.parametrize("name", NODES)
def test_kuberay_manifest_asks_for_the_gpus_that_the_recipe_takes(name: str) -> None:
    manifest: dict[str, Any] = yaml.safe_load((RECIPES / name / "launch/kuberay.yaml").read_text())
    assert (manifest["kind"], manifest["apiVersion"]) == ("RayJob", "ray.io/v1")
    cluster = manifest["spec"]["rayClusterSpec"]
    groups = [(1, cluster["headGroupSpec"])] + [(g["replicas"], g) for g in cluster.get("workerGroupSpecs", [])]
    total = 0
    for replicas, group in groups:
        container = group["template"]["spec"]["containers"][0]
        gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
        assert gpus == int(group["rayStartParams"]["num-gpus"])
        total += replicas * gpus
    assert (sum(replicas for replicas, _ in groups), total) == (NODES[name], recipe(name).cluster.num_gpus)
    found = overrides_of(manifest["spec"]["entrypoint"])
    assert load(found, check_paths=False).recipe_name == name


@pytest.mark.parametrize("name", NODES)
def test_figures_of_the_readme_are_the_plans(name: str) -> None:
    plan, text = make_plan(recipe(name)), (RECIPES / name / "README.md").read_text()
    server, trainer = sum(plan.server.values()) / 1e9, sum(plan.trainer.values()) / 1e9
    assert re.search(rf"\| server GPU \| {server:.1f} GB|\| server GPU \| {server:.0f} GB", text)
    assert re.search(rf"\| trainer GPU \| {trainer:.1f} GB|\| trainer GPU \| {trainer:.0f} GB", text)
    assert f"| routes | {plan.replay['bytes_per_token']} bytes a token |" in text
    swap = plan.adapter["bytes_per_swap"] / 1e9
    assert f"{swap:.2f} GB in bfloat16 every swap" in text or f"{swap:.1f} GB in bfloat16 every swap" in text
    tables = plan.parameters["embedding"] + plan.parameters["head"]
    for found in re.findall(r"([\d.]+)B with both tables", text):
        assert float(found) == round((plan.active_parameters + tables) / 1e9, len(found.partition(".")[2]))


@pytest.mark.parametrize("row", ["algorithm=dapo", "reward.rule=math_verify reward.timeout_s=3", "eval=aime2025"])
def test_variants_of_the_readme_are_settings_that_exist(row: str) -> None:
    text = (RECIPES / "dapo_math/README.md").read_text()
    assert f"`{row}`" in text
    section = text[text.index("## Variants") : text.index("**Correction and replay.**")]
    for line in section.splitlines():
        if not line.startswith("| ") or "`" not in line:
            continue
        first = re.findall(r"`([^`]+)`", line.rsplit("|", 2)[1])[0]
        base = ["trainer.old_log_probs=trainer"] if first.startswith("algorithm.correction.min") else []
        load(["recipe=dapo_math", *base, *first.split()], check_paths=False)
