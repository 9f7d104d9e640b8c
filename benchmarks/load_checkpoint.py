"""A Muse Spark checkpoint of any size with random NVFP4 experts, written an expert at a time; and a rank that loads it.

`python -m benchmarks.load_checkpoint JSON` is one process of a measurement: it does as the `Job` says, under a limit on
its data memory that the kernel enforces, and prints what that took as JSON.
"""

from __future__ import annotations

import datetime
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
EXPERTS, LATENT, INNER = 64, 2048, 1024
LAYER_PARAMETERS = EXPERTS * 3 * LATENT * INNER
"""Parameters of a layer's experts; the rest of the model is small beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one process does."""

    path: str
    how: str
    """`stock` is transformers' `from_pretrained`; `bf16` and `packed` are `trainer.base` of the trainer's engine;
    `dequantize` writes the BF16 form to `path` + ".bf16"."""
    rank: int = 0
    ranks: int = 1
    store: str = ""
    """File through which the ranks meet."""
    budget_bytes: int | None = None
    """Private memory that the work may add; the kernel refuses more (RLIMIT_DATA). Libraries alone reserve a gigabyte
    that they never touch, so a limit on the whole would say little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one process took."""

    seconds: float
    """From the open checkpoint to a model that can compute, without imports."""
    peak_rss: int
    """Bytes, of the whole process, its libraries included."""
    rss_before: int
    """Bytes, once libraries are imported."""
    file_bytes: int
    """Bytes that read calls returned meanwhile (`rchar`)."""
    checkpoint_bytes: int
    """Of these, as the reader counts tensors; 0 where it does not read."""


