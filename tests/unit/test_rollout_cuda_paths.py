"""Switches that pass by route capture or by an adapter are refused by name, before a server starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparkrl.errors import AdapterError, RoutingError
from sparkrl.rollout.plugin.cuda import form, paths

CHECKPOINT = Path(__file__).parents[2] / "recipes/quickstart/checkpoint"


@pytest.mark.parametrize("name", ["muse_spark_tep_aux_stream_routing", "muse_spark_tep_fused_moe_input_quant"])
def test_path_that_bypasses_capture_is_refused_naming_its_switch(name: str) -> None:
    with pytest.raises(RoutingError, match=f"with `{name}` on, routed experts are not recorded") as caught:
        paths.require_recorded(SimpleNamespace(**{name: True}))
    assert caught.value.hint == f'set `"{name}": false` in the checkpoint\'s config.json'


def test_mega_moe_is_refused_naming_the_backend() -> None:
    with pytest.raises(RoutingError, match="`deep_gemm_mega_moe` records no routed experts"):
        paths.require_recorded(SimpleNamespace(), moe_backend="deep_gemm_mega_moe")


@pytest.mark.parametrize("name", ["muse_spark_tep_shard_pooler", "muse_spark_tep_shard_unpooler"])
def test_sharded_projection_is_refused_only_where_it_is_sharded(name: str) -> None:
    config = SimpleNamespace(**{name: True})
    paths.require_recorded(config, tensor_parallel_size=1)
    with pytest.raises(AdapterError, match=f"with `{name}` on, small batches are served without"):
        paths.require_recorded(config, tensor_parallel_size=2)


def test_plain_config_passes() -> None:
    paths.require_recorded(SimpleNamespace(muse_spark_tep_aux_stream_routing=False), moe_backend="auto")


def test_checkpoint_that_switches_it_on_is_refused_before_vllm_starts(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(CHECKPOINT, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"muse_spark_tep_aux_stream_routing": True}))
    with pytest.raises(RoutingError, match="muse_spark_tep_aux_stream_routing"):
        form.load_arguments(str(folder), 1)
