"""Multi-head latent attention (MLA), and the choice of the attention kernel.

Shapes: ``B`` batch, ``S`` sequence, ``D`` hidden size, ``H`` heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_moe.models.deepseek_v3.config import DeepSeekV3Config
from lightning_moe.models.deepseek_v3.rope import Rotation, rotate, softmax_scale
from lightning_moe.moe.feed_forward import Linear

# The norms inside attention have this epsilon in the released models, whatever rms_norm_eps is.
_LATENT_NORM_EPS = 1e-6

# On CUDA, in this order. With 192 and 128 dimensions on one H200 (bfloat16, S = 4096, forward and backward):
# cuDNN 428 TFLOP/s, FlashAttention-2 refuses unequal dimensions, memory-efficient 48.
_CUDA_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def document_mask(document_ids_BS: Tensor) -> Tensor:
    """Causal mask within documents: bool ``(B, 1, S, S)``, True where a query may see a key."""
    same = document_ids_BS[:, None, :, None] == document_ids_BS[:, None, None, :]
    return same.tril()


def causal_attention(
    q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor, *, scale: float, mask: Tensor | None = None
) -> Tensor:
    """Causal attention through ``scaled_dot_product_attention``.

    On CUDA the first kernel that takes the shapes is used, in the order cuDNN, FlashAttention, memory-efficient, math.
    On CPU only the kernel for equal dimensions avoids the S x S matrix, so values are padded to the queries' width.

    Args:
        q_BHSd: Queries.
        k_BHSd: Keys.
        v_BHSd: Values; their width may differ.
        scale: Factor on the logits.
        mask: :func:`document_mask`, or ``None`` for plain causal attention.
    """
    causal = mask is None
    if q_BHSd.device.type == "cuda":
        with sdpa_kernel(_CUDA_BACKENDS, set_priority=True):
            return F.scaled_dot_product_attention(q_BHSd, k_BHSd, v_BHSd, mask, is_causal=causal, scale=scale)
    missing = q_BHSd.shape[-1] - v_BHSd.shape[-1]
    if missing > 0:
        padded = F.pad(v_BHSd, (0, missing))
        out = F.scaled_dot_product_attention(q_BHSd, k_BHSd, padded, mask, is_causal=causal, scale=scale)
        return out[..., : v_BHSd.shape[-1]]
    return F.scaled_dot_product_attention(q_BHSd, k_BHSd, v_BHSd, mask, is_causal=causal, scale=scale)


def attention_backend(config: DeepSeekV3Config, device: torch.device, dtype: torch.dtype) -> str:
    """Names the kernel that :func:`causal_attention` takes for an architecture on a device.

    Args:
        config: The architecture.
        device: Where it runs.
        dtype: Compute dtype.
    """
    if device.type != "cuda":
        return "SDPA flash, values padded" if config.v_head_dim < config.qk_head_dim else "SDPA flash"
    q = torch.empty(1, config.num_attention_heads, 128, config.qk_head_dim, device=device, dtype=dtype)
    v = torch.empty(1, config.num_attention_heads, 128, config.v_head_dim, device=device, dtype=dtype)
    params = torch.backends.cuda.SDPAParams(q, q, v, None, 0.0, True, False)
    if torch.backends.cuda.can_use_cudnn_attention(params):
        return "SDPA cuDNN"
    if torch.backends.cuda.can_use_flash_attention(params):
        return "SDPA flash"
    if torch.backends.cuda.can_use_efficient_attention(params):
        return "SDPA memory-efficient (slow for these dimensions)"
    return "SDPA math (slow)"


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

    def forward(self, x_BSD: Tensor, rotation: Rotation, mask: Tensor | None = None) -> Tensor:
        """Applies attention.

        Args:
            x_BSD: Normed hidden states.
            rotation: Rotation of the positions.
            mask: :func:`document_mask`, or ``None`` for plain causal attention.
        """
        q = self.q_proj(x_BSD) if self.q_proj is not None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BSD)))
        q_BSHd = q.unflatten(-1, (self.num_heads, -1))
        q_nope, q_rope = q_BSHd.split([self.nope_dim, self.rope_dim], dim=-1)

        latent, k_rope = self.kv_a_proj_with_mqa(x_BSD).split([self.kv_lora_rank, self.rope_dim], dim=-1)
        kv_BSHd = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.num_heads, -1))
        k_nope, v_BSHd = kv_BSHd.split([self.nope_dim, self.v_dim], dim=-1)
        # One rotary key for all heads.
        k_rope = rotate(k_rope.unsqueeze(2), rotation).expand(-1, -1, self.num_heads, -1)

        q_BSHd = torch.cat((q_nope, rotate(q_rope, rotation)), dim=-1)
        k_BSHd = torch.cat((k_nope, k_rope), dim=-1)
        out_BHSd = causal_attention(
            q_BSHd.transpose(1, 2), k_BSHd.transpose(1, 2), v_BSHd.transpose(1, 2), scale=self.scale, mask=mask
        )
        return self.o_proj(out_BHSd.transpose(1, 2).flatten(2))
