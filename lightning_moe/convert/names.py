"""Names of the Hugging Face checkpoint format and where each tensor stands in ours.

On disk every expert has tensors of its own, and gate and up projections are apart. Here experts are stacked, and gate
and up are one tensor, gate first.
"""

import re
from typing import NamedTuple

import torch

Place = tuple[int | slice, ...]

# Copies of the embedding and of the head that each multi-token-prediction layer has on disk; serving engines read them.
MTP_COPIES = {"embed_tokens.weight": "embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}

_GATE_UP = re.compile(r"^(.*\.)gate_up_proj(\.weight)?$")
_STACKED = re.compile(r"^(.*\.experts)\.(gate_up_proj|down_proj)$")
_MTP_LAYER = re.compile(r"^mtp_layers\.(\d+)\.(.*)$")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.*)$")


class Piece(NamedTuple):
    """A tensor of a Hugging Face checkpoint and its place in a tensor of ours.

    Args:
        hf_name: Name in the checkpoint.
        our_name: Name in the state dictionary of ``DeepSeekV3Model``.
        place: What it is of our tensor: ``ours[place]``.
    """

    hf_name: str
    our_name: str
    place: Place


def pieces_on_disk(our_name: str, shape: torch.Size) -> list[Piece]:
    """Lists the tensors on disk that make up one of our tensors.

    Args:
        our_name: Name in the state dictionary of ``DeepSeekV3Model``.
        shape: Shape of our tensor.
    """
    stacked = _STACKED.match(our_name)
    if stacked:
        return [
            Piece(f"{_hf_name(stacked[1])}.{expert}.{projection}.weight", our_name, (expert, *rows))
            for expert in range(shape[0])
            for projection, rows in _projections(stacked[2], shape[1])
        ]
    gate_up = _GATE_UP.match(our_name)
    if gate_up:
        return [
            Piece(f"{_hf_name(gate_up[1])}{projection}.weight", our_name, rows)
            for projection, rows in _projections("gate_up_proj", shape[0])
        ]
    return [Piece(_hf_name(our_name), our_name, ())]


def piece_in_memory(our_name: str) -> Piece | None:
    """The stacked tensor that transformers >= 5 holds in memory for the experts, or ``None`` for other names."""
    return Piece(_hf_name(our_name), our_name, ()) if _STACKED.match(our_name) else None


def mtp_copies_of(our_names: list[str]) -> list[Piece]:
    """Lists the copies of the embedding and of the head that belong to the multi-token-prediction layers."""
    layers = sorted({int(match[1]) for match in map(_MTP_LAYER.match, our_names) if match})
    return [
        Piece(f"model.layers.{layer}.{copy}", original, ()) for layer in layers for copy, original in MTP_COPIES.items()
    ]


def layer_of(hf_name: str) -> tuple[int | None, str]:
    """Splits a name on disk into the index of its layer, ``None`` outside of layers, and the rest."""
    match = _LAYER.match(hf_name)
    return (int(match[1]), match[2]) if match else (None, hf_name)


def _projections(name: str, rows: int) -> list[tuple[str, Place]]:
    if name == "gate_up_proj":
        return [("gate_proj", (slice(0, rows // 2),)), ("up_proj", (slice(rows // 2, rows),))]
    return [(name, ())]


def _hf_name(our_name: str) -> str:
    if our_name.startswith("lm_head."):
        return our_name
    mtp = _MTP_LAYER.match(our_name)
    if mtp:
        layer, rest = mtp.groups()
        rest = f"shared_head.{rest}" if rest.startswith("norm.") else rest.removeprefix("block.")
        our_name = f"layers.{layer}.{rest}"
    return "model." + our_name.replace(".mlp.router.", ".mlp.gate.")
