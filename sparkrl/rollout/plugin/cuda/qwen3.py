"""Qwen3 on CUDA: vLLM's own classes, told that expert adapters come fused.

Written and not run on a GPU: what holds there is what the start-up proofs find (adapters act in every group of modules,
an adapter of zeros changes nothing, routes come back).
"""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.model_executor.models import qwen3, qwen3_moe

LOAD_ARGUMENTS: dict[str, Any] = {"load_format": "safetensors"}
"""Engine arguments: stock's loader reads the published form."""


class Qwen3ForCausalLM(qwen3.Qwen3ForCausalLM):
    """Dense: stock's class under a name of this package, which the start-up proofs ask for."""


class Qwen3MoeForCausalLM(qwen3_moe.Qwen3MoeForCausalLM):
    """Sparse: the experts' factors in PEFT's fused layout."""

    is_3d_moe_weight: ClassVar[bool] = True
