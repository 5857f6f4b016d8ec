"""What the dispatcher asks of DeepEP's buffers, whatever their generation.

Shapes: ``T`` tokens of this rank, ``D`` hidden size, ``K`` experts per token, ``M`` rows that arrived, as DeepEP orders
them, ``R`` rows ordered by local expert, ``e`` local experts.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe.dispatch.fp8_rows import FP8Rows
from lightning_moe.dispatch.permute import RowPlan

Rows = Tensor | FP8Rows  # what travels: rows as they are, or rounded


class Arrival(NamedTuple):
    """What comes with the rows of a dispatch.

    Args:
        transport: The buffers they came through.
        handle: What DeepEP needs to bring rows back, or to send others the same way.
        layout: Where the rows stand: what :meth:`Transport.in_expert_order` needs.
        sent: Autograd's node of the dispatch, which keeps the handle until backward.
    """

    transport: "Transport"
    handle: Any
    layout: Any
    sent: Any


class Transport(ABC):
    """The communication buffers of one generation.

    Args:
        group: The expert-parallel group.
        num_experts: Experts of a layer, over the whole group.
        num_sms: Streaming multiprocessors for communication.
        asynchronous: Whether kernels run on DeepEP's own stream behind events, with memory of that stream, instead of
            behind the current stream as a whole.
    """

    def __init__(self, group: dist.ProcessGroup, num_experts: int, num_sms: int, asynchronous: bool) -> None:
        self.group = group
        self.num_experts = num_experts
        self.num_local_experts = num_experts // group.size()
        self.num_sms = num_sms
        self.asynchronous = asynchronous
        self.max_tokens_per_rank: int | None = None  # no limit, unless a generation has one
        self.failed = False
        self._opened: Any = None

    in_order = False  # whether rows arrive in the experts' order

    @abstractmethod
    def dispatch(
        self, x_TD: Rows, indices_TK: Tensor, weights_TK: Tensor, alignment: int
    ) -> tuple[Rows, Tensor, Any, Any]:
        """Sends tokens to the ranks of their experts.

        Args:
            x_TD: Tokens, bfloat16 or rounded, contiguous.
            indices_TK: Chosen experts, int64, contiguous; -1 for none.
            weights_TK: Their weights, float32, contiguous.
            alignment: Rows to whose multiple each expert's group is padded.

        Returns:
            The rows ``(M, D)``, rounded if they were sent so, their weights, the handle, and what
            :meth:`in_expert_order` needs of the layout.
        """

    @abstractmethod
    def in_expert_order(
        self, x_MD: Rows, weights: Tensor, layout: Any, alignment: int
    ) -> tuple[Tensor, Tensor, RowPlan]:
        """Returns rows ``(R, D)`` and weights ``(R,)`` by local expert, and where they stand.

        Rounded rows become bfloat16, without a gradient.
        """

    @abstractmethod
    def in_arrival_order(self, y_RD: Tensor, weights_R: Tensor | None, rows: RowPlan) -> Tensor:
        """Rows ``(M, D)`` as they came, times their weights where there are some; the reverse of the above."""

    @abstractmethod
    def dispatch_again(self, x_TD: Rows, handle: Any) -> Rows:
        """Sends other values the way of an earlier dispatch; returns ``(M, D)`` in the order of that dispatch."""

    @abstractmethod
    def combine(self, x_MD: Tensor, handle: Any, weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Brings rows home and sums those of each token.

        Args:
            x_MD: Rows in the order of the dispatch, bfloat16, contiguous.
            handle: That of the dispatch.
            weights: Values in the places of the weights, float32, contiguous; they are brought home too.

        Returns:
            ``(T, D)``, and ``(T, K)`` where weights were given.
        """

    @staticmethod
    @abstractmethod
    def take_apart(handle: Any) -> tuple[list[Tensor], Any]:
        """Splits a handle into its tensors and the rest."""

    @staticmethod
    @abstractmethod
    def put_together(tensors: tuple[Tensor, ...], rest: Any) -> Any:
        """The handle that was taken apart."""

    def destroy(self) -> None:
        """Frees the buffers; all ranks of the group take part."""
        with self._calling("freeing buffers"):
            self._buffer.destroy()
        self._opened = None

    @property
    def _buffer(self) -> Any:
        if self._opened is None:
            raise RuntimeError(
                "The DeepEP buffers of this forward pass were closed before its backward pass; close() and a larger "
                "prepare() belong between steps."
            )
        return self._opened

    @contextmanager
    def _calling(self, call: str) -> Iterator[None]:
        """Surrounds every call of DeepEP: its errors name the group, and deterministic mode does not stop it."""
        # In deterministic mode torch fills new tensors on one stream while kernels of another may write them already,
        # so DeepEP refuses to run. Without the filling the mode changes nothing for it.
        mode: Any = torch.utils.deterministic
        fills, mode.fill_uninitialized_memory = mode.fill_uninitialized_memory, False
        try:
            yield
        except RuntimeError as error:
            self.failed = True
            raise RuntimeError(
                f"DeepEP failed in {call} on rank {self.group.rank()} of the expert-parallel group of the global ranks "
                f"{dist.get_process_group_ranks(self.group)}. If it waited in vain, another of these ranks has died or "
                f"did not come to this call: {error}"
            ) from error
        finally:
            mode.fill_uninitialized_memory = fills

    @staticmethod
    def _received(rows: Any) -> Rows:
        return FP8Rows(*rows) if isinstance(rows, tuple) else rows

    def _wait(self, event: Any) -> None:
        """Lets the current stream wait for an asynchronous call; what it returned cannot be read before."""
        if self.asynchronous:
            event.current_stream_wait()
