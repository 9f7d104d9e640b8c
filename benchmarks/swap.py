"""Swapping the adapter of a running server: from a trainer rank's parameters, against one copy of the same bytes and
against vLLM's own load from disk.

Two adapters, both rank 32 on attention, latent projections and all experts: the quickstart's, and one of more than
500 MB for a wide model of small layers with random weights. "Publish" is the trainer's half (scaled, laid out, summed
up), "load" the server's (through Ray and vLLM to its worker, into vLLM's buffers, every byte verified, acknowledged),
and "whole swap" both. Without it a step would pay for writing the files and for vLLM's load of them, which are read
back from the page cache.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from benchmarks.figures import Figure
from benchmarks.gpu_model import shape
from benchmarks.server import config, measured_server, random_adapter
from sparkrl.config.schema import Config
from sparkrl.loop.cluster import ray_cluster
from sparkrl.lora.peft_format import from_peft, save_adapter, unpack
from sparkrl.lora.shared_memory import Outbox
from sparkrl.lora.wire import PartWriter, gather_parts
from sparkrl.models.registry import load_config
from sparkrl.quant.checkpoint import write_checkpoint
from sparkrl.rollout import RolloutPool

NAME = "swap"
WIDE = {"layers": 18, "hidden": 256, "latent": 256, "inner": 128, "experts": 256, "top_k": 8}
SIZES = (
    "quickstart: 6.8 MB fp32 in 176 tensors, fp32 server; wide: 544 MB fp32 (18 layers of 256 experts), bf16 server; "
    "of the wide one each core copies and sums up, a block after the other"
)


def run() -> list[Figure]:
    """The small one, then the large one."""
    settings = ("rollout.num_threads=1", "rollout.kv_cache_gib=0.1")
    figures = measure("quickstart", config("rollout.dtype=float32", *settings), repeats=15)
    with tempfile.TemporaryDirectory() as folder:
        path = build_wide(Path(folder) / "wide", config().model.path)
        cfg = config("rollout.dtype=bfloat16", f"model.path={path}", *settings)
        return figures + measure("wide", cfg, repeats=7, at_most=3.0)


def measure(label: str, cfg: Config, *, repeats: int, at_most: float | None = None) -> list[Figure]:
    """Median times after warm-up; every version has other numbers than the one before.

    Args:
        at_most: target for the whole swap's time over the copy's.
    """
    torch.set_num_threads(1)
    adapter = random_adapter(cfg)
    tensors = unpack(adapter)
    parameters = from_peft(tensors, rank=cfg.lora.rank)
    writer = PartWriter({name: (value, 0, len(value)) for name, value in parameters.items()}, adapter.config, "float32")
    outbox, target = Outbox(NAME), np.ones_like(adapter.buffer)
    memory = outbox.room(writer.num_bytes)
    seconds: dict[str, list[float]] = {name: [] for name in ("copy", "publish", "load", "worker", "write", "disk")}

    def timed(name: str, call: Any) -> Any:
        began = time.perf_counter()
        found = call()
        seconds[name].append(time.perf_counter() - began)
        return found

    with tempfile.TemporaryDirectory() as folder, ray_cluster(cfg), measured_server(cfg) as server:
        pool = RolloutPool(cfg, [server])
        for version in range(repeats + 2):
            next(iter(parameters.values())).add_(1e-3)
            timed("copy", lambda: np.copyto(target, adapter.buffer))
            part = timed("publish", lambda: writer.write(memory, memory=outbox.handle()))
            sent = gather_parts([part], adapter.config, version)
            timed("load", lambda sent=sent: asyncio.run(pool.load_adapter(sent)))
            seconds["worker"].append(ray.get(server.worker_swap_s.remote()))
        for _ in range(min(repeats, 4) + 2):
            timed("write", lambda: save_adapter(folder, tensors, adapter.config))
            seconds["disk"].append(ray.get(server.swap_from_disk.remote(folder)))
    outbox.close()
    median = {name: statistics.median(values[2:]) for name, values in seconds.items()}
    median["swap"] = median["publish"] + median["load"]
    median["files"] = median["write"] + median["disk"]

    def figure(case: str, name: str, against: str = "", meaning: str = "", limit: float | None = None) -> Figure:
        ratio = median[name] / median[against] if against else None
        return Figure(
            benchmark=NAME,
            case=f"{label}: {case}",
            value=1e3 * median[name],
            unit="ms",
            ratio=ratio,
            meaning=meaning,
            at_most=limit,
        )

    return [
        figure("one copy of its bytes", "copy"),
        figure("publish", "publish", "copy", "its time / the copy's"),
        figure("load, inside the worker", "worker", "copy", "its time / the copy's"),
        figure("load", "load", "copy", "its time / the copy's"),
        figure("whole swap", "swap", "copy", "its time / the copy's", at_most),
        figure("vLLM's own load from disk", "disk", "copy", "its time / the copy's"),
        figure("whole swap", "swap", "disk", "its time / vLLM's load"),
        figure("whole swap", "swap", "files", "its time / writing and loading"),
    ]


def build_wide(folder: Path, tokenizer: Path | str) -> Path:
    """A checkpoint of `WIDE` with random weights; what it says is of no interest."""
    fields = shape(**WIDE)
    described = {
        "architectures": ["MuseSpark1xForCausalLM"],
        "model_type": "muse_spark_text",
        **fields,
        "num_shared_experts": 0,
        "dtype": "bfloat16",
    }
    files = {path.name: path.read_text() for path in Path(tokenizer).glob("*token*.json")}
    files["generation_config.json"] = '{"eos_token_id": 1, "pad_token_id": 0}'
    with tempfile.TemporaryDirectory() as scratch:
        write_checkpoint(Path(scratch) / "empty", {}, described)
        family, text = load_config(Path(scratch) / "empty")
    with torch.device("meta"):
        model = family.build(text, torch.bfloat16)
    tensors = {
        name: torch.empty(value.shape, dtype=value.dtype).uniform_(-0.05, 0.05)
        for name, value in [*model.named_parameters(), *model.named_buffers()]
        if not name.endswith("inv_freq")
    }
    write_checkpoint(folder, tensors, described, files=files)
    return folder
