"""A logged step: exact values, one copy to the host, and no work that grows with the layers."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_moe import DeepSeekV3, MoEThroughput
from lightning_moe.metrics import ExpertLoad, MTPAccuracy
from lightning_moe.models import module as training_module
from lightning_moe.models.base import MoEModelOutput
from lightning_moe.models.host_copy import HostCopy
from lightning_moe.models.step_report import StepReport
from lightning_moe.models.step_sums import StepSums
from lightning_moe.strategies.expert_parallel import ExpertParallelStrategy
from tests.models.test_module import CONFIG, SEQUENCE, adamw_fused, fit, make_trainer
from tests.strategies.processes import run
from tests.strategies.training import Rows

aten = torch.ops.aten


def present(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


class Kept(Callback):
    """Keeps what the model returned for each micro-batch, and compares what is logged with what follows from it."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.outputs: list[MoEModelOutput] = []
        self.norms: list[Tensor] = []
        self.compared: list[int] = []

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.built_model.register_forward_hook(lambda _, __, output: self.outputs.append(output))

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._compare(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._compare(trainer, pl_module)

    def _compare(self, trainer: Trainer, module: Any) -> None:
        if trainer.global_step == len(self.compared):
            return  # within a window
        self.compared.append(trainer.global_step)
        expected = self._expected(trainer, module)
        torch.testing.assert_close(
            dict(trainer.logged_metrics),
            {name: torch.as_tensor(value, dtype=torch.float32) for name, value in expected.items()},
            rtol=0,
            atol=0,
            equal_nan=True,
        )
        self.outputs.clear()

    def _expected(self, trainer: Trainer, module: Any) -> dict[str, Any]:
        tokens = self._summed([output.num_tokens for output in self.outputs])
        mtp = self._summed([torch.stack(output.mtp_losses) for output in self.outputs])
        mtp_tokens = self._summed([torch.stack(output.mtp_num_tokens) for output in self.outputs])
        total = [
            present(output.loss) + torch.stack(output.mtp_losses).mean() * 0.3 + present(output.balance_loss) * 1e-4
            for output in self.outputs
        ]
        accuracy = MTPAccuracy(1)
        accuracy.sync_on_compute = False
        accuracy.update(
            self._summed([output.mtp_correct for output in self.outputs]),
            mtp_tokens,
            self._summed([output.mtp_accepted for output in self.outputs]),
        )
        loads: list[dict[str, Tensor]] = []
        for layer in range(len(self.outputs[0].expert_counts)):
            load = ExpertLoad(1, CONFIG.n_routed_experts)
            load.sync_on_compute = False
            load.update(self._summed([output.expert_counts[layer] for output in self.outputs])[None])
            loads.append(load.compute())
        assert len(loads) == 2  # one of the model, one of multi-token prediction
        violations = torch.stack([load["max_violation"] for load in loads])
        return {
            "train/loss": self._summed([output.loss for output in self.outputs]) / tokens,
            "train/total_loss": self._summed(total) / tokens,
            "train/balance_loss": self._summed([output.balance_loss for output in self.outputs]) / tokens,
            "train/mtp_loss_1": mtp[0] / mtp_tokens[0],
            "train/mtp_accuracy_1": accuracy.compute()["accuracy"],
            "train/mtp_acceptance_1": accuracy.compute()["acceptance"],
            "train/expert_load_max_violation": violations.mean(),
            "train/expert_load_max_violation_worst_layer": violations.max(),
            "train/expert_load_entropy": torch.stack([load["entropy"] for load in loads]).mean(),
            "train/grad_norm": self.norms[-1],
            "train/skipped_steps": sum(not bool(norm.isfinite()) for norm in self.norms),
            "train/lr": 1e-2,
            "train/tokens_seen": trainer.global_step * 8 * SEQUENCE,
            "train/tokens_per_second": module.clock.tokens_per_second(module.tokens_seen),
        }

    def _summed(self, values: list[Any]) -> Tensor:
        """The sum over micro-batches and then over processes, each value on its own."""
        total = sum((value.detach() for value in values[1:]), start=values[0].detach().clone())
        if self.world_size > 1:
            dist.all_reduce(total)
        return total


class PoisonedStep(DeepSeekV3):
    """The gradients of the second step are not finite."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step == 1:
            present(next(filter(lambda gradient: gradient is not None, (p.grad for p in self.parameters())))).mul_(
                float("inf")
            )


def compare_logged_values(world_size: int) -> None:
    kept = Kept(world_size)
    scale_and_clip = training_module.scale_and_clip

    def keep_norm(*args: Any) -> Tensor:
        kept.norms.append(scale_and_clip(*args))
        return kept.norms[-1]

    training_module.scale_and_clip = keep_norm  # type: ignore[assignment]
    try:
        trainer = make_trainer(
            devices=world_size,
            strategy=ExpertParallelStrategy(),
            max_steps=3,
            max_epochs=-1,
            accumulate_grad_batches=4 // world_size,
            use_distributed_sampler=False,
            gradient_clip_val=0.5,
            callbacks=[kept],
        )
        module = PoisonedStep(CONFIG, adamw_fused)
        trainer.fit(module, DataLoader(Rows(world_size, 8), batch_size=2))
    finally:
        training_module.scale_and_clip = scale_and_clip
    assert kept.compared == [1, 2, 3]
    assert [bool(norm.isfinite()) for norm in kept.norms] == [True, False, True]


def test_values_are_those_of_what_the_model_returned() -> None:
    compare_logged_values(1)


def test_values_are_those_of_what_the_model_returned_on_all_processes() -> None:
    run(2, compare_logged_values, 2)


class DeviceWork(TorchDispatchMode):
    """Counts what a device would do, on a CPU: what follows from weights and batches is on the device.

    Args of operations tell: a tensor that comes from none, or from those of the host alone, is on the host. Reads are
    values that the host waits for, kernels are operations on the device that are no views.
    """

    def __init__(self) -> None:
        super().__init__()
        self.host: dict[int, Any] = {}
        self.reads = self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        of_numbers = func is aten.lift_fresh.default  # torch.tensor()
        on_host = [of_numbers or tensor.untyped_storage()._cdata in self.host for tensor in inputs]
        out = func(*args, **(kwargs or {}))
        if func in (aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default):
            self.reads += not all(on_host)
        elif func is aten.copy_.default and on_host[0]:
            self.reads += not on_host[1]
        else:
            self.kernels += not all(on_host) and not func.is_view
            for tensor in tree_leaves(out):
                if isinstance(tensor, Tensor):
                    storage = tensor.untyped_storage()
                    if all(on_host):
                        self.host[storage._cdata] = storage
                    else:
                        self.host.pop(storage._cdata, None)
        return out


class WorkOfSteps(Callback):
    """Counts the work from one step's beginning to the next; the first of all callbacks."""

    def __init__(self) -> None:
        self.mode = DeviceWork()
        self.reads: dict[int, int] = {}
        self.kernels: dict[int, int] = {}
        self.counting = False

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self._close(trainer)
        self.mode.reads = self.mode.kernels = 0
        self.mode.__enter__()
        self.counting = True

    def on_train_end(self, trainer: Trainer, *args: Any) -> None:
        self._close(trainer)

    def _close(self, trainer: Trainer) -> None:
        if self.counting:
            self.mode.__exit__(None, None, None)
            self.counting = False
            self.reads[trainer.global_step] = self.mode.reads
            self.kernels[trainer.global_step] = self.mode.kernels


class LogsTensors(DeepSeekV3):
    """Of a plain number Lightning makes a tensor of the device, for which the host waits; that is not counted here."""

    def log(self, name: str, value: Any, **kwargs: Any) -> None:  # type: ignore[override]
        assert isinstance(value, Tensor), name
        super().log(name, value, **kwargs)


def work_of_steps(layers: int, folder: Path, val: DataLoader | None = None) -> WorkOfSteps:
    work = WorkOfSteps()
    fit(
        LogsTensors(replace(CONFIG, num_hidden_layers=layers), adamw_fused),
        4,
        val,
        max_epochs=-1,
        max_steps=6,
        log_every_n_steps=3,
        gradient_clip_val=1.0,
        logger=CSVLogger(folder),
        strategy=ExpertParallelStrategy(),
        callbacks=[work, MoEThroughput(peak_flops=1e12)],
    )
    return work


def test_the_host_reads_once_a_logged_step_and_the_work_does_not_grow_with_the_layers(tmp_path: Path) -> None:
    two, six = work_of_steps(2, tmp_path), work_of_steps(6, tmp_path)
    for work in (two, six):
        # The first step does all that a logged one does, but nobody waits for its copy.
        assert work.reads == {1: 1, 2: 0, 3: 1, 4: 0, 5: 0, 6: 1}
    added = two.kernels[6] - two.kernels[5]
    assert 0 < added <= 50
    assert six.kernels[6] - six.kernels[5] == added
    assert two.kernels[1] - two.kernels[2] >= added


def test_the_host_reads_once_a_validation(tmp_path: Path) -> None:
    work = work_of_steps(2, tmp_path, DataLoader(Rows(1, 4), batch_size=2))
    # Each epoch of two steps ends with a validation
    assert work.reads == {1: 1, 2: 1, 3: 1, 4: 1, 5: 0, 6: 2}


def test_reads_are_counted() -> None:
    weight, work = torch.ones(3), DeviceWork()
    with work:
        float((weight * 2).sum())
        bool(weight.isfinite().all())
        assert work.reads == 2
        copy = HostCopy({"sum": weight.sum(), "first": weight[0]})
        assert work.reads == 3
        assert [float(value) for value in copy.read().values()] == [3.0, 1.0]
        float(torch.tensor(3.0))
    assert work.reads == 3


class LossByStep(Callback):
    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self.on_train_end(trainer)

    def on_train_end(self, trainer: Trainer, *args: Any) -> None:
        if "train/loss" in trainer.callback_metrics:
            self.by_step.setdefault(trainer.global_step, trainer.callback_metrics["train/loss"].item())


def test_rows_and_monitors_have_the_values_of_their_step(tmp_path: Path) -> None:
    losses = LossByStep()
    checkpoint = ModelCheckpoint(tmp_path, "{step}", monitor="train/loss", every_n_train_steps=2, save_top_k=-1)
    module = DeepSeekV3(CONFIG, adamw_fused)
    logger = CSVLogger(tmp_path)
    fit(
        module,
        max_epochs=-1,
        max_steps=10,
        log_every_n_steps=2,
        logger=logger,
        enable_checkpointing=True,
        callbacks=[losses, checkpoint, EarlyStopping("train/loss", 10.0, patience=1, check_on_train_epoch_end=True)],
    )
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        rows = {int(row["step"]): float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]}
    last = max(losses.by_step)
    assert last == 4  # the second epoch was no better by ten
    # Lightning numbers rows from 0
    assert rows == {step - 1: losses.by_step[step] for step in range(2, last + 1, 2)}
    assert len(set(rows.values())) == 2
    saved = {Path(path).stem: score.item() for path, score in checkpoint.best_k_models.items()}
    # Lightning saves before the module logs, so that the monitored value is that of the row before.
    assert saved["step=4"] == losses.by_step[2]


