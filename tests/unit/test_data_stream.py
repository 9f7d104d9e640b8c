"""Order and resumption of the problem stream."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sparkrl.data import ProblemStream
from sparkrl.errors import DataError
from sparkrl.types import Problem


def make_problems(num_problems, prefix="p"):
    return tuple(
        Problem(uid=f"{prefix}{i}", messages=(), answer=str(i), data_source="d", prompt_ids=np.zeros(1, np.int32))
        for i in range(num_problems)
    )


def uids(problems):
    return [problem.uid for problem in problems]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("steps_before", [0, 1, 3, 4, 7, 20])
def test_stream_restored_from_state_serves_exactly_what_follows(shuffle, steps_before):
    stream = ProblemStream(make_problems(11), seed=5, shuffle=shuffle)
    for _ in range(steps_before):
        stream.take(3)
    state = json.loads(json.dumps(stream.state()))
    expected = [uids(stream.take(3)) for _ in range(12)]
    other = ProblemStream(make_problems(11), seed=5, shuffle=shuffle)
    other.take(2)
    other.restore(state)
    assert [uids(other.take(3)) for _ in range(12)] == expected


def test_stream_unshuffled_serves_file_order_without_end():
    stream = ProblemStream(make_problems(5), seed=0, shuffle=False)
    served = [uid for _ in range(5) for uid in uids(stream.take(3))]
    assert served == [f"p{i % 5}" for i in range(15)]
    assert stream.epoch == 2


def test_stream_shuffled_serves_every_problem_once_an_epoch_in_a_new_order():
    stream = ProblemStream(make_problems(12), seed=1, shuffle=True)
    epochs = [[uid for _ in range(3) for uid in uids(stream.take(4))] for _ in range(3)]
    assert all(sorted(epoch) == sorted(uids(make_problems(12))) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_stream_order_depends_on_the_seed():
    first, same, other = (ProblemStream(make_problems(50), seed=s, shuffle=True).take(50) for s in (1, 1, 2))
    assert uids(first) == uids(same) != uids(other)


@pytest.mark.parametrize("shuffle", [True, False])
def test_stream_never_serves_a_problem_twice_in_one_take(shuffle):
    stream = ProblemStream(make_problems(10), seed=3, shuffle=shuffle)
    for _ in range(50):
        taken = uids(stream.take(7))
        assert len(set(taken)) == 7


@pytest.mark.parametrize("num_problems", [0, 4])
def test_stream_asked_for_an_impossible_number_names_the_limit(num_problems):
    with pytest.raises(DataError, match="between 1 and 3"):
        ProblemStream(make_problems(3), seed=0, shuffle=True).take(num_problems)
    with pytest.raises(DataError, match="between 1 and 3"):
        ProblemStream(make_problems(3), seed=0, shuffle=True).require(num_problems)


def test_stream_restored_from_another_data_set_or_seed_is_refused():
    state = ProblemStream(make_problems(3), seed=0, shuffle=True).state()
    with pytest.raises(DataError, match="data set differs"):
        ProblemStream(make_problems(3, prefix="q"), seed=0, shuffle=True).restore(state)
    with pytest.raises(DataError, match="`seed` differs"):
        ProblemStream(make_problems(3), seed=1, shuffle=True).restore(state)


def test_stream_of_no_problems_is_refused():
    with pytest.raises(DataError, match="at least one problem"):
        ProblemStream((), seed=0, shuffle=True)
