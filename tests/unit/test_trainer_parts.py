"""Planning, packing, metrics and losses of the trainer, without Ray."""

import numpy as np
import pytest
import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import FSDPActorConfig

from sparkrl.config.schema import Aggregation, AlgorithmConfig, Compile, Config, Device, PolicyLoss
from sparkrl.errors import ConfigError, VersionError
from sparkrl.trainer import platform
from sparkrl.trainer.batch import Row, Totals, collate, plan
from sparkrl.trainer.compiler import compile_backend
from sparkrl.trainer.metrics import agreement, k3, ratio
from sparkrl.trainer.packed_experts import check_torch
from sparkrl.types import TrainSequence


def sequence(prompt, response, advantage=1.0, routes=None):
    fed = len(prompt) + len(response) - 1
    return TrainSequence(
        uid="u",
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array(response, np.int32),
        rollout_log_probs=np.full(len(response), -1.0, np.float32),
        routed_experts=np.arange(fed * 2, dtype=np.uint8).reshape(fed, 1, 2) if routes is None else routes,
        advantages=np.full(len(response), advantage, np.float32),
    )


@pytest.mark.parametrize(("num_ranks", "max_tokens"), [(1, 50), (2, 50), (3, 120), (2, 10_000), (4, 7)])
def test_plan_covers_every_sequence_once_within_the_bound(num_ranks, max_tokens):
    lengths = list(np.random.default_rng(0).integers(1, 45, 37))
    parts = plan(lengths, num_ranks=num_ranks, max_tokens=max_tokens)
    assert len({len(rank) for rank in parts}) == 1 and len(parts) == num_ranks
    assert sorted(i for rank in parts for part in rank for i in part) == list(range(37))
    for part in (part for rank in parts for part in rank):
        assert sum(lengths[i] for i in part) <= max_tokens or len(part) == 1
    loads = [sum(lengths[i] for part in rank for i in part) for rank in parts]
    assert max(loads) - min(loads) <= max(lengths) * 2


def test_plan_fewer_sequences_than_ranks_leaves_a_rank_an_empty_part():
    parts = plan([5], num_ranks=2, max_tokens=100)
    assert sorted(parts) == [[[]], [[0]]]


