"""A worker that runs vLLM's own LoRA of linear layers, as it is without the package's patch.

vLLM imports this module in the worker's process after its plugins have run and before the model is made, which is when
the patch has to be taken back.
"""

from __future__ import annotations

from typing import Any

from vllm.platforms.cpu import CpuPlatform

from sparkrl.rollout.plugin.worker import WorkerExtension

_platform: Any = CpuPlatform
_platform.get_punica_wrapper = classmethod(lambda cls: "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU")


class StockPunicaWorker(WorkerExtension):
    """The usual extension."""
