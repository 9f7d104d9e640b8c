"""The Triton kernel on a GPU: the bits of the CPU, for every code and scale and for large weights."""

import pytest
import torch

from sparkrl.quant.nvfp4 import _expand, dequantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


@pytest.mark.parametrize("divide", [False, True])
@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_gpu_dequantize_every_code_and_scale_has_the_bits_of_the_cpu(dtype, divide):
    packed = torch.arange(256, dtype=torch.uint8).repeat(0x7E, 1)
    blocks = torch.arange(1, 0x7F, dtype=torch.uint8)[:, None].repeat(1, 32)
    for value in (1.0, 2.0**-9, 0.0123456, 3.7e-5, 1.1e-38, 3e-41):
        each_row = torch.full((len(packed),), value)
        wanted = torch.empty((len(packed), 512), dtype=dtype)
        _expand(packed, blocks, each_row, wanted, divide)
        for scale in (each_row, torch.tensor(value)):
            found = dequantize(packed.cuda(), blocks.cuda(), scale.cuda(), dtype=dtype, divide=divide).cpu()
            same = (found.view(BITS[dtype]) == wanted.view(BITS[dtype])) | (found.isnan() & wanted.isnan())
            assert same.all(), (value, scale.ndim)


def test_gpu_dequantize_stack_with_odd_rows_equals_the_cpu_and_the_torch_fallback():
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (5, 1022, 1000), generator=generator, dtype=torch.uint8)
    blocks = torch.randint(1, 0x7F, (5, 1022, 125), generator=generator, dtype=torch.uint8)
    scales = torch.rand((5, 2), generator=generator) * 1e-3
    wanted = dequantize(packed, blocks, scales, dtype=torch.bfloat16)
    on_gpu = [value.cuda() for value in (packed, blocks, scales)]
    assert torch.equal(dequantize(*on_gpu, dtype=torch.bfloat16).cpu(), wanted)
    out = torch.empty_like(wanted, device="cuda")
    row_scale = on_gpu[2].repeat_interleave(511, dim=1).view(-1)
    _expand(on_gpu[0].view(-1, 1000), on_gpu[1].view(-1, 125), row_scale, out.view(-1, 2000), False)
    assert torch.equal(out.cpu(), wanted)
