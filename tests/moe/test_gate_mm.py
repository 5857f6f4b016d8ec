"""The gate in three bfloat16 parts is the gate in float32."""

import torch

from lightning_moe.moe.gate_mm import _in_three_parts, gate_mm
from tests.tensors import grad


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_three_parts_are_a_float32_number_to_the_last_bit() -> None:
    numbers = torch.cat((draw(1000, seed=0) * 1e-3, draw(1000, seed=1) * 1e4, torch.tensor([0.0, 1.0, -3.0])))
    high, middle, low = (part.float() for part in _in_three_parts(numbers))
    assert torch.equal(high + middle + low, numbers)


def test_parts_against_float64() -> None:
    x, weight = draw(300, 256, seed=0).bfloat16(), draw(16, 256, seed=1) * 0.05
    above = draw(300, 16, seed=2)
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = torch.ops.lightning_moe.gate_mm(*leaves)
    logits.backward(above)
    exact = x.double().requires_grad_(), weight.double().requires_grad_()
    expected = exact[0] @ exact[1].T
    expected.backward(above.double())
    plain = torch.nn.functional.linear(x.float(), weight)

    def error(value: torch.Tensor, wanted: torch.Tensor) -> float:
        return float((value.double() - wanted).norm() / wanted.norm())

    assert logits.dtype == torch.float32
    assert error(logits, expected) < 2 * error(plain, expected) + 1e-8 < 1e-6
    assert grad(leaves[0]).dtype == torch.bfloat16
    assert torch.equal(grad(leaves[0]), grad(exact[0]).bfloat16()) or error(grad(leaves[0]), grad(exact[0])) < 2.5e-3
    assert error(grad(leaves[1]), grad(exact[1])) < 1e-6


def test_other_dtypes_take_the_plain_path() -> None:
    x, weight = draw(5, 8, seed=0), draw(3, 8, seed=1)
    assert torch.equal(gate_mm(x.bfloat16(), weight), x.bfloat16().float() @ weight.T)
    assert torch.equal(gate_mm(x.double(), weight.double()), x.double() @ weight.double().T)
