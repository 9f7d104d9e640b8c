"""Routing replay: every router takes the experts that the server chose.

Only the choice is replaced. The routing weights still come from the live logits, so gradients reach them.

Legend: T packed token, L layer that routes, K routed slot.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn


class RouteReplay:
    """Feeds a model's routers, in layer order, and counts how often they would have chosen the same.

    Args:
        model: the model; its routers have a `replay` attribute.
        router_class: their class; None for a model that does not route, where this does nothing.
    """

    def __init__(self, model: nn.Module, router_class: type[nn.Module] | None) -> None:
        routers = [m for m in model.modules() if router_class is not None and isinstance(m, router_class)]
        for layer, router in enumerate(routers):
            router.replay = functools.partial(self._choose, layer)  # type: ignore[assignment]
        self.num_layers = len(routers)
        self._routes_LTK: Tensor | None = None
        self._counted_T: Tensor | None = None
        self._pin = False
        self._same = torch.zeros(())
        self._seen = 0

    def load(self, routes_TLK: Tensor | None, *, pin: bool, counted_T: Tensor | None = None) -> None:
        """Set the routes of the next forward pass; they stay for its backward, where checkpointing recomputes it.

        Args:
            routes_TLK: the server's choice, any integer type; None leaves routing live and counts nothing.
            pin: replace the live choice; False only compares with it.
            counted_T: bool, tokens that count for the agreement; None counts all.
        """
        self._routes_LTK = None if routes_TLK is None else routes_TLK.transpose(0, 1).long()
        self._counted_T, self._pin = counted_T, pin
        self._counting = True

    def stop_counting(self) -> None:
        """Call after the forward pass: a recomputation in backward must not count again."""
        self._counting = False

    def take_agreement(self) -> tuple[int, int]:
        """(token, layer) pairs whose live choice equalled the server's set, and pairs compared, since the last call."""
        same, seen = int(self._same), self._seen
        self._same, self._seen = torch.zeros(()), 0
        return same, seen

    def _choose(self, layer: int, live_TK: Tensor) -> Tensor:
        if self._routes_LTK is None:
            return live_TK
        ids_TK = self._routes_LTK[layer]
        assert ids_TK.shape == live_TK.shape, f"{tuple(ids_TK.shape)} routes for {tuple(live_TK.shape)} choices"
        if self._counting:
            same_T = (ids_TK.sort(-1)[0] == live_TK.sort(-1)[0]).all(-1)
            if self._counted_T is not None:
                same_T = same_T & self._counted_T
            self._same = self._same.to(same_T.device) + same_T.sum()
            self._seen += same_T.numel() if self._counted_T is None else int(self._counted_T.sum())
        return ids_TK if self._pin else live_TK
