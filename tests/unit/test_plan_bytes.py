"""Plans against what was measured, against models built with torch, and against arithmetic done by hand."""

from __future__ import annotations

import json
import resource
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sparkrl.config.load import load
from sparkrl.errors import CheckpointError, ConfigError
from sparkrl.planning import make_plan, read_facts
from sparkrl.planning.adapter import adapted_weights
from sparkrl.planning.memory import Layout, server_bytes, trainer_bytes

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "recipes/quickstart/checkpoint"


def config(*overrides: str):
    return load(["recipe=quickstart", *overrides], check_paths=False)


def reference(*overrides: str):
    return load(["recipe=dapo_math", *overrides], check_paths=False)


def test_checkpoint_bytes_equal_the_tensors_of_the_quickstart_file() -> None:
    file = CHECKPOINT / "model.safetensors"
    with file.open("rb") as content:
        (length,) = struct.unpack("<Q", content.read(8))
        header = json.loads(content.read(length))
    header.pop("__metadata__", None)
    tensors = sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values())
    planned = make_plan(config()).checkpoint_bytes
    assert planned == tensors
    assert abs(planned / file.stat().st_size - 1) < 0.05


def test_parameters_equal_those_of_the_model_built_by_torch() -> None:
    import torch

    from sparkrl.config.schema import LoraConfig
    from sparkrl.lora.targets import add_adapter, resolve_targets
    from sparkrl.models.registry import load_config

    family, text_config = load_config(CHECKPOINT)
    with torch.device("meta"):
        model = family.build(text_config, torch.float32)
        size = sum(p.numel() for p in model.parameters()) + sum(
            buffer.numel() for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")
        )
        targets = resolve_targets(["attention", "latent", "experts"], family, model)
        adapted = add_adapter(model, LoraConfig(), targets, family)
    plan = make_plan(config())
    assert sum(plan.parameters.values()) == size
    assert plan.adapter["parameters"] == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 160, "hidden_size": 64,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
    "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
    "mlp_only_layers": [1], "max_position_embeddings": 512, "tie_word_embeddings": False, "norm_topk_prob": True,
}  # fmt: skip
DENSE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
    **{name: QWEN[name] for name in QWEN if "expert" not in name and name not in ("model_type", "architectures")},
    "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "targets"),
    [
        (QWEN, "attention"),
        (QWEN, "self_attn.o_proj"),
        ({**QWEN, "mlp_only_layers": []}, "all_linear"),
        ({**QWEN, "decoder_sparse_step": 2, "mlp_only_layers": []}, "experts"),
        (DENSE, "all_linear"),
        (DENSE, "mlp"),
    ],
)
def test_parameters_of_other_families_equal_those_of_torch(raw, targets, tmp_path: Path) -> None:
    import torch

    from sparkrl.config.schema import LoraConfig
    from sparkrl.lora.targets import add_adapter, resolve_targets
    from sparkrl.models.registry import load_config

    (tmp_path / "config.json").write_text(json.dumps(raw))
    family, text_config = load_config(tmp_path)
    with torch.device("meta"):
        model = family.build(text_config, torch.float32)
        size = sum(p.numel() for p in model.parameters())
        found = resolve_targets([targets], family, model)
        adapted = add_adapter(model, LoraConfig(), found, family)
    plan = make_plan(config(f"model.path={tmp_path}", f"lora.targets=[{targets}]"))
    copied_head = 160 * 64 if raw["tie_word_embeddings"] else 0  # the checkpoint has one table, the trainer holds two
    assert sum(plan.parameters.values()) + copied_head == size
    assert plan.trainer["base shard"] == 4 * size
    assert plan.adapter["parameters"] == sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert plan.replay["bytes_per_token"] == 2 * family.routing(text_config).num_layers


