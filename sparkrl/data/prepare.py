"""Published data sets into the form a run reads: one row a problem, DAPO-Math's schema, parquet with a manifest.

`BytedTsinghua-SIA/DAPO-Math-17k` repeats about 17,000 problems a hundred times (1.79M rows), and the AIME-2024 file
beside it repeats 30 problems 32 times, so that a plain loader draws them as if they were different.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sparkrl import __version__
from sparkrl.data.problems import MANIFEST_SUFFIX, Candidate, deduplicate, describe_counts
from sparkrl.errors import DataError

_FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}
_INSTRUCTION = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\nRemember to put your answer "
    'on its own line after "Answer:".'
)
"""DAPO-Math's own prompt, put around problems that are published bare."""
_AIME_ANSWERS = range(1000)
_LONGEST_ANSWER = 200
"""Characters of a `solution` column that is taken for the answer alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A published data set."""

    hub_id: str
    split: str
    num_problems: int | None = None
    """How many different problems there are, where that is certain."""
    is_aime: bool = False


PUBLISHED = {
    "dapo_math": Published(hub_id="BytedTsinghua-SIA/DAPO-Math-17k", split="train"),
    "aime2024": Published(hub_id="BytedTsinghua-SIA/AIME-2024", split="train", num_problems=30, is_aime=True),
    "aime2025": Published(hub_id="math-ai/aime25", split="test", num_problems=30, is_aime=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What was written."""

    name: str
    file: Path
    manifest: Path
    counts: dict[str, int]

    def describe(self) -> str:
        """Two lines for people."""
        return f"{self.name}: {describe_counts(self.counts)}\n{self.file} and {self.manifest}"


def prepare(name: str, *, source: str | None, out: Path) -> Prepared:
    """Read a data set, drop repeated and contradictory problems, write parquet and manifest.

    Args:
        name: `dapo_math`, `aime2024` or `aime2025`.
        source: a .parquet, .jsonl or .json (lines) file, a folder of them, or a Hugging Face id, `ID@REVISION` too;
            None takes the published one. Problems without a chat prompt (text in `prompt`, `problem` or `question`) get
            DAPO-Math's instruction around them.
        out: parquet file to write; the manifest lies beside it. Both appear whole or not at all.
    Raises:
        DataError: an unknown name, an unreadable source, no usable row, or not the AIME's 30 problems.
    """
    if name not in PUBLISHED:
        near = difflib.get_close_matches(name, PUBLISHED, n=1, cutoff=0.4)
        raise DataError(
            f"no data set named `{name}`; there are: {', '.join(PUBLISHED)}",
            hint=f"did you mean `{near[0]}`?" if near else None,
        )
    published = PUBLISHED[name]
    if out.suffix != ".parquet":
        raise DataError(f"the file to write must end in .parquet, got: {out}")
    chosen = source or published.hub_id
    found = deduplicate((row, _to_schema(record)) for row, record in enumerate(_rows(chosen, published), start=1))
    candidates = found.candidates
    if not candidates:
        raise DataError(
            f"no usable problem in {chosen}: {'; '.join(found.examples) or 'it has no rows'}",
            hint="rows need `prompt` (chat messages or text), `problem` or `question`, and "
            "`reward_model.ground_truth`, `answer` or `solution`",
        )
    if published.is_aime:
        for candidate in candidates:
            candidate.answer = _aime_answer(candidate)
    if published.num_problems not in (None, len(candidates)):
        raise DataError(
            f"{name} has {published.num_problems} problems, but {chosen} holds {len(candidates)} different ones",
            hint="is the source complete, and of that year alone?",
        )
    counts = {**found.counts, "kept": len(candidates)}
    digest = _write_parquet(out, candidates)
    manifest = {
        "name": name,
        "source": chosen,
        "split": published.split if _is_hub_id(chosen) else None,
        "file": out.name,
        "sha256": digest,
        "bytes": out.stat().st_size,
        "counts": counts,
        "versions": {"sparkrl": __version__, **{package: version(package) for package in ("datasets", "pyarrow")}},
    }
    manifest_file = out.with_name(out.stem + MANIFEST_SUFFIX)
    with _replacing(manifest_file) as temporary:
        temporary.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return Prepared(name=name, file=out, manifest=manifest_file, counts=counts)


def _is_hub_id(source: str) -> bool:
    return not Path(source).expanduser().exists() and source.count("/") == 1 and not source.startswith((".", "/", "~"))


def _rows(source: str, published: Published) -> Iterator[dict[str, Any]]:
    """Stream records, so that 1.79M rows are neither copied into a cache nor held in memory."""
    from datasets import load_dataset

    path = Path(source).expanduser()
    try:
        if path.exists():
            files = sorted(f for f in path.rglob("*") if _is_data(f)) if path.is_dir() else [path]
            if not files or files[0].suffix not in _FORMATS:
                raise DataError(f"no data in {path}: expected {', '.join(_FORMATS)}")
            names = [str(file) for file in files if file.suffix == files[0].suffix]
            rows = load_dataset(_FORMATS[files[0].suffix], data_files=names, split="train", streaming=True)
        elif _is_hub_id(source):
            hub_id, _, revision = source.partition("@")
            rows = load_dataset(hub_id, split=published.split, revision=revision or None, streaming=True)
        else:
            raise DataError(f"no data set at {source}", hint="give a file, a folder or a Hugging Face id")
        yield from rows
    except DataError:
        raise
    except Exception as error:  # border: datasets raises many unrelated types for damaged files and for the network
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        hint = "without a network, download it elsewhere and give `--source FILE`" if not path.exists() else None
        raise DataError(f"cannot read the data set {source}: {reason}", hint=hint) from error


def _is_data(file: Path) -> bool:
    return file.suffix in _FORMATS and not file.name.endswith(MANIFEST_SUFFIX)


def _to_schema(record: dict[str, Any]) -> dict[str, Any]:
    """A record of any of the published forms, in DAPO-Math's schema; what is missing is left to be counted."""
    prompt = record.get("source_prompt") or record.get("prompt")  # processed copies keep the chat in `source_prompt`
    if prompt is None:
        prompt = record.get("problem") or record.get("question")
    if isinstance(prompt, str) and prompt.strip():
        prompt = [{"role": "user", "content": _INSTRUCTION.format(problem=prompt.strip())}]
    truth = record.get("reward_model") or {"ground_truth": _flat_answer(record)}
    return {"prompt": prompt, "reward_model": truth, "data_source": record.get("data_source")}


def _flat_answer(record: dict[str, Any]) -> Any:
    """The answer of a flat row: `answer`, or `solution` where that is an answer on one line and no worked solution."""
    answer, solution = record.get("answer"), record.get("solution")
    if answer is not None or not isinstance(solution, str):
        return answer if answer is not None else solution
    text = solution.strip()
    return text if "\n" not in text and len(text) <= _LONGEST_ANSWER else None


def _aime_answer(candidate: Candidate) -> str:
    """A whole number from 0 to 999 without leading zeros; published copies have a degree sign or a box around it."""
    bare = re.sub(r"^\\boxed\{(.*)\}$", r"\1", candidate.answer.strip("$ "))
    text = bare.removesuffix("^\\circ").removesuffix("^{\\circ}").removesuffix("°").strip()
    if not (text.isascii() and text.isdigit() and int(text) in _AIME_ANSWERS):
        raise DataError(f"row {candidate.row}: an AIME answer is a whole number from 0 to 999, got: {candidate.answer}")
    return str(int(text))


def _write_parquet(out: Path, candidates: list[Candidate]) -> str:
    """Write the rows; returns the file's SHA-256."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = pa.string()
    schema = pa.schema(
        {
            "data_source": text,
            "prompt": pa.list_(pa.struct({"role": text, "content": text})),
            "ability": text,
            "reward_model": pa.struct({"ground_truth": text, "style": text}),
            "extra_info": pa.struct({"index": text}),
        }
    )
    rows = [
        {
            "data_source": candidate.data_source,
            "prompt": list(candidate.messages),
            "ability": "MATH",
            "reward_model": {"ground_truth": candidate.answer, "style": "rule"},
            "extra_info": {"index": candidate.uid},
        }
        for candidate in candidates
    ]
    with _replacing(out) as temporary:
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), temporary, compression="zstd")
        return hashlib.sha256(temporary.read_bytes()).hexdigest()


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary path whose file takes the place of `path` when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
