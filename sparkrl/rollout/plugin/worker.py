"""What the engine calls inside vLLM's worker process (`worker_extension_cls`), through `collective_rpc`.

Adapters are read from shared memory straight into vLLM's buffers, and made known to its manager under an id of their
own; requests that carry this id then find the adapter loaded. No path is ever read: if vLLM lost the adapter it would
try the path `sparkrl://...` and fail loudly, instead of answering with the base model.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterable
from typing import Any

import psutil
import torch

from sparkrl.errors import AdapterError
from sparkrl.lora.wire import from_plain
from sparkrl.rollout import plugin
from sparkrl.rollout.plugin.loading import AdapterLoader, HostIntake
from sparkrl.rollout.plugin.versions import installed_vllm

_WATCH_S = 0.5
"""How often a worker looks whether its actor still lives, seconds."""


class WorkerExtension:
    """Mixed into vLLM's worker class; names carry a prefix because vLLM refuses clashes."""

    model_runner: Any
    rank: int
    parallel_config: Any
    sparkrl_adapters: AdapterLoader | None = None
    sparkrl_swap_s: float = float("nan")
    """Seconds the last adapter took from shared memory into the buffers."""

    def sparkrl_report(self) -> dict[str, Any]:
        """What is live in this process: the plugin's report, the model class, LoRA-wrapped modules, memory."""
        runner = self.model_runner
        model = runner.get_model()
        manager = runner.lora_manager._adapter_manager if runner.lora_config else None
        return {
            **plugin.report(),
            "pid": os.getpid(),
            "vllm": installed_vllm(),
            "rank": self.rank,
            "model_class": f"{type(model).__module__}.{type(model).__name__}",
            # the first name is this package's on CPU, the second vLLM's own on CUDA
            "route_connector": any(
                getattr(runner, name, None) is not None for name in ("aux_connector", "aux_output_connector")
            ),
            "lora_modules": sorted(manager.modules) if manager is not None else [],
            "model_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
            "adapter_slot_bytes": _slot_bytes(manager.modules.values()) if manager is not None else 0,
            "threads": torch.get_num_threads(),
            "swap_s": self.sparkrl_swap_s,
            "swap_bytes": 0 if self.sparkrl_adapters is None else self.sparkrl_adapters.loaded_bytes,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    def sparkrl_watch(self, pid: int) -> None:
        """End this process when process `pid` (the actor) is gone: a killed actor cannot stop it any more."""
        watched = psutil.Process(pid)

        def watch() -> None:
            while watched.is_running():
                time.sleep(_WATCH_S)
            os._exit(1)

        threading.Thread(target=watch, daemon=True, name="sparkrl-watch").start()

    def sparkrl_load_adapter(
        self, slot: int, lora_id: int, parts: list[dict[str, Any]], config: dict[str, Any], scaled: bool
    ) -> list[Any]:
        """Replace the adapter in a slot.

        Args:
            lora_id: id of the new adapter, above 0 and never used before.
            parts: see `sparkrl.lora.wire.to_plain`.
            config: content of PEFT's adapter_config.json.
            scaled: whether `lora_B` is already multiplied by alpha / rank.
        Returns:
            `["loaded", id]` once the bytes lie in the buffers and this worker's share of their checksums has been found
            right, or `["refused", why]`: an exception would reach the caller without its type, and vLLM prints a
            traceback for it.
        """
        began = time.perf_counter()
        try:
            self._sparkrl_loader().load(slot, lora_id, from_plain(parts), config, scaled=scaled)
        except (AdapterError, ValueError, RuntimeError, KeyError, AssertionError) as error:
            return ["refused", str(error) or type(error).__name__]
        self.sparkrl_swap_s = time.perf_counter() - began
        return ["loaded", lora_id]

    def sparkrl_try_adapter(self, parts: list[dict[str, Any]]) -> list[str]:
        """Read a block of each part; `["readable", ""]`, or `["unreadable", why]`."""
        try:
            self._sparkrl_loader().try_parts(from_plain(parts))
        except (AdapterError, RuntimeError) as error:
            return ["unreadable", error.message if isinstance(error, AdapterError) else str(error)]
        return ["readable", ""]

    def _sparkrl_loader(self) -> AdapterLoader:
        if self.sparkrl_adapters is None:
            manager = self.model_runner.lora_manager._adapter_manager
            place = {"worker": self.rank, "num_workers": self.parallel_config.world_size}
            if plugin.report()["platform"] == "cuda":
                from sparkrl.rollout.plugin.cuda import swap

                self.sparkrl_adapters = swap.make_loader(manager, **place)
            else:
                self.sparkrl_adapters = AdapterLoader(manager, intake=HostIntake(), **place)
        return self.sparkrl_adapters

    def sparkrl_loaded_adapters(self) -> list[int]:
        """Ids of the adapters this worker holds."""
        return sorted(self.model_runner.lora_manager.list_adapters())


def _slot_bytes(modules: Iterable[Any]) -> int:
    """Bytes of the stacked factors that vLLM has allocated for adapters, all slots."""
    buffers = [value for module in modules for name, value in vars(module).items() if name.endswith("_stacked")]
    tensors = [tensor for buffer in buffers for tensor in (buffer if isinstance(buffer, list | tuple) else (buffer,))]
    # a module may hold the same memory under two names
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
