"""Log-probs from the head without all logits: memory and time on a GPU. `python -m benchmarks.gpu_head --out FILE`.

Legend: T token, V vocabulary, H hidden width.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparkrl.models.head import token_log_probs

TOKENS, VOCABULARY, WIDTH = 8192, 200_000, 4096
MULTIPLIER, CAP = 0.7, 20.0


def plain(hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor) -> Tensor:
    """The same log-probs through every logit in float32."""
    logits = CAP * torch.tanh((hidden_TH @ weight_VH.T).float() * (MULTIPLIER / CAP))
    return logits.log_softmax(-1).gather(1, targets_T[:, None])[:, 0]


def chunked(hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor) -> Tensor:
    """As the trainer computes them."""
    return token_log_probs(hidden_TH, weight_VH, targets_T, multiplier=MULTIPLIER, cap=CAP, temperature=1.0)[0]


def measure(compute: Callable[..., Tensor], hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor) -> dict[str, Any]:
    """Milliseconds and GiB above the inputs of log-probs and their gradient, and both results."""
    times, peak = [], 0.0
    for _ in range(4):
        hidden_TH.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        log_probs = compute(hidden_TH, weight_VH, targets_T)
        log_probs.sum().backward()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended))
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    assert hidden_TH.grad is not None
    return {"ms": statistics.median(times[1:]), "peak_gib": peak, "results": (log_probs.detach(), hidden_TH.grad)}


def main() -> None:
    """Measure and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench_gpu_head.json"))
    args = parser.parse_args()
    torch.manual_seed(0)
    hidden_TH = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight_VH = (torch.randn(VOCABULARY, WIDTH, device="cuda") * WIDTH**-0.5).bfloat16()
    targets_T = torch.randint(VOCABULARY, (TOKENS,), device="cuda")
    found = {f.__name__: measure(f, hidden_TH, weight_VH, targets_T) for f in (chunked, plain)}
    (ours, our_slope), (all_logits, slope) = (figures.pop("results") for figures in found.values())
    result = found | {
        "tokens": TOKENS,
        "vocabulary": VOCABULARY,
        "width": WIDTH,
        "one_float32_logits_tensor_gib": TOKENS * VOCABULARY * 4 / 2**30,
        "largest_log_prob_difference": (ours - all_logits).abs().max().item(),
        "gradient_difference": ((our_slope - slope).float().norm() / slope.float().norm()).item(),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
