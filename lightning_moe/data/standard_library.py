"""The default text: the Python standard library's own source, about 30 MB on every machine."""

from __future__ import annotations

import os
import platform
import sysconfig
from pathlib import Path

LARGEST_VOCABULARY = 32768
# more than enough to reach 32768 ids, and half the time of training on everything
_TRAINING_CHARACTERS = 12_000_000


def standard_library_store(vocab_size: int, progress_bar: bool = True) -> Path:
    """Prepares the store of the standard library once for each Python version and vocabulary.

    It lies in the user's cache (``XDG_CACHE_HOME``, by default ``~/.cache``). Two processes may ask at once, and an
    interrupted preparation continues at the next call.

    Args:
        vocab_size: Ids of the BPE that is trained on the text, 258 to 32768.
        progress_bar: Whether to show progress while it is prepared.

    Returns:
        The store's folder.

    Raises:
        ValueError: A vocabulary that is too large or too small for this text, or a cache that cannot be written.
    """
    from lightning_moe.tools.prepare import prepare

    if vocab_size > LARGEST_VOCABULARY:
        raise ValueError(
            f"data.path is not set: the standard library's text serves vocabularies up to {LARGEST_VOCABULARY}, the"
            f" model's vocab_size is {vocab_size}.\nPrepare a store and set data.path:"
            " lightning-moe prepare --inputs TEXTS --output data/mine --tokenizer deepseek"
        )
    folder = cache_folder() / f"python-{platform.python_version()}-bpe-{vocab_size}"
    if not (folder / "store.json").exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"data.path is not set, and the cache {folder.parent} cannot be written ({error.strerror}).\n"
                "Set XDG_CACHE_HOME to a folder that can, or data.path to a store"
            ) from error
        prepare(
            standard_library_files(),
            str(folder),
            f"bpe:{vocab_size}",
            validation_fraction=0.02,
            num_workers=1,
            training_characters=_TRAINING_CHARACTERS,
            progress_bar=progress_bar,
        )
    return folder


def cache_folder() -> Path:
    """Returns the user's cache folder for this package, as the XDG base directory specification names it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lightning-moe"


def standard_library_files() -> list[str]:
    """Lists the ``.py`` files of the standard library that are UTF-8, without installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "dist-packages"} & set(path.relative_to(root).parts):
            continue
        try:
            # a few test files are in other encodings on purpose
            path.read_bytes().decode("utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        files.append(str(path))
    return files
