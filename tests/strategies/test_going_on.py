"""What a run begins with that goes on from another one: schedulers, averages, loaders, optimizers, tokens seen."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_moe import DeepSeekV3, ExpertParallelStrategy, Preemption, TokenSchedule
from lightning_moe.callbacks.interrupt import INTERRUPTED, TrainingInterrupted
from lightning_moe.callbacks.run_checkpoint import RunCheckpoint
from lightning_moe.run_directory import find_last_checkpoint
from tests.models.test_module import CONFIG, SEQUENCE, make_trainer
from tests.strategies import processes
from tests.strategies.training import Rows, adamw, sgd


def fit(module: DeepSeekV3, steps: int = 4, ckpt_path: Path | str | None = None, **kwargs: Any) -> Trainer:
    seed_everything(11, verbose=False)
    settings = {"strategy": ExpertParallelStrategy(), "max_epochs": -1, "use_distributed_sampler": False}
    trainer = make_trainer(**{**settings, "max_steps": steps, **kwargs})
    share = 8 // trainer.world_size  # the same rows in every step, also after a resume
    trainer.fit(module, DataLoader(Rows(trainer.world_size, 8), batch_size=share), ckpt_path=ckpt_path)
    return trainer


class LearningRates(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        self.seen.append(optimizer.param_groups[0]["lr"])


class WarmsUp(DeepSeekV3):
    """With a scheduler of PyTorch instead of a schedule in tokens."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def test_schedulers_of_lightning_begin_and_go_on_where_they_are(tmp_path: Path) -> None:
    straight, resumed = LearningRates(), LearningRates()
    fit(WarmsUp(CONFIG, sgd), 6, callbacks=[straight])
    assert straight.seen == pytest.approx([0.05, 0.1625, 0.275, 0.3875, 0.5, 0.5])
    fit(WarmsUp(CONFIG, sgd), 2).save_checkpoint(tmp_path / "2.ckpt")
    fit(WarmsUp(CONFIG, sgd), 6, tmp_path / "2.ckpt", callbacks=[resumed])
    assert resumed.seen == pytest.approx(straight.seen[2:])


def test_without_a_scheduler_the_configured_rate_wins_over_the_checkpoint(tmp_path: Path) -> None:
    fit(DeepSeekV3(CONFIG, sgd), 2).save_checkpoint(tmp_path / "2.ckpt")
    rates = LearningRates()
    other = DeepSeekV3(CONFIG, lambda params: torch.optim.SGD(params, lr=0.125))
    fit(other, 4, tmp_path / "2.ckpt", callbacks=[rates])
    assert rates.seen == [0.125, 0.125]


