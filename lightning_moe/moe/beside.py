"""Computing something beside the main stream of a GPU, while that waits for tokens to travel."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Beside:
    """Starts ``function(x)`` on a second stream; what follows on the current one does not wait for it.

    Autograd runs the backward of the function on the same stream, beside that of what was computed meanwhile.

    Args:
        function: Of one tensor, to one tensor.
        x: Its argument, on a GPU.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self._main = torch.cuda.current_stream(x.device)
        self._side = _side_stream(x.device)
        self._side.wait_stream(self._main)
        x = _JoinInBackward.apply(x, self._side)
        with torch.cuda.stream(self._side):
            self._value = function(x)
        x.record_stream(self._side)

    def result(self) -> Tensor:
        """Returns the value; the stream that started the computation waits for it."""
        self._main.wait_stream(self._side)
        self._value.record_stream(self._main)
        return self._value


class _JoinInBackward(torch.autograd.Function):
    """Makes backward wait here for all of the second stream, gradients of the function's parameters included.

    Autograd itself waits only for what crosses over, the gradient of the input; FSDP reduces the others before the end.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, side: torch.cuda.Stream) -> Tensor:
        ctx.side = side
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        torch.cuda.current_stream(grads[0].device).wait_stream(ctx.side)
        return grads[0], None


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
