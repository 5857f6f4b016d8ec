"""The LightningModule that MoE language models are trained with; users subclass it for models of their own."""

import os
import tempfile
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer

from lightning_moe.models.assembly import PLAIN, Assembly, assembly_of, distributes, spoken
from lightning_moe.models.base import MoEModel, MoEModelOutput
from lightning_moe.models.evaluation import Evaluation
from lightning_moe.models.host_copy import HostCopy, on_host
from lightning_moe.models.step_clock import StepClock
from lightning_moe.models.step_report import StepReport, is_logged
from lightning_moe.models.step_sums import StepSums
from lightning_moe.moe.balance import Balancing, update_selection_bias
from lightning_moe.optim.adamw import AdamW
from lightning_moe.optim.schedules import ResolvedTokenSchedule, TokenSchedule, check_token_value, value_at
from lightning_moe.strategies.checkpointing import is_checkpoint_directory, read_whole
from lightning_moe.strategies.gradients import scale_and_clip, skip_step_unless


@dataclass(frozen=True)
class MoEShape:
    """The sizes of a MoE model that are known before it is built; layouts and data are checked against them.

    Args:
        vocab_size: Token ids that the model knows.
        hidden_size: Width of a token.
        n_routed_experts: Routed experts of a MoE layer.
        num_experts_per_tok: Experts that a token takes.
        moe_intermediate_size: Width of an expert.
        max_position_embeddings: Longest sequence, or ``None`` for no limit.
        num_nextn_predict_layers: Multi-token-prediction depths.
    """

    vocab_size: int
    hidden_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    max_position_embeddings: int | None = None
    num_nextn_predict_layers: int = 0


