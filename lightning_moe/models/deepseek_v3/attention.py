"""Multi-head latent attention (MLA).

Shapes: ``B`` batch, ``S`` sequence, ``D`` hidden size, ``H`` heads.
"""

from torch import Tensor, nn

from lightning_moe.models.deepseek_v3.attention_backends import AttentionMask, causal_attention
from lightning_moe.models.deepseek_v3.config import DeepSeekV3Config
from lightning_moe.models.deepseek_v3.query_key import queries_keys_values
from lightning_moe.models.deepseek_v3.rope import Rotation, softmax_scale
from lightning_moe.moe.feed_forward import Linear

# The norms inside attention have this epsilon in the released models, whatever rms_norm_eps is.
_LATENT_NORM_EPS = 1e-6


class MultiHeadLatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V3 report, equations 1 to 11), with or without query compression.

    Args:
        config: The architecture.
    """

    def __init__(self, config: DeepSeekV3Config) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.nope_dim = config.qk_nope_head_dim
        self.rope_dim = config.qk_rope_head_dim
        self.v_dim = config.v_head_dim
        self.kv_lora_rank = config.kv_lora_rank
        self.scale = softmax_scale(config)
        std = config.initializer_range
        query_width = self.num_heads * config.qk_head_dim
        self.q_proj: Linear | None = None
        if config.q_lora_rank is None:
            self.q_proj = Linear(config.hidden_size, query_width, std)
        else:
            self.q_a_proj = Linear(config.hidden_size, config.q_lora_rank, std)
            self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, eps=_LATENT_NORM_EPS)
            self.q_b_proj = Linear(config.q_lora_rank, query_width, std)
        self.kv_a_proj_with_mqa = Linear(config.hidden_size, config.kv_lora_rank + self.rope_dim, std)
        self.kv_a_layernorm = nn.RMSNorm(config.kv_lora_rank, eps=_LATENT_NORM_EPS)
        self.kv_b_proj = Linear(config.kv_lora_rank, self.num_heads * (self.nope_dim + self.v_dim), std)
        self.o_proj = Linear(self.num_heads * self.v_dim, config.hidden_size, std)

    def forward(self, x_BSD: Tensor, rotation: Rotation, mask: AttentionMask | None = None) -> Tensor:
        """Applies attention.

        Args:
            x_BSD: Normed hidden states.
            rotation: Rotation of the positions.
            mask: What tokens may see, or ``None`` for plain causal attention.
        """
        q = self.q_proj(x_BSD) if self.q_proj is not None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BSD)))
        latent, k_rope = self.kv_a_proj_with_mqa(x_BSD).split([self.kv_lora_rank, self.rope_dim], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent))
        q_BSHd, k_BSHd, v_BSHd = queries_keys_values(
            q.unflatten(-1, (self.num_heads, -1)), kv.unflatten(-1, (self.num_heads, -1)), k_rope, rotation
        )
        out_BHSd = causal_attention(
            q_BSHd.transpose(1, 2), k_BSHd.transpose(1, 2), v_BSHd.transpose(1, 2), scale=self.scale, mask=mask
        )
        return self.o_proj(out_BHSd.transpose(1, 2).flatten(2))
