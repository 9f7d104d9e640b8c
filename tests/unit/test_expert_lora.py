"""The experts' one function: against each expert alone in float64, against its differentiable parts, at the edges."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from torch.utils.checkpoint import checkpoint

from sparkrl.models.experts import ExpertFactors, RoutedExperts, composed_experts, run_experts
from sparkrl.models.grouped import GroupedRows, grouped_linear
from sparkrl.models.muse_spark import InputScaledNorm

EXPERTS, WIDTH, INNER, TOP_K = 6, 12, 8, 2
SCALE = 1.5


class Frozen(RoutedExperts):
    """Experts of any floating type, with or without the norm."""

    def __init__(self, dtype: torch.dtype, *, norm: bool, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.num_experts, self.hidden_dim, self.intermediate_dim = EXPERTS, WIDTH, INNER
        self.act_fn = nn.SiLU()
        self.gate_up_proj = nn.Parameter(_noise((EXPERTS, 2 * INNER, WIDTH), generator, dtype), requires_grad=False)
        self.down_proj = nn.Parameter(_noise((EXPERTS, WIDTH, INNER), generator, dtype), requires_grad=False)
        if norm:
            self.post_expert_norm = InputScaledNorm(WIDTH, eps=1e-5)
            self.post_expert_norm.weight = nn.Parameter(_noise((WIDTH,), generator, dtype), requires_grad=False)


def _noise(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return (0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def _inputs(ids: Tensor, rank: int, dtype: torch.dtype, *, seed: int = 1) -> list[Tensor]:
    """Input, routing weights and the four factors, all leaves that want a gradient."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (len(ids), WIDTH),
        tuple(ids.shape),
        (EXPERTS, rank, WIDTH),
        (EXPERTS, 2 * INNER, rank),
        (EXPERTS, rank, INNER),
        (EXPERTS, WIDTH, rank),
    ]
    return [_noise(shape, generator, dtype).requires_grad_() for shape in shapes]


def _ours(base: Frozen, ids: Tensor, x: Tensor, weights: Tensor, *factors: Tensor) -> Tensor:
    return run_experts(base, x, ids, weights, ExpertFactors(*factors, scale=SCALE) if factors else None)


def _alone(base: Frozen, ids: Tensor, x: Tensor, weights: Tensor, a1: Tensor, b1: Tensor, a2: Tensor, b2: Tensor):
    """Every token through each of its experts alone, with merged weights, in float64."""
    gate_up = base.gate_up_proj.double() + SCALE * b1.double() @ a1.double()
    down = base.down_proj.double() + SCALE * b2.double() @ a2.double()
    rows = []
    for token, experts in enumerate(ids.tolist()):
        total = torch.zeros(WIDTH, dtype=torch.float64)
        for slot, expert in enumerate(experts):
            gate, up = linear(x[token].double(), gate_up[expert]).chunk(2)
            y = linear(silu(gate) * up, down[expert])
            if base.norm is not None:
                y = y * (1 + base.norm.weight.double())
                y = y / torch.sqrt((y * y).mean() + base.norm.eps)
            total = total + weights[token, slot].double() * y
        rows.append(total)
    return torch.stack(rows)


