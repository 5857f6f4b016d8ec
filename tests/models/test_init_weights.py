"""Initial weights are a function of the seed, the global name and the global expert id."""

import pytest
import torch
from torch import nn

from lightning_moe.models.base import seed_of
from lightning_moe.models.deepseek_v3.config import DeepSeekV3Config
from lightning_moe.models.deepseek_v3.model import DeepSeekV3Model
from lightning_moe.moe.experts import GroupedExperts
from tests.models.tiny import smaller_config


def initialised(config: DeepSeekV3Config, seed: int = 3) -> dict[str, torch.Tensor]:
    model = DeepSeekV3Model(config)
    model.init_weights(seed)
    return model.state_dict()


def test_same_seed_same_weights_whatever_was_there_before() -> None:
    first = initialised(smaller_config(num_nextn_predict_layers=1))
    model = DeepSeekV3Model(smaller_config(num_nextn_predict_layers=1))
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(float("nan"))
    torch.manual_seed(99)
    model.init_weights(3)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, first[name]), name
    other = initialised(smaller_config(num_nextn_predict_layers=1), seed=4)
    assert not torch.equal(other["lm_head.weight"], first["lm_head.weight"])


def test_weights_do_not_depend_on_what_else_the_model_holds() -> None:
    small = initialised(smaller_config())
    larger = initialised(smaller_config(num_nextn_predict_layers=2, num_hidden_layers=3, n_shared_experts=2))
    for name, tensor in small.items():
        if "shared_experts" not in name:
            assert torch.equal(tensor, larger[name]), name


def test_order_of_construction_does_not_matter() -> None:
    model = DeepSeekV3Model(smaller_config())
    model.init_weights(3)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    layers = dict(reversed(list(model.layers.items())))
    head = model._modules.pop("lm_head")
    model.layers = nn.ModuleDict(layers)
    model._modules = {"lm_head": head, **model._modules}
    model.init_weights(3)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_experts_do_not_depend_on_how_many_are_held() -> None:
    config = smaller_config()
    whole = initialised(config)
    model = DeepSeekV3Model(config)
    layer = dict(model.moe_layers())["layers.1.mlp"]
    layer.experts = GroupedExperts(2, 16, 8, initializer_range=0.006, first_expert=4)
    model.init_weights(3)
    for name in ("gate_up_proj", "down_proj"):
        key = f"layers.1.mlp.experts.{name}"
        assert torch.equal(model.state_dict()[key], whole[key][4:6])


def test_every_tensor_has_its_own_values() -> None:
    state = initialised(smaller_config(num_nextn_predict_layers=1))
    heads = [tuple(t.flatten()[:6].tolist()) for name, t in state.items() if t.dim() > 1 and "layernorm" not in name]
    assert len(set(heads)) == len(heads) > 20
    for expert in range(1, 8):
        assert not torch.equal(
            state["layers.1.mlp.experts.down_proj"][0], state["layers.1.mlp.experts.down_proj"][expert]
        )


def test_distribution() -> None:
    state = initialised(DeepSeekV3Config.preset("tiny", initializer_range=0.006))
    for name, tensor in state.items():
        if tensor.dim() > 1:
            noise = 0.006 / (2 * tensor.numel()) ** 0.5
            assert abs(tensor.std().item() - 0.006) < 5 * noise, name
            assert abs(tensor.mean().item()) < 5 * 0.006 / tensor.numel() ** 0.5, name
        elif name.endswith("bias"):
            assert not tensor.any(), name
        else:
            assert (tensor == 1).all(), name


def test_global_random_state_is_untouched() -> None:
    model = DeepSeekV3Model(smaller_config())
    torch.manual_seed(11)
    before = torch.get_rng_state()
    model.init_weights(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_model_built_on_meta_gets_the_same_weights() -> None:
    with torch.device("meta"):
        model = DeepSeekV3Model(smaller_config())
    model.to_empty(device="cpu")
    model.init_weights(3)
    for name, tensor in initialised(smaller_config()).items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_module_that_cannot_be_initialised_is_named() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

    model = DeepSeekV3Model(smaller_config())
    model.extra = Scale()
    with pytest.raises(TypeError, match=r"Scale \(extra\) owns parameters or buffers, so it must have"):
        model.init_weights(3)


def test_seeds_of_names_are_fixed() -> None:
    # Part of the format of a run: another value would change every published loss curve.
    assert seed_of(1337, "lm_head") == 7275011529301766972
    assert len({seed_of(seed, name) for seed in range(4) for name in ("a", "b", "")}) == 12
    assert all(0 <= seed_of(seed, "x") < 2**63 for seed in range(100))
