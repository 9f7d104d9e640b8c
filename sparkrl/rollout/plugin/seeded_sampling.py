"""Seeded requests whose prompt is computed in more than one step.

Stock vLLM 0.32.0 samples a token for every request of a step, also for those whose prompt is not complete yet, and then
takes the draw back by moving the request's generator four steps back. CPU generators have no offset: the engine dies
with "CPU Generator does not use offset". The patch hides the generators of such requests while sampling, so that there
is nothing to take back; the token they get from the global generator is thrown away, as it is in stock.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkrl.rollout.plugin.versions import require_checked

NAME = "seeded sampling with chunked prompts on CPU"


def apply() -> None:
    """Wrap `CPUModelRunner.sample_tokens`; a second call does nothing."""
    require_checked(NAME)
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if is_applied():
        return
    runner: Any = CPUModelRunner
    stock_sample = runner.sample_tokens

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        generators = self.input_batch.generators
        unfinished = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0].tolist()
        hidden = {index: generators.pop(index) for index in unfinished if index in generators}
        try:
            return stock_sample(self, grammar_output)
        finally:
            generators.update(hidden)

    runner.sample_tokens = sample_tokens
    runner.sparkrl_seeded_sampling = True


def is_applied() -> bool:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    return bool(getattr(CPUModelRunner, "sparkrl_seeded_sampling", False))
