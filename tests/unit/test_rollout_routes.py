"""Checks on routed experts."""

from __future__ import annotations

import time

import numpy as np
import pytest

from sparkrl.errors import RoutingError
from sparkrl.models.routes import validate_routes

SHAPE = {"num_prompt": 3, "num_response": 4, "num_layers": 2, "top_k": 2, "num_experts": 8, "uid": "p1/0"}


def good(tokens=6, layers=2, top_k=2, experts=8, dtype=np.uint8):
    random = np.random.default_rng(0)
    ids = random.random((tokens, layers, experts)).argsort(-1)[..., :top_k]
    return ids.astype(dtype)


def refused(routes, *parts, **changes):
    with pytest.raises(RoutingError) as caught:
        validate_routes(routes, **{**SHAPE, **changes})
    for part in ("p1/0", *parts):
        assert part in str(caught.value)


def test_validate_routes_good_passes():
    validate_routes(good(), **SHAPE)
    validate_routes(good(experts=300, dtype=np.uint16), **{**SHAPE, "num_experts": 300})


def test_validate_routes_missing_or_wrong_type_is_refused():
    refused(None, "NoneType")
    refused(good().astype(np.int64), "uint8", "int64")
    refused(good(), "uint16", num_experts=300)


def test_validate_routes_wrong_shape_names_both_shapes():
    refused(good(tokens=7), "[6, 2, 2]", "[7, 2, 2]")
    refused(good(layers=3), "[6, 2, 2]", "[6, 3, 2]")
    refused(good(top_k=3), "[6, 2, 2]", "[6, 2, 3]")


def test_validate_routes_layer_of_zeros_is_refused_as_stale():
    routes = good()
    routes[:, 1] = 0
    refused(routes, "layer 1", "nothing was captured")


def test_validate_routes_out_of_range_names_layer_and_expert():
    routes = good()
    routes[4, 1, 0] = 8
    refused(routes, "layer 1", "expert 8", "there are 8")


def test_validate_routes_duplicate_names_layer_and_token():
    routes = good()
    routes[4, 1] = [5, 5]
    refused(routes, "layer 1", "token 4", "[5, 5]")


def test_validate_routes_single_slot_may_choose_expert_zero_throughout_one_layer():
    routes = np.zeros((6, 2, 1), np.uint8)
    routes[:, 1] = 3
    validate_routes(routes, **{**SHAPE, "top_k": 1})
    refused(np.zeros((6, 2, 1), np.uint8), "layer 0", top_k=1)


def test_validate_routes_a_step_of_256_responses_takes_well_under_a_second():
    routes = good(tokens=100, layers=8, experts=16)
    began = time.perf_counter()
    for _ in range(256):
        validate_routes(routes, num_prompt=50, num_response=51, num_layers=8, top_k=2, num_experts=16, uid="x")
    assert time.perf_counter() - began < 1.0
