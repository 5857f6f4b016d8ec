"""Several processes skip, validate and resume together, and give what one process gives."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_moe import DeepSeekV3, ExpertParallelStrategy, TokenDataModule
from lightning_moe.tools.prepare import prepare
from tests.models.test_module import CONFIG, SEQUENCE, make_trainer
from tests.strategies import processes
from tests.strategies.training import Rows, adamw, sgd

SMALL = replace(CONFIG, vocab_size=258)


class PoisonOneRank(DeepSeekV3):
    """In the second optimizer step the gradient of one process is not finite."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.history: list[Any] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.global_step == 1 and processes.rank() == 1 else loss

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.history.append((processes.whole(self.state_dict()), self.tokens_seen))


def poisoned(folder: Path) -> None:
    seed_everything(11, verbose=False)
    module = PoisonOneRank(CONFIG, adamw)
    strategy = ExpertParallelStrategy(expert_parallel_size=2)
    trainer = make_trainer(devices=2, strategy=strategy, max_steps=3, use_distributed_sampler=False)
    trainer.fit(module, DataLoader(Rows(2, 8), batch_size=4))
    torch.save((module.history, trainer.logged_metrics), folder / f"history-{processes.rank()}.pt")

    stopping = PoisonOneRank(CONFIG, adamw)
    stopping.nonfinite_gradients = "stop"
    strategy = ExpertParallelStrategy(expert_parallel_size=2)
    trainer = make_trainer(devices=2, strategy=strategy, max_steps=3, use_distributed_sampler=False)
    with pytest.raises(FloatingPointError, match="1 of the steps up to 2 were not finite") as error:
        trainer.fit(stopping, DataLoader(Rows(2, 8), batch_size=4))
    torch.save((str(error.value), len(stopping.history)), folder / f"stopped-{processes.rank()}.pt")


def test_a_gradient_that_is_not_finite_on_one_rank_makes_all_skip(tmp_path: Path) -> None:
    processes.run(2, poisoned, tmp_path)
    for rank in range(2):
        history, logged = torch.load(tmp_path / f"history-{rank}.pt")
        (first, _), (second, _), (third, tokens_seen) = history
        assert all(torch.equal(second[name], value) for name, value in first.items())
        assert not torch.equal(third["model.lm_head.weight"], first["model.lm_head.weight"])
        assert all(value.isfinite().all() for value in third.values())
        assert logged["train/skipped_steps"].item() == 1
        assert tokens_seen == 3 * 8 * SEQUENCE
        message, logged_steps = torch.load(tmp_path / f"stopped-{rank}.pt")
        assert "nonfinite_gradients: skip" in message
        assert logged_steps == 1


