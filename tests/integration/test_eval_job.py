"""An evaluation as a job of its own on a running Ray cluster: it takes what is free, beside a training run."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from rich.console import Console

from sparkrl.config.load import load
from sparkrl.config.schema import Config, Device, Precision
from sparkrl.errors import ConfigError, WorkerError
from sparkrl.loop.placement import own_placement

CLUSTER = """
import ray, sys
ray.init(address="local", num_cpus=3, include_dashboard=False, object_store_memory=300 * 2**20)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
ray.shutdown()
"""
SMALL = ["recipe=quickstart", "eval.k=4", "eval.num_problems=8", "telemetry.wandb=disabled"]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}


@pytest.fixture
def cluster() -> Iterator[str]:
    """The address of a cluster of 3 processors; it goes when its owner's input is closed."""
    owner = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    assert owner.stdin is not None and owner.stdout is not None
    yield owner.stdout.readline().strip()
    owner.stdin.close()
    owner.wait(timeout=60)


def command(cluster: str, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "sparkrl.cli", *arguments, f"cluster.address={cluster}"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT,
    )  # fmt: skip


def test_eval_job_beside_a_training_run_gives_the_figures_of_the_run_itself(cluster: str, tmp_path: Path) -> None:
    run, evaluation = tmp_path / "run", tmp_path / "evaluation"
    training = command(
        cluster, "train", *SMALL, f"run_dir={run}", "loop.num_steps=1000", "loop.num_prompts=8", "loop.group_size=4",
        "loop.save_every=1", "loop.keep_checkpoints=3", "eval.every=1", "trainer.compare_without_replay_every=0",
    )  # fmt: skip
    checkpoint = run / "checkpoints/step-000001"
    while not checkpoint.is_dir():
        assert training.poll() is None, training.communicate()[0]
        time.sleep(0.1)
    adapter = shutil.copytree(checkpoint, tmp_path / checkpoint.name)  # the run keeps its newest ones only
    job = command(cluster, "eval", *SMALL, f"adapter={adapter}", f"run_dir={evaluation}")
    said = job.communicate(timeout=300)[0]
    assert job.returncode == 0, said
    assert training.poll() is None, training.communicate()[0]
    training.send_signal(signal.SIGINT)
    rest = training.communicate(timeout=120)[0]
    assert training.returncode == 130, rest
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, second = [row for row in rows if row["kind"] == "eval"][:2]
    record = json.loads((evaluation / "evaluation.json").read_text())
    assert record["baseline"]["mean"] == first["eval/mean"]
    for name in ("mean", "gain", "gain_low", "gain_high", "maj_at_k", "mean_tokens"):
        assert record["adapter"][name] == second[f"eval/{name}"]
    steps = [row["step"] for row in rows if row["kind"] == "train"]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > 1


@ray.remote(num_cpus=0)
class Holder:
    """Stands for a trainer rank, or a server of the evaluation."""

    def gpus(self) -> list[int]:
        return [int(number) for number in ray.get_gpu_ids()]


@pytest.fixture(scope="module")
def four_gpus() -> Iterator[None]:
    """A cluster that says it has 4 GPUs."""
    ray.init(address="local", num_cpus=3, num_gpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def on_gpus(tensor_parallel_size: int, *, wait_s: float = 30.0) -> Config:
    config = load(["recipe=quickstart"], trains=False)
    config.cluster.device = Device.cuda
    config.rollout.dtype = Precision.bfloat16
    config.rollout.tensor_parallel_size = tensor_parallel_size
    config.rollout.start_timeout_s = wait_s
    return config


async def gpus_of_a_server(config: Config, out: io.StringIO) -> list[int]:
    async with own_placement(config, Console(file=out, width=300)) as placement:
        strategy = PlacementGroupSchedulingStrategy(placement_group=placement, placement_group_bundle_index=0)
        server = Holder.options(num_gpus=config.rollout.tensor_parallel_size, scheduling_strategy=strategy).remote()
        return await server.gpus.remote()


def test_placement_never_overlaps_with_gpus_that_a_trainer_holds(four_gpus: None) -> None:
    trainer = Holder.options(num_gpus=2).remote()
    held = ray.get(trainer.gpus.remote())
    taken = asyncio.run(gpus_of_a_server(on_gpus(2), io.StringIO()))
    assert sorted(held + taken) == [0, 1, 2, 3]
    ray.kill(trainer)


def test_placement_without_free_gpus_waits_and_then_says_who_lacks_what(four_gpus: None) -> None:
    trainer = Holder.options(num_gpus=3).remote()
    ray.get(trainer.gpus.remote())
    out = io.StringIO()
    with pytest.raises(WorkerError, match=r"within 7 s: the evaluation takes 1 server\(s\) of 2 GPU and 1 CPU each"):
        asyncio.run(gpus_of_a_server(on_gpus(2, wait_s=7.0), out))
    assert "waiting for room on the cluster" in out.getvalue() and "free now: 1 GPU" in out.getvalue()
    ray.kill(trainer)


def test_placement_larger_than_any_node_is_refused_at_once(four_gpus: None) -> None:
    with pytest.raises(ConfigError, match=r"takes 8 GPU and 1 CPU on one node, .* has 4 GPU and 3 CPU"):
        asyncio.run(gpus_of_a_server(on_gpus(8), io.StringIO()))
