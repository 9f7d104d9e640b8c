"""Bit for bit: dequantization against other libraries, quantization against grids and ModelOpt's rule."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from quant_folders import e4m3, unpack
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from sparkrl.quant import mxfp4, nvfp4
from sparkrl.quant.nvfp4 import Scales

ALL_CODES = torch.tensor([low | (low + 1) << 4 for low in range(0, 16, 2)], dtype=torch.uint8)
"""Every code once, 16 columns."""


def every_code_under_every_scale() -> tuple[Tensor, Tensor]:
    """Codes [126, 16] and block scales [126, 2]: all positive finite e4m3 numbers, upwards and downwards."""
    scales = torch.arange(1, 0x7F, dtype=torch.uint8)
    return ALL_CODES.repeat(126, 2), torch.stack([scales, scales.flip(0)], dim=1).view(torch.float8_e4m3fn)


def test_nvfp4_division_equals_compressed_tensors_for_every_code_scale_and_random_globals():
    packed, block = every_code_under_every_scale()
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    random = torch.Generator().manual_seed(0)
    for divisor in torch.exp(8 - 3 * torch.randn(200, 1, generator=random)):
        state = {"weight_packed": packed, "weight_scale": block, "weight_global_scale": divisor}
        theirs = NVFP4PackedCompressor.decompress(state, scheme)["weight"]
        ours = nvfp4.dequantize(packed, block, divisor[0], dtype=torch.bfloat16, divide=True)
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_product_equals_a_float64_table_for_every_code_scale_and_random_globals(dtype):
    packed, block = every_code_under_every_scale()
    value, exact_block = torch.from_numpy(unpack(packed)), torch.from_numpy(e4m3(block))
    random = torch.Generator().manual_seed(1)
    for scale in torch.exp(3 * torch.randn(200, generator=random) - 8):
        # ModelOpt rounds the product of the scales, then the product with the code, then to the result's type
        step = (exact_block * scale.double()).float().double().repeat_interleave(16, -1)
        assert torch.equal(nvfp4.dequantize(packed, block, scale, dtype=dtype), (value * step).float().to(dtype))


@pytest.mark.parametrize("rows", [1, 3, 37, 129])
def test_nvfp4_odd_row_counts_equal_a_float64_table(rows):
    random = torch.Generator().manual_seed(rows)
    packed = torch.randint(0, 256, (rows, 40), generator=random, dtype=torch.uint8)
    block = torch.randint(1, 0x7F, (rows, 5), generator=random, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.rand((), generator=random)
    step = (torch.from_numpy(e4m3(block)) * scale.double()).float().double().repeat_interleave(16, -1)
    exact = torch.from_numpy(unpack(packed)) * step
    assert torch.equal(nvfp4.dequantize(packed, block, scale, dtype=torch.bfloat16), exact.float().bfloat16())


def test_mxfp4_every_code_and_exponent_equals_transformers_and_a_float64_table():
    exponent = torch.arange(255, dtype=torch.uint8)[:, None]
    packed = ALL_CODES.repeat(255, 2)
    ours = mxfp4.dequantize(packed, exponent, dtype=torch.bfloat16)
    exact = torch.from_numpy(unpack(packed)) * torch.exp2(exponent.double() - 127)
    assert torch.equal(ours, exact.float().bfloat16())
    theirs = convert_moe_packed_tensors(packed.view(1, 255, 1, 16), exponent.view(1, 255, 1))
    assert torch.equal(ours, theirs[0].T)


@pytest.mark.parametrize("rows", [1, 37])
def test_mxfp4_random_tensors_equal_transformers(rows):
    random = torch.Generator().manual_seed(rows)
    packed = torch.randint(0, 256, (2, rows, 48), generator=random, dtype=torch.uint8)
    exponent = torch.randint(100, 140, (2, rows, 3), generator=random, dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(packed.unflatten(-1, (3, 16)), exponent)
    assert torch.equal(mxfp4.dequantize(packed, exponent, dtype=torch.bfloat16), theirs.transpose(1, 2))


@pytest.mark.parametrize("seed", range(20))
def test_nvfp4_quantize_of_any_tensor_on_a_grid_returns_it(seed):
    random = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (2, 33, 32), generator=random, dtype=torch.uint8)
    block = torch.randint(1, 0x7F, (2, 33, 4), generator=random, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.exp2(torch.randint(-20, 4, (2,), generator=random).float())
    weight = nvfp4.dequantize(packed, block, scale, dtype=torch.bfloat16)
    again = nvfp4.dequantize(*nvfp4.quantize(weight, scales=Scales.mse), dtype=torch.bfloat16)
    assert torch.equal(again, weight)
    assert torch.equal(torch.signbit(again), torch.signbit(weight))


@pytest.mark.parametrize("search", [False, True])
def test_mxfp4_quantize_of_any_tensor_on_a_grid_returns_it(search):
    random = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (65, 64), generator=random, dtype=torch.uint8)
    exponent = torch.randint(20, 235, (65, 4), generator=random, dtype=torch.uint8)
    weight = mxfp4.dequantize(packed, exponent, dtype=torch.bfloat16)
    assert torch.equal(mxfp4.dequantize(*mxfp4.quantize(weight, search=search), dtype=torch.bfloat16), weight)


def by_modelopts_rule(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Block scales and dequantized value of max calibration, in float64 but for the roundings of its float32 code."""
    blocks = weight.float().reshape(-1, 16)
    whole = weight.abs().amax().float() / (6 * 448)
    block = (blocks.abs().amax(-1) / (6 * whole)).clamp(2.0**-9, 448).to(torch.float8_e4m3fn)
    step = (block.float() * whole).double()[:, None]
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    nearest = grid[((blocks.double() / step).abs()[..., None] - grid).abs().argmin(-1)]
    return block, (nearest * step * blocks.double().sign()).reshape(weight.shape)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", [(64, 64), (96, 512), (512, 512)])
