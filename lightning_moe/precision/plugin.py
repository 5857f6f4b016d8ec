"""Precision plugins of Lightning for MoE models: bfloat16 over float32 masters, and MXFP8 or FP8 multiplications in it.

trainer:
  plugins: [{class_path: lightning_moe.MXFP8Precision}]
"""

from abc import abstractmethod
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_moe.models.base import MoEModel
from lightning_moe.moe.layer import MoELayer
from lightning_moe.precision.capability import Machine, misaligned, row_alignment, runs_here, why_not
from lightning_moe.precision.casting import cast_on_use
from lightning_moe.precision.conversion import (
    Candidate,
    can_compute_as_one,
    candidates,
    recipe_of,
    replace_multiplication,
)
from lightning_moe.precision.emulation import emulated_grouped_mm, emulated_linear
from lightning_moe.precision.float8_experts import Experts, float8_experts
from lightning_moe.precision.float8_linear import float8_linear, has_operator
from lightning_moe.precision.machine import probe
from lightning_moe.precision.measured import fastest
from lightning_moe.precision.recipes import Recipe, fp8_blockwise, fp8_rowwise, fp8_tensorwise, mxfp8
from lightning_moe.precision.report import Report
from lightning_moe.precision.torchao_ops import torchao_grouped_mm, torchao_linear

Emulate = Literal["auto", "always", "never"]


def tokens_of_forward(data: Any) -> int | None:
    """Returns the tokens of one process in a forward pass, where a data module tells.

    Args:
        data: The data module, or ``None``.
    """
    micro_batch, sequence = getattr(data, "micro_batch_size", None), getattr(data, "sequence_length", None)
    return micro_batch * sequence if isinstance(micro_batch, int) and isinstance(sequence, int) else None