class OtherWeightsInValidation(Callback):
    """Validates with weights of its own and puts those that are trained back, as averages of weights do."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.trained: list[Tensor] = []
        self.losses: list[float] = []

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.trained = [parameter.detach().clone() for parameter in pl_module.parameters()]
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.mul_(self.factor)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.losses.append(trainer.callback_metrics["val/loss"].item())
        with torch.no_grad():
            for parameter, trained in zip(pl_module.parameters(), self.trained, strict=True):
                parameter.copy_(trained)


class ForwardWithoutBackward(Callback):
    """Runs the model where a callback might, and reads the loss alone."""

    def __init__(self, hook: str, grad: bool) -> None:
        setattr(self, hook, self.run)
        self.grad = grad
        self.ids = torch.arange(SEQUENCE)[None]

    def run(self, trainer: Trainer, pl_module: DeepSeekV3, *args: Any) -> None:
        with torch.set_grad_enabled(self.grad):
            assert pl_module.built_model(self.ids, self.ids).loss is not None


def fit_with(
    layout: dict[str, Any], callbacks: list[Callback], optimizer: Any, *, validates: bool
) -> tuple[dict[str, Tensor], float]:
    seed_everything(11, verbose=False)
    module = DeepSeekV3(CONFIG, optimizer)
    trainer = make_trainer(
        devices=2,
        strategy=ExpertParallelStrategy(**layout),
        max_steps=3,
        max_epochs=-1,
        val_check_interval=2,
        accumulate_grad_batches=2,
        use_distributed_sampler=False,
        gradient_clip_val=0.5,
        callbacks=callbacks,
    )
    validation = DataLoader(Rows(2, 8, batches=1), batch_size=4) if validates else None
    trainer.fit(module, DataLoader(Rows(2, 8), batch_size=2), validation)
    assert not trainer.predict_loop.inference_mode
    if validates:  # last of all: nothing is left gathered
        assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    model: Any = module.built_model
    gates = [layer.router for _, layer in model.moe_layers()]
    # The head and the gates have groups of their own.
    assert all(isinstance(part, FSDPModule) for part in (model, model.lm_head, *model.layers.values(), *gates))
    return processes.whole(module.state_dict()), trainer.logged_metrics["train/grad_norm"].item()


def validate_with_others(layout: dict[str, Any], folder: Path) -> None:
    callbacks = [OtherWeightsInValidation(factor) for factor in (1.0, 0.5)]
    plain, exchanged = (fit_with(layout, [callback], adamw, validates=True)[0] for callback in callbacks)
    processes.save(folder / "weights.pt", (plain, exchanged, [callback.losses for callback in callbacks]))


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_weights_that_are_exchanged_for_validation(reshard_after_forward: bool, tmp_path: Path) -> None:
    layout = {"expert_parallel_size": 2, "reshard_after_forward": reshard_after_forward}
    processes.run(2, validate_with_others, layout, tmp_path)
    plain, exchanged, (losses, other_losses) = torch.load(tmp_path / "weights.pt")
    assert len(losses) == len(other_losses) == 3
    assert all(abs(loss - other) > 1e-3 for loss, other in zip(losses, other_losses, strict=True))
    for name, value in plain.items():
        assert torch.equal(exchanged[name], value), name


def run_the_model_in_between(layout: dict[str, Any], folder: Path) -> None:
    hooks = ("on_before_optimizer_step", "on_after_backward", "on_train_batch_end")
    cases: list[tuple[str, bool]] = [(hook, False) for hook in hooks] + [("on_before_optimizer_step", True)]
    results = {"nothing": fit_with(layout, [], sgd, validates=False)}
    for hook, grad in cases:
        results[f"{hook}, {grad}"] = fit_with(layout, [ForwardWithoutBackward(hook, grad)], sgd, validates=False)
    processes.save(folder / "results.pt", results)


@pytest.mark.parametrize("reduce_every_micro_batch", [True, False])
def test_a_forward_pass_of_a_callback_changes_nothing(reduce_every_micro_batch: bool, tmp_path: Path) -> None:
    layout = {"expert_parallel_size": 2, "reduce_every_micro_batch": reduce_every_micro_batch}
    processes.run(2, run_the_model_in_between, layout, tmp_path)
    results = torch.load(tmp_path / "results.pt")
    expected, expected_norm = results.pop("nothing")
    assert len(results) == 4
    for case, (weights, norm) in results.items():
        assert norm == expected_norm, case
        for name, value in expected.items():
            assert torch.equal(weights[name], value), (case, name)


def data(store: Path) -> TokenDataModule:
    return TokenDataModule(str(store), SEQUENCE, 2, 8, max_tokens=10 * 8 * SEQUENCE, seed=7, progress_bar=False)


def train(world_size: int, layout: dict[str, Any] | None, store: Path, folder: Path, name: str, steps: int) -> None:
    torch.set_default_dtype(torch.float64)
    seed_everything(11, verbose=False)
    module = DeepSeekV3(SMALL, adamw)
    trainer = make_trainer(
        devices=world_size,
        strategy="auto" if layout is None else ExpertParallelStrategy(**layout),
        max_steps=steps,
        max_epochs=-1,
        val_check_interval=1.0,
    )
    resumed = folder / f"{name}.ckpt"
    trainer.fit(module, datamodule=data(store), ckpt_path=str(resumed) if resumed.exists() else None)
    loss = trainer.validate(module, datamodule=data(store), verbose=False)[0]["val/loss"]
    trainer.save_checkpoint(resumed)
    processes.save(folder / f"{name}.pt", (processes.whole(module.state_dict()), loss, module.tokens_seen))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"{number} bottles of beer on the wall, take {number} down. " * 6)
    output = folder / "store"
    options: dict[str, Any] = {"pattern": "*.txt", "num_workers": 1, "validation_fraction": 0.3, "progress_bar": False}
    prepare(str(folder), str(output), "byte", **options)
    return output


def test_ten_steps_are_five_and_five_under_another_layout(store: Path, tmp_path: Path) -> None:
    processes.run(1, train, 1, None, store, tmp_path, "straight", 10)
    processes.run(2, train, 2, {"expert_parallel_size": 2}, store, tmp_path, "parts", 5)
    processes.run(4, train, 4, {"expert_parallel_size": 2}, store, tmp_path, "parts", 10)
    expected, expected_loss, expected_tokens = torch.load(tmp_path / "straight.pt")
    weights, loss, tokens = torch.load(tmp_path / "parts.pt")
    assert tokens == expected_tokens == 10 * 8 * SEQUENCE
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-8, msg=name)
