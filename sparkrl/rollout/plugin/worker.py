"""What the engine calls inside vLLM's worker process (`worker_extension_cls`), through `collective_rpc`.

Adapters come in as bytes and go straight into vLLM's adapter manager, registered and activated under an id of their
own; requests that carry this id then find the adapter loaded. No path is ever read: if vLLM lost the adapter it would
try the path `sparkrl://...` and fail loudly, instead of answering with the base model.
"""

from __future__ import annotations

import os
import resource
import threading
import time
import warnings
from typing import Any

import psutil
import torch
import xxhash

from sparkrl.errors import AdapterError
from sparkrl.rollout import plugin
from sparkrl.rollout.plugin.versions import installed_vllm

Manifest = list[tuple[str, list[int], str, int]]
"""Name, shape, dtype and offset of each tensor of an adapter's buffer."""
_WATCH_S = 0.5
"""How often a worker looks whether its actor still lives, seconds."""


class WorkerExtension:
    """Mixed into vLLM's worker class; names carry a prefix because vLLM refuses clashes."""

    model_runner: Any
    rank: int
    sparkrl_swap_s: float = float("nan")
    """Seconds the last adapter took from host memory into the buffers, CUDA only."""

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
            "threads": torch.get_num_threads(),
            "swap_s": self.sparkrl_swap_s,
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
        self,
        lora_id: int,
        blob: bytes,
        manifest: Manifest,
        config: dict[str, Any],
        checksum: str,
    ) -> list[Any]:
        """Replace every loaded adapter by this one.

        Args:
            lora_id: id of the new adapter, above 0 and never used before.
            blob: the adapter's buffer.
            manifest: name, shape, dtype and offset of each tensor.
            config: content of PEFT's adapter_config.json.
            checksum: xxh3-64 of the buffer, hex.
        Returns:
            `["loaded", id, checksum of the bytes that arrived here]`, or `["refused", why]`: an exception would reach
            the caller without its type, and vLLM prints a traceback for it.
        """
        try:
            return ["loaded", lora_id, self._sparkrl_load(lora_id, blob, manifest, config, checksum)]
        except (AdapterError, ValueError, RuntimeError, KeyError, AssertionError) as error:
            return ["refused", str(error) or type(error).__name__]

    def _sparkrl_load(
        self,
        lora_id: int,
        blob: bytes,
        manifest: Manifest,
        config: dict[str, Any],
        checksum: str,
    ) -> str:
        found = xxhash.xxh3_64_hexdigest(blob)
        if found != checksum:
            raise AdapterError(f"the adapter's bytes changed on the way: checksum {checksum} sent, {found} received")
        from vllm.lora.peft_helper import PEFTHelper

        helper = PEFTHelper.from_dict(config)
        helper.validate_legal(self.model_runner.lora_manager.lora_config)
        on_cuda = plugin.report()["platform"] == "cuda"
        stray = (self._sparkrl_fill_buffers if on_cuda else self._sparkrl_register)(lora_id, blob, manifest, helper)
        if stray is not None:
            raise AdapterError(stray, hint="trainer and server must load the same checkpoint")
        return found

    def _sparkrl_fill_buffers(self, lora_id: int, blob: bytes, manifest: Manifest, helper: Any) -> str | None:
        """On CUDA: straight into the buffers on the GPU. Returns what is wrong, or None."""
        from sparkrl.rollout.plugin.cuda import swap

        manager = self.model_runner.lora_manager._adapter_manager
        began = time.perf_counter()
        tensors = unpack(blob, manifest, copy=False)
        stray = swap.load(manager, lora_id, tensors, rank=helper.r, scale=helper.vllm_lora_scaling_factor)
        torch.cuda.synchronize()
        self.sparkrl_swap_s = time.perf_counter() - began
        return _describe(stray, len(tensors) // 2) if stray or not tensors else None

    def _sparkrl_register(self, lora_id: int, blob: bytes, manifest: Manifest, helper: Any) -> str | None:
        """On CPU: through vLLM's adapter manager. Returns what is wrong, or None."""
        from vllm.lora.lora_model import LoRAModel

        worker_manager = self.model_runner.lora_manager
        manager = worker_manager._adapter_manager
        lora = LoRAModel.from_lora_tensors(
            lora_model_id=lora_id,
            tensors=unpack(blob, manifest),
            peft_helper=helper,
            device="cpu",
            dtype=worker_manager.lora_config.lora_dtype,
            model_vocab_size=worker_manager.vocab_size,
        )
        manager.remove_all_adapters()
        manager.add_adapter(lora)
        # After merging (q, k, v into one; both expert parts into one) every key must be a wrapped module: vLLM itself
        # skips others without a word, and the base model would answer.
        merged = {name.removesuffix(".base_layer") for name in lora.loras}
        stray = sorted(merged - set(manager.modules))
        if stray or not merged:
            manager.remove_all_adapters()
            return _describe(stray, len(merged))
        manager.activate_adapter(lora_id)
        return None

    def sparkrl_loaded_adapters(self) -> list[int]:
        """Ids of the adapters this worker holds."""
        return sorted(self.model_runner.lora_manager.list_adapters())


def _describe(stray: list[str], num_modules: int) -> str:
    return (
        f"{len(stray)} of the adapter's {num_modules} modules do not exist in the served model, "
        f"first: `{stray[0] if stray else 'none sent'}`"
    )


def unpack(blob: bytes, manifest: Manifest, *, copy: bool = True) -> dict[str, torch.Tensor]:
    """Tensors of an adapter's buffer; each its own copy unless they are only read (vLLM scales `lora_B` in place)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that bytes cannot be written to
        raw = torch.frombuffer(blob, dtype=torch.uint8)
    tensors = {}
    for name, shape, dtype_name, offset in manifest:
        dtype = getattr(torch, dtype_name)
        size = torch.Size(shape).numel() * dtype.itemsize
        if offset + size > raw.numel():
            raise AdapterError(f"tensor `{name}` ends at byte {offset + size} of a buffer of {raw.numel()}")
        part = raw[offset : offset + size]
        tensors[name] = (part.clone() if copy else part).view(dtype).reshape(shape)
    return tensors