class MoEPrecision(Precision):
    """Computes in bfloat16 over float32 master weights; subclasses also multiply in a lower precision.

    ``ExpertParallelStrategy`` calls :meth:`convert` before it shards a model, and casts parameters as it gathers them.
    With any other strategy Lightning calls :meth:`convert_module`, which converts and casts on use. Parameters stay
    plain float32 tensors, and so do optimizer and checkpoints.
    """

    precision: Any = "bf16"
    compute_dtype = torch.bfloat16

    @property
    def assembly(self) -> str:
        """The plugin and its settings, to tell whether a model has been converted for the same."""
        passing = ("report", "precision", "compute_dtype", "_logged")
        settings = {name: value for name, value in sorted(vars(self).items()) if name not in passing}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in settings.items())})"

    @abstractmethod
    def convert(
        self,
        model: nn.Module,
        device: torch.device | None = None,
        *,
        tokens: int | None = None,
        expert_parallel_size: int = 1,
    ) -> None:
        """Converts a model in place; nothing changes if it has been converted before.

        Args:
            model: The model, on any device.
            device: Where it will run; ``None`` for where its parameters are.
            tokens: Tokens of one process in a forward pass, where that is known.
            expert_parallel_size: Processes that hold different experts.

        Raises:
            ValueError: The machine cannot do what was asked for.
        """

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Converts the model of a module, and makes it read its parameters in bfloat16."""
        model: Any = getattr(module, "model", None)
        if not isinstance(model, MoEModel):
            model = module
        trainer = getattr(module, "_trainer", None)
        tokens = tokens_of_forward(getattr(trainer, "datamodule", None))
        self.convert(model, None if trainer is None else trainer.strategy.root_device, tokens=tokens)
        cast_on_use(model, self.compute_dtype)
        return module


class BF16Precision(MoEPrecision):
    """Computes in bfloat16 over float32 master weights, on any device and with any strategy."""

    @override
    def convert(
        self,
        model: nn.Module,
        device: torch.device | None = None,
        *,
        tokens: int | None = None,
        expert_parallel_size: int = 1,
    ) -> None:
        """Changes nothing: no multiplication is replaced."""


class QuantisedPrecision(MoEPrecision):
    """Multiplies linears and experts in low precision, and computes all else in bfloat16.

    Args:
        include: Patterns (``*`` as in file names) of the modules to convert; ``null`` for all that are in a block.
        exclude: Patterns of the modules to leave out; ``null`` for head, embedding, routers, ``eh_proj`` and
            ``kv_a_proj``.
        emulate: What happens where there are no kernels: ``"auto"`` emulates and says so, ``"never"`` is an error;
            ``"always"`` emulates in any case.
    """

    def __init__(
        self, include: list[str] | None = None, exclude: list[str] | None = None, emulate: Emulate = "auto"
    ) -> None:
        if emulate not in get_args(Emulate):
            raise ValueError(f"emulate is {emulate!r}, but it must be one of {', '.join(get_args(Emulate))}.")
        self.include = include
        self.exclude = exclude
        self.emulate = emulate
        self.report: Report | None = None
        self._logged = False

    @abstractmethod
    def choose(self, candidate: Candidate, machine: Machine, rows: int | None) -> Recipe | str:
        """Chooses how a module multiplies.

        Args:
            candidate: The module.
            machine: Where it will run.
            rows: Rows of a linear, or mean rows per expert, in a forward pass, where they are known.

        Returns:
            The recipe, or the reason why it stays in bfloat16.
        """

    @override
    def convert(
        self,
        model: nn.Module,
        device: torch.device | None = None,
        *,
        tokens: int | None = None,
        expert_parallel_size: int = 1,
    ) -> None:
        """Converts linears and experts in place, reports it, and makes dispatchers pad as the kernels need.

        Args:
            model: The model, on any device.
            device: Where it will run; ``None`` for where its parameters are.
            tokens: Tokens of one process in a forward pass, where that is known.
            expert_parallel_size: Processes that hold different experts.

        Raises:
            ValueError: There are no kernels and ``emulate`` is ``"never"``, or the model has another precision.
        """
        machine = probe(device if device is not None else next(model.parameters()).device)
        layers = {module.experts: module for module in model.modules() if isinstance(module, MoELayer)}
        report = Report(type(self).precision, str(self.compute_dtype).removeprefix("torch."))
        for candidate in candidates(model, self.include, self.exclude):
            layer = layers.get(candidate.module)  # type: ignore[call-overload]
            rows = tokens
            if tokens is not None and layer is not None:
                routed = tokens * layer.router.num_experts_per_tok * expert_parallel_size
                rows = routed // layer.router.n_routed_experts
            alignment = self._convert(candidate, machine, rows, report)
            if layer is not None:
                layer.dispatcher.alignment = max(layer.dispatcher.alignment, alignment)
        if report != self.report:
            self.report = report
            self.precision = f"{type(self).precision}, emulated" if report.emulated else type(self).precision
            report.print()

    def _convert(self, candidate: Candidate, machine: Machine, rows: int | None, report: Report) -> int:
        """Converts one module; returns the rows that its groups are padded to."""
        recipe = candidate.excluded or self.choose(candidate, machine, rows)
        if isinstance(recipe, str):
            present = recipe_of(candidate.module)  # of a conversion before, that knew more
            report.add(candidate, None if present is None else present.name, recipe)
            return 1
        obstacle = self._obstacle(recipe, candidate, machine)
        if obstacle is not None and self.emulate == "never":
            raise ValueError(
                f"{type(self).__name__} cannot run {recipe.name} for {candidate.name}: {obstacle}.\n"
                f"Here {runs_here(machine)} runs; emulate: auto computes the numbers of {recipe.name} without its "
                "speed."
            )
        torchao = machine.torchao if obstacle is None else None
        for inner, outer in candidate.weights:
            unfit = misaligned(recipe, candidate.kind, inner, outer, torchao)
            if unfit is not None:
                report.add(candidate, None, unfit)
                return 1
        if obstacle is not None:
            what = "linears" if candidate.kind == "linear" else "grouped multiplications"
            report.add_emulated(f"{recipe.name} {what} have its numbers and not its speed, because {obstacle}.")
        multiply: Any
        compute: Experts | None = None
        how = recipe.name if torchao is not None else f"{recipe.name}, emulated"
        own = torchao is not None and has_operator(recipe)
        if candidate.kind == "linear" and own:
            multiply, how = float8_linear(recipe), f"{recipe.name}, fused casts"
        elif candidate.kind == "linear":
            multiply = torchao_linear(recipe) if torchao is not None else emulated_linear(recipe)
        elif own and can_compute_as_one(candidate.module):
            compute, how = float8_experts(recipe), f"{recipe.name}, fused casts"
            # Of what is looked at in between; torchao always quantises for the gradients of weights.
            multiply = (emulated_grouped_mm if recipe.wgrad_in_high_precision else torchao_grouped_mm)(recipe)
        else:
            multiply = torchao_grouped_mm(recipe) if torchao is not None else emulated_grouped_mm(recipe)
        replace_multiplication(candidate, multiply, recipe, compute)
        report.add(candidate, how)
        return row_alignment(recipe, candidate.kind, torchao)

    def _obstacle(self, recipe: Recipe, candidate: Candidate, machine: Machine) -> str | None:
        """Why a recipe is not run by kernels."""
        if self.emulate == "always":
            return "emulate is always"
        obstacle = why_not(recipe, candidate.kind, machine)
        needs_own = candidate.kind == "grouped" and recipe.wgrad_in_high_precision and has_operator(recipe)
        if obstacle is None and needs_own and not can_compute_as_one(candidate.module):
            return "gradients of weights in high precision need experts without a compute of their own"
        return obstacle

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Writes the recipe, and whether it is emulated, to the hyperparameters of the loggers, once."""
        trainer = getattr(model, "_trainer", None) if isinstance(model, LightningModule) else None
        if trainer is not None and self.report is not None and not self._logged:
            self._logged = True
            for logger in trainer.loggers:
                logger.log_hyperparams({"precision": self.report.summary()})
        return super().connect(model, optimizers, lr_schedulers)

    @override
    def state_dict(self) -> dict[str, Any]:
        """The recipe, and whether it is emulated; written into checkpoints."""
        return {} if self.report is None else self.report.summary()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Says so where the checkpoint was trained in another way."""
        present = self.state_dict()
        if present and state_dict != present:
            changed = [f"{key} {state_dict.get(key)} -> {value}" for key, value in present.items()]
            rank_zero_info(f"Precision of the checkpoint and of this run: {', '.join(changed)}.")


class MXFP8Precision(QuantisedPrecision):
    """Multiplies in MXFP8: E4M3 in blocks of 32 along the summed dimension, with power-of-two scales (E8M0).

    Kernels run on GPUs of compute capability 10.x (B200, GB200); elsewhere it is emulated, which ``emulate`` rules.

    Args:
        linears: What linears multiply in.
        grouped_mm: What experts multiply in.
        scale_rounding: How scales are rounded: ``"rceil"`` never saturates, ``"floor"`` is the OCP specification's.
        wgrad_in_high_precision: Whether gradients of weights are multiplied in bfloat16.
        include: As in :class:`QuantisedPrecision`.
        exclude: As in :class:`QuantisedPrecision`.
        emulate: As in :class:`QuantisedPrecision`.
    """

    precision: Any = "mxfp8"

    def __init__(
        self,
        linears: Literal["mxfp8", "bf16"] = "mxfp8",
        grouped_mm: Literal["mxfp8", "bf16"] = "mxfp8",
        scale_rounding: Literal["rceil", "floor"] = "rceil",
        wgrad_in_high_precision: bool = False,
        include: list[str] | None = None,
        exclude: list[str] | None = None,
        emulate: Emulate = "auto",
    ) -> None:
        super().__init__(include, exclude, emulate)
        _check("linears", linears, "mxfp8", "bf16")
        _check("grouped_mm", grouped_mm, "mxfp8", "bf16")
        _check("scale_rounding", scale_rounding, "rceil", "floor")
        self.converts = {"linear": linears != "bf16", "grouped": grouped_mm != "bf16"}
        self.recipe = mxfp8(scale=scale_rounding, wgrad_in_high_precision=wgrad_in_high_precision)

    @override
    def choose(self, candidate: Candidate, machine: Machine, rows: int | None) -> Recipe | str:
        """Takes MXFP8 for every module whose kind is to be converted."""
        return self.recipe if self.converts[candidate.kind] else _ASKED_FOR


class BlockwiseFP8Precision(QuantisedPrecision):
    """Multiplies in FP8 as the DeepSeek-V3 report does (section 3.3): E4M3, tiles of 1x128 and blocks of 128x128.

    Kernels for linears run on Hopper GPUs, those for experts there with DeepGEMM; elsewhere it is emulated. With
    gradients of weights in high precision, linears and experts are operators with casts of our own, around DeepGEMM.

    Args:
        linears: What linears multiply in.
        grouped_mm: What experts multiply in.
        wgrad_in_high_precision: Whether gradients of weights are multiplied in bfloat16, rather than in FP8 as in the
            report.
        include: As in :class:`QuantisedPrecision`.
        exclude: As in :class:`QuantisedPrecision`.
        emulate: As in :class:`QuantisedPrecision`.
    """

    precision: Any = "fp8_blockwise"

    def __init__(
        self,
        linears: Literal["blockwise", "bf16"] = "blockwise",
        grouped_mm: Literal["blockwise", "bf16"] = "blockwise",
        wgrad_in_high_precision: bool = False,
        include: list[str] | None = None,
        exclude: list[str] | None = None,
        emulate: Emulate = "auto",
    ) -> None:
        super().__init__(include, exclude, emulate)
        _check("linears", linears, "blockwise", "bf16")
        _check("grouped_mm", grouped_mm, "blockwise", "bf16")
        self.converts = {"linear": linears != "bf16", "grouped": grouped_mm != "bf16"}
        self.recipe = fp8_blockwise(wgrad_in_high_precision=wgrad_in_high_precision)

    @override
    def choose(self, candidate: Candidate, machine: Machine, rows: int | None) -> Recipe | str:
        """Takes blockwise FP8 for every module whose kind is to be converted."""
        return self.recipe if self.converts[candidate.kind] else _ASKED_FOR


class Float8Precision(QuantisedPrecision):
    """Multiplies in FP8 (E4M3) with a scale per row, or per tensor.

    Kernels run on Hopper GPUs and on B200; for linears from compute capability 8.9 on.

    Args:
        linears: What linears multiply in. ``"auto"`` takes the fastest that has been measured to be faster than
            bfloat16 on this GPU for a multiplication of no larger size, and bfloat16 otherwise; where it is emulated,
            and so has no speed, ``"rowwise"``.
        grouped_mm: What experts multiply in; ``"auto"`` in the same way.
        wgrad_in_high_precision: Whether gradients of weights are multiplied in bfloat16.
        include: As in :class:`QuantisedPrecision`.
        exclude: As in :class:`QuantisedPrecision`.
        emulate: As in :class:`QuantisedPrecision`.
    """

    precision: Any = "fp8"

    def __init__(
        self,
        linears: Literal["auto", "rowwise", "tensorwise", "bf16"] = "auto",
        grouped_mm: Literal["auto", "rowwise", "bf16"] = "auto",
        wgrad_in_high_precision: bool = False,
        include: list[str] | None = None,
        exclude: list[str] | None = None,
        emulate: Emulate = "auto",
    ) -> None:
        super().__init__(include, exclude, emulate)
        _check("linears", linears, "auto", "rowwise", "tensorwise", "bf16")
        _check("grouped_mm", grouped_mm, "auto", "rowwise", "bf16")
        self.choices: dict[str, str] = {"linear": linears, "grouped": grouped_mm}
        self.recipes = {
            "rowwise": fp8_rowwise(wgrad_in_high_precision=wgrad_in_high_precision),
            "tensorwise": fp8_tensorwise(wgrad_in_high_precision=wgrad_in_high_precision),
        }

    @override
    def choose(self, candidate: Candidate, machine: Machine, rows: int | None) -> Recipe | str:
        """Takes the recipe that was asked for, or for ``"auto"`` the one that was measured to be fastest."""
        choice = self.choices[candidate.kind]
        if choice == "bf16":
            return _ASKED_FOR
        if choice != "auto":
            return self.recipes[choice]
        if self._obstacle(self.recipes["rowwise"], candidate, machine) is not None:
            return self.recipes["rowwise"]
        inner, outer = candidate.weights[0] if candidate.kind == "linear" else candidate.weights[-1][::-1]
        best = fastest(machine.name, candidate.kind, inner, outer, rows)
        if best is None:
            return "not measured to be faster here" if rows is not None else "rows per forward pass are not known"
        return self.recipes[best.recipe.removeprefix("fp8_")]


_ASKED_FOR = "as asked for"


def _check(name: str, value: str, *allowed: str) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}, but it must be one of {', '.join(allowed)}.")
