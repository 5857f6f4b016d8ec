"""Routing of bfloat16 tokens in a few kernels: one operator from tokens to chosen experts, with its backward.

Shapes: ``T`` tokens, ``D`` hidden size, ``E`` experts, ``K`` experts per token.
"""

from typing import Any

import torch
from torch import Tensor

from lightning_moe.moe.gate_mm import gate_gradients, gate_products


@torch.library.custom_op("lightning_moe::route", mutates_args=())
def route(
    x_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor,
    valid_T: Tensor | None,
    top_k: int,
    n_group: int,
    topk_group: int,
    sigmoid: bool,
    top2: bool,
    normalised: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """What :meth:`Router.forward <lightning_moe.moe.router.Router.forward>` computes; where scores are equal, the lower
    expert is chosen. There is no second derivative.

    Args:
        x_TD: Tokens, bfloat16.
        weight_ED: Weight of the gate, float32.
        bias_E: Selection bias, float32.
        valid_T: Bool; tokens that are False go nowhere. ``None`` when all are valid.
        top_k: Experts ``K`` per token.
        n_group: Groups of experts.
        topk_group: Groups that a token may use.
        sigmoid: Whether scores are sigmoids of the logits, and not their softmax.
        top2: Whether a group's score is the sum of its two best experts, and not its best one.
        normalised: Whether the chosen scores are divided by their sum.
        scale: Factor on the weights.

    Returns:
        Scores ``(T, E)`` float32, experts ``(T, K)`` int64, weights ``(T, K)`` float32.
    """
    from lightning_moe.moe.router_kernel import router_kernel

    return router_kernel(
        gate_products(x_TD, weight_ED),
        bias_E.contiguous(),
        valid_T,
        top_k=top_k,
        n_group=n_group,
        topk_group=topk_group,
        sigmoid=sigmoid,
        top2=top2,
        normalised=normalised,
        scale=scale,
    )


@route.register_fake
def _(
    x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor, valid_T: Tensor | None, top_k: int, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    tokens = x_TD.shape[0]
    scores_TE = weight_ED.new_empty(tokens, weight_ED.shape[0])
    weights_TK = weight_ED.new_empty(tokens, top_k)
    return scores_TE, torch.empty_like(weights_TK, dtype=torch.int64), weights_TK


@torch.library.custom_op("lightning_moe::route_backward", mutates_args=())
def _route_backward(
    grad_scores_TE: Tensor | None,
    grad_weights_TK: Tensor | None,
    x_TD: Tensor,
    weight_ED: Tensor,
    scores_TE: Tensor,
    indices_TK: Tensor,
    sigmoid: bool,
    normalised: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of the tokens and of the gate's weight."""
    from lightning_moe.moe.router_kernel import router_backward_kernel

    grad_T4E = router_backward_kernel(
        None if grad_scores_TE is None else grad_scores_TE.contiguous(),
        None if grad_weights_TK is None else grad_weights_TK.contiguous(),
        scores_TE,
        indices_TK,
        sigmoid=sigmoid,
        normalised=normalised,
        scale=scale,
    )
    return gate_gradients(grad_T4E, x_TD, weight_ED)


@_route_backward.register_fake
def _(
    grad_scores_TE: Tensor | None, grad_weights_TK: Tensor | None, x_TD: Tensor, weight_ED: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return x_TD.new_empty(x_TD.shape), weight_ED.new_empty(weight_ED.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x_TD, weight_ED, *_ = inputs
    scores_TE, indices_TK, _weights_TK = output
    ctx.save_for_backward(x_TD, weight_ED, scores_TE, indices_TK)
    *_, sigmoid, _top2, normalised, scale = inputs
    ctx.settings = sigmoid, normalised, scale
    ctx.set_materialize_grads(False)  # without a balance loss, the scores have no gradient to read


def _backward(
    ctx: Any, grad_scores_TE: Tensor | None, grad_indices_TK: None, grad_weights_TK: Tensor | None
) -> tuple[Tensor | None, ...]:
    grad_x, grad_weight = torch.ops.lightning_moe.route_backward(
        grad_scores_TE, grad_weights_TK, *ctx.saved_tensors, *ctx.settings
    )
    return grad_x, grad_weight, *[None] * 9


route.register_autograd(_backward, setup_context=_setup_context)
