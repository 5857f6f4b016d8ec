"""MoEThroughput: exact speeds on a clock that the test turns, the peak that they are a share of, and what it says."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch.utils.data import DataLoader

from lightning_moe import DeepSeekV3, MoEThroughput
from lightning_moe.callbacks.peak_flops import peak_of
from lightning_moe.models import step_clock
from tests.models.test_module import CONFIG, SEQUENCE, Rows, make_trainer


class Clock:
    """Time that passes only where the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 100.0
        monkeypatch.setattr(step_clock, "time", SimpleNamespace(perf_counter=lambda: self.seconds))


class TimePasses(Callback):
    """Each micro-batch takes two seconds, the first a minute more; a validation or checkpoint takes an hour."""

    def __init__(self, clock: Clock, checkpoint: Path | None = None, checkpoint_at: int = 0) -> None:
        self.clock = clock
        self.checkpoint = checkpoint
        self.checkpoint_at = checkpoint_at
        self.started = False

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self.clock.seconds += 2.0 if self.started else 62.0
        self.started = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.checkpoint is not None and trainer.global_step == self.checkpoint_at:
            trainer.save_checkpoint(self.checkpoint)
            self.clock.seconds += 3600.0

    def on_validation_batch_end(self, *_: Any) -> None:
        self.clock.seconds += 3600.0


def logged_by_step(module: LightningModule, monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, float]]:
    steps: dict[int, dict[str, float]] = {}
    log = module.log

    def keep(name: str, value: Any, **kwargs: Any) -> None:
        steps.setdefault(module.global_step, {})[name] = float(value)
        log(name, value, **kwargs)

    monkeypatch.setattr(module, "log", keep)
    return steps


def fit(
    callbacks: list[Callback], monkeypatch: pytest.MonkeyPatch, **kwargs: Any
) -> tuple[DeepSeekV3, dict[int, dict[str, float]]]:
    module = DeepSeekV3(CONFIG)
    steps = logged_by_step(module, monkeypatch)
    trainer = make_trainer(callbacks=callbacks, **{"max_steps": 6, "max_epochs": -1, **kwargs})
    trainer.fit(module, DataLoader(Rows(), batch_size=4), DataLoader(Rows(4), batch_size=4))
    return module, steps


def test_speed_without_first_steps_and_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    throughput = MoEThroughput(warmup_steps=1, peak_flops=1e9)
    module, steps = fit(
        [TimePasses(Clock(monkeypatch)), throughput], monkeypatch, log_every_n_steps=1, check_val_every_n_epoch=1
    )
    assert "train/tokens_per_second" not in steps[1]
    assert "train/tflops_per_device" not in steps[1]
    per_token = module.built_model.flops_per_token(SEQUENCE)
    for step in range(2, 7):  # validation comes after every second step
        assert steps[step]["train/tokens_per_second"] == pytest.approx(4 * SEQUENCE / 2.0)
        assert steps[step]["train/tflops_per_device"] == pytest.approx(4 * SEQUENCE / 2.0 * per_token / 1e12)
        assert steps[step]["train/mfu"] == pytest.approx(4 * SEQUENCE / 2.0 * per_token / 1e9)


def test_speed_of_several_steps_with_accumulation(monkeypatch: pytest.MonkeyPatch) -> None:
    _, steps = fit(
        [TimePasses(Clock(monkeypatch)), MoEThroughput(warmup_steps=2)],
        monkeypatch,
        log_every_n_steps=3,
        accumulate_grad_batches=2,
        limit_val_batches=0,
    )
    assert list(steps) == [3, 6]
    # One step after the warm-up, then three; each of two micro-batches
    for step in (3, 6):
        assert steps[step]["train/tokens_per_second"] == pytest.approx(8 * SEQUENCE / 4.0)


def test_speed_without_checkpoints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    passing = TimePasses(Clock(monkeypatch), tmp_path / "step.ckpt", checkpoint_at=3)
    _, steps = fit([MoEThroughput(warmup_steps=1), passing], monkeypatch, log_every_n_steps=1, limit_val_batches=0)
    assert [steps[step]["train/tokens_per_second"] for step in range(2, 7)] == pytest.approx([2 * SEQUENCE] * 5)


