"""A flat text-only Muse Spark checkpoint made over into the published form: towers in the file, a nested config."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import MuseSparkConfig, MuseSparkForConditionalGeneration

_VISION = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "layer_types": ["window_attention", "full_attention"],
}
_AUDIO = {"patch_sizes": [16, 6], "hidden_sizes": [16, 32], "depths": [1, 1], "num_hidden_layers": 2}
_TEXT = "model.language_model."
_TOP_LEVEL = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "dtype", "architectures")
"""Fields of the flat config that the published form has outside its text part."""


def as_omni(flat: Path, folder: Path) -> Path:
    """Write to `folder` what `flat` holds, with the names and shapes of transformers' own towers around it."""
    fields = json.loads((flat / "config.json").read_text())
    outside = {name: fields.pop(name) for name in _TOP_LEVEL if name in fields}
    config = MuseSparkConfig(
        text_config=dict(fields),
        vision_config=_VISION,
        audio_config=_AUDIO | {"out_hidden_size": fields["hidden_size"]},
        out_hidden_size=_VISION["hidden_size"] * 2**2,  # of two by two patches
        projector_hidden_size=48,
    )
    with torch.device("meta"):
        shapes = MuseSparkForConditionalGeneration(config).state_dict()
    random = torch.Generator().manual_seed(0)
    towers = {
        name: torch.randn(value.shape, generator=random).bfloat16()
        for name, value in shapes.items()
        if name.startswith("model.") and not name.startswith(_TEXT)
    }
    assert any("vision_tower" in name for name in towers) and any("audio_tower" in name for name in towers)
    folder.mkdir(parents=True)
    for path in flat.iterdir():
        if path.suffix != ".safetensors" and path.name != "config.json":
            shutil.copy(path, folder)
    save_file(load_file(flat / "model.safetensors") | towers, folder / "model.safetensors", metadata={"format": "pt"})
    # with every default of the towers spelled out, as it is published: vLLM's own config class has none
    whole = config.to_dict()
    towers_config = {name: whole[name] for name in ("vision_config", "audio_config")}
    projector = {name: whole[name] for name in ("out_hidden_size", "projector_hidden_size", "projector_hidden_act")}
    nested = {
        "model_type": "muse_spark",
        **outside,
        "architectures": ["MuseSparkForConditionalGeneration"],
        "text_config": {"hidden_act": "silu", "attention_bias": False, "num_shared_experts": 0, **fields},
        **towers_config,
        **projector,
    }
    (folder / "config.json").write_text(json.dumps(nested))
    return folder
