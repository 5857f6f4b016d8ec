"""Conversion of state dictionaries between our names and those of Hugging Face, one tensor at a time."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lightning_moe.convert.names import MTP_COPIES, Piece, layer_of, mtp_copies_of, piece_in_memory, pieces_on_disk
from lightning_moe.models.deepseek_v3.config import DeepSeekV3Config

_log = logging.getLogger(__name__)


class TensorSource(ABC):
    """Named tensors of a Hugging Face model that are read one at a time.

    Args:
        where: How messages call it.
    """

    def __init__(self, where: str) -> None:
        self.where = where

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every tensor, without reading tensors."""

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Reads one tensor, dequantised where it is stored quantised."""

    def in_reading_order(self, names: Iterable[str]) -> list[str]:
        """Sorts names so that reading them in turn is cheap."""
        return sorted(names)


class _InMemory(TensorSource):
    def __init__(self, state: Mapping[str, Tensor]) -> None:
        super().__init__("the state dictionary")
        self._state = state

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._state.items()}

    def read(self, name: str) -> Tensor:
        return self._state[name]


def to_hf_state_dict(state: Mapping[str, Tensor], *, mtp_copies: bool = True) -> dict[str, Tensor]:
    """Converts the state dictionary of a ``DeepSeekV3Model`` to the names that Hugging Face has on disk.

    Args:
        state: Our state dictionary.
        mtp_copies: Whether to add the copies of embedding and head that the released checkpoint has for each
            multi-token-prediction layer.

    Returns:
        Views of the same tensors under the other names.
    """
    return {piece.hf_name: state[piece.our_name][piece.place] for piece in all_pieces(state, mtp_copies=mtp_copies)}


def from_hf_state_dict(hf_state: Mapping[str, Tensor], config: DeepSeekV3Config) -> dict[str, Tensor]:
    """Converts a Hugging Face state dictionary, in the names on disk or those in memory, to a ``DeepSeekV3Model``'s.

    Args:
        hf_state: Tensors under Hugging Face names.
        config: The architecture.

    Returns:
        Our state dictionary; each tensor has the dtype of the (first) one that it was made of.

    Raises:
        ValueError: A tensor is missing, unknown, of another shape, or not finite; the message names it.
    """
    from lightning_moe.models.deepseek_v3.model import DeepSeekV3Model

    with torch.device("meta"):
        shapes = DeepSeekV3Model(config).state_dict()
    state = {}
    for name, like in shapes.items():
        names = [piece.hf_name for piece in (*_in_memory([name]), *pieces_on_disk(name, like.shape))]
        dtype = next((hf_state[hf_name].dtype for hf_name in names if hf_name in hf_state), like.dtype)
        state[name] = torch.empty(like.shape, dtype=dtype)
    fill(state, _InMemory(hf_state), config)
    return state


def all_pieces(state: Mapping[str, Tensor], *, mtp_copies: bool) -> list[Piece]:
    """Lists the tensors on disk that a state dictionary of ours makes."""
    pieces = [piece for name, tensor in state.items() for piece in pieces_on_disk(name, tensor.shape)]
    return pieces + (mtp_copies_of(list(state)) if mtp_copies else [])


@torch.no_grad()
def fill(state: Mapping[str, Tensor], source: TensorSource, config: DeepSeekV3Config) -> None:
    """Copies the tensors of a source into a state dictionary of ours, in place; names and shapes are checked first.

    Args:
        state: Our state dictionary.
        source: Where the tensors come from.
        config: The architecture of the state dictionary.

    Raises:
        ValueError: A tensor is missing, unknown, of another shape, or not finite; the message names it.
    """
    shapes = source.shapes()
    pieces = _choose_pieces(state, shapes, source, config)
    copies = {piece.hf_name: piece for piece in mtp_copies_of(list(state)) if piece.hf_name in shapes}
    _reject_unknown(set(shapes) - set(pieces) - set(copies), source, config)
    for name, piece in {**pieces, **copies}.items():
        expected = tuple(state[piece.our_name][piece.place].shape)
        if shapes[name] != expected:
            raise ValueError(
                f"{source.where}: {name} has shape {list(shapes[name])}, but this model needs {list(expected)}.\n"
                "The model's config does not belong to these weights; take their own config.json."
            )

    for name in source.in_reading_order(pieces):
        target = state[pieces[name].our_name][pieces[name].place]
        target.copy_(source.read(name))
        if not target.isfinite().all():
            raise ValueError(f"{source.where}: {name} holds values that are not finite as {target.dtype}.")
    for name in source.in_reading_order(copies):
        original = state[copies[name].our_name]
        if not torch.equal(source.read(name).to(original), original):
            _log.warning("%s: %s differs from %s; the main model's is used.", source.where, name, copies[name].our_name)


def _in_memory(our_names: Iterable[str]) -> list[Piece]:
    return [piece for piece in map(piece_in_memory, our_names) if piece is not None]


def _choose_pieces(
    state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], source: TensorSource, config: DeepSeekV3Config
) -> dict[str, Piece]:
    """Maps the names to read to their places; experts may be stacked or apart."""
    chosen: dict[str, Piece] = {}
    for our_name, tensor in state.items():
        stacked = [piece for piece in _in_memory([our_name]) if piece.hf_name in shapes]
        for piece in stacked or pieces_on_disk(our_name, tensor.shape):
            if piece.hf_name in shapes:
                chosen[piece.hf_name] = piece
            elif our_name.endswith(".e_score_correction_bias") and config.topk_method != "noaux_tc":
                tensor.zero_()  # DeepSeek-V2 has no bias
            else:
                raise ValueError(_missing(piece, source))
    return chosen


def _missing(piece: Piece, source: TensorSource) -> str:
    message = f"{source.where}: {piece.hf_name} is missing."
    if piece.our_name.startswith("mtp_layers."):
        message += (
            "\nThese weights come without multi-token prediction (transformers drops it on save_pretrained); "
            "num_nextn_predict_layers=0 loads the rest."
        )
    return message


def _reject_unknown(names: set[str], source: TensorSource, config: DeepSeekV3Config) -> None:
    # Only a multi-token-prediction layer has this projection; a layer too many of another model must not pass as one.
    known = config.num_hidden_layers + config.num_nextn_predict_layers
    split = {name: layer_of(name) for name in names}
    skipped = {layer for layer, rest in split.values() if layer is not None and rest == "eh_proj.weight"}
    skipped = {layer for layer in skipped if layer >= known}
    unknown = sorted(
        name
        for name, (layer, rest) in split.items()
        if layer not in skipped and not rest.endswith("rotary_emb.inv_freq") and rest not in MTP_COPIES
    )
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise ValueError(
            f"{source.where}: {unknown[0]}{more} has no place in this model "
            f"({config.num_hidden_layers} layers, {config.n_routed_experts} experts).\n"
            "The model's config does not belong to these weights; take their own config.json."
        )
    if skipped:
        _log.info(
            "%s: multi-token-prediction layers %s are skipped, as num_nextn_predict_layers is %d.",
            source.where,
            ", ".join(map(str, sorted(skipped))),
            config.num_nextn_predict_layers,
        )
