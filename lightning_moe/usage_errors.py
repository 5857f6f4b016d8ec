"""Short messages for what a user got wrong: field path, value, rule, a value that works, close names for a typo."""

import difflib
import errno
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any, get_args, get_type_hints

from jsonargparse import ArgumentParser
from torch.distributed.checkpoint.api import CheckpointException

import lightning_moe
from lightning_moe.models.deepseek_v3.config import PRESETS

MAX_LINES = 6
_WIDTH = 118

_KEY = re.compile(r'^(?:Parser key|Key) "([^"]+)":?\s*(.*)$')
_CLASS = re.compile(r"^Problem with given class_path '([^']+)':?\s*(.*)$")
_EXPECTED = re.compile(r"^Expected an? (.+?)(?:\. Got value: (.*))?$")
_NOT_ACCEPTED = re.compile(
    r"^(?:Subcommand '[^']*' does not accept option|Group '([^']*)' does not accept option|Option) '([^']+)'"
)
_UNRECOGNIZED = re.compile(r"^unrecognized arguments: --([^\s=]+)")
_REQUIRED = re.compile(r"^the following arguments are required: (.*)$")
_CALLABLE = re.compile(r"^Type .* expects a function or a callable class: ")
_SUBCLASS = re.compile(r"^Expected '([^']+)' to be a subclass of <class '(?:[^']*\.)?([^'.]+)'>\.*$")
_BUILT = re.compile(r"\.? Got value: Namespace\(class_path='([^']+)'.*$")
_NOISE = (
    "Does not validate against any",
    "Subtypes:",
    "Errors:",
    "Given value type:",
    "Not a valid subclass of",
    "Expected a path but",
)

# Values that users of other trainers give to `trainer.precision`: the plugin, and the overlay that adds it
_PRECISION_PLUGINS = {
    "mxfp8": ("MXFP8Precision", "mxfp8"),
    "fp8": ("Float8Precision", "float8"),
    "float8": ("Float8Precision", "float8"),
    "blockwise_fp8": ("BlockwiseFP8Precision", "blockwise_fp8"),
    "fp8_blockwise": ("BlockwiseFP8Precision", "blockwise_fp8"),
}

_A_CLASS = "the path of a class, as in package.Name"

# What torch.save raises after a write that failed, and sometimes instead of the reason
_CUT_OFF = ("inline_container", "unexpected pos")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_wrapper = textwrap.TextWrapper(
    _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False, drop_whitespace=True
)


class UsageError(Exception):
    """What the user gave cannot work; the message is for them, and a traceback would not help."""


def shorten(message: str) -> str:
    """Wraps a message and cuts it to :data:`MAX_LINES` lines."""
    lines = [
        wrapped for line in message.strip().splitlines() if line.strip() for wrapped in _wrapper.wrap(line.rstrip())
    ]
    return "\n".join(lines if len(lines) <= MAX_LINES else [*lines[: MAX_LINES - 1], "… (all of it with --debug)"])


