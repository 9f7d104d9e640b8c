"""Ways through vLLM's Muse Spark that pass by route capture or by an adapter: refused at start, by the switch's name.

vLLM 0.33 takes them by default on Blackwell under tensor parallelism, and elsewhere when the config says so.
"""

from __future__ import annotations

from typing import Any

from sparkrl.errors import AdapterError, RoutingError

UNRECORDED = {
    "muse_spark_tep_aux_stream_routing": "experts are chosen on a side stream, outside the router that records them",
    "muse_spark_tep_fused_moe_input_quant": "the experts' kernel gets raw router logits and chooses by itself",
}
"""Config switches under which the routes that come back are not those that were taken."""
WITHOUT_ADAPTER = {
    "muse_spark_tep_shard_pooler": "the latent projection's own weight is read, its adapter is not",
    "muse_spark_tep_shard_unpooler": "the output projection's own weight is read, its adapter is not",
}
"""Config switches under which a module's adapter is left out."""
MEGA_MOE = "deep_gemm_mega_moe"


def require_recorded(config: Any, *, moe_backend: str | None = None, tensor_parallel_size: int = 1) -> None:
    """Refuse a model that would not record its routes or not apply its adapter.

    Args:
        config: the text config, or any object with its switches.
        moe_backend: vLLM's `kernel_config.moe_backend`.
        tensor_parallel_size: sharded projections exist above 1 only.
    Raises:
        RoutingError, AdapterError: names the switch and what to set it to.
    """
    for name, why in UNRECORDED.items():
        if getattr(config, name, False):
            raise RoutingError(
                f"with `{name}` on, routed experts are not recorded: {why}\nTraining would replay other experts.",
                hint=f'set `"{name}": false` in the checkpoint\'s config.json',
            )
    if moe_backend == MEGA_MOE:
        raise RoutingError(
            f"vLLM's MoE backend `{MEGA_MOE}` records no routed experts and carries no adapter",
            hint="leave the MoE backend at `auto`",
        )
    for name, why in WITHOUT_ADAPTER.items():
        if tensor_parallel_size > 1 and getattr(config, name, False):
            raise AdapterError(
                f"with `{name}` on, small batches are served without the adapter's part there: {why}",
                hint=f'set `"{name}": false` in the checkpoint\'s config.json',
            )
