"""One transformer block of DeepSeek-V3: latent attention, then a dense feed-forward or experts."""

from torch import Tensor, nn

from lightning_moe.dispatch.local import LocalDispatcher
from lightning_moe.models.deepseek_v3.attention import MultiHeadLatentAttention
from lightning_moe.models.deepseek_v3.attention_backends import AttentionMask
from lightning_moe.models.deepseek_v3.config import DeepSeekV3Config
from lightning_moe.models.deepseek_v3.rope import Rotation
from lightning_moe.moe.experts import GroupedExperts
from lightning_moe.moe.feed_forward import GatedMLP
from lightning_moe.moe.layer import MoELayer, RouterStats
from lightning_moe.moe.router import Router


def build_moe_layer(config: DeepSeekV3Config) -> MoELayer:
    """Builds the MoE layer of an architecture."""
    std = config.initializer_range
    router = Router(
        config.hidden_size,
        config.n_routed_experts,
        config.num_experts_per_tok,
        n_group=config.n_group,
        topk_group=config.topk_group,
        scoring_func=config.scoring_func,
        group_score="top2" if config.topk_method == "noaux_tc" else "max",
        norm_topk_prob=config.norm_topk_prob,
        routed_scaling_factor=config.routed_scaling_factor,
        initializer_range=std,
    )
    experts = GroupedExperts(
        config.n_routed_experts, config.hidden_size, config.moe_intermediate_size, initializer_range=std
    )
    shared_experts = None
    if config.n_shared_experts:
        shared_width = config.n_shared_experts * config.moe_intermediate_size
        shared_experts = GatedMLP(config.hidden_size, shared_width, initializer_range=std)
    return MoELayer(router, experts, LocalDispatcher(config.n_routed_experts), shared_experts)


class Block(nn.Module):
    """A pre-norm transformer block.

    Args:
        config: The architecture.
        layer_index: Global index of the block; the first ``first_k_dense_replace`` ones have a dense feed-forward.
    """

    def __init__(self, config: DeepSeekV3Config, layer_index: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = MultiHeadLatentAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if layer_index < config.first_k_dense_replace:
            self.mlp: GatedMLP | MoELayer = GatedMLP(
                config.hidden_size, config.intermediate_size, initializer_range=config.initializer_range
            )
        else:
            self.mlp = build_moe_layer(config)

    def forward(
        self,
        x_BSD: Tensor,
        rotation: Rotation,
        mask: AttentionMask | None = None,
        *,
        valid_BS: Tensor | None = None,
        document_ids_BS: Tensor | None = None,
        balance: bool = True,
    ) -> tuple[Tensor, RouterStats | None]:
        """Applies the block.

        Args:
            x_BSD: Hidden states.
            rotation: Rotation of the positions.
            mask: What tokens may see, or ``None`` for plain causal attention.
            valid_BS: Bool, False for tokens that must not be routed; ``None`` when all are valid.
            document_ids_BS: Documents of packed rows, for the balance loss.
            balance: Whether to compute the balance loss.

        Returns:
            The new hidden states, and the statistics of the routing, ``None`` for a dense block.
        """
        x_BSD, normed_BSD = self.attend(x_BSD, rotation, mask)
        if not isinstance(self.mlp, MoELayer):
            return x_BSD + self.mlp(normed_BSD), None
        y_BSD, stats = self.mlp(normed_BSD, valid_BS, document_ids_BS=document_ids_BS, balance=balance)
        return x_BSD + y_BSD, stats

    def attend(self, x_BSD: Tensor, rotation: Rotation, mask: AttentionMask | None) -> tuple[Tensor, Tensor]:
        """The attention region: returns the residual stream after attention, and its norm for the feed-forward."""
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), rotation, mask)
        return x_BSD, self.post_attention_layernorm(x_BSD)
