"""The `quantization_config` of a checkpoint that is about to be written, in the words vLLM reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sparkrl.quant import mxfp4, nvfp4

_MUSE_SPARK = ("muse_spark", "muse_spark_text")
_WHOLE = (".experts", ".feed_forward", ".self_attn")
"""Modules that are left plain with all that is in them."""
_SERVED = {"mlp.gate": "router", "mlp.pre_expert_proj": "pooler", "mlp.post_expert_proj": "unpooler"}


def quantization_config(form: str, plain: Sequence[str], model_type: str) -> dict[str, Any]:
    """What config.json has to say.

    Args:
        form: key of `form.FORMS`.
        plain: modules that hold weights and stay as they are; those named `...experts` with all that is in them.
        model_type: of config.json; vLLM's Muse Spark has module names of its own.
    """
    if form.startswith("modelopt"):
        weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": nvfp4.BLOCK}
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": nvfp4.BLOCK,
            "kv_cache_scheme": None,
            "ignore": _globs(plain, model_type),
            # Nothing was calibrated. vLLM takes this for W4A16 on every GPU, where it would quantize activations with
            # input scales of 1 on Blackwell otherwise.
            "config_groups": {"group_0": {"input_activations": None, "weights": weights, "targets": ["Linear"]}},
        }
    if form == "mxfp4":
        return {"quant_method": "mxfp4", "modules_to_not_convert": _globs(plain, model_type)}
    if form == "quark":
        weight = {
            "dtype": "fp4",
            "qscheme": "per_group",
            "group_size": mxfp4.BLOCK,
            "ch_axis": -1,
            "scale_format": "e8m0",
            "is_dynamic": False,
        }
        nothing = {"input_tensors": None, "output_tensors": None, "bias": None}
        return {
            "quant_method": "quark",
            "global_quant_config": {"weight": weight, **nothing},
            "layer_quant_config": {},
            "layer_type_quant_config": {},
            "exclude": _expressions(plain, model_type),
            "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
            "quant_mode": "eager_mode",
        }
    nvfp4_form = form == "compressed-tensors"
    name = "nvfp4-pack-quantized" if nvfp4_form else "mxfp4-pack-quantized"
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group" if nvfp4_form else "group",
        "group_size": nvfp4.BLOCK if nvfp4_form else mxfp4.BLOCK,
        "symmetric": True,
        "dynamic": False,
    }
    # No input activations: without data there is no scale for them, and W4A16 needs none.
    group = {"format": name, "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": {**group, "targets": ["Linear"]}},
        "ignore": _expressions(plain, model_type),
    }


def _globs(plain: Sequence[str], model_type: str) -> list[str]:
    return [f"{module}*" if module.endswith(_WHOLE) else module for module in _names(plain, model_type)]


def _expressions(plain: Sequence[str], model_type: str) -> list[str]:
    """Names, and regular expressions where all that is inside is meant: this list knows no globs."""
    both = list(dict.fromkeys(name for kind in ("", model_type) for name in _names(plain, kind)))
    return [rf"re:{re.escape(module)}(\..*)?$" if module.endswith(_WHOLE) else module for module in both]


def _names(plain: Sequence[str], model_type: str) -> list[str]:
    """The modules under vLLM's names, attention as a whole: servers fuse its projections under other names."""
    names = []
    for module in plain:
        module = re.sub(r"(\.self_attn)\..*", r"\1", module)
        if model_type in _MUSE_SPARK:
            module = module.replace("model.language_model.", "model.", 1)
            for ours, theirs in _SERVED.items():
                if module.endswith("." + ours):
                    module = module.removesuffix(ours) + f"feed_forward.{theirs}"
            # A layer whose experts are plain has nothing quantized in its whole feed-forward part.
            module = module.replace(".mlp.experts", ".feed_forward").replace(".mlp.", ".feed_forward.")
        names.append(module)
    return list(dict.fromkeys(names))
