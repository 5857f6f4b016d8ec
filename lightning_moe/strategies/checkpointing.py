"""Checkpoint directories that load under any layout of processes.

A directory holds tensors as torch.distributed.checkpoint shards, weights under ``state_dict`` and optimizer states
under ``optimizer_0``, each by the parameter's qualified name, and everything else in ``meta.pt``. It is written under a
temporary name and renamed when it is whole, so that a half-written one is never taken for a checkpoint. Nothing in it
is unpickled beyond what ``weights_only=True`` allows: torch.distributed.checkpoint would unpickle values that are no
tensors, so it is given none.
"""

import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

META_FILE = "meta.pt"
_WEIGHTS_ALONE = (
    "The checkpoint holds weights alone, from which training cannot go on; give one with the optimizer as ckpt_path, "
    "or begin a run of its own with load_from_checkpoint."
)


class SafeReader(dcp.FileSystemReader):
    """Reads a checkpoint directory whose index may come from anywhere: it is unpickled with known classes only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads the index.

        Raises:
            ValueError: The index names a class that no index of torch.distributed.checkpoint has.
        """
        path = Path(self.path) / ".metadata"
        with path.open("rb") as file:
            metadata = _IndexUnpickler(file).load()
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return cast(Metadata, metadata)


class _IndexUnpickler(pickle.Unpickler):
    # Classes one by one: the module of the index has functions too, with which code could be executed.
    _ALLOWED = {
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib", "WindowsPath"),
        ("pathlib._local", "PosixPath"),
        ("pathlib._local", "WindowsPath"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    }

    def find_class(self, module: str, name: str) -> Any:
        known = (module, name) in self._ALLOWED
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not (known or dtype):
            raise ValueError(f"a checkpoint's .metadata names {module}.{name}, which no checkpoint needs: not loaded.")
        return super().find_class(module, name)


def is_checkpoint_directory(path: str | Path) -> bool:
    """Whether a path is a whole checkpoint directory."""
    return (Path(path) / META_FILE).is_file() and (Path(path) / ".metadata").is_file()


def save_directory(
    path: Path,
    weights: dict[str, Tensor],
    optimizers: list[tuple[nn.Module, Optimizer]],
    rest: dict[str, Any],
    barrier: Callable[[], None],
) -> None:
    """Writes a checkpoint directory; all processes call it together.

    Args:
        path: Where; what stands there is replaced once the new directory is whole.
        weights: Weights and buffers by qualified name; DTensors where they are sharded.
        optimizers: Optimizers, each with the module whose parameters it has.
        rest: Plain values, equal on all ranks.
        barrier: Waits for all processes.

    Raises:
        ValueError: The path is a folder with something else in it, which would be lost.
    """
    if path.is_dir() and not path.is_symlink() and any(path.iterdir()) and not is_checkpoint_directory(path):
        raise ValueError(f"{path} is a folder that holds something else than a checkpoint; give another name.")
    rank = dist.get_rank() if dist.is_initialized() else 0
    temporary = path.with_name(path.name + ".tmp")
    if rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    barrier()
    tensors: dict[str, Any] = {"state_dict": weights}
    plain: dict[str, Any] = {}
    for index, (module, optimizer) in enumerate(optimizers):
        tensors[f"optimizer_{index}"], plain[f"optimizer_{index}"] = _optimizer_state(module, optimizer)
    with _quiet():
        dcp.save(tensors, checkpoint_id=temporary, no_dist=not dist.is_initialized())
    if rank == 0:
        with (temporary / META_FILE).open("wb") as file:
            torch.save({**rest, "optimizers": plain}, file)
            file.flush()
            os.fsync(file.fileno())  # as the shards are, so that a name stands for a whole checkpoint
    barrier()
    if rank == 0:
        _replace(temporary, path)
    barrier()


def _replace(new: Path, path: Path) -> None:
    # A name that `ckpt_path: last` finds, should the process be killed between the two renames.
    old = path.with_name(f"replaced-{path.name}")
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    elif path.exists() or path.is_symlink():
        path.unlink()
    new.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def load_directory(
    path: Path, weights: dict[str, Tensor], optimizers: list[tuple[nn.Module, Optimizer]], *, strict: bool = True
) -> dict[str, Any]:
    """Reads a checkpoint directory into tensors of any layout, in place; all processes call it together.

    Args:
        path: The directory.
        weights: Weights and buffers by qualified name, which are filled.
        optimizers: Optimizers, each with the module whose parameters it has; their states are made anew.
        strict: Whether the directory must hold exactly these weights.

    Returns:
        The plain values.

    Raises:
        ValueError: The path is no whole checkpoint directory, or (when strict) its weights have other names.
    """
    if not is_checkpoint_directory(path):
        raise ValueError(f"{path} is not a whole checkpoint: {META_FILE} or .metadata is missing in it.")
    rest = torch.load(path / META_FILE, map_location="cpu", weights_only=True)
    stored = _stored_tensors(path)
    names = {name.removeprefix("state_dict.") for name in stored if name.startswith("state_dict.")}
    if strict:
        _check_names(path, set(weights), names)
    _check_shapes(path, weights, {name: stored[f"state_dict.{name}"].size for name in names})
    tensors: dict[str, Any] = {"state_dict": {name: tensor for name, tensor in weights.items() if name in names}}
    plain = rest.pop("optimizers", {})
    for index, (module, optimizer) in enumerate(optimizers):
        key = f"optimizer_{index}"
        tensors[key] = _make_optimizer_state(module, optimizer, stored, f"{key}.", plain.get(key, {}))
    with _quiet():
        dcp.load(tensors, storage_reader=SafeReader(path), no_dist=not dist.is_initialized())
    return cast(dict[str, Any], rest)


def _check_names(path: Path, wanted: set[str], stored: set[str]) -> None:
    if wanted != stored:
        missing, unexpected = sorted(wanted - stored)[:3], sorted(stored - wanted)[:3]
        raise ValueError(
            f"{path} does not fit the model: missing weights {missing or 'none'}, unexpected {unexpected or 'none'}."
        )


def _check_shapes(path: Path, wanted: dict[str, Tensor], stored: dict[str, torch.Size]) -> None:
    for name in wanted.keys() & stored.keys():
        if wanted[name].shape != stored[name]:
            raise ValueError(
                f"{path} does not fit the model: {name} has shape {list(stored[name])} there, but the model needs "
                f"{list(wanted[name].shape)}."
            )


def read_whole(path: Path) -> dict[str, Any]:
    """Reads a checkpoint directory in one process as what a single-file checkpoint holds, without optimizer states."""
    rest = torch.load(path / META_FILE, map_location="cpu", weights_only=True)
    rest.pop("optimizers", None)
    prefix = "state_dict."
    weights = {
        name.removeprefix(prefix): torch.empty(stored.size, dtype=stored.properties.dtype)
        for name, stored in _stored_tensors(path).items()
        if name.startswith(prefix)
    }
    with _quiet():
        dcp.load({"state_dict": weights}, storage_reader=SafeReader(path), no_dist=True)
    return {**rest, "state_dict": weights}


def load_file(
    path: Path, weights: dict[str, Tensor], optimizers: list[tuple[nn.Module, Optimizer]], *, strict: bool = True
) -> dict[str, Any]:
    """Reads a single-file checkpoint of Lightning into tensors of any layout, in place.

    Args:
        path: The file.
        weights: Weights and buffers by qualified name, which are filled.
        optimizers: Optimizers, each with the module whose parameters it has.
        strict: Whether the file must hold exactly these weights.

    Returns:
        What else the file holds.

    Raises:
        ValueError: A weight or an optimizer group has another size, or (when strict) the weights have other names.
    """
    checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    stored = checkpoint.pop("state_dict")
    if optimizers and "optimizer_states" not in checkpoint:
        raise ValueError(_WEIGHTS_ALONE)
    if strict:
        _check_names(path, set(weights), set(stored))
    _check_shapes(path, weights, {name: tensor.shape for name, tensor in stored.items()})
    with torch.no_grad():
        for name in weights.keys() & stored.keys():
            _local(weights[name]).copy_(_part_of(stored[name], weights[name]))
    for (_, optimizer), saved in zip(optimizers, checkpoint.pop("optimizer_states", []), strict=False):
        _load_numbered_state(optimizer, saved)
    return cast(dict[str, Any], checkpoint)


def _load_numbered_state(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Optimizer states by number, as `Optimizer.state_dict` has them; the groups' order gives the parameters."""
    sizes, saved_sizes = (
        [len(group["params"]) for group in g] for g in (optimizer.param_groups, saved["param_groups"])
    )
    if sizes != saved_sizes:
        raise ValueError(f"The checkpoint's optimizer has groups of {saved_sizes} parameters, but this one of {sizes}.")
    for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        there, here = set(saved_group) - set(group), set(group) - set(saved_group) - {"moments"}
        if there - {"initial_lr"} and here:  # files do not name the class, but each has options of its own
            raise ValueError(
                f"The checkpoint's optimizer has {', '.join(sorted(there))}, but this {type(optimizer).__name__} has "
                f"{', '.join(sorted(here))} instead; a run keeps its optimizer."
            )
        group.update({key: value for key, value in saved_group.items() if key != "params"})
        for number, parameter in zip(saved_group["params"], group["params"], strict=True):
            for key, value in saved["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    state = torch.zeros_like(parameter, dtype=value.dtype)
                    _local(state).copy_(_part_of(value, state))
                    value = state
                elif isinstance(value, Tensor):
                    value = value.to(_device_of_state(key, parameter, group))
                optimizer.state[parameter][key] = value


def _device_of_state(key: str, parameter: Tensor, group: dict[str, Any]) -> torch.device:
    """Where an optimizer has a state that is not of the parameter's shape: the rule of `Optimizer.load_state_dict`."""
    on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
    return torch.device("cpu") if on_host else parameter.device


def _named_states(module: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    names = {parameter: name for name, parameter in module.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield names[parameter], parameter


def _optimizer_state(module: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    tensors: dict[str, Any] = {}
    scalars: dict[str, Any] = {}
    for name, parameter in _named_states(module, optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}.{key}"] = value
            else:
                scalars[f"{name}.{key}"] = value
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return tensors, {"class": type(optimizer).__name__, "scalars": scalars, "groups": groups}


def _make_optimizer_state(
    module: nn.Module, optimizer: Optimizer, stored: dict[str, Any], prefix: str, plain: dict[str, Any]
) -> dict[str, Tensor]:
    """Makes empty optimizer states as the directory has them; returns them by name, to be filled."""
    if not plain:
        raise ValueError(_WEIGHTS_ALONE)
    saved_class, groups = plain.get("class"), plain.get("groups", [])
    if saved_class not in (None, type(optimizer).__name__) or len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"The checkpoint's optimizer is a {saved_class} with {len(groups)} parameter groups, but this one is a "
            f"{type(optimizer).__name__} with {len(optimizer.param_groups)}; a run keeps its optimizer."
        )
    optimizer.state.clear()
    names = dict(_named_states(module, optimizer))
    group_of = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    tensors: dict[str, Tensor] = {}
    for full_name, metadata in stored.items():
        name, _, key = full_name.removeprefix(prefix).rpartition(".")
        if not full_name.startswith(prefix) or name not in names:
            continue
        parameter, dtype = names[name], metadata.properties.dtype
        if metadata.size == parameter.shape:
            state = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        else:
            device = _device_of_state(key, parameter, group_of[parameter])
            state = torch.zeros(metadata.size, dtype=dtype, device=device)
        tensors[f"{name}.{key}"] = optimizer.state[parameter][key] = state
    for full_name, value in plain.get("scalars", {}).items():
        name, _, key = full_name.rpartition(".")
        if name in names:
            optimizer.state[names[name]][key] = value
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update(saved)
    return tensors


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides that torch.distributed.checkpoint works in one process, which it warns of although it was told so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _stored_tensors(path: Path) -> dict[str, TensorStorageMetadata]:
    metadata = SafeReader(path).read_metadata().state_dict_metadata
    return {name: entry for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _part_of(whole: Tensor, like: Tensor) -> Tensor:
    """The part of a whole tensor that this process holds of a tensor of the same shape."""
    if not isinstance(like, DTensor):
        return whole
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return whole[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
