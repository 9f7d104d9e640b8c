"""Read problems in DAPO-Math's schema from parquet or JSON lines.

A row is `prompt` (chat messages, or one string for a user message), `reward_model.ground_truth` (the answer) and,
optionally, `data_source`. Rows that cannot be used are left out and counted by reason; a damaged file is an error.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkrl.errors import DataError
from sparkrl.types import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = tuple[dict[str, str], ...]

NO_PROMPT = "no_prompt"
NO_ANSWER = "no_answer"
TOO_LONG = "too_long"
DUPLICATE = "duplicate"
CONFLICTING_ANSWERS = "conflicting_answers"
NOT_RENDERABLE = "not_renderable"

_REASONS = {
    NO_PROMPT: "no prompt",
    NO_ANSWER: "no answer",
    TOO_LONG: "prompt too long",
    DUPLICATE: "same prompt as an earlier row",
    CONFLICTING_ANSWERS: "same prompt as another row, but a different answer",
    NOT_RENDERABLE: "refused by the chat template",
}
_EXPECTED = "`prompt` (chat messages or text) and `reward_model: {ground_truth: ...}`, as in DAPO-Math"
_SUFFIXES = (".parquet", ".jsonl", ".json")
_NUM_ROWS_NAMED = 5
MANIFEST_SUFFIX = ".manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedProblems:
    """The usable problems of a data set, in file order, and what became of its rows."""

    problems: tuple[Problem, ...]
    counts: dict[str, int]
    """`rows`, `kept`, and one entry a reason for which rows were left out; the reasons add up to rows - kept."""

    def describe(self) -> str:
        """One line for people: how many problems, and what was left out."""
        return describe_counts(self.counts)


def describe_counts(counts: Mapping[str, int]) -> str:
    """One line for people: how many problems, and why rows were left out."""
    left_out = [f"{n:,} {_REASONS[reason]}" for reason, n in counts.items() if reason in _REASONS and n]
    kept = f"{counts['kept']:,} problems from {counts['rows']:,} rows"
    return f"{kept} (left out: {', '.join(left_out)})" if left_out else kept


@dataclass(slots=True)
class Candidate:
    """A row with a prompt and an answer, the first one with its prompt."""

    uid: str
    row: int
    messages: Messages
    answer: str
    data_source: str
    num_rows: int = 1
    """Rows that have this prompt."""
    conflicting: bool = False
    """Whether they disagree about the answer."""


@dataclass(slots=True)
class Deduplicated:
    """The different problems of a data set, in file order, and what became of its rows."""

    candidates: list[Candidate]
    counts: Counter[str]
    """`rows`, and one entry a reason for which rows were left out so far."""
    examples: list[str]
    """The first bad rows, for people."""

    def leave_out(self, row: int, reason: str, num_rows: int = 1, *, detail: str = "") -> None:
        """Count rows as left out.

        Args:
            detail: the field that is wrong, and what was found there.
        """
        self.counts[reason] += num_rows
        if len(self.examples) < _NUM_ROWS_NAMED:
            self.examples.append(f"row {row}: {_REASONS[reason]}" + (f" ({detail})" if detail else ""))


def deduplicate(rows: Iterable[tuple[int, dict[str, Any]]]) -> Deduplicated:
    """One candidate a prompt; without rows that lack prompt or answer, and without prompts whose rows disagree about
    the answer, because no reward for them can be trusted.

    Args:
        rows: (number, record in DAPO-Math's schema).
    """
    found = Deduplicated(candidates=[], counts=Counter(), examples=[])
    by_uid: dict[str, Candidate] = {}
    for row, record in rows:
        found.counts["rows"] += 1
        try:
            messages = _messages(record.get("prompt"))
        except _FieldError as error:
            found.leave_out(row, NO_PROMPT, detail=str(error))
            continue
        try:
            answer = _answer(record.get("reward_model"))
        except _FieldError as error:
            found.leave_out(row, NO_ANSWER, detail=str(error))
            continue
        uid = _uid(messages)
        if (earlier := by_uid.get(uid)) is None:
            by_uid[uid] = Candidate(uid, row, messages, answer, str(record.get("data_source") or "unknown"))
        else:
            earlier.num_rows += 1
            earlier.conflicting |= earlier.answer != answer
    for candidate in by_uid.values():
        if candidate.conflicting:
            found.leave_out(candidate.row, CONFLICTING_ANSWERS, candidate.num_rows)
            continue
        if candidate.num_rows > 1:
            found.leave_out(candidate.row, DUPLICATE, candidate.num_rows - 1)
        found.candidates.append(candidate)
    return found


def load_problems(path: str | Path, tokenizer: PreTrainedTokenizerBase, *, max_prompt_tokens: int) -> LoadedProblems:
    """Read, clean and render a data set.

    Args:
        path: a .parquet, .jsonl or .json (lines) file, a folder of them, or a glob pattern.
        tokenizer: renders each prompt once, with the generation prompt at its end.
        max_prompt_tokens: longer rendered prompts are left out, tokens.
    Returns:
        Problems whose `prompt_ids` are int32 [P]. A prompt that occurs several times is kept once; when its rows
        disagree about the answer it is left out whole, because no reward for it can be trusted.
    Raises:
        DataError: missing file or column, an unreadable file, or not one usable row.
    """
    # Duplicates go before rendering: published copies of DAPO-Math repeat every row a hundred times.
    found = deduplicate(_read_rows(_find_files(Path(path))))
    counts = found.counts
    problems = []
    for candidate in found.candidates:
        prompt_ids = _render(tokenizer, candidate.messages)
        if prompt_ids is None:
            found.leave_out(candidate.row, NOT_RENDERABLE)
        elif len(prompt_ids) > max_prompt_tokens:
            found.leave_out(candidate.row, TOO_LONG)
        else:
            problems.append(
                Problem(
                    uid=candidate.uid,
                    messages=candidate.messages,
                    answer=candidate.answer,
                    data_source=candidate.data_source,
                    prompt_ids=prompt_ids,
                )
            )
    if not problems:
        why = "it has no rows" if not counts["rows"] else "; ".join(found.examples)
        raise DataError(
            f"no usable problem in {path}: {why}\nExpected in each row: {_EXPECTED}",
            hint=f"raise `data.max_prompt_tokens`, now {max_prompt_tokens}" if counts[TOO_LONG] else None,
        )
    ordered = {name: counts[name] for name in ("rows", *_REASONS)}
    return LoadedProblems(problems=tuple(problems), counts={**ordered, "kept": len(problems)})


def is_manifest(file: Path) -> bool:
    """Whether a file describes a data set that `sparkrl data prepare` wrote, and holds no rows itself."""
    return file.name.endswith(MANIFEST_SUFFIX)


def _find_files(path: Path) -> list[Path]:
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES and not is_manifest(file))
    else:
        files = sorted(path.parent.glob(path.name)) if any(mark in path.name for mark in "*?[") else []
    if not files:
        raise DataError(
            f"no data set at {path}",
            hint="set `data.path` (or `eval.path`) to a .parquet or .jsonl file, a folder of them or a glob pattern",
        )
    for file in files:
        if file.suffix not in _SUFFIXES:
            raise DataError(f"cannot read {file}: expected one of {', '.join(_SUFFIXES)}, got: {file.suffix or 'none'}")
    return files


def _read_rows(files: list[Path]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (row number from 1 over all files, record)."""
    row = 0
    for file in files:
        for record in _read_parquet(file) if file.suffix == ".parquet" else _read_json_lines(file):
            row += 1
            yield row, record


def _read_parquet(file: Path) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as parquet:
            names = parquet.schema_arrow.names
            missing = [name for name in ("prompt", "reward_model") if name not in names]
            if missing:
                raise DataError(
                    f"{file} lacks the column(s) {', '.join(missing)}; it has: {', '.join(names)}\n"
                    f"Expected: {_EXPECTED}",
                    hint=f"`sparkrl data prepare dapo_math --source {file} --out FILE.parquet` converts other forms",
                )
            wanted = [name for name in ("prompt", "reward_model", "data_source") if name in names]
            for batch in parquet.iter_batches(batch_size=4096, columns=wanted):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} is not a readable parquet file: {error}") from error