def test_a_resumed_run_warms_up_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock, path = Clock(monkeypatch), tmp_path / "step.ckpt"
    fit([MoEThroughput(), TimePasses(clock, path, checkpoint_at=3)], monkeypatch, max_steps=3, limit_val_batches=0)
    module = DeepSeekV3(CONFIG)
    steps = logged_by_step(module, monkeypatch)
    trainer = make_trainer(callbacks=[MoEThroughput(warmup_steps=1), TimePasses(clock)], max_steps=5, max_epochs=-1)
    trainer.fit(module, DataLoader(Rows(), batch_size=4), ckpt_path=path)
    assert "train/tokens_per_second" not in steps[4]
    assert steps[5]["train/tokens_per_second"] == pytest.approx(2 * SEQUENCE)


def test_the_rule_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        module, steps = fit([MoEThroughput(), TimePasses(Clock(monkeypatch))], monkeypatch)
    said = [record.message for record in caplog.records if record.message.startswith("Throughput:")]
    assert len(said) == 1
    assert f"{module.built_model.flops_per_token(SEQUENCE) / 1e9:.4f} GFLOP per token" in said[0]
    assert "No train/mfu: no peak is known for CPU: give it as peak_flops" in said[0]
    assert "train/mfu" not in steps[6]
    assert "train/peak_memory_gib" not in steps[6]  # only where the allocator counts


def test_the_same_values_without_the_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    _, steps = fit([TimePasses(Clock(monkeypatch))], monkeypatch, log_every_n_steps=2)
    assert steps[2]["train/tokens_per_second"] == pytest.approx(8 * SEQUENCE / 64.0)
    assert steps[4]["train/tokens_per_second"] == pytest.approx(8 * SEQUENCE / 4.0)


@pytest.mark.parametrize(
    ("name", "bfloat16", "float8"),
    [
        ("NVIDIA H200", 989.4, 1978.9),
        ("NVIDIA H200 NVL", 835.5, 1670.5),
        ("NVIDIA H100 80GB HBM3", 989.4, 1978.9),
        ("NVIDIA H100 PCIe", 756.0, 1513.0),
        ("NVIDIA B200", 2250.0, 4500.0),
        ("NVIDIA GB200", 2500.0, 5000.0),
        ("NVIDIA A100-SXM4-80GB", 312.0, None),
        ("AMD Instinct MI300X", 1307.4, 2614.9),
    ],
)
def test_peaks_are_dense(name: str, bfloat16: float, float8: float | None) -> None:
    peak = peak_of(name)
    assert peak is not None
    assert peak.rates["bfloat16"] == bfloat16
    assert peak.rates.get("float8") == float8


def test_unknown_devices_have_no_peak() -> None:
    assert peak_of("NVIDIA Z9000") is None
    assert peak_of("CPU") is None


class OnGPU:
    """As much of a Trainer on a GPU as the choice of the peak asks for."""

    def __init__(self, precision: str = "32-true", compute_dtype: str | None = None) -> None:
        self.precision = precision
        self.precision_plugin = None
        self.strategy = SimpleNamespace(root_device=torch.device("cuda"), compute_dtype=compute_dtype)


@pytest.mark.parametrize(
    ("trainer", "peak_dtype", "tflops"),
    [
        (OnGPU(compute_dtype="auto"), "auto", 989.4),
        (OnGPU(precision="bf16-mixed"), "auto", 989.4),
        (OnGPU(compute_dtype="float32"), "auto", 66.9),
        (OnGPU(compute_dtype="auto"), "float8", 1978.9),
    ],
)
def test_the_peak_is_that_of_the_dtype(
    trainer: Any, peak_dtype: Any, tflops: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    peak, source = MoEThroughput(peak_dtype=peak_dtype)._find_peak(trainer)
    assert peak == pytest.approx(tflops * 1e12)
    assert source.endswith("peak of NVIDIA H200 (NVIDIA H200 data sheet, SXM)")


def test_a_peak_that_the_device_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    trainer: Any = OnGPU()
    with pytest.raises(ValueError, match="float8, but NVIDIA A100-SXM4-80GB has only float32, tfloat32, bfloat16"):
        MoEThroughput(peak_dtype="float8")._find_peak(trainer)
    assert MoEThroughput(peak_flops=5.0)._find_peak(trainer) == (5.0, "given as peak_flops")


@pytest.mark.parametrize("arguments", [{"warmup_steps": -1}, {"peak_flops": 0.0}, {"peak_dtype": "int8"}])
def test_values_out_of_range_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(arguments))} is "):
        MoEThroughput(**arguments)
