"""The router of a MoE layer: which experts a token takes, and with which weights.

Shapes: ``T`` tokens, ``D`` hidden size, ``E`` experts, ``K`` experts per token, ``G`` groups of experts.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_moe.kernels import has_kernels
from lightning_moe.moe.gate_mm import gate_mm
from lightning_moe.moe.route import route


class RoutingPlan(NamedTuple):
    """What the router decides for a batch of tokens.

    Args:
        indices_TK: Chosen experts, int64; -1 for a token that goes nowhere.
        weights_TK: Weights of the chosen experts, at least float32, differentiable; 0 where the index is -1.
        scores_TE: Scores of all experts, at least float32, differentiable.
        all_valid: Whether it is known on the host that no index is -1, which saves masking.
    """

    indices_TK: Tensor
    weights_TK: Tensor
    scores_TE: Tensor
    all_valid: bool


class Router(nn.Module):
    """Group-limited top-k gate with a selection bias (DeepSeek-V3 report, equations 12 to 16).

    The bias takes part in choosing experts only, never in their weights. Weight, bias and scores are at least float32
    whatever the rest of the model is cast to: a bfloat16 gate chooses other experts for some tokens, and bias updates
    of 0.001 vanish in bfloat16.

    Args:
        hidden_size: Width ``D`` of a token.
        n_routed_experts: Experts ``E``.
        num_experts_per_tok: Experts ``K`` per token.
        n_group: Groups ``G`` of experts; 1 for none.
        topk_group: Groups that a token may use.
        scoring_func: ``"sigmoid"`` or ``"softmax"``.
        group_score: A group's score: the sum of its two best experts (``"top2"``) or its best one (``"max"``).
        norm_topk_prob: Whether the chosen scores are divided by their sum.
        routed_scaling_factor: Factor on the weights.
        initializer_range: Standard deviation of the initial weight.
    """

    weight: Tensor
    e_score_correction_bias: Tensor

    def __init__(
        self,
        hidden_size: int,
        n_routed_experts: int,
        num_experts_per_tok: int,
        *,
        n_group: int = 1,
        topk_group: int = 1,
        scoring_func: Literal["sigmoid", "softmax"] = "sigmoid",
        group_score: Literal["top2", "max"] = "top2",
        norm_topk_prob: bool = True,
        routed_scaling_factor: float = 1.0,
        initializer_range: float = 0.006,
    ) -> None:
        super().__init__()
        self.n_routed_experts = n_routed_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.n_group = n_group
        self.topk_group = topk_group
        self.scoring_func = scoring_func
        self.group_score = group_score
        self.norm_topk_prob = norm_topk_prob
        self.routed_scaling_factor = routed_scaling_factor
        self.initializer_range = initializer_range
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.weight = nn.Parameter(torch.empty(n_routed_experts, hidden_size, dtype=dtype))
        self.register_buffer("e_score_correction_bias", torch.empty(n_routed_experts, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight from N(0, ``initializer_range``) and sets the bias to 0."""
        nn.init.normal_(self.weight, std=self.initializer_range)
        nn.init.zeros_(self.e_score_correction_bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # `.to(bfloat16)` and precision plugins come through here; moves are followed, narrowing casts are not.
        def apply_but_keep_precision(tensor: Tensor) -> Tensor:
            applied = fn(tensor)
            if applied.is_floating_point() and applied.element_size() < 4:
                return tensor.to(applied.device)
            return applied

        return super()._apply(apply_but_keep_precision, recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # With assign=True the tensors of the dictionary would be taken as they are.
        for name in ("weight", "e_score_correction_bias"):
            value = state_dict.get(prefix + name)
            if value is not None and value.element_size() < 4:
                state_dict[prefix + name] = value.float()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, x_TD: Tensor, valid_T: Tensor | None = None) -> RoutingPlan:
        """Chooses experts. Where scores are equal, any of them may be chosen; the kernels take the lower expert.

        Args:
            x_TD: Tokens, any floating dtype.
            valid_T: Bool; tokens that are False (padding) go nowhere. ``None`` when all are valid.
        """
        with torch.autocast(x_TD.device.type, enabled=False):
            if self._kernels_choose(x_TD):
                scores_TE, indices_TK, weights_TK = route(
                    x_TD,
                    self.weight,
                    self.e_score_correction_bias,
                    valid_T,
                    self.num_experts_per_tok,
                    self.n_group,
                    self.topk_group,
                    self.scoring_func == "sigmoid",
                    self.group_score == "top2",
                    self.norm_topk_prob,
                    self.routed_scaling_factor,
                )
                return RoutingPlan(indices_TK, weights_TK, scores_TE, all_valid=valid_T is None)
            logits_TE = gate_mm(x_TD, self.weight)
            scores_TE = logits_TE.sigmoid() if self.scoring_func == "sigmoid" else logits_TE.softmax(dim=-1)
            indices_TK = self._choose(scores_TE.detach() + self.e_score_correction_bias)
            weights_TK = scores_TE.gather(1, indices_TK)
            if self.norm_topk_prob:
                weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
            weights_TK = weights_TK * self.routed_scaling_factor
            if valid_T is not None:
                indices_TK = indices_TK.where(valid_T[:, None], -1)
                weights_TK = weights_TK.where(valid_T[:, None], 0.0)
        return RoutingPlan(indices_TK, weights_TK, scores_TE, all_valid=valid_T is None)

    def _kernels_choose(self, x_TD: Tensor) -> bool:
        if x_TD.dtype != torch.bfloat16 or not has_kernels(x_TD.device, x_TD.dtype):
            return False
        if not self.weight.dtype == self.e_score_correction_bias.dtype == torch.float32:
            return False
        # They choose as this class does; a subclass or an instance with a _choose of its own is asked instead.
        return type(self)._choose is Router._choose and "_choose" not in vars(self)

    def _choose(self, choice_TE: Tensor) -> Tensor:
        if self.topk_group < self.n_group:
            choice_TGe = choice_TE.unflatten(1, (self.n_group, -1))
            best = choice_TGe.topk(2, dim=-1).values.sum(-1) if self.group_score == "top2" else choice_TGe.amax(-1)
            chosen_groups = best.topk(self.topk_group, dim=-1, sorted=False).indices
            masked_TG = torch.ones_like(best, dtype=torch.bool).scatter(1, chosen_groups, False)
            # -inf and not 0: with negative biases a 0 would beat the experts of the chosen groups.
            choice_TE = choice_TGe.masked_fill(masked_TG[:, :, None], float("-inf")).flatten(1)
        return choice_TE.topk(self.num_experts_per_tok, dim=-1, sorted=False).indices
