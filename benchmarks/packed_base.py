"""`trainer.base=packed` against `bf16`: bytes that a layer's experts hold, and time of a pass forward and backward.

Packed weights are expanded twice a step, whose cost does not depend on the number of tokens, so it weighs less the more
tokens a step has.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import MuseSparkTextConfig

from benchmarks.figures import Figure
from benchmarks.timing import medians, threads
from sparkrl.models.experts import ExpertFactors, run_experts
from sparkrl.models.muse_spark import Experts
from sparkrl.quant.nvfp4 import quantize
from sparkrl.quant.packed import Packed
from sparkrl.trainer.packed_experts import hold_packed

NAME = "packed_base"
THREADS, RANK, TOP_K = 2, 32, 4
EXPERTS, LATENT, INNER = 64, 512, 256
TOKENS = (256, 4096)
REPEATS = 5
_PARAMETERS = EXPERTS * 3 * LATENT * INNER
SIZES = (
    f"one layer of {EXPERTS} experts ({_PARAMETERS / 1e6:.0f}M parameters), top {TOP_K}, latent {LATENT}, "
    f"width {INNER}, rank {RANK}, bf16, {THREADS} threads"
)
_MEMORY = 1 / 3.5


def run() -> list[Figure]:
    """Measure both."""
    with threads(THREADS):
        return _measure()


def _measure() -> list[Figure]:
    plain, packed = _layers()
    held = {
        name: sum(p.nbytes for p in layer.parameters(recurse=False))
        for name, layer in (("bf16", plain), ("packed", packed))
    }
    figures = [
        Figure(benchmark=NAME, case="memory: bf16", value=held["bf16"] / 2**20, unit="MiB"),
        Figure(
            benchmark=NAME,
            case="memory: packed",
            value=held["packed"] / 2**20,
            unit="MiB",
            ratio=held["packed"] / held["bf16"],
            meaning="its bytes / bf16's",
            at_most=_MEMORY,
        ),
    ]
    for tokens in TOKENS:
        steps = {"bf16": _step(plain, tokens), "packed": _step(packed, tokens)}
        assert all(torch.equal(*pair) for pair in zip(*(step() for step in steps.values()), strict=True))
        seconds = medians(steps, repeats=REPEATS)
        for name, value in seconds.items():
            ratio = None if name == "bf16" else value / seconds["bf16"]
            figures.append(
                Figure(
                    benchmark=NAME,
                    case=f"step, {tokens} tokens: {name}",
                    value=1e3 * value,
                    unit="ms",
                    ratio=ratio,
                    meaning="" if ratio is None else "its time / bf16's",
                )
            )
    return figures


def _layers() -> tuple[Experts, Experts]:
    """The same weights twice: dequantized, and packed."""
    config = MuseSparkTextConfig(
        moe_hidden_size=LATENT, moe_intermediate_size=INNER, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    generator = torch.Generator().manual_seed(0)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        plain, packed = Experts(config), Experts(config)
    finally:
        torch.set_default_dtype(previous)
    forms = {}
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(plain, name)
        forms[name] = Packed(*quantize(torch.randn(weight.shape, generator=generator) * 0.05))
        weight.data = forms[name].dequantize(dtype=torch.bfloat16)
    hold_packed(packed, forms, torch.bfloat16)
    for layer in (plain, packed):
        torch.nn.init.zeros_(layer.post_expert_norm.weight)
        layer.requires_grad_(False)
    return plain, packed


def _step(layer: Experts, tokens: int) -> Callable[[], list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((EXPERTS, RANK, LATENT), (EXPERTS, 2 * INNER, RANK), (EXPERTS, RANK, INNER), (EXPERTS, LATENT, RANK))
    factors = [(torch.randn(shape, generator=generator) * 0.05).requires_grad_() for shape in shapes]
    x_TH = torch.randn((tokens, LATENT), generator=generator).bfloat16().requires_grad_()
    ids_TK = torch.rand((tokens, EXPERTS), generator=generator).topk(TOP_K).indices
    weights_TK = torch.full((tokens, TOP_K), 1 / TOP_K)

    def step() -> list[Tensor]:
        out_TH = run_experts(layer, x_TH, ids_TK, weights_TK, ExpertFactors(*factors, scale=2.0))
        return list(torch.autograd.grad(out_TH.float().square().sum(), [x_TH, *factors]))

    return step