def test_collate_packs_inputs_targets_and_response_positions():
    batch = collate(
        [
            Row(index=0, sequence=sequence([1, 2, 3], [4, 5], 2.0), old_log_probs=np.array([-1, -2], np.float32)),
            Row(index=1, sequence=sequence([6], [7, 8, 9]), old_log_probs=np.zeros(3, np.float32), counted=False),
        ],
        "cpu",
    )
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 6, 7, 8]]
    assert batch.targets.tolist() == [[2, 3, 4, 5, 7, 8, 9]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert batch.response_index.tolist() == [[2, 3, 0], [4, 5, 6]]
    assert batch.response_mask.tolist() == [[True, True, False], [False, False, False]]
    assert batch.targets[0][batch.response_index[0, :2]].tolist() == [4, 5]
    assert batch.advantages.tolist() == [[2.0, 2.0, 0.0], [1.0, 1.0, 1.0]]
    assert batch.old_log_probs.tolist() == [[-1.0, -2.0, 0.0], [0.0, 0.0, 0.0]]
    assert batch.routes.shape == (7, 1, 2) and batch.counted.tolist() == [True] * 4 + [False] * 3


def test_collate_of_a_one_token_prompt_and_a_response_that_ends_at_once():
    rows = [Row(index=i, sequence=sequence([i + 5], [1])) for i in range(2)]
    batch = collate(rows, "cpu")
    assert batch.input_ids.tolist() == [[5, 6]] and batch.targets.tolist() == [[1, 1]]
    assert batch.position_ids.tolist() == [[0, 0]]
    assert batch.response_index.tolist() == [[0], [1]] and batch.response_mask.all()
    assert batch.routes.shape == (2, 1, 2)


def test_k3_equals_its_formula_and_is_never_negative_near_zero():
    d = np.array([0.5, -1.0, 2.0], np.float32)
    assert k3(d) == pytest.approx(((np.exp(0.5) - 1.5) + (np.exp(-1) + 0) + (np.exp(2) - 3)) / 3, rel=1e-6)
    assert k3(np.array([1e-6], np.float32)) == pytest.approx(5e-13, rel=1e-2)


def test_agreement_reports_absolute_differences():
    found = agreement(np.array([0.1, -0.4, 0.1], np.float32), suffix="_x")
    assert found["agree/dlogp_max_x"] == pytest.approx(0.4) and found["agree/dlogp_mean_x"] == pytest.approx(0.2)


def test_ratio_counts_clipped_tokens_by_the_sign_of_the_advantage():
    log_probs = [np.log(np.array([1.3, 1.3, 0.7, 0.7, 11.0, 1.0]))]
    rows = [sequence([1], [1] * 6)]
    rows[0].advantages[:] = [1, -1, 1, -1, -1, 1]  # clipped: 1.3 up, 0.7 down, 11 beyond the dual clip
    found = ratio(log_probs, [np.zeros(6)], rows, AlgorithmConfig())
    assert found["train/clip_fraction"] == pytest.approx(3 / 6)
    assert found["train/ratio_mean"] == pytest.approx(16 / 6) and found["train/ratio_max"] == pytest.approx(11)


@pytest.fixture(scope="module")
def make_loss():
    platform.install("cpu")
    from sparkrl.trainer.losses import Loss

    return lambda algorithm: Loss(algorithm, response_budget=10)


def rows_for_loss():
    old = [np.array([-1.0, -2.0], np.float32), np.array([-0.5, -0.1, -3.0], np.float32)]
    rows = [
        Row(index=0, sequence=sequence([1, 2], [3, 4], 1.5), old_log_probs=old[0]),
        Row(index=1, sequence=sequence([1], [3, 4, 5], -2.0), old_log_probs=old[1]),
    ]
    log_probs = [torch.tensor([-0.6, -2.1]), torch.tensor([-0.2, -0.4, -3.3])]
    return rows, log_probs


def padded(values):
    return torch.nn.utils.rnn.pad_sequence(values, batch_first=True)


def test_loss_vanilla_equals_hand_computed_clip(make_loss):
    rows, log_probs = rows_for_loss()
    loss = make_loss(AlgorithmConfig())(
        padded(log_probs), None, collate(rows, "cpu"), Totals(num_tokens=5, num_sequences=2, num_ranks=1)
    )
    total = 0.0
    for row, values in zip(rows, log_probs, strict=True):
        for new, old, advantage in zip(
            values.tolist(), row.old_log_probs.tolist(), row.sequence.advantages.tolist(), strict=True
        ):
            r = np.exp(new - old)
            term = max(-advantage * r, -advantage * min(max(r, 0.8), 1.28))
            total += min(term, -advantage * 10.0) if advantage < 0 else term
    assert float(loss) == pytest.approx(total / 5, rel=1e-5)


@pytest.mark.parametrize("kind", list(PolicyLoss))
@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_loss_split_over_micro_batches_and_ranks_adds_up(make_loss, kind, aggregation):
    rows, log_probs = rows_for_loss()
    loss = make_loss(AlgorithmConfig(loss=kind, aggregation=aggregation, entropy_coef=0.1))
    entropy = [torch.tensor([0.3, 0.5]), torch.tensor([0.1, 0.2, 0.9])]
    whole = loss(
        padded(log_probs), padded(entropy), collate(rows, "cpu"), Totals(num_tokens=5, num_sequences=2, num_ranks=1)
    )
    totals = Totals(num_tokens=5, num_sequences=2, num_ranks=2)
    parts = [loss(log_probs[i][None], entropy[i][None], collate([rows[i]], "cpu"), totals) for i in range(2)]
    assert float(sum(parts)) / 2 == pytest.approx(float(whole), rel=1e-5, abs=1e-6)


def test_loss_kl_term_is_k3_to_the_base(make_loss):
    rows, log_probs = rows_for_loss()
    for row in rows:
        row.sequence.advantages[:] = 0
        row.base_log_probs = row.old_log_probs - 0.3
    loss = make_loss(AlgorithmConfig(kl_coef=0.5))(
        padded(log_probs), None, collate(rows, "cpu"), Totals(num_tokens=5, num_sequences=2, num_ranks=1)
    )
    d = np.concatenate([row.base_log_probs - v.numpy() for row, v in zip(rows, log_probs, strict=True)])
    assert float(loss) == pytest.approx(0.5 * float(np.mean(np.exp(d) - 1 - d)), rel=1e-5)


def test_platform_another_verl_version_is_refused(monkeypatch):
    monkeypatch.setattr(platform, "VERL_VERSION", "0.0.1")
    with pytest.raises(VersionError, match=r"0\.0\.1"):
        platform.check_version()


@pytest.mark.parametrize("loss", list(PolicyLoss))
def test_ratio_clip_fraction_is_the_one_verl_counts_for_the_same_loss(loss):
    rng = np.random.default_rng(3)
    lengths = (9, 4, 17, 1)
    old = [rng.normal(-1, 0.3, n).astype(np.float32) for n in lengths]
    shifts = (0.5, -0.5, 0, 3)
    new = [(o + rng.normal(s, 0.4, len(o))).astype(np.float32) for o, s in zip(old, shifts, strict=True)]
    rows = [sequence([1], [1] * n, advantage=a) for n, a in zip(lengths, (1.0, -1.0, -0.5, -1.0), strict=True)]
    mask_BM = torch.zeros(4, 17)
    old_BM, new_BM, advantages_BM = torch.zeros(4, 17), torch.zeros(4, 17), torch.zeros(4, 17)
    for i, n in enumerate(lengths):
        mask_BM[i, :n] = 1
        old_BM[i, :n], new_BM[i, :n] = torch.tensor(old[i]), torch.tensor(new[i])
        advantages_BM[i, :n] = torch.tensor(rows[i].advantages)
    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=10.0
    )
    _, counted = get_policy_loss_fn(loss.value)(old_BM, new_BM, advantages_BM, mask_BM, "token-mean", config)
    expected = counted["actor/pg_clipfrac"] + counted["actor/pg_clipfrac_lower"]
    assert 0 < expected < 1
    assert ratio(new, old, rows, AlgorithmConfig(loss=loss))["train/clip_fraction"] == pytest.approx(expected, abs=1e-6)


