"""The run folder, metrics, W&B, TensorBoard, the terminal and the reports."""

from __future__ import annotations

from sparkrl.telemetry.eval_folder import ADAPTER, BASELINE, EvalFolder, is_evaluation
from sparkrl.telemetry.eval_report import build_eval_report
from sparkrl.telemetry.figures import figures_of, figures_table, gain_text
from sparkrl.telemetry.lock import only_writer
from sparkrl.telemetry.problems import ProblemRow, problem_rows, problem_table, write_problems
from sparkrl.telemetry.publish import publish_evaluation
from sparkrl.telemetry.report import build_report
from sparkrl.telemetry.run_folder import RunFolder, adapter_folder
from sparkrl.telemetry.summary import build_summary, installed_versions
from sparkrl.telemetry.telemetry import RunStatus, Telemetry

__all__ = [
    "ADAPTER",
    "BASELINE",
    "EvalFolder",
    "ProblemRow",
    "RunFolder",
    "RunStatus",
    "Telemetry",
    "adapter_folder",
    "build_eval_report",
    "build_report",
    "build_summary",
    "figures_of",
    "figures_table",
    "gain_text",
    "installed_versions",
    "is_evaluation",
    "only_writer",
    "problem_rows",
    "problem_table",
    "publish_evaluation",
    "write_problems",
]
