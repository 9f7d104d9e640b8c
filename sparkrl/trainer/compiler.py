"""Whether the trainer's layers are compiled on this machine."""

from __future__ import annotations

import os
import shutil

from sparkrl.config.schema import Compile, Config, Device
from sparkrl.errors import ConfigError

AUTO_PARAMETERS = 1_000_000_000
"""Frozen parameters from which `auto` compiles: the first step costs a minute or more, which a tiny model's steps of a
second or two do not win back."""


def compile_backend(cfg: Config, num_frozen: int) -> str | None:
    """What compiles the layers, or None.

    Args:
        num_frozen: parameters of the base model, over all ranks.
    Raises:
        ConfigError: `trainer.compile=always` on a machine without the compiler that it takes.
    """
    asked = cfg.trainer.compile
    on_cpu = cfg.cluster.device is Device.cpu
    if asked is Compile.never or (asked is Compile.auto and (on_cpu or num_frozen < AUTO_PARAMETERS)):
        return None
    # what inductor runs for a CPU, and what Triton runs for a GPU's launchers: the first of these that is set or found
    variable = "CXX" if on_cpu else "CC"
    given = os.environ.get(variable)  # set to nothing, it is a program without a name
    names = [given] if given is not None else ["g++"] if on_cpu else ["gcc", "clang"]
    if any(shutil.which(name) for name in names):
        return "inductor"
    if asked is Compile.auto:
        return None
    raise ConfigError(
        f"`trainer.compile=always` needs a {'C++' if on_cpu else 'C'} compiler on the trainer's machine, and "
        + (f"{variable} is set but empty" if given == "" else f"there is no {' or '.join(names)}"),
        hint=f"install one, name it in {variable}, or set `trainer.compile=never`",
    )
