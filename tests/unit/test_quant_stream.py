"""Rows of a checkpoint into tensors that exist: the numbers of a plain read, each byte once, and errors that arrive."""

import os
import threading

import pytest
import torch

from sparkrl.errors import CheckpointError
from sparkrl.quant.checkpoint import CheckpointReader, write_checkpoint
from sparkrl.quant.nvfp4 import quantize
from sparkrl.quant.packed import Packed
from sparkrl.quant.stream import Destination, fill, packed_like

EXPERTS, LATENT, INNER = 6, 64, 48
GATE_UP = "model.language_model.layers.0.mlp.experts.gate_up_proj"
DOWN = "model.language_model.layers.0.mlp.experts.down_proj"
NORM = "model.language_model.norm.weight"
CONFIG = {
    "model_type": "muse_spark_text",
    "num_local_experts": EXPERTS,
    "moe_hidden_size": LATENT,
    "moe_intermediate_size": INNER,
    "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": []},
}


def tensors():
    generator = torch.Generator().manual_seed(0)
    out = {NORM: torch.randn(100, generator=generator)}
    halves = [quantize(torch.randn((EXPERTS, INNER, LATENT), generator=generator), power_of_two=False) for _ in "gu"]
    out[GATE_UP] = torch.cat([half.packed for half in halves], dim=1)
    out[GATE_UP + "_weight_scale"] = torch.cat([half.block_scale for half in halves], dim=1)
    out[GATE_UP + "_weight_scale_2"] = torch.stack([half.global_scale for half in halves], dim=1)
    down = quantize(torch.randn((EXPERTS, LATENT, INNER), generator=generator))
    out[DOWN], out[DOWN + "_weight_scale"], out[DOWN + "_weight_scale_2"] = down
    for name in (GATE_UP, DOWN):
        out[name + "_input_scale"] = torch.ones_like(out[name + "_weight_scale_2"])
    return out


@pytest.fixture
def folder(tmp_path):
    write_checkpoint(tmp_path / "checkpoint", tensors(), CONFIG)
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("piece_bytes", [1, 40_000, 1 << 30])
def test_fill_rows_of_a_rank_equal_a_plain_read_and_are_read_once(folder, piece_bytes):
    reader = CheckpointReader(folder)
    start, stop = 2, 5
    gate_up = torch.empty((stop - start, 2 * INNER, LATENT), dtype=torch.bfloat16)
    down = torch.empty((stop - start, LATENT, INNER), dtype=torch.float32)
    norm = torch.empty(30)
    places = [Destination(GATE_UP, start, gate_up), Destination(DOWN, start, down), Destination(NORM, 10, norm)]
    fill(reader, places, piece_bytes=piece_bytes)
    stored = tensors()
    parts = [GATE_UP, DOWN, *(n + s for n in (GATE_UP, DOWN) for s in ("_weight_scale", "_weight_scale_2"))]
    assert reader.bytes_read == norm.nbytes + sum(stored[name][start:stop].nbytes for name in parts)
    plain = CheckpointReader(folder)
    assert torch.equal(gate_up, plain.rows(GATE_UP, start, stop))
    assert torch.equal(down, plain.rows(DOWN, start, stop).float())
    assert torch.equal(norm, stored[NORM][10:40])


def test_fill_packed_destination_holds_the_stored_bits(folder):
    reader, stored = CheckpointReader(folder), tensors()
    for name in (GATE_UP, DOWN):
        like = packed_like(reader, name)
        assert like.shape == reader.shape(name) and like.codes.is_meta
        into = Packed(
            *(torch.empty_like(value[1:4], device="cpu") for value in (like.codes, like.block_scale, like.scale))
        )
        fill(reader, [Destination(name, 1, into)], piece_bytes=1)
        assert torch.equal(into.codes, stored[name][1:4])
        assert torch.equal(into.block_scale.view(torch.uint8), stored[name + "_weight_scale"][1:4].view(torch.uint8))
        assert torch.equal(into.scale, stored[name + "_weight_scale_2"][1:4])
        assert torch.equal(into.dequantize(dtype=torch.bfloat16), CheckpointReader(folder).rows(name, 1, 4))


def test_fill_nothing_reads_nothing(folder):
    reader = CheckpointReader(folder)
    fill(reader, [])
    fill(reader, [Destination(GATE_UP, 6, torch.empty((0, 2 * INNER, LATENT), dtype=torch.bfloat16))])
    assert reader.bytes_read == 0


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("read-checkpoint")]


def test_fill_file_that_shrinks_while_it_is_read_is_reported_and_no_thread_stays(folder):
    reader = CheckpointReader(folder)
    into = torch.empty(reader.shape(GATE_UP), dtype=torch.bfloat16)
    os.truncate(folder / "model.safetensors", 4096)
    with pytest.raises(CheckpointError, match="ends early"):
        fill(reader, [Destination(GATE_UP, 0, into)] * 20, piece_bytes=1)
    assert not threads()


def test_fill_bad_scale_in_a_late_row_is_reported_and_no_thread_stays(tmp_path):
    broken = tensors()
    broken[DOWN + "_weight_scale"].view(torch.uint8)[EXPERTS - 1, 3, 1] = 0
    write_checkpoint(tmp_path / "broken", broken, CONFIG)
    reader = CheckpointReader(tmp_path / "broken")
    into = torch.empty(reader.shape(DOWN), dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match="not positive numbers"):
        fill(reader, [Destination(DOWN, 0, into)], piece_bytes=1)
    assert not threads()


def test_fill_destination_that_fails_stops_the_readers(folder):
    def places():
        yield Destination(NORM, 0, torch.empty(100))
        raise KeyError("no such place")

    with pytest.raises(KeyError, match="no such place"):
        fill(CheckpointReader(folder), places())
    with pytest.raises(ValueError, match="`out` must be"):  # rows of another width
        fill(CheckpointReader(folder), [Destination(GATE_UP, 0, torch.empty((EXPERTS, 1, 16), dtype=torch.bfloat16))])
    assert not threads()


def test_fill_unknown_tensor_is_a_checkpoint_error(folder):
    with pytest.raises(CheckpointError, match="not in the checkpoint"):
        fill(CheckpointReader(folder), [Destination("model.absent", 0, torch.empty(3))])
