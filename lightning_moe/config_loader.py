"""What YAML files and command lines of ``lightning-moe`` may hold beyond jsonargparse: see :func:`load_yaml`."""

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader, set_loader

from lightning_moe.models.deepseek_v3.config import PRESETS, DeepSeekV3Config

PARSER_MODE = "lightning_moe"

_SCIENTIFIC = re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
_CONFIG_OPTION = re.compile(r"^--model\.(?:init_args\.)?config$")
_STRATEGY_OPTION = "--trainer.strategy"
_REGISTERED_STRATEGIES = {"expert_parallel": "lightning_moe.ExpertParallelStrategy"}
_SETTINGS = "write settings such as trainer: {max_steps: 1000}"
# jsonargparse reads a file from within its folder, so the folder of the command has to be remembered
_command_folder: ContextVar[Path] = ContextVar("_command_folder", default=Path())


def load_yaml(text: str) -> Any:
    """Loads YAML with two additions.

    Whole numbers in scientific notation (``max_tokens: 1e6``) are integers, so that they fit settings of either type.
    ``model.config`` may be the name of a preset or the path of a Hugging Face ``config.json``, relative to the YAML
    file or to the working directory; fields beside it with dotted names (``config.num_hidden_layers: 6``) override it.
    ``trainer.strategy`` may be the registered name or the class path of a strategy class, which Lightning would take
    for the name of a strategy without settings.

    Args:
        text: The YAML.

    Raises:
        ValueError: The ``config.json`` is missing or not a DeepSeek-V3.
    """
    value = yaml.load(text, Loader=_Loader)
    if not isinstance(value, dict):
        return value
    if all(inner is None for inner in value.values()):
        return get_loader("yaml")(text)  # `{a, b}` and `a:` are texts to jsonargparse
    for node in (value, value.get("fit"), value.get("validate"), value.get("test")):
        model = node.get("model") if isinstance(node, dict) else None
        if isinstance(model, dict):
            _expand_config(model)
            if isinstance(model.get("init_args"), dict):
                _expand_config(model["init_args"])
        trainer = node.get("trainer") if isinstance(node, dict) else None
        if isinstance(trainer, dict) and isinstance(trainer.get("strategy"), str):
            trainer["strategy"] = _strategy(trainer["strategy"])
    return value


def check_file(path: str | os.PathLike[str]) -> None:
    """Checks that a file of settings can be read as such.

    Args:
        path: As given to ``--config``; what is no local file is not checked.

    Raises:
        ValueError: It holds no YAML, or no settings.
    """
    if not os.path.isfile(path):
        return
    try:
        text = Path(path).read_text(encoding="utf-8")
        value = yaml.load(text, Loader=_Loader)
    except UnicodeDecodeError as error:
        raise ValueError(f"config: {path} is not UTF-8 text (byte {error.start}). Save it as UTF-8.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        problem = getattr(error, "problem", None) or str(error)
        context = f" ({error.context})" if isinstance(error, yaml.MarkedYAMLError) and error.context else ""
        source = f"\n{mark.get_snippet()}" if mark is not None and mark.buffer is not None else ""
        raise ValueError(f"config: {path}{line}: {problem}{context}{source}") from error
    if value is None:
        raise ValueError(f"config: {path} is empty. Leave it out, or {_SETTINGS}.")
    if isinstance(value, dict):
        if all(setting is None for setting in value.values()):
            raise ValueError(f"config: {path} gives no value to {', '.join(map(str, value))}; {_SETTINGS}.")
        return
    what = "a list" if isinstance(value, list) else f"the text {value}" if isinstance(value, str) else repr(value)
    raise ValueError(f"config: {path} is {what}, but must be settings; {_SETTINGS}.")


def expand_arguments(arguments: Iterable[str]) -> list[str]:
    """Does for the command line what :func:`load_yaml` does for files."""
    expanded: list[str] = []
    option = ""
    for argument in arguments:
        name, equals, value = argument.partition("=") if argument.startswith("--") else (option, "", argument)
        if not (equals or not argument.startswith("--")):
            option = argument
            expanded.append(argument)
            continue
        if _CONFIG_OPTION.match(name) and _is_reference(value):
            value = json.dumps(_fields_of(value))
        elif name == _STRATEGY_OPTION and _strategy(value) != value:
            value = json.dumps(_strategy(value))
        elif _SCIENTIFIC.match(value):
            value = str(_whole(value))
        expanded.append(f"{name}={value}" if equals else value)
        option = ""
    return expanded


@contextmanager
def command_folder(folder: Path) -> Iterator[None]:
    """Remembers the folder that a command was given in, for paths in its YAML files."""
    token = _command_folder.set(folder)
    try:
        yield
    finally:
        _command_folder.reset(token)


def _expand_config(init_args: dict[str, Any]) -> None:
    value = init_args.get("config")
    if not isinstance(value, str) or not _is_reference(value):
        return
    read = _fields_of(value)
    for key in [key for key in init_args if isinstance(key, str) and key.startswith("config.")]:
        *groups, leaf = key.split(".")[1:]
        target = read
        for group in groups:
            target[group] = target = dict(target.get(group) or {})
        target[leaf] = init_args.pop(key)
    init_args["config"] = read


def _strategy(value: str) -> str | dict[str, Any]:
    class_path = _REGISTERED_STRATEGIES.get(value, value)
    return {"class_path": class_path} if "." in class_path and "/" not in class_path else value


def _is_reference(value: str) -> bool:
    return value in PRESETS or value.endswith(".json")


def _fields_of(value: str) -> dict[str, Any]:
    if value in PRESETS:
        return asdict(DeepSeekV3Config.preset(value))
    folders = list(dict.fromkeys([Path.cwd(), _command_folder.get().absolute()]))
    found = next((folder / value for folder in folders if (folder / value).is_file()), None)
    if found is None:
        names = [os.path.relpath(folder) for folder in folders]
        where = " or ".join("this folder" if name == "." else name for name in names)
        raise ValueError(
            f"model.config: there is no file {value} in {where}.\n"
            f"Give the path of a config.json, a preset ({', '.join(PRESETS)}) or the fields themselves."
        )
    return asdict(DeepSeekV3Config.from_json(found))


def _whole(text: str) -> int | float:
    number = float(text.replace("_", ""))
    return int(number) if number.is_integer() else number


class _Loader(yaml.SafeLoader):
    """YAML 1.2's numbers (``1e6`` is one) and no dates, as jsonargparse reads them."""


def _construct_float(loader: Any, node: yaml.ScalarNode) -> int | float:
    return _whole(node.value) if _SCIENTIFIC.match(node.value) else float(loader.construct_yaml_float(node))


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _SCIENTIFIC, list("-+0123456789"))
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)
set_loader(PARSER_MODE, load_yaml, (yaml.YAMLError,))
