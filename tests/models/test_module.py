"""The training module: exact gradients, one decision per optimizer step, balancing, schedules, logging, checkpoints."""

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer, seed_everything
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_moe import AdamW, Balancing, DeepSeekV3, DeepSeekV3Config, MoELightningModule, MoEShape, TokenSchedule
from lightning_moe.models.base import MoEModel

CONFIG = DeepSeekV3Config.preset(
    "tiny",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    n_routed_experts=8,
    num_experts_per_tok=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    initializer_range=0.1,
)
SEQUENCE = 16


class Rows(Dataset):
    """Random rows, of which some labels are ignored: a different number in each row."""

    def __init__(self, rows: int = 8) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(0, CONFIG.vocab_size, (rows, SEQUENCE + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.tokens[index, 1:].clone()
        labels[: (index * 5) % SEQUENCE] = -100
        return {"input_ids": self.tokens[index, :-1], "labels": labels}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


def adamw_fused(params: Any) -> torch.optim.Optimizer:
    return AdamW(params, lr=1e-2, fused=True)


def make_trainer(**kwargs: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
    }
    return Trainer(**{**defaults, **kwargs})


def fit(module: MoELightningModule, batch_size: int = 4, val: DataLoader | None = None, **kwargs: Any) -> Trainer:
    seed_everything(11, verbose=False)
    trainer = make_trainer(**kwargs)
    trainer.fit(module, DataLoader(Rows(), batch_size=batch_size), val)
    return trainer


def weights(module: MoELightningModule) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items() if name.startswith("model.")}


@pytest.mark.parametrize(("micro_batch", "accumulate"), [(1, 8), (2, 4), (3, 3)])
def test_micro_batches_of_any_size_give_the_gradients_of_the_whole_batch(micro_batch: int, accumulate: int) -> None:
    def step(batch_size: int, accumulate_grad_batches: int) -> dict[str, Tensor]:
        module = DeepSeekV3(CONFIG, sgd)
        fit(
            module,
            batch_size,
            max_steps=1,
            accumulate_grad_batches=accumulate_grad_batches,
            precision="64-true",
        )
        return weights(module)

    whole, split = step(8, 1), step(micro_batch, accumulate)
    start = DeepSeekV3(CONFIG, sgd)
    for name, value in whole.items():
        assert value.dtype == torch.float64, name
        torch.testing.assert_close(split[name], value, rtol=0, atol=1e-10, msg=name)
    moved = [name for name, value in whole.items() if (value != start_value(start, name)).any()]
    assert {"model.lm_head.weight", "model.embed_tokens.weight", "model.mtp_layers.2.eh_proj.weight"} <= set(moved)


def start_value(module: DeepSeekV3, name: str) -> Tensor:
    if module.model is None:
        seed_everything(11, verbose=False)
        torch.set_default_dtype(torch.float64)
        try:
            module.configure_model()
        finally:
            torch.set_default_dtype(torch.float32)
    return module.state_dict()[name]


def test_gradient_is_that_of_the_mean_over_the_valid_tokens_of_the_step() -> None:
    module = DeepSeekV3(CONFIG, sgd, balancing=Balancing(0.0, 1e-2), mtp_loss_weight=0.3)
    fit(module, 4, max_steps=1, accumulate_grad_batches=2, precision="64-true")
    after = weights(module)

    reference = DeepSeekV3(CONFIG, sgd)
    start_value(reference, "model.lm_head.weight")
    batch = next(iter(DataLoader(Rows(), batch_size=8)))
    logits = reference(batch["input_ids"])
    labels = batch["labels"]
    valid = (labels != -100).sum()
    loss = nn.functional.cross_entropy(logits.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    ahead = torch.cat([labels[:, 1:], labels.new_full((8, 1), -100)], dim=1)
    mtp = nn.functional.cross_entropy(logits.mtp_logits[0].flatten(0, 1), ahead.flatten(), reduction="sum")
    ((loss + 0.3 * mtp + 1e-2 * logits.balance_loss) / valid).backward()
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(after[name], parameter.detach() - parameter.grad, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_applies_to_the_scaled_gradient(algorithm: str) -> None:
    free, clipped = DeepSeekV3(CONFIG, sgd), DeepSeekV3(CONFIG, sgd)
    limit = 0.01
    fit(free, 4, max_steps=1, accumulate_grad_batches=2, precision="64-true")
    trainer = fit(
        clipped,
        4,
        max_steps=1,
        accumulate_grad_batches=2,
        precision="64-true",
        gradient_clip_val=limit,
        gradient_clip_algorithm=algorithm,
    )
    start = DeepSeekV3(CONFIG, sgd)
    start_value(start, "model.lm_head.weight")
    names = [name for name, _ in start.named_parameters()]
    before, full, short = start.state_dict(), weights(free), weights(clipped)
    gradient = torch.cat([(before[name] - full[name]).flatten() for name in names])
    taken = torch.cat([(before[name] - short[name]).flatten() for name in names])
    norm = gradient.norm()
    assert norm > limit
    assert trainer.logged_metrics["train/grad_norm"].item() == pytest.approx(norm.item(), rel=1e-6)
    expected = gradient * (limit / (norm + 1e-6)) if algorithm == "norm" else gradient.clamp(-limit, limit)
    torch.testing.assert_close(taken, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clip_value_of_zero_does_not_clip(algorithm: str) -> None:
    free, zero = DeepSeekV3(CONFIG, sgd), DeepSeekV3(CONFIG, sgd)
    fit(free, 4, max_steps=1)
    fit(zero, 4, max_steps=1, gradient_clip_val=0, gradient_clip_algorithm=algorithm)
    for name, value in weights(free).items():
        assert torch.equal(weights(zero)[name], value), name


def test_a_loss_scaler_changes_neither_norm_nor_clipping_of_a_fused_optimizer() -> None:
    def norm(**kwargs: Any) -> float:
        module = DeepSeekV3(CONFIG, lambda params: AdamW(params, lr=1e-3, eps=1e-3, fused=True))
        trainer = fit(module, 4, max_steps=1, gradient_clip_val=0.01, **kwargs)
        steps.append(weights(module))
        return trainer.logged_metrics["train/grad_norm"].item()

    steps: list[dict[str, Tensor]] = []
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaled = norm(plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    assert scaled == pytest.approx(norm(), rel=0.05)
    # Clipped gradients are far below eps, so that a factor on them would show.
    for name, value in steps[0].items():
        torch.testing.assert_close(value, steps[1][name], rtol=0, atol=1e-4, msg=name)


class AllIgnored(DeepSeekV3):
    """Ignores every label of the second optimizer step."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.global_step == 1:
            batch = {**batch, "labels": torch.full_like(batch["labels"], -100)}
        return super().training_step(batch, batch_idx)


def test_a_step_without_valid_tokens_changes_nothing() -> None:
    snapshots = Snapshots()
    module = AllIgnored(CONFIG, adamw_fused, balancing=Balancing(0.001, 1.0))
    fit(module, 2, max_steps=3, callbacks=[snapshots])
    first, second, third = snapshots.taken
    for name, value in first.items():
        assert torch.equal(second[name], value), name
    assert not torch.equal(third["model.lm_head.weight"], first["model.lm_head.weight"])


class OwnOptimizer(DeepSeekV3):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def test_a_subclass_may_make_the_optimizer_itself() -> None:
    trainer = fit(OwnOptimizer(CONFIG), max_steps=1)
    assert trainer.logged_metrics["train/lr"].item() == pytest.approx(1e-3)


class StopWithinWindow(Callback):
    """Stops at the second micro-batch."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = batch_idx == 1


def test_a_fit_that_stopped_within_a_window_leaves_nothing_for_the_next() -> None:
    stopped, fresh = RecordCounts(CONFIG, sgd), RecordCounts(CONFIG, sgd)
    fit(stopped, 2, max_steps=1, accumulate_grad_batches=4, callbacks=[StopWithinWindow()])
    assert stopped.tokens_seen == 0
    fit(stopped, 2, max_steps=1, accumulate_grad_batches=4)
    fit(fresh, 2, max_steps=1, accumulate_grad_batches=4)
    assert stopped.tokens_seen == fresh.tokens_seen == 8 * SEQUENCE
    assert all(torch.equal(a, b) for a, b in zip(stopped.counted[0], fresh.counted[0], strict=True))
    for name, value in weights(fresh).items():
        assert torch.equal(weights(stopped)[name], value), name


class RecordCounts(DeepSeekV3):
    """Keeps what each optimizer step counted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counted: list[list[Tensor]] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if "grad_norm" in self._step_sums.sums:
            self.counted.append([counts.clone() for counts in self._step_sums.expert_counts])
        super().on_train_batch_end(outputs, batch, batch_idx)


def biases(module: MoELightningModule) -> list[Tensor]:
    return [layer.router.e_score_correction_bias.clone() for _, layer in module.built_model.moe_layers()]


def test_bias_moves_by_the_sign_rule_once_per_optimizer_step_mtp_included() -> None:
    module = RecordCounts(CONFIG, sgd, balancing=Balancing(0.001, 0.0))
    fit(module, 2, max_steps=1, accumulate_grad_batches=4)
    assert len(module.counted) == 1
    assert len(module.counted[0]) == 2  # one MoE block and one MTP block
    main, mtp = module.counted[0]
    assert main.dtype == torch.int64
    assert main.sum().item() == 8 * SEQUENCE * CONFIG.num_experts_per_tok
    assert mtp.sum().item() == 8 * (SEQUENCE - 1) * CONFIG.num_experts_per_tok
    for counts, bias in zip(module.counted[0], biases(module), strict=True):
        expected = 0.001 * torch.sign(counts.double().mean() - counts.double())
        torch.testing.assert_close(bias.double(), expected, rtol=0, atol=1e-9)
        assert bias.abs().max() > 0


def test_validation_and_sanity_checks_change_no_bias_and_no_count() -> None:
    val = DataLoader(Rows(5), batch_size=2)
    plain, validated = RecordCounts(CONFIG, sgd), RecordCounts(CONFIG, sgd)
    fit(plain, 2, max_steps=4)
    fit(validated, 2, val, max_steps=4, val_check_interval=1, num_sanity_val_steps=2)
    for name, value in weights(plain).items():
        assert torch.equal(value, weights(validated)[name]), name
    for a, b in zip(plain.counted, validated.counted, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_bias_stays_float32_when_the_module_is_cast() -> None:
    module = DeepSeekV3(CONFIG, sgd)
    fit(module, 4, max_steps=2, precision="bf16-true")
    for bias in biases(module):
        assert bias.dtype == torch.float32
        assert torch.allclose(bias.abs().max(), torch.tensor(0.002)) or torch.allclose(
            bias.abs().max(), torch.tensor(0.001)
        )


class PoisonSecondStep(DeepSeekV3):
    """Gives a gradient that is not finite in the second optimizer step."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if self.global_step == 1 else loss


class Snapshots(Callback):
    """Copies weights, biases and moments after each optimizer step."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Tensor]] = []
        self.tokens_seen: list[int] = []
        self.gradients_left: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        snapshot = weights(pl_module)
        for index, (_, state) in enumerate(trainer.optimizers[0].state.items()):
            snapshot.update({f"{index}.{key}": value.clone() for key, value in state.items()})
        self.taken.append(snapshot)
        self.tokens_seen.append(pl_module.tokens_seen)
        self.gradients_left.append(sum(p.grad is not None for p in pl_module.parameters()))


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_that_is_not_finite_changes_nothing_but_its_tokens_count(fused: bool) -> None:
    snapshots = Snapshots()
    module = PoisonSecondStep(CONFIG, lambda params: AdamW(params, lr=1e-2, fused=fused))
    trainer = fit(module, 2, max_steps=3, callbacks=[snapshots])
    first, second, third = snapshots.taken
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(second[name], value), name
    assert any(not torch.equal(third[name], value) for name, value in first.items() if "bias" in name)
    assert all(value.isfinite().all() for value in third.values())
    assert not torch.equal(third["model.lm_head.weight"], first["model.lm_head.weight"])
    assert snapshots.tokens_seen == [2 * SEQUENCE, 4 * SEQUENCE, 6 * SEQUENCE]
    assert snapshots.gradients_left == [0, 0, 0]
    assert trainer.logged_metrics["train/skipped_steps"].item() == 1


class Tokens(LightningDataModule):
    """Rows with a limit in tokens, as the schedule needs it."""

    max_tokens = 4 * 4 * SEQUENCE

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Rows(16), batch_size=4)


class Recorded(Callback):
    def __init__(self, name: str) -> None:
        self.name = name
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        self.values.append(trainer.optimizers[0].param_groups[0]["lr"])


def test_learning_rate_follows_the_schedule_in_tokens() -> None:
    recorded = Recorded("lr")
    schedule = TokenSchedule(warmup=0.5, decay_start=0.5, decay_end=1.0, final_ratio=0.1)
    module = DeepSeekV3(CONFIG, lambda params: AdamW(params, lr=1.0), schedule=schedule)
    make_trainer(max_steps=4, callbacks=[recorded]).fit(module, datamodule=Tokens())
    assert recorded.values == pytest.approx([0.5, 1.0, 0.55, 0.1])


def test_schedule_in_fractions_needs_max_tokens() -> None:
    module = DeepSeekV3(CONFIG, schedule=TokenSchedule(warmup=0.5))
    with pytest.raises(ValueError, match=r"max_tokens"):
        fit(module, max_steps=1)


def test_mtp_weight_of_zero_leaves_the_depths_out() -> None:
    module = DeepSeekV3(CONFIG, sgd, mtp_loss_weight={0: 0.3, 2 * SEQUENCE: 0.0})
    snapshots = Snapshots()
    trainer = fit(module, 2, max_steps=2, callbacks=[snapshots])
    name = "model.mtp_layers.2.eh_proj.weight"
    assert torch.equal(snapshots.taken[0][name], snapshots.taken[1][name])
    assert "train/mtp_loss_1" in trainer.logged_metrics  # from the first step
    assert trainer.logged_metrics["train/total_loss"] == pytest.approx(
        trainer.logged_metrics["train/loss"].item() + 1e-4 * trainer.logged_metrics["train/balance_loss"].item(),
        rel=1e-6,
    )


def test_validation_loss_is_the_mean_over_valid_tokens() -> None:
    val = DataLoader(Rows(5), batch_size=2)
    module = DeepSeekV3(CONFIG, sgd)
    trainer = fit(module, 4, val, max_steps=1, val_check_interval=1)
    batch = next(iter(DataLoader(Rows(5), batch_size=5)))
    logits = module.eval()(batch["input_ids"]).logits
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    assert trainer.logged_metrics["val/loss"].item() == pytest.approx(expected.item(), rel=1e-5)


def test_logged_names() -> None:
    trainer = fit(DeepSeekV3(CONFIG), 4, DataLoader(Rows(4), batch_size=2), max_steps=1, val_check_interval=1)
    expected = """
        train/loss train/total_loss train/mtp_loss_1 train/balance_loss train/grad_norm train/lr train/tokens_seen
        train/tokens_per_second train/skipped_steps train/expert_load_max_violation
        train/expert_load_max_violation_worst_layer train/expert_load_entropy train/mtp_accuracy_1
        train/mtp_acceptance_1 val/loss val/mtp_loss_1 val/mtp_accuracy_1 val/mtp_acceptance_1
        val/expert_load_max_violation val/expert_load_max_violation_worst_layer val/expert_load_entropy
    """
    assert set(trainer.logged_metrics) == set(expected.split())
    assert trainer.logged_metrics["train/tokens_seen"].item() == 4 * SEQUENCE


class Wider(DeepSeekV3):
    """A subclass with an argument of its own."""

    def __init__(self, extra: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.extra = extra
        self.save_hyperparameters({"extra": extra})


def test_checkpoint_loads_with_weights_only_and_rebuilds_the_module(tmp_path: Any) -> None:
    module = Wider(7, config=CONFIG, balancing=Balancing(0.01, 0.0))
    trainer = fit(module, 2, max_steps=3, enable_checkpointing=True, default_root_dir=tmp_path)
    path = tmp_path / "three.ckpt"
    trainer.save_checkpoint(path)
    torch.load(path, weights_only=True)
    loaded = Wider.load_from_checkpoint(path, weights_only=True)
    assert loaded.config == CONFIG
    assert loaded.balancing == Balancing(0.01, 0.0)
    assert loaded.extra == 7
    assert loaded.tokens_seen == 3 * 2 * SEQUENCE
    tokens = Rows()[0]["input_ids"][None]
    assert torch.equal(loaded.eval()(tokens).logits, module.eval()(tokens).logits)


def test_ten_steps_are_five_and_five(tmp_path: Any) -> None:
    def run(max_steps: int, ckpt_path: str | None = None, lr: float = 1e-2) -> DeepSeekV3:
        module = DeepSeekV3(CONFIG, lambda params: AdamW(params, lr=lr))
        seed_everything(11, verbose=False)
        trainer = make_trainer(max_steps=max_steps, max_epochs=-1)
        trainer.fit(module, DataLoader(Rows(8), batch_size=8), ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / f"{max_steps}.ckpt")
        return module

    straight = run(10)
    run(5)
    resumed = run(10, str(tmp_path / "5.ckpt"))
    for name, value in weights(straight).items():
        assert torch.equal(value, weights(resumed)[name]), name
    changed = run(10, str(tmp_path / "5.ckpt"), lr=5e-2)
    assert changed.trainer.optimizers[0].param_groups[0]["lr"] == 5e-2


class Nothing(MoELightningModule):
    pass


class NoModel(MoELightningModule):
    def build_model(self) -> MoEModel:
        return nn.Linear(2, 2)  # type: ignore[return-value]

    def moe_shape(self) -> MoEShape:
        return MoEShape(64, 8, 4, 2, 8)


class Outside(DeepSeekV3):
    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.probe = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (Nothing, NotImplementedError, r"Nothing must override build_model\(\)"),
        (NoModel, TypeError, r"NoModel.build_model\(\) returned a Linear"),
        (Outside, ValueError, r"Outside has parameters outside the model.*probe"),
    ],
)
def test_what_a_custom_class_leaves_out_is_named(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make().configure_model()
    with pytest.raises(NotImplementedError, match=r"Nothing must override moe_shape\(\)"):
        Nothing().moe_shape()  # type: ignore[abstract]


def test_batch_with_unknown_keys_is_refused() -> None:
    module = DeepSeekV3(CONFIG)
    module.configure_model()
    batch = {**Rows()[0], "attention_mask": torch.ones(SEQUENCE)}
    with pytest.raises(ValueError, match=r"attention_mask.*but it needs input_ids and labels"):
        module.validation_step(batch, 0)


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_a_clip_value_that_would_reverse_gradients_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"gradient_clip_val is (-1.0|nan), but it must not be negative"):
        fit(DeepSeekV3(CONFIG, sgd), max_steps=1, gradient_clip_val=value)


def test_several_processes_need_a_strategy_that_knows_experts() -> None:
    module = DeepSeekV3(CONFIG)

    class FakeTrainer:
        world_size = 2
        strategy = object()
        gradient_clip_val = None
        datamodule = None

    module.trainer = FakeTrainer()  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"2 processes.*ExpertParallelStrategy|ExpertParallelStrategy"):
        module.setup("fit")


def test_a_model_built_for_one_process_is_not_trained_by_several() -> None:
    module = DeepSeekV3(CONFIG)
    module.configure_model()

    class FakeStrategy:
        def assemble(self, model: MoEModel, seed: int) -> None: ...

    class FakeTrainer:
        world_size = 2
        strategy = FakeStrategy()
        datamodule = None

    module.trainer = FakeTrainer()  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"built for 1 process\(es\), but the Trainer has 2"):
        module.setup("fit")


class ReadsGradients(DeepSeekV3):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(*args, **kwargs)


def test_gradients_are_left_to_the_optimizer_unless_a_subclass_goes_on_with_them() -> None:
    assert DeepSeekV3(CONFIG).leaves_gradients_to_optimizer
    assert not ReadsGradients(CONFIG).leaves_gradients_to_optimizer


def test_a_model_is_not_trained_in_another_way_than_a_second_trainer_says() -> None:
    from lightning_moe import ExpertParallelStrategy, MXFP8Precision

    def trainer(strategy: dict[str, Any] | None, **options: Any) -> Trainer:
        chosen = "auto" if strategy is None else ExpertParallelStrategy(**strategy)
        return make_trainer(strategy=chosen, max_steps=1, **options)

    rows = DataLoader(Rows(2), batch_size=2)
    plain = DeepSeekV3(CONFIG)
    trainer(None).fit(plain, rows)
    trainer({}).validate(plain, rows, verbose=False)
    trainer({"compute_dtype": "bfloat16"}).fit(plain, rows)  # a model as it was built can be taken further
    with pytest.raises(ValueError, match=r"compute_dtype torch.bfloat16.*asks for.*compute_dtype None"):
        trainer(None).validate(plain, rows, verbose=False)
    converted = DeepSeekV3(CONFIG)
    trainer({}, plugins=[MXFP8Precision(emulate="always")]).fit(converted, rows)
    trainer({}, plugins=[MXFP8Precision(emulate="always")]).validate(converted, rows, verbose=False)
    for options in ({}, {"plugins": [MXFP8Precision(emulate="always", scale_rounding="floor")]}):
        with pytest.raises(ValueError, match=r"MXFP8Precision(.|\n)*Give the Trainer a new module"):
            trainer({}, **options).fit(converted, rows)


class ClipsAlone(DeepSeekV3):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(args[0], gradient_clip_val=1.0)


def test_clipping_that_leaves_out_the_means_over_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ClipsAlone\.configure_gradient_clipping does not call"):
        fit(ClipsAlone(CONFIG, sgd), max_steps=2)


def test_an_optimizer_that_computes_gradients_several_times_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="LBFGS computes gradients several times in one step"):
        fit(DeepSeekV3(CONFIG, lambda parameters: torch.optim.LBFGS(list(parameters), lr=0.1)), max_steps=2)


def test_a_module_that_has_trained_can_be_copied_on_cuda_too() -> None:
    module = DeepSeekV3(CONFIG, sgd)
    fit(module, max_steps=1)
    module.clock._mark = torch.cuda.Event()  # what a step on CUDA leaves
    copied = copy.deepcopy(module)
    assert copied.clock._mark is None
    for name, value in module.state_dict().items():
        assert torch.equal(copied.state_dict()[name], value), name


def test_skipped_steps_are_those_of_one_fit() -> None:
    module = DeepSeekV3(CONFIG, sgd)
    module._skipped_steps = torch.tensor(3)
    fit(module, max_steps=1)
    assert module.trainer.logged_metrics["train/skipped_steps"] == 0
