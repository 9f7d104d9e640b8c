"""How the adapter gets from trainer to servers: the fastest way that works here."""

from __future__ import annotations

from sparkrl.config.schema import Config, Device, Transport
from sparkrl.errors import AdapterError
from sparkrl.rollout import RolloutPool
from sparkrl.trainer.group import TrainerGroup


async def settle_transport(config: Config, rollout: RolloutPool, trainer: TrainerGroup) -> str | None:
    """Try whether the servers can read what the ranks leave on their GPUs, and have the ranks leave it there if so.

    Returns:
        A warning where `auto` has to take another way on a machine with GPUs.
    Raises:
        AdapterError: `cuda_ipc` was asked for and does not work here.
    """
    wanted = config.rollout.adapter_transport
    if config.cluster.device is Device.cpu or wanted not in (Transport.auto, Transport.cuda_ipc):
        return None
    if wanted is Transport.auto and trainer.auto_transport is Transport.object_store:
        return None  # several machines: no GPU reaches another machine's memory
    offered = await trainer.offer_on_device()
    why = offered.message if isinstance(offered, AdapterError) else await rollout.try_on_device(offered)
    if why is None:
        trainer.auto_transport = Transport.cuda_ipc
        return None
    if wanted is Transport.cuda_ipc:
        raise AdapterError(
            f"the servers cannot read the adapter from the trainer's GPUs: {why}",
            hint="set `rollout.adapter_transport=auto`, which takes shared memory then",
        )
    return f"adapters travel through {trainer.auto_transport.value}, not from GPU to GPU: {why}"