def test_server_and_adapter_bytes_are_those_of_a_quickstart_run() -> None:
    # summary.json of a run: trainable_parameters 1,703,936, adapter_model.safetensors 6,836,920 bytes and
    # rollout/model_bytes 6,906,880. On CPU vLLM keeps its linear layers in a packed copy that is no parameter.
    plan = make_plan(config())
    assert plan.adapter["parameters"] == 1_703_936
    assert abs(plan.adapter["bytes_per_swap"] / 6_836_920 - 1) < 0.05
    linear = 4 * (plan.parameters["attention"] + plan.parameters["latent"])
    assert plan.server["weights: experts"] + plan.server["weights: rest"] - linear == 6_906_880
    assert plan.trainer["base shard"] == 4 * sum(plan.parameters.values())


def test_published_shape_has_816b_parameters_and_42b_active() -> None:
    plan = make_plan(reference())
    parts = plan.parameters
    assert parts["experts"] == 62 * 256 * 3 * 4096 * 4096
    assert parts["attention"] == 62 * (3 * 8192 * 8192 + 2 * 8192 * 1024)
    assert parts["latent"] == 62 * 2 * 8192 * 4096
    without_tables = sum(parts.values()) - parts["embedding"] - parts["head"]
    assert without_tables / 1e9 == pytest.approx(816.7, abs=0.1)
    assert plan.active_parameters / 1e9 == pytest.approx(42.8, abs=0.1)
    assert plan.adapter["parameters"] == 10_584_719_360
    assert plan.replay["bytes_per_token"] == 62 * 8


def test_published_shape_is_the_default_of_transformers() -> None:
    from transformers import MuseSparkTextConfig

    theirs = MuseSparkTextConfig()
    raw = json.loads((ROOT / "sparkrl/planning/muse_spark_open.json").read_text())
    ours = {name: value for name, value in raw.items() if name not in ("architectures", "dtype", "quantization_config")}
    assert ours == {name: getattr(theirs, name) for name in ours}
    facts = read_facts(reference())
    assert facts.full_layers == theirs.layer_types.count("full_attention") == 16
    assert (facts.sparse_layers, facts.quantized_layers) == (62, 60)


def test_qwen3_30b_a3b_has_its_published_size_and_fits_eight_gpus_of_80_gb() -> None:
    plan = make_plan(load(["recipe=qwen3_30b_a3b"], check_paths=False))
    assert plan.parameters["experts"] == 48 * 128 * 3 * 2048 * 768
    total = sum(plan.parameters.values())
    assert total / 1e9 == pytest.approx(30.5, abs=0.05)
    # 3.3B active, as published, counts both tables
    assert (plan.active_parameters + plan.parameters["embedding"] + plan.parameters["head"]) / 1e9 == pytest.approx(
        3.35, abs=0.05
    )
    assert plan.checkpoint_bytes == 2 * total
    per_expert = 32 * (2048 + 2 * 768) + 32 * (768 + 2048)
    attention = 32 * ((2048 + 4096) * 2 + (2048 + 512) * 2)
    assert plan.adapter["parameters"] == 48 * (128 * per_expert + attention)
    assert plan.adapter["bytes_per_swap"] == 2 * plan.adapter["parameters"]
    assert plan.replay["bytes_per_token"] == 48 * 8
    assert plan.chosen.fits is True
    assert plan.kv["share_of_all_full_at_1m"] == 1.0
    assert make_plan(load(["recipe=qwen3_30b_a3b", "cluster.gpu_memory_gb=64"], check_paths=False)).chosen.fits is False


def test_packed_base_is_nvfp4_in_shard_and_gather() -> None:
    facts = read_facts(reference())
    layout = Layout(tensor_parallel=4, num_replicas=1, num_ranks=12)
    plain, packed = (trainer_bytes(reference(f"trainer.base={base}"), facts, layout) for base in ("bf16", "packed"))
    layer = 3 * 256 * 4096 * 4096
    nvfp4 = layer / 2 + layer / 16 + 8 * (2 * 256 + 256)
    share = 22 / 256  # the rank with the most experts
    assert plain["base shard"] - packed["base shard"] == pytest.approx(60 * (2 * layer - nvfp4) * share, rel=1e-9)
    assert plain["gathered layers (estimate)"] - packed["gathered layers (estimate)"] == 3 * (2 * layer - nvfp4)
    assert packed["one layer unpacked"] == 2 * layer
    assert make_plan(reference("trainer.base=packed", "rollout.num_replicas=2", "trainer.num_workers=8")).chosen.fits


