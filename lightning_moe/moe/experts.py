"""The routed experts of a MoE layer.

Shapes: ``R`` routed rows on this rank (expert-major), ``D`` hidden size, ``F`` expert width, ``e`` local experts.
"""

import torch
from torch import Tensor, nn

from lightning_moe.moe.grouped_mm import grouped_mm
from lightning_moe.moe.swiglu import swiglu
from lightning_moe.moe.swiglu_mm import swiglu_grouped_mm


class GroupedExperts(nn.Module):
    """SwiGLU experts whose weights are stacked, applied to rows that are ordered by expert.

    Args:
        num_experts: Experts held here.
        hidden_size: Width ``D`` of a token.
        moe_intermediate_size: Width ``F`` of an expert.
        initializer_range: Standard deviation of the initial weights.
        first_expert: Global id of the first expert held here; initial weights are a function of the global id.
    """

    gate_up_proj: Tensor
    down_proj: Tensor

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        moe_intermediate_size: int,
        *,
        initializer_range: float = 0.006,
        first_expert: int = 0,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.initializer_range = initializer_range
        self.first_expert = first_expert
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * moe_intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, moe_intermediate_size))
        self.reset_parameters()

    def keep_slice(self, index: int, slices: int) -> None:
        """Keeps one of several equal slices of the experts, without their values.

        Args:
            index: Which slice.
            slices: How many there are; they divide the experts.
        """
        kept = self.num_experts // slices
        self.first_expert += index * kept
        self.num_experts = kept
        for name, parameter in list(self.named_parameters(recurse=False)):
            kept_part = torch.empty_like(parameter[:kept])
            setattr(self, name, nn.Parameter(kept_part, requires_grad=parameter.requires_grad))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws each expert from N(0, ``initializer_range``) with a generator of its own, seeded by its global id."""
        if self.gate_up_proj.is_meta:
            return
        base_seed = int(torch.randint(2**31, (), device="cpu"))
        for weight in (self.gate_up_proj, self.down_proj):
            for expert in range(self.num_experts):
                generator = torch.Generator(weight.device).manual_seed(base_seed + self.first_expert + expert)
                weight[expert].normal_(std=self.initializer_range, generator=generator)
            base_seed += 2**31

    def grouped_mm(self, a_RK: Tensor, b_eKN: Tensor, offsets_e: Tensor) -> Tensor:
        """The multiplication; precision plugins replace it, for both projections. See :func:`grouped_mm`."""
        return grouped_mm(a_RK, b_eKN, offsets_e)

    def forward(self, rows_RD: Tensor, offsets_e: Tensor, weights_R: Tensor | None = None) -> Tensor:
        """Applies each expert to its rows, and weights what comes out.

        Args:
            rows_RD: Rows, ordered by expert.
            offsets_e: End of each expert's rows, int32; the last one is R.
            weights_R: Routing weight of each row, at least float32; ``None`` for 1.
        """
        gate_up_proj, down_proj = (_here(w).to(rows_RD.dtype) for w in (self.gate_up_proj, self.down_proj))
        return self.compute(rows_RD, gate_up_proj, down_proj, offsets_e, weights_R)

    def compute(
        self, rows_RD: Tensor, gate_up_proj: Tensor, down_proj: Tensor, offsets_e: Tensor, weights_R: Tensor | None
    ) -> Tensor:
        """The region of expert computation, on plain tensors.

        The weights are applied before the last multiplication, which is linear in each row.
        """
        gate_up = self.grouped_mm(rows_RD, gate_up_proj.transpose(1, 2), offsets_e)
        if type(self).grouped_mm is GroupedExperts.grouped_mm and "grouped_mm" not in self.__dict__:
            return swiglu_grouped_mm(gate_up, weights_R, down_proj.transpose(1, 2), offsets_e)
        return self.grouped_mm(swiglu(gate_up, weights_R), down_proj.transpose(1, 2), offsets_e)


def _here(weight: Tensor) -> Tensor:
    """The part of a weight that this process holds: all of it, unless a strategy has spread the experts."""
    to_local = getattr(weight, "to_local", None)
    return weight if to_local is None else to_local()
