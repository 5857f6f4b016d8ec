"""The run directory (``trainer.default_root_dir``): its newest checkpoint, its configuration, and what changed."""

import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from typing_extensions import override

CONFIG_FILE = "config.yaml"
CHECKPOINT_FOLDER = "checkpoints"
LOG_FOLDER = "logs"

_MISSING = "(not set)"
# A prefix in the flattened configuration, and what a person calls it
_FIXED_IN_A_RUN = {
    "model.class_path": "the model class",
    "model.init_args.config": "the architecture",
    "data.class_path": "the data module",
    "data.init_args.path": "the token store",
    "data.init_args.tokenizer": "the tokenizer",
    "data.init_args.sequence_length": "the sequence length",
    "data.init_args.seed": "the seed",
    "seed_everything": "the seed",
}
# How a run is started or ended, not what it computes
_NOT_COMPARED = ("ckpt_path", "config", "trainer.default_root_dir", "checkpoint.dirpath", "trainer.fast_dev_run")


@dataclass(frozen=True)
class Change:
    """One setting that differs between the saved and the present configuration.

    Args:
        key: Dotted name as on the command line, without ``init_args``.
        saved: The value of the last run.
        present: The value now.
        fixed_as: What the setting means to the run if it must not change within it, else ``None``.
    """

    key: str
    saved: Any
    present: Any
    fixed_as: str | None


@dataclass(frozen=True)
class Progress:
    """How far a checkpoint is.

    Args:
        global_step: Optimizer steps done.
        tokens_seen: Tokens of these steps, where the module saves them.
    """

    global_step: int
    tokens_seen: int | None


def find_last_checkpoint(run_dir: str | Path) -> Path | None:
    """Returns the newest complete checkpoint of any kind under a run directory.

    A checkpoint is a ``*.ckpt`` file or a distributed checkpoint directory of that name, whoever wrote it
    (``ModelCheckpoint``, SLURM requeueing, an exception, an interrupt). Half-written ones are passed over, and so are
    those that hold weights alone, from which training cannot go on.

    Args:
        run_dir: The run directory; it need not exist.

    Returns:
        The path, with links resolved, or ``None`` where there is no complete checkpoint.
    """
    complete = {path.resolve() for path in _checkpoints(Path(run_dir)) if is_complete(path)}
    newest_first = sorted(complete, key=lambda path: (_saved_at(path), path.name), reverse=True)
    return next((path for path in newest_first if "callbacks" in (_content(path) or {})), None)


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint was written to its end.

    A file is a zip archive, whose directory is its last part; a distributed checkpoint writes ``.metadata`` after all
    shards and Lightning's ``meta.pt`` after that.
    """
    if checkpoint.is_dir():
        return (checkpoint / ".metadata").is_file() and (checkpoint / "meta.pt").is_file()
    return checkpoint.is_file() and zipfile.is_zipfile(checkpoint)


def read_progress(checkpoint: Path) -> Progress:
    """Reads how far a checkpoint is, without loading its tensors."""
    content = _content(checkpoint)
    if content is None:
        raise ValueError(f"ckpt_path: {checkpoint} is not a checkpoint that can be read; leave it out or use last.")
    tokens = content.get("tokens_seen")
    return Progress(int(content.get("global_step", 0)), None if tokens is None else int(tokens))


def compare_configurations(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[Change]:
    """Lists the settings that differ between two configurations.

    Args:
        saved: The content of the run's ``config.yaml``.
        present: The configuration of the present command, as plain values.

    Returns:
        One change for each differing leaf, in the order of the present configuration.
    """
    before, now = dict(_leaves(saved)), dict(_leaves(present))
    changes = []
    for key in [*now, *(key for key in before if key not in now)]:
        old, new = before.get(key, _MISSING), now.get(key, _MISSING)
        if _same(old, new) or _within(key, _NOT_COMPARED) is not None:
            continue
        fixed = _within(key, _FIXED_IN_A_RUN)
        changes.append(Change(_spoken(key), old, new, _FIXED_IN_A_RUN[fixed] if fixed else None))
    return changes


def lock(run_dir: Path) -> Callable[[], None]:
    """Keeps other processes from training in the same folder, until it is released or this process ends.

    Args:
        run_dir: The run directory, which exists.

    Returns:
        What releases it.

    Raises:
        BlockingIOError: Another process trains there.
    """
    import filelock

    held = filelock.FileLock(run_dir / ".lock", blocking=False)
    try:
        held.acquire()
    except filelock.Timeout as error:
        raise BlockingIOError(f"another process trains in {run_dir}") from error
    except NotImplementedError:  # a file system without locks
        pass
    return held.release


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Writes a file beside ``path`` and moves it there, so that a kill leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's single-file checkpoints, written so that a kill at any time leaves the previous file whole.

    Lightning writes through a file in the system's temporary directory and copies it from there: when that is another
    file system, a kill during the copy destroys a checkpoint of the same name. It also holds the whole file in memory.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return

        def write(temporary: Path) -> None:
            with open(temporary, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())

        write_atomically(Path(path), write)


def _checkpoints(run_dir: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(run_dir):
        for name in [name for name in [*subfolders, *files] if name.endswith(".ckpt")]:
            yield Path(folder, name)
        subfolders[:] = [name for name in subfolders if not name.endswith(".ckpt")]


def _content(checkpoint: Path) -> dict[str, Any] | None:
    file = checkpoint / "meta.pt" if checkpoint.is_dir() else checkpoint
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, UnpicklingError):
        return None
    return content if isinstance(content, dict) else None


def _saved_at(checkpoint: Path) -> int:
    return (checkpoint / "meta.pt" if checkpoint.is_dir() else checkpoint).stat().st_mtime_ns


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    # {token: value} is one setting, whose keys are numbers and not names
    if isinstance(node, Mapping) and node and all(isinstance(key, str) for key in node):
        for key, value in node.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, node


def _same(old: Any, new: Any) -> bool:
    # YAML gives lists where the parser has tuples
    as_list = [list(value) if isinstance(value, tuple) else value for value in (old, new)]
    return bool(as_list[0] == as_list[1])


def _within(key: str, prefixes: Any) -> str | None:
    return next((prefix for prefix in prefixes if key == prefix or key.startswith(prefix + ".")), None)


def _spoken(key: str) -> str:
    return ".".join(part for part in key.split(".") if part != "init_args")