def _routes(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    spread = torch.rand(40, EXPERTS, generator=generator).argsort(-1)[:, :TOP_K]
    return {
        "spread": spread,
        "one token": spread[:1],
        "one pair of experts": torch.tensor([[4, 1]]).expand(40, 2),
        "one busy expert": torch.cat([torch.tensor([[3, 0]]).expand(60, 2), spread[:5]]),
        "empty experts": torch.where(spread == 2, 3, spread).clamp(max=4),
    }[kind]


ROUTES = ["spread", "one token", "one pair of experts", "one busy expert", "empty experts"]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("kind", ROUTES)
def test_experts_value_and_gradients_equal_each_expert_alone_in_float64(kind, norm):
    ids, base = _routes(kind), Frozen(torch.float32, norm=norm)
    inputs = _inputs(ids, 3, torch.float32)
    got, want = _ours(base, ids, *inputs), _alone(base, ids, *inputs)
    pull = torch.randn(want.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert (got - want).abs().max() <= 1e-5
    found = torch.autograd.grad((got * pull).sum(), inputs)
    wanted = torch.autograd.grad((want * pull).sum(), inputs)
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= 1e-5 * max(1.0, float(other.abs().max()))


@pytest.mark.parametrize("rank", [1, 3, 4])
@pytest.mark.parametrize("norm", [True, False])
def test_experts_gradients_agree_with_differences(rank, norm):
    ids, base = _routes("one busy expert")[55:], Frozen(torch.float64, norm=norm)
    inputs = _inputs(ids, rank, torch.float64)
    assert torch.autograd.gradcheck(lambda *tensors: _ours(base, ids, *tensors), inputs)
    assert torch.autograd.gradcheck(lambda *tensors: _ours(base, ids, *tensors), inputs[:2])


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-6), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("norm", [True, False])
def test_experts_equal_their_differentiable_parts(dtype, limit, norm):
    ids, base = _routes("spread"), Frozen(dtype, norm=norm)
    inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in _inputs(ids, 4, torch.float64)]
    rows = GroupedRows.sort(ids, EXPERTS)
    one = _ours(base, ids, *inputs)
    other = composed_experts(base, inputs[0], rows, inputs[1], ExpertFactors(*inputs[2:], scale=SCALE))
    pull = torch.randn(one.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    found, wanted = (torch.autograd.grad((out * pull).sum(), inputs) for out in (one, other))
    for got, want in zip([one, *found], [other, *wanted], strict=True):
        assert got.dtype == want.dtype
        assert (got - want).detach().abs().max() <= limit * max(1.0, float(want.detach().abs().max()))


def test_experts_in_bfloat16_are_as_exact_as_their_parts():
    ids, base = _routes("spread"), Frozen(torch.bfloat16, norm=True)
    inputs = [tensor.detach().bfloat16() for tensor in _inputs(ids, 4, torch.float64)]
    want = _alone(base, ids, *inputs)
    rows = GroupedRows.sort(ids, EXPERTS)
    one = _ours(base, ids, *inputs)
    other = composed_experts(base, inputs[0], rows, inputs[1], ExpertFactors(*inputs[2:], scale=SCALE))
    assert (one - want).square().mean() <= 1.1 * (other - want).square().mean()


def test_experts_factors_in_float32_get_float32_gradients_under_bfloat16():
    ids, base = _routes("spread"), Frozen(torch.bfloat16, norm=True)
    x, weights, *factors = _inputs(ids, 4, torch.float32)
    _ours(base, ids, x.detach().bfloat16(), weights, *factors).sum().backward()
    assert {tensor.grad.dtype for tensor in [weights, *factors]} == {torch.float32}


def test_experts_under_gradient_checkpointing_give_equal_bits():
    ids, base = _routes("spread"), Frozen(torch.float32, norm=True)
    inputs = _inputs(ids, 3, torch.float32)
    plain = _ours(base, ids, *inputs)
    again = checkpoint(lambda *tensors: _ours(base, ids, *tensors), *inputs, use_reentrant=False)
    assert torch.equal(plain, again)
    for one, other in zip(
        torch.autograd.grad(plain.square().sum(), inputs),
        torch.autograd.grad(again.square().sum(), inputs),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_experts_backward_over_a_kept_graph_gives_equal_bits_again():
    ids, base = _routes("spread"), Frozen(torch.float32, norm=True)
    inputs = _inputs(ids, 3, torch.float32)
    loss = _ours(base, ids, *inputs).square().sum()
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    again = torch.autograd.grad(loss, inputs)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_experts_weights_are_asked_for_again_in_backward_and_not_kept():
    class Counting(Frozen):
        asked = 0

        def weights(self) -> tuple[Tensor, Tensor]:
            self.asked += 1
            return self.gate_up_proj.clone(), self.down_proj.clone()

    ids, base = _routes("spread"), Counting(torch.float32, norm=True)
    inputs = _inputs(ids, 3, torch.float32)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        out = _ours(base, ids, *inputs)
    assert base.asked == 1
    assert not any(tensor.shape == base.gate_up_proj.shape for tensor in saved)
    out.sum().backward()
    assert base.asked == 2


def test_experts_zero_tokens_give_nothing_and_zero_gradients():
    ids, base = torch.zeros(0, TOP_K, dtype=torch.int64), Frozen(torch.float32, norm=True)
    inputs = _inputs(ids, 3, torch.float32)
    out = _ours(base, ids, *inputs)
    assert out.shape == (0, WIDTH)
    out.sum().backward()
    assert all(tensor.grad.abs().sum() == 0 for tensor in inputs)


def test_experts_trained_base_weights_get_gradients():
    ids, base = _routes("spread"), Frozen(torch.float64, norm=True)
    base.requires_grad_(True)
    inputs = _inputs(ids, 3, torch.float64)
    _ours(base, ids, *inputs).square().sum().backward()
    got = [base.gate_up_proj.grad, base.down_proj.grad, base.norm.weight.grad]
    base.zero_grad()
    _alone(base, ids, *inputs).square().sum().backward()
    for one, other in zip(got, [base.gate_up_proj.grad, base.down_proj.grad, base.norm.weight.grad], strict=True):
        assert (one - other).abs().max() <= 1e-5  # the norm of the differentiable parts is float32


@pytest.mark.parametrize("kind", ROUTES)
def test_grouped_rows_hold_every_pair_once_and_zeros_elsewhere(kind):
    ids = _routes(kind)
    rows = GroupedRows.sort(ids, EXPERTS)
    assert rows.inverse_TK.unique().numel() == ids.numel()
    x = torch.arange(1.0, len(ids) + 1)[:, None]
    taken = rows.take(x)
    assert torch.equal(taken[rows.inverse_TK].squeeze(-1), x.expand(-1, TOP_K))
    assert taken.count_nonzero() == ids.numel()
    spans = {e: set(range(e * rows.capacity, (e + 1) * rows.capacity)) for e in range(EXPERTS)}
    for expert, start, end in rows.extra:
        spans[expert] |= set(range(start, end))
    assert all(int(row) in spans[int(e)] for row, e in zip(rows.inverse_TK.flatten(), ids.flatten(), strict=True))


def test_grouped_rows_one_busy_expert_is_not_padded_to():
    rows = GroupedRows.sort(torch.cat([torch.zeros(1000, 1, dtype=torch.int64), torch.arange(64)[:, None]]), 64)
    assert rows.capacity <= 1 and len(rows.token_M) <= 1000 + 64


@pytest.mark.parametrize("kind", ROUTES)
def test_grouped_linear_without_the_padded_block_gives_the_same(kind):
    ids, base = _routes(kind), Frozen(torch.float64, norm=False)
    padded = GroupedRows.sort(ids, EXPERTS)
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    # the layout of CUDA, by its reference path
    plain = dataclasses.replace(
        padded, token_M=order // TOP_K, inverse_TK=inverse.view_as(ids), capacity=0, padded=False, extra_counts=None
    )
    x = _noise((len(ids), WIDTH), torch.Generator().manual_seed(3), torch.float64).requires_grad_()
    weight = base.gate_up_proj.detach().clone().requires_grad_()
    results = []
    for rows in (padded, plain):
        out = grouped_linear(rows.gather(x), weight, rows)[rows.inverse_TK]
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, weight])])
    for one, other in zip(*results, strict=True):
        assert (one - other).abs().max() <= 1e-12
