"""Checkpoints of DeepSeek-V3 in the files of Hugging Face: ``config.json`` and safetensors, in and out."""

import json
import os
import shutil
import tempfile
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_moe.convert.names import Piece
from lightning_moe.convert.state import TensorSource, all_pieces, fill
from lightning_moe.models.deepseek_v3.config import DeepSeekV3Config
from lightning_moe.models.deepseek_v3.model import DeepSeekV3Model

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# Rows and columns of a block that shares one scale in the FP8 checkpoints.
_FP8_BLOCK = 128
_SCALE = "_scale_inv"
# What one set of weights can have several of: context lengths, and the weights before training.
_OF_A_STAGE = ("rope_scaling", "max_position_embeddings", "initializer_range")


def load_hf_checkpoint(model: DeepSeekV3Model, directory: str | Path) -> None:
    """Loads a Hugging Face checkpoint of DeepSeek-V3 into a model, tensor by tensor.

    FP8 weights with block scales are dequantised. Multi-token-prediction layers that the model does not have are
    skipped with one info line. All names and shapes are checked before the first tensor is read.

    Args:
        model: Holds its parameters (not on the meta device); they keep their dtype.
        directory: Folder with ``model.safetensors``, or with ``model.safetensors.index.json`` and its shards.

    Raises:
        ValueError: There is no checkpoint, or a tensor is missing, unknown, of another shape, or not finite.
    """
    state = model.state_dict()
    on_meta = next((name for name, tensor in state.items() if tensor.is_meta), None)
    if on_meta is not None:
        raise ValueError(f"model: {on_meta} is on the meta device; materialise the model (to_empty) before loading.")
    fill(state, _Directory(Path(directory)), model.config)


