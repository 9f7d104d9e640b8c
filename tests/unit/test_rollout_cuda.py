"""The CUDA part of the plugin as far as a CPU can run it; the kernels themselves are in tests/gpu."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from vllm.model_executor.models.utils import WeightsMapper

from sparkrl.errors import AdapterError, VersionError
from sparkrl.rollout.plugin import cuda
from sparkrl.rollout.plugin.cuda import form, swap
from sparkrl.rollout.plugin.versions import CUDA_VERSIONS, require_checked

E, R, H, INNER, D = 6, 4, 8, 10, 12
_AT = "base_model.model.model.language_model.layers.0."


class Module:
    """Keeps what it is handed."""

    def __init__(self, *, first: int = 0, local: int = E) -> None:
        self.ep_rank, self.local_num_experts, self.use_ep = first // local, local, local < E
        self.given: tuple | None = None
        self.was_reset = False

    def set_lora(self, index: int, lora_a: list, lora_b: list) -> None:
        assert index == 0
        self.given = (lora_a, lora_b)

    def reset_lora(self, index: int) -> None:
        self.was_reset = True


def manager(**experts: int) -> SimpleNamespace:
    mapper = WeightsMapper(
        orig_to_new_prefix={"model.language_model.": "model."},
        # stacking must be left alone: it would fold the four projections into one name
        orig_to_new_stacked={".q_proj.": (".qkv_proj.", "q"), ".k_proj.": (".qkv_proj.", "k")},
    )
    names = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.experts")
    made = SimpleNamespace(
        model=SimpleNamespace(hf_to_vllm_mapper=mapper),
        modules={f"model.layers.0.{n}": Module(**experts if n.endswith("experts") else {}) for n in names},
        packed_modules_mapping={"qkv_proj": ["q_proj", "k_proj", "v_proj", "gate_proj"]},
        device=torch.device("cpu"),
        lora_index_to_id=[None],
        _registered_adapters={},
        _active_adapters={},
        num_removals=0,
    )
    made.remove_all_adapters = lambda: setattr(made, "num_removals", made.num_removals + 1)
    return made


def adapter() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = {"self_attn.q_proj": (D, D, 1), "self_attn.k_proj": (D, D, 1)}
    shapes |= {"mlp.experts.base_layer": (H, 2 * INNER, E), "mlp.experts": (INNER, H, E)}
    out = {}
    for name, (width_in, width_out, experts) in shapes.items():
        out[f"{_AT}{name}.lora_A.weight"] = torch.randn(experts * R, width_in, generator=random)
        out[f"{_AT}{name}.lora_B.weight"] = torch.randn(width_out, R * experts, generator=random)
    return out


def test_load_hands_each_expert_its_rows_and_columns() -> None:
    target, tensors = manager(), adapter()
    assert swap.load(target, 7, tensors, rank=R, scale=2.0) == []
    (a_gate_up, a_down), (b_gate_up, b_down) = target.modules["model.layers.0.mlp.experts"].given
    for name, a, b in (("mlp.experts.base_layer", a_gate_up, b_gate_up), ("mlp.experts", a_down, b_down)):
        whole_a, whole_b = tensors[f"{_AT}{name}.lora_A.weight"], tensors[f"{_AT}{name}.lora_B.weight"]
        for e in range(E):
            # PEFT: A has expert-major rows, B has rank-major columns
            assert torch.equal(a[e], whole_a[e * R : (e + 1) * R])
            assert torch.equal(b[e], 2 * whole_b[:, [r * E + e for r in range(R)]])
    assert target.lora_index_to_id == [7] and list(target._active_adapters) == [7] and target.num_removals == 1


def test_load_under_expert_parallelism_takes_local_experts() -> None:
    target, tensors = manager(first=3, local=3), adapter()
    swap.load(target, 1, tensors, rank=R, scale=1.0)
    (a, _), (b, _) = target.modules["model.layers.0.mlp.experts"].given
    assert torch.equal(a[0], tensors[f"{_AT}mlp.experts.base_layer.lora_A.weight"][3 * R : 4 * R])
    assert torch.equal(b[2], tensors[f"{_AT}mlp.experts.base_layer.lora_B.weight"][:, [r * E + 5 for r in range(R)]])
    assert len(a) == len(b) == 3


def test_load_keeps_projections_apart_and_resets_what_has_no_adapter() -> None:
    target, tensors = manager(), adapter()
    swap.load(target, 1, tensors, rank=R, scale=0.5)
    lora_a, lora_b = target.modules["model.layers.0.self_attn.qkv_proj"].given
    assert torch.equal(lora_a[1], tensors[f"{_AT}self_attn.k_proj.lora_A.weight"])
    assert torch.equal(lora_b[0], 0.5 * tensors[f"{_AT}self_attn.q_proj.lora_B.weight"])
    assert lora_a[2:] == [None, None]
    assert target.modules["model.layers.0.self_attn.o_proj"].was_reset


def test_load_with_unknown_module_changes_nothing() -> None:
    target = manager()
    tensors = adapter() | {f"{_AT}self_attn.p_proj.lora_{n}.weight": torch.zeros(R, R) for n in "AB"}
    assert swap.load(target, 1, tensors, rank=R, scale=1.0) == ["model.layers.0.self_attn.p_proj"]
    assert target.num_removals == 0 and not target._active_adapters


def test_load_with_one_factor_missing_is_refused() -> None:
    tensors = adapter()
    del tensors[f"{_AT}self_attn.q_proj.lora_B.weight"]
    with pytest.raises(AdapterError, match=r"only one of the two factors of `model\.layers\.0\.self_attn\.q_proj`"):
        swap.load(manager(), 1, tensors, rank=R, scale=1.0)


def test_adapter_that_vllm_lets_go_of_is_not_replaced_by_the_base_model() -> None:
    target = manager()
    swap.load(target, 5, adapter(), rank=R, scale=1.0)
    with pytest.raises(AdapterError, match="let go of adapter 5"):
        target._registered_adapters[5].get_lora("model.layers.0.mlp.experts")


def test_other_vllm_is_refused_by_version() -> None:
    with pytest.raises(VersionError, match=r"checked with vLLM 0\.33\.0, found: 0\.34\.0") as caught:
        require_checked(cuda.NAME, found="0.34.0", checked=CUDA_VERSIONS)
    assert caught.value.hint is not None and caught.value.hint.startswith("install vllm==0.33.0")


def test_machine_without_a_hopper_gpu_is_refused_by_name() -> None:
    with pytest.raises(VersionError, match=r"compute capability 9\.x \(Hopper\), found: no CUDA device"):
        cuda.require_hopper()


@pytest.mark.parametrize(
    ("latent", "inner", "fits"),
    [(64, 64, False), (256, 256, True), (128, 64, True), (64, 128, True), (192, 64, False), (96, 128, False)],
)
def test_marlin_takes_whole_tiles_only(latent: int, inner: int, fits: bool) -> None:
    assert form.fits_marlin(latent, inner) is fits


def test_quickstart_is_served_in_bf16_because_its_experts_are_narrow() -> None:
    path = Path(__file__).parents[2] / "recipes/quickstart/checkpoint"
    assert form.load_arguments(str(path), 1)["load_format"] == "sparkrl"
