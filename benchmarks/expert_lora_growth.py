"""How a step of one layer's experts with LoRA grows with the number of experts and with the rank.

Every expert gets 16 rows whatever their number, so tokens grow with experts. Times and memory are measured as in
`benchmarks.expert_lora`, in two processes, the sizes taking turns. Memory is that of the step: activations, gradients
of the factors and temporaries, without weights and factors themselves.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.expert_lora import THREADS, environment, measured
from benchmarks.figures import Figure

NAME = "expert_lora_growth"
WIDTH, TOP_K, ROWS = 256, 4, 16
EXPERTS, RANKS = (16, 64, 256), (8, 32, 128)
REPEATS = 7
_CASES = tuple(dict.fromkeys([*((experts, 32) for experts in EXPERTS), *((64, rank) for rank in RANKS)]))
SIZES = (
    f"one layer's experts alone, latent and expert width {WIDTH}, top {TOP_K}, {ROWS} rows an expert, fp32, {THREADS} "
    "threads; forward and backward; R² of a straight line through the three points"
)
_STRAIGHT = 0.99


def run() -> list[Figure]:
    """Measure all sizes, and fit a line through each three."""
    seconds = _measure("seconds")
    memory = _measure("bytes")
    figures = []
    for what, cases, varied in (
        ("experts", [(experts, 32) for experts in EXPERTS], EXPERTS),
        ("ranks", [(64, rank) for rank in RANKS], RANKS),
    ):
        for unit, scale, found in (("ms", 1e3, seconds), ("MiB", 2**-20, memory)):
            values = [scale * found[case] for case in cases]
            slope, constant, straight = line(varied, values)
            figures += [
                Figure(benchmark=NAME, case=f"{experts} experts, rank {rank}", value=value, unit=unit)
                for (experts, rank), value in zip(cases, values, strict=True)
            ]
            figures.append(
                Figure(
                    benchmark=NAME,
                    case=f"line over {what}: {constant:.3g} {unit} + {slope:.3g} {unit} each",
                    value=slope,
                    unit=f"{unit} each",
                    ratio=straight,
                    meaning="R²",
                    at_least=_STRAIGHT,
                )
            )
    return figures


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float]:
    """Least squares: slope, constant and R²."""
    slope, constant = statistics.linear_regression(x, y)
    return slope, constant, statistics.correlation(x, y) ** 2


def _measure(what: str) -> dict[tuple[int, int], float]:
    command = [sys.executable, "-m", "benchmarks.expert_lora_growth", what]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment(what)).stdout
    found: list[list[float]] = json.loads(answer)
    return {case: statistics.median(values) for case, values in zip(_CASES, found, strict=True)}


def _work(what: str) -> None:
    steps = [_layer(*case) for case in _CASES]
    turns = [[measured(step, what) for step in steps] for _ in range(1 + REPEATS)]
    print(json.dumps(list(zip(*turns[1:], strict=True))))  # the first one warms up


def _layer(experts: int, rank: int) -> Any:
    import torch
    from torch import nn

    from sparkrl.models.experts import ExpertFactors, RoutedExperts, run_experts

    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    base = RoutedExperts()
    base.num_experts, base.hidden_dim, base.intermediate_dim, base.act_fn = experts, WIDTH, WIDTH, nn.SiLU()
    base.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) * WIDTH**-0.5, requires_grad=False)
    base.down_proj = nn.Parameter(torch.randn(experts, WIDTH, WIDTH) * WIDTH**-0.5, requires_grad=False)
    shapes = ((rank, WIDTH), (2 * WIDTH, rank), (rank, WIDTH), (WIDTH, rank))
    leaves = [(torch.randn(experts, *shape) * 0.05).requires_grad_() for shape in shapes]
    tokens = experts * ROWS // TOP_K
    # every expert gets just as many rows: token t goes to experts t * K ... t * K + K - 1, around
    ids = (torch.arange(tokens)[:, None] * TOP_K + torch.arange(TOP_K)) % experts
    x, weights = torch.randn(tokens, WIDTH, requires_grad=True), torch.full((tokens, TOP_K), 1 / TOP_K)

    def step() -> None:
        run_experts(base, x, ids, weights, ExpertFactors(*leaves, scale=2.0)).sum().backward()
        for leaf in (x, *leaves):
            leaf.grad = None

    return step


if __name__ == "__main__":
    _work(sys.argv[1])