def test_compile_is_for_large_models_on_cuda_unless_asked_and_where_there_is_a_compiler(monkeypatch, tmp_path):
    found = {}
    for compiler in ("g++ gcc", ""):
        monkeypatch.setenv("PATH", str(tmp_path / (compiler or "none")))
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.delenv("CXX", raising=False)
        for name in compiler.split():
            program = tmp_path / compiler / name
            program.parent.mkdir(exist_ok=True)
            program.touch(mode=0o755)
        for device in Device:
            for asked in (Compile.auto, Compile.never):
                cfg = Config()
                cfg.cluster.device, cfg.trainer.compile = device, asked
                for billions in (0.99, 1.0):
                    found[bool(compiler), device, asked, billions] = compile_backend(cfg, int(billions * 1e9))
    assert {case for case, backend in found.items() if backend} == {(True, Device.cuda, Compile.auto, 1.0)}


@pytest.mark.parametrize("found", ["2.11.0+cu130", "2.9.1"])
def test_packed_base_on_an_older_torch_is_refused_with_the_way_out(found):
    with pytest.raises(VersionError, match=rf"2\.13 or newer, found {found.replace('+', '.')}") as caught:
        check_torch(found)
    assert "trainer.base=bf16" in caught.value.hint


@pytest.mark.parametrize("found", ["2.13.0+cpu", "2.14.0", "3.0.0a0+git1234"])
def test_packed_base_on_a_newer_torch_is_let_through(found):
    check_torch(found)


@pytest.mark.parametrize(
    ("device", "there", "variable", "value", "lacks"),
    [
        # inductor runs $CXX, or g++ and no other; Triton runs $CC, or gcc, or clang
        (Device.cpu, "g++", "CXX", None, None),
        (Device.cpu, "g++", "CXX", "", "a C++ compiler on the trainer's machine, and CXX is set but empty"),
        (Device.cpu, "clang++", "CXX", None, "a C++ compiler on the trainer's machine, and there is no g++"),
        (Device.cpu, "clang++", "CXX", "clang++", None),
        (Device.cpu, "g++", "CXX", "icpx", "a C++ compiler on the trainer's machine, and there is no icpx"),
        (Device.cuda, "clang", "CC", None, None),
        (Device.cuda, "g++", "CC", None, "a C compiler on the trainer's machine, and there is no gcc or clang"),
        (Device.cuda, "gcc", "CC", "icx", "a C compiler on the trainer's machine, and there is no icx"),
    ],
)
def test_compile_looks_for_the_compiler_that_will_be_run(monkeypatch, tmp_path, device, there, variable, value, lacks):
    (tmp_path / there).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(variable, raising=False)
    if value is not None:
        monkeypatch.setenv(variable, value)
    cfg = Config()
    cfg.cluster.device, cfg.trainer.compile = device, Compile.always
    if lacks is None:
        assert compile_backend(cfg, 1000) == "inductor"
        return
    with pytest.raises(ConfigError) as error:
        compile_backend(cfg, 1000)
    assert error.value.message == f"`trainer.compile=always` needs {lacks}"
    assert error.value.hint == f"install one, name it in {variable}, or set `trainer.compile=never`"
