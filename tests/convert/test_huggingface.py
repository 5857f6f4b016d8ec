"""Checkpoints in and out: round trips, FP8, multi-token prediction, and errors that name the tensor."""

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_moe import convert
from lightning_moe.convert import (
    from_hf_state_dict,
    hf_config,
    load_hf_checkpoint,
    save_hf_checkpoint,
    to_hf_state_dict,
)
from lightning_moe.convert.huggingface import dequantise
from lightning_moe.models.deepseek_v3.config import DeepSeekV3Config
from lightning_moe.models.deepseek_v3.model import DeepSeekV3Model
from tests.models.tiny import random_model, smaller_config, tiny_config

INDEX = "model.safetensors.index.json"
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name], right[name]), name


def edited(directory: Path, **changes: Tensor | None) -> Path:
    """Rewrites single tensors of a checkpoint of one file; ``None`` removes."""
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def saved(tmp_path: Path, config: DeepSeekV3Config, **options: Any) -> tuple[DeepSeekV3Model, Path]:
    model = random_model(config, bias_mean=-1.0)
    save_hf_checkpoint(model, config, tmp_path / "hf", **options)
    return model, tmp_path / "hf"


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_round_trip_in_memory_is_exact(depth: int) -> None:
    config = smaller_config(num_nextn_predict_layers=depth)
    state = random_model(config).state_dict()
    assert_same(from_hf_state_dict(to_hf_state_dict(state), config), state)


@pytest.mark.parametrize("max_shard_size", [10**9, 5000, 1])
def test_round_trip_through_files_is_exact(tmp_path: Path, max_shard_size: int) -> None:
    config = smaller_config(num_nextn_predict_layers=1)
    model, directory = saved(tmp_path, config, max_shard_size=max_shard_size)
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    if max_shard_size == 10**9:
        assert files == ["model.safetensors"]
        assert not (directory / INDEX).exists()
    else:
        index = json.loads((directory / INDEX).read_text())
        assert set(index["weight_map"].values()) == set(files)
        assert len(files) > 2
        assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
        tensors = {name: t for file in files for name, t in load_file(directory / file).items()}
        assert index["weight_map"].keys() == tensors.keys()
        assert index["metadata"]["total_size"] == sum(t.numel() * t.itemsize for t in tensors.values())
        for file in files:
            held = load_file(directory / file).values()
            assert len(held) == 1 or sum(t.numel() * t.itemsize for t in held) <= max_shard_size
    other = DeepSeekV3Model(config)
    load_hf_checkpoint(other, directory)
    assert_same(other.state_dict(), model.state_dict())
    assert DeepSeekV3Config.from_json(directory / "config.json") == config
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_bfloat16_export_keeps_the_gate_in_float32(tmp_path: Path) -> None:
    config = smaller_config(num_nextn_predict_layers=1)
    model, directory = saved(tmp_path, config, dtype=torch.bfloat16)
    tensors = load_file(directory / "model.safetensors")
    gates = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    assert gates == {
        f"model.layers.{layer}.mlp.gate.{name}" for layer in (1, 2, 3) for name in ("weight", "e_score_correction_bias")
    }
    assert json.loads((directory / "config.json").read_text())["torch_dtype"] == "bfloat16"
    other = DeepSeekV3Model(config)  # float32: loading keeps the model's own dtype
    load_hf_checkpoint(other, directory)
    assert torch.equal(other.lm_head.weight, model.lm_head.weight.bfloat16().float())
    bias = "layers.1.mlp.router.e_score_correction_bias"
    assert torch.equal(other.get_buffer(bias), model.get_buffer(bias))


def test_export_has_the_copies_of_the_released_checkpoint(tmp_path: Path) -> None:
    model, directory = saved(tmp_path, smaller_config(num_nextn_predict_layers=1))
    tensors = load_file(directory / "model.safetensors")
    assert torch.equal(tensors["model.layers.3.embed_tokens.weight"], model.embed_tokens.weight)
    assert torch.equal(tensors["model.layers.3.shared_head.head.weight"], model.lm_head.weight)


def test_copies_may_be_absent_and_a_different_one_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = smaller_config(num_nextn_predict_layers=1)
    model, directory = saved(tmp_path, config)
    edited(directory, **{"model.layers.3.embed_tokens.weight": None})
    other = DeepSeekV3Model(config)
    load_hf_checkpoint(other, directory)
    assert not caplog.records
    edited(directory, **{"model.layers.3.shared_head.head.weight": torch.zeros(31, 16)})
    load_hf_checkpoint(other, directory)
    assert "model.layers.3.shared_head.head.weight differs from lm_head.weight" in caplog.text
    assert_same(other.state_dict(), model.state_dict())


