"""The commands of ``lightning-moe`` that do not train; each is a typed function, its docstring the help."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

# One line a tool: the name of the command and where its function is
TOOLS = {
    "prepare": "lightning_moe.tools.prepare.prepare",
}


def tool_function(name: str) -> Callable[..., Any]:
    """Imports the function behind a command."""
    module, _, function = TOOLS[name].rpartition(".")
    return getattr(import_module(module), function)  # type: ignore[no-any-return]
