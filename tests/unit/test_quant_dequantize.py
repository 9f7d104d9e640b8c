"""Every path of the dequantization gives the bits of a look-up worked out here in float64."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from sparkrl.quant import dequantize_cpu, nvfp4
from sparkrl.quant.nvfp4 import dequantize

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
# the last two make subnormal float32 and bfloat16 results
GLOBAL_SCALES = (1.0, 2.0**-9, 0.0123456, 3.7e-5, 7.3e11, 1.1e-38, 3e-41)
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def e4m3(codes):
    """Values of e4m3 bytes, from the format's definition; NaN at 0x7f and 0xff."""
    codes = np.asarray(codes, dtype=np.int64)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    return np.where(codes & 127 == 127, np.nan, np.where(codes & 128, -value, value))


def bf16_bits(values):
    """Bits of float32 numbers rounded to bfloat16, to nearest and ties to even."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(np.int16)


def expected(packed, blocks, row_scale, divide=False):
    """float32 [rows, width]: block scale times global scale, rounded; times the code, rounded.

    The product of two float32 numbers is exact in float64, so rounding it to float32 is one correct rounding; so is
    that of a quotient (53 bits are more than twice 24).
    """
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    scale = np.asarray(row_scale, np.float32)[:, None].astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        step = (e4m3(blocks) / scale if divide else e4m3(blocks) * scale).astype(np.float32)
        return (E2M1[codes] * np.repeat(step, 16, axis=1).astype(np.float64)).astype(np.float32)


def every_code_and_scale():
    """All 256 bytes of codes under each of the 252 finite e4m3 scales that are not zero."""
    scales = np.array([code for code in range(256) if code & 127 not in (0, 127)], dtype=np.uint8)
    packed = np.tile(np.arange(256, dtype=np.uint8), (len(scales), 1))
    return packed, np.repeat(scales[:, None], 32, axis=1)


def paths():
    """The torch operations and the compiled loop."""
    return [nvfp4._expand, dequantize_cpu.expand]


@pytest.mark.parametrize("path", paths(), ids=["torch", "compiled"])
@pytest.mark.parametrize("scale", GLOBAL_SCALES)
def test_dequantize_every_code_and_scale_has_the_reference_bits(path, scale):
    packed, blocks = every_code_and_scale()
    row_scale = np.full(len(packed), scale, np.float32)
    wanted = expected(packed, blocks, row_scale)
    found = torch.empty(wanted.shape, dtype=torch.float32)
    path(torch.from_numpy(packed), torch.from_numpy(blocks), torch.from_numpy(row_scale), found, False)
    assert np.array_equal(found.numpy().view(np.int32), wanted.view(np.int32))
    rounded = torch.empty(wanted.shape, dtype=torch.bfloat16)
    path(torch.from_numpy(packed), torch.from_numpy(blocks), torch.from_numpy(row_scale), rounded, False)
    finite = np.isfinite(wanted)
    assert np.array_equal(rounded.view(torch.int16).numpy()[finite], bf16_bits(wanted)[finite])


@pytest.mark.parametrize("path", paths(), ids=["torch", "compiled"])
def test_dequantize_code_eight_is_negative_zero(path):
    found = torch.ones((1, 16), dtype=torch.bfloat16)
    codes, blocks = torch.full((1, 8), 0x80, dtype=torch.uint8), torch.full((1, 1), 0x38, dtype=torch.uint8)
    path(codes, blocks, torch.tensor([0.3]), found, False)
    assert found.view(torch.int16).tolist() == [[0, -(2**15)] * 8]


def random_weight(rows, half, seed=0):
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (*rows, half), generator=generator, dtype=torch.uint8)
    blocks = torch.randint(1, 0x7F, (*rows, half // 8), generator=generator, dtype=torch.uint8)
    return packed, blocks.view(torch.float8_e4m3fn)


def flat_expected(packed, blocks, row_scale):
    codes = packed.reshape(-1, packed.shape[-1]).numpy()
    scales = blocks.view(torch.uint8).reshape(-1, blocks.shape[-1]).numpy()
    return torch.from_numpy(expected(codes, scales, row_scale.numpy())).view(*packed.shape[:-1], -1)


@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_dequantize_large_stack_with_odd_rows_and_two_scales_an_expert_equals_the_reference(dtype, threads):
    packed, blocks = random_weight((3, 1022), 256)
    assert packed.numel() >= nvfp4._COMPILED_BYTES  # the compiled loop
    scale_E2 = torch.tensor([[0.7, 1.3], [1.3, 1.3], [2.0**-5, 0.011]])
    row_scale = scale_E2.repeat_interleave(511, dim=1).reshape(-1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = dequantize(packed, blocks, scale_E2, dtype=dtype)
    finally:
        torch.set_num_threads(before)
    wanted = flat_expected(packed, blocks, row_scale).to(dtype)
    assert torch.equal(found.view(BITS[dtype]), wanted.view(BITS[dtype]))


def test_dequantize_one_scale_a_row_falls_back_and_equals_the_reference():
    packed, blocks = random_weight((1031,), 256)
    row_scale = torch.rand(1031, generator=torch.Generator().manual_seed(1)) + 0.1
    assert packed.numel() >= nvfp4._COMPILED_BYTES and not dequantize_cpu.pays(packed, row_scale)
    found = dequantize(packed, blocks, row_scale, dtype=torch.float32)
    assert torch.equal(found, flat_expected(packed, blocks, row_scale))


@pytest.mark.parametrize("rows", [7, 4097], ids=["small", "large"])
def test_dequantize_slices_and_strided_output_equal_the_reference(rows):
    packed, blocks = random_weight((rows,), 160)
    packed, blocks = packed[1::2, 32:], blocks[1::2, 4:]
    scale = torch.tensor(0.37)
    wanted = flat_expected(packed.contiguous(), blocks.contiguous(), torch.full((len(packed),), 0.37))
    out = torch.zeros((len(packed), 2 * wanted.shape[1]))[:, ::2]
    assert not out.is_contiguous()
    assert dequantize(packed, blocks, scale, dtype=torch.float32, out=out) is out
    assert torch.equal(out, wanted)
    whole = torch.zeros(wanted.shape)
    assert dequantize(packed, blocks, scale, dtype=torch.float32, out=whole) is whole and torch.equal(whole, wanted)


@pytest.mark.parametrize("shape", [(0, 16), (4, 0), (3, 0, 16)])
def test_dequantize_empty_weight_is_empty(shape):
    blocks = torch.zeros((*shape[:-1], shape[-1] // 8), dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.ones(shape[0]) if len(shape) == 3 else torch.tensor(1.0)
    found = dequantize(torch.zeros(shape, dtype=torch.uint8), blocks, scale, dtype=torch.bfloat16)
    assert found.shape == (*shape[:-1], 2 * shape[-1]) and found.dtype == torch.bfloat16


def test_dequantize_output_of_another_form_is_refused():
    packed, blocks = random_weight((4,), 16)
    for out in (torch.empty(4, 31), torch.empty((4, 32), dtype=torch.float16)):
        with pytest.raises(ValueError, match="`out` must be"):
            dequantize(packed, blocks, torch.tensor(1.0), dtype=torch.float32, out=out)


def test_dequantize_dividing_scale_divides_the_block_scale_first():
    packed, blocks = random_weight((1024,), 256, seed=3)
    scale = np.float32(347.3)
    wanted = expected(packed.numpy(), blocks.view(torch.uint8).numpy(), np.full(1024, scale), divide=True)
    for part in (slice(0, 5), slice(0, 1024)):  # torch operations, compiled loop
        found = dequantize(packed[part], blocks[part], torch.tensor(scale), dtype=torch.float32, divide=True)
        assert np.array_equal(found.numpy(), wanted[part])


@pytest.mark.parametrize("divide", [False, True])
def test_dequantize_triton_kernel_interpreted_has_the_bits_of_torch(divide):
    pytest.importorskip("triton")
    # The interpreter truncates to bfloat16 where a GPU rounds, so that type is compared in tests/gpu.
    code = f"""
import torch
from sparkrl.quant import dequantize_triton, nvfp4
codes = torch.arange(256, dtype=torch.uint8).repeat(129, 1)
scales = torch.arange(1, 130, dtype=torch.uint8).clamp(max=126)[:, None].repeat(1, 32)
for scale in {GLOBAL_SCALES}:
    rows = torch.full((129,), scale)
    rows[::3] = 0.7
    for dtype, bits in ((torch.float32, torch.int32), (torch.float16, torch.int16)):
        wanted, found = (torch.empty((129, 512), dtype=dtype) for _ in range(2))
        nvfp4._expand(codes, scales, rows, wanted, {divide})
        dequantize_triton.expand(codes, scales, rows, found, {divide})
        same = (found.view(bits) == wanted.view(bits)) | (found.isnan() & wanted.isnan())
        assert same.all(), (scale, dtype)
print("same")
"""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "same", done.stderr[-2000:]


def test_dequantize_one_scale_for_all_rows_is_laid_out_once_a_row():
    # kernels read it row by row; a view of one number would have them read what lies behind it
    scales = nvfp4._row_scales(torch.tensor(0.5), [3])
    assert scales.tolist() == [0.5] * 3 and scales.is_contiguous()