def test_averaged_weights_go_on_bit_by_bit(tmp_path: Path) -> None:
    def train(steps: int, folder: str, ckpt_path: Path | None = None) -> tuple[DeepSeekV3, Path]:
        module = DeepSeekV3(CONFIG, adamw)
        checkpoint = ModelCheckpoint(tmp_path / folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
        callbacks = [EMAWeightAveraging(decay=0.5), checkpoint]
        fit(module, steps, ckpt_path, callbacks=callbacks, enable_checkpointing=True)
        return module, tmp_path / folder / "step=2.ckpt"

    straight, at_two = train(4, "straight")
    resumed, _ = train(4, "resumed", at_two)
    for name, value in straight.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    # A checkpoint that was made without averaging begins it.
    fit(DeepSeekV3(CONFIG, adamw), 2).save_checkpoint(tmp_path / "plain.ckpt")
    assert fit(DeepSeekV3(CONFIG, adamw), 4, tmp_path / "plain.ckpt", callbacks=[EMAWeightAveraging()]).global_step == 4


def test_a_longer_run_goes_on_from_the_trained_weights_and_not_from_their_average(tmp_path: Path) -> None:
    def train(steps: int, folder: str, ckpt_path: Path | None = None) -> DeepSeekV3:
        module = DeepSeekV3(CONFIG, adamw)
        callbacks = [EMAWeightAveraging(decay=0.5), RunCheckpoint(str(tmp_path / folder), every_n_train_steps=2)]
        fit(module, steps, ckpt_path, callbacks=callbacks, enable_checkpointing=True)
        return module

    train(3, "run")
    longer, straight = train(6, "run", tmp_path / "run" / "step=3.ckpt"), train(6, "straight")
    for name, value in straight.state_dict().items():
        assert torch.equal(longer.state_dict()[name], value), name


class Terminate(Callback):
    """Gets SIGTERM in the validation after the second step; knows the trained weights of then."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        self.trained = {name: value.clone() for name, value in pl_module.state_dict().items()}

    def on_validation_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_while_averages_are_validated_saves_the_trained_weights(tmp_path: Path) -> None:
    terminate, averaging = Terminate(), EMAWeightAveraging(decay=0.5)
    trainer = make_trainer(
        strategy=ExpertParallelStrategy(),
        max_steps=6,
        val_check_interval=2,
        callbacks=[terminate, averaging, Preemption()],
        default_root_dir=tmp_path,
    )
    loader = DataLoader(Rows(1, 8, batches=1), batch_size=2)
    with pytest.raises(TrainingInterrupted):
        trainer.fit(DeepSeekV3(CONFIG, adamw), loader, loader)
    found = torch.load(tmp_path / "checkpoints" / INTERRUPTED / "meta.pt", weights_only=True)
    name = "model.lm_head.weight"
    assert torch.equal(found["current_model_state"][name], terminate.trained[name])


def test_weights_alone_are_tested_and_not_trained_on(tmp_path: Path) -> None:
    module = DeepSeekV3(CONFIG, adamw)
    trainer = fit(module)
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    loader = DataLoader(Rows(1, 8, batches=1), batch_size=2)
    before = [state["exp_avg"].clone() for state in trainer.optimizers[0].state.values()]
    expected = trainer.test(module, loader, verbose=False)
    assert trainer.test(module, loader, tmp_path / "weights.ckpt", verbose=False) == expected
    after = [state["exp_avg"] for state in trainer.optimizers[0].state.values()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    with pytest.raises(ValueError, match="holds weights alone, from which training cannot go on"):
        fit(DeepSeekV3(CONFIG, adamw), ckpt_path=tmp_path / "weights.ckpt")


def test_exports_do_not_count_as_the_last_checkpoint(tmp_path: Path) -> None:
    trainer = fit(DeepSeekV3(CONFIG, adamw), default_root_dir=tmp_path)
    trainer.save_checkpoint(tmp_path / "checkpoints" / "step=4.ckpt")
    trainer.save_checkpoint(tmp_path / "checkpoints" / "export.ckpt", weights_only=True)
    assert find_last_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step=4.ckpt"


def test_saving_weights_alone_leaves_what_can_be_resumed(tmp_path: Path) -> None:
    (tmp_path / INTERRUPTED).mkdir()
    for weights_only, left in ((True, True), (False, False)):
        checkpoint = RunCheckpoint(str(tmp_path), every_n_train_steps=2, save_weights_only=weights_only)
        fit(DeepSeekV3(CONFIG, adamw), 2, callbacks=[checkpoint], enable_checkpointing=True)
        assert (tmp_path / INTERRUPTED).exists() is left


def test_another_run_begins_its_own_tokens(tmp_path: Path) -> None:
    schedule = TokenSchedule(warmup=6 * 8 * SEQUENCE, decay_start=1e6, decay_end=1e7)
    module = DeepSeekV3(CONFIG, sgd, schedule=schedule)
    first, second, loaded, resumed = (LearningRates() for _ in range(4))
    trainer = fit(module, callbacks=[first])
    trainer.save_checkpoint(tmp_path / "4.ckpt")
    fit(module, callbacks=[second])
    assert second.seen == first.seen
    assert module.tokens_seen == 4 * 8 * SEQUENCE
    from_file = DeepSeekV3.load_from_checkpoint(tmp_path / "4.ckpt", optimizer=sgd, schedule=schedule)
    fit(from_file, callbacks=[loaded])
    assert loaded.seen == first.seen
    fit(DeepSeekV3(CONFIG, sgd, schedule=schedule), 6, tmp_path / "4.ckpt", callbacks=[resumed])
    # Before a step it is still that of the step before: the configured one, then a sixth for each step.
    assert first.seen == pytest.approx([0.5, 0.5 / 6, 1 / 6, 0.25])
    assert resumed.seen == pytest.approx([0.5, 0.5 * 5 / 6])


class AddsGroup(Callback):
    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer.optimizers[0].add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.1})


def test_groups_that_are_added_in_training_are_named() -> None:
    module = DeepSeekV3(CONFIG, sgd, schedule=TokenSchedule(warmup=64, decay_start=1e6, decay_end=1e7))
    with pytest.raises(ValueError, match=r"has 2 parameter groups, but 1 when it was made"):
        fit(module, callbacks=[AddsGroup()])


class Aborts(Callback):
    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        raise KeyError("aborted")


def test_a_validation_that_was_aborted_leaves_nothing_to_the_next() -> None:
    module, trainer = DeepSeekV3(CONFIG, sgd), make_trainer(strategy=ExpertParallelStrategy())
    loader = DataLoader(Rows(1, 8, batches=1), batch_size=2)
    (expected,) = trainer.validate(module, loader, verbose=False)
    with pytest.raises(KeyError):
        make_trainer(strategy=ExpertParallelStrategy(), callbacks=[Aborts()]).validate(module, loader, verbose=False)
    assert make_trainer(strategy=ExpertParallelStrategy()).validate(module, loader, verbose=False) == [expected]


@pytest.mark.parametrize("place", ["dirpath", "ckpt_path", "save"])
def test_remote_folders_are_refused_rather_than_made_here(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module, checkpoint = DeepSeekV3(CONFIG, sgd), ModelCheckpoint("memory://runs/a", every_n_train_steps=2)
    begin: Any = {
        "dirpath": lambda: fit(module, callbacks=[checkpoint], enable_checkpointing=True),
        "ckpt_path": lambda: fit(module, ckpt_path="memory://runs/a.ckpt"),
        "save": lambda: fit(module).save_checkpoint("memory://runs/a.ckpt"),
    }[place]
    with pytest.raises(ValueError, match="memory://runs.*, but checkpoint directories are written to file systems"):
        begin()
    assert list(tmp_path.iterdir()) == []


class Position:
    """A loader of one's own that saves its position; each process reads other numbers."""

    def __init__(self) -> None:
        self.next = 100 * processes.rank()
        self.read: list[int] = []

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            self.read.append(self.next)
            self.next += 1
            generator = torch.Generator().manual_seed(self.read[-1])
            tokens = torch.randint(0, CONFIG.vocab_size, (1, SEQUENCE + 1), generator=generator)
            yield {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].clone()}

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def read_on(folder: Path, world_size: int, steps: int, ckpt_path: Path | None) -> None:
    loader = Position()
    limit = {} if world_size == 1 else {"limit_train_batches": 100}  # with one Lightning reads no batch ahead
    trainer = make_trainer(
        devices=world_size, strategy=ExpertParallelStrategy(), max_steps=steps, max_epochs=-1, **limit
    )
    trainer.fit(DeepSeekV3(CONFIG, sgd), loader, ckpt_path=ckpt_path)
    torch.save(loader.read, folder / f"read_{processes.rank()}_to_{steps}.pt")
    trainer.save_checkpoint(folder / f"{steps}.ckpt")


