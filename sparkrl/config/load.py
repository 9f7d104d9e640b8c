"""Compose YAML and overrides into one checked `Config`.

Hydra does the composing; its messages are turned into ours, which name the key, the value and the nearest right one.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from sparkrl.config.rules import check
from sparkrl.config.schema import Config, Device
from sparkrl.errors import ConfigError

CONF_DIR = Path(__file__).resolve().parent.parent / "conf"
EVAL_SHORT = ("adapter", "k")
"""Keys of `sparkrl eval` alone: the folder to evaluate, and short for `eval.k`."""
_PREPARED = ("dapo_math", "aime2024", "aime2025")
"""Data sets that `sparkrl data prepare` makes, each a file of that name."""


def load(overrides: Sequence[str], *, check_paths: bool = True, trains: bool | None = True) -> Config:
    """Compose `conf/config.yaml` with Hydra overrides such as `recipe=quickstart loop.num_steps=5`.

    Args:
        check_paths: False leaves paths as they are written: a plan is made where model and data need not be.
        trains: False for an evaluation: it needs no training data, and takes the GPUs of its servers alone. None goes
            by the recipe: one without training data is an evaluation, and its `data.path` is then empty.
    Returns:
        The checked configuration, with `model.path`, `data.path` and `eval.path` resolved.
    Raises:
        ConfigError: an unknown key, group option or value, a broken rule, or a path that does not exist.
    """
    _check_keys(overrides, trains is not False)
    ConfigStore.instance().store(name="schema", node=Config)
    try:
        with initialize_config_dir(config_dir=str(CONF_DIR.resolve()), version_base="1.3"):
            composed = compose(config_name="config", overrides=list(overrides))
        without_data = OmegaConf.is_missing(composed.data, "path")
        if trains is None:
            trains = not without_data
        if not trains and without_data:
            composed.data.path = ""
        missing = sorted(OmegaConf.missing_keys(composed))
        if "recipe_name" in missing:
            known = ", ".join(groups()["recipe"])
            raise ConfigError(f"no recipe was chosen; there are: {known}", hint="add `recipe=quickstart`")
        if missing:
            raise ConfigError(
                f"no value for `{missing[0]}`",
                hint=f"set `{missing[0]}=...`"
                + ("; a recipe without training data is for `sparkrl eval`" if missing[0] == "data.path" else ""),
            )
        config = cast(Config, OmegaConf.to_object(composed))
    except (HydraException, OmegaConfBaseException) as error:
        raise _translate(error) from error
    if not trains:
        _leave_out_trainer(config)
    check(config, trains=trains)
    if check_paths:
        _resolve_paths(config, trains=trains)
    return config


def dump(config: Config) -> str:
    """The resolved configuration as YAML, enough to repeat the run."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def from_yaml(path: Path) -> Config:
    """Read what `dump` wrote.

    Raises:
        ConfigError: the file is missing or does not fit the schema.
    """
    try:
        loaded = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path))
        config = cast(Config, OmegaConf.to_object(loaded))
    except OSError as error:
        raise ConfigError(f"cannot read the run's configuration {path}: {error.strerror}") from error
    except (UnicodeDecodeError, YAMLError) as error:
        raise ConfigError(f"cannot read the run's configuration {path}: {error}") from error
    except OmegaConfBaseException as error:
        raise _translate(error) from error
    return config


def groups() -> dict[str, list[str]]:
    """Config groups and their options, from the YAML files that ship with the package."""
    return {
        folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
        for folder in sorted(CONF_DIR.iterdir())
        if folder.is_dir() and any(folder.glob("*.yaml"))
    }