def save_hf_checkpoint(
    model: DeepSeekV3Model,
    config: DeepSeekV3Config,
    directory: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int = 5_000_000_000,
) -> None:
    """Writes a model as a Hugging Face checkpoint that transformers, vLLM and SGLang read.

    The weight and the bias of the gate stay float32 whatever ``dtype`` is, so that routing does not change. Each
    multi-token-prediction layer gets copies of embedding and head, as in the released checkpoint.

    Args:
        model: The model.
        config: Its architecture.
        directory: Folder to create; it appears once it is complete.
        dtype: Dtype of the tensors; by default each keeps its own.
        max_shard_size: Largest size of one file in bytes, unless a single tensor is larger.

    Raises:
        ValueError: The folder has files already, Hugging Face's class cannot express the architecture, ``config`` is
            that of another one, a value is not finite in its dtype, or the model is sharded over processes.
    """
    from safetensors.torch import save_file

    directory = Path(directory).resolve()
    state = model.state_dict()
    _check_export(state, model.config, config, dtype)
    main_dtype = dtype or state["embed_tokens.weight"].dtype
    config_json = hf_config(config, main_dtype)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} already holds something; give a folder that is empty or does not exist.")
    if max_shard_size < 1:
        raise ValueError(f"max_shard_size is {max_shard_size} bytes, but it must be positive, as in 5000000000.")

    def dtype_of(piece: Piece) -> torch.dtype:
        own = state[piece.our_name].dtype
        return own if dtype is None or ".router." in piece.our_name else dtype

    def size_of(piece: Piece) -> int:
        return state[piece.our_name][piece.place].numel() * dtype_of(piece).itemsize

    pieces = all_pieces(state, mtp_copies=True)
    shards = _split(pieces, [size_of(piece) for piece in pieces], max_shard_size)
    beside = directory if directory.exists() else directory.parent
    beside.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".tmp", dir=beside))
    try:
        weight_map = {}
        for number, shard in enumerate(shards, start=1):
            file_name = _SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            # A copy of each: safetensors refuses tensors that share memory.
            tensors = {
                piece.hf_name: state[piece.our_name][piece.place].detach().to("cpu", dtype_of(piece), copy=True)
                for piece in shard
            }
            for name, tensor in tensors.items():
                if not tensor.isfinite().all():
                    raise ValueError(f"{name} holds values that are not finite as {tensor.dtype}.")
            save_file(tensors, temporary / file_name, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(tensors, file_name))
        if len(shards) > 1:
            total_size = sum(map(size_of, pieces))
            _write_json(temporary / _INDEX, {"metadata": {"total_size": total_size}, "weight_map": weight_map})
        _write_json(temporary / "config.json", config_json)
        temporary.chmod(0o777 & ~_umask())
        if directory.exists():  # it may be a mount point, which cannot be replaced
            for file in sorted(temporary.iterdir(), key=lambda file: file.suffix == ".json"):
                os.replace(file, directory / file.name)
            temporary.rmdir()
        else:
            os.replace(temporary, directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _check_export(
    state: dict[str, Tensor], own: DeepSeekV3Config, config: DeepSeekV3Config, dtype: torch.dtype | None
) -> None:
    if dtype is not None and (not dtype.is_floating_point or dtype.itemsize < 2):
        raise ValueError(f"dtype is {dtype}, but it must be torch.bfloat16, float16, float32 or float64.")
    sharded = next((name for name, tensor in state.items() if isinstance(tensor, DTensor)), None)
    if sharded is not None:
        raise ValueError(
            f"model: {sharded} is sharded over processes; load the checkpoint of the run into a model on one process "
            "(DeepSeekV3.load_from_checkpoint), and export that."
        )
    with torch.device("meta"):
        described = DeepSeekV3Model(config).state_dict()
    for name in [*state, *described]:
        present, wanted = (tuple(of[name].shape) if name in of else None for of in (state, described))
        if present != wanted:
            raise ValueError(
                f"config does not describe the model: {name} is {present or 'missing'} in the model and "
                f"{wanted or 'missing'} by config; give the config that the model was built with."
            )
    for field in fields(config):
        ours, theirs = getattr(own, field.name), getattr(config, field.name)
        if ours != theirs and field.name not in _OF_A_STAGE:
            raise ValueError(
                f"config does not describe the model: {field.name} is {ours} in the model and {theirs} by config; give "
                "the config that the model was built with."
            )


def hf_config(config: DeepSeekV3Config, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Writes an architecture as the content of a Hugging Face ``config.json``.

    Rotary settings and dtype stand there twice: under the keys of transformers >= 5 and under the older ones that other
    readers take.

    Args:
        config: The architecture.
        dtype: Dtype of the weights.

    Raises:
        ValueError: Hugging Face's ``DeepseekV3ForCausalLM`` cannot express the architecture.
    """
    if config.scoring_func != "sigmoid":
        raise ValueError(
            f"scoring_func is {config.scoring_func!r}, but Hugging Face's DeepseekV3ForCausalLM always has a sigmoid "
            "gate: this model cannot be exported. A value that works: scoring_func=sigmoid."
        )
    if config.topk_method == "group_limited_greedy" and config.topk_group < config.n_group:
        raise ValueError(
            "topk_method is 'group_limited_greedy', but Hugging Face's DeepseekV3ForCausalLM always scores a group by "
            "its two best experts: this model cannot be exported. A value that works: topk_method=noaux_tc."
        )
    values = asdict(config)
    if config.topk_group == config.n_group:  # the same routing, which readers that score groups take too
        values |= {"n_group": 1, "topk_group": 1}
    if values["mtp_input"] == "post_norm" or not config.num_nextn_predict_layers:
        del values["mtp_input"]  # what every reader takes for granted
    yarn = values.pop("rope_scaling")
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if yarn is not None:
        parameters = {**yarn, "rope_type": "yarn", "rope_theta": config.rope_theta}
        del parameters["type"]
    dtype_name = str(dtype).removeprefix("torch.")
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **values,
        "topk_method": "noaux_tc",
        "num_key_value_heads": config.num_attention_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "moe_layer_freq": 1,
        "tie_word_embeddings": False,
        "use_cache": True,
        "rope_interleave": True,
        "rope_scaling": yarn,
        "rope_parameters": parameters,
        "dtype": dtype_name,
        "torch_dtype": dtype_name,
    }


def dequantise(weight: Tensor, scale: Tensor) -> Tensor:
    """Dequantises an FP8 weight with one scale for each block of 128 x 128, the last ones possibly smaller.

    Args:
        weight: Weight ``(M, N)``, float8.
        scale: Multiplier of each block ``(ceil(M / 128), ceil(N / 128))``, called "scale_inv" in the files.

    Returns:
        ``(M, N)`` in float32.
    """
    rows, columns = weight.shape
    scale = scale.float().repeat_interleave(_FP8_BLOCK, dim=0)[:rows]
    return weight.float() * scale.repeat_interleave(_FP8_BLOCK, dim=1)[:, :columns]


class _Directory(TensorSource):
    """The safetensors files of a folder, of which one is open at a time."""

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory))
        self._directory = directory
        self._file_of: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._open_name = ""
        self._open: Any = None
        listed = self._listed()
        for file_name in sorted(set(listed.values())) if listed is not None else [_SINGLE]:
            file = self._file(file_name)
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                if listed is None or listed.get(name) == file_name:
                    self._file_of[name] = file_name
                    self._shapes[name] = tuple(file.get_slice(name).get_shape())
        for name, file_name in (listed or {}).items():
            if name not in self._file_of:
                raise ValueError(f"{self.where}: {name} is in {_INDEX}, but not in the file {file_name}.")

    def _listed(self) -> dict[str, str] | None:
        """The file of each tensor as the index has it; ``None`` when there is a single file without an index."""
        index = self._directory / _INDEX
        if not index.is_file():
            if (self._directory / _SINGLE).is_file():
                return None
            raise ValueError(f"{self._directory} has neither {_SINGLE} nor {_INDEX}; give the folder of a checkpoint.")
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = {str(name): str(file_name) for name, file_name in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is not an index of safetensors files: {error}.") from error
        for name, file_name in names.items():
            # Shards stand beside the index; anything else could name a file elsewhere.
            if Path(file_name).name != file_name or "\\" in file_name or not file_name.endswith(".safetensors"):
                raise ValueError(
                    f"{index}: {name} is in {file_name!r}, which is not a safetensors file of this folder."
                )
            if not (self._directory / file_name).is_file():
                raise ValueError(f"{index}: {name} is in {file_name}, but this file is missing.")
        return names

    def _file(self, file_name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if file_name != self._open_name:
            try:
                self._open = safe_open(self._directory / file_name, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{self._directory / file_name} is not a safetensors file: {error}.") from error
            self._open_name = file_name
        return self._open

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in self._shapes.items() if not name.endswith(_SCALE)}

    def in_reading_order(self, names: Any) -> list[str]:
        return sorted(names, key=lambda name: (self._file_of[name], name))

    def read(self, name: str) -> Tensor:
        tensor = self._file(self._file_of[name]).get_tensor(name)
        if tensor.element_size() > 1 and tensor.is_floating_point():
            return tensor
        scale_name = name + _SCALE
        if tensor.dtype != torch.float8_e4m3fn or scale_name not in self._file_of:
            raise ValueError(
                f"{self.where}: {name} has dtype {tensor.dtype}, but only floating-point weights and "
                f"float8_e4m3fn ones with a {scale_name} can be read."
            )
        blocks = tuple(-(-size // _FP8_BLOCK) for size in tensor.shape)
        if self._shapes[scale_name] != blocks:
            raise ValueError(
                f"{self.where}: {scale_name} has shape {list(self._shapes[scale_name])}, but blocks of "
                f"{_FP8_BLOCK} x {_FP8_BLOCK} need {list(blocks)}."
            )
        return dequantise(tensor, self._file(self._file_of[scale_name]).get_tensor(scale_name))


def _split(pieces: list[Piece], sizes: list[int], max_size: int) -> list[list[Piece]]:
    shards: list[list[Piece]] = [[]]
    filled = 0
    for piece, size in zip(pieces, sizes, strict=True):
        if shards[-1] and filled + size > max_size:
            shards.append([])
            filled = 0
        shards[-1].append(piece)
        filled += size
    return shards


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask
