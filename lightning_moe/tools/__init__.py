"""The commands of ``lightning-moe`` that do not train; each is a typed function, its docstring the help."""

import inspect
import json
from collections.abc import Callable
from importlib import import_module
from typing import Any

# One line a tool: the name of the command and where its function is
TOOLS = {
    "prepare": "lightning_moe.tools.prepare.prepare",
    "doctor": "lightning_moe.tools.doctor.doctor",
}
# Those that take all that `fit` takes, as their argument `config`
_READERS_OF_FIT = ("doctor",)


def tool_function(name: str) -> Callable[..., Any]:
    """Imports the function behind a command."""
    module, _, function = TOOLS[name].rpartition(".")
    return getattr(import_module(module), function)  # type: ignore[no-any-return]


def gather_arguments_of_fit(arguments: list[str]) -> list[str]:
    """Puts what ``fit`` would be given into one argument ``--config``, for the tools that read it.

    Args:
        arguments: Of the command, as in ``["doctor", "--config", "a.yaml", "--trainer.devices", "2", "--json"]``.

    Returns:
        As in ``["doctor", "--json=true", '--config=["--config", "a.yaml", "--trainer.devices", "2"]']``.
    """
    if not arguments or arguments[0] not in _READERS_OF_FIT:
        return arguments
    own = inspect.signature(tool_function(arguments[0])).parameters
    gathered, of_fit, rest = [arguments[0]], [], arguments[1:]
    while rest:
        name, equals, value = rest[0].partition("=")
        parameter = own.get(name.removeprefix("--").replace("-", "_"))
        if name in ("-h", "--help"):
            gathered.append(name)
        elif parameter is None or parameter.name == "config" or not name.startswith("--"):
            of_fit.append(rest[0])
        elif parameter.annotation is bool:
            gathered.append(f"--{parameter.name}={value if equals else 'true'}")
        else:
            if not equals and len(rest) > 1:
                value = rest.pop(1)
            gathered.append(f"--{parameter.name}={value}")
        rest = rest[1:]
    return [*gathered, f"--config={json.dumps(of_fit)}"] if of_fit else gathered
