"""Whether the scheduler's patches leave tokens, log-probs and routes as stock vLLM returns them.

A call's batches depend on nothing but the call, so the same call under other patches has to give the same arrays, as
far as the kernels do: with hundreds of sequences two calls of stock vLLM itself differ. So each problem is a call of
its own here, and a second pass under stock's own code says what is left of that.
"""

from __future__ import annotations

import numpy as np

from sparkrl.rollout.engine import RolloutServer
from sparkrl.types import Problem, Response, Sampling

NEW, RESPONSES = 96, 2
"""Tokens that pass several blocks and the window's edge; two responses share their prompt's blocks."""
PATCHES = ("whole_outputs", "decode_slots")
CASES: dict[str, tuple[str, ...]] = {
    "stock again": (),
    "whole_outputs": ("whole_outputs",),
    "decode_slots": ("decode_slots",),
    "both": PATCHES,
}


async def compare(server: RolloutServer, problems: list[Problem]) -> dict[str, dict[str, float]]:
    """Differences from stock's answers by patches; the server has both in place before and afterwards.

    Returns:
        For each of `CASES` the shares of responses with the same tokens, and of positions before the first token that
        differs with equal log-probs and with equal routes.
    """

    async def answers(patches: tuple[str, ...]) -> list[Response]:
        await server._rpc("bench_patches", {name: name in patches for name in PATCHES})
        sampling = Sampling(num_responses=RESPONSES, max_tokens=NEW)
        groups = [group for problem in problems for group in await server._sample([problem], sampling)]
        return [response for group in groups for response in group.responses]

    stock = await answers(())
    return {name: difference(stock, await answers(patches)) for name, patches in CASES.items()}


def difference(expected: list[Response], found: list[Response]) -> dict[str, float]:
    """Shares of what is equal, see `compare`."""
    same, log_probs, routes = [], [], []
    for one, other in zip(expected, found, strict=True):
        length = min(len(one.token_ids), len(other.token_ids))
        unequal = np.flatnonzero(one.token_ids[:length] != other.token_ids[:length])
        same.append(not len(unequal) and len(one.token_ids) == len(other.token_ids))
        shared = int(unequal[0]) if len(unequal) else length
        log_probs.append(one.log_probs[:shared] == other.log_probs[:shared])
        # a row for every token that was fed: those of the prompt, and of the response all but the last
        rows = len(one.routed_experts) - len(one.token_ids) + shared
        pair = [np.sort(r.routed_experts[:rows].astype(np.int32), axis=-1) for r in (one, other)]
        routes.append((pair[0] == pair[1]).all(-1).ravel())
    return {
        "responses_with_same_tokens": float(np.mean(same)),
        "equal_log_probs": float(np.concatenate(log_probs).mean()),
        "equal_routes": float(np.concatenate(routes).mean()),
        "positions": float(sum(map(len, log_probs))),
    }
