"""`trainer.base=packed`: the experts of a checkpoint stay NVFP4 in memory, and training does not change by a bit."""

import asyncio

import numpy as np
import pytest
import ray
import torch
import trainer_checkpoint as tiny
from safetensors.torch import load_file

from sparkrl.config.schema import Base
from sparkrl.errors import ConfigError
from sparkrl.models.registry import load_config
from sparkrl.quant.checkpoint import CheckpointReader
from sparkrl.quant.convert import dequantize_checkpoint
from sparkrl.quant.stream import Destination, fill
from sparkrl.trainer.group import TrainerGroup
from sparkrl.trainer.loading import pack_experts


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    tiny.write(folder)
    return folder


@pytest.fixture(scope="module")
def batch(path):
    return tiny.batch(tiny.Reference(path))


@pytest.fixture(scope="module")
def ray_here():
    ray.init(include_dashboard=False, num_cpus=8, log_to_driver=False, object_store_memory=100 << 20)
    yield
    ray.shutdown()


def trained(cfg, batch, folder):
    """Two steps: metrics, saved tensors, log-probs afterwards, facts about the ranks."""

    async def go():
        group = await TrainerGroup.start(cfg, run_seed=3)
        try:
            metrics = [(await group.step(batch)).metrics for _ in range(2)]
            await group.save(folder)
            scores = await group.score(batch.sequences, replay=True, temperature=1.0)
            return metrics, scores, group.info
        finally:
            await group.stop()

    metrics, scores, info = asyncio.run(go())
    saved = load_file(folder / "trainer_state.safetensors") | load_file(folder / "adapter_model.safetensors")
    return metrics, saved, scores, info


@pytest.mark.parametrize(
    ("workers", "dtype", "checkpointing"), [(1, "float32", False), (2, "bfloat16", True)], ids=["one", "two"]
)
def test_packed_base_trains_to_the_same_bits(ray_here, path, batch, tmp_path, workers, dtype, checkpointing):
    kinds = {}
    for base in Base:
        cfg = tiny.config(path, workers=workers, dtype=dtype, lr=1e-3, base=base, gradient_checkpointing=checkpointing)
        kinds[base] = trained(cfg, batch, tmp_path / base.value)
    (metrics, saved, scores, info), (metrics_packed, saved_packed, scores_packed, info_packed) = kinds.values()
    # AdamW's first moment after two steps is a mix of both gradients, so equal moments are equal gradients
    assert set(saved) == set(saved_packed) and all(torch.equal(saved[name], saved_packed[name]) for name in saved)
    assert any(name.endswith(".exp_avg") and saved[name].any() for name in saved)
    for one, other in zip(metrics, metrics_packed, strict=True):
        exact = [name for name in one if name.startswith(("train/loss", "train/grad_norm", "agree/"))]
        assert exact and all(one[name] == other[name] for name in exact)
    assert all(np.array_equal(one, other) for one, other in zip(scores, scores_packed, strict=True))
    assert info["base_bytes_read"] == info_packed["base_bytes_read"]


def packed_model(path, dtype=torch.bfloat16):
    reader = CheckpointReader(path)
    family, config = load_config(path)
    with torch.device("meta"):
        model = family.build(config, dtype)
        pack_experts(model, reader, family, dtype)
    return model, reader


def test_packed_experts_expand_to_what_the_reader_dequantizes(path):
    for dtype in (torch.bfloat16, torch.float32):
        model, reader = packed_model(path, dtype)
        name = "model.language_model.layers.1.mlp.experts"
        experts = model.get_submodule(name).to_empty(device="cpu")
        with torch.no_grad():
            fill(
                reader,
                [Destination(f"{name}.{part}", 0, experts.packed(part)) for part in ("gate_up_proj", "down_proj")],
            )
        gate_up, down = experts.weights()
        assert gate_up.dtype == dtype and torch.equal(gate_up, reader.read(f"{name}.gate_up_proj").to(dtype))
        assert torch.equal(down, reader.read(f"{name}.down_proj").to(dtype))


def test_packed_experts_hold_nine_thirty_seconds_of_their_bytes_in_bfloat16(path):
    model, _ = packed_model(path)
    experts = model.model.language_model.layers[1].mlp.experts
    held = sum(p.nbytes for name, p in experts.named_parameters() if "norm" not in name)
    latent, inner = tiny.FIELDS["moe_hidden_size"], tiny.FIELDS["moe_intermediate_size"]
    parameters = tiny.EXPERTS * 3 * latent * inner
    # half a byte of code and a sixteenth of scale a parameter, and three float32 scales an expert
    assert held == parameters * 9 // 16 + tiny.EXPERTS * 3 * 4
    assert not any(p.requires_grad for name, p in experts.named_parameters() if "norm" not in name)
    plain = model.model.language_model.layers[0].mlp.experts  # BF16 in the checkpoint
    assert plain.gate_up_proj.dtype == torch.bfloat16 and type(plain) is not type(experts)


def test_packed_base_on_a_plain_checkpoint_is_refused(path, tmp_path):
    dequantize_checkpoint(path, tmp_path / "plain")
    with pytest.raises(ConfigError, match=r"`trainer.base=packed` .* has none") as caught:
        packed_model(tmp_path / "plain")
    assert "sparkrl quantize" in caught.value.hint
