"""The experts' Triton kernels, run by Triton's interpreter where it is installed; on a GPU see tests/gpu."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# The interpreter multiplies the bits of bfloat16 as integers, so float16 stands for both 16-bit types.
CODE = """
import torch
from sparkrl.models import expert_kernels as kernels

kernels._ORDER_BLOCK = 16  # several blocks of few pairs

torch.manual_seed(0)
experts, tokens, top_k, width, out_width, rank = 6, 21, 2, 40, 72, 4
ids = torch.rand(tokens, experts - 1).argsort(-1)[:, :top_k]
ids += (ids >= 2).long()  # an expert between others has no row
expert_M, pair_M = torch.sort(ids.flatten(), stable=True)
pair, row, ends = kernels.order(ids.flatten(), experts)
assert torch.equal(pair.long(), pair_M)
assert torch.equal(row.long()[pair_M], torch.arange(len(pair_M)))
assert torch.equal(ends.long(), torch.bincount(ids.flatten(), minlength=experts).cumsum(0))

token_M, num_rows, through = pair_M // top_k, len(pair_M), (pair, top_k)
x, y = torch.randn(tokens, width).half(), torch.randn(num_rows, out_width).half()
low = torch.randn(num_rows, rank).half()
weight, b = torch.randn(experts, out_width, width).half(), torch.randn(experts, out_width, rank)


def near(found, wanted, limit):
    assert found.shape == wanted.shape
    distance = float((found.double() - wanted).norm() / wanted.norm())
    assert distance < limit, distance


def summed(left, right):
    shape = experts, left.shape[1], right.shape[1]
    return torch.zeros(shape, dtype=torch.float64).index_add_(0, expert_M, left[:, :, None] * right[:, None])


wide_x, wide_y, wide_low, wide_weight = x.double()[token_M], y.double(), low.double(), weight.double()[expert_M]
delta = torch.einsum("mr,mor->mo", wide_low, b.half().double()[expert_M])
for tile in (None, kernels.Tile(16, 32, 32, 4, 2), kernels.Tile(16, 64, 16, 4, 2, group=1)):
    found = kernels.multiply(
        x, weight.mT, ends, num_rows, through, scale=0.5, low_MR=low, b_ERO=b.mT, tile=tile
    )
    near(found, 0.5 * torch.einsum("mi,moi->mo", wide_x, wide_weight) + delta, 5e-4)
    found = kernels.multiply(y, weight, ends, num_rows, tile=tile)
    near(found, torch.einsum("mo,moi->mi", wide_y, wide_weight), 5e-4)
    near(kernels.outer(low, x, ends, torch.float32, through, tile=tile), summed(wide_low, wide_x), 1e-6)
    near(kernels.outer(y, low, ends, torch.float32, tile=tile), summed(wide_y, wide_low), 1e-6)

# as replay hands over the ids of one slot: a view of all layers' ids
strided = torch.randint(0, experts, (40, 3, 1))[:, 1].reshape(-1)
assert not strided.is_contiguous()
pair, row, ends = kernels.order(strided, experts)
assert torch.equal(pair.long(), torch.sort(strided, stable=True).indices)
assert torch.equal(ends.long(), torch.bincount(strided, minlength=experts).cumsum(0))
assert kernels.order(strided[:0], experts)[2].tolist() == [0] * experts

# every expert's rows fill their blocks, so that the last one's slot is the last there is
full = torch.arange(experts).repeat_interleave(16)
left, right = torch.randn(width, len(full)).half().t(), torch.randn(len(full), 2 * out_width).half()[:, ::2]
low, b = torch.randn(len(full), 5).half().t().contiguous().t(), torch.randn(experts, out_width, 5)
assert not left.is_contiguous() and not right.is_contiguous() and not low.is_contiguous()
expert_M, (_, _, ends) = full, kernels.order(full, experts)
tile = kernels.Tile(16, 32, 32, 4, 2, group=1)
found = kernels.multiply(left, weight.mT, ends, len(full), low_MR=low, b_ERO=b.mT, tile=tile)
wanted = torch.einsum("mi,moi->mo", left.double(), weight.double()[full])
near(found, wanted + torch.einsum("mr,mor->mo", low.double(), b.half().double()[full]), 5e-4)
near(kernels.outer(right, left, ends, torch.float32), summed(right.double(), left.double()), 1e-6)
print("near")
"""


def test_expert_kernels_interpreted_equal_float64_with_odd_widths_and_an_empty_expert():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", CODE], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "near", done.stderr[-2000:]
