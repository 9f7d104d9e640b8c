"""The run folder: where everything a run leaves behind lies.

runs/<recipe>/<YYYYmmdd-HHMMSS>-<seed>/
    config.yaml        resolved configuration
    metrics.jsonl      one object a training step or evaluation
    samples.jsonl      sample responses
    histograms.jsonl   per step, how far trainer and rollout are apart
    evals/step-000010.jsonl   every response of an evaluation
    wandb_run.json     the W&B run to go on with
    checkpoints/step-000010/
    summary.json       headline figures
    report.html        curves and samples
runs/<recipe>/latest -> the newest of them
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from yaml import YAMLError

from sparkrl.config.schema import Config
from sparkrl.errors import CheckpointError, ConfigError, DataError, SparkrlError
from sparkrl.types import Answer

_STEP_FOLDER = re.compile(r"step-(\d{6,})")
_UNFINISHED = ".unfinished"
_REPLACED = ".replaced"


class RunFolder:
    """One run's folder. A single process writes to it; any number may read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, cfg: Config, *, name: str | None = None) -> RunFolder:
        """Make the folder of a new run, write its configuration, and point `latest` at it.

        Args:
            name: folder under `output_dir` that it goes into; None is the recipe's name.
        Raises:
            ConfigError: `run_dir` already holds a run, or the folder cannot be made.
        """
        made = None
        try:
            if cfg.run_dir is not None:
                path = Path(cfg.run_dir)
                if (path / "config.yaml").exists():
                    raise ConfigError(
                        f"`run_dir` already holds a run: {path}",
                        hint="choose another folder, or go on with it through `loop.resume`",
                    )
                path.mkdir(parents=True, exist_ok=True)
            else:
                path = made = _make_unique(Path(cfg.output_dir) / (name or cfg.recipe_name), cfg.seed)
            run = cls(path)
            if name is None:
                run.checkpoints_path.mkdir(exist_ok=True)
            write_atomically(path / "config.yaml", OmegaConf.to_yaml(OmegaConf.structured(cfg)))
            if made is not None:
                _point_latest_at(path)  # last: until then it names the run before, which must stay in reach
        except OSError as error:
            if made is not None:
                shutil.rmtree(made, ignore_errors=True)
            raise ConfigError(
                f"cannot create a run folder: {error}", hint="set `output_dir` to a folder that can be written to"
            ) from error
        return run

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run, to report on or to resume.

        Raises:
            ConfigError: no such folder, or not a run's.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise ConfigError(f"no run folder at {folder}", hint="runs lie in runs/<recipe>/, the newest is `latest`")
        if not (folder / "config.yaml").is_file():
            raise ConfigError(
                f"{folder} is not a run folder: it has no config.yaml",
                hint="name one run, for example runs/quickstart/latest",
            )
        return cls(folder.resolve())

    @property
    def checkpoints_path(self) -> Path:
        return self.path / "checkpoints"

    def config(self) -> dict[str, Any]:
        """The run's configuration as plain values.

        Raises:
            ConfigError: config.yaml cannot be read or holds something else.
        """
        try:
            config = OmegaConf.to_container(OmegaConf.load(self.path / "config.yaml"))
        except (OSError, ValueError, YAMLError) as error:
            raise ConfigError(f"cannot read the run's configuration {self.path / 'config.yaml'}: {error}") from error
        if not isinstance(config, dict):
            raise ConfigError(f"{self.path / 'config.yaml'} does not hold a configuration")
        return {str(key): value for key, value in config.items()}

    def config_text(self) -> str:
        """The run's configuration as YAML."""
        return (self.path / "config.yaml").read_text(encoding="utf-8")

    def wandb_id(self) -> str:
        """Identifier of the W&B run that belongs to this folder; made and written down on first use."""
        path = self.path / "wandb_run.json"
        with suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads(path.read_text(encoding="utf-8"))["id"])
        made = secrets.token_hex(4)
        write_atomically(path, json.dumps({"id": made}) + "\n")
        return made

    # Rows ------------------------------------------------------------------------------------------------------------

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Add one JSON object to `<name>.jsonl` and hand it to the operating system; non-finite numbers become null.

        Raises:
            SparkrlError: it cannot be written (disk full, say); rows written before stay readable.
        """
        append_rows(
            self.path / f"{name}.jsonl",
            [row],
            hint="free disk space, then go on from the last checkpoint with `loop.resume`",
        )

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The objects in `<name>.jsonl`, in order; lines torn by a kill are left out."""
        return read_rows(self.path / f"{name}.jsonl")

    def rewind(self, step: int) -> None:
        """Forget metrics, samples and evaluations of later steps, which a run resumed at `step` will write anew."""
        for name in ("metrics", "samples", "histograms"):
            if not (self.path / f"{name}.jsonl").is_file():
                continue
            rows = [row for row in self.rows(name) if row.get("step", 0) <= step]
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            write_atomically(self.path / f"{name}.jsonl", text)
        for later, file in self._answer_files():
            if later > step:
                file.unlink()

    def write_answers(self, step: int, answers: Sequence[Sequence[Answer]]) -> None:
        """Write every response of the evaluation made after `step` steps, whole or not at all.

        Raises:
            SparkrlError: it cannot be written (disk full, say).
        """
        file = self.path / "evals" / f"step-{step:06d}.jsonl"
        with suppress(OSError):
            file.parent.mkdir(exist_ok=True)
        text = "".join(
            json.dumps(finite(asdict(answer)), ensure_ascii=False) + "\n" for row in answers for answer in row
        )
        write_atomically(file, text)

    def answers(self, step: int) -> tuple[tuple[Answer, ...], ...]:
        """Every response of the evaluation made after `step` steps, by problem; empty when there is none."""
        return group_answers(read_rows(self.path / "evals" / f"step-{step:06d}.jsonl"))

    def eval_steps(self) -> list[int]:
        """Steps after which an evaluation was made whose responses are here."""
        return [step for step, _ in self._answer_files()]

    def _answer_files(self) -> list[tuple[int, Path]]:
        found = [(_STEP_FOLDER.fullmatch(file.stem), file) for file in (self.path / "evals").glob("step-*.jsonl")]
        return sorted((int(match[1]), file) for match, file in found if match)

    def write_summary(self, summary: dict[str, Any]) -> Path:
        """Write summary.json whole or not at all."""
        path = self.path / "summary.json"
        write_atomically(path, json.dumps(finite(summary), indent=2, allow_nan=False) + "\n")
        return path

    def summary(self) -> dict[str, Any] | None:
        """Content of summary.json, or None for a run that has not finished."""
        path = self.path / "summary.json"
        try:
            return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        except (OSError, json.JSONDecodeError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error

    # Checkpoints -----------------------------------------------------------------------------------------------------

    @contextmanager
    def checkpoint(self, step: int, *, keep: int = 0) -> Iterator[Path]:
        """A folder to fill with the checkpoint of `step`.

        It takes its final name `checkpoints/step-<step>` when the block ends without an error, so a folder of that
        name is always complete. Then older checkpoints are removed, all but the newest `keep` (0 keeps all).

        Raises:
            SparkrlError: it cannot be written (disk full, say); earlier checkpoints are still there.
        """
        final = self.checkpoints_path / f"step-{step:06d}"
        unfinished = final.with_name(final.name + _UNFINISHED)
        replaced = final.with_name(final.name + _REPLACED)
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            unfinished.mkdir(parents=True)
            yield unfinished
            if final.exists():
                os.replace(final, replaced)
            os.replace(unfinished, final)
        except BaseException as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            if isinstance(error, OSError):
                raise SparkrlError(
                    f"cannot write the checkpoint {final}: {error.strerror}",
                    hint="free disk space, then go on from the last checkpoint with `loop.resume`",
                ) from error
            raise
        self._prune(keep)

    def checkpoints(self) -> list[tuple[int, Path]]:
        """(step, folder) of every complete checkpoint, oldest first."""
        if not self.checkpoints_path.is_dir():
            return []
        found: dict[int, Path] = {}
        for folder in self.checkpoints_path.iterdir():
            # A kill between the two renames of a second save leaves only the replaced folder: it is complete too.
            match = _STEP_FOLDER.fullmatch(folder.name.removesuffix(_REPLACED))
            if match and (int(match[1]) not in found or not folder.name.endswith(_REPLACED)):
                found[int(match[1])] = folder
        return sorted(found.items())

    def latest_checkpoint(self) -> tuple[int, Path]:
        """(step, folder) of the newest complete checkpoint.

        Raises:
            CheckpointError: there is none.
        """
        checkpoints = self.checkpoints()
        if not checkpoints:
            raise CheckpointError(f"no complete checkpoint in {self.checkpoints_path}", hint="start the run anew")
        return checkpoints[-1]

    def _prune(self, keep: int) -> None:
        complete = self.checkpoints()
        kept = {folder for _, folder in (complete[-keep:] if keep > 0 else complete)}
        for folder in self.checkpoints_path.iterdir():
            ours = _STEP_FOLDER.fullmatch(folder.name.removesuffix(_UNFINISHED).removesuffix(_REPLACED))
            if not ours or folder in kept:
                continue
            with suppress(OSError):  # what cannot be removed now is tried again after the next save
                if _STEP_FOLDER.fullmatch(
                    folder.name
                ):  # first renamed: a kill in between leaves no half of a complete one
                    folder = folder.rename(folder.with_name(folder.name + _UNFINISHED))
                shutil.rmtree(folder)


def append_rows(file: Path, rows: Sequence[Mapping[str, Any]], *, hint: str) -> None:
    """Add JSON objects to a file, one a line, and hand them to the operating system; non-finite numbers become null.

    Raises:
        SparkrlError: it cannot be written (disk full, say); rows written before stay readable.
    """
    text = "".join(json.dumps(finite(dict(row)), ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    try:
        if not _ends_with_newline(file):  # a kill in mid-write left half a line; keep it from spoiling this one
            text = "\n" + text
        with file.open("a", encoding="utf-8", errors="backslashreplace") as lines:
            lines.write(text)
    except OSError as error:
        raise SparkrlError(f"cannot write to {file}: {error.strerror}", hint=hint) from error


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, one a line, in order; lines torn by a kill are left out, a missing file has none."""
    if not file.is_file():
        return []
    rows = []
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict):
                rows.append(row)
    return rows


def group_answers(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[Answer, ...], ...]:
    """Rows as `write_answers` wrote them, by problem in order of appearance; keys that are not an answer's are left
    out, and of two rows of one response the later counts."""
    names = [field.name for field in fields(Answer)]
    found: dict[str, dict[int, Answer]] = {}
    for row in rows:
        with suppress(KeyError):
            answer = Answer(**{name: row[name] for name in names})
            found.setdefault(answer.problem_uid, {})[answer.index] = answer
    return tuple(tuple(by_index[index] for index in sorted(by_index)) for by_index in found.values())


def write_atomically(path: Path, text: str) -> None:
    """Write a text file through a temporary one: readers see the old content or the new, never a part.

    Raises:
        SparkrlError: it cannot be written (disk full, say); the old content is still there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise SparkrlError(
            f"cannot write {path}: {error.strerror}", hint="free disk space, or mend the path"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _make_unique(parent: Path, seed: int) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{seed}"
    attempt = 1
    while True:
        path = parent / (stem if attempt == 1 else f"{stem}-{attempt}")
        try:
            path.mkdir()
        except FileExistsError:
            attempt += 1
            continue
        return path


def _point_latest_at(path: Path) -> None:
    link = path.parent / "latest"
    temporary = path.parent / f".latest.{path.name}"
    temporary.symlink_to(path.name)
    try:
        os.replace(temporary, link)
    except OSError:  # someone made a real folder of that name
        temporary.unlink()
        raise


def adapter_folder(folder: Path) -> Path:
    """The adapter's own folder: `folder` itself, or that of the newest checkpoint where it is a run's.

    Raises:
        ConfigError: it is neither.
        CheckpointError: the run has no complete checkpoint.
    """
    if (folder / "config.yaml").is_file():
        return RunFolder.open(folder).latest_checkpoint()[1]
    if not folder.is_dir():
        raise ConfigError(f"no adapter at {folder}: there is no such folder", hint=f"looked from {Path.cwd()}")
    if not (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{folder} is neither a PEFT adapter nor a run folder",
            hint="an adapter's folder holds adapter_config.json, a run's holds config.yaml",
        )
    return folder


def _ends_with_newline(file: Path) -> bool:
    if not file.exists() or file.stat().st_size == 0:
        return True
    with file.open("rb") as rows:
        rows.seek(-1, os.SEEK_END)
        return rows.read(1) == b"\n"


def finite(value: Any) -> Any:
    """The same value with NaN and infinities as None and NumPy scalars as plain numbers: what JSON can hold."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
