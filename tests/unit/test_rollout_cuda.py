"""The CUDA part of the plugin as far as a CPU can run it; the kernels themselves are in tests/gpu."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkrl.errors import VersionError
from sparkrl.rollout.plugin import cuda
from sparkrl.rollout.plugin.cuda import form
from sparkrl.rollout.plugin.versions import CUDA_VERSIONS, require_checked


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
