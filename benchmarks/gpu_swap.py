"""The adapter's way from a trainer rank to vLLM's buffers on one GPU, stage by stage, without an engine around it.

The buffers are those of 14 layers of Muse Spark with 128 experts, all filled by a rank-32 adapter of 144M numbers
(275 MiB in BF16). Run as `python -m benchmarks.gpu_swap --out F`; `--device cpu --small` only shows that it runs.

Legend: E experts, R rank, O output rows, I input width.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.lora.layers import FusedMoEWithLoRA

from sparkrl.lora.shared_memory import Inbox, Outbox
from sparkrl.lora.wire import PartWriter, block_checksum, summing_threads
from sparkrl.rollout.plugin.cuda.swap import DeviceCopier
from sparkrl.rollout.plugin.loading import AdapterLoader

RANK, ALPHA = 32, 64
LARGE = {"layers": 14, "hidden": 1024, "latent": 512, "inner": 512, "experts": 128, "head_dim": 64}
SMALL = {"layers": 2, "hidden": 64, "latent": 32, "inner": 48, "experts": 4, "head_dim": 16}
REPEATS = 12
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


def measure(device: str = "cuda", shape: dict[str, int] | None = None) -> dict[str, Any]:
    """All figures, times in milliseconds, medians after the first of `REPEATS` calls.

    Returns:
        For each type on the wire: `mib`, `publish` (the trainer's side, parameters on the GPU), `first_load` (pins the
        memory and plans the copies), `load` (everything that a server's worker does), `plain_load` (where gate and up
        scales agree, as in BF16), `bus_copy`, `checksums_one_thread`,
        `device_copy` (of the buffers' bytes), their ratios, and `wrong_buffers`.
    """
    shape = LARGE if shape is None else shape
    config = {"r": RANK, "lora_alpha": ALPHA, "target_modules": [], "peft_type": "LORA"}
    out: dict[str, Any] = {"shape": shape, "summing_threads": summing_threads()}
    pinned = device == "cuda"

    def wait() -> None:
        if pinned:
            torch.cuda.synchronize()

    def timed(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(REPEATS):
            wait()
            began = time.perf_counter()
            call()
            wait()
            times.append(time.perf_counter() - began)
        return 1e3 * statistics.median(times[1:])

    for dtype in ("bfloat16", "float32"):
        manager, outbox = make_manager(shape, device), Outbox("benchmark", pinned=pinned)
        factors = make_factors(shape, device, seed=0)
        writer = PartWriter({name: (value, 0, len(value)) for name, value in factors.items()}, config, dtype)
        target = outbox.room(writer.num_bytes)
        found: dict[str, Any] = {"mib": writer.num_bytes / 2**20, "tensors": len(writer.manifest)}
        found["publish"] = timed(lambda: writer.write(target, memory=outbox.handle()))  # noqa: B023
        part = writer.write(target, memory=outbox.handle())
        inbox = Inbox(pinned=pinned)
        copier, numbers = DeviceCopier(torch.device(device)), iter(range(1, 1000))

        def loader(ratio_of: Callable[[Any], Tensor | None]) -> Callable[[], None]:
            made = AdapterLoader(
                manager,  # noqa: B023
                worker=0,
                num_workers=1,
                copy=copier,  # noqa: B023
                ratio_of=ratio_of,
                inbox=inbox,  # noqa: B023
                num_threads=summing_threads(),
            )
            return lambda: made.load(0, next(numbers), [part], config, scaled=True)  # noqa: B023

        with_ratio = loader(lambda module: module.ratio_E)
        began = time.perf_counter()
        with_ratio()
        found["first_load"] = 1e3 * (time.perf_counter() - began)
        found["load"] = timed(with_ratio)
        factors_now = make_factors(shape, device, seed=1)
        for name, value in factors.items():
            value.copy_(factors_now[name])
        part = writer.write(target, memory=outbox.handle())
        with_ratio()
        found["wrong_buffers"] = wrong_buffers(manager, factors, dtype)
        found["plain_load"] = timed(loader(lambda module: None))
        raw = torch.from_numpy(target)
        on_device = torch.empty_like(raw, device=device)
        found["bus_copy"] = timed(lambda: on_device.copy_(raw, non_blocking=True))  # noqa: B023
        buffers = torch.empty(writer.num_bytes * (2 if dtype == "bfloat16" else 1) // 2, dtype=torch.uint8)
        one, other = buffers.to(device), buffers.to(device)
        found["device_copy"] = timed(lambda: one.copy_(other))  # noqa: B023
        found["checksums_one_thread"] = timed(lambda: block_checksum(target))  # noqa: B023
        for name in ("load", "plain_load", "publish"):
            found[f"{name}_over_device_copy"] = found[name] / found["device_copy"]
            found[f"{name}_over_bus_copy"] = found[name] / found["bus_copy"]
        out[dtype] = found
        inbox.keep([])
        outbox.close()
    return out


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
