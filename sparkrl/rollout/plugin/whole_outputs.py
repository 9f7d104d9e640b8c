"""One message a response instead of one a token, for requests that are only read when they are complete.

vLLM's engine hands each token of each request, its log-prob and its routes to the front end as small arrays of their
own. At hundreds of sequences packing, unpacking and storing these takes longer than the GPU's step. A request that
asks for its final output only (`RequestOutputKind.FINAL_ONLY`) is not read before its end, so its parts wait in the
scheduler and leave as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists

_stock_update: Any = Scheduler.update_from_output
_stock_finish: Any = Scheduler.finish_requests


def can_wait(request: Any) -> bool:
    """Whether nobody looks at a request's tokens before its end: no reader, no search for a stop string."""
    params = request.sampling_params
    return (
        params is not None
        and params.output_kind == RequestOutputKind.FINAL_ONLY
        and not params.stop
        and params.prompt_logprobs is None
        and not request.resumable
    )


def merge(parts: list[EngineCoreOutput]) -> EngineCoreOutput:
    """The last of a request's outputs, with the tokens, log-probs and routes of all of them."""
    last = parts[-1]
    last.new_token_ids = [token for part in parts for token in part.new_token_ids]
    lists = [part.new_logprobs for part in parts if part.new_logprobs is not None]
    if lists:
        last.new_logprobs = LogprobsLists(
            np.concatenate([one.logprob_token_ids for one in lists]),
            np.concatenate([one.logprobs for one in lists]),
            np.concatenate([one.sampled_token_ranks for one in lists]),
            None,
        )
    routes = [part.routed_experts for part in parts if part.routed_experts is not None]
    if routes:
        last.routed_experts = np.concatenate(routes)
    last.prefill_stats = next((part.prefill_stats for part in parts if part.prefill_stats is not None), None)
    return last


def pass_on(
    held: dict[str, list[EngineCoreOutput]], requests: Mapping[str, Any], outputs: list[EngineCoreOutput]
) -> list[EngineCoreOutput]:
    """The outputs that leave now.

    Args:
        held: parts of unfinished requests; kept up to date.
        requests: the scheduler's, by id; a finished one may be gone already.
        outputs: of one step.
    """
    leaving = []
    for output in outputs:
        request_id = output.request_id
        if output.finish_reason is not None:
            parts = held.pop(request_id, None)
            leaving.append(output if parts is None else merge([*parts, output]))
        elif request_id in held or (request_id in requests and can_wait(requests[request_id])):
            if output.routed_experts is not None:
                # may be a view of a buffer that later steps write to
                output.routed_experts = output.routed_experts.copy()
            held.setdefault(request_id, []).append(output)
        else:
            leaving.append(output)
    return leaving


def _held(scheduler: Any) -> dict[str, list[EngineCoreOutput]]:
    return scheduler.__dict__.setdefault("sparkrl_held", {})


def _update(self: Any, *args: Any, **kwargs: Any) -> Any:
    by_client = _stock_update(self, *args, **kwargs)
    for client, message in list(by_client.items()):
        message.outputs = pass_on(_held(self), self.requests, message.outputs)
        if not (message.outputs or message.scheduler_stats or message.finished_requests):
            del by_client[client]
    return by_client


def _finish(self: Any, *args: Any, **kwargs: Any) -> Any:
    ended = _stock_finish(self, *args, **kwargs)
    for request in ended:
        _held(self).pop(request.request_id, None)
    return ended


def apply() -> None:
    """Put both in place; a second call does nothing."""
    Scheduler.update_from_output = _update  # type: ignore[method-assign]
    Scheduler.finish_requests = _finish  # type: ignore[method-assign]


def is_applied() -> bool:
    return Scheduler.update_from_output is _update and Scheduler.finish_requests is _finish
