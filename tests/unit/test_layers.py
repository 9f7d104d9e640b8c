"""Imports point one way: down the list of layers, never sideways, and heavy libraries stay where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "sparkrl"
LAYERS = [
    {"cli"},
    {"checkpoint_commands", "doctor", "loop", "planning"},
    {"rollout", "trainer", "reward", "data", "evals", "telemetry"},
    {"lora"},
    {"models", "quant"},
    {"config"},
    {"types", "errors", "threads"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# Pure helpers of verl (advantages, scoring) are used where they are needed; its engine is not.
ALLOWED = {"vllm": {"rollout"}, "verl": {"trainer", "loop", "reward"}}


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def part_of(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


SOURCES = sorted(path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] not in ("conf", "__init__.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_of_a_module_point_down_only(path: Path) -> None:
    own = part_of(path)
    for name in imports(path):
        if not name.startswith("sparkrl."):
            continue
        other = name.split(".")[1]
        assert other == own or LEVEL[other] > LEVEL[own], f"{path} imports {name}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_heavy_libraries_are_imported_only_where_they_belong(path: Path) -> None:
    for name in imports(path):
        library = name.split(".")[0]
        if library in ALLOWED:
            assert part_of(path) in ALLOWED[library], f"{path} imports {name}"


def test_only_one_module_imports_verls_engine() -> None:
    users = [path for path in SOURCES if any(name.startswith("verl.workers.engine") for name in imports(path))]
    assert [path.relative_to(ROOT).as_posix() for path in users] == ["trainer/engine.py"]


def test_configuration_imports_neither_torch_nor_servers() -> None:
    code = (
        "import sys; from sparkrl.config.load import load, dump; load(['recipe=quickstart']);"
        "import sparkrl.cli; print(sorted({'torch', 'vllm', 'ray', 'verl', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
