"""Reading documents from text files, JSONL and Parquet, in units of work that do not depend on the workers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet", ".pq")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".7z")
_PARQUET_ROWS = 1024


@dataclass(frozen=True)
class Source:
    """One input file.

    Args:
        path: Where it is.
        name: Its name in document ids: relative to the input that it was found under, so that the split of documents
            into train and validation survives a move of the whole input.
        size: Bytes.
    """

    path: str
    name: str
    size: int

    @property
    def kind(self) -> str:
        """``jsonl``, ``parquet`` or ``text``, by the file's suffix."""
        suffix = Path(self.path).suffix.lower()
        return "jsonl" if suffix in JSONL_SUFFIXES else "parquet" if suffix in PARQUET_SUFFIXES else "text"


@dataclass(frozen=True)
class Part:
    """A range of one file: bytes of a JSONL file, row groups of a Parquet file, or a whole text file.

    Args:
        source: The file.
        start: First byte or row group.
        stop: Byte or row group after the last.
        size: About how many bytes it is, for progress and balance.
        first_row: Rows before it (Parquet).
    """

    source: Source
    start: int
    stop: int
    size: int
    first_row: int = 0


def find_sources(inputs: list[str], pattern: str = "*", output: Path | None = None) -> list[Source]:
    """Lists the input files in a fixed order.

    Args:
        inputs: Files and folders; folders are searched with everything below them, hidden files excluded.
        pattern: Shell pattern that a file's name must match inside folders, for example ``*.md``.
        output: Folder that is written to; where it lies inside an input folder, what is in it is left out.

    Raises:
        ValueError: A path that does not exist, a compressed file, or no file at all.
    """
    sources: list[Source] = []
    for given in inputs:
        root = Path(given).expanduser()
        if root.is_dir():
            for path in _files_below(root, output):
                relative = path.relative_to(root)
                hidden = any(part.startswith(".") for part in relative.parts)
                if not hidden and fnmatch(path.name, pattern):
                    sources.append(Source(str(path), relative.as_posix(), path.stat().st_size))
        elif root.is_file():
            sources.append(Source(str(root), root.name, root.stat().st_size))
        else:
            raise ValueError(f"inputs: {given} does not exist")
    for source in sources:
        if Path(source.path).suffix.lower() in _COMPRESSED:
            raise ValueError(
                f"inputs: {source.path} is compressed, which is not read; unpack it first"
                " (or leave it out with --pattern)"
            )
    if not any(source.size for source in sources):
        raise ValueError(
            f"inputs: no text found in {', '.join(inputs[:3])}"
            + (f" by pattern {pattern!r}" if pattern != "*" else "")
            + ": there are no files, or all are empty"
        )
    return sources


def _files_below(root: Path, left_out: Path | None) -> list[Path]:
    """All files in a folder and below, also where links lead, each folder once and one of them not."""
    files: list[Path] = []
    seen = set() if left_out is None else {os.path.realpath(left_out)} - {os.path.realpath(root)}
    for folder, folders, names in os.walk(root, followlinks=True):
        folders.sort()
        here = os.path.realpath(folder)
        if here in seen:  # a link back, or a second one to the same folder
            folders.clear()
            continue
        seen.add(here)
        files += [path for path in (Path(folder, name) for name in names) if path.is_file()]
    return sorted(files)


def split_into_parts(source: Source, part_bytes: int, text_field: str) -> list[Part]:
    """Cuts one file into parts of about ``part_bytes`` bytes.

    Raises:
        ValueError: A Parquet file that cannot be read or lacks the column.
    """
    if source.kind == "text":
        return [Part(source, 0, source.size, source.size)]
    if source.kind == "jsonl":
        starts = range(0, source.size, part_bytes)
        return [Part(source, at, min(at + part_bytes, source.size), min(part_bytes, source.size - at)) for at in starts]

    metadata = _open_parquet(source, text_field).metadata
    parts: list[Part] = []
    start = size = first_row = rows = 0
    for group in range(metadata.num_row_groups):
        size += metadata.row_group(group).total_byte_size
        rows += metadata.row_group(group).num_rows
        if size >= part_bytes or group + 1 == metadata.num_row_groups:
            parts.append(Part(source, start, group + 1, size, first_row))
            start, size, first_row = group + 1, 0, rows
    return parts


