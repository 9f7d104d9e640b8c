"""The form of a checkpoint folder: its config.json, the quantization scheme declared there, and links in the folder.

| form | declared as | names | value of a weight |
|---|---|---|---|
| `modelopt` | `modelopt`, `NVFP4` | `M.weight`, `.weight_scale`, `.weight_scale_2` | code * (block * scale) |
| `modelopt-stacked` | the same | `P`, `P_weight_scale`, `P_weight_scale_2` | the same |
| `compressed-tensors` | `nvfp4-pack-quantized` | `M.weight_packed`, ..., `_global_scale` | code * (block / scale) |
| `compressed-tensors-mxfp4` | `mxfp4-pack-quantized` | `M.weight_packed`, `.weight_scale` | code * 2^(byte - 127) |
| `mxfp4` | `mxfp4`, as gpt-oss | `P_blocks`, `P_scales`; rows of gate and up alternate | the same |
| `quark` | `quark`, `fp4` by 32 | `M.weight`, `.weight_scale` | the same |

M is a linear module, for routed experts `...experts.N.gate_proj` and so on; P is the parameter
that stacks them.
"""

from __future__ import annotations

import fnmatch
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkrl.errors import CheckpointError
from sparkrl.quant import mxfp4, nvfp4


@dataclass(frozen=True, slots=True)
class Names:
    """How the tensors of one quantized weight are named and read."""

    codes: str
    """Ending of the packed codes' name; what stands before it is the base of all names."""
    logical: str
    """Ending of the dequantized weight's name."""
    block: str
    """Ending of the block scales."""
    scale: str | None = None
    """Ending of the scale over the whole weight; None in MXFP4."""
    extras: tuple[str, ...] = ()
    """Endings of tensors that belong to the weight but not to its value."""
    divide: bool = False
    """The scale over the whole weight divides."""
    alternate: bool = False
    """Rows of gate and up alternate in `gate_up_proj`."""

    @property
    def block_size(self) -> int:
        """Input columns under one block scale."""
        return nvfp4.BLOCK if self.scale else mxfp4.BLOCK


_INPUT = (".input_scale", ".k_scale", ".v_scale")
FORMS: dict[str, Names] = {
    "modelopt": Names(".weight", ".weight", ".weight_scale", ".weight_scale_2", _INPUT),
    "modelopt-stacked": Names("", "", "_weight_scale", "_weight_scale_2", ("_input_scale",)),
    "compressed-tensors": Names(
        ".weight_packed", ".weight", ".weight_scale", ".weight_global_scale", (".input_global_scale",), divide=True
    ),
    "compressed-tensors-mxfp4": Names(".weight_packed", ".weight", ".weight_scale"),
    "mxfp4": Names("_blocks", "", "_scales", alternate=True),
    "quark": Names(".weight", ".weight", ".weight_scale", extras=_INPUT),
}
"""Forms by the name the command line gives them."""
KNOWN_SCHEMES = (
    "`modelopt` with `NVFP4` and group_size 16; `compressed-tensors` with format `nvfp4-pack-quantized` or "
    "`mxfp4-pack-quantized`; `mxfp4` as in gpt-oss; `quark` with fp4 weights in groups of 32; or no quantization at all"
)


@dataclass(frozen=True, slots=True)
class Scheme:
    """What a checkpoint declares about its quantization."""

    title: str
    """As messages name it."""
    forms: tuple[str, ...]
    """Keys of `FORMS` that its tensors may take."""
    ignore: tuple[str, ...]
    """Patterns of the modules that are not quantized."""
    section: dict[str, Any]
    """As published."""


def load_config(path: Path) -> dict[str, Any]:
    """Read config.json of a checkpoint folder."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder", hint="give the folder that holds config.json and the weights")
    if not (path / "config.json").exists():
        raise CheckpointError(
            f"{path} is not a checkpoint: it has no config.json", hint="give the folder that config.json is in"
        )
    refuse_foreign_link(path, "config.json")
    return read_json(path / "config.json")


def text_config(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """The text model's fields, from the nested or the flat form, without `quantization_config`."""
    if not isinstance(raw.get("model_type"), str):
        raise CheckpointError(
            f"{path / 'config.json'} has no `model_type`", hint="give the folder of a model, not of an adapter"
        )
    nested = raw.get("text_config")
    if nested is not None and not isinstance(nested, dict):
        raise CheckpointError(
            f"`text_config` in {path / 'config.json'} must be an object, got: {nested!r}", hint="download it again"
        )
    config = dict(raw if nested is None else nested)
    config.pop("quantization_config", None)
    if isinstance(nested, dict):
        for key in ("model_type", "dtype", "tie_word_embeddings"):
            if key in raw:
                config.setdefault(key, raw[key])
    return config


