"""What one server needs to know: plain data, made from the run's config by the pool and sent to the actor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparkrl.config.schema import COLOCATED_SHARE, Config, Device, Swap
from sparkrl.models.registry import load_config
from sparkrl.threads import openmp_environment

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks vLLM allocates buffers for."""
_BLOCK_TOKENS = 32
"""Tokens a key-value block holds on CPU: what the attention kernel prefers, and short enough to share prompts."""
_GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Batch sizes that decode graphs are captured for, up to the server's own limit."""
_MIN_FREE_SHARE = 0.05
CUDA_TARGETS = {
    "muse_spark": ["qkv_proj", "o_proj", "pooler", "unpooler", "experts"],
    "qwen3_moe": ["qkv_proj", "o_proj", "experts"],
    "qwen3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
}
"""What of a family's served model can carry an adapter on CUDA, in vLLM's names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """One server's settings."""

    model_path: str
    dtype: str
    max_tokens: int
    tensor_parallel_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_bytes: int
    num_threads: int
    lora_rank: int
    """The largest of any module: servers make room for one rank."""
    lora_alpha: int
    request_timeout_s: float
    seed: int
    device: str
    family: str = "muse_spark"
    routes: bool = True
    """Whether the model routes, so that responses carry routes."""
    adapter_dtype: str = "float32"
    num_adapter_slots: int = 1
    gpu_share: float = 1.0
    """Part of each GPU that is the server's by Ray's count; below 1 when a trainer rank shares it."""

    @classmethod
    def from_config(cls, cfg: Config, model_path: str) -> ServerSpec:
        rollout = cfg.rollout
        family, text_config = load_config(model_path)
        return cls(
            model_path=model_path,
            dtype=rollout.dtype.value,
            max_tokens=cfg.model.max_tokens,
            tensor_parallel_size=rollout.tensor_parallel_size,
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            kv_cache_bytes=int(rollout.kv_cache_gib * 2**30),
            num_threads=rollout.num_threads,
            lora_rank=max(cfg.lora.rank, cfg.lora.expert_rank or 0),
            lora_alpha=cfg.lora.alpha,
            request_timeout_s=rollout.request_timeout_s,
            seed=cfg.seed,
            device=cfg.cluster.device.value,
            family=family.name,
            routes=family.routing(text_config).num_layers > 0,
            adapter_dtype=rollout.adapter_dtype.value,
            num_adapter_slots=2 if rollout.swap is Swap.in_flight else 1,
            gpu_share=COLOCATED_SHARE if cfg.cluster.colocate else 1.0,
        )

    def environment(self) -> dict[str, str]:
        """Environment of the actor; vLLM's own processes inherit it."""
        env = {
            **openmp_environment(self.num_threads),
            "MKL_NUM_THREADS": str(self.num_threads),
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if self.device == Device.cpu.value:
            # Pinning threads to cores would fight with the other parts of the run, and wants a NUMA node a rank.
            env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            if self.tensor_parallel_size == 1:
                # The worker runs inside the engine's process: one process fewer.
                env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        return env

    def engine_arguments(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's `AsyncEngineArgs`."""
        rank = next((r for r in _RANKS if r >= self.lora_rank), self.lora_rank)
        return {
            "model": self.model_path,
            "dtype": self.dtype,
            "tensor_parallel_size": self.tensor_parallel_size,
            "max_model_len": self.max_tokens,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "kv_cache_memory_bytes": self.kv_cache_bytes,
            "seed": self.seed,
            "enable_prefix_caching": True,
            "enable_return_routed_experts": self.routes,
            # Of the distribution that was sampled from: after the temperature.
            "logprobs_mode": "processed_logprobs",
            "enable_lora": True,
            "max_loras": self.num_adapter_slots,
            "max_cpu_loras": self.num_adapter_slots,
            "max_lora_rank": rank,
            "disable_log_stats": True,
            "worker_extension_cls": "sparkrl.rollout.plugin.worker.WorkerExtension",
            **(self._cpu_arguments() if self.device == Device.cpu.value else self._cuda_arguments()),
        }

    def _cpu_arguments(self) -> dict[str, Any]:
        return {"block_size": _BLOCK_TOKENS, "enforce_eager": True}

    def _cuda_arguments(self) -> dict[str, Any]:
        sizes = [size for size in _GRAPH_SIZES if size < self.max_num_seqs]
        return {
            # Memory for keys and values is set in bytes; vLLM only checks that this share of the GPU is free at start,
            # which it is not when a trainer shares the GPU.
            "gpu_memory_utilization": _MIN_FREE_SHARE,
            # Decode steps as CUDA graphs (a step of a small model is otherwise bound by its launches); no compiler:
            # the model class opts out of it.
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [*sizes, self.max_num_seqs],
            },
            "attention_config": {"backend": "FLASH_ATTN"},
            "lora_target_modules": CUDA_TARGETS[self.family],
        }
