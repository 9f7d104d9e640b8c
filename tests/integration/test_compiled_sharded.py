"""Compiled layers under FSDP2 on two ranks, with recomputation: the gradients of one eager process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tiny_layers import MIXED, TRACED, adapted_model, assert_near, muse_spark, training_step
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from sparkrl.models.compiled import compile_layers
from sparkrl.models.muse_spark import DecoderLayer


def _rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model: Any = adapted_model(muse_spark(MIXED), torch.float32, checkpointing=True)
    policy = MixedPrecisionPolicy(param_dtype=None, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in list(model.modules()):
        if isinstance(module, DecoderLayer):
            fully_shard(module, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    compile_layers(model, TRACED)
    for tokens in (40, 77):
        log_probs, grads = training_step(model, tokens)
        whole = {name: grad.full_tensor() for name, grad in grads.items()}
        if rank == 0:
            torch.save((log_probs, whole), folder / f"{tokens}.pt")
    dist.destroy_process_group()


def test_compiled_layers_on_two_ranks_equal_one_eager_process(tmp_path: Path) -> None:
    mp.spawn(_rank, (tmp_path,), nprocs=2)
    model = adapted_model(muse_spark(MIXED), torch.float32)
    for tokens in (40, 77):
        assert_near(torch.load(tmp_path / f"{tokens}.pt"), training_step(model, tokens), 3e-4)
