"""Interleaved rotary position embedding, with YaRN.

Shapes: ``B`` batch, ``S`` sequence, ``H`` heads, ``P`` = half the rotary dimensions (pairs).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_moe.models.deepseek_v3.config import DeepSeekV3Config, YarnScaling


class Rotation(NamedTuple):
    """Cosines and sines of all positions, at least float32, ``(S, P)`` or ``(B, S, P)``."""

    cos: Tensor
    sin: Tensor


def rotation_of(config: DeepSeekV3Config, position_ids: Tensor, dtype: torch.dtype = torch.float32) -> Rotation:
    """Computes the rotation of positions; it is cheap and done once per forward pass, so nothing is cached.

    Args:
        config: The architecture.
        position_ids: Positions ``(S,)`` or ``(B, S)``.
        dtype: At least float32.
    """
    frequencies_P = inverse_frequencies(config, position_ids.device, dtype)
    angles = position_ids[..., None].to(dtype) * frequencies_P
    multiplier = _position_multiplier(config.rope_scaling)
    return Rotation(angles.cos() * multiplier, angles.sin() * multiplier)


def inverse_frequencies(config: DeepSeekV3Config, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Angle per position of each pair ``(P,)``: theta^(-2i/d), interpolated by YaRN where it is on."""
    dim = config.qk_rope_head_dim
    pairs_P = torch.arange(dim // 2, device=device, dtype=dtype)
    frequencies_P = config.rope_theta ** (-2 * pairs_P / dim)
    yarn = config.rope_scaling
    if yarn is None:
        return frequencies_P

    def pair_of(rotations: float) -> float:
        original = yarn.original_max_position_embeddings
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low = max(math.floor(pair_of(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_of(yarn.beta_slow)), dim - 1)
    ramp_P = ((pairs_P - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies_P / yarn.factor * ramp_P + frequencies_P * (1 - ramp_P)


def softmax_scale(config: DeepSeekV3Config) -> float:
    """Scale of the attention logits: 1/sqrt of the head dimension, times YaRN's correction where it is on."""
    scale = config.qk_head_dim**-0.5
    yarn = config.rope_scaling
    if yarn is not None and yarn.mscale_all_dim:
        scale *= _yarn_mscale(yarn.factor, yarn.mscale_all_dim) ** 2
    return scale


def rotate(x_BSHd: Tensor, rotation: Rotation) -> Tensor:
    """Rotates neighbouring pairs (x0, x1), (x2, x3), … of the last dimension; computed in the rotation's dtype."""
    cos, sin = rotation.cos.unsqueeze(-2), rotation.sin.unsqueeze(-2)
    even, odd = x_BSHd.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x_BSHd.dtype)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _position_multiplier(yarn: YarnScaling | None) -> float:
    """YaRN's multiplier of cos and sin: 1 for DeepSeek-V3, whose two mscales are equal."""
    if yarn is None:
        return 1.0
    if yarn.mscale and yarn.mscale_all_dim:
        return _yarn_mscale(yarn.factor, yarn.mscale) / _yarn_mscale(yarn.factor, yarn.mscale_all_dim)
    return _yarn_mscale(yarn.factor, 1.0)
