"""Ray: start it here or join a running cluster, and check that it has what the config asks for."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from sparkrl.config.schema import Config, Device
from sparkrl.errors import ConfigError, WorkerError

# Set for every worker of the run. Ray's hook that repacks `uv run` environments would copy the whole venv.
WORKER_ENV = {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "TOKENIZERS_PARALLELISM": "false"}


@contextmanager
def ray_cluster(config: Config) -> Iterator[None]:
    """Connect to Ray for the run; a cluster that was started here is stopped at the end, a joined one is left.

    Raises:
        ConfigError: the cluster has fewer GPUs than `cluster.num_gpus`.
        WorkerError: Ray cannot be started or reached.
    """
    cluster = config.cluster
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.update(WORKER_ENV)
    options: dict = {
        "runtime_env": {"env_vars": WORKER_ENV},
        "log_to_driver": False,
        "logging_level": logging.ERROR,
    }
    if cluster.address is None:
        # Ray counts CPUs only to place actors; the parts of a step take turns, so a laptop's two cores are enough.
        wanted = config.rollout.num_replicas + config.trainer.num_workers + config.reward.num_workers
        options |= {
            # without it Ray would join whatever RAY_ADDRESS or an earlier `ray start` on this machine points at
            "address": "local",
            "num_cpus": max(wanted, os.cpu_count() or 1),
            "include_dashboard": False,
            "object_store_memory": int(cluster.object_store_gib * 2**30),
        }
    else:
        options["address"] = cluster.address
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(**options)
    except Exception as error:  # border: Ray raises many kinds here, none of them ours
        raise WorkerError(
            f"Ray cannot be {'started' if cluster.address is None else 'reached at ' + cluster.address}: {error}",
            hint="see `sparkrl doctor`; a cluster's address is `auto` on one of its nodes; one that was started with a "
            "token wants `RAY_AUTH_MODE=token` in the environment",
        ) from error
    for number, handler in handlers.items():
        signal.signal(number, handler)  # Ray installs crash handlers of its own, which print stacks at a plain SIGTERM
    try:
        have = int(ray.cluster_resources().get("GPU", 0))
        if cluster.device is Device.cuda and have < cluster.num_gpus:
            raise ConfigError(
                f"`cluster.num_gpus` is {cluster.num_gpus}, but the Ray cluster has {have}",
                hint="lower `rollout.num_replicas` or `trainer.num_workers`, or choose another `cluster=`",
            )
        yield
    finally:
        ray.shutdown()
