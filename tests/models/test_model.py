"""The whole model in float64: sums that do not depend on how a batch is cut, padded or packed."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_moe.models.base import MoEModelOutput
from lightning_moe.models.deepseek_v3.config import DeepSeekV3Config
from lightning_moe.models.deepseek_v3.model import DeepSeekV3Model
from tests.models.tiny import random_model, smaller_config, tokens
from tests.tensors import grad

IGNORE = -100


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def packed_labels(input_ids: Tensor, document_ids: Tensor) -> Tensor:
    """Next tokens, ignored where they stand in another document or nowhere."""
    labels = input_ids.roll(-1, dims=1)
    labels[:, -1] = IGNORE
    labels[:, :-1][document_ids[:, 1:] != document_ids[:, :-1]] = IGNORE
    return labels


def total(output: MoEModelOutput) -> Tensor:
    assert output.loss is not None
    losses = [output.loss, *(0.3 * loss for loss in output.mtp_losses)]
    if output.balance_loss is not None:
        losses.append(0.1 * output.balance_loss)
    return torch.stack(losses).sum()


def gradients(model: DeepSeekV3Model, *batches: dict[str, Any]) -> dict[str, Tensor]:
    model.zero_grad()
    for batch in batches:
        total(model(**batch)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        scale = expected[name].abs().max().clamp(min=1e-9)
        assert (actual[name] - expected[name]).abs().max() <= tolerance * scale, name


# Shape of the model


@pytest.mark.parametrize(
    ("preset", "total_count", "activated", "mtp"),
    [
        ("deepseek_v3_671b", 671_026_404_352, 37_552_282_624, 11_610_067_968),
        ("deepseek_v2_lite", 15_706_484_224, 2_661_150_208, 593_242_624),
        ("moonlight_16b", 15_960_108_544, 2_914_774_528, 593_242_624),
    ],
)
def test_exact_parameter_counts(preset: str, total_count: int, activated: int, mtp: int) -> None:
    config = DeepSeekV3Config.preset(preset, num_nextn_predict_layers=1)
    with torch.device("meta"):
        model = DeepSeekV3Model(config)
    assert model.parameter_counts() == {"total": total_count, "activated": activated, "mtp": mtp}
    biases = sum(b.numel() for name, b in model.named_buffers())
    moe_layers = config.num_hidden_layers - config.first_k_dense_replace + 1
    assert biases == moe_layers * config.n_routed_experts


def test_kimi_k2_count() -> None:
    config = DeepSeekV3Config(
        vocab_size=163840,
        num_attention_heads=64,
        n_routed_experts=384,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        num_nextn_predict_layers=0,
    )
    with torch.device("meta"):
        counts = DeepSeekV3Model(config).parameter_counts()
    assert counts == {"total": 1_026_408_209_408, "activated": 32_861_477_888, "mtp": 0}


def test_blocks_keep_their_global_index() -> None:
    model = DeepSeekV3Model(smaller_config(num_nextn_predict_layers=2))
    assert [name for name, _ in model.blocks()] == [
        "layers.0",
        "layers.1",
        "layers.2",
        "mtp_layers.3.block",
        "mtp_layers.4.block",
    ]
    assert [name for name, _ in model.moe_layers()] == [
        "layers.1.mlp",
        "layers.2.mlp",
        "mtp_layers.3.block.mlp",
        "mtp_layers.4.block.mlp",
    ]
    for name, module in (*model.blocks(), *model.moe_layers()):
        assert model.get_submodule(name) is module


def test_embedding_and_head_are_shared_with_multi_token_prediction() -> None:
    names = [name for name, _ in DeepSeekV3Model(smaller_config(num_nextn_predict_layers=1)).named_parameters()]
    assert [name for name in names if "embed" in name or "head" in name] == ["embed_tokens.weight", "lm_head.weight"]


# Losses


def test_losses_are_cross_entropies_of_the_logits() -> None:
    config = smaller_config(num_nextn_predict_layers=2)
    model, input_ids, labels = random_model(config), tokens(config, 2, 12), tokens(config, 2, 12, seed=2)
    labels[0, 3] = IGNORE
    output, logits = model(input_ids, labels), model(input_ids)
    assert logits.loss is None
    assert output.logits is None
    expected = F.cross_entropy(logits.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(output.loss, expected)
    assert output.num_tokens == 23
    for k in (1, 2):
        ahead = F.pad(labels[:, k:], (0, k), value=IGNORE)
        expected = F.cross_entropy(logits.mtp_logits[k - 1].flatten(0, 1), ahead.flatten(), reduction="sum")
        torch.testing.assert_close(output.mtp_losses[k - 1], expected)
        assert output.mtp_num_tokens[k - 1] == 2 * (12 - k) - 1  # the ignored label is a target of every depth


def test_uniform_logits_cost_log_of_the_vocabulary_at_every_depth() -> None:
    config = smaller_config(num_nextn_predict_layers=2)
    model, input_ids = random_model(config), tokens(config, 2, 12)
    torch.nn.init.zeros_(model.lm_head.weight)
    document_ids = torch.arange(12).expand(2, -1) // 2  # documents of 2 tokens: few targets are left
    for ids in (None, document_ids):
        labels = input_ids if ids is None else packed_labels(input_ids, ids)
        output = model(input_ids, labels, document_ids=ids)
        for loss, count in zip(
            (output.loss, *output.mtp_losses), (output.num_tokens, *output.mtp_num_tokens), strict=True
        ):
            torch.testing.assert_close(loss, count * torch.tensor(float(config.vocab_size)).log())
    assert output.num_tokens == 12
    assert [int(n) for n in output.mtp_num_tokens] == [0, 0]


def test_without_multi_token_prediction_the_main_loss_is_bit_equal() -> None:
    config = smaller_config(num_nextn_predict_layers=1)
    model, input_ids = random_model(config), tokens(config, 2, 12)
    plain = DeepSeekV3Model(smaller_config())
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("mtp_layers")})
    outputs = [model(input_ids, input_ids), model(input_ids, input_ids, mtp=False), plain(input_ids, input_ids)]
    assert torch.equal(outputs[0].loss, outputs[1].loss)
    assert torch.equal(outputs[0].loss, outputs[2].loss)
    assert outputs[1].mtp_losses == ()
    assert len(outputs[1].expert_counts) == 2
    assert torch.equal(outputs[1].balance_loss, outputs[2].balance_loss)


@pytest.mark.parametrize("sequence", [1, 2, 3])
def test_depth_beyond_the_sequence_does_not_crash(sequence: int) -> None:
    config = smaller_config(num_nextn_predict_layers=3)
    model, input_ids = random_model(config), tokens(config, 2, sequence)
    output = model(input_ids, input_ids, predictions=True)
    total(output).backward()
    assert [int(n) for n in output.mtp_num_tokens] == [2 * max(sequence - k, 0) for k in (1, 2, 3)]
    assert output.mtp_losses[2] == 0
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_mtp_input_before_or_after_the_final_norm() -> None:
    config = smaller_config(num_nextn_predict_layers=1)
    post, input_ids = random_model(config), tokens(config, 2, 12)
    pre = DeepSeekV3Model(smaller_config(num_nextn_predict_layers=1, mtp_input="pre_norm"))
    pre.load_state_dict(post.state_dict())
    assert torch.equal(pre(input_ids).logits, post(input_ids).logits)
    assert (pre(input_ids).mtp_logits[0] - post(input_ids).mtp_logits[0]).abs().max() > 1e-3
    # hnorm undoes the difference where the final norm has equal weights and no epsilon matters
    for model in (pre, post):
        torch.nn.init.ones_(model.norm.weight)
    torch.testing.assert_close(pre(input_ids).mtp_logits[0], post(input_ids).mtp_logits[0], rtol=1e-4, atol=1e-4)


def test_predictions_count_what_the_data_and_the_main_model_say() -> None:
    config = smaller_config(num_nextn_predict_layers=2)
    model, input_ids = random_model(config), tokens(config, 3, 12)
    logits = model(input_ids)
    labels = logits.logits.argmax(-1)
    labels[:, ::3] = logits.mtp_logits[0].argmax(-1).roll(1, 1)[:, ::3]  # some that depth 1 gets right
    labels[1, 4] = IGNORE
    output = model(input_ids, labels, predictions=True)
    main = logits.logits.argmax(-1)
    for k in (1, 2):
        depth = logits.mtp_logits[k - 1].argmax(-1)
        correct = accepted = 0
        for b in range(3):
            for i in range(12 - k):
                if labels[b, i + k] != IGNORE:
                    correct += int(depth[b, i] == labels[b, i + k])
                    accepted += int(depth[b, i] == main[b, i + k])
        assert (int(output.mtp_correct[k - 1]), int(output.mtp_accepted[k - 1])) == (correct, accepted)
    assert output.mtp_correct[0] > 5
    assert model(input_ids, labels).mtp_correct is None


def test_every_parameter_gets_a_gradient() -> None:
    config = smaller_config(num_nextn_predict_layers=2)
    model = random_model(config)
    grads = gradients(model, {"input_ids": tokens(config, 4, 16), "labels": tokens(config, 4, 16, seed=2)})
    assert grads.keys() == dict(model.named_parameters()).keys()
    assert all(gradient.abs().max() > 0 for gradient in grads.values())


# Sums do not depend on how tokens are laid out


def test_one_batch_and_micro_batches_have_the_same_gradients() -> None:
    config = smaller_config(num_nextn_predict_layers=2)
    model = random_model(config)
    input_ids, labels = tokens(config, 8, 12), tokens(config, 8, 12, seed=2)
    valid = torch.arange(12) < torch.tensor([12, 3, 7, 12, 1, 9, 5, 12])[:, None]  # unequal valid tokens
    labels = labels.where(valid, IGNORE)
    labels[3, :6] = IGNORE
    whole = {"input_ids": input_ids, "labels": labels, "valid": valid}

    def cut(size: int) -> list[dict[str, Tensor]]:
        return [{key: t[i : i + size] for key, t in whole.items()} for i in range(0, 8, size)]

    expected, output = gradients(model, whole), model(**whole)
    for size in (1, 2, 4):
        assert_close(gradients(model, *cut(size)), expected)
        parts = [model(**batch) for batch in cut(size)]
        torch.testing.assert_close(sum(total(part) for part in parts), total(output), rtol=1e-12, atol=0)
        assert sum(int(part.num_tokens) for part in parts) == int(output.num_tokens)
        for layer, counts in enumerate(output.expert_counts):
            assert torch.equal(sum(part.expert_counts[layer] for part in parts), counts)


def test_padding_at_the_end_equals_no_padding() -> None:
    config = smaller_config(num_nextn_predict_layers=2)
    model = random_model(config)
    input_ids, labels = tokens(config, 2, 16), tokens(config, 2, 16, seed=2)
    valid = torch.arange(16).expand(2, -1) < 12  # a quarter is padding
    padded = {"input_ids": input_ids, "labels": labels.where(valid, IGNORE), "valid": valid}
    short = {"input_ids": input_ids[:, :12], "labels": labels[:, :12]}
    with_padding, without = model(**padded), model(**short)
    assert torch.equal(with_padding.num_tokens, without.num_tokens)
    torch.testing.assert_close(total(with_padding), total(without), rtol=1e-12, atol=0)
    torch.testing.assert_close(with_padding.balance_loss, without.balance_loss, rtol=1e-12, atol=0)
    for ours, theirs in zip(with_padding.expert_counts, without.expert_counts, strict=True):
        assert torch.equal(ours, theirs)
    assert_close(gradients(model, padded), gradients(model, short))


def test_counts_of_experts() -> None:
    config = smaller_config(num_nextn_predict_layers=2)
    output = random_model(config)(tokens(config, 2, 12))
    per_token = config.num_experts_per_tok
    # Depth k has no input at the last k positions.
    assert [int(c.sum()) for c in output.expert_counts] == [2 * n * per_token for n in (12, 12, 11, 10)]
    assert all(c.dtype == torch.int64 and c.shape == (8,) for c in output.expert_counts)


@pytest.mark.parametrize("lengths", [(5, 11), (3, 4, 9), (1, 15)])
def test_packed_documents_equal_rows_of_their_own(lengths: tuple[int, ...]) -> None:
    config = smaller_config(num_nextn_predict_layers=2)
    model = random_model(config)
    input_ids = tokens(config, 1, 16)
    document_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    labels = packed_labels(input_ids, document_ids)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = {"input_ids": input_ids, "labels": labels, "document_ids": document_ids}
    restarted = dict(packed, position_ids=positions)
    longest = max(lengths)

    def rows(t: Tensor, fill: int) -> Tensor:
        return torch.stack([F.pad(part, (0, longest - len(part)), value=fill) for part in t[0].split(lengths)])

    valid = torch.arange(longest) < torch.tensor(lengths)[:, None]
    padded = {"input_ids": rows(input_ids, 0), "labels": rows(labels, IGNORE), "valid": valid}
    expected = model(**padded)
    for batch in (packed, restarted):  # positions may restart or not: only distances count
        output = model(**batch)
        torch.testing.assert_close(output.loss, expected.loss, rtol=1e-11, atol=0)
        torch.testing.assert_close(output.mtp_losses, expected.mtp_losses, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(output.balance_loss, expected.balance_loss, rtol=1e-11, atol=0)
        assert [int(n) for n in output.mtp_num_tokens] == [int(n) for n in expected.mtp_num_tokens]
        assert_close(gradients(model, batch), gradients(model, padded), 1e-9)


def test_a_document_does_not_see_another() -> None:
    # All experts are chosen, so that the size of each multiplication stays the same and results can be bit-equal.
    config = smaller_config(num_nextn_predict_layers=2, n_group=1, topk_group=1, num_experts_per_tok=8)
    model = random_model(config)
    document_ids = torch.tensor([[0] * 6 + [1] * 5 + [2] * 5])
    changed = document_ids == 1
    first = tokens(config, 1, 16)
    second = first.where(~changed, (first + 7) % config.vocab_size)
    outputs = []
    for input_ids in (first, second):
        labels = packed_labels(input_ids, document_ids).where(~changed, IGNORE)
        outputs.append(model(input_ids, labels, document_ids=document_ids, balance=False))
    assert torch.equal(outputs[0].loss, outputs[1].loss)
    assert outputs[0].mtp_num_tokens[1] == 3 + 2
    for before, after in zip(outputs[0].mtp_losses, outputs[1].mtp_losses, strict=True):
        assert torch.equal(before, after)
    # Without document ids it does.
    losses = [model(x, packed_labels(x, document_ids).where(~changed, IGNORE)).mtp_losses[0] for x in (first, second)]
    assert not torch.equal(*losses)


def test_no_gradient_flows_from_one_document_into_another() -> None:
    config = smaller_config(num_nextn_predict_layers=2)
    model = random_model(config)
    document_ids = torch.tensor([[0] * 6 + [1] * 5 + [2] * 5])
    # Each document has tokens of its own, so that the rows of the embedding tell the documents apart.
    input_ids = tokens(config, 1, 16) % 8 + 8 * document_ids
    labels = packed_labels(input_ids, document_ids).where(document_ids == 0, IGNORE)
    output = model(input_ids, labels, document_ids=document_ids, balance=False)
    total(output).backward()
    gradient = grad(model.embed_tokens.weight)
    assert gradient[:8].abs().sum() > 0
    assert not gradient[8:].any()


def test_later_tokens_do_not_change_earlier_logits() -> None:
    config = smaller_config(num_nextn_predict_layers=2)
    model, first = random_model(config), tokens(config, 1, 12)
    second = first.clone()
    second[0, 8:] = (second[0, 8:] + 3) % config.vocab_size
    one, two = model(first), model(second)
    torch.testing.assert_close(one.logits[:, :8], two.logits[:, :8], rtol=1e-12, atol=1e-12)
    assert (one.logits[:, 8:] - two.logits[:, 8:]).abs().max() > 1e-3
    for k in (1, 2):  # depth k at position i has seen token i + k
        torch.testing.assert_close(
            one.mtp_logits[k - 1][:, : 8 - k], two.mtp_logits[k - 1][:, : 8 - k], rtol=1e-12, atol=1e-12
        )
        assert (one.mtp_logits[k - 1][:, 8 - k] - two.mtp_logits[k - 1][:, 8 - k]).abs().max() > 1e-3


def test_softmax_routing_without_shared_experts_runs() -> None:
    config = smaller_config(
        scoring_func="softmax", topk_method="group_limited_greedy", n_shared_experts=0, norm_topk_prob=False
    )
    model, input_ids = random_model(config), tokens(config, 2, 12)
    output = model(input_ids, input_ids)
    total(output).backward()
    assert output.loss.isfinite()
    assert grad(model.get_parameter("layers.1.mlp.router.weight")).any()


# Dtypes


@pytest.mark.parametrize("autocast", [False, True])
def test_losses_are_float32_and_the_gate_routes_in_float32_in_bfloat16(autocast: bool) -> None:
    torch.set_default_dtype(torch.float32)
    config = smaller_config(num_nextn_predict_layers=1)
    model = random_model(config)
    if not autocast:
        model.to(torch.bfloat16)
    seen = []
    for _, layer in model.moe_layers():
        layer.router.register_forward_hook(lambda module, args, plan: seen.append(plan))
    input_ids = tokens(config, 2, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        output = model(input_ids, input_ids)
    total(output).backward()
    assert output.loss.dtype == output.mtp_losses[0].dtype == output.balance_loss.dtype == torch.float32
    assert len(seen) == 3
    assert all(plan.weights_TK.dtype == plan.scores_TE.dtype == torch.float32 for plan in seen)
    assert all(grad(p).isfinite().all() for p in model.parameters())
