"""The dashboard: one definition (`dashboard.json`), as a W&B workspace and as TensorBoard's custom scalars."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from sparkrl.errors import ConfigError, WorkerError

Dashboard = dict[str, Any]
"""`name`, `axis`, and `sections`, each with a `name` and `panels`: `title`, `metrics`, and `log` for a log axis."""


def load_dashboard() -> Dashboard:
    """The definition that ships with the package."""
    return json.loads(files("sparkrl.telemetry").joinpath("dashboard.json").read_text(encoding="utf-8"))


def tensorboard_layout(dashboard: Dashboard) -> dict[str, dict[str, list[Any]]]:
    """The definition in the form of `SummaryWriter.add_custom_scalars`."""
    return {
        section["name"]: {panel["title"]: ["Multiline", panel["metrics"]] for panel in section["panels"]}
        for section in dashboard["sections"]
    }


def wandb_workspace(dashboard: Dashboard, *, entity: str, project: str) -> Any:
    """The definition as a `wandb_workspaces` workspace, not saved yet; needs no network.

    Raises:
        ConfigError: the package `wandb-workspaces` is not installed.
    """
    try:
        import wandb_workspaces.reports.v2 as panels
        import wandb_workspaces.workspaces as ws
    except ImportError as error:
        raise ConfigError(
            f"a W&B workspace is made by the package wandb-workspaces, which is not installed: {error}",
            hint="pip install wandb-workspaces==0.4.13",
        ) from error
    return ws.Workspace(
        entity=entity,
        project=project,
        name=dashboard["name"],
        settings=ws.WorkspaceSettings(x_axis=dashboard["axis"]),
        sections=[
            ws.Section(
                name=section["name"],
                is_open=True,
                panels=[
                    panels.LinePlot(
                        title=panel["title"], x=dashboard["axis"], y=panel["metrics"], log_y=panel.get("log", False)
                    )
                    for panel in section["panels"]
                ],
            )
            for section in dashboard["sections"]
        ],
        auto_generate_panels=True,  # histograms and tables get panels of W&B's own
    )


def save_wandb_workspace(*, entity: str, project: str) -> str:
    """Create the workspace on the W&B server and return its address.

    Raises:
        ConfigError: wandb-workspaces is not installed.
        WorkerError: the server was not reached or refused it.
    """
    workspace = wandb_workspace(load_dashboard(), entity=entity, project=project)
    try:
        workspace.save()
    except Exception as error:  # border: W&B raises dozens of types
        raise WorkerError(
            f"W&B did not take the workspace: {error}", hint="check `wandb login`, the entity and the project's name"
        ) from error
    return str(workspace.url)
