"""What the command line says about itself, and how it reads what is quoted."""

from __future__ import annotations

import re

import pytest

from sparkrl.cli import main
from sparkrl.config.load import groups

COMMANDS = [
    "train", "eval", "plan", "data prepare", "quantize", "dequantize", "export", "merge", "verify-checkpoint", "report",
    "dashboard", "doctor",
]  # fmt: skip


def help_of(command: str, capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_gives_an_example_that_the_command_line_takes(command, capsys):
    (example,) = re.findall(r"^example: sparkrl (.*)$", help_of(command, capsys), re.MULTILINE)
    assert example.startswith(command)
    # its own `--help` behind the example: parsed as far as there, and nothing is run
    assert "usage: sparkrl " + command in help_of(example, capsys)


@pytest.mark.parametrize("command", ["train", "eval", "plan"])
def test_help_lists_every_recipe(command, capsys):
    assert "recipes: " + ", ".join(groups()["recipe"]) in help_of(command, capsys)


@pytest.mark.parametrize("quoted", ["/no such/ä", "'/no such/ä'", '"/no such/ä"'])
def test_eval_takes_an_adapters_path_with_and_without_quotes_of_its_own(quoted, capsys):
    assert main(["eval", "recipe=quickstart", f"adapter={quoted}"]) == 1
    assert "no adapter at /no such/ä: there is no such folder" in capsys.readouterr().err


def test_override_that_needs_quotes_is_shown_with_them(capsys):
    assert main(["plan", "recipe=quickstart", "model.path=/a b/ü"]) == 1
    said = capsys.readouterr().err
    assert "cannot read the override: model.path=/a b/ü" in said and "\"model.path='/a b/ü'\"" in said
    # and what is shown is taken
    assert main(["train", "recipe=quickstart", "model.path='/a b/ü'", "--print-config"]) == 0
    assert "path: /a b/ü" in capsys.readouterr().out
