"""Whether averages take the place of the trained weights."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import WeightAveraging


def averages_weights(trainer: Trainer) -> bool:
    """Returns whether averaged weights are in the model's place during validation and at the end of training."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return any(isinstance(callback, WeightAveraging) for callback in callbacks)
