import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightning_moe.callbacks.progress_bar import TokenProgressBar, _clock, _losses, _short
from lightning_moe.cli import MoECLI, main
from tests.callbacks.standins import arguments


def _watched(run: Path, terminal: bool) -> tuple[Any, io.StringIO]:
    cli: Any = MoECLI(args=arguments(run, "--trainer.max_steps=4", "--trainer.val_check_interval=4"), run=False)
    screen = io.StringIO()
    bar = next(callback for callback in cli.trainer.callbacks if isinstance(callback, TokenProgressBar))
    bar._console = Console(file=screen, force_terminal=terminal, width=80)
    bar.refresh_seconds = bar.log_seconds = 0.0
    return cli, screen


def test_one_line_that_fits_a_terminal(tmp_path: Path) -> None:
    cli, screen = _watched(tmp_path, terminal=True)
    cli.trainer.fit(cli.model, cli.datamodule)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    lines = [line for line in re.split(r"[\r\n]", plain) if line.strip()]
    assert max(len(line) for line in lines) <= 80
    last = lines[-1]
    assert last.startswith("done")
    assert "4/4" in last
    assert "tok/s" in last
    assert re.search(r"loss \d\.\d{3}  val \d\.\d{3}", last)


def test_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    cli, screen = _watched(tmp_path, terminal=False)
    cli.trainer.fit(cli.model, cli.datamodule)
    text = screen.getvalue()
    assert "\x1b" not in text
    lines = text.splitlines()
    assert lines[0].split() == ["train", "0/4"]
    assert lines[2].startswith("train  2/4  loss ")
    assert "val" not in lines[2]
    assert any("val" in line for line in lines)
    assert lines[-1].startswith("done  4/4")


def test_turned_off(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *arguments(tmp_path, "--trainer.max_steps=2", "--trainer.enable_progress_bar=false")]) == 0
    assert "tok/s" not in capfd.readouterr().err


def test_numbers_are_short() -> None:
    assert [_short(value) for value in (950, 5900.4, 25_300, 3.2e6, 4.5e9)] == ["950", "5,900", "25.3k", "3.2M", "4.5G"]
    assert [_clock(value) for value in (5, 65, 3700, 200_000)] == ["0:05", "1:05", "1:01:40", "2d 07h"]
    assert _losses({"val/loss": 2.0, "train/grad_norm": 1.0}) == ["val 2.000"]