def _read_json_lines(file: Path) -> Iterator[dict[str, Any]]:
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise DataError(f"{file}, line {number}: expected a JSON object, got: {line.strip()[:80]}")
                yield record
    except json.JSONDecodeError as error:
        raise DataError(
            f"{file}, line {number} is not JSON: {error.msg}", hint="one JSON object a line; is the file complete?"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {error}") from error


class _FieldError(ValueError):
    """A field of a row that is not what the schema says."""

    def __init__(self, field: str, expected: str, found: Any) -> None:
        shown = repr(found) if found is None or isinstance(found, str | int | float) else type(found).__name__
        super().__init__(f"`{field}` must be {expected}, got: {shown[:60]}")


def _messages(prompt: Any) -> Messages:
    """Chat messages with text in them.

    Raises:
        _FieldError: names the first field that is wrong.
    """
    if isinstance(prompt, str) and prompt.strip():
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise _FieldError("prompt", "text or a list of messages", prompt)
    messages = []
    for i, message in enumerate(prompt):
        if not isinstance(message, dict):
            raise _FieldError(f"prompt[{i}]", "a message with role and content", message)
        for name in ("role", "content"):
            value = message.get(name)
            if not isinstance(value, str) or not value.strip():
                parts = name == "content" and isinstance(value, list)
                expected = "text (parts such as images and sound are not trained on)" if parts else "text"
                raise _FieldError(f"prompt[{i}].{name}", expected, value)
        messages.append({"role": message["role"], "content": message["content"]})
    return tuple(messages)


def _answer(reward_model: Any) -> str:
    """The reference answer as text.

    Raises:
        _FieldError: there is none.
    """
    if not isinstance(reward_model, dict):
        raise _FieldError("reward_model", "an object with ground_truth", reward_model)
    answer = reward_model.get("ground_truth")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
        raise _FieldError("reward_model.ground_truth", "text or a number", answer)
    return str(answer).strip()


def _uid(messages: Messages) -> str:
    """Depends on the prompt alone, so that a problem keeps its name when its file is reordered or extended."""
    text = json.dumps([[message["role"], message["content"]] for message in messages], ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _render(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> np.ndarray | None:
    """int32 [P], or None when the template refuses the messages (an unknown role, say)."""
    from jinja2 import TemplateError

    try:
        ids = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except TemplateError:
        return None
    return np.asarray(ids, dtype=np.int32)
