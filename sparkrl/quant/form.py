"""The form of a checkpoint folder: its config.json, the quantization scheme declared there, and links in the folder."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path
from typing import Any

from sparkrl.errors import CheckpointError
from sparkrl.quant.nvfp4 import BLOCK

FAMILIES = ("muse_spark", "muse_spark_text")
"""Values of config.json's `model_type` that can be read."""


def load_config(path: Path) -> dict[str, Any]:
    """Read config.json of a checkpoint folder."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder", hint="give the folder that holds config.json and the weights")
    if not (path / "config.json").exists():
        raise CheckpointError(f"{path} is not a checkpoint: it has no config.json")
    refuse_foreign_link(path, "config.json")
    return read_json(path / "config.json")


def text_config(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """The text model's fields, from the nested or the flat form; an unsupported family is refused."""
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise CheckpointError(
            f"{path / 'config.json'} has model_type `{family}`, which is not supported",
            hint=f"known families: {', '.join(FAMILIES)}",
        )
    nested = raw.get("text_config")
    if family == "muse_spark" and not isinstance(nested, dict):
        raise CheckpointError(f"{path / 'config.json'} is of family muse_spark but has no `text_config`")
    config = dict(nested) if isinstance(nested, dict) else dict(raw)
    config.pop("quantization_config", None)
    if isinstance(nested, dict):
        for key in ("dtype", "tie_word_embeddings"):
            if key in raw:
                config.setdefault(key, raw[key])
    return config


def quantization_scheme(raw: dict[str, Any], path: Path) -> dict[str, Any] | None:
    """`quantization_config` if there is one; any scheme but ModelOpt's NVFP4 is refused."""
    scheme = raw.get("quantization_config") or (raw.get("text_config") or {}).get("quantization_config")
    if scheme is None:
        return None
    method, algorithm, group = (scheme.get(key) for key in ("quant_method", "quant_algo", "group_size"))
    if (method, algorithm) != ("modelopt", "NVFP4") or group not in (None, BLOCK):
        raise CheckpointError(
            f"{path / 'config.json'} declares the quantization scheme `{method} {algorithm}` with groups of {group}, "
            "which cannot be read",
            hint=f"supported: `modelopt` with `NVFP4` and group_size {BLOCK}, or no quantization at all",
        )
    return scheme


def is_ignored(name: str, patterns: list[str]) -> bool:
    """Whether ModelOpt's ignore list covers this tensor, under the names either library gives its module."""
    module = name.rsplit(".", 1)[0]
    short = module.replace("model.language_model.", "model.", 1)
    served = short.replace(".mlp.", ".feed_forward.")
    spellings = [module, short, served, *(f"language_model.{n}" for n in (short, served))]
    return any(
        fnmatch.fnmatchcase(spelling, pattern) or spelling.startswith(pattern + ".")
        for spelling in spellings
        for pattern in patterns
    )


def refuse_foreign_link(folder: Path, file: str) -> None:
    """A file must lie in the checkpoint's folder, or among the blobs of the same Hugging Face cache entry."""
    root, real = folder.resolve(), (folder / file).resolve()
    homes = [root] + ([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])
    if not any(real.is_relative_to(home) for home in homes):
        raise CheckpointError(
            f"{folder / file} points outside the checkpoint, to {real}", hint="copy the file into the folder"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got: {type(content).__name__}")
    return content


def dump_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object, indented."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
