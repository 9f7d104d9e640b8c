"""Expert LoRA under FSDP2, with experts that the ranks do not divide, against the model unsharded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from test_models_muse_spark import randomize, tiny_config
from test_models_qwen3 import RAW
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from sparkrl.config.schema import LoraConfig
from sparkrl.lora.targets import add_adapter, resolve_targets
from sparkrl.models.registry import family_of

RANKS = 3
EXPERTS = {"muse_spark_text": 4, "qwen3_moe": 7}
"""2 + 2 + 0 and 3 + 3 + 1 over three ranks."""


def adapted(name: str) -> nn.Module:
    family = family_of(name)
    if name == "muse_spark_text":
        config = tiny_config(num_local_experts=EXPERTS[name])
    else:
        config = family.parse_config({**RAW[name], "num_experts": EXPERTS[name]})
    model = family.build(config, torch.float32)
    randomize(model)
    lora = LoraConfig(rank=4, alpha=8, targets=["attention", "experts"])
    model = add_adapter(model, lora, resolve_targets(list(lora.targets), family, model), family)
    generator = torch.Generator().manual_seed(9)
    for value in trainable(model).values():
        value.data.copy_(torch.randn(value.shape, generator=generator) * 0.2)
    return model


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def loss(model: nn.Module, rank: int) -> Tensor:
    """Of a rank's own tokens; the first rank has one alone, so most of its experts get none."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(1, 97, (1, 20 * rank + 1), generator=generator)
    pull = torch.randn(*ids.shape, 97, generator=generator)
    return (model(ids).logits * pull).sum()


def rank_gradients(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=None, reduce_dtype=torch.float32, cast_forward_inputs=False)
    found = {}
    for name in EXPERTS:
        model = adapted(name)
        model.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        layers = [module for module in model.modules() if type(module).__name__.endswith("DecoderLayer")]
        for part in [*layers, model]:
            fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        loss(model, rank).backward()
        found[name] = {key: value.grad.full_tensor() for key, value in trainable(model).items()}
    if rank == 0:
        torch.save(found, folder / "gradients.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> dict[str, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("shards")
    mp.spawn(rank_gradients, (folder,), nprocs=RANKS)
    return torch.load(folder / "gradients.pt", weights_only=True)


@pytest.mark.parametrize("name", EXPERTS)
def test_sharded_gradients_of_experts_that_ranks_do_not_divide_equal_unsharded(sharded, name):
    model = adapted(name)
    (sum(loss(model, rank) for rank in range(RANKS)) / RANKS).backward()
    wanted = trainable(model)
    assert sharded[name].keys() == wanted.keys()
    for key, value in wanted.items():
        limit = 1e-5 * max(1.0, float(value.grad.abs().max()))
        assert (sharded[name][key] - value.grad).abs().max() <= limit, key
    factors = [key for key in wanted if "lora_gate_up_A" in key]
    assert factors and all(len(wanted[key]) == EXPERTS[name] for key in factors)
