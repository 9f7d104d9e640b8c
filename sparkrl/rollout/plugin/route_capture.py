"""Routed experts from the CPU model runner.

Stock vLLM 0.32.0 returns routed experts only through its second model runner, which needs Triton and so does not exist
on CPU: `VllmConfig` refuses `enable_return_routed_experts` there. Everything behind the runner (scheduler, store,
output processor, the router hook that captures ids) is device-independent, so this patch lets the config through and
drives vLLM's own worker-side connector from the V1 CPU runner: announce a step before it, snapshot the captured ids
after the forward pass, hand them over with the sampled tokens. Routes of prefix-cache hits come from vLLM's store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkrl.rollout.plugin.versions import require_checked

NAME = "route capture on the CPU runner"


@dataclass(frozen=True)
class _Batch:
    """The three fields of a batch that the connector reads."""

    req_ids: list[str]
    query_start_loc_np: np.ndarray
    num_computed_tokens_np: np.ndarray


def apply() -> None:
    """Patch `VllmConfig` and `CPUModelRunner`; a second call does nothing."""
    require_checked(NAME)
    from vllm.config import VllmConfig
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if is_applied():
        return
    runner: Any = CPUModelRunner
    config: Any = VllmConfig
    stock_initialize = runner.initialize_kv_cache
    stock_execute = runner.execute_model
    stock_sample = runner.sample_tokens

    def initialize_kv_cache(
        self: Any, kv_cache_config: Any, is_profiling: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        stock_initialize(self, kv_cache_config, is_profiling, *args, **kwargs)
        self.aux_connector = None
        self.aux_pending = None
        if not is_profiling and self.vllm_config.aux_output_config.enabled:
            from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

            self.aux_connector = get_aux_output_connector(self.get_model(), self.vllm_config, kv_cache_config)

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        connector = getattr(self, "aux_connector", None)
        if connector is None:
            return stock_execute(self, scheduler_output, *args, **kwargs)
        connector.begin_step(scheduler_output.aux_output_connector_metadata)
        output = stock_execute(self, scheduler_output, *args, **kwargs)
        self.aux_pending = None
        if scheduler_output.total_num_scheduled_tokens > 0:
            count = self.input_batch.num_reqs
            batch = _Batch(
                req_ids=list(self.input_batch.req_ids[:count]),
                query_start_loc_np=self.query_start_loc.np[: count + 1].copy(),
                num_computed_tokens_np=self.input_batch.num_computed_tokens_cpu[:count].copy(),
            )
            self.aux_pending = connector.prepare_output(batch)
        return output

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        output = stock_sample(self, grammar_output)
        pending = getattr(self, "aux_pending", None)
        if pending is not None:
            self.aux_pending = None
            num_sampled = np.array([len(ids) for ids in output.sampled_token_ids], dtype=np.int32)
            pending.enqueue_cpu_copy(num_sampled, np.zeros_like(num_sampled))
            output.aux_output_connector_output = pending.process_output()
        return output

    runner.initialize_kv_cache = initialize_kv_cache
    runner.execute_model = execute_model
    runner.sample_tokens = sample_tokens
    runner.sparkrl_route_capture = True
    config._verify_aux_output_compatibility = _verify


def is_applied() -> bool:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    return bool(getattr(CPUModelRunner, "sparkrl_route_capture", False))


def _verify(config: Any) -> None:
    """Stock's check without its demand for the second runner, and with only what can occur on CPU."""
    if not config.aux_output_config.enabled:
        return
    if config.model_config.runner_type != "generate" or not config.model_config.is_moe:
        raise ValueError("routed experts are returned only by generating MoE models")
    if not config.cache_config.enable_prefix_caching:
        raise ValueError("returning routed experts needs prefix caching")
    if config.speculative_config is not None or config.parallel_config.pipeline_parallel_size > 1:
        raise ValueError("returning routed experts on CPU excludes speculative decoding and pipeline parallelism")
