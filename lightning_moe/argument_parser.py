"""The parser of ``lightning-moe``: Lightning's, with errors of a few lines."""

import os
from typing import Any, NoReturn

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from lightning_moe.config_loader import PARSER_MODE, check_file
from lightning_moe.usage_errors import UsageError, close_names, explain, shorten


class MoEArgumentParser(LightningArgumentParser):
    """Lightning's parser with errors of a few lines."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"parser_mode": PARSER_MODE, **kwargs})

    @override
    def parse_path(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Namespace:
        check_file(path)
        return super().parse_path(path, *args, **kwargs)

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        commands = getattr(self, "_subcommands_action", None)
        if commands is not None:
            names = list(commands.choices)
            command = next((argument for argument in self.args if argument in names), None)
            given = next((argument for argument in self.args if not argument.startswith("-")), None)
            if command is None and given is not None:
                close = close_names(given, names) or names
                raise UsageError(f"{given}: there is no such command.\nDid you mean {' or '.join(close)}?") from ex
            if command is None:
                raise UsageError(f"Which command? {', '.join(names)}; more with --help.") from ex
            raise UsageError(shorten(explain(message, commands.choices[command]))) from ex
        raise UsageError(shorten(explain(message, self))) from ex
