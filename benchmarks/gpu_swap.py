"""The adapter's way from a trainer rank to vLLM's buffers on one GPU, without an engine around it: two processes, once
through pinned shared memory and once through the GPU's own memory (CUDA IPC).

The buffers are those of 14 layers of Muse Spark with 128 experts, all filled by a rank-32 adapter of 144M numbers
(275 MiB in BF16). Run as `python -m benchmarks.gpu_swap --out F`; `--device cpu --small` only shows that it runs.

Legend: E experts, R rank, O output rows, I input width.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.lora.layers import FusedMoEWithLoRA

from sparkrl.errors import AdapterError
from sparkrl.lora.device_memory import DeviceOutbox
from sparkrl.lora.shared_memory import Inbox, Outbox
from sparkrl.lora.threads import thread_count
from sparkrl.lora.wire import PartWriter
from sparkrl.rollout.plugin.cuda.swap import GpuIntake, SharedIntake
from sparkrl.rollout.plugin.loading import AdapterLoader
from sparkrl.types import AdapterPart, SharedMemory

RANK, ALPHA = 32, 64
LARGE = {"layers": 14, "hidden": 1024, "latent": 512, "inner": 512, "experts": 128, "head_dim": 64}
SMALL = {"layers": 2, "hidden": 64, "latent": 32, "inner": 48, "experts": 4, "head_dim": 16}
REPEATS = 12
_ANSWER_S = 60
_AT = "base_model.model.model.language_model.layers"


class Linear(nn.Module):
    """The buffers of a linear module of vLLM, one A and one B for each of its slices."""

    def __init__(self, width: int, rows: list[int], device: str, *, head_dim: int = 0) -> None:
        super().__init__()
        self.tp_size, self.head_dim = 1, head_dim
        size = {"dtype": torch.bfloat16, "device": device}
        self.lora_a_stacked = tuple(torch.zeros(1, 1, RANK, width, **size) for _ in rows)
        self.lora_b_stacked = tuple(torch.zeros(1, 1, out, RANK, **size) for out in rows)

    def reset_lora(self, index: int) -> None:
        for buffer in (*self.lora_a_stacked, *self.lora_b_stacked):
            buffer[index] = 0

    def reorder_rows(self, part: int, rows_OR: Tensor) -> Tensor:
        """As the fused attention projection does for queries and keys."""
        if not self.head_dim or part > 1:
            return rows_OR
        return rows_OR.unflatten(0, (-1, 2, self.head_dim // 2)).transpose(1, 2).reshape(rows_OR.shape)


class Experts(FusedMoEWithLoRA):
    """The buffers of a layer's experts; `ratio_E` as NVFP4 experts have it whose gate and up scales differ."""

    def __init__(self, shape: dict[str, int], device: str) -> None:
        nn.Module.__init__(self)
        experts, latent, inner = shape["experts"], shape["latent"], shape["inner"]
        parallel = SimpleNamespace(use_ep=False, ep_rank=0)
        self.moe_config = SimpleNamespace(
            num_experts=experts,
            num_local_experts=experts,
            intermediate_size_per_partition=inner,
            moe_parallel_config=parallel,
        )
        self.tp_size, self.fully_sharded, self._w13_slices = 1, False, 1
        size = {"dtype": torch.bfloat16, "device": device}
        self.w13_lora_a_stacked = (torch.zeros(1, experts, RANK, latent, **size),)
        self.w13_lora_b_stacked = (torch.zeros(1, experts, 2 * inner, RANK, **size),)
        self.w2_lora_a_stacked = (torch.zeros(1, experts, RANK, inner, **size),)
        self.w2_lora_b_stacked = (torch.zeros(1, experts, latent, RANK, **size),)
        self.adapter_enabled = torch.zeros(2, dtype=torch.int, device=device)
        self.ratio_E = 1 + torch.rand(experts, device=device)


