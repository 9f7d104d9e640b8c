"""The class vLLM instantiates by name once `punica.apply` has run."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from sparkrl.rollout.plugin.punica import active_slots, add_lora


class DensePunicaWrapper(PunicaWrapperCPU):
    """`PunicaWrapperCPU` whose linear layers multiply each active adapter once; see `punica.py`."""

    slots: list[tuple[int, Tensor | None]]

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        self.slots = active_slots(self.token_lora_indices)

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: Any = None,
        **kwargs: Any,
    ) -> None:
        y_NO, x_NI = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        add_lora(y_NO, x_NI, lora_a_stacked, lora_b_stacked, output_slices, self.slots, scale)
