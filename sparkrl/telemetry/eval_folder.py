"""The folder of an evaluation job: every answer as soon as it is scored, and the figures at the end.

runs/evals/<evaluation>/<YYYYmmdd-HHMMSS>-<seed>/
    config.yaml        resolved configuration
    responses.jsonl    every response, of the adapter and of its baseline
    evaluation.json    what was evaluated, and the figures
    problems.parquet   one row a problem
    report.html
runs/evals/<evaluation>/latest -> the newest of them
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparkrl.config.schema import Config
from sparkrl.errors import ConfigError
from sparkrl.telemetry.run_folder import RunFolder, append_rows, finite, group_answers, read_rows, write_atomically
from sparkrl.types import Answer

RECORD = "evaluation.json"
RESPONSES = "responses.jsonl"
BASELINE, ADAPTER = "baseline", "adapter"
"""Policies: the model under a zero adapter, and under the adapter that is evaluated."""


class EvalFolder:
    """One evaluation job's folder. A single process writes to it; any number may read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, cfg: Config, about: dict[str, Any]) -> EvalFolder:
        """Make the folder of a new evaluation.

        Args:
            about: what decides the answers; one that is gone on with must say the same.
        Raises:
            ConfigError: `run_dir` already holds a run, or the folder cannot be made.
        """
        run = RunFolder.create(cfg, name=f"evals/{cfg.eval.name}")
        folder = cls(run.path)
        folder.write_record({"about": about})
        return folder

    @classmethod
    def open(cls, path: str | Path, about: dict[str, Any] | None = None) -> EvalFolder:
        """An existing evaluation, to report on or to go on with.

        Args:
            about: refuse an evaluation that was started with something else.
        Raises:
            ConfigError: not the folder of an evaluation, or of another one.
        """
        folder = cls(Path(path).resolve())
        if not folder.path.is_dir():
            raise ConfigError(f"no evaluation at {path}: there is no such folder", hint=f"looked from {Path.cwd()}")
        if not is_evaluation(folder.path):
            raise ConfigError(
                f"{path} is not the folder of an evaluation: it has no {RECORD}",
                hint="name one, for example runs/evals/aime2024/latest",
            )
        was = folder.record().get("about", {})
        for key, now in (about or {}).items():
            if was.get(key) != now:
                raise ConfigError(
                    f"cannot go on with {path}: `{key}` is {now}, the evaluation was started with {was.get(key)}\n"
                    "Its answers would belong to two evaluations.",
                    hint=f"give the evaluation's own `{key}`, or leave `eval.resume` out",
                )
        return folder

    def record(self) -> dict[str, Any]:
        """Content of evaluation.json.

        Raises:
            ConfigError: it cannot be read, or does not hold an evaluation's record.
        """
        try:
            record = json.loads((self.path / RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path / RECORD} cannot be read: {error}") from error
        parts = ("about", BASELINE, ADAPTER)
        if not isinstance(record, dict) or not all(isinstance(record.get(part, {}), dict) for part in parts):
            raise ConfigError(f"{self.path / RECORD} is not what `sparkrl eval` writes")
        return record

    def write_record(self, record: dict[str, Any]) -> None:
        """Write evaluation.json, whole or not at all."""
        write_atomically(self.path / RECORD, json.dumps(finite(record), indent=2, allow_nan=False) + "\n")

    def append(self, policy: str, answers: Sequence[Answer]) -> None:
        """Write answers down.

        Raises:
            SparkrlError: they cannot be written (disk full, say); what was written before stays readable.
        """
        append_rows(
            self.path / RESPONSES,
            [{"policy": policy, **asdict(answer)} for answer in answers],
            hint=f"free disk space, then go on with `eval.resume={self.path}`; no answered problem is asked again",
        )

    def answers(self, policy: str) -> tuple[tuple[Answer, ...], ...]:
        """The answers of a policy so far, by problem in the order they were written."""
        return group_answers([row for row in read_rows(self.path / RESPONSES) if row.get("policy") == policy])


def is_evaluation(path: Path) -> bool:
    """Whether a folder is an evaluation job's."""
    return (path / RECORD).is_file()