def test_multi_token_prediction_is_skipped_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, directory = saved(tmp_path, smaller_config(num_nextn_predict_layers=2))
    without = DeepSeekV3Model(smaller_config())
    with caplog.at_level(logging.INFO):
        load_hf_checkpoint(without, directory)
    assert [record.getMessage() for record in caplog.records] == [
        f"{directory}: multi-token-prediction layers 3, 4 are skipped, as num_nextn_predict_layers is 0."
    ]
    expected = {name: t for name, t in model.state_dict().items() if not name.startswith("mtp_layers")}
    assert_same(without.state_dict(), expected)


def test_multi_token_prediction_that_the_files_lack_is_an_error(tmp_path: Path) -> None:
    _, directory = saved(tmp_path, smaller_config())
    with pytest.raises(ValueError, match=r"model\.layers\.3\..* is missing[\s\S]*num_nextn_predict_layers=0"):
        load_hf_checkpoint(DeepSeekV3Model(smaller_config(num_nextn_predict_layers=1)), directory)


def test_a_layer_too_many_is_not_taken_for_multi_token_prediction(tmp_path: Path) -> None:
    _, directory = saved(tmp_path, smaller_config(num_hidden_layers=4))
    with pytest.raises(ValueError, match=r"model\.layers\.3\.\S+ and \d+ more has no place in this model"):
        load_hf_checkpoint(DeepSeekV3Model(smaller_config()), directory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({EXPERT: None}, rf"{EXPERT} is missing"),
        ({"model.layers.0.self_attn.q_bias": torch.zeros(2)}, r"q_bias has no place in this model"),
        ({"model.layers.1.eh_proj.weight": torch.zeros(2)}, r"layers\.1\.eh_proj\.weight has no place in this model"),
        ({EXPERT: torch.zeros(8, 15)}, rf"{EXPERT} has shape \[8, 15\], but this model needs \[8, 16\]"),
        ({EXPERT: torch.full((8, 16), float("nan"))}, rf"{EXPERT} holds values that are not finite"),
        (
            {"model.layers.2.mlp.gate.e_score_correction_bias": torch.full((8,), float("inf"))},
            r"layers\.2\.mlp\.gate\.e_score_correction_bias holds values that are not finite",
        ),
        ({EXPERT: torch.zeros(8, 16, dtype=torch.int32)}, rf"{EXPERT} has dtype torch\.int32"),
        ({EXPERT: torch.zeros(8, 16, dtype=torch.float8_e4m3fn)}, rf"{EXPERT} has dtype torch\.float8_e4m3fn"),
    ],
)
def test_broken_tensors_are_named(tmp_path: Path, change: dict[str, Tensor | None], message: str) -> None:
    _, directory = saved(tmp_path, smaller_config())
    with pytest.raises(ValueError, match=message) as error:
        load_hf_checkpoint(DeepSeekV3Model(smaller_config()), edited(directory, **change))
    assert len(str(error.value).splitlines()) <= 4


def test_names_and_shapes_are_checked_before_the_model_is_touched(tmp_path: Path) -> None:
    _, directory = saved(tmp_path, smaller_config())
    model = random_model(smaller_config(), seed=5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="is missing"):
        load_hf_checkpoint(model, edited(directory, **{"model.norm.weight": None}))
    assert_same(dict(model.state_dict()), before)


