"""Triton kernel of cross-entropy on logits: one pass for the loss, one that puts the gradient in the logits' place.

Shapes: ``T`` tokens, ``V`` vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _cross_entropy_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    logits_ptr,
    labels_ptr,
    losses_ptr,
    predictions_ptr,
    vocabulary,
    row_stride,
    WITH_GRADIENT: tl.constexpr,
    WITH_PREDICTIONS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    valid = (label >= 0) & (label < vocabulary)
    start_ptr = logits_ptr + row * row_stride
    label_logit = tl.load(start_ptr + tl.where(valid, label, 0)).to(tl.float32)

    largest = float("-inf")
    total = 0.0
    prediction = 0
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        logits = tl.load(start_ptr + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
        block_largest = tl.max(logits, axis=0)
        if WITH_PREDICTIONS:
            here = start + tl.argmax(logits, axis=0)
            prediction = tl.where(block_largest > largest, here, prediction)
        new_largest = tl.maximum(largest, block_largest)
        total = total * tl.exp(largest - new_largest) + tl.sum(tl.exp(logits - new_largest), axis=0)
        largest = new_largest
    # A label that no row of the head belongs to must not pass for an ignored one.
    ignored = tl.where(label == -100, 0.0, float("nan"))
    tl.store(losses_ptr + row, tl.where(valid, tl.log(total) + largest - label_logit, ignored))
    if WITH_PREDICTIONS:
        tl.store(predictions_ptr + row, prediction)

    if WITH_GRADIENT:
        for start in range(0, vocabulary, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < vocabulary
            logits = tl.load(start_ptr + columns, mask=inside, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(logits - largest) / total - tl.where(columns == label, 1.0, 0.0)
            # `where` and not a product: an ignored position may hold anything.
            gradient = tl.where(valid, gradient, 0.0)
            tl.store(start_ptr + columns, gradient.to(logits_ptr.dtype.element_ty), mask=inside)


def cross_entropy_in_place(
    logits_TV: Tensor, labels_T: Tensor, *, with_gradient: bool, predictions_T: Tensor | None
) -> Tensor:
    """Computes the loss of each token, and turns the logits into the gradient of their sum.

    Args:
        logits_TV: Logits, contiguous; overwritten when a gradient is wanted.
        labels_T: Targets, int64; -100 is ignored: its loss and gradient are 0. The loss of any other label that is
            not in the vocabulary is NaN.
        with_gradient: Whether to overwrite the logits with the gradient.
        predictions_T: Filled with the most likely token, int64; ``None`` when it is not wanted.

    Returns:
        Losses ``(T,)``, float32.
    """
    tokens, vocabulary = logits_TV.shape
    losses_T = torch.empty(tokens, dtype=torch.float32, device=logits_TV.device)
    if tokens:
        _cross_entropy_kernel[(tokens,)](
            logits_TV,
            labels_T,
            losses_T,
            losses_T if predictions_T is None else predictions_T,
            vocabulary,
            logits_TV.stride(0),
            WITH_GRADIENT=with_gradient,
            WITH_PREDICTIONS=predictions_T is not None,
            BLOCK=_BLOCK,
            num_warps=8,
        )
    return losses_T
