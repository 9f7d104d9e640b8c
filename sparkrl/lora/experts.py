"""LoRA on fused routed experts, on the activation side: `W + BA` is never formed.

Legend: T token, K routed slot, N = T * K rows sorted by expert, E expert, R rank, H latent width, I expert width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from sparkrl.models.experts import ExpertFactors, RoutedExperts, run_experts


class ExpertsLora(nn.Module, LoraLayer):
    """A layer's routed experts with one adapter on `gate_up_proj` and one on `down_proj`.

    PEFT builds it in place of the experts (custom module), so switching adapters off, freezing and saving work as for
    any other LoRA layer. Parameters are float32 and keep the expert in front, so that FSDP shards them by expert:
    `lora_gate_up_A` [E, R, H], `lora_gate_up_B` [E, 2I, R], `lora_down_A` [E, R, I], `lora_down_B` [E, H, R].
    The down delta is added before the per-expert norm and the routing weight, as in the merged model. Dropout, which
    PEFT has on linear layers but refuses on parameters, zeroes inputs of A row by row as on its linear layers.
    """

    adapter_layer_names = ("lora_gate_up_A", "lora_gate_up_B", "lora_down_A", "lora_down_B")

    def __init__(
        self,
        base_layer: RoutedExperts,
        adapter_name: str,
        *,
        config: LoraConfig,
        r: int,
        lora_alpha: int,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        LoraLayer.__init__(self, base_layer)
        self.lora_gate_up_A = nn.ParameterDict()
        self.lora_gate_up_B = nn.ParameterDict()
        self.lora_down_A = nn.ParameterDict()
        self.lora_down_B = nn.ParameterDict()
        self.dropout: dict[str, float] = {}
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha, config)

    def _get_in_out_features(self, module: nn.Module) -> tuple[None, None]:
        return None, None  # two weights, so no single pair of widths

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        """Make an adapter's factors: A uniform in 1 / sqrt(input width), as PEFT's own for parameters, and B zero."""
        base: Any = self.get_base_layer()
        num_experts, width, inner = base.num_experts, base.hidden_dim, base.intermediate_dim
        shapes = {
            "lora_gate_up_A": (num_experts, r, width),
            "lora_gate_up_B": (num_experts, 2 * inner, r),
            "lora_down_A": (num_experts, r, inner),
            "lora_down_B": (num_experts, width, r),
        }
        device = next(base.parameters()).device
        for name, shape in shapes.items():
            value = torch.zeros(shape, dtype=torch.float32, device=device)
            if name.endswith("_A"):
                nn.init.uniform_(value, -(shape[-1] ** -0.5), shape[-1] ** -0.5)
            getattr(self, name)[adapter_name] = nn.Parameter(value)
        self.r[adapter_name], self.lora_alpha[adapter_name] = r, lora_alpha
        self.use_rslora[adapter_name] = config.use_rslora
        self.scaling[adapter_name] = lora_alpha / (math.sqrt(r) if config.use_rslora else r)
        self.dropout[adapter_name] = config.lora_dropout
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As `Experts.forward`: [T, H], int64 [T, K], float32 [T, K] -> [T, H]."""
        base: Any = self.get_base_layer()
        if self.disable_adapters:
            return base(hidden_states, top_k_index, top_k_weights)
        active = [name for name in self.active_adapters if name in self.lora_gate_up_A]
        if len(active) != 1:
            raise NotImplementedError(f"routed experts carry one active adapter at a time, not {active}")
        name = active[0]
        factors = ExpertFactors(
            self.lora_gate_up_A[name],
            self.lora_gate_up_B[name],
            self.lora_down_A[name],
            self.lora_down_B[name],
            scale=self.scaling[name],
            dropout=self.dropout[name] if self.training else 0.0,
        )
        return run_experts(base, hidden_states, top_k_index, top_k_weights, factors)