def test_each_process_goes_on_where_its_own_loader_was(tmp_path: Path) -> None:
    for world_size in (1, 2):
        processes.run(world_size, read_on, tmp_path, world_size, 2, None)
        processes.run(world_size, read_on, tmp_path, world_size, 4, tmp_path / "2.ckpt")
        for rank in range(world_size):
            first, then = (torch.load(tmp_path / f"read_{rank}_to_{steps}.pt") for steps in (2, 4))
            assert first[:2] == [100 * rank, 100 * rank + 1]
            assert then[0] == 100 * rank + 2
    with pytest.raises(Exception, match=r"positions of Position on 2 processes, but\s+now there are 3; go on with 2"):
        processes.run(3, read_on, tmp_path, 3, 6, tmp_path / "4.ckpt")


class Trained(DeepSeekV3):
    """Knows the batches that it has trained on, by their first token."""

    seen: list[int]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.append(int(batch["input_ids"].sum()))
        return super().training_step(batch, batch_idx)


class SignalAtSecondStep(Callback):
    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def trained_batches(steps: int, folder: Path, callbacks: list[Callback], ckpt_path: Path | None = None) -> list[int]:
    module = Trained(CONFIG, sgd)
    module.seen = []
    trainer = make_trainer(
        strategy=ExpertParallelStrategy(),
        max_steps=steps,
        max_epochs=-1,
        limit_train_batches=100,
        callbacks=callbacks,
        default_root_dir=folder,
    )
    with suppress(TrainingInterrupted):
        trainer.fit(module, Position(), ckpt_path=ckpt_path)
    return module.seen


