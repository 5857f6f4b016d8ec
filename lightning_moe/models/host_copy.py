"""Values of the device that the host reads later: one copy for all of them."""

import functools
from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """Sends scalars to the host in one copy; the host waits for them only where it reads them.

    On CUDA the copy goes to pinned memory, and reading waits for what was queued before the copy alone: the device goes
    on with what was queued after it.

    Args:
        values: Scalars by name, of one device. They arrive in the dtype that they promote to, at least float32.
    """

    def __init__(self, values: dict[str, Tensor]) -> None:
        self._names = list(values)
        dtype = functools.reduce(torch.promote_types, (value.dtype for value in values.values()), torch.float32)
        packed = torch.cat([value.detach().reshape(1).to(dtype) for value in values.values()])
        self._arrived: Any = None
        self._host = torch.empty(packed.shape, dtype=packed.dtype, device="cpu", pin_memory=packed.is_cuda)
        self._host.copy_(packed, non_blocking=packed.is_cuda)
        if packed.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(packed.device))

    def __getstate__(self) -> dict[str, Any]:
        self.read()  # an event cannot be copied
        return {**vars(self), "_arrived": None}

    def read(self) -> dict[str, Tensor]:
        """Waits for the values, and returns them by name as scalars of the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return dict(zip(self._names, self._host.unbind(), strict=True))


def on_host(value: Tensor | float) -> Tensor:
    """Returns a value as what Lightning logs without touching the device: a scalar of the host, of at least float32.

    Lightning makes a tensor of the module's device of a plain number, which makes the host wait, and then reads it.

    Args:
        value: A number, or a scalar tensor.
    """
    if isinstance(value, Tensor):
        return value.detach().cpu()
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    return torch.tensor(float(value), dtype=dtype, device="cpu")
