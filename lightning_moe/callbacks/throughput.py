"""Speed as a share of what the device can do, and memory."""

from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer
from typing_extensions import override

from lightning_moe.callbacks.peak_flops import PeakDtype, peak_of
from lightning_moe.models.base import MoEModel
from lightning_moe.models.flops import active_matmul_parameters
from lightning_moe.models.host_copy import HostCopy, on_host
from lightning_moe.models.module import MoELightningModule
from lightning_moe.models.step_report import is_logged


class MoEThroughput(Callback):
    """Logs TFLOP/s, model FLOP utilisation and peak memory beside ``train/tokens_per_second``.

    At every logged step, for the steps since the one logged before: ``train/tflops_per_device``, ``train/mfu`` and
    ``train/peak_memory_gib`` (allocated, the largest of all processes until the step's optimizer). How operations are
    counted, and the peak that ``train/mfu`` is a share of, are stated once when training starts. Without a known peak,
    as on a CPU, there is no ``train/mfu``.

    Speed is that of the whole loop, data included, without the first steps, validation and checkpoints. The host waits
    only at logged steps, where values are read anyway, and then for the gradients: the device has its optimizer to run.

    Args:
        warmup_steps: Steps at the start, or after resuming, that are left out of the speed: they compile.
        peak_dtype: Dtype whose peak is taken: ``"float32"``, ``"tfloat32"``, ``"bfloat16"`` or ``"float8"``. ``"auto"``
            takes the one that the model computes in; with a plugin that multiplies in FP8 or MXFP8 still bfloat16, so
            that figures of both compare.
        peak_flops: Peak of one device in FLOP/s, as in 989e12; by default that of a table of data sheets.

    Raises:
        ValueError: A value is out of range.
    """

    def __init__(
        self,
        warmup_steps: int = 2,
        peak_dtype: PeakDtype | Literal["auto"] = "auto",
        peak_flops: float | None = None,
    ) -> None:
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps is {warmup_steps}, but it must not be negative; 2 leaves compilation out.")
        if peak_dtype not in ("auto", "float32", "tfloat32", "bfloat16", "float8"):
            raise ValueError(
                f"peak_dtype is {peak_dtype!r}, but it must be auto, float32, tfloat32, bfloat16 or float8."
            )
        if peak_flops is not None and not peak_flops > 0:
            raise ValueError(
                f"peak_flops is {peak_flops}, but it must be positive: FLOP/s of one device, as in 989e12."
            )
        self.warmup_steps = warmup_steps
        self.peak_dtype = peak_dtype
        self.peak_flops = peak_flops
        self._peak: float | None = None
        self._peak_source = ""
        self._last_step = 0
        self._steps = 0
        self._memory: HostCopy | None = None
        self._stated_for: float | None = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finds the peak of the device.

        Raises:
            TypeError: The module is not a MoELightningModule.
            ValueError: The device has no peak in the dtype that was asked for.
        """
        if not isinstance(pl_module, MoELightningModule):
            raise TypeError(
                f"MoEThroughput measures subclasses of lightning_moe's MoELightningModule, but the module is a "
                f"{type(pl_module).__name__}."
            )
        self._peak, self._peak_source = self._find_peak(trainer)

    def _find_peak(self, trainer: Trainer) -> tuple[float | None, str]:
        if self.peak_flops is not None:
            return self.peak_flops, "given as peak_flops"
        device = trainer.strategy.root_device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
        peak = peak_of(name)
        if peak is None:
            return None, f"no peak is known for {name}: give it as peak_flops for train/mfu"
        dtype = _compute_dtype(trainer) if self.peak_dtype == "auto" else self.peak_dtype
        if dtype not in peak.rates:
            raise ValueError(
                f"peak_dtype is {dtype}, but {name} has only {', '.join(peak.rates)} ({peak.source}).\n"
                "Choose one of these, or give the peak as peak_flops."
            )
        return peak.rates[dtype] * 1e12, f"the dense {dtype} peak of {name} ({peak.source})"

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_step, self._steps, self._memory = trainer.global_step, 0, None

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Sends the memory to the host ahead of the optimizer's kernels, so that nothing waits for these."""
        device = trainer.strategy.root_device
        if device.type == "cuda" and is_logged(trainer, trainer.global_step + 1):
            largest = torch.full((), torch.cuda.max_memory_allocated(device) / 2**30, device=device)
            if trainer.world_size > 1:
                dist.all_reduce(largest, dist.ReduceOp.MAX)  # Lightning's own makes the host wait at a barrier before
            self._memory = HostCopy({"train/peak_memory_gib": largest})

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._last_step:
            return  # within an accumulation window
        assert isinstance(pl_module, MoELightningModule)
        self._last_step = trainer.global_step
        self._steps += 1
        if self._steps <= self.warmup_steps:
            pl_module.clock.restart(pl_module.tokens_seen)
            return
        if not is_logged(trainer, trainer.global_step):
            return
        values: dict[str, Any] = {**self._speed(trainer, pl_module, batch["input_ids"].shape[-1])}
        if self._memory is not None:
            values |= self._memory.read()
        for name, value in values.items():
            pl_module.log(name, on_host(value), on_step=True, on_epoch=False, batch_size=1)

    def _speed(self, trainer: Trainer, module: MoELightningModule, sequence_length: int) -> dict[str, float]:
        per_token = module.flops_per_token(sequence_length)  # first: it takes its time, while the device computes
        tokens_per_second = module.clock.tokens_per_second(module.tokens_seen)
        if tokens_per_second is None:
            return {}
        if per_token != self._stated_for:
            self._stated_for = per_token
            rank_zero_info(self._rule(trainer, module.built_model, sequence_length, per_token))
        flops = tokens_per_second * per_token / trainer.world_size
        values = {"train/tflops_per_device": flops / 1e12}
        if self._peak is not None:
            values["train/mfu"] = flops / self._peak
        return values

    def _rule(self, trainer: Trainer, model: MoEModel, sequence_length: int, per_token: float) -> str:
        matrices = active_matmul_parameters(model)
        counts_attention = type(model).flops_per_token is not MoEModel.flops_per_token
        attention = (
            "causal attention at the heads' own widths, half of the logits"
            if counts_attention
            else f"no attention, which {type(model).__name__}.flops_per_token does not add"
        )
        share = (
            f"train/mfu is the share of {self._peak / 1e12:,.1f} TFLOP/s, {self._peak_source}."
            if self._peak is not None
            else f"No train/mfu: {self._peak_source}."
        )
        return (
            f"Throughput: {per_token / 1e9:.4f} GFLOP per token, forward and backward, at sequence length "
            f"{sequence_length:,}: 6 x active matrix elements ({matrices:,} in the model; the head once for each "
            f"prediction, multi-token prediction while it trains, no embedding lookup) and {attention}. Recomputation "
            f"is not counted. Time without the first {self.warmup_steps} steps, validation and checkpoints; "
            f"{trainer.world_size} device(s). {share}"
        )


def _compute_dtype(trainer: Trainer) -> PeakDtype:
    """The dtype that matrices are multiplied in, where nothing else is asked for."""
    plugin: Any = getattr(trainer.precision_plugin, "compute_dtype", None)
    asked = getattr(trainer.strategy, "compute_dtype", None)
    halves = str(trainer.precision).startswith(("bf16", "16"))
    if plugin == torch.bfloat16 or asked in ("auto", "bfloat16") or halves:
        return "bfloat16"
    return "float32" if torch.get_float32_matmul_precision() == "highest" else "tfloat32"
