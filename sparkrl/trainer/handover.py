"""What can be wrong with the memory that a rank leaves its part of the adapter in, as one kind of error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from sparkrl.config.schema import Transport
from sparkrl.errors import AdapterError

NEXT = {Transport.cuda_ipc: Transport.shared_memory, Transport.shared_memory: Transport.object_store}
"""What `rollout.adapter_transport=auto` takes where the one before has no memory."""
_OF_MEMORY = re.compile(r"out of memory|allocate memory|shared memory|no space left", re.IGNORECASE)
"""Words of torch's RuntimeErrors that are about memory."""


@contextmanager
def memory_errors(transport: Transport) -> Iterator[None]:
    """Turn the system's, torch's and Ray's errors for want of memory into ours; any other passes.

    Raises:
        AdapterError: there is not enough memory, or it cannot be shared.
    """
    from ray.exceptions import ObjectStoreFullError, OutOfDiskError

    try:
        yield
    except AdapterError:
        raise
    except (MemoryError, OSError, RuntimeError, ObjectStoreFullError, OutOfDiskError) as error:
        if isinstance(error, RuntimeError) and not _OF_MEMORY.search(str(error)):
            raise
        other = NEXT.get(transport, Transport.shared_memory).value
        first = next(iter(str(error).strip().splitlines()), "")
        raise AdapterError(
            f"no memory to hand the adapter over through {transport.value}: "
            f"{type(error).__name__}{f': {first}' if first else ''}",
            hint=f"choose `rollout.adapter_transport={other}`, or halve it with `rollout.adapter_dtype=bfloat16`",
        ) from None