def explain(message: str, parser: ArgumentParser | None = None) -> str:
    """Turns jsonargparse's nested message into a short one.

    Args:
        message: The text of the error.
        parser: The parser of the subcommand, for close names.

    Returns:
        The message; :func:`shorten` wraps it once it is complete.
    """
    path: list[str] = []
    class_path: str | None = None
    expected: list[str] = []
    expected_at = 0
    value: str | None = None
    rules: list[str] = []
    for indented in message.splitlines():
        line = indented.strip().removeprefix("- ")
        indent = len(indented) - len(indented.lstrip())
        if match := _KEY.match(line):
            if path[-1:] != [match[1]]:
                path.append(match[1])
                expected, expected_at = [], 0  # what the class that has this setting may be instead is no answer
            line = match[2]
        if match := _CLASS.match(line):
            class_path, line = match[1], match[2]
        line = _CALLABLE.sub("", line)
        if match := _BUILT.search(line):
            class_path, line = match[1], line[: match.start()]
        if match := _KEY.match(line):
            path.append(match[1])
            line = match[2]
        if match := _REQUIRED.match(line):
            return _required([name.split(".", 1)[-1] for name in match[1].split(", ")])
        if match := _UNRECOGNIZED.match(line) or _NOT_ACCEPTED.match(line):
            name = ".".join(part for part in match.groups() if part)
            return _unknown_name(".".join(path), name, class_path, parser)
        if line.startswith(_NOISE):
            continue
        if match := _SUBCLASS.match(line):
            expected.append(f"a subclass of {match[2]}")
            value = match[1] if value is None else value
        elif match := _EXPECTED.match(line):
            # What the whole class may be instead (null) is no answer to what a setting of it must be
            if not expected or indent >= expected_at:
                expected.append(_type_name(match[1]))
                expected_at = expected_at or indent
            value = match[2] if value is None else value
        elif line.startswith("Given value:"):
            value = _plain_value(line) if value is None else value
        elif line:
            rules.append(_in_plain_words(re.sub(r"\. Got value: .*$", "", line), path[-1] if path else ""))
    if path == ["trainer.precision"] and value is not None and value.lower() in _PRECISION_PLUGINS:
        plugin, overlay = _PRECISION_PLUGINS[value.lower()]
        return (
            f"trainer.precision is {value!r}, which is a plugin here: add --config configs/precision/{overlay}.yaml, "
            f"or --trainer.plugins+=lightning_moe.{plugin}"
        )
    if rules == [] and expected:
        allowed = " or ".join(dict.fromkeys(expected))
        rules = [f"must be {allowed}" if value is None else f"{value} is not allowed; it must be {allowed}"]
        close = close_names(value, _choices(expected)) if value is not None else []
        if not close and value is not None and any(text == _A_CLASS for text in expected):
            close = close_classes(value, _type_of(path, class_path, parser))
            rules = [f"there is no class {value}."] if close else rules
        rules += [f"Did you mean {' or '.join(close)}?"] if close else []
    elif value is not None and not any(value in rule for rule in rules):
        rules = [f"{value} is not allowed", *rules]
    text = "\n".join(dict.fromkeys(rules))
    return f"{_spoken('.'.join(path))}: {text}" if path else text


def name_field(message: str, keys: Iterable[str]) -> str:
    """Puts the path before a field that a message starts with by its bare name.

    Args:
        message: A rule's message, such as ``"n_group is 3, but …"``.
        keys: Dotted names of all settings, ``init_args`` included.
    """
    short = re.sub(r"^[A-Z]\w* (?=[a-z_]+=)", "", message)  # of a class, as in "AdamW lr=-1.0: must be …"
    word = re.match(r"[A-Za-z_][\w.]*\w", short)
    if word is None:
        return message
    owners = {spoken for spoken in map(_spoken, keys) if spoken.endswith("." + word[0])}
    return owners.pop() + short[word.end() :] if len(owners) == 1 else message


def explain_full_disk(error: BaseException, run_dir: str) -> str | None:
    """Says what to do about an error that comes from a full disk.

    Args:
        error: What a command ended with.
        run_dir: The run directory.

    Returns:
        The message, or ``None`` if the error comes from something else.
    """
    chain = list(_chain(error, set()))
    reasons = [link for link in chain if isinstance(link, OSError) and link.errno is not None]
    full = next((reason for reason in reasons if reason.errno in _FULL), None)
    if full is None and (reasons or not any(all(part in str(link) for part in _CUT_OFF) for link in chain)):
        return None
    standard = os.strerror(full.errno or 0) if full is not None else None
    if full is not None and full.strerror not in (None, standard):
        return full.strerror
    where = run_dir if full is None or full.filename is None else full.filename
    reason = "" if full is None or full.errno == errno.ENOSPC else f" ({standard})"
    return (
        f"no space left for {where}{reason}. The checkpoints saved before are complete.\n"
        "Free some space and run the same command again with --ckpt_path last."
    )


