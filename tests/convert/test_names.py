"""Names on disk against those that transformers writes and those of the released checkpoint."""

import pytest
import torch

from lightning_moe.convert import to_hf_state_dict
from lightning_moe.convert.names import layer_of, piece_in_memory, pieces_on_disk
from lightning_moe.models.deepseek_v3.config import DeepSeekV3Config
from lightning_moe.models.deepseek_v3.model import DeepSeekV3Model
from tests.models.tiny import smaller_config


def meta_names(config: DeepSeekV3Config) -> dict[str, torch.Size]:
    with torch.device("meta"):
        state = DeepSeekV3Model(config).state_dict()
    return {name: tensor.shape for name, tensor in to_hf_state_dict(state).items()}


def test_names_and_shapes_of_the_released_checkpoint() -> None:
    config = DeepSeekV3Config.preset("deepseek_v3_671b", num_hidden_layers=4, n_routed_experts=16, n_group=8)
    shapes = meta_names(config)
    assert shapes["model.embed_tokens.weight"] == (129280, 7168) == shapes["lm_head.weight"]
    assert shapes["model.layers.0.mlp.gate_proj.weight"] == (18432, 7168)
    assert shapes["model.layers.0.self_attn.q_a_layernorm.weight"] == (1536,)
    assert shapes["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"] == (576, 7168)
    assert shapes["model.layers.3.mlp.gate.weight"] == (16, 7168)
    assert shapes["model.layers.3.mlp.gate.e_score_correction_bias"] == (16,)
    assert shapes["model.layers.3.mlp.experts.15.down_proj.weight"] == (7168, 2048)
    assert shapes["model.layers.3.mlp.experts.0.up_proj.weight"] == (2048, 7168)
    assert shapes["model.layers.3.mlp.shared_experts.gate_proj.weight"] == (2048, 7168)
    for rest, shape in {
        "enorm.weight": (7168,),
        "hnorm.weight": (7168,),
        "eh_proj.weight": (7168, 14336),
        "shared_head.norm.weight": (7168,),
        "shared_head.head.weight": (129280, 7168),
        "embed_tokens.weight": (129280, 7168),
        "mlp.experts.15.gate_proj.weight": (2048, 7168),
        "mlp.gate.e_score_correction_bias": (16,),
        "post_attention_layernorm.weight": (7168,),
    }.items():
        assert shapes[f"model.layers.4.{rest}"] == shape, rest
    assert not any("gate_up" in name or "router" in name or "block" in name or "mtp" in name for name in shapes)


def test_number_of_tensors_of_the_released_checkpoint() -> None:
    # Per MoE layer 768 expert tensors and 2 of the gate; 91,991 with the scales of FP8 in the released index.
    names = meta_names(DeepSeekV3Config.preset("deepseek_v3_671b"))
    attention, norms, feed_forward, shared, gate = 7, 2, 3, 3, 2
    dense, moe = attention + norms + feed_forward, attention + norms + 256 * 3 + shared + gate
    assert len(names) == 3 * dense + 58 * moe + 3 + moe + 6
    scaled = 3 * (5 + 3) + 59 * (5 + 256 * 3 + 3)
    assert len(names) + scaled == 91991


def test_gate_stands_before_up() -> None:
    pieces = pieces_on_disk("layers.2.mlp.experts.gate_up_proj", torch.Size((2, 6, 5)))
    assert [(piece.hf_name, piece.place) for piece in pieces] == [
        ("model.layers.2.mlp.experts.0.gate_proj.weight", (0, slice(0, 3))),
        ("model.layers.2.mlp.experts.0.up_proj.weight", (0, slice(3, 6))),
        ("model.layers.2.mlp.experts.1.gate_proj.weight", (1, slice(0, 3))),
        ("model.layers.2.mlp.experts.1.up_proj.weight", (1, slice(3, 6))),
    ]


def test_every_element_has_one_place() -> None:
    with torch.device("meta"):
        state = DeepSeekV3Model(smaller_config(num_nextn_predict_layers=2)).state_dict()
    for name, tensor in state.items():
        covered = torch.zeros(tensor.shape, dtype=torch.int64)
        for piece in pieces_on_disk(name, tensor.shape):
            covered[piece.place] += 1
        assert (covered == 1).all(), name


def test_names_in_memory_of_transformers() -> None:
    piece = piece_in_memory("mtp_layers.3.block.mlp.experts.down_proj")
    assert piece is not None
    assert piece.hf_name == "model.layers.3.mlp.experts.down_proj"
    assert piece_in_memory("layers.1.mlp.shared_experts.down_proj.weight") is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [("model.layers.61.eh_proj.weight", (61, "eh_proj.weight")), ("lm_head.weight", (None, "lm_head.weight"))],
)
def test_layer_of(name: str, expected: tuple[int | None, str]) -> None:
    assert layer_of(name) == expected


@pytest.mark.parametrize("query_rank", [12, None])
def test_names_equal_those_that_transformers_writes(tmp_path: object, query_rank: int | None) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.24")
    from safetensors import safe_open

    from tests.models.tiny import ARCHITECTURE

    fields = {**ARCHITECTURE, "q_lora_rank": query_rank, "num_key_value_heads": 4}
    transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**fields)).save_pretrained(tmp_path)
    with safe_open(f"{tmp_path}/model.safetensors", framework="pt") as file:
        written = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    ours = meta_names(DeepSeekV3Config(**{**ARCHITECTURE, "q_lora_rank": query_rank}))
    assert {name: tuple(shape) for name, shape in ours.items()} == written
