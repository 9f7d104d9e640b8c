"""Muse Spark's text model under the checkpoint's names, on vLLM's own layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.models.muse_spark.common.layers import MuseSpark1xNormPreservingResidualConnection
from vllm.models.muse_spark.common.omni import OMNI_WEIGHTS_MAPPER
from vllm.models.muse_spark.nvidia.model import MuseSpark1xForCausalLM

from sparkrl.rollout.plugin.cuda import paths

_SERVED = ("model.language_model.", "lm_head.")
"""Beginnings of the names that the text model has a place for."""


class MuseSparkTextForCausalLM(MuseSpark1xForCausalLM):
    """Stock's class, which maps no names and loads the float32 residual gates as bfloat16.

    It also serves the text part of the published form. Stock's class for that, with vision and audio towers, is not
    used: prompts are text, so the towers would take memory and a start-up profile and never run.
    """

    hf_to_vllm_mapper = MuseSpark1xForCausalLM.hf_to_vllm_mapper | OMNI_WEIGHTS_MAPPER
    is_3d_moe_weight: ClassVar[bool] = True
    """Expert adapters come fused, in PEFT's layout: one view a tensor, no loop over experts."""

    def __init__(self, *, vllm_config: Any, prefix: str = "", layer_type: Any = None) -> None:
        paths.require_recorded(
            vllm_config.model_config.hf_text_config,
            moe_backend=vllm_config.kernel_config.moe_backend,
            tensor_parallel_size=vllm_config.parallel_config.tensor_parallel_size,
        )
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=layer_type)
        packed: dict[str, list[str]] = dict(super().packed_modules_mapping)
        self.packed_modules_mapping = {**packed, "qkv_proj": ["q_proj", "k_proj", "v_proj", "gate_proj"]}
        for module in self.modules():
            if isinstance(module, MuseSpark1xNormPreservingResidualConnection):
                # read once, into float32 constants: the parameter's type is all that rounds them
                module.gate = torch.nn.Parameter(module.gate.data.float(), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights((name, value) for name, value in weights if name.startswith(_SERVED))
