"""Experts with LoRA on CUDA's grouped kernel: against float64 on the CPU, and against themselves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu_expert_lora import kernel_errors
from sparkrl.models.experts import ExpertFactors, RoutedExperts, run_experts

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("backend", "own_kernels"), [(None, False), ("inductor", False), ("inductor", True)])
def test_gpu_experts_in_bfloat16_are_near_float64_with_experts_that_have_no_row(backend, own_kernels):
    errors = kernel_errors("cuda", backend, own_kernels=own_kernels)
    assert max(errors.values()) <= 2e-2, errors


@pytest.mark.parametrize(("backend", "own_kernels"), [(None, False), ("inductor", False), ("inductor", True)])
@pytest.mark.parametrize("rank", [4, 32])  # 4 takes the reference path: its rows are no multiple of 16 bytes
def test_gpu_experts_give_equal_bits_twice(rank, backend, own_kernels):
    generator = torch.Generator("cuda").manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16() * 0.1

    base = RoutedExperts()
    base.num_experts, base.hidden_dim, base.intermediate_dim, base.act_fn = 32, 256, 128, nn.SiLU()
    base.compile_backend, base.own_kernels = backend, own_kernels
    base.gate_up_proj = nn.Parameter(noise(32, 256, 256), requires_grad=False)
    base.down_proj = nn.Parameter(noise(32, 256, 128), requires_grad=False)
    ids = torch.rand(500, 32, generator=generator, device="cuda").argsort(-1)[:, :4]
    shapes = ((500, 256), (500, 4), (32, rank, 256), (32, 256, rank), (32, rank, 128), (32, 256, rank))
    leaves = [noise(*shape).requires_grad_() for shape in shapes]
    runs = []
    for _ in range(2):
        out = run_experts(base, leaves[0], ids, leaves[1], ExpertFactors(*leaves[2:], scale=2.0))
        runs.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
