"""Computing something beside the main stream of a GPU, while that waits for tokens to travel."""

import functools
from collections.abc import Callable

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
        with torch.cuda.stream(self._side):
            self._value = function(x)
        x.record_stream(self._side)

    def result(self) -> Tensor:
        """Returns the value; the stream that started the computation waits for it."""
        self._main.wait_stream(self._side)
        self._value.record_stream(self._main)
        return self._value


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
