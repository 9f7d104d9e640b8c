"""Room of an evaluation job's own on a Ray cluster, beside whatever else runs there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from rich.console import Console

from sparkrl.config.schema import Config, Device
from sparkrl.errors import ConfigError, WorkerError
from sparkrl.rollout import SERVER_CPUS

_SILENT_WAIT_S = 5.0


@asynccontextmanager
async def own_placement(config: Config, console: Console) -> AsyncIterator[PlacementGroup]:
    """Set aside a bundle for each server and give them back at the end; waits while others hold what is needed.

    Ray hands out no GPU twice, so what a training run holds is never touched.

    Raises:
        ConfigError: the cluster has no room for the servers, not even when it is empty.
        WorkerError: nothing became free within `rollout.start_timeout_s`.
    """
    bundle: dict[str, float] = {"CPU": SERVER_CPUS}
    if config.cluster.device is Device.cuda:
        bundle["GPU"] = config.rollout.tensor_parallel_size
    check_possible([node["Resources"] for node in ray.nodes() if node["Alive"]], bundle, config.rollout.num_replicas)
    group = placement_group([bundle] * config.rollout.num_replicas, strategy="PACK")
    try:
        await _wait(group, bundle, config, console)
        yield group
    finally:
        remove_placement_group(group)


async def _wait(group: PlacementGroup, bundle: dict[str, float], config: Config, console: Console) -> None:
    ready = asyncio.wrap_future(group.ready().future())
    limit_s = config.rollout.start_timeout_s
    done, _ = await asyncio.wait([ready], timeout=min(_SILENT_WAIT_S, limit_s))
    if not done:
        wanted = f"{config.rollout.num_replicas} server(s) of {_describe(bundle)} each"
        console.print(f"waiting for room on the cluster: {wanted}; free now: {_describe(_free(bundle))}")
        done, _ = await asyncio.wait([ready], timeout=max(limit_s - _SILENT_WAIT_S, 0.0))
        if not done:
            ready.cancel()
            raise WorkerError(
                f"no room on the Ray cluster within {limit_s:.0f} s: the evaluation takes {wanted}, "
                f"free now: {_describe(_free(bundle))}",
                hint="wait for other runs to end, add nodes, or raise `rollout.start_timeout_s` to wait longer",
            )
    await ready


def check_possible(nodes: Sequence[Mapping[str, float]], bundle: Mapping[str, float], num_servers: int) -> None:
    """Refuse what would wait for ever.

    Args:
        nodes: resources of each node, in use or not.
        bundle: resources of one server, which lies on one node.
    Raises:
        ConfigError: no node is large enough for a server, or all nodes together hold too few of them.
    """
    num_held = sum(min(int(node.get(name, 0.0) // amount) for name, amount in bundle.items()) for node in nodes)
    if num_held == 0:
        largest = {name: max((node.get(name, 0.0) for node in nodes), default=0.0) for name in bundle}
        raise ConfigError(
            f"a server takes {_describe(bundle)} on one node, the largest node of the Ray cluster has "
            f"{_describe(largest)}",
            hint="lower `rollout.tensor_parallel_size`, or join another cluster with `cluster.address`",
        )
    if num_held < num_servers:
        raise ConfigError(
            f"`rollout.num_replicas` is {num_servers}, but the Ray cluster holds {num_held} servers of "
            f"{_describe(bundle)} each, even when nothing else runs",
            hint=f"set `rollout.num_replicas={num_held}`, or join another cluster with `cluster.address`",
        )


def _free(bundle: dict[str, float]) -> dict[str, float]:
    free = ray.available_resources()
    return {name: free.get(name, 0.0) for name in bundle}


def _describe(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items(), reverse=True))
