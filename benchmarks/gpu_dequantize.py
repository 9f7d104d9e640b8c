"""NVFP4 to BF16 on a GPU against copying as many BF16 values there: `python -m benchmarks.gpu_dequantize --out F`.

Both write memory that exists already. A copy moves four bytes a value (two read, two written), dequantization 2.56
(half a byte of code and a sixteenth of scale read, two written), so bandwidths are compared in bytes moved.
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

from sparkrl.quant import nvfp4

EXPERTS, ROWS, WIDTH = 64, 4096, 4096
REPEATS = 20
TARGET = 0.8
_MOVED_COPY = 4.0
_MOVED_NVFP4 = 2.0 + 1 / 2 + 1 / 16


def measure() -> dict[str, Any]:
    """Times, bandwidths and whether every path gives the same bits; takes some seconds."""
    device = torch.device("cuda")
    packed, block_scale, global_scale = _weights(device)
    values = EXPERTS * ROWS * WIDTH
    out = torch.empty((EXPERTS, ROWS, WIDTH), dtype=torch.bfloat16, device=device)
    source = torch.zeros_like(out)
    flat = (packed.view(-1, WIDTH // 2), block_scale.view(torch.uint8).view(-1, WIDTH // 16))
    row_scale = global_scale.repeat_interleave(ROWS // 2, dim=1).view(-1)
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: out.copy_(source),
        "dequantize": lambda: nvfp4.dequantize(packed, block_scale, global_scale, dtype=torch.bfloat16, out=out),
        "torch_fallback": lambda: nvfp4._expand(*flat, row_scale, out.view(-1, WIDTH), False),
    }
    milliseconds = {name: _milliseconds(call) for name, call in calls.items()}
    moved = {
        name: values * (_MOVED_COPY if name == "copy" else _MOVED_NVFP4) / (time / 1e3) / 1e9
        for name, time in milliseconds.items()
    }
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "shape": [EXPERTS, ROWS, WIDTH],
        "ms": milliseconds,
        "gb_moved_per_s": moved,
        "bandwidth_over_copy": moved["dequantize"] / moved["copy"],
        "time_over_copy": milliseconds["dequantize"] / milliseconds["copy"],
        "target": TARGET,
        "met": moved["dequantize"] / moved["copy"] >= TARGET,
        "same_bits_as_cpu": _same_bits(packed, block_scale, global_scale),
        "differ_from_cpu_by_global_scale": _every_code_and_scale(device),
        "kernel": "triton" if nvfp4._kernel(flat[0], row_scale) is not None else "torch",
    }


def _weights(device: torch.device) -> nvfp4.Nvfp4:
    """Random codes and scales; gate and up halves have global scales of their own, which are no powers of two."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (EXPERTS, ROWS)
    return nvfp4.Nvfp4(
        torch.randint(0, 256, (*shape, WIDTH // 2), generator=generator, dtype=torch.uint8, device=device),
        torch.randint(1, 0x7F, (*shape, WIDTH // 16), generator=generator, dtype=torch.uint8, device=device).view(
            torch.float8_e4m3fn
        ),
        torch.rand((EXPERTS, 2), generator=generator, device=device) * 1e-3 + 1e-5,
    )


def _milliseconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(3 + REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def _same_bits(packed: Tensor, block_scale: Tensor, global_scale: Tensor) -> bool:
    """The first two experts on the GPU against the CPU, for each type of result."""
    few = [value[:2] for value in (packed, block_scale, global_scale)]
    return all(
        torch.equal(
            nvfp4.dequantize(*few, dtype=dtype).cpu(), nvfp4.dequantize(*(value.cpu() for value in few), dtype=dtype)
        )
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    )


def _every_code_and_scale(device: torch.device) -> dict[str, int]:
    """Values whose bits differ, of every byte of codes under every positive e4m3 scale, by global scale.

    Under the last one results are subnormal numbers, which a processor that flushes these cannot give.
    """
    codes = torch.arange(256, dtype=torch.uint8).repeat(0x7E, 1)
    scales = torch.arange(1, 0x7F, dtype=torch.uint8)[:, None].repeat(1, 32).view(torch.float8_e4m3fn)
    differ = {}
    for value in (1.0, 2.0**-9, 0.0123456, 3.7e-5, 1e-38):
        scale = torch.tensor(value)
        expected = nvfp4.dequantize(codes, scales, scale, dtype=torch.bfloat16).view(torch.int16)
        found = nvfp4.dequantize(codes.to(device), scales.to(device), scale.to(device), dtype=torch.bfloat16)
        differ[str(value)] = int((found.cpu().view(torch.int16) != expected).sum())
    return differ


def main() -> None:
    """Measure and write JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_dequantize", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    found = measure()
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