def test_old_buffers_of_rotary_frequencies_are_ignored(tmp_path: Path) -> None:
    model, directory = saved(tmp_path, smaller_config())
    edited(directory, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    other = DeepSeekV3Model(smaller_config())
    load_hf_checkpoint(other, directory)
    assert_same(other.state_dict(), model.state_dict())


def test_deepseek_v2_has_no_bias_on_disk() -> None:
    config = smaller_config(scoring_func="softmax", topk_method="greedy", n_group=1, topk_group=1)
    model = random_model(config)
    hf_state = {name: t for name, t in to_hf_state_dict(model.state_dict()).items() if not name.endswith("_bias")}
    state = from_hf_state_dict(hf_state, config)
    bias = "layers.1.mlp.router.e_score_correction_bias"
    assert torch.equal(state[bias], torch.zeros(8))
    assert torch.equal(state["layers.1.mlp.router.weight"], model.state_dict()["layers.1.mlp.router.weight"])
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.gate\.e_score_correction_bias is missing"):
        from_hf_state_dict(hf_state, smaller_config())


# FP8


def quantise(weight: Tensor, block: int = 128) -> tuple[Tensor, Tensor]:
    """Block quantisation written as a loop, the other way round from the code under test."""
    rows, columns = weight.shape
    quantised = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scale = torch.empty(-(-rows // block), -(-columns // block))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            where = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scale[i, j] = weight[where].abs().max() / 448
            quantised[where] = (weight[where] / scale[i, j]).to(torch.float8_e4m3fn)
    return quantised, scale


def test_dequantise_of_ragged_blocks() -> None:
    weight = torch.randn(576, 300, generator=torch.Generator().manual_seed(0)) * 0.006  # 4.5 blocks of rows
    weight[512:] *= 50  # the ragged block has a scale of its own
    quantised, scale = quantise(weight)
    assert scale.shape == (5, 3)
    back = dequantise(quantised, scale)
    assert back.dtype == torch.float32
    assert (back[513, 299], back[0, 0]) == (
        quantised[513, 299].float() * scale[4, 2],
        quantised[0, 0].float() * scale[0, 0],
    )
    assert (back - weight).norm() / weight.norm() < 0.03


def test_fp8_checkpoint_loads(tmp_path: Path) -> None:
    config = smaller_config(hidden_size=192, moe_intermediate_size=136, num_nextn_predict_layers=1)
    model, directory = saved(tmp_path, config)
    tensors = load_file(directory / "model.safetensors")
    quantised: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if "_proj" in name and "eh_proj" not in name:
            quantised[name], quantised[f"{name}_scale_inv"] = quantise(tensor)
            expected[name] = dequantise(quantised[name], quantised[f"{name}_scale_inv"])
        else:
            quantised[name] = expected[name] = tensor
    names = sorted(quantised)
    halves = names[::2], names[1::2]  # scales stand in another file than their weights
    weight_map = {}
    for number, half in enumerate(halves, start=1):
        save_file({name: quantised[name] for name in half}, directory / f"part-{number}.safetensors")
        weight_map.update(dict.fromkeys(half, f"part-{number}.safetensors"))
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    other = DeepSeekV3Model(config)
    load_hf_checkpoint(other, directory)
    loaded = to_hf_state_dict(other.state_dict())
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name
    assert any(name.endswith("experts.7.down_proj.weight_scale_inv") for name in names)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(1, 2), rf"{EXPERT}_scale_inv has shape \[1, 2\], but blocks of 128 x 128 need \[1, 1\]"),
        (torch.full((1, 1), float("inf")), rf"{EXPERT} holds values that are not finite"),
    ],
)
def test_broken_scales_are_named(tmp_path: Path, scale: Tensor, message: str) -> None:
    _, directory = saved(tmp_path, smaller_config())
    weight = torch.ones(8, 16).to(torch.float8_e4m3fn)
    edited(directory, **{EXPERT: weight, f"{EXPERT}_scale_inv": scale})
    with pytest.raises(ValueError, match=message):
        load_hf_checkpoint(DeepSeekV3Model(smaller_config()), directory)


# Folders and indices


def test_index_cannot_leave_the_folder(tmp_path: Path) -> None:
    _, outside = saved(tmp_path, smaller_config())
    folder = tmp_path / "folder"
    folder.mkdir()
    for path in ("../hf/model.safetensors", str(outside / "model.safetensors"), "..", "sub/x.safetensors", "x.bin"):
        (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": path}}))
        with pytest.raises(ValueError, match=r"model\.norm\.weight is in .*not a safetensors file of this folder"):
            load_hf_checkpoint(DeepSeekV3Model(smaller_config()), folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is not an index"),
        ("[]", "is not an index"),
        ("{}", "is not an index"),
        ('{"weight_map": {"a": "gone.safetensors"}}', r"a is in gone\.safetensors, but this file is missing"),
        ('{"weight_map": {"a": "model.safetensors"}}', r"a is in model\.safetensors\.index\.json, but not in the file"),
    ],
)
def test_broken_index(tmp_path: Path, index: str, message: str) -> None:
    _, directory = saved(tmp_path, smaller_config())
    (directory / INDEX).write_text(index)
    with pytest.raises(ValueError, match=message):
        load_hf_checkpoint(DeepSeekV3Model(smaller_config()), directory)


