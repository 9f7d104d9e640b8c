"""LoRA on fused routed experts, on the activation side: `W + BA` is never formed.

Legend: T token, K routed slot, N = T * K rows sorted by expert, E expert, R rank, H latent width, I expert width.
"""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from sparkrl.models.grouped import GroupedRows, grouped_linear
from sparkrl.models.muse_spark import Experts


class ExpertsLora(nn.Module, LoraLayer):
    """A layer's routed experts with one adapter on `gate_up_proj` and one on `down_proj`.

    PEFT builds it in place of the experts (custom module), so switching adapters off, freezing and saving work as for
    any other LoRA layer. Parameters are float32 and keep the expert in front, so that FSDP shards them by expert:
    `lora_gate_up_A` [E, R, H], `lora_gate_up_B` [E, 2I, R], `lora_down_A` [E, R, I], `lora_down_B` [E, H, R].
    The down delta is added before the per-expert norm and the routing weight, as in the merged model.
    """

    adapter_layer_names = ("lora_gate_up_A", "lora_gate_up_B", "lora_down_A", "lora_down_B")

    def __init__(
        self, base_layer: Experts, adapter_name: str, *, config: LoraConfig, r: int, lora_alpha: int, **kwargs: Any
    ) -> None:
        super().__init__()
        LoraLayer.__init__(self, base_layer)
        self.lora_gate_up_A = nn.ParameterDict()
        self.lora_gate_up_B = nn.ParameterDict()
        self.lora_down_A = nn.ParameterDict()
        self.lora_down_B = nn.ParameterDict()
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha, config)

    def _get_in_out_features(self, module: nn.Module) -> tuple[None, None]:
        return None, None  # two weights, so no single pair of widths

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        base: Any = self.get_base_layer()
        num_experts, width, inner = base.num_experts, base.hidden_dim, base.intermediate_dim
        shapes = {
            "lora_gate_up_A": (num_experts, r, width),
            "lora_gate_up_B": (num_experts, 2 * inner, r),
            "lora_down_A": (num_experts, r, inner),
            "lora_down_B": (num_experts, width, r),
        }
        for name, shape in shapes.items():
            value = torch.zeros(shape, dtype=torch.float32, device=base.gate_up_proj.device)
            if name.endswith("_A"):
                nn.init.uniform_(value, -(shape[-1] ** -0.5), shape[-1] ** -0.5)
            getattr(self, name)[adapter_name] = nn.Parameter(value)
        self.r[adapter_name], self.lora_alpha[adapter_name] = r, lora_alpha
        self.scaling[adapter_name] = lora_alpha / r
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As `Experts.forward`: [T, H], int64 [T, K], float32 [T, K] -> [T, H]."""
        base: Any = self.get_base_layer()
        if self.disable_adapters:
            return base(hidden_states, top_k_index, top_k_weights)
        rows = GroupedRows.sort(top_k_index, base.num_experts)
        x_NH = rows.gather(hidden_states)
        gate_up_NI = self._adapted(x_NH, base.gate_up_proj, self.lora_gate_up_A, self.lora_gate_up_B, rows)
        h_NI = base._apply_gate(gate_up_NI)
        y_NH = self._adapted(h_NI, base.down_proj, self.lora_down_A, self.lora_down_B, rows)
        return base.combine(y_NH, rows, top_k_weights)

    def _adapted(
        self, x: Tensor, weight: Tensor, a: nn.ParameterDict, b: nn.ParameterDict, rows: GroupedRows
    ) -> Tensor:
        out = grouped_linear(x, weight, rows)
        for name in self.active_adapters:
            if name in a:
                # factors are rounded to the compute type, as the server holds them; the scale goes on the narrow side
                low_NR = grouped_linear(x, a[name].to(x.dtype), rows) * self.scaling[name]
                out = out + grouped_linear(low_NR, b[name].to(x.dtype), rows)
        return out
