"""Adapters that do not fit are refused before anything starts, with the key to set."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparkrl.config.load import load
from sparkrl.config.schema import Config
from sparkrl.errors import AdapterError, ConfigError
from sparkrl.loop.evaluate import read_adapter
from sparkrl.loop.placement import check_possible
from sparkrl.loop.preflight import check_adapter
from sparkrl.lora.peft_format import pack, save_adapter
from sparkrl.types import Adapter

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
SHAPES = {"m.q_proj.lora_A.weight": (2, 8), "m.q_proj.lora_B.weight": (6, 2)}


def adapter(shapes: dict[str, tuple[int, int]] = SHAPES, **config: int) -> Adapter:
    return pack({name: torch.zeros(shape) for name, shape in shapes.items()}, CONFIG | config, version=0)


@pytest.mark.parametrize(
    ("other", "message", "hint"),
    [
        (adapter(r=16), "`lora.rank` 16, the config says 2", "lora.rank=16"),
        (adapter(lora_alpha=2), "`lora.alpha` 2, the config says 4", "lora.alpha=2"),
        (adapter({"m.q_proj.lora_A.weight": (2, 8)}), "it lacks 1, such as `m.q_proj.lora_B.weight`", "lora.targets"),
        (adapter(SHAPES | {"m.o_proj.lora_A.weight": (2, 8)}), "it has 1 more, such as `m.o_proj", "lora.targets"),
        (adapter(SHAPES | {"m.q_proj.lora_B.weight": (5, 2)}), r"shape \(5, 2\), here needs \(6, 2\)", "model.path"),
    ],
)
def test_adapter_that_does_not_fit_is_refused_with_the_key_to_set(other: Adapter, message: str, hint: str) -> None:
    config = Config()
    config.model.path = "here"
    check_adapter(adapter(), adapter(), config, Path("there"))
    with pytest.raises(AdapterError, match=message) as error:
        check_adapter(other, adapter(), config, Path("there"))
    assert error.value.hint is not None and hint in error.value.hint


def test_adapter_read_from_a_checkpoint_knows_its_step(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for name, step in (("step-000010", 10), ("mine", 0)):
        save_adapter(tmp_path / name, tensors, CONFIG)
        assert read_adapter(tmp_path / name).version == step


def test_evaluation_needs_no_training_data_and_takes_the_gpus_of_its_servers_alone() -> None:
    config = load(["recipe=aime2024", "rollout.num_replicas=2"], check_paths=False, trains=False)
    assert (config.data.path, config.eval.name, config.eval.k) == ("", "aime2024", 8)
    assert (config.cluster.num_gpus, config.cluster.colocate) == (8, False)
    assert load(["recipe=quickstart", "cluster=gpu1", "rollout.dtype=bfloat16", "trainer.dtype=bfloat16"],
                trains=False).cluster.colocate is False  # fmt: skip


def test_missing_data_set_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match=r"`eval\.path` does not exist: data/aime2025\.parquet") as error:
        load(["recipe=aime2025", f"model.path={tmp_path / 'model'}"], trains=False)
    assert error.value.hint is not None
    assert "sparkrl data prepare aime2025 --out data/aime2025.parquet" in error.value.hint


def test_training_with_an_evaluation_recipe_says_what_it_is_for() -> None:
    with pytest.raises(ConfigError, match=r"no value for `data\.path`") as error:
        load(["recipe=aime2024"])
    assert error.value.hint is not None and "sparkrl eval" in error.value.hint


def test_servers_that_an_empty_cluster_cannot_hold_are_refused_with_their_number() -> None:
    nodes = [{"GPU": 8.0, "CPU": 64.0}, {"GPU": 6.0, "CPU": 64.0}, {"CPU": 64.0}]  # 2 and 1 servers of 4 GPUs, none
    check_possible(nodes, {"GPU": 4, "CPU": 1}, 3)
    with pytest.raises(ConfigError, match=r"`rollout\.num_replicas` is 4, but .* holds 3 servers of 4 GPU") as error:
        check_possible(nodes, {"GPU": 4, "CPU": 1}, 4)
    assert error.value.hint is not None and "rollout.num_replicas=3" in error.value.hint
    with pytest.raises(ConfigError, match=r"takes 16 GPU and 1 CPU on one node, .* has 8 GPU and 64 CPU"):
        check_possible(nodes, {"GPU": 16, "CPU": 1}, 1)
