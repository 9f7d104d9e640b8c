"""What `benchmarks.gpu_rollout` measures inside vLLM's worker process. Imported there by name."""

from __future__ import annotations

import cProfile
import pstats
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from sparkrl.rollout.plugin.worker import WorkerExtension

_ROOT = f"{Path(__file__).resolve().parents[1]}/"


def costliest(profiler: cProfile.Profile, count: int = 45) -> list[tuple[str, int, float, float]]:
    """Name, calls, own seconds and seconds with callees of the functions with the most own time.

    Names hold no path of the machine: files are given from the package's or the repository's root on.
    """
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    rows = [
        (f"{_short(path)}:{line}:{name}", calls, round(own, 4), round(whole, 4))
        for (path, line, name), (calls, _, own, whole, _) in stats.items()
    ]
    return sorted(rows, key=lambda row: -row[2])[:count]


def _short(path: str) -> str:
    return re.split(r"site/|site-packages/|python3\.\d+/", path)[-1].removeprefix(_ROOT)


class MeasuringExtension(WorkerExtension):
    """The worker extension of every server, with a profiler and an account of GPU memory."""

    bench_profiler: profile | None = None
    bench_host_profiler: cProfile.Profile | None = None

    def bench_profile_start(self) -> None:
        """Record every kernel from now on."""
        torch.cuda.synchronize()
        self.bench_profiler = profile(activities=[ProfilerActivity.CUDA])
        self.bench_profiler.start()

    def bench_profile_stop(self) -> dict[str, Any]:
        """Microseconds in which a kernel ran (`busy`), and the sum by kernel (`kernels`; streams may overlap)."""
        assert self.bench_profiler is not None
        torch.cuda.synchronize()
        self.bench_profiler.stop()
        spans, kernels, counts = [], Counter[str](), Counter[str]()
        for event in self.bench_profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
            if event.device_type() != DeviceType.CUDA or not event.duration_ns():
                continue
            spans.append((event.start_ns(), event.start_ns() + event.duration_ns()))
            kernels[event.name()] += event.duration_ns()
            counts[event.name()] += 1
        busy, reached = 0, 0
        for begin, end in sorted(spans):
            busy += max(0, end - max(begin, reached))
            reached = max(reached, end)
        self.bench_profiler = None
        return {
            "busy": busy / 1e3,
            "kernels": {name: value / 1e3 for name, value in kernels.items()},
            "counts": dict(counts),
        }

    def bench_host_profile_start(self) -> None:
        """Time every Python function of the engine's own thread from now on."""
        self.bench_host_profiler = cProfile.Profile()
        self.bench_host_profiler.enable()

    def bench_host_profile_stop(self) -> list[tuple[str, int, float, float]]:
        """The costliest functions: name, calls, own seconds, seconds with what they call."""
        assert self.bench_host_profiler is not None
        self.bench_host_profiler.disable()
        return costliest(self.bench_host_profiler)

    def bench_patches(self, patches: dict[str, bool]) -> None:
        """Switch patches of the scheduler (`whole_outputs`, `decode_slots`) on or off; this process is its own too."""
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.sched.scheduler import Scheduler

        from sparkrl.rollout.plugin import decode_slots, whole_outputs

        for name, on in patches.items():
            if on:
                (whole_outputs if name == "whole_outputs" else decode_slots).apply()
            elif name == "whole_outputs":
                Scheduler.update_from_output = whole_outputs._stock_update  # type: ignore[method-assign]
            else:
                KVCacheManager.allocate_slots = decode_slots._stock_allocate  # type: ignore[method-assign]
                KVCacheManager.cache_blocks = decode_slots._stock_cache  # type: ignore[method-assign]

    def bench_memory(self) -> dict[str, int]:
        """Bytes: the model, the adapter slot's buffers, all that is allocated, and the most that was."""
        return {
            "model": sum(p.numel() * p.element_size() for p in self.model_runner.get_model().parameters()),
            "adapter_slot": sum(t.untyped_storage().nbytes() for t in self._slot_tensors()),
            "allocated": torch.cuda.memory_allocated(),
            "peak": torch.cuda.max_memory_allocated(),
        }

    def bench_adapter_sums(self) -> list[int]:
        """A sum over the bits of each buffer that adapters are written to: what is there, not what was sent."""
        return [int(t.view(torch.int16).long().sum()) for t in self._slot_tensors()]

    def _slot_tensors(self) -> list[torch.Tensor]:
        """One tensor of each storage that vLLM keeps adapters in."""
        manager = self.model_runner.lora_manager._adapter_manager if self.model_runner.lora_config else None
        stacked = {}
        for module in manager.modules.values() if manager is not None else ():
            for name, value in vars(module).items():
                if name.endswith("_stacked"):
                    for tensor in value if isinstance(value, tuple | list) else (value,):
                        stacked[tensor.untyped_storage().data_ptr()] = tensor
        return list(stacked.values())
