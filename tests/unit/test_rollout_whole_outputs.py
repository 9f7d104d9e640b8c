"""Outputs that wait in the scheduler: what leaves, when, and that nothing is lost on the way."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists

from sparkrl.rollout.plugin import whole_outputs


def part(name: str, token: int, *, finish: FinishReason | None = None, rows: int = 1) -> EngineCoreOutput:
    """One step's output: the token, its log-prob -token/10 and rank `token`, and `rows` rows of routes."""
    return EngineCoreOutput(
        request_id=name,
        new_token_ids=[token],
        new_logprobs=LogprobsLists(np.array([[token]]), np.array([[-token / 10]]), np.array([token]), None),
        finish_reason=finish,
        routed_experts=np.full((rows, 2, 1), token, np.uint8),
    )


def request(kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY, **params: object) -> SimpleNamespace:
    sampling = SamplingParams(output_kind=kind, logprobs=0, **params)  # type: ignore[arg-type]
    return SimpleNamespace(sampling_params=sampling, resumable=False)


def test_final_only_request_leaves_once_with_everything() -> None:
    held: dict[str, list[EngineCoreOutput]] = {}
    requests = {"a": request(), "b": request()}
    assert whole_outputs.pass_on(held, requests, [part("a", 1, rows=3), part("b", 7)]) == []
    assert whole_outputs.pass_on(held, requests, [part("a", 2), part("b", 8)]) == []
    # the scheduler has forgotten a request by the time its last output passes
    left = whole_outputs.pass_on(held, {"b": requests["b"]}, [part("a", 3, finish=FinishReason.STOP), part("b", 9)])
    assert [output.request_id for output in left] == ["a"] and list(held) == ["b"]
    assert left[0].new_token_ids == [1, 2, 3] and left[0].finish_reason == FinishReason.STOP
    tokens, log_probs, ranks, _ = left[0].new_logprobs
    assert tokens.tolist() == [[1], [2], [3]] and ranks.tolist() == [1, 2, 3]
    np.testing.assert_allclose(log_probs[:, 0], [-0.1, -0.2, -0.3])
    assert left[0].routed_experts[:, 0, 0].tolist() == [1, 1, 1, 2, 3]


@pytest.mark.parametrize(
    "asked",
    [request(RequestOutputKind.DELTA), request(RequestOutputKind.CUMULATIVE), request(stop=["."]), None],
    ids=["delta", "cumulative", "stop_string", "unknown"],
)
def test_request_that_is_read_on_the_way_is_left_alone(asked: SimpleNamespace | None) -> None:
    held: dict[str, list[EngineCoreOutput]] = {}
    requests = {} if asked is None else {"a": asked}
    output = part("a", 1)
    assert whole_outputs.pass_on(held, requests, [output]) == [output] and not held


def test_routes_that_wait_are_copied() -> None:
    held: dict[str, list[EngineCoreOutput]] = {}
    output = part("a", 1)
    buffer = output.routed_experts
    whole_outputs.pass_on(held, {"a": request()}, [output])
    buffer[:] = 9  # a later step writes to the same memory
    assert whole_outputs.pass_on(held, {}, [part("a", 2, finish=FinishReason.LENGTH)])[0].routed_experts[0, 0, 0] == 1


def test_response_of_one_token_passes_through() -> None:
    output = part("a", 1, finish=FinishReason.LENGTH)
    assert whole_outputs.pass_on({}, {"a": request()}, [output]) == [output]
