import json
import logging
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest

from lightning_moe.models.deepseek_v3.config import PRESETS, DeepSeekV3Config, YarnScaling

# The config.json released with DeepSeek-V3, as it is.
RELEASED = """{
  "architectures": ["DeepseekV3ForCausalLM"],
  "attention_bias": false,
  "attention_dropout": 0.0,
  "auto_map": {
    "AutoConfig": "configuration_deepseek.DeepseekV3Config",
    "AutoModel": "modeling_deepseek.DeepseekV3Model",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"
  },
  "bos_token_id": 0,
  "eos_token_id": 1,
  "ep_size": 1,
  "first_k_dense_replace": 3,
  "hidden_act": "silu",
  "hidden_size": 7168,
  "initializer_range": 0.02,
  "intermediate_size": 18432,
  "kv_lora_rank": 512,
  "max_position_embeddings": 163840,
  "model_type": "deepseek_v3",
  "moe_intermediate_size": 2048,
  "moe_layer_freq": 1,
  "n_group": 8,
  "n_routed_experts": 256,
  "n_shared_experts": 1,
  "norm_topk_prob": true,
  "num_attention_heads": 128,
  "num_experts_per_tok": 8,
  "num_hidden_layers": 61,
  "num_key_value_heads": 128,
  "num_nextn_predict_layers": 1,
  "q_lora_rank": 1536,
  "qk_nope_head_dim": 128,
  "qk_rope_head_dim": 64,
  "quantization_config": {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]
  },
  "rms_norm_eps": 1e-06,
  "rope_scaling": {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "type": "yarn"
  },
  "rope_theta": 10000,
  "routed_scaling_factor": 2.5,
  "scoring_func": "sigmoid",
  "tie_word_embeddings": false,
  "topk_group": 4,
  "topk_method": "noaux_tc",
  "torch_dtype": "bfloat16",
  "transformers_version": "4.33.1",
  "use_cache": true,
  "v_head_dim": 128,
  "vocab_size": 129280
}"""


def written(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(RELEASED), **changes}))
    return path


def test_defaults_are_the_671b_model_without_yarn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        released = DeepSeekV3Config.from_json(written(tmp_path))
    assert released.rope_scaling == YarnScaling(40.0, 4096, 32.0, 1.0, 1.0, 1.0)
    pretraining = replace(released, rope_scaling=None, max_position_embeddings=4096, initializer_range=0.006)
    assert pretraining == DeepSeekV3Config() == DeepSeekV3Config.preset("deepseek_v3_671b")
    assert len(caplog.records) == 1
    assert "quantization_config" in caplog.text
    assert "YaRN is on" in caplog.text


def test_fields_override_the_file(tmp_path: Path) -> None:
    config = DeepSeekV3Config.from_json(
        written(tmp_path), rope_scaling=None, max_position_embeddings=4096, num_hidden_layers=5
    )
    assert (config.rope_scaling, config.num_hidden_layers, config.hidden_size) == (None, 5, 7168)


def test_rope_parameters_of_transformers_5(tmp_path: Path) -> None:
    parameters = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    path = written(tmp_path, rope_parameters=parameters, rope_scaling=None, max_position_embeddings=131072)
    config = DeepSeekV3Config.from_json(path)
    assert config.rope_theta == 50000.0
    assert config.rope_scaling == YarnScaling(32.0, 4096, 32.0, 1.0, mscale=0.0, mscale_all_dim=0.0)
    # Without it, the positions that the file names are those before the extension, as in transformers.
    path = written(tmp_path, rope_scaling={"type": "yarn", "factor": 2.0}, max_position_embeddings=16384)
    assert DeepSeekV3Config.from_json(path).rope_scaling == YarnScaling(2.0, 16384, 32.0, 1.0, 0.0, 0.0)
    default = written(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, rope_scaling=None)
    assert DeepSeekV3Config.from_json(default).rope_scaling is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 4096}, "unknown keys sliding_window"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.type is 'linear'"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', but it must be null"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling has no factor"),
        ({"rope_theta": None}, "rope_theta is None, but it must be a finite number"),
        ({"num_nextn_predict_layers": None}, "num_nextn_predict_layers is None, but it must be a whole number"),
        ({"rope_interleave": False}, "rope_interleave is False"),
        (
            {"index_topk": 2048, "index_n_heads": 64, "model_type": "deepseek_v32"},
            "unknown keys index_n_heads, index_topk",
        ),
        ({"n_group": 7}, "n_group is 7"),
        ({"model_type": "llama"}, "model_type is 'llama', but these can be read: deepseek_v3, kimi_k2"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 57}, "mlp_layer_types must name first_k_dense_replace dense"),
        ({"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 59}, "mlp_layer_types must name first_k_dense_replace dense"),
        ({"rope_scaling": {"type": "yarn", "factor": "40"}}, "rope_scaling.factor is '40', but it must be a finite"),
    ],
)
def test_files_of_other_architectures(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        DeepSeekV3Config.from_json(written(tmp_path, **changes))
    assert len(str(error.value).splitlines()) <= 4


def test_what_files_of_deepseek_v2_leave_out(tmp_path: Path) -> None:
    left_out = {"scoring_func", "topk_method", "norm_topk_prob", "num_nextn_predict_layers", "routed_scaling_factor"}
    kept = {key: value for key, value in json.loads(RELEASED).items() if key not in left_out}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**kept, "model_type": "deepseek_v2", "n_group": None, "topk_group": None}))
    config = DeepSeekV3Config.from_json(path)
    assert (config.scoring_func, config.topk_method, config.norm_topk_prob) == ("softmax", "greedy", False)
    assert (config.n_group, config.topk_group, config.routed_scaling_factor) == (1, 1, 1.0)
    assert (config.num_nextn_predict_layers, config.first_k_dense_replace) == (0, 3)


