"""Reads the ``config.json`` of Hugging Face into the fields of :class:`DeepSeekV3Config`."""

import json
import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

from lightning_moe.models.deepseek_v3.config import DeepSeekV3Config, YarnScaling

_log = logging.getLogger(__name__)

# The kinds of model that are read, and what their files leave out where it is not the 671B model's.
_MODEL_TYPES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},
    "kimi_k2": {},
    "sarvam_mla": {},
    "deepseek_v2": {
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
        "num_nextn_predict_layers": 0,
    },
}
# Keys of config.json that only have one value here; anything else is another architecture.
_FIXED = {
    "attention_bias": (False,),
    "attention_dropout": (0, 0.0),
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "moe_layer_freq": (1,),
    "rope_interleave": (True,),
    "tie_word_embeddings": (False,),
}
_IGNORED = [
    "_name_or_path",
    "architectures",
    "auto_map",
    "aux_loss_alpha",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "ep_size",
    "head_dim",
    "num_key_value_heads",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "qk_head_dim",
    "quantization_config",
    "seq_aux",
    "torch_dtype",
    "transformers_version",
    "unsloth_fixed",
    "use_cache",
]


def fields_from_json(path: str | Path) -> dict[str, Any]:
    """Reads the fields of :class:`DeepSeekV3Config` from an unmodified Hugging Face ``config.json``.

    Keys that do not matter for training (dtype, token ids, quantisation, …) are dropped and named in one info line.

    Args:
        path: The file.

    Returns:
        Field names and plain values; ``rope_scaling`` is a dictionary or ``None``.

    Raises:
        ValueError: The file is not a JSON object, has a key that is not known, or describes another architecture.
    """
    path = Path(path)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"config is {str(path)!r}, but this file cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(f"config is {str(path)!r}, but this file is not JSON: {error}.") from error
    if not isinstance(raw, dict):
        raise ValueError(f"config is {str(path)!r}, but a config.json holds one JSON object.")

    heads = raw.get("num_attention_heads", DeepSeekV3Config.num_attention_heads)
    if raw.get("num_key_value_heads", heads) not in (None, heads):
        raise ValueError(
            f"{path}: num_key_value_heads is {raw['num_key_value_heads']}, but multi-head latent attention has as many "
            f"as num_attention_heads ({heads})."
        )
    for key, allowed in _FIXED.items():
        if key in raw and raw[key] not in allowed:
            raise ValueError(f"{path}: {key} is {raw[key]!r}, but a DeepSeek-V3 model has {allowed[0]!r}.")

    known = {field.name for field in fields(DeepSeekV3Config)}
    read = {key: value for key, value in raw.items() if key in known and key != "rope_scaling"}
    unknown = set(raw) - known - set(_FIXED) - set(_IGNORED) - {"rope_parameters", "model_type", "mlp_layer_types"}
    if unknown:
        raise ValueError(f"{path}: unknown keys {', '.join(sorted(unknown))}; this is not a DeepSeek-V3 config.json.")
    model_type = raw.get("model_type", "deepseek_v3")
    if model_type not in _MODEL_TYPES:
        raise ValueError(f"{path}: model_type is {model_type!r}, but these can be read: {', '.join(_MODEL_TYPES)}.")
    for key, value in _MODEL_TYPES[model_type].items():
        if read.get(key) is None:  # transformers writes null for the groups of a model without
            read[key] = value
    _read_layer_types(raw, read, path)
    read["n_shared_experts"] = raw.get("n_shared_experts") or 0
    rope: Any = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f'{path}: rope_scaling is {rope!r}, but it must be null, or {{"type": "yarn", "factor": 40}}.')
    theta: Any = rope.get("rope_theta", raw.get("rope_theta", DeepSeekV3Config.rope_theta))
    read["rope_theta"] = float(theta) if isinstance(theta, int) else theta
    longest = raw.get("max_position_embeddings", DeepSeekV3Config.max_position_embeddings)
    read["rope_scaling"] = _yarn_from_json({"original_max_position_embeddings": longest, **rope}, path)
    dropped = sorted(key for key in raw if key in _FIXED or key in _IGNORED)
    notes = [f"{path}: not needed for training: {', '.join(dropped) or 'nothing'}"]
    if read["rope_scaling"]:
        notes.append("YaRN is on (rope_scaling: null turns it off)")
    if read.get("initializer_range", 0.006) != 0.006:
        notes.append(f"initializer_range is {read['initializer_range']} (the report trains from 0.006)")
    _log.info("; ".join(notes))
    return read


def _read_layer_types(raw: dict[str, Any], read: dict[str, Any], path: Path) -> None:
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        return
    dense = kinds.count("dense") if isinstance(kinds, list) else 0
    layers = read.get("num_hidden_layers", DeepSeekV3Config.num_hidden_layers)
    if kinds != ["dense"] * dense + ["sparse"] * (layers - dense) or raw.get("first_k_dense_replace", dense) != dense:
        raise ValueError(
            f"{path}: mlp_layer_types must name first_k_dense_replace dense layers and then sparse ones, "
            f"{layers} in all."
        )
    read["first_k_dense_replace"] = dense


def _yarn_from_json(rope: dict[str, Any], path: Path) -> dict[str, Any] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise ValueError(f"{path}: rope_scaling.type is {kind!r}, but DeepSeek-V3 has 'yarn' or none.")
    if rope.get("factor") is None:
        raise ValueError(f"{path}: rope_scaling has no factor; DeepSeek-V3 has 40.")
    names = {field.name for field in fields(YarnScaling)}
    unknown = set(rope) - names - {"rope_theta", "rope_type"}
    if unknown:
        raise ValueError(f"{path}: rope_scaling has unknown keys {', '.join(sorted(unknown))}.")
    # Keys that are absent from the file mean 0 for these two, not the values of DeepSeek-V3.
    values: dict[str, Any] = {"mscale": 0.0, "mscale_all_dim": 0.0}
    values.update({key: value for key, value in rope.items() if key in names and value is not None})
    values["type"] = "yarn"
    return values
