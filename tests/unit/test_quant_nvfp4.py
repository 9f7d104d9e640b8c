"""NVFP4 codec against an independent float64 table, over every code and every finite e4m3 scale."""

from __future__ import annotations

import math

import pytest
import torch

from sparkrl.quant.nvfp4 import dequantize, quantize

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def e4m3(code: int) -> float:
    """Value of a positive e4m3fn code, from its definition: bias 7, three mantissa bits, subnormals below 2**-6."""
    exponent, mantissa = code >> 3, code & 7
    return mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


SCALE_CODES = range(1, 0x7F)


def all_pairs() -> tuple[torch.Tensor, torch.Tensor, list[list[float]]]:
    """One row per scale, holding all 16 codes in order; expected products as Python floats."""
    packed = torch.tensor([[low | (low + 1) << 4 for low in range(0, 16, 2)]] * len(SCALE_CODES), dtype=torch.uint8)
    scales = torch.tensor([[code] for code in SCALE_CODES], dtype=torch.uint8).view(torch.float8_e4m3fn)
    return packed, scales, [[value * e4m3(code) for value in E2M1] for code in SCALE_CODES]


@pytest.mark.parametrize("global_scale", [2.0**-11, 1.0, 0.0123456789])
def test_dequantize_every_code_and_scale_equals_float64_table(global_scale):
    packed, scales, table = all_pairs()
    got = dequantize(packed, scales, torch.tensor(global_scale), dtype=torch.float32)
    # Every product of two float32 numbers here is exact in float64; ModelOpt rounds after each of the two.
    whole = torch.tensor(global_scale).double()
    step = torch.tensor([[e4m3(code)] for code in SCALE_CODES], dtype=torch.float64).mul(whole).float().double()
    assert torch.equal(got, (torch.tensor(E2M1, dtype=torch.float64) * step).float())
    exact = torch.tensor(table, dtype=torch.float64) * whole
    assert ((got.double() - exact).abs() <= 2.0**-23 * exact.abs()).all()


def test_dequantize_to_bfloat16_power_of_two_scale_is_exact():
    packed, scales, table = all_pairs()
    got = dequantize(packed, scales, torch.tensor(2.0**-9), dtype=torch.bfloat16)
    assert torch.equal(got.double(), torch.tensor(table, dtype=torch.float64) * 2.0**-9)


def test_dequantize_low_nibble_is_even_column():
    packed = torch.full((1, 8), 0x72, dtype=torch.uint8)  # low nibble 2 is 1.0, high nibble 7 is 6.0
    got = dequantize(packed, torch.ones(1, 1).to(torch.float8_e4m3fn), torch.tensor(1.0), dtype=torch.float32)
    assert got.tolist() == [[1.0, 6.0] * 8]


def test_dequantize_global_scale_aligns_from_the_left():
    packed = torch.full((2, 3, 8), 0x22, dtype=torch.uint8)
    block = torch.ones(2, 3, 1).to(torch.float8_e4m3fn)
    per_expert = dequantize(packed, block, torch.tensor([2.0, 3.0]), dtype=torch.float32)
    assert per_expert[:, :, 0].tolist() == [[2.0] * 3, [3.0] * 3]
    per_row = dequantize(packed, block, torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), dtype=torch.float32)
    assert per_row[:, :, 15].tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


def test_dequantize_many_rows_crosses_chunks_unchanged():
    generator = torch.Generator().manual_seed(1)
    packed = torch.randint(0, 256, (5000, 256), generator=generator, dtype=torch.uint8)
    codes = torch.randint(0x20, 0x60, (5000, 32), generator=generator, dtype=torch.uint8)
    got = dequantize(packed, codes.view(torch.float8_e4m3fn), torch.tensor(1.0), dtype=torch.float32)
    for row, column in ((0, 0), (4095, 511), (4096, 0), (4999, 510), (2500, 17)):
        nibble = packed[row, column // 2].item() >> (4 * (column % 2)) & 0xF
        assert got[row, column].item() == E2M1[nibble] * e4m3(codes[row, column // 16].item())


def test_quantize_values_on_the_grid_come_back_exactly():
    # Row of all 16 values twice; amax 6 * 2**-3 makes block scale and global scale exact.
    weight = torch.tensor([E2M1 * 2]) * 2.0**-3
    assert torch.equal(dequantize(*quantize(weight), dtype=torch.float32), weight)


def test_quantize_ties_go_to_the_even_code():
    # The leading 6 pins the block's scale to one: with amax 6 the global scale is 2**-8 and the block scale 256.
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, 0.0]
    got = dequantize(*quantize(torch.tensor([[6.0, *ties]])), dtype=torch.float32)[0, 1:].tolist()
    assert got == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0, 0.0]


def test_quantize_random_weight_picks_the_nearest_code():
    weight = torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(0)) * 0.07
    packed, block, scale = quantize(weight)
    got = dequantize(packed, block, scale, dtype=torch.float32).double()
    step = (block.double() * scale.double()[:, None, None]).repeat_interleave(16, -1)
    grid = torch.tensor(E2M1, dtype=torch.float64) * step[..., None]
    nearest = (grid - weight.double()[..., None]).abs().amin(-1)
    assert torch.equal((got - weight.double()).abs(), nearest)


def test_quantize_power_of_two_scale_covers_the_largest_weight():
    weight = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(2))
    scale = quantize(weight).global_scale
    for value, amax in zip(scale.tolist(), weight.abs().amax((1, 2)).tolist(), strict=True):
        assert math.log2(value).is_integer()
        assert amax / (6 * 448) <= value < 2 * amax / (6 * 448)


def test_quantize_zero_block_has_positive_scale_and_zero_value():
    weight = torch.zeros(2, 32)
    weight[0, 0] = 1.0
    packed, block, scale = quantize(weight)
    assert (block.float() > 0).all()
    got = dequantize(packed, block, scale, dtype=torch.float32)
    assert got[0, 0].item() == pytest.approx(1.0, rel=0.07)
    assert got.count_nonzero() == 1


def test_quantize_bad_input_is_refused():
    with pytest.raises(ValueError, match="multiple of 16"):
        quantize(torch.zeros(4, 24))
    with pytest.raises(ValueError, match="not finite"):
        quantize(torch.full((4, 16), float("nan")))
