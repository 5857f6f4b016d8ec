"""Copies of weights that FSDP2 has gathered: callbacks that run the model or change weights find and leave none."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_moe import DeepSeekV3, ExpertParallelStrategy
from tests.models.test_module import CONFIG, SEQUENCE, make_trainer
from tests.strategies import processes
from tests.strategies.training import Rows, adamw, sgd


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


class GatesAtFirstBlock(Callback):
    """Looks when the first block begins which gates are still shards."""

    def __init__(self) -> None:
        self.seen: list[list[bool]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, DeepSeekV3)
        model: Any = pl_module.built_model
        model.layers["0"].register_forward_pre_hook(lambda *_: self.look(model))

    def look(self, model: Any) -> None:
        self.seen.append([isinstance(layer.router.weight, DTensor) for _, layer in model.moe_layers()])


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


def look_at_gates(layout: dict[str, Any]) -> None:
    gates = GatesAtFirstBlock()
    fit_with(layout, [gates], sgd, validates=True)
    micro_batches, validations = 6, 3
    assert gates.seen == [[False, False]] * (micro_batches + validations)  # that of the MTP depth too


def test_gates_are_gathered_before_the_first_block() -> None:
    processes.run(2, look_at_gates, {"expert_parallel_size": 2})
