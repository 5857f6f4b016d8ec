"""The router's Triton kernels equal the plain path; run by Triton's interpreter, so that no GPU is needed."""

import pytest
import torch

from lightning_moe.moe.route import route
from tests.triton_interpreter import run_interpreted

pytest.importorskip("triton")

_SETUP = """
import torch
from lightning_moe.moe import router as router_module
from lightning_moe.moe.router import Router
from lightning_moe.moe.router_kernel import router_backward_kernel, router_kernel, split_weight_kernel

torch.manual_seed(0)
CASES = (  # tokens, experts, experts per token, settings
    (37, 64, 6, dict(scoring_func="softmax", norm_topk_prob=False)),
    (13, 256, 8, dict(n_group=8, topk_group=4, routed_scaling_factor=2.5)),
    (50, 60, 4, dict(n_group=4, topk_group=2)),
    (20, 18, 2, dict(n_group=6, topk_group=5, scoring_func="softmax", group_score="max")),
    (9, 12, 1, dict(n_group=3, topk_group=3)),
    (0, 16, 2, dict(n_group=4, topk_group=2)),
)


def make(experts, top_k, options, hidden=24):
    router = Router(hidden, experts, top_k, initializer_range=0.5, **options)
    router.e_score_correction_bias.normal_(-0.5, 0.3)
    return router


def settings(router):
    return dict(
        sigmoid=router.scoring_func == "sigmoid",
        normalised=router.norm_topk_prob,
        scale=router.routed_scaling_factor,
    )


def choose(router, products, valid=None):
    return router_kernel(
        products,
        router.e_score_correction_bias,
        valid,
        top_k=router.num_experts_per_tok,
        n_group=router.n_group,
        topk_group=router.topk_group,
        top2=router.group_score == "top2",
        **settings(router),
    )
"""

_AGAINST_FLOAT64 = (
    _SETUP
    + """
router_module.has_kernels = lambda device, dtype: dtype == torch.bfloat16
for tokens, experts, top_k, options in CASES:
    for masked in (False, True):
        router = make(experts, top_k, options)
        exact = make(experts, top_k, options).double()
        exact.load_state_dict(router.state_dict())
        valid = torch.rand(tokens) < 0.7 if masked else None
        x = torch.randn(tokens, 24).bfloat16().requires_grad_()
        x_exact = x.detach().double().requires_grad_()
        plan, wanted = router(x, valid), exact(x_exact, valid)
        assert plan.all_valid is not masked and plan.scores_TE.dtype == plan.weights_TK.dtype == torch.float32
        torch.testing.assert_close(plan.scores_TE.double(), wanted.scores_TE, rtol=1e-5, atol=1e-7)
        order, wanted_order = plan.indices_TK.argsort(stable=True), wanted.indices_TK.argsort(stable=True)
        assert plan.indices_TK.dtype == torch.int64
        assert torch.equal(plan.indices_TK.gather(1, order), wanted.indices_TK.gather(1, wanted_order))
        weights, wanted_weights = plan.weights_TK.gather(1, order), wanted.weights_TK.gather(1, wanted_order)
        torch.testing.assert_close(weights.double(), wanted_weights, rtol=1e-5, atol=1e-7)
        if masked and tokens:
            assert (plan.indices_TK[~valid] == -1).all() and not plan.weights_TK[~valid].any()
        if not masked:  # the best comes first
            choice = (plan.scores_TE + router.e_score_correction_bias).gather(1, plan.indices_TK)
            assert (choice.diff() <= 0).all()
        above_weights, above_scores = torch.randn(tokens, top_k), torch.randn(tokens, experts)
        for of_weights, of_scores in ((1, 1), (1, 0), (0, 1)):
            gradients = []
            for leaves, w, s in (
                ((x, router.weight), weights, plan.scores_TE),
                ((x_exact, exact.weight), wanted_weights, wanted.scores_TE),
            ):
                loss = of_weights * (w * above_weights).sum() if of_weights else 0
                loss = loss + (s * above_scores).sum() if of_scores else loss
                gradients.append(torch.autograd.grad(loss, leaves, retain_graph=True))
            (of_x, of_weight), (wanted_x, wanted_weight) = gradients
            assert of_x.dtype == torch.bfloat16 and of_weight.dtype == torch.float32
            torch.testing.assert_close(of_weight.double(), wanted_weight, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(of_x.double(), wanted_x, rtol=2**-7, atol=1e-4)
print("equal")
"""
)


def test_router_against_float64() -> None:
    run_interpreted(_AGAINST_FLOAT64)


