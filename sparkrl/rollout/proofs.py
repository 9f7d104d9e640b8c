"""Start-up proofs: the plugin is live where the model runs, adapters act, and routes come back.

Each of these has failed silently somewhere: a plugin that did not import, an adapter that attached to nothing, a route
buffer nobody wrote.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sparkrl.errors import AdapterError, CheckpointError
from sparkrl.models.registry import load_config
from sparkrl.rollout.probe import groups_of, make_adapter
from sparkrl.rollout.spec import ServerSpec
from sparkrl.types import Problem, Sampling

if TYPE_CHECKING:
    from sparkrl.rollout.engine import RolloutServer

_NUM_PROMPTS = 4
_PROMPT_TOKENS = 12
_NEW_TOKENS = 4
_B_STD = 0.3
_NOISE_FACTOR = 4.0
ZERO_LIMIT = 1e-6
"""Most that an adapter with B = 0 may change a log-prob, nats."""
EFFECT_LIMIT = 1e-4
"""Least that a perturbed group must change one of the probe's log-probs, nats."""


def check_reports(reports: list[dict[str, Any]], spec: ServerSpec) -> None:
    """Refuse a worker in which a part of the plugin is missing.

    Raises:
        AdapterError: names the rank and the part.
    """
    for report in reports:
        lacking = [name for name in report["required"] if not report[name]]
        if spec.routes and not report["route_connector"]:
            lacking.append("route connector")
        if not report["model_class"].startswith("sparkrl."):
            lacking.append(f"model class (found {report['model_class']})")
        if report["error"] or lacking:
            raise AdapterError(
                f"the vLLM plugin is not live in the worker of rank {report['rank']}: "
                f"{report['error'] or 'missing ' + ', '.join(lacking)}",
                hint="reinstall the package so that its entry point `vllm.general_plugins` is registered; see "
                "`sparkrl doctor`",
            )


async def check_adapters(server: RolloutServer) -> dict[str, float]:
    """Sample a probe with no adapter, with one that must change nothing, and with each group perturbed.

    Returns:
        Largest change of a log-prob against the base model, nats: `zero`, one entry for each group, and `noise`, how
        far the base model is from itself.
    Raises:
        CheckpointError: the base model gives no numbers.
        AdapterError: the zero adapter changed something, or a perturbed group changed nothing.
        RoutingError: the probe's routes are malformed.
    """
    spec = server.spec
    _, config = load_config(spec.model_path)
    every_group = groups_of(config)
    vocabulary = np.random.default_rng(0)
    prompts = [
        Problem(
            uid=f"probe-{i}",
            messages=(),
            answer="",
            data_source="probe",
            prompt_ids=vocabulary.integers(0, config.vocab_size, _PROMPT_TOKENS, dtype=np.int32),
        )
        for i in range(_NUM_PROMPTS)
    ]

    async def first_log_probs() -> np.ndarray:
        # The first token's distribution is what differs; later ones follow from other tokens.
        groups = await server._sample(prompts, Sampling(max_tokens=_NEW_TOKENS))
        return np.array([group.responses[0].log_probs[0] for group in groups])

    base = await first_log_probs()
    if not np.isfinite(base).all():
        raise CheckpointError(
            f"the base model's log-probs are not numbers ({int((~np.isfinite(base)).sum())} of {len(base)} of the "
            f"start-up probe's): {spec.model_path} holds weights that are not",
            hint="`sparkrl verify-checkpoint` names the tensors",
        )
    # Some GPU kernels do not repeat themselves to the last bit; what they vary by says nothing about adapters.
    noise = float(np.abs(await first_log_probs() - base).max())
    least, most = EFFECT_LIMIT + _NOISE_FACTOR * noise, ZERO_LIMIT + _NOISE_FACTOR * noise
    cases: list[tuple[str, tuple[str, ...], float]] = [("zero", (), 0.0), *((g, (g,), _B_STD) for g in every_group)]
    change: dict[str, float] = {"noise": noise}
    for name, groups, std in cases:
        adapter = make_adapter(
            config, rank=spec.lora_rank, alpha=spec.lora_alpha, groups=groups, b_std=std, seed=1, version=0
        )
        await server._load(adapter)
        change[name] = float(np.abs(await first_log_probs() - base).max())
        if name == "zero" and not change[name] <= most:
            raise AdapterError(f"an adapter with B = 0 changed a log-prob by {change[name]:.2e}, expected none")
        if name != "zero" and not change[name] >= least:
            raise AdapterError(
                f"a perturbed adapter on `{name}` changed no log-prob (largest change {change[name]:.2e}): the server "
                "answers with the base model there"
            )
    await server.unload_adapter()
    return change
