from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_moe.moe.router import Router
from tests.tensors import grad


def make(n_routed_experts: int = 16, top_k: int = 4, hidden_size: int = 24, **options: Any) -> Router:
    torch.manual_seed(0)
    return Router(hidden_size, n_routed_experts, top_k, initializer_range=0.3, **options)


def inputs(count: int = 64, hidden_size: int = 24, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, hidden_size, generator=torch.Generator().manual_seed(1)).to(dtype)


def brute_force(router: Router, x: Tensor) -> list[dict[int, float]]:
    """Experts and weights of each token, written as the paper has them, with Python's own sort."""
    size = router.n_routed_experts // router.n_group
    result = []
    for token in x.double():
        logits = router.weight.double() @ token
        scores = logits.sigmoid() if router.scoring_func == "sigmoid" else logits.softmax(0)
        choice = (scores + router.e_score_correction_bias.double()).tolist()
        groups = [sorted(choice[g * size : (g + 1) * size], reverse=True) for g in range(router.n_group)]
        group_scores = [g[0] + g[1] if router.group_score == "top2" else g[0] for g in groups]
        kept = sorted(range(router.n_group), key=lambda g: -group_scores[g])[: router.topk_group]
        candidates = [e for e in range(router.n_routed_experts) if e // size in kept]
        chosen = sorted(candidates, key=lambda e: -choice[e])[: router.num_experts_per_tok]
        weights = {e: scores[e].item() for e in chosen}
        if router.norm_topk_prob:
            total = sum(weights.values())
            weights = {e: w / total for e, w in weights.items()}
        result.append({e: w * router.routed_scaling_factor for e, w in weights.items()})
    return result


@pytest.mark.parametrize("bias_mean", [0.0, -1.0, 5.0])
@pytest.mark.parametrize(
    "options",
    [
        {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
        {"n_group": 8, "topk_group": 2},
        {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446},
        {"n_group": 4, "topk_group": 4},
        {"norm_topk_prob": False},
        {"scoring_func": "softmax", "norm_topk_prob": False},
        {"scoring_func": "softmax", "n_group": 4, "topk_group": 2, "group_score": "max", "norm_topk_prob": False},
    ],
    ids=str,
)
def test_against_brute_force(options: dict[str, Any], bias_mean: float) -> None:
    router = make(**options)
    router.e_score_correction_bias.normal_(bias_mean, 0.3, generator=torch.Generator().manual_seed(2))
    x = inputs()
    plan = router(x)
    assert plan.all_valid
    assert plan.indices_TK.dtype == torch.int64
    for token, expected in enumerate(brute_force(router, x)):
        actual = dict(zip(plan.indices_TK[token].tolist(), plan.weights_TK[token].tolist(), strict=True))
        assert actual == pytest.approx(expected, abs=1e-6), token


def test_experts_stay_within_the_chosen_groups_with_negative_biases() -> None:
    router = make(n_group=4, topk_group=2)
    router.e_score_correction_bias.normal_(-1.0, 0.3, generator=torch.Generator().manual_seed(2))
    groups = router(inputs(256)).indices_TK // 4
    assert max(len(set(row)) for row in groups.tolist()) == 2


@pytest.mark.parametrize("offset", [-10.0, -1.0, 3.0])
def test_common_offset_of_the_bias_changes_nothing(offset: float) -> None:
    router = make(n_group=4, topk_group=2)
    before = router(inputs())
    router.e_score_correction_bias.fill_(offset)
    after = router(inputs())
    assert torch.equal(before.indices_TK.sort().values, after.indices_TK.sort().values)


def test_bias_changes_the_choice_but_not_the_weights() -> None:
    router = make(norm_topk_prob=False)
    router.e_score_correction_bias[5] = 10.0
    plan = router(inputs())
    assert (plan.indices_TK == 5).any(dim=1).all()
    assert torch.equal(plan.weights_TK, plan.scores_TE.gather(1, plan.indices_TK))
    assert plan.scores_TE.max() <= 1


def test_weights_are_normalised_then_scaled() -> None:
    plan = make(routed_scaling_factor=2.5)(inputs())
    torch.testing.assert_close(plan.weights_TK.sum(dim=1), torch.full((64,), 2.5))


def test_invalid_tokens_go_nowhere_and_change_nothing_else() -> None:
    router = make(n_group=4, topk_group=2)
    valid = torch.arange(64) % 4 != 1
    plan, full = router(inputs(), valid), router(inputs())
    assert not plan.all_valid
    assert (plan.indices_TK[~valid] == -1).all()
    assert (plan.weights_TK[~valid] == 0).all()
    assert torch.equal(plan.indices_TK[valid], full.indices_TK[valid])
    assert torch.equal(plan.weights_TK[valid], full.weights_TK[valid])


def test_gradients_reach_weight_and_input_but_not_the_bias() -> None:
    router = make(n_group=4, topk_group=2)
    x = inputs().requires_grad_()
    plan = router(x)
    plan.weights_TK.square().sum().backward()
    assert grad(router.weight).abs().sum() > 0
    assert grad(x).abs().sum() > 0
    assert not router.e_score_correction_bias.requires_grad


@pytest.mark.parametrize("cast", ["to", "bfloat16", "half", "to_then_autocast"])
def test_float32_inside_forward_whatever_the_model_is_cast_to(cast: str) -> None:
    reference = make(n_group=4, topk_group=2)
    reference.e_score_correction_bias.normal_(0, 0.3, generator=torch.Generator().manual_seed(2))
    router = make(n_group=4, topk_group=2)
    router.load_state_dict(reference.state_dict())
    model = torch.nn.Sequential(router)
    model = {"bfloat16": model.bfloat16, "half": model.half}.get(cast, lambda: model.to(torch.bfloat16))()
    low = torch.float16 if cast == "half" else torch.bfloat16
    x = inputs(dtype=low)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast == "to_then_autocast"):
        plan = model(x)
    assert router.weight.dtype == router.e_score_correction_bias.dtype == torch.float32
    assert plan.weights_TK.dtype == plan.scores_TE.dtype == torch.float32
    expected = reference(x.float())
    assert torch.equal(plan.scores_TE, expected.scores_TE)
    assert torch.equal(plan.indices_TK, expected.indices_TK)


def test_tensors_that_are_assigned_keep_float32() -> None:
    state = {name: tensor.bfloat16() for name, tensor in make().state_dict().items()}
    with torch.device("meta"):
        router = make()
    router.load_state_dict(state, assign=True)
    assert router.weight.dtype == router.e_score_correction_bias.dtype == torch.float32
    assert torch.equal(router.weight.detach(), state["weight"].float())
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}  # what was given is as it was


def test_bias_takes_a_thousand_small_steps_after_a_cast() -> None:
    router = make().to(torch.bfloat16)
    router.e_score_correction_bias.fill_(1.0)
    for _ in range(1000):
        router.e_score_correction_bias.add_(1e-3)
    # In bfloat16 it would stay at 1; float32 rounds each of the steps.
    torch.testing.assert_close(router.e_score_correction_bias, torch.full((16,), 2.0), atol=1e-4, rtol=0)


def test_float64_model_routes_in_float64() -> None:
    router = make().double()
    plan = router(inputs(dtype=torch.float64))
    assert plan.weights_TK.dtype == plan.scores_TE.dtype == router.e_score_correction_bias.dtype == torch.float64


def test_bias_is_saved_and_is_no_parameter() -> None:
    router = make()
    assert set(router.state_dict()) == {"weight", "e_score_correction_bias"}
    assert [name for name, _ in router.named_parameters()] == ["weight"]


def test_no_tokens() -> None:
    plan = make(n_group=4, topk_group=2)(inputs(0))
    assert plan.indices_TK.shape == plan.weights_TK.shape == (0, 4)