_TIES = (
    _SETUP
    + """
# Equal scores everywhere: the first experts of the first groups.
products = torch.zeros(3, 3, 60)
router = make(60, 4, dict(n_group=4, topk_group=2))
router.e_score_correction_bias.zero_()
assert choose(router, products)[1].tolist() == [[0, 1, 2, 3]] * 3
router.e_score_correction_bias[0:15] = -0.25  # the second and third group are best
assert choose(router, products)[1].tolist() == [[15, 16, 17, 18]] * 3
router.e_score_correction_bias[44] = 1.0
assert choose(router, products)[1].tolist() == [[44, 15, 16, 17]] * 3
# More experts than the chosen groups have, which only a mistake asks for: still different experts.
router = make(18, 8, dict(n_group=6, topk_group=1))
for row in choose(router, torch.randn(40, 3, 18))[1].tolist():
    assert len(set(row)) == 8 and set(row) <= set(range(18))

# NaN beats all, the experts are different ones, and the NaN is seen.
for options in (dict(), dict(scoring_func="softmax"), dict(n_group=4, topk_group=2)):
    router = make(12, 4, options)
    for sign in (1.0, -1.0):
        products = torch.randn(5, 3, 12)
        products[1, 1, 7] = torch.copysign(torch.tensor(float("nan")), torch.tensor(sign))
        products[2] = float("nan")
        products[3, 1, 2] = float("inf")
        products[4] = float("-inf")
        scores, indices, weights = choose(router, products)
        logits = products.sum(1)
        expected = logits.sigmoid() if router.scoring_func == "sigmoid" else logits.softmax(1)
        torch.testing.assert_close(scores, expected, equal_nan=True)
        assert all(len(set(row)) == 4 and 0 <= min(row) and max(row) < 12 for row in indices.tolist())
        assert weights[1].isnan().any() and weights[2].isnan().all()
        if router.scoring_func == "sigmoid":
            assert indices[1, 0] == 7 and not weights[[0, 3]].isnan().any()

# A token that goes nowhere has no gradient, though its weights would divide by almost nothing.
router = make(12, 4, dict())
scores, indices, weights = choose(router, torch.full((2, 3, 12), -50.0), torch.tensor([True, False]))
parts = router_backward_kernel(None, torch.ones(2, 4), scores, indices, **settings(router))
assert parts.isfinite().all() and not parts[1].any()

# The parts of a weight are the weight to the last bit.
weight = torch.cat((torch.randn(3, 700) * 1e-3, torch.randn(3, 700) * 1e4))
high, middle, again, low = split_weight_kernel(weight).float()
assert torch.equal(high + middle + low, weight) and torch.equal(high, again)
assert (high - weight).abs().max() < 2**-7 * weight.abs().max()

for wrong in (dict(top_k=13), dict(n_group=12, topk_group=2), dict(n_group=5, topk_group=2)):
    router = make(12, wrong.pop("top_k", 2), wrong)
    try:
        choose(router, torch.zeros(1, 3, 12))
    except ValueError as error:
        assert "Cannot choose" in str(error)
    else:
        raise AssertionError(wrong)
print("equal")
"""
)


def test_ties_and_what_is_not_finite() -> None:
    run_interpreted(_TIES)


_COMPILED = (
    _SETUP
    + """
class Otherwise(Router):
    def _choose(self, choice_TE):
        return super()._choose(-choice_TE)

kernels = []
router_module.has_kernels = lambda device, dtype: dtype == torch.bfloat16
original = router_module.route
router_module.route = lambda *args: (kernels.append(1), original(*args))[1]
x = torch.randn(30, 24).bfloat16()
make(16, 4, {})(x)
assert len(kernels) == 1
for other in (torch.float32, torch.float64):
    make(16, 4, {}).to(other)(x.to(other))
make(16, 4, {}).double()(x)
worst = Otherwise(24, 16, 4)
assert torch.equal(worst(x).indices_TK.sort().values, (-worst(x).scores_TE).topk(4).indices.sort().values)
replaced = make(16, 4, {})
replaced._choose = lambda choice_TE: choice_TE.topk(4, largest=False).indices
assert torch.equal(replaced(x).weights_TK, Router.forward(replaced, x).weights_TK)
assert len(kernels) == 1  # all of these chose plainly
router_module.route = original

for masked in (False, True):
    router = make(16, 4, dict(n_group=4, topk_group=2))
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager")
    valid = torch.rand(30) < 0.7 if masked else None
    results = []
    for route in (router, compiled, router):
        leaf = x.clone().requires_grad_()
        plan = route(leaf, valid)
        loss = plan.weights_TK.square().sum() + plan.scores_TE.cos().sum()
        results.append((*plan[:3], *torch.autograd.grad(loss, (leaf, router.weight))))
    for eager, other, again in zip(*results):
        assert torch.equal(eager, other) and torch.equal(eager, again)

leaf = x.clone().requires_grad_()
(gradient,) = torch.autograd.grad(router(leaf).weights_TK.square().sum(), leaf, create_graph=True)
try:
    gradient.sum().backward()
except RuntimeError as error:
    assert "autograd formula" in str(error)
else:
    raise AssertionError("a second derivative that is not there")
print("equal")
"""
)


def test_compiled_and_when_the_kernels_are_taken() -> None:
    run_interpreted(_COMPILED)


@pytest.mark.parametrize("tokens", [0, 5])
def test_shapes_without_a_device(tokens: int) -> None:
    with torch.device("meta"):
        x, weight, bias = torch.empty(tokens, 8, dtype=torch.bfloat16), torch.empty(6, 8), torch.empty(6)
        scores, indices, weights = route(x, weight, bias, None, 2, 1, 1, True, True, True, 1.0)
    assert (scores.shape, indices.shape, weights.shape) == ((tokens, 6), (tokens, 2), (tokens, 2))
    assert (scores.dtype, indices.dtype, weights.dtype) == (torch.float32, torch.int64, torch.float32)