def test_what_more_ranks_do_not_shrink_is_gather_and_activations() -> None:
    plans = [
        make_plan(reference(f"trainer.num_workers={ranks}", f"cluster.num_gpus={ranks + 4}")) for ranks in (12, 32, 64)
    ]
    assert len({plan.trainer_floor_bytes for plan in plans}) == 1
    floor = plans[0].trainer_floor_bytes
    assert floor == plans[0].trainer["gathered layers (estimate)"] + plans[0].trainer["activations (estimate)"]
    rest = [plan.chosen.trainer_bytes - floor for plan in plans]
    assert rest[0] / rest[1] == pytest.approx(32 / 12, rel=0.1) and rest[1] / rest[2] == pytest.approx(2, rel=0.1)


def test_pipeline_stages_and_expert_parallel_layouts_are_listed_with_what_binds() -> None:
    plan = make_plan(reference())
    kinds = {(f.layout.tensor_parallel, f.layout.pipeline_parallel, f.layout.expert_parallel) for f in plan.layouts}
    assert {(4, 1, False), (4, 1, True), (2, 2, False), (1, 4, False), (2, 2, True)} <= kinds
    for fit in plan.layouts:
        plain = fit.layout.pipeline_parallel == 1 and not fit.layout.expert_parallel
        assert fit.runs == "yes" if plain else fit.runs.startswith("no: ")
        assert (fit.fits, fit.side) == (
            max(fit.server_bytes, fit.trainer_bytes) <= plan.usable_bytes,
            "server" if fit.server_bytes > fit.trainer_bytes else "trainer",
        )
    # two stages of 31 layers: half of every layer's weight, one table each in place of two
    cfg = reference()
    facts = read_facts(cfg)
    one, two = (
        server_bytes(cfg, facts, Layout(tensor_parallel=4, num_replicas=1, num_ranks=8, pipeline_parallel=stages))
        for stages in (1, 2)
    )
    assert two["weights: experts"] == one["weights: experts"] / 2
    tables = 2 * 202048 * 8192 * 2 / 4
    assert two["weights: rest"] == pytest.approx((one["weights: rest"] - tables) / 2 + tables / 2, rel=1e-6)
    assert two["adapter slot"] == one["adapter slot"] / 2


def test_experts_of_another_rank_change_the_adapter_and_not_the_servers_buffers_below_the_largest_rank() -> None:
    facts = read_facts(reference())
    small = adapted_weights(reference("lora.expert_rank=4"), facts)
    experts = sum(item.parameters for item in small if item.weight.part == "experts")
    assert experts == 62 * 256 * 4 * (4096 + 8192 + 4096 + 4096)
    others = sum(item.parameters for item in small if item.weight.part != "experts")
    assert others == 62 * 32 * (4 * 8192 + 2 * 8192 + 2 * 1024 + 8192 + 8192 + 2 * (8192 + 4096))
    # vLLM allocates every buffer for the largest rank
    layout = Layout(tensor_parallel=4, num_replicas=1, num_ranks=12)
    slots = [server_bytes(cfg, facts, layout)["adapter slot"] for cfg in (reference(), reference("lora.expert_rank=4"))]
    assert slots[0] == slots[1]
    larger = server_bytes(reference("lora.expert_rank=40"), facts, layout)["adapter slot"]
    assert larger == 2 * slots[0]  # buffers of 64


def test_two_slots_and_the_adapters_type_are_counted() -> None:
    facts = read_facts(config())
    layout = Layout(tensor_parallel=1, num_replicas=1, num_ranks=1)
    drain, both = (server_bytes(config(f"rollout.swap={kind}"), facts, layout) for kind in ("drain", "in_flight"))
    assert both["adapter slots"] == 2 * drain["adapter slot"]
    narrow = config("rollout.dtype=bfloat16", "rollout.adapter_dtype=bfloat16")
    assert 2 * server_bytes(narrow, facts, layout)["adapter slot"] == drain["adapter slot"]
    assert make_plan(narrow).adapter["bytes_per_swap"] == 2 * 1_703_936