def test_a_signal_loses_no_batch_of_a_loader_that_saves_its_position(tmp_path: Path) -> None:
    straight = trained_batches(6, tmp_path / "straight", [])
    first = trained_batches(6, tmp_path, [Preemption(), SignalAtSecondStep()])
    then = trained_batches(6, tmp_path, [Preemption()], tmp_path / "checkpoints" / INTERRUPTED)
    assert 0 < len(first) < 6
    assert first + then == straight


class OldFashioned(DeepSeekV3):
    """With a scheduler that goes on from the learning rate of now."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "step"}]


def test_schedulers_go_on_from_a_file_of_another_strategy(tmp_path: Path) -> None:
    fit(OldFashioned(CONFIG, sgd), 3, strategy="auto").save_checkpoint(tmp_path / "3.ckpt")
    resumed = LearningRates()
    fit(OldFashioned(CONFIG, sgd), 6, tmp_path / "3.ckpt", callbacks=[resumed])
    assert resumed.seen == [0.0625, 0.03125, 0.015625]


def test_files_that_training_cannot_go_on_from(tmp_path: Path) -> None:
    trainer = fit(DeepSeekV3(CONFIG, lambda params: torch.optim.AdamW(params)), strategy="auto")
    trainer.save_checkpoint(tmp_path / "adamw.ckpt")
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    with pytest.raises(ValueError, match="optimizer has .*betas.*, but this SGD has .*momentum.* instead"):
        fit(DeepSeekV3(CONFIG, sgd), ckpt_path=tmp_path / "adamw.ckpt")
    with pytest.raises(ValueError, match="holds weights alone, from which training cannot go on"):
        fit(DeepSeekV3(CONFIG, adamw), ckpt_path=tmp_path / "weights.ckpt")


def test_a_directory_of_another_size_is_named(tmp_path: Path) -> None:
    fit(DeepSeekV3(CONFIG, adamw)).save_checkpoint(tmp_path / "small")
    larger = DeepSeekV3(replace(CONFIG, vocab_size=128), adamw)
    with pytest.raises(ValueError, match=r"has shape \[64, 32\] there, but the model needs \[128, 32\]"):
        fit(larger, ckpt_path=tmp_path / "small")


class StopInWindow(Callback):
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        trainer.should_stop = True


def stop_and_begin_anew(folder: Path, stops: bool) -> None:
    seed_everything(11, verbose=False)
    torch.set_default_dtype(torch.float64)
    module = DeepSeekV3(CONFIG, sgd)
    for callbacks in ([StopInWindow()], []) if stops else ([],):
        trainer = make_trainer(
            devices=2,
            strategy=ExpertParallelStrategy(reduce_every_micro_batch=False),
            max_steps=1,
            accumulate_grad_batches=4,
            use_distributed_sampler=False,
            callbacks=callbacks,
        )
        trainer.fit(module, DataLoader(Rows(2, 8), batch_size=1))
    processes.save(folder / f"{stops}.pt", processes.whole(module.state_dict()))


def test_gradients_of_a_step_that_was_not_finished_are_not_reduced_in_the_next(tmp_path: Path) -> None:
    for stops in (False, True):
        processes.run(2, stop_and_begin_anew, tmp_path, stops)
    fresh, again = (torch.load(tmp_path / f"{stops}.pt") for stops in (False, True))
    for name, value in fresh.items():
        torch.testing.assert_close(again[name], value, rtol=0, atol=1e-12, msg=name)


def save_on_exception() -> None:
    checkpoint = RunCheckpoint("unused", save_on_exception=True)
    with pytest.raises(ValueError, match="save_on_exception=True, but where one of 2 processes fails"):
        fit(DeepSeekV3(CONFIG, sgd), devices=2, callbacks=[checkpoint], enable_checkpointing=True)


def test_saving_on_an_exception_of_one_of_several_processes_is_refused() -> None:
    processes.run(2, save_on_exception)
