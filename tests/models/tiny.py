"""Tiny architectures and random weights, shared by the tests of models and conversion."""

from typing import Any

import torch
from torch import nn

from lightning_moe.models.deepseek_v3.config import DeepSeekV3Config, YarnScaling
from lightning_moe.models.deepseek_v3.model import DeepSeekV3Model

ARCHITECTURE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_nextn_predict_layers": 0,
}
YARN: dict[str, Any] = {
    "type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def tiny_config(*, yarn: bool = False, **overrides: Any) -> DeepSeekV3Config:
    """A DeepSeek-V3 of a million parameters."""
    fields = {**ARCHITECTURE, **overrides}
    if yarn:
        fields.update(max_position_embeddings=163840, rope_scaling=YarnScaling(**YARN))
    return DeepSeekV3Config(**fields)


def smaller_config(**overrides: Any) -> DeepSeekV3Config:
    """A DeepSeek-V3 of a few thousand parameters, for float64."""
    small = {
        "vocab_size": 31,
        "hidden_size": 16,
        "intermediate_size": 24,
        "moe_intermediate_size": 8,
        "num_attention_heads": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    }
    return tiny_config(**{**small, **overrides})


@torch.no_grad()
def randomise(model: nn.Module, *, seed: int = 0, std: float = 0.1, bias_mean: float = 0.0) -> None:
    """Random matrices, norms around 1 and selection biases, large enough for errors to show in the logits."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, std, generator=generator)
        else:
            parameter.normal_(1.0, 0.2, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(bias_mean, 0.3, generator=generator)


def random_model(config: DeepSeekV3Config, *, seed: int = 0, bias_mean: float = 0.0) -> DeepSeekV3Model:
    """A model with :func:`randomise` weights, in float64 where that is the default dtype."""
    model = DeepSeekV3Model(config)
    randomise(model, seed=seed, bias_mean=bias_mean)
    return model


def tokens(config: DeepSeekV3Config, batch: int, sequence: int, *, seed: int = 1) -> torch.Tensor:
    """Random tokens ``(batch, sequence)``."""
    return torch.randint(0, config.vocab_size, (batch, sequence), generator=torch.Generator().manual_seed(seed))
