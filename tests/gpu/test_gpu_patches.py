"""What the plugin adds around the kernels: the scheduler's patches, the adapter's slot, the base model beside it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import gpu, gpu_model, gpu_rollout, gpu_routes
from sparkrl.config.load import load
from sparkrl.errors import AdapterError, RoutingError, SparkrlError
from sparkrl.planning.facts import read_facts
from sparkrl.planning.memory import Layout, server_bytes
from sparkrl.types import Group, Sampling

pytestmark = pytest.mark.gpu
RANK = gpu_rollout.RANK


@pytest.fixture(scope="module")
def fields() -> dict[str, Any]:
    return gpu_model.shape()


@pytest.fixture(scope="module")
def folder(fields: dict, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpu_model.build(tmp_path_factory.mktemp("model") / "nvfp4", fields, tokenizer=gpu.TOKENIZER)


@pytest.fixture(scope="module")
def found(fields: dict, folder: Path) -> dict[str, Any]:
    problems = gpu_model.prompts(gpu.SEQUENCES, fields["vocab_size"], length=gpu.PROMPT)

    async def serve(**settings: Any) -> dict[str, Any]:
        server = gpu_rollout.RolloutServer(gpu_rollout.spec(folder, **settings))
        out: dict[str, Any] = {}
        try:
            server._make_engine()
            if server.spec.lora != "none":
                out["memory"] = (await server._rpc("bench_memory"))[0]
                await server._load(gpu_model.adapter(fields, rank=RANK, version=1, seed=1))
                out["patches"] = await gpu_routes.compare(server, problems[:6])
                await server.unload_adapter()
            out["base"] = await server._sample(problems, Sampling(max_tokens=gpu.NEW))
            return out
        finally:
            await server.stop()

    with_lora, without = asyncio.run(serve()), asyncio.run(serve(lora="none"))
    return with_lora | {"base_without_lora": without["base"]}


@pytest.mark.parametrize("patches", ["whole_outputs", "decode_slots", "both"])
def test_patched_scheduler_gives_stock_tokens_log_probs_and_routes(found: dict, patches: str) -> None:
    stock, patched = found["patches"]["stock again"], found["patches"][patches]
    print(found["patches"])
    for name in ("responses_with_same_tokens", "equal_log_probs", "equal_routes"):
        # what differs between two calls of stock vLLM itself is its kernels'
        assert patched[name] >= stock[name] - 0.02, found["patches"]


def test_base_requests_are_unperturbed_when_adapters_are_on_but_unused(found: dict, fields: dict, folder: Path) -> None:
    reference = gpu_model.Reference(folder, fields, None)

    def distance(groups: list[Group]) -> dict[str, float]:
        return gpu.agreement(reference, groups)

    with_lora, without = distance(found["base"]), distance(found["base_without_lora"])
    print(json.dumps({"with": with_lora, "without": without}))
    # each samples other tokens of the same model, which moves k3 by some per cent
    assert with_lora["k3"] < 1.15 * without["k3"]


def test_adapter_slot_and_model_take_the_planned_memory(found: dict, folder: Path) -> None:
    cfg = load(["recipe=quickstart", "cluster=gpu1", f"model.path={folder}"])
    planned = server_bytes(cfg, read_facts(cfg), Layout(tensor_parallel=1, num_replicas=1, num_ranks=1))
    assert found["memory"]["adapter_slot"] == planned["adapter slot"]
    weights = planned["weights: experts"] + planned["weights: rest"]
    assert abs(found["memory"]["model"] - weights) < 0.01 * weights


@pytest.mark.parametrize(
    ("switch", "error"),
    [
        ("muse_spark_tep_aux_stream_routing", RoutingError),
        ("muse_spark_tep_fused_moe_input_quant", RoutingError),
        ("muse_spark_tep_shard_pooler", AdapterError),
    ],
)
def test_path_past_routes_or_adapters_is_refused_by_the_switch_that_fixes_it(
    folder: Path, tmp_path: Path, switch: str, error: type[SparkrlError]
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    changed = json.loads((folder / "config.json").read_text()) | {switch: True}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    spec = gpu_rollout.spec(tmp_path)
    if error is AdapterError:  # projections are sharded under tensor parallelism only
        spec = dataclasses.replace(spec, tensor_parallel_size=2)
    with pytest.raises(error, match=switch) as caught:
        gpu_rollout.RolloutServer(spec)._make_engine()
    assert caught.value.hint == f'set `"{switch}": false` in the checkpoint\'s config.json'