def _leaf_types(cls: type = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, hint in get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from _leaf_types(cast(type, hint), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", hint


def _check_keys(overrides: Sequence[str], trains: bool) -> None:
    leaves = [name for name, _ in _leaf_types()]
    known_keys = leaves if trains else [*leaves, *EVAL_SHORT]
    sections = {name.rsplit(".", 1)[0] for name in leaves if "." in name}
    options = groups()
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException as error:
            key, equals, value = text.partition("=")
            quoted = f": \"{key}='{value}'\"" if equals and "'" not in value else ""
            raise ConfigError(
                f"cannot read the override: {text}",
                hint="write `key=value`; a value with spaces, accents, brackets or commas wants quotes of its own, "
                f"inside those of the shell{quoted}",
            ) from error
        key = override.key_or_group
        if override.is_add() or override.is_delete():
            raise ConfigError(
                f"`{text}`: keys are neither added nor removed, every key of the configuration exists already",
                hint=f"write `{_nearest(key, known_keys)}=...`",
            )
        if override.is_sweep_override():
            raise ConfigError(
                f"`{key}` takes one value, got: {text.partition('=')[2]}",
                hint="start one run for each value",
            )
        if key in options:
            if override.value() not in options[key]:
                value = override.get_value_element_as_str()
                near = difflib.get_close_matches(value, options[key], n=1, cutoff=0.4)
                known = ", ".join(options[key])
                raise ConfigError(
                    f"no {key} named `{value}`; there are: {known}",
                    hint=f"did you mean `{key}={near[0]}`?" if near else None,
                )
        elif key in sections:
            raise ConfigError(
                f"`{key}` is a section, got: {text}", hint=f"set one of its keys: {_keys_of(key, leaves)}"
            )
        elif key not in leaves:
            hint = f"did you mean `{_nearest(key, known_keys)}`?"
            if key == "adapter":
                hint = "`adapter=` is for `sparkrl eval`; a run goes on from its own with `loop.resume=RUN`"
            raise ConfigError(f"no key `{key}`", hint=hint)


def _keys_of(section: str, leaves: Sequence[str]) -> str:
    return ", ".join(leaf for leaf in leaves if leaf.startswith(section + "."))


def _nearest(key: str, leaves: Sequence[str]) -> str:
    """The likest full key; a bare last part (`num_steps`) finds its section."""
    exact = [leaf for leaf in leaves if leaf.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    if exact:
        return max(exact, key=lambda leaf: difflib.SequenceMatcher(None, key, leaf).ratio())
    return max(
        leaves,
        key=lambda leaf: max(
            difflib.SequenceMatcher(None, key, leaf).ratio(),
            difflib.SequenceMatcher(None, key.rsplit(".", 1)[-1], leaf.rsplit(".", 1)[-1]).ratio(),
        ),
    )


def _translate(error: Exception) -> ConfigError:
    """One sentence of ours for Hydra's or OmegaConf's message."""
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(cast(Exception, causes[-1].__cause__))
    text = str(causes[-1])
    key = re.search(r"full_key: (\S+)", "\n".join(map(str, causes)))
    if key is None:
        return ConfigError(f"the configuration cannot be composed: {text.splitlines()[0]}")
    hint_type = dict(_leaf_types()).get(key[1])
    got = re.search(r"[Vv]alue '([^']*)'", text)
    value = f", got: {got[1]}" if got else ""
    return ConfigError(f"`{key[1]}` must be {_expected(hint_type)}{value}")


def _expected(hint: Any) -> str:
    if get_origin(hint) in (list, tuple):
        return "a list, such as [a,b]"
    options = get_args(hint) or (hint,)
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if isinstance(options[0], type) and issubclass(options[0], Enum):
        return "one of " + ", ".join(options[0].__members__)
    return " or ".join(words.get(option, str(getattr(option, "__name__", option))) for option in options)


def _leave_out_trainer(config: Config) -> None:
    cluster, rollout = config.cluster, config.rollout
    cluster.colocate = False
    if cluster.device is Device.cuda:
        cluster.num_gpus = rollout.num_replicas * rollout.tensor_parallel_size


def _resolve_paths(config: Config, *, trains: bool) -> None:
    config.model.path = str(resolve_path(config.model.path, key="model.path"))
    if trains:
        config.data.path = str(resolve_path(config.data.path, key="data.path"))
    if config.eval.path is not None:
        config.eval.path = str(resolve_path(config.eval.path, key="eval.path"))


def resolve_path(path: str, *, key: str) -> Path:
    """An existing path: as given, else relative to the folder that holds `recipes/`.

    Raises:
        ConfigError: neither exists; names `key`.
    """
    given = Path(path).expanduser()
    root = CONF_DIR.resolve().parent
    for candidate in (given, root / given):
        if candidate.exists():
            return candidate.resolve()
    hint = f"looked in {Path.cwd()} and {root}"
    if given.stem in _PREPARED:
        hint += f"; `sparkrl data prepare {given.stem} --out {path}` makes it"
    raise ConfigError(f"`{key}` does not exist: {path}", hint=hint)