def close_names(name: str, known: Iterable[str]) -> list[str]:
    """Returns up to three known names like ``name``, the closest first."""
    known = list(dict.fromkeys(known))
    group, _, leaf = name.rpartition(".")
    # A long common group makes all its names alike: the leaf decides
    leaves = [key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == group]
    close = difflib.get_close_matches(leaf, leaves, n=3, cutoff=0.65)
    if close:
        return [f"{group}.{match}" if group else match for match in close]
    return difflib.get_close_matches(name, known, n=3, cutoff=0.75)


def close_in_module(path: str) -> list[str]:
    """Returns up to three paths in the module of ``path`` whose last part looks like its own."""
    module, _, name = path.rpartition(".")
    try:
        return [f"{module}.{close}" for close in close_names(name, dir(import_module(module)))]
    except (ImportError, ValueError):
        return []


def close_classes(name: str, hint: Any) -> list[str]:
    """Returns up to three paths of classes named like ``name`` that a setting of the type ``hint`` may be."""
    bases = tuple(_classes_in(hint))
    leaf = name.rpartition(".")[2]
    known: dict[str, str] = {}
    for public in close_names(leaf, lightning_moe.__all__):
        target = getattr(lightning_moe, public)
        if inspect.isclass(target) and issubclass(target, bases):
            known[public] = f"lightning_moe.{public}"
    for base in bases:
        for target in _subclasses(base):
            if ".demos." in target.__module__:
                continue
            known.setdefault(target.__name__, _public_path(target))
    return [known[close] for close in close_names(leaf, known)]


def _type_of(path: list[str], class_path: str | None, parser: ArgumentParser | None) -> Any:
    """The type of the setting that a message is about; ``None`` if it is not known."""
    if class_path is None:
        actions = parser._actions if parser is not None else []
        return next((getattr(action, "_typehint", None) for action in actions if action.dest == ".".join(path)), None)
    module, _, name = class_path.rpartition(".")
    try:
        classes = inspect.getmro(getattr(import_module(module), name))
        hints = [get_type_hints(vars(cls)["__init__"]) for cls in classes if "__init__" in vars(cls)]
    except (ImportError, AttributeError, ValueError, NameError, TypeError):
        return None
    return next((found[path[-1]] for found in hints if path[-1] in found), None)


def _classes_in(hint: Any) -> Iterator[type]:
    if inspect.isclass(hint) and not get_args(hint) and hint.__module__ not in ("builtins", "typing"):
        yield hint
    for inner in get_args(hint):
        yield from _classes_in(inner)


def _subclasses(base: type) -> Iterator[type]:
    if not inspect.isabstract(base) and not base.__name__.startswith("_"):
        yield base
    below: list[type] = base.__subclasses__()
    for cls in below:
        yield from _subclasses(cls)


def _public_path(cls: type) -> str:
    """The shortest path by which a class is offered: packages name what their modules define."""
    parts = cls.__module__.split(".")
    modules = [".".join(parts[: length + 1]) for length in range(len(parts))]
    offers = [module for module in modules if getattr(sys.modules.get(module), cls.__name__, None) is cls]
    return f"{offers[0] if offers else cls.__module__}.{cls.__qualname__}"


