"""Expert adapters on the Triton and Marlin paths of vLLM's Muse Spark.

Stock weighs GEMM2 and its adapter by the routing weights and sums, and refuses an adapter together with the per-expert
norm. Here stock's adapter path runs on routing weights of one, so GEMM2 plus adapter leaves one plain row for each
(token, slot); where stock would sum them, the rows go to vLLM's own finalizer (norm, real weights, float32 sum).

Legend: E local experts.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor


class _NormAfterAdapter:
    """Mixed in before an experts class of vLLM."""

    _lora_context: Any
    _real_weights: Tensor | None = None
    """Routing weights of the call in progress, held back from stock's adapter path."""

    def _uses_post_gemm2_hook(self, num_tokens: int) -> bool:
        # stock must take its adapter path while the weights are held
        return self._real_weights is None and super()._uses_post_gemm2_hook(num_tokens)  # type: ignore[misc]

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        stock: Any = super()
        if self._lora_context is None or not self._uses_post_gemm2_hook(hidden_states.shape[0]):
            return stock.apply(output, hidden_states, w1, w2, topk_weights, topk_ids, *args, **kwargs)
        if kwargs.get("apply_router_weight_on_input", args[-1] if args else False):
            raise NotImplementedError("Muse Spark weighs the experts' outputs, not their inputs")
        self._real_weights = topk_weights
        try:
            ones = torch.ones_like(topk_weights)
            return stock.apply(output, hidden_states, w1, w2, ones, topk_ids, *args, **kwargs)
        finally:
            self._real_weights = None

    def moe_sum(
        self, input: Tensor, output: Tensor, topk_ids: Tensor | None = None, expert_map: Tensor | None = None
    ) -> None:
        stock: Any = super()
        if self._real_weights is None:
            stock.moe_sum(input, output, topk_ids, expert_map)
            return
        # vLLM 0.33 has it, 0.32 (CPU) not
        from vllm.model_executor.layers.fused_moe.moe_output import (  # type: ignore[attr-defined]
            route_major_moe_output,
        )

        rows = route_major_moe_output(input, self._real_weights, topk_ids, expert_map)
        self._run_post_gemm2_hook(rows, output)  # type: ignore[attr-defined]


def apply() -> None:
    """Replace the two experts classes where Muse Spark's runner looks them up, and lift its refusal of adapters."""
    import vllm.models.muse_spark.nvidia.muse_moe_runner as stock

    if is_applied():
        return
    runner: Any = stock
    runner.TritonExperts = type("MuseTritonExperts", (_NormAfterAdapter, stock.TritonExperts), {})
    runner.MarlinExperts = type("MuseMarlinExperts", (_NormAfterAdapter, stock.MarlinExperts), {})
    stock_validate = runner.validate_deployment

    def validate_deployment(moe_config: Any, *, kernel_routes: bool) -> None:
        # the two classes above are all that reaches this on Hopper; `require_hopper` has seen to the rest
        if moe_config.is_lora_enabled and not kernel_routes:
            moe_config = copy(moe_config)
            moe_config.is_lora_enabled = False
        stock_validate(moe_config, kernel_routes=kernel_routes)

    runner.validate_deployment = validate_deployment
    method: Any = stock.MuseSparkModelOptNvFp4FusedMoE
    stock_process = method._process_hopper_marlin_weights

    def process(self: Any, layer: Any) -> None:
        scale_E2 = layer.w13_weight_scale_2.data.float()
        layer.sparkrl_up_over_gate = scale_E2[:, 1] / scale_E2[:, 0]
        stock_process(self, layer)

    method._process_hopper_marlin_weights = process
    runner.sparkrl_expert_lora = True


def is_applied() -> bool:
    import vllm.models.muse_spark.nvidia.muse_moe_runner as stock

    return bool(getattr(stock, "sparkrl_expert_lora", False))


def up_over_gate(moe_layer: Any) -> Tensor | None:
    """float32 [E], s_up / s_gate of a layer's wrapped experts; None for experts without NVFP4.

    Marlin keeps only the gate half's global scale s_gate for GEMM1 and moves s_up / s_gate into GEMM2's, so inside the
    kernel the up half, and with it the activation, is off by s_gate / s_up: adapters have to follow.
    """
    return getattr(moe_layer.base_layer.routed_experts, "sparkrl_up_over_gate", None)
