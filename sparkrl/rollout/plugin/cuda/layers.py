"""LoRA layer classes for Muse Spark's fused attention projection and for its experts.

Both are put in front of vLLM's list of LoRA classes; each takes only the module it is for.

Legend: E local experts, R rank, O output rows, I input width.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.lora.utils as lora_utils
from torch import Tensor
from vllm.lora.layers import FusedMoE3DWithLoRA as StockFusedMoE3DWithLoRA
from vllm.lora.layers.column_parallel_linear import (
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearWithLoRA,
)
from vllm.models.muse_spark.common.layers import MuseSpark1xQKVOGateParallelLinear

from sparkrl.lora.forms import interleave
from sparkrl.rollout.plugin.cuda.experts import up_over_gate


class QKVGateWithLoRA(MergedColumnParallelLinearWithLoRA):
    """Adapter on the fused query, key, value and output-gate projection: four slices, each of the full rank.

    Stock has no class for it and serves the base model there. Takes rows in the checkpoint's order.
    """

    base_layer: Any
    output_sizes: Any

    def __init__(self, base_layer: Any) -> None:
        ColumnParallelLinearWithLoRA.__init__(self, base_layer)
        query, key = base_layer.num_heads * base_layer.head_size, base_layer.num_kv_heads * base_layer.head_size
        self.output_slices = (query, key, key, query)
        self.output_sizes = [width * self.tp_size for width in self.output_slices]
        self.n_slices = len(self.output_slices)
        self.output_ids = (self.tp_rank,) * self.n_slices

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        ordered: list[Any] = [None if rows is None else self.reorder_rows(i, rows) for i, rows in enumerate(lora_b)]
        super().set_lora(index, lora_a, ordered)

    def reorder_rows(self, part: int, rows_OR: Tensor) -> Tensor:
        """Rows of one of the four in the order that vLLM's weight has them; a swap from memory asks for it too."""
        return interleave(rows_OR, self.base_layer.head_size) if part < 2 else rows_OR

    @classmethod
    def can_replace_layer(  # type: ignore[override]  # a decorator of stock's hides its signature
        cls, source_layer: Any, lora_config: Any, packed_modules_list: list, model_config: Any = None
    ) -> bool:
        return (
            isinstance(source_layer, MuseSpark1xQKVOGateParallelLinear)
            and len(packed_modules_list) == 4
            and not lora_config.fully_sharded_loras
        )


# The name must stay stock's: vLLM recognizes the class by it when it makes its warm-up adapters.
class FusedMoE3DWithLoRA(StockFusedMoE3DWithLoRA):
    """Experts with fused factors that follow the scale which Marlin moves out of GEMM1 (see `up_over_gate`)."""

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        ratio_E = up_over_gate(self)
        if ratio_E is not None:
            # in float32 before the buffers round, so that a factor is rounded once
            ratio_E11 = ratio_E.to(lora_a[1].device)[:, None, None]
            gate_EIR, up_EIR = lora_b[0].float().chunk(2, dim=1)
            lora_a = [lora_a[0], lora_a[1].float() * ratio_E11]
            lora_b = [torch.cat([gate_EIR, up_EIR / ratio_E11], dim=1), lora_b[1]]
        super().set_lora(index, lora_a, lora_b)


_CLASSES = (QKVGateWithLoRA, FusedMoE3DWithLoRA)


def apply() -> None:
    """Put the classes in front of vLLM's; a second call does nothing."""
    if not is_applied():
        lora_utils._all_lora_classes = (*_CLASSES, *lora_utils._all_lora_classes)  # type: ignore[assignment]


def is_applied() -> bool:
    return tuple(lora_utils._all_lora_classes)[: len(_CLASSES)] == _CLASSES