class MoELightningModule(LightningModule):
    """Trains a :class:`~lightning_moe.models.base.MoEModel`; a subclass says which by overriding two methods.

    ``build_model()`` returns the model, ``moe_shape()`` its sizes. Once per optimizer step, whatever the precision
    plugin, gradients are divided by the valid tokens of the whole step, their global norm is taken and clipped to
    ``trainer.gradient_clip_val``, and the selection biases of all MoE layers move one step towards an even load. A step
    whose norm is not finite changes no weight, moment or bias; its tokens count as seen.

    Everything that changes with training is a function of the tokens seen, never of steps.

    Args:
        optimizer: Makes the optimizer from the parameters.
        schedule: Learning-rate schedule in tokens; ``None`` keeps the optimizer's learning rate.
        balancing: How the load of the experts is kept even.
        mtp_loss_weight: Weight lambda of the multi-token-prediction loss: ``{from this token: value}`` or one number.
            The mean over depths is multiplied by it.
        nonfinite_gradients: What happens when the norm of a step is not finite, on all processes together: ``"skip"``
            goes on with the next step, ``"stop"`` ends training with an error at the next logged step.
    """

    def __init__(
        self,
        optimizer: OptimizerCallable = lambda params: AdamW(params),
        schedule: TokenSchedule | None = None,
        balancing: Balancing = Balancing(),  # noqa: B008 - frozen
        mtp_loss_weight: dict[float, float] | float = {0: 0.3, 10e12: 0.1},  # noqa: B006 - never changed
        nonfinite_gradients: Literal["skip", "stop"] = "skip",
    ) -> None:
        super().__init__()
        check_token_value("mtp_loss_weight", mtp_loss_weight, minimum=0.0)
        self.optimizer_factory = optimizer
        self.schedule = schedule
        self.balancing = Balancing(**balancing) if isinstance(balancing, dict) else balancing
        self.mtp_loss_weight = mtp_loss_weight
        if nonfinite_gradients not in ("skip", "stop"):
            raise ValueError(f"nonfinite_gradients is {nonfinite_gradients!r}, but it must be skip or stop.")
        self.nonfinite_gradients = nonfinite_gradients
        self.model: MoEModel | None = None
        self.evaluation: Evaluation | None = None
        self.tokens_seen = 0
        # Sums a tensor over the processes that read different data; a strategy with several processes sets it.
        self.sum_over_data_ranks: Callable[[Tensor], Tensor] = _on_one_device
        self._step_sums = StepSums()
        self._report: StepReport | None = None  # of the current step, if it is one that reports
        self._has_reported = False
        self._resolved_schedule: ResolvedTokenSchedule | None = None
        self._configured_groups: list[dict[str, Any]] = []
        self._skipped_steps: Tensor | None = None
        # Measures the time of training, without what is left out of its speed.
        self.clock = StepClock(self.device)
        self._processes_built_for = 1
        self._assembly: Assembly | None = None  # what a strategy has made of the model, which it takes once

    # What a subclass provides

    @abstractmethod
    def build_model(self) -> MoEModel:
        """Builds the model; called once, on the meta device, and initial weights are drawn afterwards."""
        raise NotImplementedError(
            f"{type(self).__name__} must override build_model() to return its MoEModel; "
            "see MoELightningModule for what else a model needs."
        )

    @abstractmethod
    def moe_shape(self) -> MoEShape:
        """Returns the model's sizes; callable before the model is built."""
        raise NotImplementedError(
            f"{type(self).__name__} must override moe_shape() to return the MoEShape of its model."
        )

    # Building

    def setup(self, stage: str) -> None:
        """Refuses what would train each process on its own gradients, and resolves the schedule."""
        trainer: Any = self.trainer
        if self.model is not None and self._processes_built_for != trainer.world_size:
            raise ValueError(
                f"The model of {type(self).__name__} was built for {self._processes_built_for} process(es), but the "
                f"Trainer has {trainer.world_size}.\n"
                "Give the Trainer a new module, not one after configure_model() or load_from_checkpoint(), and the "
                "weights as ckpt_path."
            )
        if trainer.world_size > 1 and not distributes(trainer.strategy):
            raise ValueError(
                f"trainer.strategy is {type(trainer.strategy).__name__} with {trainer.world_size} processes, but "
                f"{type(self).__name__} needs a strategy that knows experts.\n"
                "On one device: --trainer.devices 1; several need lightning_moe's ExpertParallelStrategy."
            )
        if not self.automatic_optimization:
            raise ValueError(
                f"automatic_optimization of {type(self).__name__} is False, but gradients are summed over tokens and "
                "scaled, clipped and checked once per step, which manual optimization would leave out.\n"
                "Set it to True; different rules for different parameters are parameter groups of one optimizer."
            )
        if self.model is not None:
            self._take_assembly(trainer.strategy)
        clip = trainer.gradient_clip_val
        if clip is not None and not clip >= 0:
            raise ValueError(
                f"trainer.gradient_clip_val is {clip}, but it must not be negative, as in 1.0; null or 0 does not clip."
            )
        if self.schedule is not None and stage == "fit":
            self._resolved_schedule = self.schedule.resolve(getattr(trainer.datamodule, "max_tokens", None))

    def _take_assembly(self, strategy: Any) -> None:
        """Lets a strategy work on a model that was built before; a model that has been worked on stays as it is."""
        assert self.model is not None
        wanted = assembly_of(strategy)
        if self._assembly is None:
            if distributes(strategy):
                strategy.adopt(self.model)  # one process: the model is whole, with the weights it was given
            self._assembly = None if wanted == PLAIN else wanted
        elif wanted != self._assembly:
            raise ValueError(
                f"The model of {type(self).__name__} was made for {spoken(self._assembly)}, but this Trainer asks "
                f"for {spoken(wanted)}.\nGive the Trainer a new module, and the weights as ckpt_path."
            )

    def configure_model(self) -> None:
        """Builds the model and gives it its initial weights, once."""
        if self.model is not None:
            return
        device = torch.get_default_device()
        with torch.device("meta"):
            model = self.build_model()
        if not isinstance(model, MoEModel):
            raise TypeError(
                f"{type(self).__name__}.build_model() returned a {type(model).__name__}, but it must return a "
                "lightning_moe MoEModel."
            )
        model.check_structure()
        strategy: Any = self._trainer.strategy if self._trainer is not None else None
        if distributes(strategy):
            self.sum_over_data_ranks = strategy.assemble(model, _initial_seed())
        else:
            model.to_empty(device=device)
            model.init_weights(_initial_seed())
        if strategy is not None:
            wanted = assembly_of(strategy)
            self._assembly = None if wanted == PLAIN and self.trainer.world_size == 1 else wanted
        outside = [name for name, _ in self.named_parameters()]
        if outside:
            raise ValueError(
                f"{type(self).__name__} has parameters outside the model it builds ({', '.join(outside[:3])}), which "
                "no strategy would shard or load. Move them into the MoEModel that build_model() returns."
            )
        self.model = model
        self._processes_built_for = self._trainer.world_size if self._trainer is not None else 1
        shape = self.moe_shape()
        self._moe_layers = len(list(model.moe_layers()))
        self.evaluation = Evaluation(shape.num_nextn_predict_layers, self._moe_layers, shape.n_routed_experts)

    @property
    def built_model(self) -> MoEModel:
        """The model.

        Raises:
            RuntimeError: It has not been built yet.
        """
        if self.model is None:
            raise RuntimeError(f"{type(self).__name__} has no model yet; the Trainer or configure_model() builds it.")
        return self.model

    def parameter_counts(self) -> dict[str, int]:
        """Counts parameters; see :meth:`MoEModel.parameter_counts`."""
        return self.built_model.parameter_counts()

    def flops_per_token(self, sequence_length: int) -> float:
        """Counts floating-point operations of training as it is now; see :meth:`MoEModel.flops_per_token`.

        Args:
            sequence_length: Tokens of a row.
        """
        mtp = value_at(self.mtp_loss_weight, self.tokens_seen) > 0
        depths = self.moe_shape().num_nextn_predict_layers
        return self.built_model.flops_per_token(sequence_length, **({"mtp": mtp} if depths else {}))

    def configure_optimizers(self) -> Optimizer:
        """Makes the optimizer of the model's parameters."""
        optimizer = self.optimizer_factory(self.built_model.parameters())
        self._configured_groups = [
            {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        return optimizer

    # One optimizer step

    def forward(self, input_ids: Tensor, **kwargs: Any) -> MoEModelOutput:
        """Runs the model; without labels it returns logits. See :meth:`MoEModel.forward`."""
        return self.built_model(input_ids, **kwargs)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Returns the sum of all loss terms of a micro-batch; it is divided once per optimizer step."""
        mtp_weight = value_at(self.mtp_loss_weight, self.tokens_seen)
        options = self._depth_options(mtp_weight > 0, self._reports_this_step)
        output = self.built_model(**_model_inputs(batch), balance=self.balancing.sequence_loss_weight > 0, **options)
        if options.get("mtp", True) and len(output.expert_counts) != self._moe_layers:
            raise ValueError(
                f"{type(self.model).__name__}.forward returned expert_counts of {len(output.expert_counts)} layers, "
                f"but the model has {self._moe_layers} MoE layers, whose biases move by them.\n"
                "Return the counts_E of each, in the order of blocks()."
            )
        total = output.loss
        if output.mtp_losses:
            total = total + torch.stack(output.mtp_losses).mean() * mtp_weight
        if output.balance_loss is not None:
            total = total + output.balance_loss * self.balancing.sequence_loss_weight
        self._step_sums.add(output, total, batch["input_ids"].numel())
        return total

    def _depth_options(self, mtp: bool, predictions: bool) -> dict[str, bool]:
        """What only a model with multi-token prediction is asked for."""
        depths = self.moe_shape().num_nextn_predict_layers
        return {"mtp": mtp, "predictions": predictions} if depths else {}

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Finishes the gradients of a whole optimizer step: scale, norm, decide, clip, and move the biases."""
        step = self._step_sums
        if "grad_norm" in step.sums:
            raise ValueError(
                f"{type(optimizer).__name__} computes gradients several times in one step, which the sums over tokens "
                "of a step cannot serve; take an optimizer that does so once, such as lightning_moe.AdamW."
            )
        if gradient_clip_val is not None and gradient_clip_val <= 0:
            gradient_clip_val = None  # as in Lightning
        clip_norm = None if gradient_clip_algorithm == "value" else gradient_clip_val
        bare = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        # Lightning leaves gradients scaled for fused optimizers to divide, but norm and clipping need them unscaled.
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is not None and getattr(bare, "_step_supports_amp_scaling", False):
            scaler.unscale_(bare)
        num_tokens = self.sum_over_data_ranks(step.sums["num_tokens"])
        # Lightning has divided each micro-batch by accumulate_grad_batches, however many the window really has.
        # A step without valid tokens has a scale that is not finite, and is skipped: it has no mean.
        scale = self.trainer.accumulate_grad_batches / num_tokens.to(step.sums["loss"].dtype)
        by_value = gradient_clip_algorithm == "value" and gradient_clip_val is not None
        applied_later = not by_value and self.leaves_gradients_to_optimizer
        # Those of the optimizer, which has the gradients: the model may have gathered copies in their place.
        parameters = [parameter for group in bare.param_groups for parameter in group["params"]]
        norm = scale_and_clip(
            parameters,
            scale,
            clip_norm,
            self.sum_over_data_ranks,
            bare if applied_later else None,
        )
        if by_value:
            assert gradient_clip_val is not None
            torch.nn.utils.clip_grad_value_(parameters, gradient_clip_val)
        finite = torch.isfinite(norm)
        skip_step_unless(finite, bare, on_device=scaler is None)  # a scaler overwrites what the kernel reads
        self._move_biases(finite)
        self._set_learning_rate(bare)
        skipped = (~finite).to(torch.int64)
        self._skipped_steps = skipped if self._skipped_steps is None else self._skipped_steps + skipped
        step.sums["grad_norm"] = norm
        self.clock.mark()
        if self._reports_this_step:
            self._report = StepReport(step, self._skipped_steps, self.sum_over_data_ranks, self._data_ranks)
            self._has_reported = True

    @property
    def leaves_gradients_to_optimizer(self) -> bool:
        """Whether nothing reads the gradients after :meth:`configure_gradient_clipping`, which may then leave it to the
        optimizer to scale them: where a subclass goes on with them, it has to find them scaled and clipped."""
        return type(self).configure_gradient_clipping is MoELightningModule.configure_gradient_clipping

    def _move_biases(self, finite: Tensor) -> None:
        if not self._step_sums.expert_counts:
            return
        sizes = [counts.numel() for counts in self._step_sums.expert_counts]
        # One reduction for all layers.
        summed = self.sum_over_data_ranks(torch.cat(self._step_sums.expert_counts)).split(sizes)
        self._step_sums.expert_counts = list(summed)
        speed = value_at(self.balancing.bias_update_speed, self.tokens_seen)
        if speed > 0:
            layers = [layer for _, layer in self.built_model.moe_layers()][: len(summed)]
            for layer, counts in zip(layers, summed, strict=True):
                update_selection_bias(layer.router.e_score_correction_bias, counts, speed, finite)

    def _set_learning_rate(self, optimizer: Optimizer) -> None:
        if self._resolved_schedule is None:
            return
        multiplier = self._resolved_schedule.multiplier(self.tokens_seen + self._window_positions())
        for group, configured in self._groups(optimizer):
            group["lr"] = configured["lr"] * multiplier

    def _groups(self, optimizer: Optimizer) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Parameter groups and what was configured for each; none where a subclass makes the optimizer itself."""
        present, configured = optimizer.param_groups, self._configured_groups
        if configured and len(present) != len(configured):
            raise ValueError(
                f"The optimizer has {len(present)} parameter groups, but {len(configured)} when it was made.\n"
                "A callback that adds groups in training (as BaseFinetuning does) does not work here; give all "
                "parameters in configure_optimizers, and freeze them by requires_grad."
            )
        return list(zip(present, configured, strict=bool(configured)))

    @property
    def _data_ranks(self) -> int:
        return (self.trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)

    def _window_positions(self) -> int:
        return self._step_sums.positions * self._data_ranks

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer | LightningOptimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Steps, releases the gradients at once, and counts the tokens of the step as seen."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if "num_tokens" in self._step_sums.sums and "grad_norm" not in self._step_sums.sums:
            raise ValueError(
                f"{type(self).__name__}.configure_gradient_clipping does not call "
                "super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm),\n"
                "which makes means of the sums over tokens, clips, and logs."
            )
        optimizer.zero_grad(set_to_none=True)
        self.tokens_seen += self._window_positions()

    # Logging and validation

    @property
    def _reports_this_step(self) -> bool:
        # The first step does so without being logged: what reporting takes is compiled and loaded with all else.
        return not self._has_reported or is_logged(self.trainer, self.global_step + 1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Ends the time that throughput leaves out after a checkpoint."""
        self.clock.resume()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs a finished optimizer step, and starts the sums of the next."""
        step = self._step_sums
        if "grad_norm" not in step.sums:
            return
        report, self._step_sums, self._report = self._report, StepSums(), None
        if report is not None and is_logged(self.trainer, self.global_step):
            self._log_step(report)

    def _log_step(self, report: StepReport) -> None:
        values: dict[str, Any] = {
            **report.read(),
            "train/lr": self.trainer.optimizers[0].param_groups[0]["lr"],
            "train/tokens_seen": self.tokens_seen,
        }
        tokens_per_second = self.clock.tokens_per_second(self.tokens_seen)
        if tokens_per_second is not None:
            values["train/tokens_per_second"] = tokens_per_second
        shown = {"train/loss", "train/tokens_per_second"}
        for name, value in values.items():
            self.log(name, on_host(value), on_step=True, on_epoch=False, prog_bar=name in shown, batch_size=1)
        self._stop_if_skipped(values["train/skipped_steps"])

    def _stop_if_skipped(self, skipped: Tensor | None) -> None:
        if self.nonfinite_gradients == "stop" and skipped is not None and int(skipped):
            raise FloatingPointError(
                f"The gradients of {int(skipped)} of the steps up to {self.global_step} were not finite, "
                "and nonfinite_gradients is stop.\nThese steps changed nothing; go on from the last checkpoint with a "
                "lower learning rate, or with nonfinite_gradients: skip."
            )

    def on_train_end(self) -> None:
        """Ends with an error where steps since the last logged one had to be skipped and that is not allowed."""
        self._stop_if_skipped(self._skipped_steps)

    def on_train_start(self) -> None:
        """Lets the configured optimizer options win over those of a loaded checkpoint."""
        schedulers_own = _OF_SCHEDULERS if self.trainer.lr_scheduler_configs else ()
        for group, configured in self._groups(self.trainer.optimizers[0]):
            group.update({key: value for key, value in configured.items() if key not in schedulers_own})
        if self.trainer.global_step == 0:
            self.tokens_seen = 0  # those of another run, whose weights this one begins with
        self.clock = StepClock(self.device, self.tokens_seen)
        self._step_sums = StepSums()  # a run that stopped within an accumulation window leaves sums behind
        self._report, self._has_reported, self._skipped_steps = None, False, None

    def on_validation_start(self) -> None:
        """Starts the time that throughput leaves out."""
        self.clock.pause()

    def on_validation_end(self) -> None:
        """Ends the time that throughput leaves out."""
        self.clock.resume()

    def on_validation_epoch_start(self) -> None:
        """Starts the means anew, also after a validation that did not come to its end."""
        if self.evaluation is not None:
            self.evaluation.reset()

    def on_test_epoch_start(self) -> None:
        """Starts the means anew."""
        self.on_validation_epoch_start()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Adds a batch to the means over tokens."""
        output = self.built_model(**_model_inputs(batch), balance=False, **self._depth_options(True, True))
        if self.evaluation is not None:
            self.evaluation.update(output)

    def on_validation_epoch_end(self) -> None:
        """Logs the means over all tokens of the validation set."""
        self._log_evaluation("val")

    test_step = validation_step

    def on_test_epoch_end(self) -> None:
        """Logs the means over all tokens of the test set."""
        self._log_evaluation("test")

    def _log_evaluation(self, stage: str) -> None:
        values = self.evaluation.compute(stage) if self.evaluation is not None else {}
        for name, value in HostCopy(values).read().items() if values else ():
            self.log(name, value, prog_bar=name.endswith("/loss"), batch_size=1)

    # Checkpoints

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Builds the module of a checkpoint in one process, from a file or from a directory of any layout.

        Args:
            checkpoint_path: The file or directory.
            *args: As for ``LightningModule.load_from_checkpoint``.
            **kwargs: As for ``LightningModule.load_from_checkpoint``; ``weights_only`` is True unless given.
        """
        kwargs.setdefault("weights_only", True)
        if not isinstance(checkpoint_path, (str, Path)) or not is_checkpoint_directory(checkpoint_path):
            return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "whole.ckpt"
            torch.save(read_whole(Path(checkpoint_path)), file)
            return super().load_from_checkpoint(file, *args, **kwargs)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the number of tokens seen; what follows until the next batch is left out of throughput."""
        self.clock.pause()
        checkpoint["tokens_seen"] = self.tokens_seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores the number of tokens seen.

        Raises:
            ValueError: The checkpoint does not say, so it was not written by this class.
        """
        if "tokens_seen" not in checkpoint:
            raise ValueError(
                f"The checkpoint has no tokens_seen, so it was not written by {type(self).__name__}; schedules in "
                "tokens cannot go on from it."
            )
        self.tokens_seen = checkpoint["tokens_seen"]


# What learning-rate schedulers write into parameter groups.
_OF_SCHEDULERS = frozenset(("lr", "initial_lr", "max_lr", "min_lr", "momentum", "betas"))


def _model_inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    known = {"input_ids", "labels", "document_ids", "position_ids", "valid"}
    if not {"input_ids", "labels"} <= set(batch) <= known:
        raise ValueError(
            f"A batch has the keys {', '.join(sorted(batch))}, but it needs input_ids and labels, and may have "
            "document_ids, position_ids and valid (False for padding)."
        )
    return batch


def _initial_seed() -> int:
    """The seed of ``seed_everything``, or that of PyTorch; Lightning resets the latter where there are processes."""
    return int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed()))


def _on_one_device(tensor: Tensor) -> Tensor:
    return tensor
