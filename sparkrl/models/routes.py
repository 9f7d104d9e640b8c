"""Checks on routed experts before anybody replays them.

Shape legend: N tokens that were fed to the model (prompt + response - 1), L layers that route, K routed slots.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkrl.errors import RoutingError


def validate_routes(
    routes: Any,
    *,
    num_prompt: int,
    num_response: int,
    num_layers: int,
    top_k: int,
    num_experts: int,
    uid: str,
) -> None:
    """Refuse routes that cannot be those of this response.

    Args:
        routes: uint8 (up to 256 experts) or uint16 [N, L, K], N = num_prompt + num_response - 1: the last sampled token
            was never fed to the model. The order within K is free.
        num_prompt, num_response: tokens.
        uid: the response's name, for messages.
    Raises:
        RoutingError: wrong type, dtype or shape; a layer whose ids are all zero (capture never wrote it, or a stale
            buffer); an id of an expert that does not exist; an expert twice among one token's slots. The message names
            the response and, where there is one, the layer.
    """
    if not isinstance(routes, np.ndarray):
        raise _refuse(uid, f"expected an array, got: {type(routes).__name__}")
    dtype = np.uint8 if num_experts <= 256 else np.uint16
    if routes.dtype != dtype:
        raise _refuse(uid, f"expected dtype {np.dtype(dtype)} for {num_experts} experts, got: {routes.dtype}")
    shape = (num_prompt + num_response - 1, num_layers, top_k)
    if routes.shape != shape:
        raise _refuse(
            uid,
            f"expected shape {list(shape)} (prompt {num_prompt} + response {num_response} - 1 tokens, layers, slots), "
            f"got: {list(routes.shape)}",
        )
    if routes.size == 0:
        return
    # Only a single-slot router may choose expert 0 for every token; with more slots that is a duplicate in any case.
    silent_L = ~routes.any(axis=(0, 2))
    if silent_L.any() and (top_k > 1 or silent_L.all()):
        layer = int(silent_L.argmax())
        raise _refuse(uid, f"every id of layer {layer} is 0, so nothing was captured there", layer)
    out_L = (routes >= num_experts).any(axis=(0, 2))
    if out_L.any():
        layer = int(out_L.argmax())
        worst = int(routes[:, layer].max())
        raise _refuse(uid, f"layer {layer} names expert {worst}, but there are {num_experts}", layer)
    if top_k == 1:
        return
    sorted_NLK = np.sort(routes, axis=-1)
    twice_NL = (sorted_NLK[..., 1:] == sorted_NLK[..., :-1]).any(axis=-1)
    if twice_NL.any():
        layer = int(twice_NL.any(axis=0).argmax())
        token = int(twice_NL[:, layer].argmax())
        ids = routes[token, layer].tolist()
        raise _refuse(uid, f"layer {layer} routes token {token} to the same expert twice: {ids}", layer)


def _refuse(uid: str, what: str, layer: int | None = None) -> RoutingError:
    where = f"response `{uid}`" if layer is None else f"response `{uid}`, layer {layer}"
    return RoutingError(
        f"routed experts of {where} cannot be replayed: {what}",
        hint="check that the server's route capture is live (`sparkrl doctor`) and that server and trainer load the "
        "same checkpoint",
    )
