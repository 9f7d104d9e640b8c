"""The adapter's factors: how many parameters, and how they lie in trainer and server.

Legend: R rank, H hidden width, Z latent width, I expert width, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkrl.config.schema import Config
from sparkrl.errors import ConfigError
from sparkrl.planning.facts import ModelFacts, Split, Weight

GROUPS = {
    "attention": ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "o_proj.weight"),
    "latent": ("pre_expert_proj.weight", "post_expert_proj.weight"),
    "experts": ("experts.gate_up_proj", "experts.down_proj"),
}
_SERVER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks vLLM allocates buffers for."""
_ROW_PARALLEL = ("o_proj.weight", "experts.down_proj")
"""Weights whose input is divided in the server; all other divided ones have their output divided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedWeight:
    """A weight with a pair of factors on it: A [R, in] and B [out, R], for each expert where there are experts."""

    weight: Weight
    rank: int

    @property
    def num_experts(self) -> int:
        return self.weight.shape[0] if len(self.weight.shape) == 3 else 1

    @property
    def width_in(self) -> int:
        return self.weight.shape[-1]

    @property
    def width_out(self) -> int:
        return self.weight.shape[-2]

    @property
    def parameters(self) -> int:
        """In all layers, as PEFT lays them out: gate and up share one A."""
        return self.weight.count * self.num_experts * self.rank * (self.width_in + self.width_out)

    def server_slot(self, *, num_gpus: int, expert_parallel: bool) -> int:
        """Values in one GPU's buffers of vLLM, all layers: gate and up have an A each, undivided sides are repeated."""
        rank = next((r for r in _SERVER_RANKS if r >= self.rank), self.rank)
        num_a = 2 if self.weight.name.endswith("gate_up_proj") else 1
        width_in, width_out, num_experts = self.width_in, self.width_out, self.num_experts
        if self.weight.split is Split.experts and expert_parallel:
            num_experts = -(-num_experts // num_gpus)
        elif self.weight.split is not Split.none:
            if self.weight.name in _ROW_PARALLEL:
                width_in = -(-width_in // num_gpus)
            else:
                width_out = -(-width_out // num_gpus)
        return self.weight.count * num_experts * rank * (num_a * width_in + width_out)


def adapted_weights(config: Config, facts: ModelFacts) -> tuple[AdaptedWeight, ...]:
    """The weights `lora.targets` names, by group or by module.

    Raises:
        ConfigError: a target that no weight answers to.
    """
    known = {name: group for group, names in GROUPS.items() for name in names}
    chosen: set[str] = set()
    for target in config.lora.targets:
        short = target.rsplit(".", 1)[-1]
        names = GROUPS.get(target) or (
            GROUPS["experts"] if short == "experts" else [n for n in known if n in (short, f"{short}.weight")]
        )
        if not names:
            raise ConfigError(
                f"`lora.targets`: `{target}` is neither a group nor a module that a plan knows",
                hint=f"groups: {', '.join(GROUPS)}",
            )
        chosen |= set(names)
    return tuple(
        AdaptedWeight(weight=weight, rank=config.lora.rank)
        for weight in facts.weights()
        if weight.name in chosen and weight.part in GROUPS
    )
