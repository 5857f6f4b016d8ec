import math

import pytest
import torch

from lightning_moe.models.deepseek_v3.config import DeepSeekV3Config, YarnScaling
from lightning_moe.models.deepseek_v3.rope import inverse_frequencies, rotate, rotation_of, softmax_scale

CPU = torch.device("cpu")
YARN = DeepSeekV3Config(rope_scaling=YarnScaling(), max_position_embeddings=163840)


def test_frequencies_without_yarn() -> None:
    frequencies = inverse_frequencies(DeepSeekV3Config(), CPU, torch.float64)
    expected = [10000 ** (-2 * i / 64) for i in range(32)]
    torch.testing.assert_close(frequencies, torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=0)


def test_frequencies_with_yarn_by_hand() -> None:
    # cd(32) = 64 ln(4096 / (64 pi)) / (2 ln 10000) = 10.47 and cd(1) = 22.51: the ramp runs from pair 10 to pair 23.
    assert 64 * math.log(4096 / (64 * math.pi)) / (2 * math.log(1e4)) == pytest.approx(10.47, abs=0.01)
    assert 64 * math.log(4096 / (2 * math.pi)) / (2 * math.log(1e4)) == pytest.approx(22.51, abs=0.01)
    frequencies = inverse_frequencies(YARN, CPU, torch.float64).tolist()
    for i, frequency in enumerate(frequencies):
        plain = 10000 ** (-2 * i / 64)
        ramp = min(max((i - 10) / 13, 0), 1)
        assert frequency == pytest.approx(plain / 40 * ramp + plain * (1 - ramp), rel=1e-12), i
    assert frequencies[10] == pytest.approx(10000 ** (-20 / 64))
    assert frequencies[23] * 40 == pytest.approx(10000 ** (-46 / 64))


def test_yarn_corrects_softmax_scale_and_not_cos_and_sin() -> None:
    plain = softmax_scale(DeepSeekV3Config())
    assert plain == pytest.approx(192**-0.5)
    assert softmax_scale(YARN) / plain == pytest.approx(1.87385, abs=1e-5)
    rotation = rotation_of(YARN, torch.arange(4))
    torch.testing.assert_close(rotation.cos**2 + rotation.sin**2, torch.ones(4, 32))


def test_unequal_mscales_enter_cos_and_sin_as_their_ratio() -> None:
    scaling = YarnScaling(mscale=0.5, mscale_all_dim=1.0)
    rotation = rotation_of(DeepSeekV3Config(rope_scaling=scaling), torch.arange(1), torch.float64)
    ratio = (0.05 * math.log(40) + 1) / (0.1 * math.log(40) + 1)
    torch.testing.assert_close(rotation.cos, torch.full((1, 32), ratio, dtype=torch.float64))


def test_without_mscales_yarn_has_its_original_multiplier() -> None:
    scaling = YarnScaling(mscale=0.0, mscale_all_dim=0.0)
    config = DeepSeekV3Config(rope_scaling=scaling)
    rotation = rotation_of(config, torch.arange(1), torch.float64)
    torch.testing.assert_close(rotation.cos[0, 0].item(), 0.1 * math.log(40) + 1)
    assert softmax_scale(config) == pytest.approx(192**-0.5)


@pytest.mark.parametrize("yarn", [False, True])
def test_numbers_of_transformers(yarn: bool) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.24")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

    scaling = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0}
    scaling.update(beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
    hf = transformers.DeepseekV3Config(
        max_position_embeddings=163840 if yarn else 4096, rope_theta=10000.0, rope_scaling=scaling if yarn else None
    )
    positions = torch.tensor([[0, 1, 17, 4095]])
    cos, sin = DeepseekV3RotaryEmbedding(hf)(torch.zeros(1), positions)
    rotation = rotation_of(YARN if yarn else DeepSeekV3Config(), positions)
    # transformers repeats the 32 pairs for both halves.
    torch.testing.assert_close(rotation.cos, cos[..., :32], rtol=0, atol=2e-4)
    torch.testing.assert_close(rotation.sin, sin[..., :32], rtol=0, atol=2e-4)
    torch.testing.assert_close(rotation.cos[:, :3], cos[:, :3, :32], rtol=0, atol=3e-6)


def test_neighbours_are_rotated_as_complex_numbers() -> None:
    config = DeepSeekV3Config()
    x = torch.randn(2, 5, 3, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 9, 0, 1]])
    rotated = rotate(x, rotation_of(config, positions, torch.float64))
    angles = positions[..., None] * inverse_frequencies(config, CPU, torch.float64)
    turns = torch.polar(torch.ones_like(angles), angles)[:, :, None]
    expected = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (32, 2))) * turns).flatten(-2)
    torch.testing.assert_close(rotated, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(rotated[0, 0], x[0, 0])  # position 0


def test_products_depend_on_the_distance_alone() -> None:
    config = DeepSeekV3Config()
    q, k = torch.randn(2, 1, 1, 1, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def product(i: int, j: int) -> torch.Tensor:
        at = [rotation_of(config, torch.tensor([p]), torch.float64) for p in (i, j)]
        return (rotate(q, at[0]) * rotate(k, at[1])).sum()

    torch.testing.assert_close(product(5, 2), product(105, 102), rtol=1e-10, atol=1e-10)
    assert (product(5, 2) - product(5, 3)).abs() > 1e-3


def test_bfloat16_is_rotated_in_float32() -> None:
    x = torch.randn(1, 4, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    rotation = rotation_of(DeepSeekV3Config(), torch.arange(4000, 4004))
    assert rotation.cos.dtype == torch.float32
    rotated = rotate(x, rotation)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, rotate(x.float(), rotation).bfloat16())
