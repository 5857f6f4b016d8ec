from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_moe.dispatch.local import LocalDispatcher
from lightning_moe.moe.experts import GroupedExperts
from lightning_moe.moe.feed_forward import GatedMLP
from lightning_moe.moe.layer import MoELayer
from lightning_moe.moe.router import Router
from tests.tensors import grad


def make(*, shared: bool = True, alignment: int = 1, dtype: torch.dtype = torch.float64) -> MoELayer:
    torch.manual_seed(0)
    router = Router(16, 8, 2, n_group=4, topk_group=2, routed_scaling_factor=2.5, initializer_range=0.3)
    experts = GroupedExperts(8, 16, 8, initializer_range=0.3)
    shared_experts = GatedMLP(16, 8, initializer_range=0.3) if shared else None
    return MoELayer(router, experts, LocalDispatcher(8, alignment), shared_experts).to(dtype)


def draw(batch: int = 2, sequence: int = 9, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, sequence, 16, generator=torch.Generator().manual_seed(1)).to(dtype)


def expert(layer: MoELayer, index: int, x: Tensor) -> Tensor:
    gate, up = (layer.experts.gate_up_proj[index] @ x).chunk(2)
    return layer.experts.down_proj[index] @ (F.silu(gate) * up)


@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("shared", [True, False])
def test_output_and_gradients_against_a_loop_over_tokens(shared: bool, alignment: int) -> None:
    layer = make(shared=shared, alignment=alignment)
    x = draw().requires_grad_()
    y, stats = layer(x)
    y.square().sum().backward()
    gradients = {name: grad(p) for name, p in layer.named_parameters()}
    x_gradient = grad(x)

    layer.zero_grad()
    x.grad = None
    plan = layer.router(x.flatten(0, 1))
    rows = []
    for token, row in enumerate(x.flatten(0, 1)):
        out = sum(
            w * expert(layer, int(e), row) for e, w in zip(plan.indices_TK[token], plan.weights_TK[token], strict=True)
        )
        rows.append(out if layer.shared_experts is None else out + layer.shared_experts(row))
    expected = torch.stack(rows).view_as(x)
    expected.square().sum().backward()
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(x_gradient, grad(x), rtol=1e-10, atol=1e-11)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(gradients[name], grad(parameter), rtol=1e-10, atol=1e-11, msg=name)
    assert stats.counts_E.tolist() == plan.indices_TK.flatten().bincount(minlength=8).tolist()


def test_invalid_tokens_take_the_shared_expert_alone_and_are_not_counted() -> None:
    layer, x = make(), draw()
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[1, 5:] = False
    y, stats = layer(x, valid)
    full, _ = layer(x)
    torch.testing.assert_close(y[valid], full[valid], rtol=1e-12, atol=1e-13)
    assert layer.shared_experts is not None
    torch.testing.assert_close(y[~valid], layer.shared_experts(x[~valid]), rtol=1e-12, atol=1e-13)
    assert stats.counts_E.sum() == 2 * valid.sum()


def test_statistics_are_outputs_and_balance_is_optional() -> None:
    layer = make()
    before = set(vars(layer)) | set(dict(layer.named_buffers()))
    _, stats = layer(draw(), balance=False)
    assert stats.balance_sum is None
    assert stats.counts_E.dtype == torch.int64
    _, stats = layer(draw())
    assert stats.balance_sum.dim() == 0
    assert stats.balance_sum.requires_grad
    assert set(vars(layer)) | set(dict(layer.named_buffers())) == before


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_expanded_gradients_are_taken(reduction: str) -> None:
    # The gradient of a plain sum has stride 0, which the library's grouped multiplication refuses.
    layer = make(shared=False, dtype=torch.float32)
    y, _ = layer(draw(dtype=torch.float32), balance=False)
    getattr(y, reduction)().backward()
    assert all(grad(p) is not None and grad(p).isfinite().all() for p in layer.parameters())


def test_bfloat16_layer_routes_in_float32() -> None:
    layer = make(dtype=torch.float32).to(torch.bfloat16)
    seen: dict[str, Any] = {}
    layer.router.register_forward_hook(lambda module, args, plan: seen.update(plan=plan))
    y, stats = layer(draw(dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    assert seen["plan"].weights_TK.dtype == seen["plan"].scores_TE.dtype == torch.float32
    assert stats.balance_sum.dtype == torch.float32
    y.sum().backward()
    assert grad(layer.router.weight).dtype == torch.float32
    assert grad(layer.experts.down_proj).dtype == torch.bfloat16


def test_no_tokens_at_all() -> None:
    layer = make()
    y, stats = layer(draw(0, 9))
    assert y.shape == (0, 9, 16)
    assert stats.counts_E.sum() == 0


@pytest.mark.parametrize("recomputed", [False, True])
def test_rows_of_the_experts_are_not_kept_for_backward(recomputed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make()
    layer.recomputed = recomputed  # the region is then recomputed as a whole, and decides what to keep
    storages = []
    dispatch = layer.dispatcher.dispatch

    def watched(*args: Any) -> Any:
        dispatched = dispatch(*args)
        storages.append(StorageWeakRef(dispatched.rows_RD.untyped_storage()))
        return dispatched

    monkeypatch.setattr(layer.dispatcher, "dispatch", watched)
    y, _ = layer(draw().requires_grad_())
    assert storages[0].expired() is not recomputed
    y.sum().backward()


def test_an_input_that_changed_in_place_is_an_error_in_backward() -> None:
    layer = make(shared=False)
    x = draw().requires_grad_() * 1.0
    plan = layer.router(x.flatten(0, 1).clone())
    y = layer.apply_experts(x.flatten(0, 1), plan)
    with torch.no_grad():
        x.add_(1.0)
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()


class InPlace(GroupedExperts):
    def forward(self, rows_RD: Tensor, offsets_e: Tensor, weights_R: Tensor | None = None) -> Tensor:
        return super().forward(rows_RD.mul_(0.5), offsets_e, weights_R)


class OutOfPlace(GroupedExperts):
    def forward(self, rows_RD: Tensor, offsets_e: Tensor, weights_R: Tensor | None = None) -> Tensor:
        return super().forward(rows_RD * 0.5, offsets_e, weights_R)


def test_rows_that_experts_change_in_place_are_kept() -> None:
    gradients = []
    for kind in (InPlace, OutOfPlace):
        layer = make()
        layer.experts.__class__ = kind
        layer(draw().requires_grad_())[0].square().sum().backward()
        gradients.append([grad(parameter) for parameter in layer.experts.parameters()])
    for ours, wanted in zip(*gradients, strict=True):
        assert torch.equal(ours, wanted)


def test_hooks_around_the_layer_see_all_that_is_kept() -> None:
    layer, shapes = make(), []

    def pack(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    x = draw().requires_grad_()
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    assert (2 * 9 * 2, 16) in shapes  # the rows
    assert (2 * 9 * 2, 2 * 8) in shapes  # gate and up of each
