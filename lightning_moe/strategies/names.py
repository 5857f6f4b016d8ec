"""Whether the trainer's accelerator and strategy are ones that Lightning knows, before a Trainer is made."""

from typing import Any

import yaml
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry

from lightning_moe.usage_errors import close_in_module, close_names

_BACKENDS = {"gpu": ("cuda", "mps")}


def check_accelerator(accelerator: Any) -> None:
    """Checks ``trainer.accelerator``.

    Args:
        accelerator: As given to the trainer; one that is not a name is not checked.

    Raises:
        ValueError: There is no such accelerator, or none here.
    """
    if not isinstance(accelerator, str) or accelerator == "auto":
        return
    names = ["auto", "gpu", *sorted(AcceleratorRegistry.available_accelerators())]
    if accelerator not in names:
        close = close_names(accelerator, names)
        hint = f"Did you mean {' or '.join(close)}?" if close else f"There is: {', '.join(names)}."
        raise ValueError(f"trainer.accelerator: there is no accelerator {accelerator}.\n{hint}")
    backends = _BACKENDS.get(accelerator, (accelerator,))
    if not any(AcceleratorRegistry[backend]["accelerator"].is_available() for backend in backends):
        what = "GPU" if accelerator in ("gpu", "cuda") else accelerator
        raise ValueError(
            f"trainer.accelerator is {accelerator}, but torch sees no {what} here. What works here: auto or cpu."
        )


def check_strategy(strategy: Any) -> None:
    """Checks ``trainer.strategy``.

    Args:
        strategy: As given to the trainer; one that is not a name or a class path is not checked.

    Raises:
        ValueError: There is no such strategy.
    """
    if not isinstance(strategy, str):
        return
    names = ["auto", "expert_parallel", *StrategyRegistry.available_strategies()]
    if strategy.lower() in names:
        return
    if strategy.startswith("{"):  # a class path that cannot be a strategy is left as text
        given = yaml.safe_load(strategy)
        strategy = str(given.get("class_path", strategy)) if isinstance(given, dict) else strategy
    close = close_in_module(strategy) if "." in strategy else close_names(strategy.lower(), names)
    close.sort(key=lambda name: name != "expert_parallel")
    hint = f"Did you mean {' or '.join(close)}?" if close else "For several devices there is expert_parallel."
    raise ValueError(f"trainer.strategy: there is no strategy {strategy}.\n{hint}")
