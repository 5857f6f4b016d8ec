import os
import signal
import sys
from collections.abc import Iterator

import pytest
import torch

# About Lightning's own calls of jsonargparse
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")

# Behind `nohup` or `&` Ctrl-C is ignored, by all processes that tests start too
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Written by `seed_everything` and the launchers; a later test would take them for the user's own
_LIGHTNING_VARIABLES = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "NODE_RANK")


@pytest.fixture(scope="session", autouse=True)
def _limit_threads() -> None:
    torch.set_num_threads(min(2, torch.get_num_threads()))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _restore_environment() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _LIGHTNING_VARIABLES}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(autouse=True)
def _hide_arguments_of_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    # LightningCLI warns when it is given arguments while the process has some of its own
    monkeypatch.setattr(sys, "argv", ["lightning-moe"])
