"""An evaluation job's figures for W&B and TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence

from sparkrl.config.schema import Config
from sparkrl.telemetry.eval_folder import EvalFolder
from sparkrl.telemetry.figures import figures_of
from sparkrl.telemetry.problems import ProblemRow
from sparkrl.telemetry.run_folder import RunFolder
from sparkrl.telemetry.sinks import Sink
from sparkrl.telemetry.tensorboard_sink import TensorboardSink
from sparkrl.telemetry.wandb_sink import WandbSink
from sparkrl.types import EvalResult


def publish_evaluation(cfg: Config, folder: EvalFolder, result: EvalResult, problems: Sequence[ProblemRow]) -> None:
    """Log the figures under the names that a training run's evaluations have, and the table of problems.

    A place that cannot be reached costs a warning.
    """
    run = RunFolder(folder.path)
    sinks: list[Sink] = [WandbSink(cfg, run.path, config=run.config(), run_id=run.wandb_id(), job_type="eval")]
    if cfg.telemetry.tensorboard:
        sinks.append(TensorboardSink(run.path, config=run.config_text()))
    figures = {name: value for name, value in figures_of(result).items() if isinstance(value, float)}
    for sink in sinks:
        sink.log(result.step, {f"eval/{name}": value for name, value in figures.items()})
        sink.log_table(result.step, "problems/eval", problems)
        sink.finish(failed=False)
