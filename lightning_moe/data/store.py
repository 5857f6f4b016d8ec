"""The token store on disk: litdata chunks of tokens per split, and the manifest that says what they are.

A store is a folder::

    store.json                  the manifest, written last: a folder without it is not a store
    tokenizer.json              the tokenizer that made the tokens
    train/, validation/         litdata datasets of tokens (index.json, chunk-*.bin); absent where a split is empty
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT_VERSION = 1
MANIFEST = "store.json"
SPLITS = ("train", "validation")
# tokens in one item of a chunk; keeps a chunk's 32-bit offsets and its copies in memory small
_ITEM_TOKENS = 1 << 25


@dataclass(frozen=True)
class StoreManifest:
    """What ``store.json`` says about a store.

    Args:
        fingerprint: sha256 over the tokens of both splits and the tokenizer: equal stores have equal fingerprints.
        tokenizer: Name of the tokenizer as the user gave it.
        tokenizer_fingerprint: sha256 of the tokenizer.
        vocab_size: Ids of the tokenizer.
        bos_id: Id at the start of every document.
        eos_id: Id at the end of every document.
        max_token_id: Largest id that occurs.
        dtype: Type of the tokens on disk, ``uint16`` or ``int32``.
        documents: Documents per split.
        tokens: Tokens per split.
        validation_fraction: Fraction of documents asked for validation.
        seed: Seed of the split.
        sources: Summary of the input: given paths, number of files and their bytes.
        format_version: Version of this layout.
    """

    fingerprint: str
    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: int
    bos_id: int
    eos_id: int
    max_token_id: int
    dtype: str
    documents: dict[str, int]
    tokens: dict[str, int]
    validation_fraction: float
    seed: int
    sources: dict[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def write(self, store: Path) -> None:
        """Writes the manifest by an atomic rename, which turns the folder into a store."""
        write_json(store / MANIFEST, asdict(self))


def read_manifest(store: str | Path) -> StoreManifest:
    """Reads and checks the manifest of a store.

    Raises:
        ValueError: Not a store, or one of another format version.
    """
    path = Path(store) / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        what, output = "does not exist", store
        if Path(store).is_dir():
            what = "is not a token store (it has no store.json)"
        elif Path(store).exists():
            what, output = "is a file, not a token store (a folder with a store.json)", "data/mine"
        raise ValueError(
            f"data.path: {store} {what}.\n"
            f"Make one with: lightning-moe prepare --inputs TEXTS --output {output} --tokenizer bpe:4096"
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"data.path: {path} cannot be read ({error})") from error
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"data.path: {path} has format version {version}, this release reads version {FORMAT_VERSION};"
            " prepare the store again"
        )
    try:
        return StoreManifest(**content)
    except TypeError as error:
        raise ValueError(f"data.path: {path} is not a complete manifest ({error})") from error


def write_json(path: Path, content: Any) -> None:
    """Writes JSON so that the file is either absent, old, or complete."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a text file so that it is either absent, old, or complete, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(temporary, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_chunk(folder: Path, tokens: NDArray[Any]) -> dict[str, Any]:
    """Writes tokens as one litdata chunk in a folder of its own.

    litdata's own writer makes the file; ``litdata.optimize`` around it is not used because it cannot resume documents
    that come from generators and cuts chunks by worker.

    Args:
        folder: An empty or absent folder.
        tokens: The tokens, shape ``(n,)``.

    Returns:
        litdata's index of the folder: ``{"config": ..., "chunks": [...]}``.
    """
    from litdata.streaming.item_loader import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder), chunk_bytes=1 << 31, item_loader=TokensLoader())
    for index, start in enumerate(range(0, len(tokens), _ITEM_TOKENS)):
        writer[index] = np.ascontiguousarray(tokens[start : start + _ITEM_TOKENS])
    writer.done()
    (index_file,) = folder.glob("*index.json")
    content: dict[str, Any] = json.loads(index_file.read_text(encoding="utf-8"))
    index_file.unlink()
    return content


def tokens_digest(tokens: NDArray[Any]) -> str:
    """Returns the sha256 of the tokens' bytes."""
    return hashlib.sha256(np.ascontiguousarray(tokens).data).hexdigest()


class TokenBlocks:
    """Random access to the samples of one split: consecutive blocks of ``sequence_length + 1`` tokens.

    Blocks do not cross chunks, so up to ``sequence_length`` tokens at the end of each chunk are not read. The litdata
    dataset is opened in the process that reads from it, so that an instance can be sent to workers.

    Args:
        store: The store's folder.
        split: ``train`` or ``validation``.
        sequence_length: Tokens of a sample, without the one that only serves as the last label.
    """

    def __init__(self, store: Path, split: str, sequence_length: int) -> None:
        self.folder = Path(store) / split
        self.block_size = sequence_length + 1
        self._dataset: Any = None
        self._process: int | None = None
        self._length = 0
        if (self.folder / "index.json").is_file():
            index = json.loads((self.folder / "index.json").read_text(encoding="utf-8"))
            self._length = sum(int(chunk["dim"]) // self.block_size for chunk in index["chunks"])

    def __len__(self) -> int:
        return self._length

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dataset": None, "_process": None}

    def read(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Reads blocks.

        Args:
            indices: Positions in the store, shape ``(B,)``, any order.

        Returns:
            Tokens, shape ``(B, sequence_length + 1)``, int64.
        """
        if self._dataset is None or self._process != os.getpid():
            self._dataset, self._process = self._open(), os.getpid()
        blocks = np.empty((len(indices), self.block_size), dtype=np.int64)
        for row, index in enumerate(np.asarray(indices).tolist()):
            blocks[row] = self._dataset[index]
        return blocks

    def _open(self) -> Any:
        from litdata import StreamingDataset
        from litdata.streaming.item_loader import TokensLoader

        return StreamingDataset(str(self.folder), item_loader=TokensLoader(block_size=self.block_size))
