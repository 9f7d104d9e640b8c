"""How many GPUs a server's weights can be divided over."""

from __future__ import annotations

from sparkrl.errors import ConfigError

_MOST = 64
"""GPUs of a server that are suggested at most."""


def divides(size: int, *, num_heads: int, num_kv_heads: int, width: int) -> bool:
    """Whether vLLM takes `size` GPUs: whole query heads on each, whole key-value heads or a copy of one, and an equal
    part of each expert's (or MLP's) `width`; 0 where that is not divided."""
    return num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0) and width % size == 0


def check_tensor_parallel(size: int, *, num_heads: int, num_kv_heads: int, width: int) -> None:
    """Refuse a size that vLLM would refuse after minutes of starting.

    Raises:
        ConfigError: `rollout.tensor_parallel_size` does not divide the model; the hint lists those that do.
    """
    if divides(size, num_heads=num_heads, num_kv_heads=num_kv_heads, width=width):
        return
    fit = [
        str(n) for n in range(1, _MOST + 1) if divides(n, num_heads=num_heads, num_kv_heads=num_kv_heads, width=width)
    ]
    raise ConfigError(
        f"`rollout.tensor_parallel_size` is {size}, which does not divide the model: {num_heads} query heads, "
        f"{num_kv_heads} key-value heads, {width} columns of an expert or MLP\nEach GPU takes an equal share of each.",
        hint=f"set it to one of {', '.join(fit)}",
    )
