"""Training steps through ``Trainer.fit`` on all processes of a group, in ``expert_parallel.py``."""

import argparse
import gc
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ep_dispatch import ALL_TO_ALL, ALL_TO_ALL_FP8, DEEP_EP, DEEP_EP_FP8
from ep_overlap import SHARED_EXPERT, overlaps
from ep_processes import Worker
from gpu_kernels import busy_ms, kernels_of, read_events, span_ms
from gpu_ours import LOG_EVERY_N_STEPS, MTP_WEIGHT, AfterStep
from gpu_shapes import ADAMW, PRECISION, SHAPES, Batch, routing_name
from gpu_step import StepTimes
from lightning.pytorch import Callback, LightningDataModule, Trainer, seed_everything
from torch import Tensor
from torch.profiler import record_function
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_moe import AdamW, DeepSeekV3, ExpertParallelStrategy
from lightning_moe.callbacks.preemption import Preemption
from lightning_moe.dispatch.all_to_all import AllToAllDispatcher
from lightning_moe.dispatch.deep_ep.dispatcher import DeepEPDispatcher
from lightning_moe.precision.plugin import Float8Precision

FSDP, ONE_DEVICE = "FSDP2 alone", "one device"
THROUGH_DEEP_EP = (DEEP_EP, DEEP_EP_FP8)
_TINY = SHAPES["tiny"]
# The last one to try the script on a CPU: so wide that tokens can travel in eight bits
TRAINING_SHAPES = {**SHAPES, "tiny_wide": replace(_TINY, config=replace(_TINY.config, hidden_size=128))}
BF16, FLOAT8 = "bfloat16", "float8"
_PROFILED = 2


@dataclass(frozen=True)
class Variant:
    """One way to train.

    Args:
        system: ``FSDP2 alone``, ``one device``, or the dispatcher.
        precision: What is multiplied in.
        profiled: Whether to profile two more steps.
    """

    system: str
    precision: str = BF16
    profiled: bool = False


class Tokens(LightningDataModule):
    """Batches of this process, on its device.

    Args:
        batches: ``(input_ids, labels)``, int64 ``(B, S)`` each.
    """

    def __init__(self, batches: Sequence[Batch]) -> None:
        super().__init__()
        self.batches = batches
        self.micro_batch_size, self.sequence_length = batches[0][0].shape

    @override
    def train_dataloader(self) -> Any:
        rows: Any = [{"input_ids": input_ids, "labels": labels} for input_ids, labels in self.batches]
        return DataLoader(rows, batch_size=None)


