"""A MoE language model that is not DeepSeek, written for one device and trained on any number: a small Mixtral.

Grouped-query attention with rotary embedding, RMSNorm, softmax routing to the two best SwiGLU experts with normalised
weights, head tied to the embedding. Router, experts, MoE layer and loss are the library's.

Shapes: ``B`` batch, ``S`` sequence, ``D`` hidden size, ``H`` heads, ``d`` width of a head, ``P`` = d / 2 pairs.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_moe import MoELightningModule, MoEShape
from lightning_moe.dispatch.local import LocalDispatcher
from lightning_moe.losses.linear_cross_entropy import linear_cross_entropy
from lightning_moe.models.base import MoEModel, MoEModelOutput
from lightning_moe.moe.experts import GroupedExperts
from lightning_moe.moe.feed_forward import Linear
from lightning_moe.moe.layer import MoELayer, RouterStats
from lightning_moe.moe.router import Router


@dataclass(frozen=True)
class CustomMoEConfig:
    """The architecture. ``--model.config.hidden_size 256`` on the command line changes one value of it."""

    vocab_size: int = 4096
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 2  # each serves a group of query heads
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 192
    rope_theta: float = 10000.0
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise ValueError(f"{name} is {value}, but it must be positive, as in {getattr(type(self), name)}.")
        if self.num_experts_per_tok > (most := self.n_routed_experts):
            raise ValueError(f"num_experts_per_tok is {self.num_experts_per_tok}, but there are {most} experts.")
        for name, divisor in [
            ("num_attention_heads", self.num_key_value_heads),
            ("hidden_size", math.lcm(2 * self.num_attention_heads, 8)),  # heads of an even width for the rotation
            ("moe_intermediate_size", 8),  # the multiplication of experts wants rows of 16 bytes
        ]:
            if (value := getattr(self, name)) % divisor:
                works = value + -value % divisor
                raise ValueError(f"{name} is {value}, but it must be a multiple of {divisor}, as in {works}.")


def rotate(x_BSHd: Tensor, angles_SP: Tensor) -> Tensor:
    """Rotary embedding: turns the dimensions i and i + d/2 together by the position times theta^(-2i/d)."""
    cos, sin = angles_SP.cos().unsqueeze(-2), angles_SP.sin().unsqueeze(-2)
    first, second = x_BSHd.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BSHd.dtype)


class Embedding(nn.Embedding):
    def __init__(self, config: CustomMoEConfig) -> None:
        self.initializer_range = config.initializer_range
        super().__init__(config.vocab_size, config.hidden_size)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.initializer_range)


class Attention(nn.Module):
    def __init__(self, config: CustomMoEConfig) -> None:
        super().__init__()
        hidden, std = config.hidden_size, config.initializer_range
        self.head_dim = hidden // config.num_attention_heads
        self.q_proj = Linear(hidden, hidden, std)
        self.k_proj = Linear(hidden, config.num_key_value_heads * self.head_dim, std)
        self.v_proj = Linear(hidden, config.num_key_value_heads * self.head_dim, std)
        self.o_proj = Linear(hidden, hidden, std)

    def forward(self, x_BSD: Tensor, angles_SP: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (proj(x_BSD).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (x.transpose(1, 2) for x in (rotate(q, angles_SP), rotate(k, angles_SP), v))
        out_BHSd = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        return self.o_proj(out_BHSd.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config: CustomMoEConfig) -> None:
        super().__init__()
        experts, hidden, std = config.n_routed_experts, config.hidden_size, config.initializer_range
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.attention = Attention(config)
        self.moe_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.moe = MoELayer(
            Router(hidden, experts, config.num_experts_per_tok, scoring_func="softmax", initializer_range=std),
            GroupedExperts(experts, hidden, config.moe_intermediate_size, initializer_range=std),
            LocalDispatcher(experts),  # with several processes the strategy puts another in its place
        )

    def forward(self, x_BSD: Tensor, angles_SP: Tensor, mask: Tensor | None, **routing: Any) -> tuple[Tensor, RouterStats]:
        x_BSD, normed_BSD = self.attend(x_BSD, angles_SP, mask)
        y_BSD, stats = self.moe(normed_BSD, **routing)
        return x_BSD + y_BSD, stats

    def attend(self, x_BSD: Tensor, angles_SP: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """All up to the router: under this name, the strategy can recompute and compile it."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), angles_SP, mask)
        return x_BSD, self.moe_norm(x_BSD)


class CustomMoEModel(MoEModel):
    def __init__(self, config: CustomMoEConfig) -> None:
        super().__init__()
        self.embedding = Embedding(config)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=1e-5)
        pairs = range(config.hidden_size // config.num_attention_heads // 2)
        self.frequencies = [config.rope_theta ** (-pair / len(pairs)) for pair in pairs]

    def blocks(self) -> Iterator[tuple[str, nn.Module]]:
        yield from ((f"layers.{index}", block) for index, block in enumerate(self.layers))

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, labels: Tensor | None = None, *, document_ids: Tensor | None = None,
        position_ids: Tensor | None = None, valid: Tensor | None = None, balance: bool = True, **_: Any,
    ) -> MoEModelOutput:
        pass
