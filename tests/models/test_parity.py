"""Parity with transformers' DeepseekV3ForCausalLM: logits, losses and gradients, in memory and through files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_moe.convert import from_hf_state_dict, load_hf_checkpoint, save_hf_checkpoint
from lightning_moe.models.deepseek_v3.config import DeepSeekV3Config
from lightning_moe.models.deepseek_v3.model import DeepSeekV3Model
from tests.models.tiny import ARCHITECTURE, YARN, random_model, randomise, tiny_config, tokens
from tests.tensors import grad

transformers = pytest.importorskip("transformers", minversion="5.24")

# Measured 1e-5 between two correct implementations at a standard deviation of 1.2 (float32).
LOGITS_ATOL = 2e-5
CASES = [
    pytest.param({}, False, 0.0, id="query_compression-groups_4"),
    pytest.param({"q_lora_rank": None}, False, 0.0, id="direct_query"),
    pytest.param({}, True, 0.0, id="yarn"),
    pytest.param({"q_lora_rank": None}, True, 0.0, id="yarn-direct_query"),
    pytest.param({"n_group": 1, "topk_group": 1}, False, 0.0, id="groups_1"),
    pytest.param({}, False, -1.0, id="negative_biases"),
    pytest.param({"v_head_dim": 24}, False, -1.0, id="values_narrower"),
    pytest.param({"v_head_dim": 64}, True, 0.0, id="values_wider"),
    pytest.param(
        {"norm_topk_prob": False, "n_shared_experts": 2, "rms_norm_eps": 1e-5}, False, 0.0, id="moonlight_like"
    ),
]


def hf_model(overrides: dict[str, Any], yarn: bool, *, bias_mean: float = 0.0) -> Any:
    fields = {**ARCHITECTURE, "num_key_value_heads": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
    fields.update(overrides)
    config = transformers.DeepseekV3Config(
        **fields,
        max_position_embeddings=163840 if yarn else 4096,
        rope_theta=10000.0,
        rope_scaling=dict(YARN) if yarn else None,
        attn_implementation="eager",
    )
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    randomise(model, bias_mean=bias_mean)
    return model


def our_model(config: DeepSeekV3Config, hf: Any) -> DeepSeekV3Model:
    model = DeepSeekV3Model(config)
    model.load_state_dict(from_hf_state_dict(hf.state_dict(), config))
    return model


@pytest.mark.parametrize(("overrides", "yarn", "bias_mean"), CASES)
def test_logits_and_gradients_in_memory(overrides: dict[str, Any], yarn: bool, bias_mean: float) -> None:
    hf = hf_model(overrides, yarn, bias_mean=bias_mean)
    config = tiny_config(yarn=yarn, **overrides)
    model = our_model(config, hf)
    input_ids, labels = tokens(config, 2, 64), tokens(config, 2, 64, seed=2)

    hf_logits = hf(input_ids).logits
    logits = model(input_ids, balance=False).logits
    assert hf_logits.std() > 0.5
    torch.testing.assert_close(logits, hf_logits, atol=LOGITS_ATOL, rtol=0)

    hf_loss = F.cross_entropy(hf_logits.flatten(0, 1), labels.flatten(), reduction="sum")
    hf_loss.backward()
    output = model(input_ids, labels, balance=False)
    output.loss.backward()
    torch.testing.assert_close(output.loss, hf_loss, rtol=1e-6, atol=0)
    hf_gradients = {name: p.grad for name, p in hf.named_parameters()}
    hf_gradients.update({name: torch.zeros_like(b) for name, b in hf.named_buffers() if name.endswith("_bias")})
    expected = from_hf_state_dict(hf_gradients, config)
    for name, parameter in model.named_parameters():
        error = (grad(parameter) - expected[name]).abs().max() / expected[name].abs().max()
        assert error < 2e-5, f"{name}: {error}"


@pytest.mark.parametrize(("yarn", "query_rank"), [(False, 48), (True, None)])
def test_checkpoint_of_transformers_loads(tmp_path: Path, yarn: bool, query_rank: int | None) -> None:
    hf = hf_model({"q_lora_rank": query_rank}, yarn, bias_mean=-1.0)
    hf.save_pretrained(tmp_path, max_shard_size="1MB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    # transformers writes num_nextn_predict_layers, but never the layers; 0 was asked for here
    config = DeepSeekV3Config.from_json(tmp_path / "config.json")
    assert config.num_nextn_predict_layers == 0
    assert (config.rope_scaling is not None) == yarn
    model = DeepSeekV3Model(config)
    load_hf_checkpoint(model, tmp_path)
    input_ids = tokens(config, 2, 64)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids).logits, hf(input_ids).logits, atol=LOGITS_ATOL, rtol=0)


@pytest.mark.parametrize(("yarn", "max_shard_size"), [(False, 10**9), (True, 10**6)])
def test_our_checkpoint_loads_in_transformers(tmp_path: Path, yarn: bool, max_shard_size: int) -> None:
    config = tiny_config(yarn=yarn)
    model = random_model(config, bias_mean=-1.0)
    save_hf_checkpoint(model, config, tmp_path / "hf", max_shard_size=max_shard_size)
    hf, report = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert hf.config.rope_parameters["rope_type"] == ("yarn" if yarn else "default")
    assert hf.dtype == torch.float32
    input_ids = tokens(config, 2, 64)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids).logits, hf(input_ids).logits, atol=LOGITS_ATOL, rtol=0)


@pytest.mark.parametrize("yarn", [False, True])
def test_multi_token_prediction_through_files(tmp_path: Path, yarn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_layers import MtpModel

    depth = 2
    config = tiny_config(yarn=yarn, num_nextn_predict_layers=depth)
    model = random_model(config, bias_mean=-1.0)
    save_hf_checkpoint(model, config, tmp_path / "hf")
    # transformers finds the layers by this pattern, which names layer 61
    monkeypatch.setattr(
        transformers.DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.[34]\."]
    )
    hf = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path / "hf").eval()
    hf_mtp = MtpModel.from_pretrained(hf).eval()
    assert len(hf_mtp.layers) == depth

    input_ids = tokens(config, 2, 48)
    with torch.no_grad():
        output = model(input_ids)
        hf_output = hf(input_ids, output_hidden_states=True)
        hidden = hf_output.hidden_states[-1]  # after the final norm
        torch.testing.assert_close(output.logits, hf_output.logits, atol=LOGITS_ATOL, rtol=0)
        for k in range(depth):
            # Position i takes the token k + 1 places ahead; the last ones have none and are not compared.
            ahead = input_ids.roll(-(k + 1), dims=1)
            positions = torch.arange(48).expand(2, -1)
            hidden = hf_mtp.forward_layer(k, hidden, positions, None, input_ids=ahead)
            valid = 48 - (k + 1)
            torch.testing.assert_close(
                output.mtp_logits[k][:, :valid], hf.lm_head(hidden)[:, :valid], atol=2 * LOGITS_ATOL, rtol=0
            )

    # Gradients of the loss of depth 1, into its own layer and through the shared and the main parameters.
    labels = tokens(config, 2, 48, seed=2)
    losses = model(input_ids, labels, balance=False).mtp_losses
    losses[0].backward()
    hidden = hf(input_ids, output_hidden_states=True).hidden_states[-1]
    hidden = hf_mtp.forward_layer(0, hidden, torch.arange(48).expand(2, -1), None, input_ids=input_ids.roll(-1, 1))
    loss = F.cross_entropy(hf.lm_head(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    loss.backward()
    torch.testing.assert_close(losses[0], loss, rtol=1e-6, atol=0)
    mtp: Any = model.mtp_layers["3"]
    for ours, theirs in (
        (model.embed_tokens.weight, hf.model.embed_tokens.weight),
        (model.lm_head.weight, hf.lm_head.weight),
        (model.get_parameter("layers.1.mlp.experts.gate_up_proj"), hf.model.layers[1].mlp.experts.gate_up_proj),
        (mtp.eh_proj.weight, hf_mtp.layers[0].eh_proj.weight),
        (mtp.norm.weight, hf_mtp.layers[0].post_norm.weight),
        (mtp.block.mlp.experts.down_proj, hf_mtp.layers[0].mtp_block.mlp.experts.down_proj),
    ):
        assert (ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max() < 2e-5


def test_config_json_is_read_by_transformers_as_it_was_written(tmp_path: Path) -> None:
    config = tiny_config(yarn=True, rms_norm_eps=1e-5, num_nextn_predict_layers=1, rope_theta=50000.0)
    save_hf_checkpoint(DeepSeekV3Model(config), config, tmp_path / "hf", dtype=torch.bfloat16)
    read = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
    assert type(read) is transformers.DeepseekV3Config
    for name in ("n_group", "topk_group", "q_lora_rank", "v_head_dim", "rms_norm_eps", "routed_scaling_factor"):
        assert getattr(read, name) == getattr(config, name), name
    assert read.rope_parameters["rope_theta"] == 50000.0
    assert read.rope_parameters["factor"] == 40.0
    assert read.dtype == torch.bfloat16
    assert read.num_mtp_layers == 1
    raw = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert raw["rope_scaling"]["type"] == "yarn"
    assert raw["rope_theta"] == 50000.0
    assert raw["torch_dtype"] == "bfloat16"
    assert DeepSeekV3Config.from_json(tmp_path / "hf" / "config.json") == config