def write(folder: Path, *, layers: int, seed: int = 0) -> None:
    """Write the checkpoint, one shard a layer, never holding more than an expert."""
    from transformers import MuseSparkTextConfig
    from transformers.models.muse_spark import modeling_muse_spark as hf

    from sparkrl.quant.form import dump_json
    from sparkrl.quant.shards import ShardWriter

    config = MuseSparkTextConfig(
        vocab_size=1024,
        hidden_size=512,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=512,
        moe_intermediate_size=INNER,
        moe_hidden_size=LATENT,
        num_local_experts=EXPERTS,
        num_experts_per_tok=4,
        sliding_window=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=1,
    )
    with torch.device("meta"):
        like = {f"model.language_model.{n}": v for n, v in hf.MuseSparkTextModel(config).state_dict().items()}
    like["lm_head.weight"] = torch.empty(1024, 512, device="meta")
    shards: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {}
    for name, value in like.items():
        if name.endswith("inv_freq"):
            continue
        part = int(name.split(".layers.")[1].split(".")[0]) + 1 if ".layers." in name else 0
        shard = shards.setdefault(f"model-{part:05d}.safetensors", {})
        shape = tuple(value.shape)
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            scales = (EXPERTS, 2) if name.endswith("gate_up_proj") else (EXPERTS,)
            shard[name] = (torch.uint8, (*shape[:-1], shape[-1] // 2))
            shard[name + "_weight_scale"] = (torch.float8_e4m3fn, (*shape[:-1], shape[-1] // 16))
            shard[name + "_weight_scale_2"] = shard[name + "_input_scale"] = (torch.float32, scales)
        else:
            exact = "residual_gate" in name or ".mlp.gate." in name
            shard[name] = (torch.float32 if exact else torch.bfloat16, shape)
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    for file, tensors in shards.items():
        writer = ShardWriter(folder / file, tensors)
        for name, (dtype, shape) in tensors.items():
            step = 1 if len(shape) == 3 else shape[0]
            for row in range(0, shape[0], step):
                writer.put(name, _random(dtype, (step, *shape[1:]), generator), start=row)
        writer.close()
    index = {name: file for file, tensors in shards.items() for name in tensors}
    dump_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
    about = {"architectures": ["MuseSpark1xForCausalLM"], "model_type": "muse_spark_text", "dtype": "bfloat16"}
    content = json.loads(json.dumps(config.to_dict())) | about | {"quantization_config": quantization}
    dump_json(folder / "config.json", content)


def _random(dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    if dtype == torch.float8_e4m3fn:  # from 0.25 to 2
        return torch.randint(0x28, 0x40, shape, generator=generator, dtype=torch.uint8).view(dtype)
    if dtype == torch.float32 and (len(shape) == 1 or shape[1:] == (2,)):  # global scales, residual gates
        return torch.full(shape, 2.0**-7)
    return (torch.randn(shape, generator=generator) * 0.05).to(dtype)


def disk_bytes(folder: Path) -> int:
    """Size of the weights on disk."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def forget(folder: Path) -> None:
    """Drop the files from the page cache, so that the next read comes from the disk."""
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def start(job: Job, scratch: Path) -> list[Load]:
    """Run the job in processes of their own, one a rank.

    Raises:
        RuntimeError: one of them failed; the message ends as its output did.
    """
    store = scratch / f"store-{time.monotonic_ns()}"
    jobs = [replace(job, rank=rank, store=str(store)) for rank in range(job.ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // job.ranks))}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.load_checkpoint", json.dumps(asdict(one))],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for one in jobs
    ]
    found = []
    try:
        for process in processes:
            out, error = process.communicate(timeout=600)
            if process.returncode:
                raise RuntimeError(f"`{job.how}` failed ({process.returncode}): {error[-2000:]}")
            found.append(Load(**json.loads(out.splitlines()[-1])))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return found


def _run(job: Job) -> Load:
    work = {"stock": _stock, "dequantize": _dequantize}.get(job.how, _engine)(job)
    if job.budget_bytes is not None:
        limit = _status("VmData") + job.budget_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    before, read_before = _status("VmRSS"), _read_bytes()
    began = time.perf_counter()
    counted = work()
    seconds = time.perf_counter() - began
    return Load(
        seconds=seconds,
        peak_rss=_status("VmHWM"),
        rss_before=before,
        file_bytes=_read_bytes() - read_before,
        checkpoint_bytes=counted,
    )


def _stock(job: Job) -> Any:
    from sparkrl.models.muse_spark import MuseSparkForCausalLM
    from sparkrl.models.registry import load_config

    _, config = load_config(job.path)
    kept = []

    def work() -> int:
        model = MuseSparkForCausalLM.from_pretrained(job.path, config=config, dtype=torch.bfloat16)
        # the files are only mapped so far: one value of every page brings them into memory
        step = resource.getpagesize() // 2
        kept.append((model, [parameter.view(-1)[::step].sum() for parameter in model.parameters()]))
        return 0

    return work


def _dequantize(job: Job) -> Any:
    from sparkrl.quant.convert import dequantize_checkpoint

    def work() -> int:
        dequantize_checkpoint(job.path, job.path + ".bf16")
        return 0

    return work


def _engine(job: Job) -> Any:
    import torch.distributed as dist

    from sparkrl.config.schema import Base, Config
    from sparkrl.trainer import platform

    os.environ.update(RANK=str(job.rank), WORLD_SIZE=str(job.ranks), LOCAL_RANK="0")
    platform.install("cpu")
    from sparkrl.trainer.engine import AdapterEngine

    store = dist.FileStore(job.store, job.ranks)
    dist.init_process_group(
        "gloo", store=store, rank=job.rank, world_size=job.ranks, timeout=datetime.timedelta(seconds=300)
    )
    config = Config(recipe_name="load")
    config.model.path = job.path
    config.trainer.num_workers = job.ranks
    config.trainer.base = Base[job.how]
    config.lora.rank, config.lora.targets = 1, ["attention"]
    engine = AdapterEngine(config, path=job.path, seed=0)

    def work() -> int:
        engine.initialize()
        dist.barrier()
        return engine.base_bytes_read

    return work


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def _read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


if __name__ == "__main__":
    print(json.dumps(asdict(_run(Job(**json.loads(sys.argv[1]))))))