def make_manager(shape: dict[str, int], device: str) -> Any:
    """As much of vLLM's adapter manager as a swap touches."""
    hidden, latent = shape["hidden"], shape["latent"]
    modules: dict[str, Any] = {}
    for layer in range(shape["layers"]):
        at = f"model.language_model.layers.{layer}"
        qkv = [hidden, hidden // 4, hidden // 4, hidden]
        modules[f"{at}.self_attn.qkv_proj"] = Linear(hidden, qkv, device, head_dim=shape["head_dim"])
        modules[f"{at}.self_attn.o_proj"] = Linear(hidden, [hidden], device)
        modules[f"{at}.mlp.pre_expert_proj"] = Linear(hidden, [latent], device)
        modules[f"{at}.mlp.post_expert_proj"] = Linear(latent, [hidden], device)
        modules[f"{at}.mlp.experts"] = Experts(shape, device)
    return SimpleNamespace(
        model=SimpleNamespace(),
        modules=modules,
        packed_modules_mapping={"qkv_proj": ["q_proj", "k_proj", "v_proj", "gate_proj"]},
        device=torch.device(device),
        lora_config=SimpleNamespace(max_lora_rank=RANK),
        lora_index_to_id=[None],
        remove_adapter=lambda lora_id: None,
        _registered_adapters={},
        _active_adapters={},
    )


def make_factors(shape: dict[str, int], device: str, seed: int) -> dict[str, Tensor]:
    """A trainer rank's parameters, float32, random."""
    random = torch.Generator(device).manual_seed(seed)
    hidden, latent, inner, experts = (shape[name] for name in ("hidden", "latent", "inner", "experts"))
    widths = {f"self_attn.{name}_proj": (hidden, hidden) for name in ("q", "gate", "o")}
    widths |= {f"self_attn.{name}_proj": (hidden, hidden // 4) for name in ("k", "v")}
    widths |= {"mlp.pre_expert_proj": (hidden, latent), "mlp.post_expert_proj": (latent, hidden)}
    sizes: dict[str, tuple[int, ...]] = {}
    for layer in range(shape["layers"]):
        for name, (width, rows) in widths.items():
            sizes[f"{_AT}.{layer}.{name}.lora_A.default.weight"] = (RANK, width)
            sizes[f"{_AT}.{layer}.{name}.lora_B.default.weight"] = (rows, RANK)
        for part, width, rows in (("gate_up", latent, 2 * inner), ("down", inner, latent)):
            sizes[f"{_AT}.{layer}.mlp.experts.lora_{part}_A.default"] = (experts, RANK, width)
            sizes[f"{_AT}.{layer}.mlp.experts.lora_{part}_B.default"] = (experts, rows, RANK)
    return {name: torch.randn(size, generator=random, device=device) for name, size in sizes.items()}


def wrong_buffers(manager: Any, factors: dict[str, Tensor], dtype: str) -> list[str]:
    """Names of the modules whose buffers do not hold what each factor says, computed one module at a time."""
    scale, wrong = ALPHA / RANK, []

    def wire(value: Tensor) -> Tensor:
        return value.to(getattr(torch, dtype)).float()

    for name, module in manager.modules.items():
        at = f"base_model.model.{name}"
        if isinstance(module, Experts):
            ratio_E11 = module.ratio_E[:, None, None]
            gate, up = wire(factors[f"{at}.lora_gate_up_B.default"] * scale).chunk(2, dim=1)
            pairs = [
                (module.w13_lora_a_stacked[0][0], wire(factors[f"{at}.lora_gate_up_A.default"])),
                (module.w13_lora_b_stacked[0][0], torch.cat([gate, up / ratio_E11], dim=1)),
                (module.w2_lora_a_stacked[0][0], wire(factors[f"{at}.lora_down_A.default"]) * ratio_E11),
                (module.w2_lora_b_stacked[0][0], wire(factors[f"{at}.lora_down_B.default"] * scale)),
            ]
        else:
            parent, _, last = at.rpartition(".")
            names = [f"{parent}.{part}" for part in manager.packed_modules_mapping.get(last, [last])]
            pairs = []
            for i, part in enumerate(names):
                rows = wire(factors[f"{part}.lora_B.default.weight"] * scale)
                pairs.append((module.lora_a_stacked[i][0, 0], wire(factors[f"{part}.lora_A.default.weight"])))
                pairs.append((module.lora_b_stacked[i][0, 0], module.reorder_rows(i, rows)))
        if not all(torch.equal(buffer, value.to(buffer.dtype)) for buffer, value in pairs):
            wrong.append(name)
    return wrong


CONFIG = {"r": RANK, "lora_alpha": ALPHA, "target_modules": [], "peft_type": "LORA"}


def trainer(pipe: Any, shape: dict[str, int], dtype: str, device: str, transport: str) -> None:
    """A trainer rank in a process of its own, until it is killed: for every seed that it is sent it publishes other
    numbers, a few times over, and sends back the median milliseconds and the part."""
    seed, mapped = pipe.recv(), transport == "cuda_ipc"
    factors = make_factors(shape, device, seed)
    writer = PartWriter({name: (value, 0, len(value)) for name, value in factors.items()}, CONFIG, dtype)
    box = DeviceOutbox(torch.device(device)) if mapped else Outbox("benchmark", pinned=device == "cuda")
    room: Any = box.room(writer.num_bytes)
    write: Any = writer.write_on_device if mapped else writer.write
    while True:
        sent = []
        pipe.send((timed(lambda: sent.append(write(room, memory=box.handle())), device), sent[-1]))  # noqa: B023
        for name, value in make_factors(shape, device, pipe.recv()).items():
            factors[name].copy_(value)


def timed(call: Callable[[], Any], device: str) -> float:
    """Milliseconds of a call and of what it leaves to the GPU, median after the first of `REPEATS`."""
    times = []
    for _ in range(REPEATS):
        wait(device)
        began = time.perf_counter()
        call()
        wait(device)
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times[1:])


def wait(device: str) -> None:
    """Until the GPU is done."""
    if device == "cuda":
        torch.cuda.synchronize()


def measure(device: str = "cuda", shape: dict[str, int] | None = None) -> dict[str, Any]:
    """All figures by type and transport; see `measure_one`."""
    shape = LARGE if shape is None else shape
    transports = ("shared_memory", "cuda_ipc") if device == "cuda" else ("shared_memory",)
    cases, forked = [], multiprocessing.get_context("fork")
    for dtype in ("bfloat16", "float32"):
        for transport in transports:  # all begin before this process has touched the GPU
            here, there = multiprocessing.Pipe()
            process = forked.Process(target=trainer, args=(there, shape, dtype, device, transport), daemon=True)
            process.start()
            cases.append((dtype, transport, here, process))
    found = {f"{dtype} {transport}": measure_one(device, shape, dtype, *rest) for dtype, transport, *rest in cases}
    return {"shape": shape, "threads": thread_count(1 << 40), **found}


def measure_one(device: str, shape: dict[str, int], dtype: str, pipe: Any, process: Any) -> dict[str, Any]:
    """Times in milliseconds, medians; the trainer's side runs in a process of its own.

    Returns:
        `mib`, `publish` (the trainer's side), `first_load` (maps the memory and plans the copies), `load` (everything
        that a server's worker does), `copies` (what of it puts the bytes in place), `plain_load` (where gate and up
        scales agree, as in BF16), `device_copy` (of the buffers' bytes), `bus_copy` of the shared memory, ratios,
        `wrong_buffers`, and `dead_writer`: what a load says once the trainer has been killed.
    """
    torch_device, numbers = torch.device(device), iter(range(1, 1000))
    manager = make_manager(shape, device)

    def publish(seed: int) -> tuple[float, list[AdapterPart]]:
        pipe.send(seed)
        if not pipe.poll(_ANSWER_S):
            raise RuntimeError(f"the trainer's process did not answer within {_ANSWER_S} s")
        milliseconds, part = pipe.recv()
        return milliseconds, [part]

    intake = GpuIntake(torch_device) if device == "cuda" else SharedIntake(torch_device)
    loader = AdapterLoader(manager, worker=0, num_workers=1, intake=intake, ratio_of=lambda module: module.ratio_E)

    def load() -> None:
        loader.load(0, next(numbers), parts, CONFIG, scaled=True)

    found: dict[str, Any] = {}
    found["publish"], parts = publish(0)
    found["mib"], found["tensors"] = parts[0].num_bytes / 2**20, len(parts[0].manifest)
    began = time.perf_counter()
    load()
    found["first_load"] = 1e3 * (time.perf_counter() - began)
    found["load"] = timed(load, device)
    _, moves, _ = loader._planned[0]
    found["copies"] = timed(lambda: intake.take(moves, parts, []), device)
    _, parts = publish(1)
    load()
    found["wrong_buffers"] = wrong_buffers(manager, make_factors(shape, device, seed=1), dtype)
    loader = AdapterLoader(manager, worker=0, num_workers=1, intake=intake)
    found["plain_load"] = timed(load, device)
    against = ["device_copy"]
    one = torch.empty(parts[0].num_bytes * (2 if dtype == "bfloat16" else 1) // 2, dtype=torch.uint8, device=device)
    other = torch.empty_like(one)
    found["device_copy"] = timed(lambda: one.copy_(other), device)
    if isinstance(parts[0].memory, SharedMemory):
        inbox = Inbox(pinned=device == "cuda")
        raw = torch.from_numpy(inbox.open(parts[0].memory))
        on_device = torch.empty_like(raw, device=device)
        found["bus_copy"] = timed(lambda: on_device.copy_(raw, non_blocking=True), device)
        inbox.keep([])
        against.append("bus_copy")
    for name in ("load", "plain_load", "publish"):
        found |= {f"{name}_over_{other_name}": found[name] / found[other_name] for other_name in against}
    process.kill()
    process.join()
    try:
        load()
        found["dead_writer"] = "served"  # shared memory outlives its writer
    except AdapterError as error:
        found["dead_writer"] = error.message
    intake.open([])
    return found


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    found = measure(arguments.device, SMALL if arguments.small else None)
    text = json.dumps(found, indent=1)
    arguments.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
