"""Dispatch of rounded rows through DeepEP, and what comes back in bfloat16; for autograd.

Shapes: see :mod:`.dispatcher`; ``R`` rows in the experts' order.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe.dispatch.deep_ep.transport import Arrival, Transport
from lightning_moe.dispatch.fp8_rows import FP8Rows, expand_rows, round_rows
from lightning_moe.dispatch.permute import RowPlan, gather_rows


class SendInFP8(torch.autograd.Function):
    """Rounded tokens and routing weights to the ranks of their experts, and into the experts' order there.

    The gradients come back as they are: rounding counts as the identity. The plan of the rows is saved with the
    handle's tensors: where the region is recomputed, backward gets both of the recomputation.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weights_TK: Tensor, anchor: Tensor, indices_TK: Tensor, transport: Transport, align: int
    ) -> tuple[Tensor, Tensor, Arrival, RowPlan, FP8Rows]:
        received, weights, handle, layout = transport.dispatch(
            round_rows(x_TD), indices_TK.contiguous(), weights_TK.contiguous(), align
        )
        assert isinstance(received, FP8Rows)
        rows_RD, weights_R, rows = transport.in_expert_order(received, weights, layout, align)
        tensors, ctx.rest = transport.take_apart(handle)
        ctx.save_for_backward(rows.row_of_choice_TK, rows.choice_of_row_R, rows.offsets_E, *tensors)
        ctx.padded = rows.padded
        ctx.transport, ctx.unpacked = transport, None
        return rows_RD, weights_R, Arrival(transport, handle, layout, ctx), rows, received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        # Saved tensors of a recomputed region can be had once only, and combine may have had them.
        handle, rows = _unpack(ctx) if ctx.unpacked is None else ctx.unpacked
        ctx.unpacked = None
        if not any(ctx.needs_input_grad[:2]):
            return (None,) * 6
        grad_MD, grad_weights = grads[0], grads[1]
        if not ctx.transport.in_order:
            grad_MD, grad_weights = gather_rows(grad_MD, grad_weights, rows.row_of_choice_TK, rows.padded)
        grad_x, grad_weights = ctx.transport.combine(grad_MD.contiguous(), handle, grad_weights.contiguous())
        return grad_x, grad_weights, None, None, None, None


class ReturnForFP8(torch.autograd.Function):
    """Rows back to the ranks of their tokens, summed there; their gradients come rounded.

    It saves nothing itself, so that the recomputation of a region ends before it.
    """

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, arrival: Arrival, rows: RowPlan | None) -> Tensor:
        """Takes rows in the experts' order with their plan, or as they came without one."""
        transport = arrival.transport
        ctx.sent, ctx.transport = arrival.sent, transport
        ctx.planned = rows is not None and not transport.in_order
        partial_MD = y_RD if rows is None else transport.in_arrival_order(y_RD, None, rows)
        return transport.combine(partial_MD.contiguous(), arrival.handle)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        ctx.sent.unpacked = handle, rows = _unpack(ctx.sent)
        received = ctx.transport.dispatch_again(round_rows(grads[0]), handle)
        return expand_rows(received, torch.bfloat16, rows if ctx.planned else None)[0], None, None


def _unpack(ctx: Any) -> tuple[Any, RowPlan]:
    row_of_choice, choice_of_row, offsets, *tensors = ctx.saved_tensors
    handle = ctx.transport.put_together(tuple(tensors), ctx.rest)
    return handle, RowPlan(row_of_choice, choice_of_row, offsets, ctx.padded)
