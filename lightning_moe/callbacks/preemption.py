"""Ctrl-C, SIGTERM and SLURM's requeue signal: finish the optimizer step, save on all processes, end."""

import os
import re
import signal
import subprocess
import sys
import threading
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_moe.callbacks.averaging import averages_weights
from lightning_moe.callbacks.interrupt import TrainingInterrupted, save_interrupted


class Preemption(Callback):
    """Ends training with a checkpoint when one process or more are asked to stop, wherever in training that is.

    It takes Ctrl-C, SIGTERM and, where Lightning would requeue a SLURM job, the requeue signal, after which it requeues
    the job. The handler only takes a note. Before the next optimizer step, or (but for Ctrl-C) during validation, all
    processes agree on it, save a checkpoint that ``ckpt_path: last`` finds, and end with 128 and the signal's number:
    130 after Ctrl-C, 143 after SIGTERM, 138 after SIGUSR1. A second Ctrl-C stops at once.

    Processes agree through a gloo group of their own on one integer of the host. They look at the answer one agreement
    later, so that nothing waits, on the host or on the device; training ends one step after the signal's.

    Args:
        every_n_steps: Optimizer steps between two agreements.
    """

    def __init__(self, every_n_steps: int = 1) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps is {every_n_steps}, but it must be at least 1.")
        self.every_n_steps = every_n_steps
        # The last of the list wins where several come: a job must be requeued even if SIGTERM comes as well
        self._signals = [signal.SIGINT, signal.SIGTERM]
        self._requeue_signal: signal.Signals | None = None
        self._requested = 0  # 1 + the signal's index
        self._group: Any = None
        self._agreement: tuple[Any, torch.Tensor] | None = None
        self._step_before = -1
        self._between_steps = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._requested, self._agreement, self._between_steps = 0, None, False
        environment = trainer._accelerator_connector.cluster_environment
        slurm = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
        self._requeue_signal = environment.requeue_signal if slurm else None  # type: ignore[attr-defined]
        requeue = [] if self._requeue_signal is None else [self._requeue_signal]
        self._signals = list(dict.fromkeys([signal.SIGINT, signal.SIGTERM, *requeue]))
        if trainer.world_size > 1 and self._group is None and dist.is_initialized():
            timeout = getattr(trainer.strategy, "_timeout", None)
            self._group = dist.new_group(backend="gloo", **({} if timeout is None else {"timeout": timeout}))
        # Both replaced on the objects of this trainer alone. Lightning's handler waits for all processes inside the
        # handler, so that a signal to one of them hangs (Lightning#20806); and its loop broadcasts a device tensor and
        # waits for it on the host, before every batch (Lightning#21487).
        connector: Any = trainer._signal_connector
        connector.register_signal_handlers = partial(self._register_handlers, trainer)
        loop: Any = trainer.fit_loop.epoch_loop
        loop._broadcast_sigterm_tensor = _do_nothing
        loop.advance = partial(self._advance, trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step_before = trainer.global_step
        self._between_steps = True

    def _advance(self, trainer: Trainer, data_fetcher: Any) -> None:
        """Stops, or goes on with the next micro-batch, which a checkpoint must not count as read."""
        # Not at the end of the step before: Lightning logs it, and validates, after the callbacks' hook.
        loop: Any = trainer.fit_loop.epoch_loop
        if self._between_steps and not loop.restarting and trainer.global_step % self.every_n_steps == 0:
            self._stop_if_agreed(trainer)
        self._between_steps = False
        type(loop).advance(loop, data_fetcher)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._between_steps = trainer.global_step > self._step_before
        self._step_before = trainer.global_step

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not self._between_steps or trainer.state.fn != TrainerFn.FITTING:
            return
        # A validation of averaged weights, which are in the model's place until its end, is waited for.
        if not averages_weights(trainer):
            self._stop_if_agreed(trainer, validating=True)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._agreement is not None:
            self._agreement[0].wait()
            self._agreement = None

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        vars(trainer._signal_connector).pop("register_signal_handlers", None)
        vars(trainer.fit_loop.epoch_loop).pop("advance", None)
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._group = None  # its processes may be gone; another fit makes another one
        if isinstance(exception, TrainingInterrupted) and trainer.is_global_zero:
            sys.stderr.write(f"{exception.message}\n")
            sys.stderr.flush()

    def _register_handlers(self, trainer: Trainer) -> None:
        """Registers Lightning's handlers, which it takes back at the end with all others, and puts ours over them."""
        connector: Any = trainer._signal_connector
        type(connector).register_signal_handlers(connector)
        # Signals go to the main thread alone
        if trainer.state.fn != TrainerFn.FITTING or threading.current_thread() is not threading.main_thread():
            return
        for signum in self._signals:
            users = connector._original_handlers.get(signum) if signum != signal.SIGINT else None
            if signum in (signal.SIGINT, signal.SIGTERM) or not callable(users):
                signal.signal(signum, partial(self._handle, trainer.global_rank, os.getpid(), users))

    def _handle(self, rank: int, pid: int, users_handler: Any, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != pid:
            return  # a worker of a data loader, which has the handler from its parent
        name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
        if signum == signal.SIGINT and self._requested:
            raise KeyboardInterrupt
        if not self._requested:
            again = " Press Ctrl-C again to stop at once." if signum == signal.SIGINT else ""
            # print() may be interrupted inside itself by a signal; a plain write may not
            os.write(2, f"\n{name} (rank {rank}): finishing this step and saving.{again}\n".encode())
        self._requested = max(self._requested, 1 + self._signals.index(signal.Signals(signum)))
        if callable(users_handler):
            users_handler(signum, frame)

    def _stop_if_agreed(self, trainer: Trainer, validating: bool = False) -> None:
        agreed = self._agree()
        # A validation that is left is not made up for on resume: only who cannot wait leaves it.
        if not agreed or (validating and self._signals[agreed - 1] == signal.SIGINT):
            return
        launcher = trainer.strategy.launcher
        if isinstance(launcher, _SubprocessScriptLauncher):
            launcher.procs.clear()  # else Lightning kills this process when another one ends with a status before it
        signum = self._signals[agreed - 1]
        saved = save_interrupted(trainer)
        if signum == self._requeue_signal:
            saved += f"; {_requeue()}" if trainer.is_global_zero else ""
            trainer.strategy.barrier()  # a launcher may end this rank once another one has ended
        raise TrainingInterrupted(f"Interrupted after step {trainer.global_step}; {saved}.", 128 + signum)

    def _agree(self) -> int:
        """Starts an agreement of all processes and returns the result of the last one."""
        if self._group is None:
            return self._requested
        agreed = 0
        if self._agreement is not None:
            work, result = self._agreement
            work.wait()
            agreed = int(result)
        if not agreed:
            requested = torch.tensor(self._requested)
            work = dist.all_reduce(requested, dist.ReduceOp.MAX, group=self._group, async_op=True)
            self._agreement = (work, requested)
        return agreed


def _do_nothing() -> None:
    pass


def _requeue() -> str:
    """Puts this SLURM job back into the queue, as Lightning's own handler does."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]
    if not re.fullmatch("[0-9_]+", job):
        return f"not requeued: {job} is no job number"
    try:
        status = subprocess.call(["scontrol", "requeue", job])
    except OSError as error:
        return f"not requeued: {error}"
    return f"requeued job {job}" if status == 0 else f"not requeued: scontrol ended with status {status}"
