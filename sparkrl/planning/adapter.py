"""The adapter's factors: how many parameters, and how they lie in trainer and server.

Legend: R rank, H hidden width, Z latent width, I expert width, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparkrl.config.schema import Config
from sparkrl.errors import ConfigError
from sparkrl.planning.facts import ModelFacts
from sparkrl.planning.weights import Split, Weight

PARTS = ("attention", "latent", "experts", "mlp")
"""Parts whose linear layers and experts take an adapter; also the names of groups in `lora.targets`."""
_ALL = "all_linear"
_SERVER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks vLLM allocates buffers for."""
_ROW_PARALLEL = ("self_attn.o_proj.weight", "mlp.down_proj.weight", "mlp.experts.down_proj")
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

    def server_slot(self, *, rank: int, num_gpus: int, expert_parallel: bool) -> int:
        """Values in one GPU's buffers of vLLM, all layers; sides that are not divided are repeated.

        Args:
            rank: that of the buffers, `server_rank`.
        """
        width_in, width_out, num_experts = self.width_in, self.width_out, self.num_experts
        if self.weight.split is Split.experts and expert_parallel:
            num_experts = -(-num_experts // num_gpus)
        elif self.weight.split is not Split.none:
            if self.weight.name in _ROW_PARALLEL:
                width_in = -(-width_in // num_gpus)
            else:
                width_out = -(-width_out // num_gpus)
        return self.weight.count * num_experts * rank * (width_in + width_out)


def server_rank(adapted: Sequence[AdaptedWeight]) -> int:
    """Rank that vLLM allocates for every module: the next it knows above the largest."""
    largest = max(item.rank for item in adapted)
    return next((rank for rank in _SERVER_RANKS if rank >= largest), largest)


def adapted_weights(config: Config, facts: ModelFacts) -> tuple[AdaptedWeight, ...]:
    """The weights `lora.targets` names, by group or by module.

    Raises:
        ConfigError: a target that no weight answers to.
    """
    known = [weight for weight in facts.weights() if weight.part in PARTS]
    chosen: set[str] = set()
    for target in config.lora.targets:
        modules = {
            weight.module
            for weight in known
            if target in (_ALL, weight.part) or weight.module == target or weight.module.endswith("." + target)
        }
        if not modules:
            groups = sorted({weight.part for weight in known})
            raise ConfigError(
                f"`lora.targets`: `{target}` is neither a group nor a module of a {facts.family} model",
                hint=f"groups: {', '.join(groups)}, {_ALL}; modules: {', '.join(sorted({w.module for w in known}))}",
            )
        chosen |= modules
    experts_rank = config.lora.expert_rank or config.lora.rank
    return tuple(
        AdaptedWeight(weight=weight, rank=experts_rank if weight.part == "experts" else config.lora.rank)
        for weight in known
        if weight.module in chosen
    )
