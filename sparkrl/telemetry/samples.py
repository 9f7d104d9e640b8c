"""Which responses of a step are written down for people to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sparkrl.types import Answer, ScoredGroup

Sample = dict[str, Any]
"""One response as plain values, all rows with the same keys."""


def pick_samples(groups: Sequence[ScoredGroup], *, step: int, kind: str, num_samples: int) -> list[Sample]:
    """Choose responses of a training step, right and wrong ones in turn while both last, each from another problem
    where possible.

    The choice depends on the responses alone, so two equal runs write down the same ones.
    """
    rows = [
        [
            {
                "step": step,
                "kind": kind,
                "uid": response.uid,
                "prompt": group.group.problem.messages[-1]["content"],
                "response": response.text,
                "answer": group.group.problem.answer,
                "extracted": score.extracted,
                "correct": score.correct,
                "reward": score.reward,
                "tokens": len(response.token_ids),
                "finish_reason": response.finish_reason.value,
            }
            for response, score in zip(group.group.responses, group.scores, strict=True)
        ]
        for group in groups
    ]
    return _pick(rows, num_samples)


def pick_answers(answers: Sequence[Sequence[Answer]], *, step: int, kind: str, num_samples: int) -> list[Sample]:
    """The same choice among the answers of an evaluation."""
    rows = [[_sample_of(answer, step, kind) for answer in of_problem] for of_problem in answers]
    return _pick(rows, num_samples)


def _sample_of(answer: Answer, step: int, kind: str) -> Sample:
    row = asdict(answer)
    return {"step": step, "kind": kind, "uid": f"{row.pop('problem_uid')}/{row.pop('index')}", **row}


def _pick(groups: Sequence[Sequence[Sample]], num_samples: int) -> list[Sample]:
    pools: dict[bool, list[tuple[int, Sample]]] = {True: [], False: []}
    for group in groups:
        seen = {True: 0, False: 0}
        for sample in group:
            pools[sample["correct"]].append((seen[sample["correct"]], sample))
            seen[sample["correct"]] += 1
    # Sorting by the rank inside a group (stable) takes the first of every group before the second of any.
    queues = {
        verdict: [sample for _, sample in sorted(pool, key=lambda item: item[0])] for verdict, pool in pools.items()
    }
    picked: list[Sample] = []
    verdict = True
    while len(picked) < num_samples and any(queues.values()):
        queue = queues[verdict] or queues[not verdict]
        picked.append(queue.pop(0))
        verdict = not verdict
    return picked
