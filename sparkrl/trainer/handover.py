"""What can be wrong with the memory that a rank leaves its part of the adapter in, as one kind of error."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from sparkrl.config.schema import Transport
from sparkrl.errors import AdapterError

NEXT = {Transport.cuda_ipc: Transport.shared_memory, Transport.shared_memory: Transport.object_store}
"""What `rollout.adapter_transport=auto` takes where the one before has no memory."""
_OF_MEMORY = re.compile(r"out of memory|allocate memory|shared memory|no space left", re.IGNORECASE)
"""Words of torch's RuntimeErrors that are about memory."""
_NUMBERS_OF_MEMORY = (errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def memory_errors(transport: Transport) -> Iterator[None]:
    """Turn the system's errors, and torch's and Ray's for want of memory, into ours; any other passes.

    Raises:
        AdapterError: there is not enough memory, or the system does not let it be shared.
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
        memory = not isinstance(error, OSError) or error.errno in _NUMBERS_OF_MEMORY
        raise AdapterError(
            f"{'no memory' if memory else 'the system does not allow'} to hand the adapter over through "
            f"{transport.value}: {type(error).__name__}{f': {first}' if first else ''}",
            hint=f"choose `rollout.adapter_transport={other}`"
            + (", or halve it with `rollout.adapter_dtype=bfloat16`" if memory else ""),
        ) from None