def quantization_scheme(raw: dict[str, Any], path: Path) -> Scheme | None:
    """What config.json (or ModelOpt's hf_quant_config.json) declares; None for plain weights.

    Raises:
        CheckpointError: a scheme that cannot be read; it is named, and those that can are listed.
    """
    section = raw.get("quantization_config") or _object(raw.get("text_config")).get("quantization_config")
    source = path / "config.json"
    if not section and (path / "hf_quant_config.json").exists():
        source = path / "hf_quant_config.json"
        refuse_foreign_link(path, source.name)
        content = read_json(source)
        section = {"quant_method": "modelopt", **_object(content.get("quantization", content))}
    if not section:
        return None
    scheme = _parse(section) if isinstance(section, dict) else None
    if scheme is None:
        raise CheckpointError(
            f"{source} declares the quantization scheme {_describe(section)}, which cannot be read",
            hint=f"supported: {KNOWN_SCHEMES}",
        )
    return scheme


def is_ignored(name: str, patterns: tuple[str, ...] | list[str]) -> bool:
    """Whether a list of unquantized modules covers this tensor, under the names either library gives its module.

    A pattern is a glob over the module's name or over that of a module around it, or a regular expression after `re:`
    that must match from the start, as compressed-tensors and Quark have it.
    """
    module = name.rsplit(".", 1)[0]
    short = module.replace("model.language_model.", "model.", 1)
    served = short.replace(".mlp.", ".feed_forward.")
    spellings = {module, short, served, *(f"language_model.{n}" for n in (short, served))}
    return any(_matches(spelling, pattern) for spelling in spellings for pattern in patterns)


def expert_shape(config: dict[str, Any], part: str) -> tuple[int, int, int] | None:
    """[experts, rows, columns] of `gate_up_proj` or `down_proj` by config.json, or None if it does not say."""
    experts = config.get("num_local_experts", config.get("num_experts"))
    width = config.get("moe_hidden_size", config.get("hidden_size"))
    inner = config.get("moe_intermediate_size")
    if config.get("model_type") == "gpt_oss":
        inner = config.get("intermediate_size")
    if not (isinstance(experts, int) and isinstance(width, int) and isinstance(inner, int)):
        return None
    return (experts, 2 * inner, width) if part == "gate_up_proj" else (experts, width, inner)


def refuse_foreign_link(folder: Path, file: str) -> None:
    """A file must lie in the checkpoint's folder, or among the blobs of the same Hugging Face cache entry."""
    if "\0" in file:
        raise CheckpointError(f"{folder} names a file {file!r}, which cannot be", hint="download the index again")
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
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}", hint="download this file again") from None
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path} must hold a JSON object, got: {type(content).__name__}", hint="download this file again"
        )
    return content


def dump_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object, indented."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _parse(section: dict[str, Any]) -> Scheme | None:
    method = str(section.get("quant_method", "")).lower()
    ignored = section.get("ignore") or section.get("exclude_modules") or []
    forms: tuple[str, ...]
    if method in ("modelopt", "modelopt_fp4"):
        algorithm, group = str(section.get("quant_algo", "")).upper(), section.get("group_size")
        if algorithm not in ("NVFP4", "W4A16_NVFP4") or group not in (None, nvfp4.BLOCK):
            return None
        title, forms = "ModelOpt NVFP4", ("modelopt", "modelopt-stacked")
    elif method == "compressed-tensors":
        known = {
            "nvfp4-pack-quantized": ("compressed-tensors NVFP4", ("compressed-tensors",)),
            "mxfp4-pack-quantized": ("compressed-tensors MXFP4", ("compressed-tensors-mxfp4",)),
        }
        if str(section.get("format")) not in known:
            return None
        title, forms = known[section["format"]]
    elif method == "mxfp4":
        title, forms = "MXFP4", ("mxfp4",)
        ignored = section.get("modules_to_not_convert") or []
    elif method == "quark":
        weight = _object(_object(section.get("global_quant_config")).get("weight"))
        if (weight.get("dtype"), weight.get("group_size")) != ("fp4", mxfp4.BLOCK) or section.get("layer_quant_config"):
            return None
        title, forms = "Quark MXFP4", ("quark",)
        ignored = section.get("exclude") or []
    else:
        return None
    if not isinstance(ignored, list) or not all(isinstance(pattern, str) for pattern in ignored):
        raise CheckpointError(
            f"config.json's list of modules that are not quantized must hold names, got: {ignored!r}",
            hint="mend config.json: a list of names or patterns",
        )
    return Scheme(title, forms, tuple(ignored), section)


def _object(value: Any) -> dict[str, Any]:
    """A section of a config; empty where there is something else in its place."""
    return value if isinstance(value, dict) else {}


def _describe(section: Any) -> str:
    if not isinstance(section, dict):
        return repr(section)
    weight = _object(_object(section.get("global_quant_config")).get("weight"))
    words = [section.get(key) for key in ("quant_method", "quant_algo", "format")] + [weight.get("dtype")]
    group = section.get("group_size") or weight.get("group_size")
    more = " with a scheme of its own for some layers" if section.get("layer_quant_config") else ""
    return f"`{' '.join(str(word) for word in words if word)}`" + (f" with groups of {group}" if group else "") + more


def _matches(module: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error as error:
            raise CheckpointError(
                f"`{pattern}` in the list of ignored modules is no regular expression: {error}",
                hint="mend it, in config.json or after `--ignore`",
            ) from None
    return fnmatch.fnmatchcase(module, pattern) or fnmatch.fnmatchcase(module, pattern + ".*")
