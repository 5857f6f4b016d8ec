"""One depth of multi-token prediction."""

import torch
from torch import Tensor, nn

from lightning_moe.models.deepseek_v3.attention_backends import AttentionMask
from lightning_moe.models.deepseek_v3.block import Block
from lightning_moe.models.deepseek_v3.config import DeepSeekV3Config
from lightning_moe.models.deepseek_v3.rope import Rotation
from lightning_moe.moe.feed_forward import Linear
from lightning_moe.moe.layer import RouterStats


class MultiTokenPrediction(nn.Module):
    """Predicts one token further from the hidden states before and the tokens in between.

    The report's equation 21 writes ``[h; emb]``; the released weights have the embedding first, as here. Embedding and
    head are those of the main model and are not held here.

    Args:
        config: The architecture.
        layer_index: Global index of its block, which comes after those of the main model.
    """

    def __init__(self, config: DeepSeekV3Config, layer_index: int) -> None:
        super().__init__()
        self.enorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hnorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.eh_proj = Linear(2 * config.hidden_size, config.hidden_size, config.initializer_range)
        self.block = Block(config, layer_index)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        embedding_BSD: Tensor,
        hidden_BSD: Tensor,
        rotation: Rotation,
        mask: AttentionMask | None,
        *,
        valid_BS: Tensor,
        document_ids_BS: Tensor | None,
        balance: bool,
    ) -> tuple[Tensor, RouterStats | None]:
        """Runs the depth.

        Args:
            embedding_BSD: Embedding of the token this many places ahead; zero where there is none.
            hidden_BSD: Hidden states of the depth before, or of the main model.
            rotation: Rotation of the positions.
            mask: What tokens may see, or ``None`` for plain causal attention.
            valid_BS: Bool, False where there is no token ahead; these positions are not routed.
            document_ids_BS: Documents of packed rows, for the balance loss.
            balance: Whether to compute the balance loss.

        Returns:
            Hidden states after the depth's own norm, for the head and for the next depth, and the statistics of the
            routing.
        """
        joined = torch.cat((self.enorm(embedding_BSD), self.hnorm(hidden_BSD)), dim=-1)
        hidden_BSD, stats = self.block(
            self.eh_proj(joined),
            rotation,
            mask,
            valid_BS=valid_BS,
            document_ids_BS=document_ids_BS,
            balance=balance,
        )
        return self.norm(hidden_BSD), stats