def test_ranks_that_read_different_numbers_of_tokens_are_an_error_of_the_report() -> None:
    big = 2**40  # the numbers do not fit float32, their difference does
    sums = {name: torch.tensor(1.0) for name in ("loss", "total_loss", "grad_norm")}
    step = StepSums(1, big, {**sums, "num_tokens": torch.tensor(7)})

    def with_another_rank(more: int) -> Any:
        return lambda tensor: tensor * 2 + (0 if tensor.is_floating_point() else torch.tensor([0, more]))

    values = StepReport(step, torch.tensor(3), with_another_rank(0), 2).read()
    assert {name: value.item() for name, value in values.items()} == {
        "train/loss": pytest.approx(2 / 14),
        "train/total_loss": pytest.approx(2 / 14),
        "train/grad_norm": 1.0,
        "train/skipped_steps": 3.0,
    }
    with pytest.raises(ValueError, match=rf"tokens .* \({big} here, {2 * big - 1} in all 2\)"):
        StepReport(step, torch.tensor(3), with_another_rank(-1), 2).read()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_reading_waits_for_the_copy_and_not_for_what_comes_after_it() -> None:
    values = {"a": torch.full((), 2.5, device="cuda"), "b": torch.full((), 7, device="cuda")}
    HostCopy(values).read()  # pinned memory is at hand now
    end: Any = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        copy = HostCopy(values)
        torch.cuda._sleep(2_000_000_000)
        end.record()
        assert {name: value.item() for name, value in copy.read().items()} == {"a": 2.5, "b": 7.0}
        assert not end.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
