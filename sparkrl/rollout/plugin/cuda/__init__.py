"""LoRA on vLLM's own Muse Spark (0.33.0, CUDA), on the stock wheel.

vLLM serves the model natively but refuses adapters on its experts and drops them silently on attention. What is added:

- `experts`: the Triton (BF16) and Marlin (NVFP4) experts stop after GEMM2 plus adapter, so that the per-expert norm
  sees the sum; the refusal is lifted on the one GPU generation where these two are the only paths;
- `layers`: adapters on the fused query, key, value, output-gate projection, and on experts whose Marlin form folds a
  scale away;
- `model`: the text-only class with the checkpoint's and the adapter's names;
- `swap`: a packed adapter straight into vLLM's stacked buffers;
- `form`: NVFP4 as stored or BF16, and logits in float32;
- `paths`: refuses the switches that pass by route capture or by an adapter.

Routes need nothing more: capture is vLLM's own on CUDA.
"""

from __future__ import annotations

from sparkrl.errors import VersionError
from sparkrl.rollout.plugin.versions import CUDA_VERSIONS, require_checked

NAME = "LoRA on Muse Spark, CUDA"
PATCHES = ("expert_lora", "attention_lora", "whole_outputs", "decode_slots")
HOPPER = 90
"""Compute capability, in tens, whose expert kernels all stop after GEMM2 row by row."""


def apply() -> None:
    """Put everything in place; a second call does nothing.

    Raises:
        VersionError: another vLLM, or a GPU whose kernels cannot carry expert adapters.
    """
    require_checked(NAME, checked=CUDA_VERSIONS)
    require_hopper()
    from vllm import ModelRegistry

    from sparkrl.rollout.plugin import decode_slots, whole_outputs
    from sparkrl.rollout.plugin.cuda import experts, layers
    from sparkrl.rollout.plugin.hf_config import CUDA_CLASSES

    # By name: importing a model here would pull vLLM's layers into processes that never build it.
    for architecture, served_class in CUDA_CLASSES.values():
        ModelRegistry.register_model(architecture, served_class)
    import sparkrl.rollout.plugin.loader  # noqa: F401 - registers the load format

    experts.apply()
    layers.apply()
    whole_outputs.apply()
    decode_slots.apply()


def report() -> dict[str, bool]:
    """Whether each of `PATCHES` is in place in this process."""
    from sparkrl.rollout.plugin import decode_slots, whole_outputs
    from sparkrl.rollout.plugin.cuda import experts, layers

    return {
        "expert_lora": experts.is_applied(),
        "attention_lora": layers.is_applied(),
        "whole_outputs": whole_outputs.is_applied(),
        "decode_slots": decode_slots.is_applied(),
    }


def require_hopper() -> None:
    """Refuse a GPU on which the experts run in kernels that weigh and sum by themselves."""
    from vllm.platforms import current_platform

    if current_platform.is_device_capability_family(HOPPER):
        return
    found = current_platform.get_device_capability()
    raise VersionError(
        f"LoRA on Muse Spark's experts is served on compute capability 9.x (Hopper), found: "
        f"{found.as_version_str() if found else 'no CUDA device'}\n"
        "Elsewhere vLLM 0.33 runs the experts in FlashInfer's TRT-LLM kernels, which have no place for an adapter "
        "before the per-expert norm.",
        hint="run the servers on H100, H200 or GH200",
    )
