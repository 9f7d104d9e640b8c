"""The run folder, metrics, W&B, the terminal and the report."""

from __future__ import annotations

from sparkrl.telemetry.report import build_report
from sparkrl.telemetry.run_folder import RunFolder
from sparkrl.telemetry.summary import build_summary, installed_versions
from sparkrl.telemetry.telemetry import RunStatus, Telemetry

__all__ = ["RunFolder", "RunStatus", "Telemetry", "build_report", "build_summary", "installed_versions"]
