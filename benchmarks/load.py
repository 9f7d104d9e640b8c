"""Loading: an NVFP4 checkpoint into the trainer's shards against its BF16 form through transformers' `from_pretrained`.

Each load is a process of its own (two for two ranks) and starts with the files out of the page cache. The kernel holds
the loads of the trainer to a budget of private memory that is far below the model's size in BF16.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.figures import Figure
from benchmarks.load_checkpoint import LAYER_PARAMETERS, Job, Load, disk_bytes, forget, start, write

NAME = "load"
LAYERS = 5
MODEL_BYTES = 2 * LAYER_PARAMETERS * LAYERS
"""Of the experts in BF16."""
_SPARE = 450 << 20
"""What a load may hold beside its own part: pieces on their way, tables, a rank's rows of everything else."""
BUDGETS = {
    ("packed", 2): round(MODEL_BYTES * 0.5625 / 4) + _SPARE,
    ("bf16", 2): MODEL_BYTES // 2 + _SPARE,
}
"""Private memory by `trainer.base` and number of ranks."""
_DEQUANTIZE_BUDGET = 800 << 20
_STORED_BYTES = MODEL_BYTES * 0.5625 / 2
SIZES = (
    f"{LAYERS} layers of 64 experts, {MODEL_BYTES / 1e9:.1f} GB in BF16, {_STORED_BYTES / 1e9:.1f} GB in NVFP4; "
    "files out of the page cache; peak RSS holds 0.6 GB of libraries"
)


def run() -> list[Figure]:
    """Write the checkpoint and its BF16 form, then load them in turn; takes about 5.5 GB of scratch disk."""
    with tempfile.TemporaryDirectory() as scratch:
        return measure(Path(scratch), LAYERS)


def measure(scratch: Path, layers: int) -> list[Figure]:
    """Figures for a model of so many layers."""
    quantized = scratch / "nvfp4"
    write(quantized, layers=layers)
    full = scratch / "nvfp4.bf16"

    def load(how: str, *, ranks: int = 1, budget: int | None = None) -> list[Load]:
        folder = full if how == "stock" else quantized
        forget(folder)
        return start(Job(path=str(folder), how=how, ranks=ranks, budget_bytes=budget), scratch)

    dequantized = load("dequantize", budget=_DEQUANTIZE_BUDGET)
    stock = load("stock")
    found = {
        (how, ranks): load(how, ranks=ranks, budget=BUDGETS.get((how, ranks)))
        for how in ("bf16", "packed")
        for ranks in (1, 2)
    }
    seconds = stock[0].seconds
    figures = [
        _rss("sparkrl dequantize", dequantized, layers, _DEQUANTIZE_BUDGET),
        Figure(benchmark=NAME, case="BF16, transformers' from_pretrained", value=seconds, unit="s"),
        _rss("BF16, transformers' from_pretrained", stock, layers, None),
    ]
    for (how, ranks), loads in found.items():
        case = f"NVFP4, trainer.base={how}, {ranks} rank{'s' if ranks > 1 else ''}"
        slowest = max(one.seconds for one in loads)
        figures += [
            Figure(
                benchmark=NAME,
                case=case,
                value=slowest,
                unit="s",
                ratio=slowest / seconds,
                meaning="its time / from_pretrained's",
            ),
            _rss(case, loads, layers, BUDGETS.get((how, ranks))),
            _bytes_read(case, loads, disk_bytes(quantized)),
        ]
    return figures


def _rss(case: str, loads: list[Load], layers: int, budget: int | None) -> Figure:
    """The process that held most, against the model in BF16."""
    size = 2 * LAYER_PARAMETERS * layers
    peak = max(one.peak_rss for one in loads)
    bound = "" if budget is None else f", held to {budget / 1e9:.2f} GB of new memory by the kernel"
    return Figure(
        benchmark=NAME,
        case=f"peak RSS: {case}",
        value=peak / 1e9,
        unit="GB",
        ratio=peak / size,
        meaning=f"it / the model in BF16{bound}",
    )


def _bytes_read(case: str, loads: list[Load], stored: int) -> Figure:
    """All that the ranks' read calls returned, against the files' size: 1 is every byte once."""
    total = sum(one.file_bytes for one in loads)
    return Figure(
        benchmark=NAME,
        case=f"read: {case}",
        value=total / 1e9,
        unit="GB",
        ratio=total / stored,
        meaning="it / the files' size",
        at_most=1.05,
    )
