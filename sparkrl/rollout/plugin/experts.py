"""Routed experts on CPU: plain torch, expert LoRA inside, per-expert norm before the weighted sum.

These are subclasses at vLLM's own extension points (`routed_experts_cls`, `FusedMoEExpertsModular`), not patches. Stock
vLLM on CPU selects Triton kernels as soon as LoRA meets an MoE model, and no stock kernel has a norm between the second
GEMM and the weighted sum.

Shape legend: N tokens, K routed slots, S = N * K rows sorted by expert, E experts, H latent width, I expert width,
R LoRA rank, A adapter slots.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
    UnquantizedMoeBackend,
    make_unquantized_moe_kernel,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.platforms import current_platform


class CpuExperts(LoRAExpertsMixin, mk.FusedMoEExpertsModular):
    """GEMM1 + adapter, gated SiLU, GEMM2 + adapter, norm if any, weighted sum; fp32 from GEMM2's adapter on."""

    post_norm: Callable[[Tensor], Tensor] | None = None
    """Norm of every expert's own output, float32 in and out; set once the weights are loaded."""

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return current_platform.is_cpu()

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation == MoEActivation.SILU

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key is None and activation_key is None

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self, M: int, N: int, K: int, topk: int, global_num_experts: int, local_num_experts: int, *rest: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return (0,), (0,), (M, K)

    def process_weights_after_loading(self, layer: Any) -> None:
        norm = getattr(layer, "post_expert_norm", None)
        if norm is not None:
            self.post_norm = partial(norm, dtype=torch.float32)

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write the layer's output, model dtype [N, H], into `output`."""
        x_NH, top_k = hidden_states, topk_ids.shape[1]
        ids_S = topk_ids.reshape(-1).long()
        expert_S, order_S = (ids_S if expert_map is None else expert_map[ids_S].long()).sort(stable=True)
        if expert_map is not None:  # expert parallel: -1 is another worker's expert, whose output is added there
            elsewhere = int((expert_S < 0).sum())
            expert_S, order_S = expert_S[elsewhere:], order_S[elsewhere:]
            if not len(order_S):
                output.zero_()
                return
        token_S = order_S // top_k
        ends_E = torch.bincount(expert_S, minlength=w1.shape[0]).cumsum(0).to(torch.int32)
        x_SH = x_NH[token_S]
        adapters = self._adapters(token_S, x_NH.shape[0])
        context: Any = self._lora_context

        h_S2I = F.grouped_mm(x_SH, w1.transpose(1, 2), offs=ends_E)
        for slot, mask_S1 in adapters:
            delta = _expert_delta(
                x_SH, context.w13_lora_a_stacked[0][slot], context.w13_lora_b_stacked[0][slot], ends_E
            )
            h_S2I = (h_S2I + (delta if mask_S1 is None else delta * mask_S1)).to(x_NH.dtype)
        gate_SI, up_SI = h_S2I.chunk(2, dim=-1)
        a_SI = F.silu(gate_SI) * up_SI
        y_SH = F.grouped_mm(a_SI, w2.transpose(1, 2), offs=ends_E).float()
        for slot, mask_S1 in adapters:
            delta = _expert_delta(a_SI, context.w2_lora_a_stacked[0][slot], context.w2_lora_b_stacked[0][slot], ends_E)
            y_SH += delta if mask_S1 is None else delta * mask_S1
        if self.post_norm is not None:
            y_SH = self._norm(self.post_norm, y_SH)

        # Back to slot order and summed there: an index_add over sorted rows would sum in an order that depends on the
        # rest of the batch.
        y_NKH = y_SH.new_zeros(len(ids_S), y_SH.shape[1]).index_copy_(0, order_S, y_SH).unflatten(0, (-1, top_k))
        output.copy_((y_NKH * topk_weights.float().unsqueeze(-1)).sum(1))

    def _norm(self, norm: Callable[[Tensor], Tensor], y_SH: Tensor) -> Tensor:
        """Per-expert norm. Tensor-parallel ranks hold partial sums, and a norm does not commute with that sum."""
        ranks = self.moe_config.moe_parallel_config.tp_size
        if ranks == 1:
            return norm(y_SH)
        # The runner sums the ranks' outputs once more at the end, hence the division (exact for 2, 4, 8 ranks).
        return norm(tensor_model_parallel_all_reduce(y_SH)) / ranks

    def _adapters(self, token_S: Tensor, num_tokens: int) -> list[tuple[int, Tensor | None]]:
        """Active adapter slots of this batch, each with a float32 [S, 1] mask of its rows, or None for all rows."""
        context = self._lora_context
        if context is None:
            return []
        slot_N = context.punica_wrapper.token_lora_indices[:num_tokens]
        if slot_N.numel() < num_tokens:
            return []
        slots = [slot for slot in torch.unique(slot_N).tolist() if slot >= 0 and bool(context.adapter_enabled[slot])]
        if not slots:
            return []
        if len(slots) == 1 and bool((slot_N == slots[0]).all()):
            return [(slots[0], None)]
        slot_S = slot_N[token_S].unsqueeze(-1)
        return [(slot, (slot_S == slot).float()) for slot in slots]


def _expert_delta(x_SI: Tensor, a_ERI: Tensor, b_EOR: Tensor, ends_E: Tensor) -> Tensor:
    """`(x A^T) B^T` of every row's own expert, in the adapter's dtype (float32)."""
    u_SR = F.grouped_mm(x_SI.to(a_ERI.dtype), a_ERI.transpose(1, 2), offs=ends_E)
    return F.grouped_mm(u_SR, b_EOR.transpose(1, 2), offs=ends_E)


class CpuExpertsMethod(FusedMoEMethodBase):
    """Plain weights with `CpuExperts`, whatever the checkpoint's format: experts are dequantized while loading."""

    def create_weights(  # type: ignore[override]
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        shapes = {
            "w13_weight": (num_experts, 2 * intermediate_size_per_partition, hidden_size),
            "w2_weight": (num_experts, hidden_size, intermediate_size_per_partition),
        }
        for name, shape in shapes.items():
            weight = torch.nn.Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
            layer.register_parameter(name, weight)

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> FusedMoEQuantConfig:
        return FusedMoEQuantConfig.make()

    def process_weights_after_loading(self, layer: Any) -> None:
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        self.moe_kernel = make_unquantized_moe_kernel(
            quant_config=self.moe_quant_config,
            moe_config=self.moe,
            backend=UnquantizedMoeBackend.CPU,
            experts_cls=CpuExperts,
            routing_tables=layer._expert_routing_tables(),
        )
        self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    def apply(  # type: ignore[override]
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """Without LoRA; with LoRA, vLLM's wrapper calls the kernel made above itself."""
        kernel: Any = self.moe_kernel
        return kernel.apply(
            hidden_states=x,
            w1=layer.w13_weight,
            w2=layer.w2_weight,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=layer.activation,
            apply_router_weight_on_input=False,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )


class CpuRoutedExperts(RoutedExperts):
    """Expert weights that always get `CpuExpertsMethod`; a family with a per-expert norm sets `post_expert_norm`."""

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: FusedMoEConfig) -> FusedMoEMethodBase:
        return CpuExpertsMethod(moe_config)