def _chain(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    """An error and those that led to it, also on the ranks of a distributed checkpoint."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield error
    of_ranks = error.failures.values() if isinstance(error, CheckpointException) else ()
    for earlier in (error.__cause__, error.__context__, *(failure for failure, _ in of_ranks)):
        yield from _chain(earlier, seen)


def _required(names: list[str]) -> str:
    if {"model", "data"} & set(names):
        return f"{' and '.join(sorted(names, reverse=True))}: not given.\nStart from a file: --config configs/tiny.yaml"
    return f"{' and '.join(names)}: not given. Add {' '.join(f'--{name} …' for name in names)}"


def _unknown_name(group: str, name: str, class_path: str | None, parser: ArgumentParser | None) -> str:
    name = _spoken(name).removesuffix("+")
    if class_path:
        known, owner, prefix = (
            list(_class_names(class_path)),
            f" of {class_path}",
            f"{_spoken(group)}." if group else "",
        )
    else:
        name = f"{group}.{name}" if group and not name.startswith(group) else name
        known, owner, prefix = [action.dest for action in parser._actions] if parser else [], "", ""
    text = f"{prefix}{name}: there is no such setting{owner}."
    close = [prefix + match for match in close_names(name, known)]
    if not close and "." in name:
        close = [prefix + match for match in close_names(name.split(".", 1)[0], known)]
        close = [match for match in close if match != prefix + name.split(".", 1)[0]]
    if close:
        return f"{text}\nDid you mean {' or '.join(close)}?"
    siblings = [key for key in known if key.rpartition(".")[0] == name.rpartition(".")[0]]
    return f"{text}\nThere is: {', '.join(sorted(siblings))}." if siblings else text


def _class_names(class_path: str) -> Iterator[str]:
    module, _, name = class_path.rpartition(".")
    try:
        target = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return
    yield from _signature_names(target, set())


def _signature_names(target: Any, seen: set[Any]) -> Iterator[str]:
    if target in seen:
        return
    seen = {*seen, target}
    if is_dataclass(target):
        names = [field.name for field in fields(target)]
    else:
        parameters = [p for cls in inspect.getmro(target) for p in _own_parameters(cls)]
        names = list(dict.fromkeys(parameters))
    try:
        hints = get_type_hints(target if is_dataclass(target) else target.__init__)
    except (NameError, TypeError):
        hints = {}
    for name in names:
        yield name
        for option in (hints.get(name), *get_args(hints.get(name))):
            if is_dataclass(option):
                yield from (f"{name}.{inner}" for inner in _signature_names(option, seen))


def _own_parameters(cls: type) -> Iterator[str]:
    if "__init__" in vars(cls):
        for name, parameter in inspect.signature(vars(cls)["__init__"]).parameters.items():
            if name != "self" and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                yield name


def _spoken(key: str) -> str:
    return ".".join(part for part in key.split(".") if part != "init_args")


def _in_plain_words(rule: str, key: str) -> str:
    if match := re.match(r"^module '([^']+)' has no attribute '([^']+)'$", rule):
        close = close_in_module(f"{match[1]}.{match[2]}")
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        return f"There is no {match[2]} in {match[1]}.{hint}"
    if match := re.match(r"""^Unable to load config ['"](.*)['"]$""", rule):
        if key.rpartition(".")[2] != "config":
            return f"There is no file {match[1]}."
        close = close_names(match[1], PRESETS)
        hint = f"Did you mean {' or '.join(close)}? " if close else ""
        return f"There is no file or preset {match[1]}.\n{hint}The presets are {', '.join(PRESETS)}."
    if match := re.match(r"^No module named '([^']+)'$", rule):
        return f"There is no module {match[1]}, neither installed nor in this folder ({os.getcwd()})."
    return rule


def _type_name(text: str) -> str:
    if text.startswith("dot import path string"):
        return _A_CLASS
    names = {"NoneType": "null", "str": "a text", "bool": "true or false", "int": "a whole number", "float": "a number"}
    names |= {"dict": "a mapping {key: value}", "Iterable": "a list"}
    text = re.sub(r"<class '([^']+)'>", lambda match: names.get(match[1].rsplit(".", 1)[-1], match[1]), text)
    return re.sub(r"(?:typing\.)?Literal\[([^\]]*)\]", _one_of, text)


def _one_of(match: re.Match[str]) -> str:
    return "one of " + match[1].replace("'", "")


def _choices(expected: Iterable[str]) -> list[str]:
    listed = [text.removeprefix("one of ") for text in expected if text.startswith("one of ")]
    return [choice for text in listed for choice in text.split(", ")]


def _plain_value(line: str) -> str | None:
    text = line.removeprefix("Given value:").strip()
    nested = re.match(r"^NestedArg\(key='[^']*', val=(.*)\)$", text)
    if nested:
        return nested[1].strip("'")
    text = text[1:-1] if re.fullmatch(r"'[^']*'", text) else text
    return None if text.startswith(("Namespace(", "{'class_path'")) or len(text) > 200 else text
