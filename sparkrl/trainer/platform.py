"""verl on a machine without an accelerator, through verl's own platform hook.

verl picks its platform once, when its engines are first imported, so `install` has to run before that.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from sparkrl.errors import VersionError

VERL_VERSION = "0.9.1"


def check_version() -> None:
    """Refuse any verl but the one that this package overrides methods of.

    Raises:
        VersionError: another version is installed.
    """
    found = importlib.metadata.version("verl")
    if found != VERL_VERSION:
        raise VersionError(
            f"verl {found} is installed; the trainer overrides internals of {VERL_VERSION}",
            hint="install the versions of the lock file (`make setup`)",
        )


def install(device: str) -> None:
    """Prepare this process for verl on `device` (`cpu` or `cuda`)."""
    check_version()
    if device != "cpu":
        return
    os.environ["VERL_PLATFORM"] = "cpu"
    _register()


def _device_module() -> SimpleNamespace:
    """The part of `torch.cuda`'s interface that verl asks a device for."""
    nothing = dict.fromkeys(
        ("empty_cache", "synchronize", "reset_peak_memory_stats", "ipc_collect", "set_device", "set_rng_state_all"),
        lambda *args, **kwargs: None,
    )
    zero = dict.fromkeys(
        ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
        lambda *args, **kwargs: 0,
    )
    return SimpleNamespace(
        **nothing,
        **zero,
        device_count=lambda: 1,
        is_available=lambda: False,
        current_device=lambda: "cpu",
        mem_get_info=lambda *args: (0, 0),
        get_device_name=lambda *args: "cpu",
        get_rng_state=lambda *args: torch.get_rng_state(),
        set_rng_state=lambda state, *args: torch.set_rng_state(state),
        current_stream=torch.cpu.current_stream,
        Stream=torch.cpu.Stream,
        stream=torch.cpu.stream,
    )


def _register() -> None:
    from verl.plugin.platform.platform_base import PlatformBase
    from verl.plugin.platform.platform_manager import PlatformRegistry

    @PlatformRegistry.register(platform="cpu")
    class PlatformCPU(PlatformBase):
        """A single CPU device."""

        device_name = property(lambda self: "cpu")
        vendor_name = property(lambda self: "cpu")
        device_module = property(lambda self: _MODULE)

        def is_available(self) -> bool:
            return True

        def is_platform_available(self, use_smi_check: bool = False) -> bool:
            return True

        def current_device(self) -> Any:
            return "cpu"  # every caller passes it to `tensor.to`, where 0 would mean cuda:0

        def device_count(self) -> int:
            return 1

        def communication_backend_name(self) -> str:
            return "gloo"

        def visible_devices_envvar(self) -> str:
            return "CUDA_VISIBLE_DEVICES"

        def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
            return None, None

        @contextlib.contextmanager
        def nvtx_range(self, msg: str) -> Iterator[None]:
            yield

        def ray_resource_name(self) -> str:
            return "CPU"

        def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
            return {"num_cpus": num_gpus}

        def ray_noset_envvars(self) -> list[str]:
            return []

        def is_ipc_supported(self) -> bool:
            return False

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        def manual_seed_all(self, seed: int) -> None:
            torch.manual_seed(seed)

        def set_device(self, device_index: int) -> None: ...
        def synchronize(self, device_index: int | None = None) -> None: ...
        def set_allocator_settings(self, settings: str) -> None: ...
        def empty_cache(self) -> None: ...
        def profiler_start(self) -> None: ...
        def profiler_stop(self) -> None: ...
        def cudart(self) -> None: ...


_MODULE = _device_module()