def test_kinds_of_layers_say_which_are_dense(tmp_path: Path) -> None:
    raw = {**json.loads(RELEASED), "mlp_layer_types": ["dense"] + ["sparse"] * 60}
    del raw["first_k_dense_replace"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert DeepSeekV3Config.from_json(tmp_path / "config.json").first_k_dense_replace == 1


def test_yarn_as_a_dictionary(tmp_path: Path) -> None:
    given = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}
    expected = YarnScaling(2.0)
    assert DeepSeekV3Config.preset("tiny", rope_scaling=given).rope_scaling == expected
    read = DeepSeekV3Config.from_json(written(tmp_path), rope_scaling=given, max_position_embeddings=8192)
    assert read.rope_scaling == expected
    with pytest.raises(ValueError, match="rope_scaling has unknown keys fator; one that works: factor"):
        DeepSeekV3Config.preset("tiny", rope_scaling={"fator": 2.0})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        DeepSeekV3Config.from_json(tmp_path / "absent.json")
    for content, message in (("{", "is not JSON"), ("[]", "holds one JSON object")):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            DeepSeekV3Config.from_json(tmp_path / "config.json")


BAD = [
    ({"n_group": 3}, "n_group", "n_group=2"),
    ({"n_group": 16, "topk_group": 16}, "n_group", "n_group=8"),
    ({"topk_group": 5}, "topk_group", "topk_group=4"),
    ({"num_experts_per_tok": 9}, "num_experts_per_tok", "num_experts_per_tok=8"),
    ({"num_experts_per_tok": 17, "n_group": 1, "topk_group": 1}, "num_experts_per_tok", "num_experts_per_tok=16"),
    ({"num_experts_per_tok": 0}, "num_experts_per_tok", "num_experts_per_tok=8"),
    ({"qk_rope_head_dim": 15}, "qk_rope_head_dim", "qk_rope_head_dim=64"),
    ({"num_nextn_predict_layers": 4096}, "num_nextn_predict_layers", "num_nextn_predict_layers=1"),
    ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers", "num_nextn_predict_layers=1"),
    ({"scoring_func": "tanh"}, "scoring_func", "scoring_func=sigmoid"),
    ({"topk_method": "random"}, "topk_method", "topk_method=noaux_tc"),
    ({"topk_method": "greedy"}, "topk_method", "topk_method=noaux_tc"),
    ({"mtp_input": "middle"}, "mtp_input", "mtp_input=post_norm"),
    ({"hidden_size": -1}, "hidden_size", "hidden_size=7168"),
    ({"hidden_size": 130}, "hidden_size", "hidden_size=136"),
    ({"moe_intermediate_size": 12}, "moe_intermediate_size", "moe_intermediate_size=16"),
    ({"vocab_size": 0}, "vocab_size", "vocab_size=129280"),
    ({"moe_intermediate_size": 0}, "moe_intermediate_size", "moe_intermediate_size=2048"),
    ({"n_routed_experts": 0}, "n_routed_experts", "n_routed_experts=256"),
    ({"n_routed_experts": 1, "n_group": 1}, "n_routed_experts", "n_routed_experts=2"),
    ({"n_group": None}, "n_group", "n_group=8"),
    ({"hidden_size": 128.0}, "hidden_size", "hidden_size=7168"),
    ({"num_hidden_layers": True}, "num_hidden_layers", "num_hidden_layers=61"),
    ({"rope_theta": "10000"}, "rope_theta", "rope_theta=10000.0"),
    ({"norm_topk_prob": 1}, "norm_topk_prob", "norm_topk_prob=true"),
    ({"n_shared_experts": -1}, "n_shared_experts", "n_shared_experts=1"),
    ({"first_k_dense_replace": 5}, "first_k_dense_replace", "first_k_dense_replace=4"),
    ({"q_lora_rank": 0}, "q_lora_rank", "q_lora_rank=null"),
    ({"kv_lora_rank": 0}, "kv_lora_rank", "kv_lora_rank=512"),
    ({"v_head_dim": 0}, "v_head_dim", "v_head_dim=128"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps", "rms_norm_eps=1e-06"),
    ({"rope_theta": -1.0}, "rope_theta", "rope_theta=10000.0"),
    ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor", "routed_scaling_factor=2.5"),
    ({"initializer_range": 0.0}, "initializer_range", "initializer_range=0.006"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps", "rms_norm_eps=1e-06"),
    ({"rope_scaling": "yarn"}, "rope_scaling", "rope_scaling=YarnScaling(factor=40.0)"),
    (
        {"max_position_embeddings": 10000, "rope_scaling": YarnScaling(2.0)},
        "max_position_embeddings",
        "max_position_embeddings=8192",
    ),
]


@pytest.mark.parametrize(("overrides", "field", "works"), BAD, ids=[str(bad[0]) for bad in BAD])
def test_bad_values_name_field_value_and_what_works(overrides: dict[str, Any], field: str, works: str) -> None:
    with pytest.raises(ValueError, match=field) as error:
        DeepSeekV3Config.preset("tiny", **overrides)
    message = str(error.value)
    assert message.startswith(f"{field} is {overrides[field]!r}, but it ")
    assert message.endswith(f"A value that works: {works}.")
    assert len(message.splitlines()) <= 4


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"factor": 0.5}, "rope_scaling.factor is 0.5"),
        ({"factor": -1.0}, "rope_scaling.factor is -1.0"),
        ({"factor": float("nan")}, "rope_scaling.factor is nan"),
        ({"beta_slow": "1"}, "rope_scaling.beta_slow is '1'"),
        ({"type": "linear"}, "rope_scaling.type is 'linear'"),
        ({"original_max_position_embeddings": 0}, "rope_scaling.original_max_position_embeddings is 0"),
        ({"beta_fast": 1.0, "beta_slow": 2.0}, "rope_scaling.beta_fast is 1.0"),
    ],
)
def test_bad_yarn(overrides: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        YarnScaling(**overrides)


def test_what_is_allowed() -> None:
    tiny = DeepSeekV3Config.preset("tiny")
    assert replace(tiny, num_nextn_predict_layers=0).num_nextn_predict_layers == 0
    assert replace(tiny, n_group=1, topk_group=1, num_experts_per_tok=16).num_experts_per_tok == 16
    assert replace(tiny, first_k_dense_replace=4).first_k_dense_replace == 4
    assert replace(tiny, n_shared_experts=0, q_lora_rank=None).q_lora_rank is None
    # A group of one expert is enough where its best expert is its score, and without groups.
    assert replace(tiny, n_group=16, topk_group=8, topk_method="group_limited_greedy").topk_group == 8
    assert replace(tiny, rms_norm_eps=1, routed_scaling_factor=2).routed_scaling_factor == 2
    assert YarnScaling(beta_fast=1.0, beta_slow=1.0).beta_fast == 1.0  # as in Kimi-K2
    assert tiny.qk_head_dim == 48


def test_config_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        DeepSeekV3Config().hidden_size = 1  # type: ignore[misc]


def test_presets() -> None:
    assert set(PRESETS) == {"deepseek_v3_671b", "moonlight_16b", "deepseek_v2_lite", "tiny"}
    assert DeepSeekV3Config.preset("tiny", num_hidden_layers=2).num_hidden_layers == 2
    with pytest.raises(ValueError, match="config is 'small', but the presets are deepseek_v3_671b"):
        DeepSeekV3Config.preset("small")
    lite = DeepSeekV3Config.preset("deepseek_v2_lite")
    assert (lite.scoring_func, lite.norm_topk_prob, lite.routed_scaling_factor) == ("softmax", False, 1.0)
    moonlight = DeepSeekV3Config.preset("moonlight_16b")
    assert (moonlight.scoring_func, moonlight.q_lora_rank, moonlight.rms_norm_eps) == ("sigmoid", None, 1e-5)


def test_every_field_is_documented() -> None:
    for cls in (DeepSeekV3Config, YarnScaling):
        for field in fields(cls):
            assert f"{field.name}:" in (cls.__doc__ or ""), field.name
