"""NVFP4 to BF16: one stacked expert tensor against copying its result, and a checkpoint against its plain form.

Both the dequantization and the copy write memory that they allocate themselves. Reading is from a warm page cache, so
the figure says what the work costs besides the disk; from a cold disk NVFP4 has 3.6 times fewer bytes to fetch
(benchmark `load`).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.figures import Figure
from benchmarks.timing import medians, threads
from sparkrl.quant.checkpoint import CheckpointReader, write_checkpoint
from sparkrl.quant.convert import dequantize_checkpoint
from sparkrl.quant.nvfp4 import dequantize, quantize
from sparkrl.quant.stream import Destination, fill

NAME = "dequantize"
THREADS = 2
EXPERTS, ROWS, WIDTH = 32, 2048, 2048
REPEATS = 7
SIZES = (
    f"[{EXPERTS}, {ROWS}, {WIDTH}], {2 * EXPERTS * ROWS * WIDTH / 2**20:.0f} MiB in BF16, {THREADS} threads, "
    "page cache warm"
)
_BANDWIDTH = 0.5
_TENSOR = "model.language_model.layers.1.mlp.experts.down_proj"


def run() -> list[Figure]:
    """Measure both."""
    with threads(THREADS):
        return _measure()


def _measure() -> list[Figure]:
    generator = torch.Generator().manual_seed(0)
    # quantizing one expert at a time bounds its fp32 temporaries
    parts = [quantize(torch.randn((1, ROWS, WIDTH), generator=generator)) for _ in range(EXPERTS)]
    packed, blocks, scales = (torch.cat(values) for values in zip(*parts, strict=True))
    plain = dequantize(packed, blocks, scales, dtype=torch.bfloat16)
    seconds = medians(
        {"copy": plain.clone, "nvfp4": lambda: dequantize(packed, blocks, scales, dtype=torch.bfloat16)},
        repeats=REPEATS,
    )
    gigabytes = plain.nbytes / 1e9
    with tempfile.TemporaryDirectory() as scratch:
        quantized, full = Path(scratch) / "nvfp4", Path(scratch) / "bf16"
        tensors = {
            _TENSOR: packed,
            f"{_TENSOR}_weight_scale": blocks,
            f"{_TENSOR}_weight_scale_2": scales,
            f"{_TENSOR}_input_scale": torch.ones_like(scales),
        }
        scheme = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": []}
        write_checkpoint(quantized, tensors, {"model_type": "muse_spark_text", "quantization_config": scheme})
        dequantize_checkpoint(quantized, full)
        loading = medians(
            {
                # `load_file` maps the file; only a copy brings the weights into memory of their own
                "plain": lambda: [value.clone() for value in load_file(full / "model.safetensors").values()],
                "nvfp4": lambda: _load(quantized),
            },
            repeats=REPEATS,
        )
    return [
        Figure(benchmark=NAME, case="plain BF16 copy", value=gigabytes / seconds["copy"], unit="GB/s written"),
        Figure(
            benchmark=NAME,
            case="dequantize",
            value=gigabytes / seconds["nvfp4"],
            unit="GB/s written",
            ratio=seconds["copy"] / seconds["nvfp4"],
            meaning="its bandwidth / the copy's",
            at_least=_BANDWIDTH,
        ),
        Figure(benchmark=NAME, case="load the BF16 checkpoint, safetensors", value=1e3 * loading["plain"], unit="ms"),
        Figure(
            benchmark=NAME,
            case="load the NVFP4 checkpoint, as the trainer does",
            value=1e3 * loading["nvfp4"],
            unit="ms",
            ratio=loading["nvfp4"] / loading["plain"],
            meaning="its time / BF16's",
        ),
    ]


def _load(folder: Path) -> torch.Tensor:
    into = torch.empty((EXPERTS, ROWS, WIDTH), dtype=torch.bfloat16)
    fill(CheckpointReader(folder), [Destination(_TENSOR, 0, into)])
    return into
