"""The count of floating-point operations, against values worked out by hand."""

import torch
from torch import nn

from lightning_moe.models.base import MoEModel
from lightning_moe.models.deepseek_v3 import DeepSeekV3, DeepSeekV3Config
from lightning_moe.models.deepseek_v3.model import DeepSeekV3Model
from lightning_moe.models.flops import active_matmul_parameters, causal_attention_flops
from lightning_moe.precision.casting import cast_on_use
from tests.models.test_module import CONFIG


def on_meta(config: DeepSeekV3Config) -> DeepSeekV3Model:
    with torch.device("meta"):
        return DeepSeekV3Model(config)


def v2_lite(**overrides: int) -> DeepSeekV3Model:
    return on_meta(DeepSeekV3Config.preset("deepseek_v2_lite", num_hidden_layers=8, **overrides))


# Queries; keys' and values' compression with the rotary key; its expansion; output
V2_LITE_ATTENTION = 2048 * 16 * 192 + 2048 * (512 + 64) + 512 * 16 * (128 + 128) + 16 * 128 * 2048
# Six routed and two shared experts, and the gate
V2_LITE_MOE = 3 * 2048 * 1408 * (6 + 2) + 64 * 2048


def test_v2_lite_cut_to_eight_layers() -> None:
    model = v2_lite(num_nextn_predict_layers=0)
    by_hand = 8 * V2_LITE_ATTENTION + 3 * 2048 * 10944 + 7 * V2_LITE_MOE + 102400 * 2048
    assert active_matmul_parameters(model) == by_hand == 872_415_232
    attention = 6 * 8 * 16 * (192 + 128) * 4096 / 2
    assert model.flops_per_token(4096) == 6 * by_hand + attention == 5_737_807_872


def test_layers_of_the_671b_model() -> None:
    model = on_meta(
        DeepSeekV3Config.preset(
            "deepseek_v3_671b",
            num_hidden_layers=4,
            num_nextn_predict_layers=0,
            first_k_dense_replace=0,
            n_routed_experts=8,
            n_group=1,
            topk_group=1,
        )
    )
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    by_hand = 4 * (attention + 3 * 7168 * 2048 * 9 + 8 * 7168) + 129280 * 7168
    assert active_matmul_parameters(model) == by_hand == 3_260_776_448
    assert model.flops_per_token(4096) == 6 * by_hand + 6 * 4 * 128 * 320 * 2048 == 21_577_924_608


def test_multi_token_prediction_adds_a_block_its_projection_and_the_head_once_more() -> None:
    model = v2_lite(num_nextn_predict_layers=1)
    depth = V2_LITE_ATTENTION + V2_LITE_MOE + 2 * 2048 * 2048
    extra = 6 * (depth + 102400 * 2048) + 6 * 16 * 320 * 2048
    assert model.flops_per_token(4096) == 5_737_807_872 + extra
    assert model.flops_per_token(4096, mtp=False) == 5_737_807_872


def test_the_count_does_not_depend_on_casts() -> None:
    model = DeepSeekV3Model(CONFIG)
    before = model.flops_per_token(16)
    cast_on_use(model, torch.bfloat16)
    assert model.flops_per_token(16) == before


def test_attention_is_half_of_the_logits_at_both_widths() -> None:
    # Forward: 2 for each dimension of queries and of values, for half of the keys; backward twice as much
    assert causal_attention_flops(num_heads=3, query_dim=10, value_dim=4, sequence_length=100) == 3 * 3 * 2 * 14 * 50


def test_a_model_of_ones_own_counts_its_matrices() -> None:
    class Own(MoEModel):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(100, 8)
            self.layer = nn.Linear(8, 24)

        def blocks(self):  # type: ignore[no-untyped-def]
            yield from ()

        def forward(self, input_ids, labels=None, **_):  # type: ignore[no-untyped-def]
            raise NotImplementedError

    assert Own().flops_per_token(4096) == 6 * 8 * 24


def test_the_module_counts_multi_token_prediction_while_it_trains() -> None:
    module = DeepSeekV3(CONFIG, mtp_loss_weight={0: 0.3, 100: 0.0})
    module.configure_model()
    model = module.built_model
    assert module.flops_per_token(16) == model.flops_per_token(16) > model.flops_per_token(16, mtp=False)
    module.tokens_seen = 100
    assert module.flops_per_token(16) == model.flops_per_token(16, mtp=False)
