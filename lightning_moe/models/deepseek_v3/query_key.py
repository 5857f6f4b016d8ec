"""From the projections of latent attention to queries, keys and values, in one pass over memory each way.

Shapes: ``B`` batch, ``S`` sequence, ``H`` heads, ``N`` dimensions without position, ``R`` rotary dimensions, ``V``
value dimensions, ``d`` = N + R.
"""

from typing import Any

import torch
from torch import Tensor

from lightning_moe.models.deepseek_v3.rope import Rotation, rotate


def queries_keys_values(
    q_BSHd: Tensor, kv_BSHd: Tensor, k_rope_BSR: Tensor, rotation: Rotation
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotates queries and the rotary key, and puts the key of each head together.

    Backward writes the gradient of ``kv`` once, from those of keys and values. The rotation gets no gradient.

    Args:
        q_BSHd: Queries as projected; the last R dimensions are rotary.
        kv_BSHd: Keys without position and values side by side ``(B, S, H, N + V)``.
        k_rope_BSR: The one rotary key of all heads.
        rotation: Rotation of the positions.

    Returns:
        Queries and keys ``(B, S, H, N + R)``, and values ``(B, S, H, V)``, a view of ``kv``.
    """
    return _QueriesKeysValues.apply(q_BSHd, kv_BSHd, k_rope_BSR, *rotation)


class _QueriesKeysValues(torch.autograd.Function):
    # A custom operator cannot return the values, which are a view of its input; and as a view outside of it their
    # gradient would be summed with that of the keys in a pass over two tensors of the whole size of kv.

    @staticmethod
    def forward(
        ctx: Any, q_BSHd: Tensor, kv_BSHd: Tensor, k_rope_BSR: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        q, k = torch.ops.lightning_moe.rotate_queries_keys(q_BSHd, kv_BSHd, k_rope_BSR, cos, sin)
        return q, k, kv_BSHd[..., q_BSHd.shape[-1] - k_rope_BSR.shape[-1] :]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        grad_q, grad_kv, grad_k_rope = torch.ops.lightning_moe.rotate_queries_keys_backward(*grads, cos, sin)
        return grad_q, grad_kv, grad_k_rope, None, None


def _has_kernels(rotation: Rotation, *tensors: Tensor) -> bool:
    dtype = tensors[0].dtype
    return (
        tensors[0].device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16, torch.float32)
        and all(t.dtype == dtype for t in tensors)
        and rotation.cos.dtype == rotation.sin.dtype == torch.float32
    )


@torch.library.custom_op("lightning_moe::rotate_queries_keys", mutates_args=())
def _rotate_queries_keys(
    q_BSHd: Tensor, kv_BSHd: Tensor, k_rope_BSR: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    rotation = Rotation(cos, sin)
    if _has_kernels(rotation, q_BSHd, kv_BSHd, k_rope_BSR):
        from lightning_moe.models.deepseek_v3.query_key_kernel import rotate_kernel

        return rotate_kernel(q_BSHd, kv_BSHd, k_rope_BSR, cos, sin)
    return rotate_plainly(q_BSHd, kv_BSHd, k_rope_BSR, rotation)


@_rotate_queries_keys.register_fake
def _(q_BSHd: Tensor, kv_BSHd: Tensor, k_rope_BSR: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(kv_BSHd.dtype, k_rope_BSR.dtype)
    return q_BSHd.new_empty(q_BSHd.shape), q_BSHd.new_empty(q_BSHd.shape, dtype=dtype)


def rotate_plainly(q_BSHd: Tensor, kv_BSHd: Tensor, k_rope_BSR: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """What the kernel computes, in differentiable operations: queries and keys, contiguous."""
    rope = k_rope_BSR.shape[-1]
    nope = q_BSHd.shape[-1] - rope
    q_nope, q_rope = q_BSHd.split([nope, rope], dim=-1)
    k_rope = rotate(k_rope_BSR.unsqueeze(2), rotation).expand(-1, -1, q_BSHd.shape[2], -1)
    q = torch.cat((q_nope, rotate(q_rope, rotation)), dim=-1)
    k = torch.cat((kv_BSHd[..., :nope], k_rope), dim=-1)
    return q.contiguous(), k.contiguous()


@torch.library.custom_op("lightning_moe::rotate_queries_keys_backward", mutates_args=())
def _rotate_queries_keys_backward(
    grad_q_BSHd: Tensor, grad_k_BSHd: Tensor, grad_v_BSHV: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the queries, of keys and values side by side, and of the rotary key."""
    if _has_kernels(Rotation(cos, sin), grad_q_BSHd, grad_k_BSHd, grad_v_BSHV):
        from lightning_moe.models.deepseek_v3.query_key_kernel import rotate_backward_kernel

        return rotate_backward_kernel(grad_q_BSHd, grad_k_BSHd, grad_v_BSHV, cos, sin)
    rope = 2 * cos.shape[-1]
    nope = grad_q_BSHd.shape[-1] - rope
    back = Rotation(cos, -sin)
    grad_q_nope, grad_q_rope = grad_q_BSHd.split([nope, rope], dim=-1)
    grad_k_nope, grad_k_rope = grad_k_BSHd.split([nope, rope], dim=-1)
    grad_q = torch.cat((grad_q_nope, rotate(grad_q_rope, back)), dim=-1)
    grad_kv = torch.cat((grad_k_nope.to(grad_v_BSHV.dtype), grad_v_BSHV), dim=-1)
    grad_k_rope = rotate(grad_k_rope.to(cos.dtype).sum(dim=2, keepdim=True), back).squeeze(2)
    return grad_q.contiguous(), grad_kv.contiguous(), grad_k_rope.to(grad_k_BSHd.dtype).contiguous()


@_rotate_queries_keys_backward.register_fake
def _(
    grad_q_BSHd: Tensor, grad_k_BSHd: Tensor, grad_v_BSHV: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    batch, sequence, heads, dim = grad_q_BSHd.shape
    rope = 2 * cos.shape[-1]
    return (
        grad_q_BSHd.new_empty(grad_q_BSHd.shape),
        grad_v_BSHV.new_empty(batch, sequence, heads, dim - rope + grad_v_BSHV.shape[-1]),
        grad_k_BSHd.new_empty(batch, sequence, rope),
    )