def test_nvfp4_error_on_gaussian_weights_is_no_worse_than_modelopts(seed, shape):
    weight = (0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()
    block, theirs = by_modelopts_rule(weight)
    same = nvfp4.quantize(weight, power_of_two=False)
    assert torch.equal(same.block_scale.view(torch.uint8).view(-1), block.view(torch.uint8))
    searched = nvfp4.quantize(weight, scales=Scales.mse)
    errors = [
        (value.double() - weight.double()).square().mean().item()
        for value in (
            theirs,
            nvfp4.dequantize(*same, dtype=torch.float32),
            nvfp4.dequantize(*searched, dtype=torch.float32),
        )
    ]
    assert errors[1] == pytest.approx(errors[0], rel=1e-5)
    # measured: 0.71 to 0.75
    assert errors[2] < 0.78 * errors[0]


def test_nvfp4_searched_scales_are_the_best_of_all():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(4))
    packed, block, scale = nvfp4.quantize(weight, scales=Scales.mse)
    got = (nvfp4.dequantize(packed, block, scale, dtype=torch.float32) - weight).view(-1, 16).square().sum(-1)
    every = torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double() * scale.double()
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    steps = (weight.double().view(-1, 1, 16).abs() / every[:, None])[..., None]
    errors = ((grid[(steps - grid).abs().argmin(-1)] - steps[..., 0]) * every[:, None]).square().sum(-1)
    assert torch.allclose(got.double(), errors.amin(-1), rtol=1e-4)


def test_mxfp4_search_is_never_worse_in_any_block():
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(4))
    plain, searched = (
        (mxfp4.dequantize(*mxfp4.quantize(weight, search=search), dtype=torch.float32) - weight).view(-1, 32).square()
        for search in (False, True)
    )
    assert (searched.sum(-1) <= plain.sum(-1) * (1 + 1e-6)).all()
    assert searched.sum() < 0.95 * plain.sum()


def test_mxfp4_zero_block_is_zero_and_bad_input_refused():
    packed, exponent = mxfp4.quantize(torch.zeros(1, 32))
    assert exponent.tolist() == [[127]] and not mxfp4.dequantize(packed, exponent, dtype=torch.float32).any()
    with pytest.raises(ValueError, match="multiple of 32"):
        mxfp4.quantize(torch.zeros(2, 48))
    with pytest.raises(ValueError, match="not finite"):
        mxfp4.quantize(torch.full((1, 32), float("inf")))