def test_kv_at_a_million_tokens_is_a_quarter_of_all_full() -> None:
    facts = read_facts(reference())
    million = 1_000_000
    assert facts.kv_share(million) == pytest.approx((16 * million + 46 * 2048) / (62 * million), rel=1e-12)
    assert round(facts.kv_share(2**20), 2) == 0.26
    assert facts.kv_share(2048) == 1.0
    # one token of one layer: key and value, 16 heads of 64, bfloat16
    assert facts.kv_bytes(1) == {"full": 16 * 4096, "sliding": 46 * 4096}
    assert facts.kv_bytes(1, num_gpus=4) == {"full": 16 * 1024, "sliding": 46 * 1024}
    assert facts.kv_bytes(1, num_gpus=64) == {"full": 16 * 256, "sliding": 46 * 256}  # heads cannot be divided


def test_server_weights_over_four_gpus_match_the_sum_by_hand() -> None:
    cfg = reference()
    facts = read_facts(cfg)
    found = server_bytes(cfg, facts, Layout(tensor_parallel=4, num_replicas=1, num_ranks=12))
    layer = 3 * 256 * 4096 * 4096
    nvfp4 = layer / 2 + layer / 16 + 8 * (2 * 256 + 256)
    assert found["weights: experts"] == (60 * nvfp4 + 2 * layer * 2) / 4
    # gate_up's A and down's B are whole on every GPU; the other two factors are divided
    expert_slot = 62 * 256 * 32 * (4096 + 2 * 4096 / 4 + 4096 / 4 + 4096) * 2
    attention_slot = 62 * 32 * (4 * 8192 + (2 * 8192 + 2 * 1024) / 4 + 8192 / 4 + 8192) * 2
    latent_slot = 62 * 32 * 2 * (8192 + 4096) * 2
    assert found["adapter slot"] == expert_slot + attention_slot + latent_slot
    assert found["KV cache"] == 60 * 2**30


def test_trainer_shard_is_that_of_the_rank_with_the_most_rows() -> None:
    cfg = reference()
    found = trainer_bytes(cfg, read_facts(cfg), Layout(tensor_parallel=4, num_replicas=1, num_ranks=12))
    experts = 62 * 22 * 3 * 4096 * 4096 * 2  # 256 experts over 12 ranks: 22 on the first
    assert 0 < found["base shard"] - experts < 4e9
    assert found["gradients and AdamW"] == 3 * found["adapter"]


def test_reference_run_fits_16_gb300_and_half_of_them_do_not() -> None:
    plan = make_plan(reference())
    assert plan.chosen.fits is True
    assert plan.chosen.binds.startswith("trainer at ")
    assert plan.kv["longest_sequences_held"] >= plan.kv["concurrency"] == 256
    assert any(fit.layout == plan.chosen.layout and fit.fits for fit in plan.layouts)
    half = make_plan(reference("cluster.num_gpus=8", "trainer.num_workers=4"))
    assert half.chosen.fits is False
    assert not any(fit.fits for fit in half.layouts)


def test_colocated_server_and_trainer_add_up_on_one_gpu() -> None:
    plan = make_plan(config("cluster=gpu1", "rollout.kv_cache_gib=1"))
    together = plan.chosen.server_bytes + plan.chosen.trainer_bytes
    assert together == sum(plan.server.values()) + sum(plan.trainer.values())
    assert (plan.chosen.layout.num_gpus, plan.chosen.fits, plan.layouts) == (1, True, ())
    limit_gb = together / 0.92 / 1e9
    for factor, fits in ((0.99, False), (1.01, True)):
        tight = config("cluster=gpu1", "rollout.kv_cache_gib=1", f"cluster.gpu_memory_gb={factor * limit_gb}")
        assert make_plan(tight).chosen.fits is fits


