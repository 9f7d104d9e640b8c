"""verl's FSDP2 engine, specialised: adapter-only training over a lazily dequantized base. The only importer of it.

What is overridden and why:
- building: verl loads the whole model on rank 0 and broadcasts it; here the model is made on the meta device, sharded,
  and each rank reads only its own rows, dequantizing them on the way;
- mixed precision: verl casts every parameter and every layer's input to one type; here parameters keep the type they
  are stored in (base in the compute type, router, residual gates and adapter in float32) and inputs are never cast, so
  the float32 residual stream survives;
- forward: log-probs come from the model's own chunked head, under routes of the rollout, without autocast.
Device mesh, gradient accumulation, clipping, optimizer, modes and skipping of non-finite updates are verl's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from verl.trainer.config import CheckpointConfig
from verl.utils.device import get_device_id
from verl.utils.fsdp_utils import apply_fsdp2
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig
from verl.workers.config.optimizer import build_optimizer
from verl.workers.engine import FSDPEngineWithLMHead

from sparkrl.config.schema import Base, Config
from sparkrl.lora.targets import Targets, add_adapter, resolve_targets
from sparkrl.models.compiled import compile_layers
from sparkrl.models.registry import load_config
from sparkrl.quant.checkpoint import CheckpointReader
from sparkrl.trainer.batch import MicroBatch, Totals
from sparkrl.trainer.compiler import compile_backend
from sparkrl.trainer.loading import fill_module, pack_experts
from sparkrl.trainer.losses import Loss
from sparkrl.trainer.packed_experts import check_torch
from sparkrl.trainer.replay import RouteReplay


class AdapterEngine(FSDPEngineWithLMHead):
    """One rank of the trainer. The default process group must exist.

    Args:
        cfg: the run's configuration.
        path: checkpoint folder on this machine.
        seed: seeds the adapter's initial values; the same on every rank.
    Raises:
        CheckpointError, ConfigError: the checkpoint or the adapter's targets are unusable.
    """

    def __init__(self, cfg: Config, *, path: str, seed: int) -> None:
        self.cfg, self.seed, self.path = cfg, seed, path
        self.family, self.text_config = load_config(path)
        self.reader = CheckpointReader(path)
        self.dtype = getattr(torch, cfg.trainer.dtype.value)
        optimizer = cfg.trainer.optimizer
        # the fields of verl's model config that the inherited methods read
        model_config: Any = SimpleNamespace(
            use_remove_padding=True, lora_rank=cfg.lora.rank, hf_config=self.text_config
        )
        super().__init__(
            model_config=model_config,
            engine_config=FSDPEngineConfig(
                strategy="fsdp2",
                use_torch_compile=False,
                wrap_policy={"transformer_layer_cls_to_wrap": [self.family.layer_class.__name__]},
            ),
            optimizer_config=FSDPOptimizerConfig(
                lr=optimizer.lr,
                betas=(optimizer.betas[0], optimizer.betas[1]),
                weight_decay=optimizer.weight_decay,
                clip_grad=optimizer.max_grad_norm,
                lr_warmup_steps=optimizer.warmup_steps,
            ),
            checkpoint_config=CheckpointConfig(),
        )
        self.base_bytes_read = 0
        self.targets: Targets
        self.replay: RouteReplay
        self.forward_s = 0.0

    def initialize(self) -> None:
        """Build model, adapter, shards and optimizer, and read this rank's rows."""
        # verl's own sequence, without its progress prints
        self.module = self._build_fsdp_module(self._build_lora_module(self._build_module()))
        self.optimizer = self._build_optimizer(self.module)
        self.lr_scheduler = self._build_lr_scheduler(self.optimizer)
        self.replay = RouteReplay(self.module, self.family.router_class)
        num_frozen = sum(p.numel() for p in self.module.parameters() if not p.requires_grad)
        backend = compile_backend(self.cfg, num_frozen)
        compile_layers(self.module, backend)
        self.compiles = backend is not None
        self.loss = Loss(self.cfg.algorithm, response_budget=self.cfg.rollout.max_response_tokens)

    def trainable(self) -> dict[str, nn.Parameter]:
        """The adapter's parameters by name, in a fixed order."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def _build_module(self) -> nn.Module:
        with torch.device("meta"):
            module: Any = self.family.build(self.text_config, self.dtype)
            if self.cfg.trainer.base is Base.packed:
                check_torch()
                pack_experts(module, self.reader, self.family, self.dtype)
        self.targets = resolve_targets(list(self.cfg.lora.targets), self.family, module)
        if self.cfg.trainer.gradient_checkpointing:
            module.gradient_checkpointing_enable({"use_reentrant": False})
        return module

    def _build_lora_module(self, module: nn.Module) -> nn.Module:
        with torch.device("meta"):
            module = add_adapter(module, self.cfg.lora, self.targets, self.family)
        assert all(p.dtype == torch.float32 for p in module.parameters() if p.requires_grad)
        return module

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        policy = MixedPrecisionPolicy(param_dtype=None, reduce_dtype=torch.float32, cast_forward_inputs=False)
        apply_fsdp2(
            module,
            {"mesh": self.device_mesh, "mp_policy": policy, "offload_policy": None, "reshard_after_forward": True},
            self.engine_config,
        )
        module.to_empty(device=get_device_id())
        with torch.no_grad():
            fill_module(module, self.reader, self.family, self.text_config, seed=self.seed)
        self.base_bytes_read = self.reader.bytes_read
        del self.reader  # closes the files
        return module

    def _build_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return build_optimizer([p for p in module.parameters() if p.requires_grad], self.optimizer_config)

    def _build_lr_scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        warmup = self.optimizer_config.lr_warmup_steps
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / warmup) if warmup else 1.0)

    def score(
        self, batches: Iterator[MicroBatch], *, temperature: float, pin: bool, adapter: bool = True
    ) -> Iterator[tuple[MicroBatch, Tensor]]:
        """Log-probs of the response tokens, float32 [B, M] for each micro-batch, without gradients."""
        with torch.no_grad(), self.eval_mode(), nullcontext() if adapter else self.disable_adapter():
            for batch in batches:
                log_probs_BM, _ = self._forward(batch, temperature=temperature, pin=pin)
                yield batch, log_probs_BM

    def update(
        self, batches: list[MicroBatch], totals: Totals, *, temperature: float, pin: bool
    ) -> tuple[list[tuple[Tensor, Tensor]], dict[str, float]]:
        """One optimizer step.

        Returns:
            Log-probs and entropies of the response tokens, both float32 [B, M] for each micro-batch, from before the
            update; and the sum of losses, the gradient's norm, the learning rate and times.
        """
        outputs, loss_sum, started = [], 0.0, time.perf_counter()
        self.forward_s = 0.0
        with self.train_mode():
            self.optimizer_zero_grad()
            for i, batch in enumerate(batches):
                with self._gradient_sync_context(is_last_micro_batch=i == len(batches) - 1):
                    log_probs_BM, entropy_BM = self._forward(batch, temperature=temperature, pin=pin, with_entropy=True)
                    loss = self.loss(log_probs_BM, entropy_BM, batch, totals)
                    loss.backward()
                loss_sum += float(loss.detach())
                outputs.append((log_probs_BM.detach(), entropy_BM.detach()))
            backward_end = time.perf_counter()
            lr = self.optimizer.param_groups[0]["lr"]
            grad_norm = self.optimizer_step()
            self.lr_scheduler_step()
        self.replay.load(None, pin=False)
        ended = time.perf_counter()
        return outputs, {
            "loss": loss_sum,
            "grad_norm": grad_norm,
            "lr": lr,
            "forward_s": self.forward_s,
            "backward_s": backward_end - started - self.forward_s,
            "optimizer_s": ended - backward_end,
        }

    def _forward(
        self, batch: MicroBatch, *, temperature: float, pin: bool, with_entropy: bool = False
    ) -> tuple[Tensor, Any]:
        started = time.perf_counter()
        self.replay.load(batch.routes, pin=pin, counted_T=batch.counted)
        out = self.module(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            targets=batch.targets,
            temperature=temperature,
            with_entropy=with_entropy,
            entropy_grad=bool(self.cfg.algorithm.entropy_coef),
            use_cache=False,
        )
        self.replay.stop_counting()
        log_probs_BM = out.log_probs[0][batch.response_index]
        entropy_BM = out.entropy[0][batch.response_index] if with_entropy else None
        self.forward_s += time.perf_counter() - started
        return log_probs_BM, entropy_BM
