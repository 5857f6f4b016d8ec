"""Triton kernels of the router: from the gate's products to chosen experts and weights, and back.

A program takes a block of tokens with a slot for each expert. Groups have slots in number of a power of two, so that a
group is a piece of the slots; what is over belongs to no expert and is never chosen.

Shapes: ``T`` tokens, ``D`` hidden size, ``E`` experts, ``K`` experts per token, ``G`` groups of experts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_CELLS = 512  # tokens times slots of a program: one warp's, which finds the best of a token without others
_BACKWARD_CELLS = 2048
_BLOCK = 1024
# Keys of what cannot be chosen (any more), and of a score of minus infinity; a NaN's key is the highest integer.
_NEVER: tl.constexpr = tl.constexpr(-(2**31))
_MINUS_INFINITY: tl.constexpr = tl.constexpr(-(2**31) + 2**23 - 1)
_NAN: tl.constexpr = tl.constexpr(2**31 - 1)


@triton.jit
def _keys_of(values):  # type: ignore[no-untyped-def]
    # Integers in the order of the floats, NaN above all others as in torch.topk.
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(values != values, _NAN, bits ^ ((bits >> 31) & _NAN))


@triton.jit
def _values_of(keys):  # type: ignore[no-untyped-def]
    return (keys ^ ((keys >> 31) & _NAN)).to(tl.float32, bitcast=True)


@triton.jit
def _keys_of_groups(keys, TOP2: tl.constexpr):  # type: ignore[no-untyped-def]
    # Keys of the groups' scores, of the keys (tokens, groups, slots) of their experts.
    best, place = tl.max(keys, axis=2, return_indices=True, return_indices_tie_break_left=True)
    if TOP2:
        others = tl.arange(0, keys.shape[2])[None, None, :] != place[:, :, None]
        second = tl.max(tl.where(others, keys, _NEVER), axis=2)
        best = _keys_of(_values_of(best) + _values_of(second))
    return best


@triton.jit
def _router_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    products_ptr,
    bias_ptr,
    valid_ptr,
    scores_ptr,
    indices_ptr,
    weights_ptr,
    tokens,
    scale,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_SLOTS: tl.constexpr,
    SIZE_SLOTS: tl.constexpr,
    SIGMOID: tl.constexpr,
    TOP2: tl.constexpr,
    NORMALISED: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    rows = tl.arange(0, BLOCK)
    inside = rows < tokens - tl.program_id(0) * BLOCK
    slots = tl.arange(0, GROUP_SLOTS * SIZE_SLOTS)
    SIZE: tl.constexpr = EXPERTS // GROUPS
    if GROUPS == 1 or SIZE == SIZE_SLOTS:
        experts = slots
        exists = slots < EXPERTS
    else:
        experts = slots // SIZE_SLOTS * SIZE + slots % SIZE_SLOTS
        exists = (slots // SIZE_SLOTS < GROUPS) & (slots % SIZE_SLOTS < SIZE)
    here = inside[:, None] & exists[None, :]

    parts = products_ptr + first * 3 * EXPERTS + rows[:, None] * 3 * EXPERTS + experts[None, :]
    middle = tl.load(parts, mask=here, other=0.0)
    high = tl.load(parts + EXPERTS, mask=here, other=0.0)
    low = tl.load(parts + 2 * EXPERTS, mask=here, other=0.0)
    logits = tl.where(exists[None, :], low + middle + high, float("-inf"))  # the small parts first
    if SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        exponentials = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        scores = exponentials * (1.0 / tl.sum(exponentials, axis=1))[:, None]
    tl.store(scores_ptr + first * EXPERTS + rows[:, None] * EXPERTS + experts[None, :], scores, mask=here)

    bias = tl.load(bias_ptr + experts, mask=exists, other=0.0)
    keys = tl.where(exists[None, :], _keys_of(scores + bias[None, :]), _NEVER)
    if TOP_GROUPS < GROUPS:
        groups = tl.arange(0, GROUP_SLOTS)
        group_keys = _keys_of_groups(tl.reshape(keys, (BLOCK, GROUP_SLOTS, SIZE_SLOTS)), TOP2)
        group_keys = tl.where(groups[None, :] < GROUPS, group_keys, _NEVER)
        for _ in tl.static_range(TOP_GROUPS):
            best = tl.argmax(group_keys, axis=1, tie_break_left=True)
            group_keys = tl.where(groups[None, :] == best[:, None], _NEVER, group_keys)
        left_out = (group_keys != _NEVER)[:, :, None].broadcast_to(BLOCK, GROUP_SLOTS, SIZE_SLOTS)
        left_out = tl.reshape(left_out, (BLOCK, GROUP_SLOTS * SIZE_SLOTS))
        keys = tl.where(left_out, tl.minimum(keys, _MINUS_INFINITY), keys)

    rank = tl.full((BLOCK, GROUP_SLOTS * SIZE_SLOTS), -1, dtype=tl.int32)
    for k in tl.static_range(TOP_K):
        best = tl.argmax(keys, axis=1, tie_break_left=True)
        is_best = slots[None, :] == best[:, None]
        rank = tl.where(is_best, k, rank)
        keys = tl.where(is_best, _NEVER, keys)
    chosen = rank >= 0
    factor = tl.full((BLOCK,), 1.0, dtype=tl.float32) * scale
    if NORMALISED:
        factor = scale / (tl.sum(tl.where(chosen, scores, 0.0), axis=1) + 1e-20)
    weights = scores * factor[:, None]
    indices = experts[None, :].broadcast_to(BLOCK, GROUP_SLOTS * SIZE_SLOTS)
    if MASKED:
        valid = tl.load(valid_ptr + first + rows, mask=inside, other=0) != 0
        weights = tl.where(valid[:, None], weights, 0.0)
        indices = tl.where(valid[:, None], indices, -1)
    # The slot that was chosen writes its expert, so that nothing has to be gathered.
    places = first * TOP_K + rows[:, None] * TOP_K + rank
    tl.store(indices_ptr + places, indices.to(tl.int64), mask=chosen & inside[:, None])
    tl.store(weights_ptr + places, weights, mask=chosen & inside[:, None])


def router_kernel(
    products_T3E: Tensor,
    bias_E: Tensor,
    valid_T: Tensor | None,
    *,
    top_k: int,
    n_group: int,
    topk_group: int,
    sigmoid: bool,
    top2: bool,
    normalised: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of all experts, chosen experts and their weights; the lower expert or group wins where two are equal.

    Args:
        products_T3E: Products of the tokens with the middle, high and low part of the gate's weight, float32,
            contiguous.
        bias_E: Selection bias, float32.
        valid_T: Bool; tokens that are False go nowhere. ``None`` when all are valid.
        top_k: Experts ``K`` per token.
        n_group: Groups ``G`` of experts.
        topk_group: Groups that a token may use.
        sigmoid: Whether scores are sigmoids of the logits, and not their softmax.
        top2: Whether a group's score is the sum of its two best experts, and not its best one.
        normalised: Whether the chosen scores are divided by their sum.
        scale: Factor on the weights.

    Returns:
        Scores ``(T, E)`` float32, experts ``(T, K)`` int64 by falling score, weights ``(T, K)`` float32.

    Raises:
        ValueError: There are fewer experts than are to be chosen, or groups that no choice can be made from.
    """
    tokens, _, experts = products_T3E.shape
    groups = n_group if topk_group < n_group else 1
    if top_k > experts or experts % groups or (groups > 1 and top2 and experts // groups < 2):
        raise ValueError(f"Cannot choose {top_k} of {experts} experts in {groups} groups.")
    group_slots, size_slots = triton.next_power_of_2(groups), triton.next_power_of_2(experts // groups)
    scores_TE = products_T3E.new_empty(tokens, experts)
    indices_TK = torch.empty(tokens, top_k, dtype=torch.int64, device=products_T3E.device)
    weights_TK = products_T3E.new_empty(tokens, top_k)
    if tokens:
        block = max(_CELLS // (group_slots * size_slots), 1)
        _router_kernel[(triton.cdiv(tokens, block),)](
            products_T3E,
            bias_E,
            bias_E if valid_T is None else valid_T.contiguous().view(torch.uint8),
            scores_TE,
            indices_TK,
            weights_TK,
            tokens,
            scale,
            EXPERTS=experts,
            TOP_K=top_k,
            GROUPS=groups,
            TOP_GROUPS=topk_group if groups > 1 else 1,
            GROUP_SLOTS=group_slots,
            SIZE_SLOTS=size_slots,
            SIGMOID=sigmoid,
            TOP2=top2,
            NORMALISED=normalised,
            MASKED=valid_T is not None,
            BLOCK=block,
            num_warps=1,
        )
    return scores_TE, indices_TK, weights_TK


@triton.jit
def _in_three_parts(values):  # type: ignore[no-untyped-def]
    # Bfloat16 numbers whose sum is a float32 one to the last bit.
    high = values.to(tl.bfloat16)
    rest = values - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _router_backward_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    grad_scores_ptr,
    grad_weights_ptr,
    scores_ptr,
    indices_ptr,
    parts_ptr,
    tokens,
    scale,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    OF_SCORES: tl.constexpr,
    OF_WEIGHTS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    rows = tl.arange(0, BLOCK)
    inside = rows < tokens - tl.program_id(0) * BLOCK
    experts = tl.arange(0, SLOTS)
    here = inside[:, None] & (experts < EXPERTS)[None, :]
    cells = rows[:, None] * EXPERTS + experts[None, :]
    scores = tl.load(scores_ptr + first * EXPERTS + cells, mask=here, other=0.0)
    grad = tl.zeros((BLOCK, SLOTS), dtype=tl.float32)
    if OF_WEIGHTS:
        chosen = tl.zeros((BLOCK, SLOTS), dtype=tl.int1)
        for k in tl.static_range(TOP_K):
            places = first * TOP_K + rows * TOP_K + k
            index = tl.load(indices_ptr + places, mask=inside, other=-1).to(tl.int32)
            above = tl.load(grad_weights_ptr + places, mask=inside, other=0.0)
            is_index = experts[None, :] == index[:, None]
            chosen = chosen | is_index
            grad = tl.where(is_index, above[:, None] * scale, grad)
        if NORMALISED:
            inverse = 1.0 / (tl.sum(tl.where(chosen, scores, 0.0), axis=1) + 1e-20)
            mean = tl.sum(tl.where(chosen, grad * scores, 0.0), axis=1) * inverse
            grad = tl.where(chosen, (grad - mean[:, None]) * inverse[:, None], 0.0)
    if OF_SCORES:
        grad += tl.load(grad_scores_ptr + first * EXPERTS + cells, mask=here, other=0.0)
    if SIGMOID:
        grad *= scores * (1.0 - scores)
    else:
        grad = scores * (grad - tl.sum(grad * scores, axis=1)[:, None])
    high, middle, low = _in_three_parts(grad)
    parts = parts_ptr + first * 4 * EXPERTS + rows[:, None] * 4 * EXPERTS + experts[None, :]
    tl.store(parts, low, mask=here)
    tl.store(parts + EXPERTS, middle, mask=here)
    tl.store(parts + 2 * EXPERTS, high, mask=here)
    tl.store(parts + 3 * EXPERTS, high, mask=here)


def router_backward_kernel(
    grad_scores_TE: Tensor | None,
    grad_weights_TK: Tensor | None,
    scores_TE: Tensor,
    indices_TK: Tensor,
    *,
    sigmoid: bool,
    normalised: bool,
    scale: float,
) -> Tensor:
    """Backward of :func:`router_kernel`.

    Args:
        grad_scores_TE: Gradient of the scores, contiguous, or ``None`` for 0.
        grad_weights_TK: Gradient of the weights, contiguous, or ``None`` for 0.
        scores_TE: Scores of all experts.
        indices_TK: Chosen experts.
        sigmoid: Whether scores are sigmoids of the logits, and not their softmax.
        normalised: Whether the chosen scores were divided by their sum.
        scale: Factor on the weights.

    Returns:
        Gradient of the logits in bfloat16 parts ``(T, 4, E)``: low, middle, high, and high again, as
        :func:`lightning_moe.moe.gate_mm.gate_gradients` takes them.
    """
    tokens, experts = scores_TE.shape
    parts_T4E = scores_TE.new_empty(tokens, 4, experts, dtype=torch.bfloat16)
    if tokens:
        slots = triton.next_power_of_2(experts)
        block = max(_BACKWARD_CELLS // slots, 1)
        _router_backward_kernel[(triton.cdiv(tokens, block),)](
            scores_TE if grad_scores_TE is None else grad_scores_TE,
            scores_TE if grad_weights_TK is None else grad_weights_TK,
            scores_TE,
            indices_TK,
            parts_T4E,
            tokens,
            scale,
            EXPERTS=experts,
            TOP_K=indices_TK.shape[1],
            SLOTS=slots,
            OF_SCORES=grad_scores_TE is not None,
            OF_WEIGHTS=grad_weights_TK is not None,
            SIGMOID=sigmoid,
            NORMALISED=normalised,
            BLOCK=block,
        )
    return parts_T4E


@triton.jit
def _split_router_weight_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    weight_ptr, parts_ptr, size, BLOCK: tl.constexpr
):
    cells = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = cells < size
    high, middle, low = _in_three_parts(tl.load(weight_ptr + cells, mask=inside))
    part = parts_ptr + cells
    tl.store(part, high, mask=inside)
    tl.store(part + size, middle, mask=inside)
    tl.store(part + 2 * size, high, mask=inside)
    tl.store(part + 3 * size, low, mask=inside)


def split_weight_kernel(weight_ED: Tensor) -> Tensor:
    """Bfloat16 parts ``(4, E, D)`` of a float32 weight, contiguous: high, middle, high again, and low."""
    parts_PED = weight_ED.new_empty(4, *weight_ED.shape, dtype=torch.bfloat16)
    size = weight_ED.numel()
    _split_router_weight_kernel[(triton.cdiv(size, _BLOCK),)](weight_ED, parts_PED, size, BLOCK=_BLOCK)
    return parts_PED
