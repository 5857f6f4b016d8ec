"""The order of streams around a computation beside the main one, on stand-ins for streams."""

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_moe.moe import beside
from tests.tensors import grad


class Stream:
    """Notes which stream waits for which, and where work is done."""

    log: list[str] = []

    def __init__(self, name: str) -> None:
        self.name = name

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")


def test_streams_wait_for_one_another_in_forward_and_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    main, side = Stream("main"), Stream("side")
    log = Stream.log
    log.clear()

    @contextmanager
    def on(stream: Any) -> Any:
        log.append(f"on {stream.name}")
        yield
        log.append(f"off {stream.name}")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(beside, "_side_stream", lambda device: side)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: log.append(f"used on {stream.name}"))

    weight, x = torch.tensor([3.0], requires_grad=True), torch.tensor([2.0], requires_grad=True)
    weight.register_hook(lambda _: log.append("gradient of the weight"))
    computation = beside.Beside(lambda value: value * weight, x)
    log.append("tokens travel")
    result = computation.result()
    assert result.item() == 6.0
    assert log == [
        "side waits for main",
        "on side",
        "off side",
        "used on side",
        "tokens travel",
        "main waits for side",
        "used on main",
    ]
    log.clear()
    result.backward()
    assert log == ["gradient of the weight", "main waits for side"]
    assert grad(x).item() == 3.0
    assert grad(weight).item() == 2.0
