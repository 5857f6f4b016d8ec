"""lightning-moe: train DeepSeek-V3-class mixture-of-experts models with PyTorch Lightning."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import StrategyRegistry

__version__ = "0.1.0.dev0"

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