def read_documents(part: Part, text_field: str) -> Iterator[tuple[str, str, int]]:
    """Reads the documents of a part.

    Yields:
        ``(id, text, bytes read so far in this part)``; the id names the document's place in its file. Empty documents
        are left out.

    Raises:
        ValueError: A file that cannot be read or decoded, a bad line or row; names the file and the place.
    """
    reader = {"text": _read_text, "jsonl": _read_jsonl, "parquet": _read_parquet}[part.source.kind]
    try:
        yield from reader(part, text_field)
    except OSError as error:
        raise ValueError(f"inputs: {part.source.path} cannot be read ({error.strerror or error})") from error


def _read_text(part: Part, text_field: str) -> Iterator[tuple[str, str, int]]:
    content = Path(part.source.path).read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"inputs: {part.source.path} is not UTF-8 text (byte {error.start}); convert it,"
            " or leave it out with --pattern"
        ) from None
    if text:
        yield part.source.name, text, len(content)


def _read_jsonl(part: Part, text_field: str) -> Iterator[tuple[str, str, int]]:
    with open(part.source.path, "rb") as file:
        if part.start:
            # a line belongs to the part in which its first byte lies
            file.seek(part.start - 1)
            file.readline()
        while (at := file.tell()) < part.stop:
            line = file.readline()
            if not line:
                break
            if not line.strip():
                continue
            text = _text_of(line, part.source.path, at, text_field)
            if text:
                yield f"{part.source.name}:{at}", text, min(file.tell(), part.stop) - part.start


def _text_of(line: bytes, path: str, at: int, text_field: str) -> str:
    def place() -> str:
        with open(path, "rb") as file:
            newlines, left = 0, at
            while left > 0 and (block := file.read(min(left, 1 << 20))):
                newlines, left = newlines + block.count(b"\n"), left - len(block)
        return f"inputs: {path}:{newlines + 1}"

    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place()} is not a line of JSON ({error})") from None
    if not isinstance(record, dict) or text_field not in record:
        fields = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"{place()} has no field {text_field!r} (it has {fields}); name it with --text_field")
    text = record[text_field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise ValueError(f"{place()}: field {text_field!r} is {type(text).__name__}, not a text")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(text[error.start]):04x}"
            raise ValueError(
                f"{place()}: field {text_field!r} holds half a surrogate pair ({half}), which is not Unicode text;"
                " replace it with \\ufffd"
            ) from None
    return text


def _open_parquet(source: Source, text_field: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(
            f"inputs: {source.path} needs the package pyarrow, which is not installed:\npython -m pip install pyarrow"
        ) from None

    try:
        file = pyarrow.parquet.ParquetFile(source.path)
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"inputs: {source.path} is not a Parquet file that can be read ({error})") from error
    names = file.schema_arrow.names
    if text_field not in names:
        raise ValueError(
            f"inputs: {source.path} has no column {text_field!r} (it has {names}); name it with --text_field"
        )
    kind = file.schema_arrow.field(text_field).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise ValueError(f"inputs: {source.path}: column {text_field!r} is {kind}, not text")
    return file


def _read_parquet(part: Part, text_field: str) -> Iterator[tuple[str, str, int]]:
    file = _open_parquet(part.source, text_field)
    groups = list(range(part.start, part.stop))
    total = max(1, sum(file.metadata.row_group(group).num_rows for group in groups))
    row = 0
    for batch in file.iter_batches(batch_size=_PARQUET_ROWS, row_groups=groups, columns=[text_field]):
        for text in batch.column(0).to_pylist():
            row += 1
            if text:
                yield f"{part.source.name}:{part.first_row + row - 1}", text, part.size * row // total
