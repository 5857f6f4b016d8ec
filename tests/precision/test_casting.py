"""Reading parameters in a lower precision is what a cast model computes, over masters that get the gradients."""

import copy

import torch

from lightning_moe.models.deepseek_v3 import DeepSeekV3Model
from lightning_moe.moe.experts import GroupedExperts
from lightning_moe.precision.casting import cast_on_use, keep_gradients_lowered
from tests.models.test_module import CONFIG, SEQUENCE


def test_forward_is_that_of_the_cast_model_and_gradients_reach_the_masters() -> None:
    model = DeepSeekV3Model(CONFIG)
    model.init_weights(3)
    cast = copy.deepcopy(model).to(torch.bfloat16)
    keys, classes = list(model.state_dict()), [type(module).__name__ for module in model.modules()]
    cast_on_use(model, torch.bfloat16)
    assert list(model.state_dict()) == keys
    assert [type(module).__name__ for module in model.modules()] == classes
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}

    tokens = torch.randint(0, CONFIG.vocab_size, (2, SEQUENCE + 1))
    output, expected = (m(tokens[:, :-1], tokens[:, 1:]) for m in (model, cast))
    assert torch.equal(output.loss, expected.loss)
    assert torch.equal(output.mtp_losses[0], expected.mtp_losses[0])
    for result in (output, expected):
        (result.loss + result.mtp_losses[0]).backward()
    for (name, parameter), reference in zip(model.named_parameters(), cast.parameters(), strict=True):
        assert parameter.grad is not None
        assert reference.grad is not None
        assert parameter.grad.dtype == torch.float32
        # Gradients of the head and of the embedding are summed in float32 here and in bfloat16 there.
        twice = name in ("lm_head.weight", "embed_tokens.weight")
        rounding = 0.01 * parameter.grad.abs().max().item() if twice else 0.0
        torch.testing.assert_close(parameter.grad, reference.grad.float(), rtol=0, atol=rounding, msg=name)

    restored = DeepSeekV3Model(CONFIG)
    restored.load_state_dict(model.state_dict())
    model.load_state_dict(restored.state_dict())


def test_first_gradient_of_experts_stays_lowered_and_the_second_is_added_in_full() -> None:
    model = DeepSeekV3Model(CONFIG)
    model.init_weights(3)
    cast_on_use(model, torch.bfloat16)
    kept = copy.deepcopy(model)
    keep_gradients_lowered(kept)
    tokens = torch.randint(0, CONFIG.vocab_size, (2, SEQUENCE + 1))
    for micro_batch in range(2):
        for one in (model, kept):
            one(tokens[:, :-1], tokens[:, 1:] % (5 + micro_batch)).loss.backward()
        for (name, parameter), reference in zip(kept.named_parameters(), model.parameters(), strict=True):
            if reference.grad is None:  # multi-token prediction is not part of this loss
                continue
            assert parameter.grad is not None
            lowered = ".experts." in name and "shared" not in name and micro_batch == 0
            assert parameter.grad.dtype == (torch.bfloat16 if lowered else torch.float32), name
            assert torch.equal(parameter.grad.float(), reference.grad), name


def test_experts_used_twice_add_their_gradients_in_full() -> None:
    torch.manual_seed(0)
    experts = GroupedExperts(2, 16, 8, initializer_range=0.3)
    cast_on_use(experts, torch.bfloat16)
    kept = copy.deepcopy(experts)
    keep_gradients_lowered(kept)
    rows, offsets = torch.randn(2, 32, 16).bfloat16(), torch.tensor([10, 32], dtype=torch.int32)
    for _ in range(2):  # once more after the gradients were released
        for one in (experts, kept):
            one.zero_grad()
            (one(rows[0], offsets).square().sum() + one(rows[1], offsets).square().sum()).backward()
        for parameter, reference in zip(kept.parameters(), experts.parameters(), strict=True):
            assert parameter.grad is not None
            assert reference.grad is not None
            assert torch.equal(parameter.grad, reference.grad)
    keep_gradients_lowered(kept, False)
    kept.zero_grad()
    kept(rows[0], offsets).sum().backward()
    assert {parameter.grad.dtype for parameter in kept.parameters() if parameter.grad is not None} == {torch.float32}
