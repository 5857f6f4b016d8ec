"""Triton kernels that rotate queries and assemble keys of latent attention, and their backward: one pass each way.

Shapes: ``B`` batch, ``S`` sequence, ``H`` heads, ``N`` dimensions without position, ``R`` rotary dimensions, ``P``
pairs of them, ``V`` value dimensions, ``d`` = N + R.
"""

import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048


@triton.jit
def _rotate_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    q_ptr,
    kv_ptr,
    k_rope_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    sequence,
    heads,
    q_stride_b,
    q_stride_s,
    q_stride_h,
    kv_stride_b,
    kv_stride_s,
    kv_stride_h,
    k_rope_stride_b,
    k_rope_stride_s,
    cos_stride_b,
    cos_stride_s,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    NOPE_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    batch, position = token // sequence, token % sequence
    # In 64 bits: a head's stride may be that of a whole sequence.
    head = (tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)).to(tl.int64)[:, None]
    head_inside = head < heads
    nope = tl.arange(0, NOPE_BLOCK)[None, :]
    nope_mask = head_inside & (nope < NOPE)
    rope = tl.arange(0, ROPE_BLOCK)
    rope_mask = head_inside & (rope[None, :] < ROPE)
    pair = tl.arange(0, ROPE_BLOCK // 2)
    pair_mask = pair < ROPE // 2

    cos_start = batch * cos_stride_b + position * cos_stride_s
    cos = tl.load(cos_ptr + cos_start + pair, mask=pair_mask, other=0.0)
    sin = tl.load(sin_ptr + cos_start + pair, mask=pair_mask, other=0.0)
    q_start_ptr = q_ptr + batch * q_stride_b + position * q_stride_s + head * q_stride_h
    kv_start_ptr = kv_ptr + batch * kv_stride_b + position * kv_stride_s + head * kv_stride_h
    k_rope_start_ptr = k_rope_ptr + batch * k_rope_stride_b + position * k_rope_stride_s
    q_nope = tl.load(q_start_ptr + nope, mask=nope_mask)
    k_nope = tl.load(kv_start_ptr + nope, mask=nope_mask)
    q_rope = tl.load(q_start_ptr + NOPE + rope[None, :], mask=rope_mask, other=0.0).to(tl.float32)
    k_rope = tl.load(k_rope_start_ptr + rope, mask=rope < ROPE, other=0.0).to(tl.float32)

    even, odd = tl.split(tl.reshape(q_rope, (HEADS_BLOCK, ROPE_BLOCK // 2, 2)))
    q_even = even * cos[None, :] - odd * sin[None, :]
    q_odd = even * sin[None, :] + odd * cos[None, :]
    q_rotated = tl.reshape(tl.join(q_even, q_odd), (HEADS_BLOCK, ROPE_BLOCK))
    even, odd = tl.split(tl.reshape(k_rope, (ROPE_BLOCK // 2, 2)))
    k_even = even * cos - odd * sin
    k_odd = even * sin + odd * cos
    k_rotated = tl.reshape(tl.join(k_even, k_odd), (1, ROPE_BLOCK))
    k_rotated = tl.broadcast_to(k_rotated, (HEADS_BLOCK, ROPE_BLOCK))

    out = (token * heads + head) * (NOPE + ROPE)
    element = q_out_ptr.dtype.element_ty
    tl.store(q_out_ptr + out + nope, q_nope, mask=nope_mask)
    tl.store(k_out_ptr + out + nope, k_nope, mask=nope_mask)
    tl.store(q_out_ptr + out + NOPE + rope[None, :], q_rotated.to(element), mask=rope_mask)
    tl.store(k_out_ptr + out + NOPE + rope[None, :], k_rotated.to(element), mask=rope_mask)


def rotate_kernel(
    q_BSHd: Tensor, kv_BSHd: Tensor, k_rope_BSR: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Queries with their last dimensions rotated, and keys from their parts; rotated in float32.

    Args:
        q_BSHd: Queries; dense in the last dimension only, like the next two.
        kv_BSHd: Keys without position and values side by side ``(B, S, H, N + V)``.
        k_rope_BSR: Rotary key of all heads.
        cos: Cosines ``(S, P)`` or ``(B, S, P)``, float32.
        sin: Sines, likewise.

    Returns:
        Queries and keys, contiguous ``(B, S, H, N + R)``.
    """
    batch, sequence, heads, dim = q_BSHd.shape
    rope = k_rope_BSR.shape[-1]
    q_out, k_out = (q_BSHd.new_empty(batch, sequence, heads, dim) for _ in range(2))
    cos, sin = (t.contiguous().expand(batch, sequence, rope // 2) for t in (cos, sin))
    q_BSHd, kv_BSHd, k_rope_BSR = (_dense_in_last(t) for t in (q_BSHd, kv_BSHd, k_rope_BSR))
    if q_out.numel():
        blocks = _blocks(dim - rope, rope, 1, heads)
        _rotate_kernel[(batch * sequence, triton.cdiv(heads, blocks["HEADS_BLOCK"]))](
            q_BSHd,
            kv_BSHd,
            k_rope_BSR,
            cos,
            sin,
            q_out,
            k_out,
            sequence,
            heads,
            *q_BSHd.stride()[:3],
            *kv_BSHd.stride()[:3],
            *k_rope_BSR.stride()[:2],
            *cos.stride()[:2],
            NOPE=dim - rope,
            ROPE=rope,
            NOPE_BLOCK=blocks["NOPE_BLOCK"],
            ROPE_BLOCK=blocks["ROPE_BLOCK"],
            HEADS_BLOCK=blocks["HEADS_BLOCK"],
        )
    return q_out, k_out


@triton.jit
def _rotate_backward_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    grad_q_ptr,
    grad_k_ptr,
    grad_v_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    kv_out_ptr,
    k_rope_out_ptr,
    sequence,
    heads,
    q_stride_b,
    q_stride_s,
    q_stride_h,
    q_stride_d,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    k_stride_d,
    v_stride_b,
    v_stride_s,
    v_stride_h,
    v_stride_d,
    cos_stride_b,
    cos_stride_s,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    NOPE_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    batch, position = token // sequence, token % sequence
    nope = tl.arange(0, NOPE_BLOCK)[None, :]
    rope = tl.arange(0, ROPE_BLOCK)[None, :]
    value = tl.arange(0, VALUE_BLOCK)[None, :]
    pair = tl.arange(0, ROPE_BLOCK // 2)
    cos_start = batch * cos_stride_b + position * cos_stride_s
    cos = tl.load(cos_ptr + cos_start + pair, mask=pair < ROPE // 2, other=0.0)
    sin = tl.load(sin_ptr + cos_start + pair, mask=pair < ROPE // 2, other=0.0)
    q_start_ptr = grad_q_ptr + batch * q_stride_b + position * q_stride_s
    k_start_ptr = grad_k_ptr + batch * k_stride_b + position * k_stride_s
    v_start_ptr = grad_v_ptr + batch * v_stride_b + position * v_stride_s

    total = tl.zeros((HEADS_BLOCK, ROPE_BLOCK), dtype=tl.float32)
    for first in range(0, heads, HEADS_BLOCK):
        head = (first + tl.arange(0, HEADS_BLOCK)).to(tl.int64)[:, None]
        head_inside = head < heads
        nope_mask = head_inside & (nope < NOPE)
        rope_mask = head_inside & (rope < ROPE)
        value_mask = head_inside & (value < VALUE)
        q_rows_ptr = q_start_ptr + head * q_stride_h
        k_rows_ptr = k_start_ptr + head * k_stride_h
        v_rows_ptr = v_start_ptr + head * v_stride_h
        q_nope = tl.load(q_rows_ptr + nope * q_stride_d, mask=nope_mask)
        k_nope = tl.load(k_rows_ptr + nope * k_stride_d, mask=nope_mask)
        v = tl.load(v_rows_ptr + value * v_stride_d, mask=value_mask)
        q_rope = tl.load(q_rows_ptr + (NOPE + rope) * q_stride_d, mask=rope_mask, other=0.0).to(tl.float32)
        total += tl.load(k_rows_ptr + (NOPE + rope) * k_stride_d, mask=rope_mask, other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(q_rope, (HEADS_BLOCK, ROPE_BLOCK // 2, 2)))
        q_even = even * cos[None, :] + odd * sin[None, :]
        q_odd = odd * cos[None, :] - even * sin[None, :]
        q_rotated = tl.reshape(tl.join(q_even, q_odd), (HEADS_BLOCK, ROPE_BLOCK))
        q_out = (token * heads + head) * (NOPE + ROPE)
        kv_out = (token * heads + head) * (NOPE + VALUE)
        tl.store(q_out_ptr + q_out + nope, q_nope, mask=nope_mask)
        tl.store(q_out_ptr + q_out + NOPE + rope, q_rotated.to(q_out_ptr.dtype.element_ty), mask=rope_mask)
        tl.store(kv_out_ptr + kv_out + nope, k_nope, mask=nope_mask)
        tl.store(kv_out_ptr + kv_out + NOPE + value, v, mask=value_mask)

    even, odd = tl.split(tl.reshape(tl.sum(total, axis=0), (ROPE_BLOCK // 2, 2)))
    k_even = even * cos + odd * sin
    k_odd = odd * cos - even * sin
    k_rope = tl.reshape(tl.join(k_even, k_odd), (1, ROPE_BLOCK)).to(k_rope_out_ptr.dtype.element_ty)
    tl.store(k_rope_out_ptr + token * ROPE + rope, k_rope, mask=rope < ROPE)


def rotate_backward_kernel(
    grad_q_BSHd: Tensor, grad_k_BSHd: Tensor, grad_v_BSHV: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of :func:`rotate_kernel` and of the view that the values are.

    Args:
        grad_q_BSHd: Gradient of the rotated queries; with any strides, like the next two.
        grad_k_BSHd: Gradient of the keys.
        grad_v_BSHV: Gradient of the values.
        cos: Cosines ``(S, P)`` or ``(B, S, P)``, float32.
        sin: Sines, likewise.

    Returns:
        Gradients of the queries, of keys and values side by side, and of the rotary key, which is summed over heads in
        float32; contiguous.
    """
    batch, sequence, heads, dim = grad_q_BSHd.shape
    pairs, value = cos.shape[-1], grad_v_BSHV.shape[-1]
    nope = dim - 2 * pairs
    grad_q = grad_q_BSHd.new_empty(batch, sequence, heads, dim)
    grad_kv = grad_q_BSHd.new_empty(batch, sequence, heads, nope + value)
    grad_k_rope = grad_q_BSHd.new_empty(batch, sequence, 2 * pairs)
    cos, sin = (t.contiguous().expand(batch, sequence, pairs) for t in (cos, sin))
    if grad_q.numel():
        blocks = _blocks(nope, 2 * pairs, value, heads)
        _rotate_backward_kernel[(batch * sequence,)](
            grad_q_BSHd,
            grad_k_BSHd,
            grad_v_BSHV,
            cos,
            sin,
            grad_q,
            grad_kv,
            grad_k_rope,
            sequence,
            heads,
            *grad_q_BSHd.stride(),
            *grad_k_BSHd.stride(),
            *grad_v_BSHV.stride(),
            *cos.stride()[:2],
            NOPE=nope,
            ROPE=2 * pairs,
            VALUE=value,
            NOPE_BLOCK=blocks["NOPE_BLOCK"],
            ROPE_BLOCK=blocks["ROPE_BLOCK"],
            VALUE_BLOCK=blocks["VALUE_BLOCK"],
            HEADS_BLOCK=blocks["HEADS_BLOCK"],
        )
    return grad_q, grad_kv, grad_k_rope


def _dense_in_last(values: Tensor) -> Tensor:
    return values if values.stride(-1) == 1 else values.contiguous()


def _blocks(nope: int, rope: int, value: int, heads: int) -> dict[str, int]:
    """Powers of two that hold the dimensions, and as many heads as make a tile."""
    dims = {
        "NOPE_BLOCK": triton.next_power_of_2(nope),
        "ROPE_BLOCK": triton.next_power_of_2(rope),
        "VALUE_BLOCK": triton.next_power_of_2(value),
    }
    widest = max(dims.values())
    return {**dims, "HEADS_BLOCK": min(triton.next_power_of_2(heads), max(_TILE // widest, 1))}
