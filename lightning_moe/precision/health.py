"""How well low precision holds what a run computes: measured now and then, on its own activations and gradients."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from lightning_moe.moe.experts import GroupedExperts
from lightning_moe.precision.conversion import recipe_of
from lightning_moe.precision.quantisation import largest_of, round_to_element, scale_of, tiled
from lightning_moe.precision.recipes import ElementFormat, Recipe, Tile

OPERANDS = ("activation", "weight", "gradient")
_NAMED_IN_A_WARNING = 3


@dataclass(frozen=True)
class OperandHealth:
    """What quantisation does to one operand of a module.

    Args:
        sqnr: Signal to quantisation noise in dB.
        underflow: Share of the elements that are not zero and become so.
        saturation: Share of the elements that are larger than what their scale can hold.
        log2_amax: Mean binary logarithm of the tiles' largest magnitudes.
        nonfinite: Elements that are not finite.
    """

    sqnr: float
    underflow: float
    saturation: float
    log2_amax: float
    nonfinite: float


class PrecisionHealth(Callback):
    """Measures quantisation in every module that a precision plugin converted, logs it, and warns or stops.

    One micro-batch of every ``every_n_steps`` steps runs without compilation and is looked at on the way: of each
    operand some rows, with the tiles of the forward pass. Sums are taken over all processes, so that all decide alike.
    Loggers get the worst of all modules as ``precision/…`` and each module as ``precision_modules/…``.

    Args:
        every_n_steps: Optimizer steps between two measurements.
        min_sqnr: Lowest signal to noise in dB; ``null`` for no bound.
        max_underflow: Largest share of elements lost to zero; ``null`` for no bound.
        max_drift: Largest change of the mean log2 magnitude since the first measurement; ``null`` for no bound.
        action: What happens when a bound is crossed: ``"warn"`` or ``"stop"``.
        rows: Rows of an operand to look at.
    """

    def __init__(
        self,
        every_n_steps: int = 100,
        min_sqnr: float | None = None,
        max_underflow: float | None = None,
        max_drift: float | None = None,
        action: Literal["warn", "stop"] = "warn",
        rows: int = 512,
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps is {every_n_steps}, but it must be at least 1, as in 100.")
        if rows < 1:
            raise ValueError(f"rows is {rows}, but it must be at least 1, as in 512.")
        if action not in ("warn", "stop"):
            raise ValueError(f"action is {action!r}, but it must be warn or stop.")
        self.every_n_steps = every_n_steps
        self.min_sqnr = min_sqnr
        self.max_underflow = max_underflow
        self.max_drift = max_drift
        self.action = action
        self.rows = rows
        self.first_log2_amax: dict[str, float] = {}
        self.latest: dict[str, OperandHealth] = {}
        self._sums: dict[str, Tensor] = {}
        self._watched: list[tuple[nn.Module, str]] = []
        self._last_step = -1

    @override
    def state_dict(self) -> dict[str, Any]:
        """The magnitudes that drift counts from."""
        return {"first_log2_amax": self.first_log2_amax}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the magnitudes that drift counts from."""
        self.first_log2_amax = dict(state_dict["first_log2_amax"])

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Watches the first micro-batch of a step that is due."""
        step = trainer.global_step
        if (step + 1) % self.every_n_steps or step == self._last_step:
            return
        self._last_step = step
        self._sums = {}
        for name, module in pl_module.named_modules():
            recipe = recipe_of(module)
            if recipe is not None:
                method = "grouped_mm" if isinstance(module, GroupedExperts) else "forward"
                setattr(module, method, self._watching(name.removeprefix("model."), module, method, recipe))
                self._watched.append((module, method))
        torch.compiler.set_stance("force_eager")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Sums what was seen over all processes, logs it, and decides."""
        if not self._watched:
            return
        self._stop_watching()
        if not self._sums:
            return
        sum_over_ranks: Callable[[Tensor], Tensor] = getattr(pl_module, "sum_over_data_ranks", lambda tensor: tensor)
        sums = sum_over_ranks(torch.stack(list(self._sums.values()))).tolist()
        self.latest = {name: _health(*values) for name, values in zip(self._sums, sums, strict=True)}
        self._remember_first()
        for logger in trainer.loggers:
            logger.log_metrics(self._metrics(), step=trainer.global_step)
        self._judge(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leaves the model as it was."""
        self._stop_watching()

    def _stop_watching(self) -> None:
        if self._watched:
            torch.compiler.set_stance("default")
        for module, method in self._watched:
            delattr(module, method)
        self._watched = []

    def _watching(self, name: str, module: nn.Module, method: str, recipe: Recipe) -> Callable[..., Tensor]:
        """The module's own function, which also notes its operands."""
        multiply = getattr(module, method)
        weights = [weight for weight, _ in module.named_parameters(recurse=False) if weight != "bias"]
        calls = iter([f"{name}.{weight}" if len(weights) > 1 else name for weight in weights])

        def watched(x: Tensor, *rest: Tensor) -> Tensor:
            out = multiply(x, *rest)
            place = next(calls, None)
            if place is None:
                return out  # recomputed in backward
            weight: Any = rest[0][0].T if rest else module.weight
            self._note(f"{place}/activation", x, recipe.activation_tile, recipe, "e4m3")
            self._note(f"{place}/weight", weight, recipe.weight_tile, recipe, "e4m3")
            if out.requires_grad:
                out.register_hook(
                    lambda grad: self._note(f"{place}/gradient", grad, recipe.activation_tile, recipe, recipe.gradient)
                )
            return out

        return watched

    @torch.no_grad()
    def _note(self, place: str, operand: Tensor, tile: Tile, recipe: Recipe, element: ElementFormat) -> None:
        rows = operand.detach().reshape(-1, operand.shape[-1])
        # One scale for all of an operand is that of what is not looked at, too.
        amax = rows.abs().amax() if tile == (0, 0) and rows.numel() else None
        if len(rows) > self.rows and tile[0] > 1:
            rows = rows[: self.rows]  # whole blocks
        elif len(rows) > self.rows:
            rows = rows[torch.arange(self.rows, device=rows.device) * len(rows) // self.rows]  # from all over the batch
        if rows.numel():
            self._sums[place] = _sums(rows, tile, recipe, element, amax)
        else:  # a rank without tokens takes part in the sum over ranks
            self._sums[place] = torch.zeros(7, dtype=torch.float64, device=operand.device)

    def _metrics(self) -> dict[str, float]:
        metrics = {}
        for operand in OPERANDS:
            seen = {name: health for name, health in self.latest.items() if name.endswith(f"/{operand}")}
            if seen:
                metrics[f"precision/{operand}_sqnr_min"] = min(health.sqnr for health in seen.values())
                metrics[f"precision/{operand}_underflow_max"] = max(health.underflow for health in seen.values())
                metrics[f"precision/{operand}_saturation_max"] = max(health.saturation for health in seen.values())
                metrics[f"precision/{operand}_drift_max"] = max(abs(self._drift(name)) for name in seen)
        for name, health in self.latest.items():
            metrics[f"precision_modules/{name}/sqnr"] = health.sqnr
            metrics[f"precision_modules/{name}/underflow"] = health.underflow
            metrics[f"precision_modules/{name}/saturation"] = health.saturation
            metrics[f"precision_modules/{name}/drift"] = self._drift(name)
        return metrics

    def _remember_first(self) -> None:
        for name, health in self.latest.items():
            if math.isfinite(health.log2_amax):  # neither of zeros, nor of a step that is skipped
                self.first_log2_amax.setdefault(name, health.log2_amax)

    def _drift(self, name: str) -> float:
        drift = self.latest[name].log2_amax - self.first_log2_amax.get(name, math.nan)
        return drift if math.isfinite(drift) else 0.0

    def _judge(self, trainer: Trainer) -> None:
        crossed = list(self._crossed())
        if not crossed:
            return
        shown = "; ".join(crossed[:_NAMED_IN_A_WARNING])
        more = f"; and {len(crossed) - _NAMED_IN_A_WARNING} more" if len(crossed) > _NAMED_IN_A_WARNING else ""
        consequence = "Training stops." if self.action == "stop" else "Training goes on."
        rank_zero_warn(f"Precision at step {trainer.global_step}: {shown}{more}. {consequence}")
        if self.action == "stop":
            trainer.should_stop = True

    def _crossed(self) -> Iterator[str]:
        for name, health in self.latest.items():
            if health.nonfinite:
                yield f"{name} has {health.nonfinite:.0f} values that are not finite"
            if self.min_sqnr is not None and not health.sqnr >= self.min_sqnr:
                yield f"{name} has {health.sqnr:.1f} dB, below min_sqnr {self.min_sqnr}"
            if self.max_underflow is not None and not health.underflow <= self.max_underflow:
                yield f"{name} loses {health.underflow:.2%} to zero, above max_underflow {self.max_underflow}"
            if self.max_drift is not None and not abs(self._drift(name)) <= self.max_drift:
                yield f"{name} has drifted by 2**{self._drift(name):+.1f}, above max_drift {self.max_drift}"


def _sums(rows: Tensor, tile: Tile, recipe: Recipe, element: ElementFormat, whole_amax: Tensor | None = None) -> Tensor:
    """Sums over an operand that can be added over processes, float64."""
    tiles, amax = tiled(rows, tile)
    tiles, amax = tiles.float(), (amax if whole_amax is None else whole_amax.expand_as(amax)).float()
    scale, inverse = scale_of(amax, recipe.scale, element)
    scaled = tiles * inverse
    rounded = round_to_element(scaled, element)
    present = tiles != 0
    used = amax > 0
    parts = (
        (tiles.double() ** 2).sum(),
        (((rounded - scaled) * scale).double() ** 2).sum(),
        present.sum(),
        (present & (rounded == 0)).sum(),
        (scaled.abs() > largest_of(element) * (1 + 1e-6)).sum(),
        amax.log2().where(used, 0.0).sum() / used.sum().clamp(min=1) * present.sum(),
        (~tiles.isfinite()).sum(),
    )
    return torch.stack([part.double() for part in parts])


def _health(
    signal: float, noise: float, present: float, lost: float, saturated: float, log2_amax: float, nonfinite: float
) -> OperandHealth:
    sqnr = 10 * math.log10(signal / noise) if noise > 0 and signal > 0 else (math.inf if noise == 0 else math.nan)
    count = max(present, 1.0)
    magnitude = log2_amax / count if present else math.nan
    return OperandHealth(sqnr, lost / count, saturated / count, magnitude, nonfinite)