def test_folder_without_checkpoint_and_file_that_is_none(tmp_path: Path) -> None:
    model = DeepSeekV3Model(smaller_config())
    with pytest.raises(ValueError, match=r"has neither model\.safetensors nor"):
        load_hf_checkpoint(model, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors here")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        load_hf_checkpoint(model, tmp_path)


def test_meta_model_is_refused(tmp_path: Path) -> None:
    _, directory = saved(tmp_path, smaller_config())
    with torch.device("meta"):
        model = DeepSeekV3Model(smaller_config())
    with pytest.raises(ValueError, match="meta device"):
        load_hf_checkpoint(model, directory)


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    config = smaller_config()
    model = random_model(config)
    (tmp_path / "empty").mkdir()
    save_hf_checkpoint(model, config, tmp_path / "empty")
    with pytest.raises(ValueError, match="already holds something"):
        save_hf_checkpoint(model, config, tmp_path / "empty")


@pytest.mark.parametrize("place", ["link", "."])
def test_an_empty_folder_is_filled_where_it_is(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    monkeypatch.chdir(tmp_path / "empty")
    config = smaller_config()
    model = random_model(config)
    save_hf_checkpoint(model, config, tmp_path / "link" if place == "link" else place)
    assert sorted(file.name for file in (tmp_path / "empty").iterdir()) == ["config.json", "model.safetensors"]
    loaded = DeepSeekV3Model(config)
    load_hf_checkpoint(loaded, tmp_path / "empty")
    assert_same(loaded.state_dict(), model.state_dict())


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    config = smaller_config()
    model = random_model(config)
    for dtype in (torch.int32, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match=f"dtype is {dtype}, but it must be"):
            save_hf_checkpoint(model, config, tmp_path / "hf", dtype=dtype)
    other = replace(config, vocab_size=2 * config.vocab_size)
    with pytest.raises(ValueError, match="config does not describe the model: embed_tokens.weight is"):
        save_hf_checkpoint(model, other, tmp_path / "hf")
    with pytest.raises(ValueError, match="config does not describe the model: .* missing in the model"):
        save_hf_checkpoint(model, replace(config, num_hidden_layers=5), tmp_path / "hf")
    taken = config.num_experts_per_tok
    with pytest.raises(ValueError, match=f"num_experts_per_tok is {taken} in the model and {taken - 1} by config"):
        save_hf_checkpoint(model, replace(config, num_experts_per_tok=taken - 1), tmp_path / "hf")
    with torch.no_grad():
        model.norm.weight[3] = 1e6
    with pytest.raises(ValueError, match=r"model.norm.weight holds values that are not finite as torch.float16"):
        save_hf_checkpoint(model, config, tmp_path / "hf", dtype=torch.float16)
    assert list(tmp_path.iterdir()) == []


def test_groups_that_are_all_taken_are_written_as_one() -> None:
    config = tiny_config(n_group=8, topk_group=8, topk_method="group_limited_greedy", n_routed_experts=8)
    written = hf_config(config)
    assert (written["n_group"], written["topk_group"], written["topk_method"]) == (1, 1, "noaux_tc")


def test_interrupted_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    written: list[str] = []

    def interrupted(tensors: dict[str, Tensor], path: Path, **options: Any) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(str(path))
        save_file(tensors, path, **options)

    monkeypatch.setattr(safetensors.torch, "save_file", interrupted)
    config = smaller_config()
    with pytest.raises(KeyboardInterrupt):
        save_hf_checkpoint(random_model(config), config, tmp_path / "hf", max_shard_size=5000)
    assert written
    assert list(tmp_path.iterdir()) == []


# config.json


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax', but Hugging Face"),
        ({"topk_method": "group_limited_greedy"}, "topk_method is 'group_limited_greedy', but Hugging Face"),
    ],
)
def test_what_hugging_face_cannot_express(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    config = smaller_config(**overrides)
    with pytest.raises(ValueError, match=message):
        save_hf_checkpoint(DeepSeekV3Model(config), config, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("name", ["deepseek_v3_671b", "moonlight_16b", "tiny"])
def test_config_json_of_presets_reads_back(tmp_path: Path, name: str) -> None:
    config = DeepSeekV3Config.preset(name, mtp_input="pre_norm")
    (tmp_path / "config.json").write_text(json.dumps(hf_config(config)))
    assert DeepSeekV3Config.from_json(tmp_path / "config.json") == config


def test_config_json_without_multi_token_prediction_says_so() -> None:
    values = hf_config(smaller_config())
    assert values["num_nextn_predict_layers"] == 0
    assert values["rope_scaling"] is None
    assert values["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e4}


def test_package_does_not_import_transformers() -> None:
    for file in Path(convert.__file__).parent.glob("*.py"):
        assert not re.search(r"^\s*(import|from)\s+transformers", file.read_text(), re.MULTILINE), file
