"""The vLLM plugin: what stock vLLM lacks for Muse Spark rollouts.

vLLM calls `register` in every process it starts (entry point `vllm.general_plugins`). A plugin that fails to import is
only logged by vLLM, which then goes on without it; so the engine asks the worker for `report` at start and refuses to
serve when anything is missing.

On CPU, with the versions of `versions.py`: the model classes, the checkpoint loader, and four patches
(`route_capture`, `seeded_sampling`, `punica`, `whole_outputs`). Expert LoRA needs no patch (`experts.py` subclasses at
vLLM's own extension points), and neither do in-memory adapters (`worker.py` writes into vLLM's stacked buffers). On
CUDA vLLM serves Muse Spark itself, and `cuda/` adds the adapters.
"""

from __future__ import annotations

from typing import Any

from sparkrl.errors import VersionError
from sparkrl.rollout.plugin import cuda

PATCHES = ("route_capture", "seeded_sampling", "punica", "whole_outputs")
"""On CPU; those on CUDA are `cuda.PATCHES`."""
_state: dict[str, str | None] = {"error": None, "registered": None}


def register() -> None:
    """Register everything for the current platform; idempotent. Never raises: see `report`."""
    if _state["registered"] is not None:
        return
    from vllm.platforms import current_platform

    _state["registered"] = current_platform.device_type
    try:
        if current_platform.is_cpu():
            _register_cpu()
        elif current_platform.is_cuda():
            cuda.apply()
    except VersionError as error:
        # Raising would only be logged. The engine reads this and raises it where the user sees it.
        _state["error"] = str(error)


def _register_cpu() -> None:
    from vllm import ModelRegistry

    from sparkrl.rollout.plugin import punica, route_capture, seeded_sampling, whole_outputs
    from sparkrl.rollout.plugin.hf_config import CPU_CLASSES

    # By name: importing a model here would pull vLLM's layers into processes that never build it.
    for architecture, served_class in CPU_CLASSES.values():
        ModelRegistry.register_model(architecture, served_class)
    import sparkrl.rollout.plugin.loader  # noqa: F401 - registers the load format

    route_capture.apply()
    seeded_sampling.apply()
    punica.apply()
    whole_outputs.apply()


def report() -> dict[str, Any]:
    """What is in place in this process.

    Returns:
        `platform`, `registered` (bool), `error` (message or None), `required` (names of what this platform needs), and
        one bool for each of these.
    """
    required = cuda.PATCHES if _state["registered"] == "cuda" else PATCHES
    found: dict[str, Any] = {
        "platform": _state["registered"],
        "registered": _state["registered"] is not None,
        "error": _state["error"],
        "required": required,
        **dict.fromkeys(required, False),
    }
    if _state["error"] is not None:
        return found
    if _state["registered"] == "cuda":
        found.update(cuda.report())
    elif _state["registered"] == "cpu":
        from sparkrl.rollout.plugin import punica, route_capture, seeded_sampling, whole_outputs

        found.update(
            route_capture=route_capture.is_applied(),
            seeded_sampling=seeded_sampling.is_applied(),
            punica=punica.is_applied(),
            whole_outputs=whole_outputs.is_applied(),
        )
    return found
