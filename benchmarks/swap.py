"""Swapping the adapter of a running server: from memory, vLLM's own load from disk, and one copy of the same bytes.

The adapter is the quickstart's (rank 32 on attention, latent projections and all experts). "In memory" ends when every
tensor lies in vLLM's buffers and the checksum has been acknowledged; "through the pool" adds Ray's object store, which
is what a training step pays. Without it a step would pay for writing the files and for vLLM's load of them, which are
read back from the page cache.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time

import numpy as np
import ray

from benchmarks.figures import Figure
from benchmarks.server import config, measured_server, random_adapter
from sparkrl.loop.cluster import ray_cluster
from sparkrl.lora.peft_format import save_adapter, unpack
from sparkrl.rollout import RolloutPool

NAME = "swap"
REPEATS, WARMUP = 15, 3
SIZES = "the quickstart's adapter, 6.8 MB fp32 in 176 tensors; fp32 server, one thread"


def run() -> list[Figure]:
    """Time all of them in turns."""
    cfg = config("rollout.dtype=float32", "rollout.num_threads=1", "rollout.kv_cache_gib=0.1")
    adapter = random_adapter(cfg)
    target = np.empty_like(adapter.buffer)
    seconds: dict[str, list[float]] = {"copy": [], "memory": [], "pool": [], "write": [], "disk": []}
    with tempfile.TemporaryDirectory() as folder, ray_cluster(cfg), measured_server(cfg) as server:
        tensors = unpack(adapter)
        pool = RolloutPool(cfg, [server])
        shared = ray.put(adapter)
        for _ in range(WARMUP + REPEATS):
            began = time.perf_counter()
            np.copyto(target, adapter.buffer)
            seconds["copy"].append(time.perf_counter() - began)
            seconds["memory"].append(ray.get(server.swap_from_memory.remote(shared)))
            began = time.perf_counter()
            asyncio.run(pool.load_adapter(adapter))
            seconds["pool"].append(time.perf_counter() - began)
            began = time.perf_counter()
            save_adapter(folder, tensors, adapter.config)
            seconds["write"].append(time.perf_counter() - began)
            seconds["disk"].append(ray.get(server.swap_from_disk.remote(folder)))
    median = {name: statistics.median(values[WARMUP:]) for name, values in seconds.items()}
    median["both"] = median["write"] + median["disk"]

    def figure(case: str, name: str, against: str = "", meaning: str = "") -> Figure:
        ratio = median[name] / median[against] if against else None
        return Figure(benchmark=NAME, case=case, value=1e3 * median[name], unit="ms", ratio=ratio, meaning=meaning)

    return [
        figure("one copy of its bytes", "copy"),
        figure("vLLM's own load from disk", "disk"),
        figure("writing the files, and vLLM's load", "both"),
        figure("in memory", "memory", "copy", "its time / the copy's"),
        figure("in memory", "memory", "disk", "its time / vLLM's load"),
        figure("in memory, through the pool", "pool", "both", "its time / writing and loading"),
    ]
