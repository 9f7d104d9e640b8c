"""Composition, overrides, and the words a user sees when something is wrong."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from sparkrl.cli import main
from sparkrl.config import load as loading
from sparkrl.config.load import dump, from_yaml, load
from sparkrl.config.schema import Precision
from sparkrl.errors import ConfigError

BASE = ["recipe=quickstart"]


def test_quickstart_composes_with_its_own_values_over_the_defaults() -> None:
    config = load(BASE)
    assert config.recipe_name == "quickstart"
    assert config.rollout.dtype is Precision.float32
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (32, 64, ["attention", "latent", "experts"])
    assert config.algorithm.clip_high == 0.28
    assert Path(config.model.path).is_absolute()


def test_override_wins_over_the_recipe() -> None:
    config = load([*BASE, "loop.num_steps=3", "trainer.optimizer.lr=0", "lora=attention_only"])
    assert (config.loop.num_steps, config.trainer.optimizer.lr, config.lora.targets) == (3, 0.0, ["attention"])


def test_dump_read_back_is_the_same_configuration(tmp_path: Path) -> None:
    config = load([*BASE, "loop.num_steps=7", "trainer.dtype=bfloat16"])
    path = tmp_path / "config.yaml"
    path.write_text(dump(config))
    assert from_yaml(path) == config


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        ([], "no recipe was chosen; there are: aime2024, aime2025, dapo_math, quickstart", "recipe=quickstart"),
        (["recipe=quickstrat"], "no recipe named `quickstrat`", "did you mean `recipe=quickstart`?"),
        ([*BASE, "loop.nm_steps=3"], "no key `loop.nm_steps`", "did you mean `loop.num_steps`?"),
        ([*BASE, "num_steps=3"], "no key `num_steps`", "did you mean `loop.num_steps`?"),
        ([*BASE, "train.lr=3"], "no key `train.lr`", "did you mean `trainer.optimizer.lr`?"),
        ([*BASE, "+x.y=1"], "keys are neither added nor removed", "write `"),
        ([*BASE, "~loop.num_steps"], "keys are neither added nor removed", "write `loop.num_steps=...`"),
        ([*BASE, "loop=3"], "`loop` is a section", "loop.num_steps"),
        ([*BASE, "a b"], "cannot read the override: a b", "key=value"),
        ([*BASE, "loop.num_steps=abc"], "`loop.num_steps` must be a whole number, got: abc", None),
        ([*BASE, "trainer.dtype=fp8"], "`trainer.dtype` must be one of float32, bfloat16, got: fp8", None),
        ([*BASE, "eval.num_problems=x"], "`eval.num_problems` must be a whole number or null, got: x", None),
        ([*BASE, "lora.targets=3"], "`lora.targets` must be a list", None),
        ([*BASE, "lora.targets=[]"], "`lora.targets` is empty", "attention"),
        ([*BASE, "loop.group_size=1"], "`loop.group_size` must be at least 2, got: 1", "loop.group_size=8"),
        ([*BASE, "loop.num_prompts=0"], "`loop.num_prompts` must be positive, got: 0", None),
        ([*BASE, "trainer.optimizer.lr=-1"], "`trainer.optimizer.lr` must not be negative", None),
        ([*BASE, "trainer.optimizer.lr=nan"], "`trainer.optimizer.lr` must be finite, got: nan", None),
        ([*BASE, "rollout.temperature=nan"], "`rollout.temperature` must be finite, got: nan", None),
        ([*BASE, "rollout.kv_cache_gib=inf"], "`rollout.kv_cache_gib` must be finite, got: inf", None),
        ([*BASE, "trainer.optimizer.betas=[0.9,nan]"], "`trainer.optimizer.betas` must be finite", None),
        ([*BASE, "trainer.optimizer.betas=[0.9]"], "`trainer.optimizer.betas` must be two numbers in [0, 1)", None),
        ([*BASE, "eval.max_response_tokens=-5"], "`eval.max_response_tokens` must be positive or null, got: -5", None),
        ([*BASE, "eval.max_response_tokens=0"], "`eval.max_response_tokens` must be positive or null, got: 0", None),
        ([*BASE, "seed=4294967296"], "`seed` must be below 2**32", None),
        ([*BASE, "rollout.top_p=0.9"], "`rollout.top_p` must be 1 while training, got: 0.9", "eval.top_p"),
        ([*BASE, "rollout.top_k=20"], "Log-probs of a truncated distribution bias the importance ratio", "eval"),
        ([*BASE, "rollout.top_k=20"], "`rollout.top_k` must be -1", None),
        ([*BASE, "reward.rule=exact"], "`reward.rule` must be one of math_dapo, math_verify, got: exact", None),
        ([*BASE, "rollout.temperature=0"], "`rollout.temperature` must be above 0", None),
        ([*BASE, "rollout.max_response_tokens=4096"], "more than `model.max_tokens`", "model.max_tokens="),
        ([*BASE, "trainer.max_tokens_per_micro_batch=8"], "must hold the longest sequence", "256"),
        ([*BASE, "cluster.num_gpus=4"], "`cluster.num_gpus` is 4, but `cluster.device` is cpu", "cluster.device=cuda"),
        ([*BASE, "cluster.device=cuda", "cluster.num_gpus=1"], "but the run takes 2", "cluster.num_gpus=2"),
        ([*BASE, "model.path=nowhere/at/all"], "`model.path` does not exist: nowhere/at/all", "looked in"),
        ([*BASE, "trainer.num_workers=300"], "has only 256 responses", "trainer.num_workers"),
        ([*BASE, "recipe_name=../../x"], "`recipe_name` must be letters", None),
        ([*BASE, "cluster=moon"], "no cluster named `moon`; there are:", None),
        (["recipe=quickstart,dapo_math"], "`recipe` takes one value, got: quickstart,dapo_math", "one run for each"),
        ([*BASE, "loop.num_steps=3,5"], "`loop.num_steps` takes one value, got: 3,5", "one run for each"),
        ([*BASE, "seed=range(0,3)"], "`seed` takes one value, got: range(0,3)", "one run for each"),
        ([*BASE, "lora=[a,b]"], "no lora named `[a,b]`; there are: all_linear, attention_only", None),
        ([*BASE, "data=null"], "no data named `null`; there are: dapo_math, quickstart", None),
        ([*BASE, "adapter=here"], "no key `adapter`", "`adapter=` is for `sparkrl eval`"),
        ([*BASE, "eval.name=../../x"], "`eval.name` must be letters, digits", None),
        ([*BASE, "run_dir="], "`run_dir` is empty", "leave it out"),
        ([*BASE, "output_dir="], "`output_dir` is empty", "shell variable"),
        ([*BASE, "data.path="], "`data.path` is empty", "leave it out"),
    ],
)
def test_wrong_override_is_explained(overrides: list[str], message: str, hint: str | None) -> None:
    with pytest.raises(ConfigError) as error:
        load(overrides)
    assert message in error.value.message
    if hint is not None:
        assert error.value.hint is not None and hint in error.value.hint


def test_evaluation_knows_its_own_keys_among_the_near_ones() -> None:
    for wrong, hint in (("apdater=x", "did you mean `adapter`?"), ("+adapter=x", "write `adapter=...`")):
        with pytest.raises(ConfigError) as error:
            load([*BASE, wrong], trains=False)
        assert error.value.hint == hint


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["adapter="], "`adapter` is empty"),
        (["--adapter", ""], "`adapter` is empty"),
        (["adapter=a", "--adapter", "b"], "one adapter is evaluated at a time, got: a, b"),
        (["adapter=a", "adapter=b"], "one adapter is evaluated at a time, got: a, b"),
        (["adapter=nowhere"], "no adapter at nowhere: there is no such folder"),
        (["eval.resume=nowhere"], "no evaluation at nowhere: there is no such folder"),
    ],
)
def test_wrong_folder_of_an_evaluation_is_explained(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *BASE, *arguments]) == 1
    assert message in capsys.readouterr().err


def test_configuration_of_an_evaluation_is_printed_without_model_or_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "recipe=aime2024", "k=4", "adapter=nowhere", "--print-config"]) == 0
    printed = OmegaConf.create(capsys.readouterr().out)
    assert (printed.eval.k, printed.eval.path, printed.cluster.num_gpus) == (4, "data/aime2024.parquet", 4)


def test_full_disk_behind_the_output_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = open("/dev/full", "w", buffering=1)  # noqa: SIM115 - closing it raises once more
    monkeypatch.setattr("sys.stdout", full)
    assert main(["train", *BASE, "--print-config"]) == 1
    assert "error: [Errno 28] No space left on device" in capsys.readouterr().err
    with suppress(OSError):
        full.close()


def test_every_yaml_file_states_known_keys_only() -> None:
    small = ("quickstart", "laptop", "gpu1", "reference", "attention_only", "experts_only")
    for group, options in loading.groups().items():
        for option in options:
            # lengths and GPUs of the large recipes do not suit the small one
            large = "recipe=qwen3_30b_a3b" if option == "h100x8" else "recipe=dapo_math"
            base = BASE if option in small else [large]
            overrides = [f"recipe={option}"] if group == "recipe" else [*base, f"{group}={option}"]
            load(overrides, check_paths=False, trains=not option.startswith("aime"))
