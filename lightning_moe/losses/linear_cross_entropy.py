"""Cross-entropy of a linear head, computed in chunks of tokens so that the full logits are never held.

Shapes: ``T`` tokens, ``D`` hidden size, ``V`` vocabulary.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_moe.losses.scaling import graph_is_kept, scaled

IGNORE_INDEX = -100

# Logits of one chunk, in elements: 256 MiB of float32. On CUDA fewer and larger chunks cost less, because each adds to
# the weight's whole gradient; there they stay in the compute dtype: 1 GiB of bfloat16.
_CHUNK_ELEMENTS = {"cpu": 2**26, "cuda": 2**29}


class CrossEntropy(NamedTuple):
    """Sum of a cross-entropy and what goes with it.

    Args:
        loss: Sum over valid tokens, a scalar of at least float32.
        num_tokens: Valid tokens, int64.
        predictions_T: The most likely token at each position, int64, or ``None`` when they were not asked for.
    """

    loss: Tensor
    num_tokens: Tensor
    predictions_T: Tensor | None


def linear_cross_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    predictions: bool = False,
    chunk_tokens: int | None = None,
) -> CrossEntropy:
    """Cross-entropy of ``hidden @ weight.T`` against labels, summed over valid tokens.

    The gradients of hidden states and weight are computed in the forward pass, chunk by chunk, while the logits of the
    chunk exist; backward only scales them, in place unless the graph is retained. Logits are of the inputs' dtype,
    softmax and sum of at least float32. The weight's gradient is summed over chunks in at least float32.

    Args:
        hidden_TD: Hidden states.
        weight_VD: Weight of the head. One of another dtype than the hidden states is multiplied in theirs, and gets its
            gradient in its own, unrounded.
        labels_T: Target of each position, int64; -100 is ignored.
        predictions: Whether to return the most likely token of each position too.
        chunk_tokens: Tokens per chunk; by default as many as keep the logits of a chunk within 256 MiB on a CPU and
            1 GiB of bfloat16 on CUDA.
    """
    if torch.is_autocast_enabled(hidden_TD.device.type):
        dtype = torch.get_autocast_dtype(hidden_TD.device.type)
        hidden_TD = hidden_TD.to(dtype)
    if not torch.is_grad_enabled():
        # A Function's needs_input_grad does not know of the mode: validation would compute the weight's gradient.
        hidden_TD, weight_VD = hidden_TD.detach(), weight_VD.detach()
    if chunk_tokens is None:
        chunk_tokens = _chunk_tokens(hidden_TD.shape[0], weight_VD.shape[0], hidden_TD.device.type)
    loss, predictions_T = _LinearCrossEntropy.apply(hidden_TD, weight_VD, labels_T, predictions, chunk_tokens)
    return CrossEntropy(loss, (labels_T != IGNORE_INDEX).sum(), predictions_T)


def _chunk_tokens(tokens: int, vocabulary: int, device_type: str) -> int:
    most = max(_CHUNK_ELEMENTS.get(device_type, _CHUNK_ELEMENTS["cpu"]) // vocabulary, 1)
    chunks = max(-(-tokens // most), 1)
    if most < 128:
        return most
    # Equal chunks, in multiples that matrix units like.
    equal = -(-tokens // chunks)
    return max(-(-equal // 128) * 128, 128)


def _cross_entropy(
    logits: Tensor, labels: Tensor, with_gradient: bool, predictions: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Losses of a chunk, and the gradient of their sum in the place of the logits."""
    if logits.device.type == "cuda" and logits.dtype != torch.float64:
        from lightning_moe.losses.cross_entropy_kernel import cross_entropy_in_place

        losses = cross_entropy_in_place(logits, labels, with_gradient=with_gradient, predictions_T=predictions)
        return losses, logits
    if predictions is not None:
        torch.argmax(logits, dim=-1, out=predictions)
    dtype = logits.dtype
    logits = logits.to(torch.promote_types(dtype, torch.float32))
    valid = labels != IGNORE_INDEX
    targets = labels.where(valid, 0)[:, None]
    # One buffer turns from logits into probabilities into the gradient of the logits.
    target_logits = logits.gather(1, targets)
    largest = logits.amax(dim=-1, keepdim=True)
    logits.sub_(largest).exp_()
    sums = logits.sum(dim=-1, keepdim=True)
    # `where` and not a product: an ignored position may hold anything.
    losses = (sums.log() + largest - target_logits).squeeze(1).where(valid, 0.0)
    if with_gradient:
        logits.div_(sums).scatter_add_(1, targets, torch.full_like(sums, -1.0))
        logits.masked_fill_(~valid[:, None], 0.0)
    return losses, logits.to(dtype)


