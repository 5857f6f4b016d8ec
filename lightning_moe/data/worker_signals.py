"""What workers of a data loader do with signals that are meant for the training process."""

import os
import signal
from types import FrameType


def outlive_signals(worker_id: int = 0) -> None:
    """Lets a worker live on when its whole process group is asked to stop; a ``worker_init_fn`` of ``DataLoader``.

    torchrun and SLURM send signals to the group. The training process finishes its step first, for which it still
    needs its workers, and PyTorch ends it with an error when one is gone. The second SIGTERM ends a worker: the first
    may have been the launcher's, and the parent has no other means to end a worker that is stuck.

    Args:
        worker_id: Not used.
    """
    for name in ("SIGINT", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end_next_time)


def _end_next_time(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, lambda signum, frame: os._exit(0))