def fit(
    worker: Worker,
    module: DeepSeekV3,
    strategy: ExpertParallelStrategy,
    batches: Sequence[Batch],
    callbacks: list[Callback],
    plugins: list[Any],
) -> None:
    """Trains a module, one step for each batch."""
    trainer = Trainer(
        accelerator="gpu" if worker.on_cuda else "cpu",
        devices=worker.world_size,
        strategy=strategy,
        plugins=plugins,
        max_steps=len(batches),
        max_epochs=-1,
        gradient_clip_val=1.0,
        log_every_n_steps=LOG_EVERY_N_STEPS,
        logger=False,
        callbacks=[*callbacks, Preemption()],  # as the command line has it
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
    trainer.fit(module, datamodule=Tokens(batches))


def dispatcher_of(system: str, arguments: argparse.Namespace) -> Any:
    """What the strategy takes as its dispatcher."""
    if system == ALL_TO_ALL_FP8:
        return partial(AllToAllDispatcher, fp8_dispatch=True)
    if system not in THROUGH_DEEP_EP:
        return ALL_TO_ALL
    settings = {**arguments.dispatcher_arguments, **({"fp8_dispatch": True} if system == DEEP_EP_FP8 else {})}
    return partial(DeepEPDispatcher, num_sms=arguments.num_sms[0], **settings)


def free_memory() -> None:
    """Gives back what a model has left behind."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure_training(worker: Worker, arguments: argparse.Namespace, variants: Sequence[Variant], part: str) -> None:
    """Times the variants one after the other.

    Args:
        worker: This process.
        arguments: Of the command.
        variants: What to time.
        part: What the rows are for.
    """
    for variant in variants:
        _measure(worker, arguments, variant, part)
        free_memory()


def _measure(worker: Worker, arguments: argparse.Namespace, variant: Variant, part: str) -> None:
    seed_everything(arguments.seed, verbose=False)
    shape = TRAINING_SHAPES[arguments.shape]
    timed = arguments.warmup + arguments.steps
    routing = routing_name(arguments.forced_balance)
    profile = _Profile(worker, variant, routing, arguments.traces) if variant.profiled else None
    generator = torch.Generator().manual_seed(arguments.seed + 1 + worker.rank)
    size = timed + (profile.steps if profile is not None else 0), shape.batch, shape.sequence + 1
    tokens = torch.randint(0, shape.config.vocab_size, size, generator=generator).to(worker.device)
    batches = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in tokens]
    module = DeepSeekV3(shape.config, lambda params: AdamW(params, **ADAMW), mtp_loss_weight=MTP_WEIGHT)
    expert_parallel_size = 1 if variant.system in (FSDP, ONE_DEVICE) else worker.world_size
    plugins = [Float8Precision(linears="rowwise", grouped_mm="rowwise")] if variant.precision == FLOAT8 else []
    settings: dict[str, Any] = {
        "compile": not arguments.no_compile,
        "compute_dtype": "auto" if plugins else "bfloat16",
        **arguments.strategy_arguments,
    }
    strategy = ExpertParallelStrategy(
        expert_parallel_size=expert_parallel_size,
        dispatcher=dispatcher_of(variant.system, arguments),
        **settings,
    )
    times = StepTimes(arguments.warmup, worker.device)
    settings["dispatcher_arguments"] = arguments.dispatcher_arguments if variant.system in THROUGH_DEEP_EP else {}
    row: dict[str, Any] = {
        "part": part,
        "system": variant.system,
        "precision": variant.precision,
        "shape": arguments.shape,
        "routing": routing,
        "gpus": worker.world_size,
        "expert_parallel_size": expert_parallel_size,
        "num_sms": arguments.num_sms[0] if variant.system in THROUGH_DEEP_EP else None,
        "tokens_per_gpu": shape.tokens,
        "settings": {"parameters": PRECISION, "optimizer": "AdamW", "clip": 1.0, **settings},
    }

    def after_step(loss: Tensor) -> None:
        if len(times.losses) < timed:
            times.after_step(loss)
            if len(times.losses) == timed:
                _send(worker, row, times, shape.tokens)
                if profile is not None:
                    profile.begin(module)
        elif profile is not None:
            profile.after_step()

    fit(worker, module, strategy, batches, [AfterStep(after_step, shape.tokens, arguments.forced_balance)], plugins)


def _send(worker: Worker, row: dict[str, Any], times: StepTimes, tokens: int) -> None:
    milliseconds = worker.largest(times.milliseconds())
    peak = torch.cuda.max_memory_allocated() / 2**30 if worker.on_cuda else 0.0
    step_ms = statistics.median(milliseconds)
    per_gpu = tokens / step_ms * 1e3
    row |= {
        "tokens_per_s": per_gpu * worker.world_size,
        "tokens_per_s_per_gpu": per_gpu,
        "step_ms": step_ms,
        "raw_step_ms": milliseconds,
        "peak_memory_gib": worker.largest([peak])[0] or None,
        "first_step_s": worker.largest([times.first_step_s])[0],
        "first_loss": worker.mean([times.losses[0].item()])[0],
        "last_loss": worker.mean([times.losses[-1].item()])[0],
    }
    shown = "{part} {gpus} x {system}, {precision}: {tokens_per_s:,.0f} tokens/s, {step_ms:.1f} ms a step"
    worker.send(row, shown.format(**row))


class _Profile:
    """Profiles steps on all processes, and reads the trace of the first."""

    steps = _PROFILED + 1

    def __init__(self, worker: Worker, variant: Variant, routing: str, traces: Path | None) -> None:
        self.worker = worker
        self.variant = variant
        self.routing = routing
        self.traces = traces
        self.seen = 0
        self.profiler = torch.profiler.profile(schedule=torch.profiler.schedule(wait=0, warmup=1, active=_PROFILED))

    def begin(self, module: DeepSeekV3) -> None:
        """Starts with the next step."""
        for _, layer in module.built_model.moe_layers():
            _named(layer.shared_experts, SHARED_EXPERT)
            _named(layer.experts, "experts")
        self.profiler.start()

    def after_step(self) -> None:
        """Ends a step, and with the last one the profile."""
        self.seen += 1
        if self.seen == self.steps:
            self.worker.wait_for_all()
            self.profiler.stop()
            if self.worker.rank == 0:
                self._read()
        elif self.seen < self.steps:
            if self.seen == 1:
                self.worker.wait_for_all()  # what is left of the steps before does not belong into the trace
            self.profiler.step()

    def _read(self) -> None:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) if self.traces is None else self.traces
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{self.variant.system}-{self.worker.world_size}.json.gz"
            self.profiler.export_chrome_trace(str(path))
            kernels = kernels_of(read_events(path))
        times = {"step_ms": span_ms(kernels, _PROFILED), "busy_ms": busy_ms(kernels, _PROFILED)}
        for found in overlaps(kernels, _PROFILED) or [{"communication": None}]:
            row = {"part": "trace", "system": self.variant.system, "routing": self.routing, **times, **found}
            self.worker.send(row, f"trace {self.variant.system}: {found}")


def _named(owner: Any, part: str) -> None:
    """Lets a profiler know that a part of the model runs."""
    if owner is None:
        return
    forward = owner.forward

    def inside_range(*args: Any, **kwargs: Any) -> Any:
        with record_function(f"part: {part}"):
            return forward(*args, **kwargs)

    owner.forward = inside_range