def _outer(total_VD: Tensor, grad_logits_TV: Tensor, hidden_TD: Tensor, *, add: bool) -> None:
    """Writes ``grad_logits.T @ hidden`` in the total's dtype, or adds it."""
    beta = int(add)  # 0: whatever there was is not read
    if total_VD.dtype == hidden_TD.dtype:
        total_VD.addmm_(grad_logits_TV.T, hidden_TD, beta=beta)
    elif total_VD.device.type == "cuda":
        torch.addmm(total_VD, grad_logits_TV.T, hidden_TD, out_dtype=total_VD.dtype, beta=beta, out=total_VD)
    elif add:
        total_VD += grad_logits_TV.T @ hidden_TD
    else:
        total_VD.copy_(grad_logits_TV.T @ hidden_TD)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, predictions: bool, chunk_tokens: int
    ) -> tuple[Tensor, Tensor | None]:
        hidden_grad, weight_grad = ctx.needs_input_grad[:2]
        ctx.weight_dtype = weight_VD.dtype
        weight_VD = weight_VD.to(hidden_TD.dtype)
        accurate = torch.promote_types(hidden_TD.dtype, torch.float32)
        loss = torch.zeros((), dtype=accurate, device=hidden_TD.device)
        grad_hidden_TD = torch.empty_like(hidden_TD) if hidden_grad else None
        grad_weight_VD = torch.empty_like(weight_VD, dtype=accurate) if weight_grad else None
        if grad_weight_VD is not None and hidden_TD.shape[0] == 0:
            grad_weight_VD.zero_()
        predictions_T = torch.empty_like(labels_T) if predictions else None
        for start in range(0, hidden_TD.shape[0], chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            hidden, labels = hidden_TD[chunk], labels_T[chunk]
            logits = F.linear(hidden, weight_VD)
            with_gradient = hidden_grad or weight_grad
            losses, grad_logits = _cross_entropy(
                logits, labels, with_gradient, None if predictions_T is None else predictions_T[chunk]
            )
            loss = loss + losses.sum()  # not in place: compiled by PyTorch 2.11, all gradients would be 0
            if grad_hidden_TD is not None:
                torch.mm(grad_logits, weight_VD, out=grad_hidden_TD[chunk])
            if grad_weight_VD is not None:
                _outer(grad_weight_VD, grad_logits, hidden, add=start > 0)
            del logits, grad_logits  # before the next chunk takes as much
        # Not saved tensors: the last backward scales them in place and gives them away.
        ctx.grads = (grad_hidden_TD, grad_weight_VD)
        if predictions_T is not None:
            ctx.mark_non_differentiable(predictions_T)
        return loss, predictions_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        # The gradients of forward are constants to autograd: a second derivative would lack the loss's curvature.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("linear_cross_entropy has no second derivative (create_graph=True).")
        if ctx.grads is None:
            raise RuntimeError("linear_cross_entropy computes its gradients in forward and gives them away once.")
        kept = graph_is_kept()
        grad_hidden_TD, grad_weight_VD = ctx.grads
        if not kept:
            ctx.grads = None
        if grad_hidden_TD is not None:
            grad_hidden_TD = scaled(grad_hidden_TD, grads[0], grad_hidden_TD.dtype, in_place=not kept)
        if grad_weight_VD is not None:
            grad_weight_VD = scaled(grad_weight_VD, grads[0], ctx.weight_dtype, in_place=not kept)
        return grad_hidden_TD, grad_weight_VD, None, None, None