def test_layouts_divide_all_gpus_and_keep_scale_blocks_whole() -> None:
    plan = make_plan(reference())
    assert {fit.layout.num_gpus for fit in plan.layouts} == {16}
    narrow = replace(read_facts(reference()), moe_intermediate_size=32)  # 2 blocks of 16: at most 2 GPUs
    from sparkrl.planning.plan import _divides

    assert [_divides(narrow, size, False) for size in (1, 2, 4)] == [True, True, False]
    assert _divides(narrow, 4, True)


def test_targets_of_the_adapter_change_its_parameters() -> None:
    facts = read_facts(reference())
    q_only = adapted_weights(reference("lora.targets=[self_attn.q_proj]"), facts)
    assert sum(item.parameters for item in q_only) == 62 * 32 * (8192 + 8192)
    everything = adapted_weights(reference("lora.targets=[all_linear]"), facts)
    assert sum(item.parameters for item in everything) == 10_584_719_360
    with pytest.raises(ConfigError, match="`no_proj` is neither a group nor a module of a muse_spark model") as error:
        adapted_weights(reference("lora.targets=[no_proj]"), facts)
    assert "groups: attention, experts, latent, all_linear" in str(error.value.hint)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "must hold a JSON object, got: list"),
        ('{"model_type": "llama"}', "unknown model family"),
        ('{"model_type": "muse_spark_text", "num_hidden_layers": 0}', "`num_hidden_layers` must be a positive"),
        ('{"model_type": "muse_spark_text", "num_hidden_layers": 2, "layer_types": ["x"]}', "1 entries for 2 layers"),
        ('{"model_type": "muse_spark_text", "num_hidden_layers": 2, "layer_types": 3}', "`layer_types` must be a list"),
        ('{"model_type": "muse_spark", "text_config": "x"}', "`text_config` must be an object, got: 'x'"),
        ('{"model_type": "qwen3_moe", "quantization_config": []}', "`quantization_config` must be an object"),
        ('{"model_type": "qwen3_moe", "num_hidden_layers": 2, "mlp_only_layers": 1}', "`mlp_only_layers` must be a"),
        ('{"model_type": "qwen3_moe", "num_hidden_layers": 2, "decoder_sparse_step": 0}', "must be a positive"),
    ],
)
def test_broken_config_json_is_explained(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message.replace("`", "`")):
        make_plan(config(f"model.path={tmp_path}"))


def test_missing_model_without_a_known_shape_is_explained() -> None:
    with pytest.raises(ConfigError, match=r"`model\.path` does not exist"):
        make_plan(config("model.path=nowhere"))
    with pytest.raises(
        ConfigError, match=r"no published shape named `moon`; there are: muse_spark_open, qwen3_30b_a3b"
    ):
        make_plan(config("model.path=nowhere", "model.shape=moon"))


def test_dry_run_of_the_reference_prints_config_and_plan_in_time_and_without_torch() -> None:
    code = (
        "import sys; from sparkrl.cli import main; code = main(['train', 'recipe=dapo_math', '--dry-run']);"
        "print(code, sorted({'torch', 'vllm', 'ray', 'verl', 'transformers'} & set(sys.modules)))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # of a processor's time, so that a busy machine does not fail it
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5.0
    assert result.stdout.splitlines()[-1] == "0 []"
    assert "recipe_name: dapo_math" in result.stdout
    assert "Plan: fits." in result.stdout


def test_plan_command_gives_json_and_fails_when_it_does_not_fit(capsys) -> None:
    from sparkrl.cli import main

    assert main(["plan", "recipe=dapo_math", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["fits"] is True and content["adapter"]["bytes_per_swap"] == 2 * 10_584_719_360
    assert main(["plan", "recipe=dapo_math", "cluster.gpu_memory_gb=80"]) == 1
    assert "does not fit" in capsys.readouterr().out


def test_training_still_wants_the_paths(capsys) -> None:
    from sparkrl.cli import main

    assert main(["train", "recipe=dapo_math"]) == 1
    assert "`model.path` does not exist" in capsys.readouterr().err
