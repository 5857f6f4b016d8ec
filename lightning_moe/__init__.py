"""lightning-moe: train DeepSeek-V3-class mixture-of-experts models with PyTorch Lightning."""

import os
import signal
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"


def _is_command() -> bool:
    """Whether the command ``lightning-moe`` or ``python -m lightning_moe`` is what imports this."""
    name, started_as = [*getattr(sys, "argv", ()), ""][0], sys.orig_argv  # processes it spawns have its argv only
    if name == "-m":
        return ("-m", "lightning_moe") in zip(started_as, started_as[1:], strict=False)
    return name in started_as and os.path.basename(name) in ("lightning-moe", "lightning-moe.exe")


def _stop_importing(*_: object) -> None:
    """Ends the command at Ctrl-C while it is imported: nothing has begun, and a traceback would tell nothing."""
    rank = next((os.environ[name] for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID") if name in os.environ), "0")
    if rank == "0":
        os.write(2, b"Stopped by Ctrl-C.\n")
    os._exit(128 + signal.SIGINT)


if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _stop_importing)  # until cli.main gives it back

from lightning.pytorch.strategies import StrategyRegistry  # noqa: E402 - the first of the long imports

if TYPE_CHECKING:
    from lightning_moe.callbacks.preemption import Preemption
    from lightning_moe.callbacks.throughput import MoEThroughput
    from lightning_moe.cli import MoECLI
    from lightning_moe.data.datamodule import TokenDataModule
    from lightning_moe.dispatch.all_to_all import AllToAllDispatcher
    from lightning_moe.dispatch.base import TokenDispatcher
    from lightning_moe.dispatch.deep_ep.dispatcher import DeepEPDispatcher
    from lightning_moe.dispatch.local import LocalDispatcher
    from lightning_moe.metrics import ExpertLoad, MTPAccuracy, TokenMean
    from lightning_moe.models.deepseek_v3 import DeepSeekV3, DeepSeekV3Config
    from lightning_moe.models.module import MoELightningModule, MoEShape
    from lightning_moe.moe.balance import Balancing
    from lightning_moe.optim.adamw import AdamW
    from lightning_moe.optim.schedules import TokenSchedule
    from lightning_moe.precision.health import PrecisionHealth
    from lightning_moe.precision.plugin import (
        BF16Precision,
        BlockwiseFP8Precision,
        Float8Precision,
        MoEPrecision,
        MXFP8Precision,
    )
    from lightning_moe.strategies.expert_parallel import ExpertParallelStrategy

# Loaded at first use, so that importing the package costs little and needs no optional dependency
_MODULE_OF = {
    "AdamW": "lightning_moe.optim.adamw",
    "AllToAllDispatcher": "lightning_moe.dispatch.all_to_all",
    "BF16Precision": "lightning_moe.precision.plugin",
    "Balancing": "lightning_moe.moe.balance",
    "BlockwiseFP8Precision": "lightning_moe.precision.plugin",
    "DeepEPDispatcher": "lightning_moe.dispatch.deep_ep.dispatcher",
    "DeepSeekV3": "lightning_moe.models.deepseek_v3",
    "DeepSeekV3Config": "lightning_moe.models.deepseek_v3",
    "ExpertLoad": "lightning_moe.metrics",
    "ExpertParallelStrategy": "lightning_moe.strategies.expert_parallel",
    "Float8Precision": "lightning_moe.precision.plugin",
    "LocalDispatcher": "lightning_moe.dispatch.local",
    "MTPAccuracy": "lightning_moe.metrics",
    "MXFP8Precision": "lightning_moe.precision.plugin",
    "MoECLI": "lightning_moe.cli",
    "MoELightningModule": "lightning_moe.models.module",
    "MoEPrecision": "lightning_moe.precision.plugin",
    "MoEShape": "lightning_moe.models.module",
    "MoEThroughput": "lightning_moe.callbacks.throughput",
    "PrecisionHealth": "lightning_moe.precision.health",
    "Preemption": "lightning_moe.callbacks.preemption",
    "TokenDataModule": "lightning_moe.data.datamodule",
    "TokenDispatcher": "lightning_moe.dispatch.base",
    "TokenMean": "lightning_moe.metrics",
    "TokenSchedule": "lightning_moe.optim.schedules",
}

__all__ = [
    "AdamW",
    "AllToAllDispatcher",
    "BF16Precision",
    "Balancing",
    "BlockwiseFP8Precision",
    "DeepEPDispatcher",
    "DeepSeekV3",
    "DeepSeekV3Config",
    "ExpertLoad",
    "ExpertParallelStrategy",
    "Float8Precision",
    "LocalDispatcher",
    "MTPAccuracy",
    "MXFP8Precision",
    "MoECLI",
    "MoELightningModule",
    "MoEPrecision",
    "MoEShape",
    "MoEThroughput",
    "PrecisionHealth",
    "Preemption",
    "TokenDataModule",
    "TokenDispatcher",
    "TokenMean",
    "TokenSchedule",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _expert_parallel(**init_args: Any) -> Any:
    return __getattr__("ExpertParallelStrategy")(**init_args)


StrategyRegistry.register(
    "expert_parallel", _expert_parallel, description="Expert parallelism with FSDP2", override=True
)
