"""Sizes of tensor parallelism that the model's shape allows; others are refused before anything is started."""

from __future__ import annotations

import pytest

from sparkrl.cli import main
from sparkrl.config.load import load
from sparkrl.errors import ConfigError
from sparkrl.loop.preflight import check_model
from sparkrl.models.tensor_parallel import divides


def test_divides_wants_whole_heads_and_equal_widths():
    muse_spark = {"num_heads": 128, "num_kv_heads": 16, "width": 4096}
    assert [n for n in range(1, 257) if divides(n, **muse_spark)] == [1, 2, 4, 8, 16, 32, 64, 128]
    # 6 key-value heads: 4 GPUs hold neither whole ones nor whole copies; 768 columns go into no 9 parts
    assert [n for n in range(1, 25) if divides(n, num_heads=72, num_kv_heads=6, width=768)] == [1, 2, 3, 6, 12, 24]
    assert divides(9, num_heads=72, num_kv_heads=9, width=0)


def test_plan_of_servers_that_cannot_divide_the_model_is_refused(capsys):
    assert main(["plan", "recipe=dapo_math", "rollout.tensor_parallel_size=3", "cluster.num_gpus=15"]) == 1
    said = capsys.readouterr().err
    assert "`rollout.tensor_parallel_size` is 3, which does not divide the model: 128 query heads" in said
    assert "hint: set it to one of 1, 2, 4, 8, 16, 32, 64" in said
    assert main(["plan", "recipe=qwen3_30b_a3b", "rollout.tensor_parallel_size=16", "cluster.num_gpus=36"]) == 0


@pytest.mark.parametrize(("size", "fits"), [(3, False), (4, True)])
def test_run_with_servers_that_cannot_divide_the_model_is_refused(size, fits):
    config = load(["recipe=quickstart"])
    config.rollout.tensor_parallel_size = size  # the model has 4 query heads and 2 key-value heads
    if fits:
        check_model(config)
        return
    with pytest.raises(ConfigError, match="is 3, which does not divide the model") as caught:
        check_model(config)
    assert "set it to one of 1, 2, 4" in caught.value.hint
