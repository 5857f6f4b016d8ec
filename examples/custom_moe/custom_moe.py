"""A MoE language model that is not DeepSeek, written for one device and trained on any number: a small Mixtral.

Grouped-query attention with rotary embedding, RMSNorm, softmax routing to the two best SwiGLU experts with normalised
weights, head tied to the embedding. ``CustomMoEModel`` computes sums of losses, ``CustomMoE`` trains it.

Shapes: ``B`` batch, ``S`` sequence, ``D`` hidden size, ``d`` width of a head, ``V`` vocabulary.
"""

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
            raise ValueError(f"num_experts_per_tok is {self.num_experts_per_tok}, but it must be at most {most}.")
        for name, step in [
            ("num_attention_heads", self.num_key_value_heads),
            ("hidden_size", 8 * self.num_attention_heads),  # each head a multiple of 8 wide
            ("moe_intermediate_size", 8),  # as the multiplication of experts needs
        ]:
            if (value := getattr(self, name)) % step:
                raise ValueError(f"{name} is {value}, but must be a multiple of {step}, as in {value - value % -step}.")


def rotate(x_BSHd: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding: turns dimensions i and i + d/2 together by the angle position * theta^(-2i/d)."""
    dtype, pairs = torch.promote_types(x_BSHd.dtype, torch.float32), x_BSHd.shape[-1] // 2
    angles = positions[..., None, None] * theta ** (-torch.arange(pairs, device=x_BSHd.device, dtype=dtype) / pairs)
    first, second = x_BSHd.to(dtype).chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BSHd.dtype)


class Block(nn.Module):
    def __init__(self, config: CustomMoEConfig) -> None:
        super().__init__()
        hidden, experts, std = config.hidden_size, config.n_routed_experts, config.initializer_range
        self.rope_theta, self.head_dim = config.rope_theta, hidden // config.num_attention_heads
        self.heads = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.qkv_proj = Linear(hidden, sum(self.heads) * self.head_dim, std)
        self.o_proj = Linear(hidden, hidden, std)
        self.moe_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.moe = MoELayer(
            Router(hidden, experts, config.num_experts_per_tok, scoring_func="softmax", initializer_range=std),
            GroupedExperts(experts, hidden, config.moe_intermediate_size, initializer_range=std),
            LocalDispatcher(experts),  # all experts are here; with several processes the strategy replaces it
        )

    def forward(self, x_BSD: Tensor, positions: Tensor, mask: Tensor | None, **moe: Any) -> tuple[Tensor, RouterStats]:
        x_BSD, normed_BSD = self.attend(x_BSD, positions, mask)
        y_BSD, stats = self.moe(normed_BSD, **moe)
        return x_BSD + y_BSD, stats

    def attend(self, x_BSD: Tensor, positions: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """All that comes before the router; the strategy recomputes and compiles a method of this name."""
        qkv_BSHd = self.qkv_proj(self.attention_norm(x_BSD)).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv_BSHd.split(self.heads, dim=-2)
        q, k = rotate(q, positions, self.rope_theta), rotate(k, positions, self.rope_theta)
        q, k, v = (x_BSHd.transpose(1, 2) for x_BSHd in (q, k, v))
        out_BHSd = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        x_BSD = x_BSD + self.o_proj(out_BHSd.transpose(1, 2).flatten(2))
        return x_BSD, self.moe_norm(x_BSD)


class CustomMoEModel(MoEModel):
    def __init__(self, config: CustomMoEConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding_VD = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))  # the head too
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=1e-5)

    def reset_parameters(self) -> None:
        """Draws what this module itself owns; each module with parameters or buffers has such a method."""
        nn.init.normal_(self.embedding_VD, std=self.config.initializer_range)

    def blocks(self) -> Iterator[tuple[str, nn.Module]]:
        yield from ((f"layers.{index}", block) for index, block in enumerate(self.layers))

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        document_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        valid: Tensor | None = None,
        balance: bool = True,
    ) -> MoEModelOutput:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device) if position_ids is None else position_ids
        # With packed documents a token sees its own document alone
        mask = None if document_ids is None else (document_ids[:, None, :, None] == document_ids[:, None, None]).tril()
        x_BSD, statistics = F.embedding(input_ids, self.embedding_VD), []
        for block in self.layers:
            x_BSD, stats = block(x_BSD, positions, mask, valid_BS=valid, document_ids_BS=document_ids, balance=balance)
            statistics.append(stats)
        x_BSD = self.norm(x_BSD)
        counts, balance_sums = zip(*statistics, strict=True)
        output = MoEModelOutput(expert_counts=counts, balance_loss=sum(balance_sums) if balance else None)
        if labels is None:
            return output._replace(logits=F.linear(x_BSD, self.embedding_VD))
        sums = linear_cross_entropy(x_BSD.flatten(0, 1), self.embedding_VD, labels.flatten())
        return output._replace(loss=sums.loss, num_tokens=sums.num_tokens)


class CustomMoE(MoELightningModule):
    def __init__(self, config: CustomMoEConfig = CustomMoEConfig(), **kwargs: Any) -> None:
        super().__init__(**kwargs)  # optimizer, schedule, balancing
        self.config = CustomMoEConfig(**config) if isinstance(config, dict) else config  # a dict from a checkpoint
        self.save_hyperparameters({"config": asdict(self.config)})

    def build_model(self) -> MoEModel:
        return CustomMoEModel(self.config)

    def moe_shape(self) -> MoEShape:
        c = self.config
        return MoEShape(c.vocab_size, c.hidden_size, c.n_routed_experts, c.num_experts_per_tok, c.moe_intermediate_size)
