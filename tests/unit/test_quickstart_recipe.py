"""The quickstart's committed checkpoint and data, and the generator behind them."""

from __future__ import annotations

import ast
import json
import random
import re
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, MuseSparkTextConfig
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkTextModel

from sparkrl.quant.checkpoint import CheckpointReader

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart"
CHECKPOINT = RECIPE / "checkpoint"


@pytest.fixture(scope="module")
def recipe():
    """The recipe's own modules, which lie beside its script and not in a package."""
    before = set(sys.modules)
    sys.path.insert(0, str(RECIPE))
    try:
        import problems
        import sample
        import train

        yield {"problems": problems, "sample": sample, "train": train}
    finally:
        sys.path.remove(str(RECIPE))
        for name in set(sys.modules) - before:
            if str(RECIPE) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


@pytest.fixture(scope="module")
def reader() -> CheckpointReader:
    return CheckpointReader(CHECKPOINT)


def evaluate(key: str) -> int:
    """Value of a calculation, by Python's own parser and precedence."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant):
            return int(node.value)
        assert isinstance(node, ast.BinOp)
        left, right = value(node.left), value(node.right)
        return {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}[type(node.op)]

    return value(ast.parse(key, mode="eval").body)


def test_checkpoint_names_are_those_of_transformers(reader):
    with torch.device("meta"):
        model = MuseSparkTextModel(MuseSparkTextConfig(**reader.config))
    expected = {f"model.language_model.{name}": tuple(t.shape) for name, t in model.state_dict().items()}
    expected["lm_head.weight"] = (reader.config["vocab_size"], reader.config["hidden_size"])
    assert {name: reader.shape(name) for name in reader.names} == expected


def test_checkpoint_first_and_last_experts_are_bfloat16_others_nvfp4(reader):
    last = reader.config["num_hidden_layers"] - 1
    for name in reader.names:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        layer = int(re.search(r"layers\.(\d+)\.", name)[1])
        assert reader.is_quantized(name) == (layer not in (0, last))
        assert reader.dtype(name) == torch.bfloat16


def test_checkpoint_router_and_gates_are_float32(reader):
    kept = [n for n in reader.names if n.endswith(("residual_gate.gate", "mlp.gate.weight", "e_score_correction_bias"))]
    assert len(kept) == 4 * reader.config["num_hidden_layers"]
    assert {reader.dtype(n) for n in kept} == {torch.float32}


def test_checkpoint_bfloat16_dequantization_is_exact(reader):
    for name in filter(reader.is_quantized, reader.names):
        exact = reader.read(name, dtype=torch.float32)
        assert torch.equal(reader.read(name).float(), exact)
    scales = [t for n, t in load_file(CHECKPOINT / "model.safetensors").items() if n.endswith("_weight_scale_2")]
    assert all(torch.equal(torch.exp2(torch.log2(t).round()), t) for t in scales)


def test_checkpoint_attention_cycles_end_at_the_last_layer(reader):
    config = reader.config
    for i, (kind, theta) in enumerate(zip(config["layer_types"], config["layer_rope_theta"], strict=True)):
        full = (config["num_hidden_layers"] - 1 - i) % 4 == 0
        assert kind == ("full_attention" if full else "sliding_attention")
        assert (theta == 0) == full


def test_checkpoint_folder_is_at_most_10_mb():
    files = [CHECKPOINT, RECIPE]
    size = sum(f.stat().st_size for folder in files for f in folder.iterdir() if f.is_file())
    assert size <= 10_000_000


def test_tokenizer_chat_template_renders_one_turn_and_round_trips():
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 12 + 7?"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|user|>What is 12 + 7?<|end|><|assistant|>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    digits = tokenizer.convert_ids_to_tokens(tokenizer("4096", add_special_tokens=False)["input_ids"])
    assert digits == ["4", "0", "9", "6"]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.decode(tokenizer("snow ☃\n", add_special_tokens=False)["input_ids"]) == "snow ☃\n"


def test_sliding_window_is_smaller_than_the_longest_prompt(reader):
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    rows = pq.read_table(RECIPE / "heldout.parquet").to_pylist()
    longest = max(len(tokenizer.apply_chat_template(row["prompt"], return_dict=True)["input_ids"]) for row in rows)
    assert longest > reader.config["sliding_window"]


def test_data_rows_have_dapo_schema_and_right_answers():
    for name, count in (("train", 4000), ("heldout", 128)):
        rows = pq.read_table(RECIPE / f"{name}.parquet").to_pylist()
        assert len(rows) == count
        assert len({row["extra_info"]["index"] for row in rows}) == count
        for row in rows:
            assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
            ((role, content),) = [(m["role"], m["content"]) for m in row["prompt"]]
            assert role == "user" and content.endswith("End with a line `Answer: N`.")
            assert str(int(row["reward_model"]["ground_truth"])) == row["reward_model"]["ground_truth"]
            plain = re.search(r"(\d+(?: [-+*] \d+)+)[?.]", content)
            if plain:
                assert evaluate(plain[1]) == int(row["reward_model"]["ground_truth"])


def test_data_sets_share_no_prompt_and_no_calculation(recipe):
    rows = {name: pq.read_table(RECIPE / f"{name}.parquet").to_pylist() for name in ("train", "heldout")}
    prompts = {name: {row["prompt"][0]["content"] for row in table} for name, table in rows.items()}
    assert not prompts["train"] & prompts["heldout"]
    training, heldout = recipe["problems"].draw_sets(0)
    assert not {p.key for p in training} & {p.key for p in heldout}


def test_data_rebuilt_with_the_seed_equals_the_committed_files(recipe):
    problems = recipe["problems"]
    for name, drawn in zip(("train", "heldout"), problems.draw_sets(0), strict=True):
        assert problems.rows(drawn, name) == pq.read_table(RECIPE / f"{name}.parquet").to_pylist()


def test_problem_answer_equals_python_arithmetic(recipe):
    rng = random.Random(3)
    for _ in range(2000):
        problem = recipe["problems"].draw(rng)
        assert problem.answer == evaluate(problem.key)
        for number in re.findall(r"\d+", problem.key):
            assert number in problem.question


def test_solution_careful_without_slips_is_right_line_by_line(recipe):
    problems, sample = recipe["problems"], recipe["sample"]
    rng = random.Random(4)
    for _ in range(1000):
        problem = problems.draw(rng)
        text = problems.solution(problem, rng, careful=1.0, slip=0.0)
        for line in text.splitlines()[:-1]:
            assert len({evaluate(part) for part in line.split("=")}) == 1
        assert sample.is_right(problem, text)


def test_solution_slip_one_makes_every_answer_wrong_for_one_step(recipe):
    problems, sample = recipe["problems"], recipe["sample"]
    rng = random.Random(5)
    for _ in range(500):
        problem = problems.draw(rng)
        if len(problem.steps) == 1:
            assert not sample.is_right(problem, problems.solution(problem, rng, careful=1.0, slip=1.0))


def test_scoring_agrees_with_verl(recipe):
    from verl.utils.reward_score.math_dapo import compute_score

    problems, sample = recipe["problems"], recipe["sample"]
    rng = random.Random(6)
    for _ in range(300):
        problem = problems.draw(rng)
        text = problems.solution(problem, rng, careful=0.5, slip=0.3)
        verdict = compute_score(text, str(problem.answer))
        assert sample.is_right(problem, text) == verdict["acc"]


def test_orthogonal_step_has_singular_values_near_one(recipe):
    stack = torch.randn(3, 48, 32, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(recipe["train"]._orthogonal(stack))
    assert values.min() > 0.5 and values.max() < 1.3


def test_balance_step_moves_bias_towards_equal_use(recipe, reader):
    train = recipe["train"]
    model = recipe["sample"].load(CHECKPOINT)
    balance = train.Balance(model)
    before = balance.routers[2].e_score_correction_bias.clone()
    ids = torch.randint(5, 500, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(ids)
    counts = balance.counts_LE[2].clone()
    assert counts.sum() == 64 * reader.config["num_experts_per_tok"]
    balance.step(0.01)
    balance.close()
    moved = balance.routers[2].e_score_correction_bias - before
    assert torch.allclose(moved, 0.01 * torch.sign(counts.mean() - counts), atol=1e-6)


def test_config_declares_the_published_quantization_form():
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config["architectures"] == ["MuseSpark1xForCausalLM"] and config["model_type"] == "muse_spark_text"
    assert config["quantization_config"]["quant_algo"] == "NVFP4"
    assert "model.layers.0.feed_forward*" in config["quantization_config"]["ignore"]
