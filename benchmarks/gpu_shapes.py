"""What ``gpu_step.py`` measures: the shapes of a step, and what a system has to be."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_moe.models.deepseek_v3 import DeepSeekV3Config
from lightning_moe.models.deepseek_v3.model import DeepSeekV3Model

ADAMW: dict[str, Any] = {"lr": 2.2e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
PRECISION = "fp32 parameters, gradients and moments, bf16 compute"
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Shape:
    """One training step.

    Args:
        config: The architecture.
        batch: Rows of a step.
        sequence: Tokens of a row.
    """

    config: DeepSeekV3Config
    batch: int
    sequence: int

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.sequence

    def count(self) -> tuple[int, float]:
        """Returns the parameters, and the operations per token by the rule of ``lightning_moe.models.flops``."""
        with torch.device("meta"):
            model = DeepSeekV3Model(self.config)
        return sum(p.numel() for p in model.parameters()), model.flops_per_token(self.sequence)


def _v2_lite(**overrides: Any) -> DeepSeekV3Config:
    cut = {"num_hidden_layers": 8, "num_nextn_predict_layers": 0}
    return DeepSeekV3Config.preset("deepseek_v2_lite", **{**cut, **overrides})


_TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "kv_lora_rank": 32,
}
# Four MoE layers of the 671B model, with the rows that an expert gets under expert parallelism over 32 devices.
_671B_LAYERS = DeepSeekV3Config.preset(
    "deepseek_v3_671b",
    num_hidden_layers=4,
    num_nextn_predict_layers=0,
    first_k_dense_replace=0,
    n_routed_experts=8,
    n_group=1,
    topk_group=1,
)
SHAPES = {
    "v2_lite_16k": Shape(_v2_lite(), 4, 4096),
    "v2_lite_32k": Shape(_v2_lite(), 8, 4096),
    "v2_lite_16k_mtp": Shape(_v2_lite(num_nextn_predict_layers=1), 4, 4096),
    "671b_8k": Shape(_671B_LAYERS, 2, 4096),
    # To try the script on a CPU.
    "tiny": Shape(_v2_lite(**_TINY), 2, 128),
    "tiny_mtp": Shape(_v2_lite(**_TINY, num_nextn_predict_layers=1), 2, 128),
}


@dataclass(frozen=True)
class Options:
    """What holds for all systems of a run.

    Args:
        device: Where to run.
        clip: Largest gradient norm; 0 for no clipping.
        forced_balance: Whether tokens go to the experts in turn, whatever the router says.
        compile: Whether to compile what each system compiles.
        checkpointing: Whether to recompute activations, each system by its own means.
        strategy: More arguments of our strategy.
        optimizer: More arguments of our optimizer.
    """

    device: torch.device
    clip: float = 1.0
    forced_balance: bool = False
    compile: bool = True
    checkpointing: bool = False
    strategy: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class System:
    """A model that is ready to train.

    Args:
        train: Trains on batches ``(input_ids, labels)``, int64 ``(B, S)`` each, one step a batch, and calls its second
            argument with the mean loss of the main model after each step. Nothing waits for the device.
        parameters: How many there are.
        settings: How it was set up.
        name_parts: Makes the steps after it tell a profiler which part of the model runs; ``None`` if it cannot.
        modules: Those of the model, where it is ours.
    """

    train: Callable[[Iterable[Batch], Callable[[Tensor], None]], None]
    parameters: int
    settings: dict[str, Any]
    name_parts: Callable[[], None] | None = None
    modules: tuple[nn.Module, ...] = ()


def one_by_one(
    step: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[Iterable[Batch], Callable[[Tensor], None]], None]:
    """Returns the loop around a function that trains one step and returns its loss."""

    def train(batches: Iterable[Batch], after_step: Callable[[Tensor], None]) -> None:
        for input_ids, labels in batches:
            after_step(step(input_ids, labels))

    return train


def routing_name(forced_balance: bool) -> str:
    """How tokens are routed, as records say it."""
    return "forced balance" if forced_balance else "real"


def shown_shape(row: dict[str, Any]) -> str:
    """The shape of a row of a record as tables show it: with the routing, where that is not the router's own."""
    return row["shape"] if row["routing"] == routing_name(False) else f"{row['shape']} ({row['routing']})"


def in_turn(like_TK: Tensor, num_experts: int) -> Tensor:
    """Experts in turn, int64 ``(T, K)``: each gets the same number of rows, to within one.

    Those of a token lie far apart, so that they are as many devices' as those that a router chooses.
    """
    stride = round(num_experts * 0.618)
    while math.gcd(stride, num_experts) > 1:
        stride += 1
    return (torch.arange(like_TK.numel(), device=like_TK.device) * stride % num_experts).view_as(like_TK)
