"""The `prepare` command: text files, JSONL or Parquet plus a tokenizer become a token store.

The input is cut into units that depend on nothing but the input; every unit is tokenized by one worker into a folder of
its own below ``OUTPUT/.prepare``, finished by a rename. When all are there, their chunks are moved into place and the
manifest is written. So an interrupted run continues with the units that are missing, and its result does not depend on
the number of workers.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lightning_moe.data import units as units_module
from lightning_moe.data.documents import Source, find_sources, read_documents
from lightning_moe.data.progress import Progress
from lightning_moe.data.store import (
    FORMAT_VERSION,
    MANIFEST,
    SPLITS,
    StoreManifest,
    read_manifest,
    write_chunk,
    write_json,
    write_text,
)
from lightning_moe.data.tokenizers import (
    DocumentTokenizer,
    allow_parallel_encoding,
    load_tokenizer,
    parse_bpe_name,
    train_bpe,
)
from lightning_moe.data.units import Job, Unit, plan_units, token_dtype, tokenize_units
from lightning_moe.usage_errors import UsageError

_WORK = ".prepare"


def prepare(
    inputs: list[str] | str,
    output: str,
    tokenizer: str,
    text_field: str = "text",
    pattern: str = "*",
    validation_fraction: float = 0.01,
    seed: int = 0,
    num_workers: int | None = None,
    bos_token: str | None = None,
    eos_token: str | None = None,
    training_characters: int = 100_000_000,
    progress_bar: bool = True,
) -> StoreManifest:
    """Turns text into a token store that ``TokenDataModule`` reads.

    Run the same command again after an interruption: finished work is kept. A store that is already complete is left
    as it is.

    Args:
        inputs: A text, JSONL (.jsonl, .ndjson) or Parquet file, a folder of them, or a list ``[a.txt, folder]``. A text
            file is one document; in the others, a line or a row is.
        output: Folder of the store.
        tokenizer: Path of a tokenizer.json, or ``deepseek``, ``byte``, or ``bpe:4096`` to train a BPE of that many ids
            on the text.
        text_field: JSONL field or Parquet column that holds the text.
        pattern: Shell pattern for the names of files inside folders, for example ``*.md``.
        validation_fraction: Fraction of the documents that is kept for validation.
        seed: Seed of the split into train and validation.
        num_workers: Processes; by default one for each core.
        bos_token: Token that begins a document, where the tokenizer does not say it.
        eos_token: Token that ends a document, where the tokenizer does not say it.
        training_characters: About how much of the text a BPE is trained on.
        progress_bar: Whether to show progress.

    Returns:
        The manifest of the store.

    Raises:
        ValueError: Input that cannot be used, or an output that holds another store; the message names the place.
        UsageError: The disk or the quota is full, or a file larger than is allowed.
        OSError: The output cannot be written for another reason.
    """
    import filelock

    inputs = [inputs] if isinstance(inputs, str) else list(inputs)
    if not 0 <= validation_fraction < 1:
        raise ValueError(f"validation_fraction={validation_fraction} must be at least 0 and below 1, such as 0.01")
    if num_workers is not None and num_workers < 1:
        raise ValueError(f"num_workers={num_workers} must be at least 1")
    if training_characters < 1:
        raise ValueError(f"training_characters={training_characters} must be at least 1, such as 100000000")
    loaded = None if parse_bpe_name(tokenizer) else load_tokenizer(tokenizer, bos_token, eos_token)
    folder = Path(output).expanduser()
    sources = find_sources(inputs, pattern, folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output: {output} is a file; give a folder")
    request = {
        "format_version": FORMAT_VERSION,
        "tokenizer": tokenizer if loaded is None else loaded.fingerprint(),
        "training_characters": training_characters if loaded is None else None,
        "text_field": text_field,
        "validation_fraction": validation_fraction,
        "seed": seed,
        "unit_bytes": [units_module.SMALLEST_UNIT, units_module.LARGEST_UNIT],
        "files": _digest_of(sources),
    }
    progress = Progress(progress_bar)
    try:
        _refuse_other_content(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder / ".lock"):
            if (folder / MANIFEST).exists():
                manifest = _existing_store(folder, tokenizer, loaded, request)
                progress.say(f"{folder} is complete: {describe(manifest)}")
                return manifest
            _start_or_continue(folder, request)
            with progress:
                units = plan_units(sources, text_field)
                chosen = loaded or _trained_tokenizer(
                    folder, tokenizer, units, text_field, training_characters, progress
                )
                write_text(folder / "tokenizer.json", chosen.to_json())
                job = Job(str(folder / _WORK), text_field, validation_fraction, seed, chosen.bos_id, chosen.eos_id)
                tokenize_units(job, units, num_workers or os.cpu_count() or 1, progress)
            manifest = _finish(folder, chosen, units, request, inputs, sources)
            progress.say(f"{folder}: {describe(manifest)}")
            return manifest
    except KeyboardInterrupt:
        progress.say("interrupted; run the same command again to continue")
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UsageError(
                f"output: no space left for {folder}; free some and run the same command again to continue"
            ) from error
        if error.errno == errno.EFBIG:
            raise UsageError(
                f"output: a file of {folder} is larger than ulimit -f or its file system allows; raise the limit"
                " and run the same command again to continue, or give another --output"
            ) from error
        raise


def _digest_of(sources: list[Source]) -> str:
    listing = [(source.name, source.size, os.stat(source.path).st_mtime_ns) for source in sources]
    return hashlib.sha256(json.dumps(listing).encode("utf-8", "surrogatepass")).hexdigest()


def _refuse_other_content(folder: Path) -> None:
    """A folder that holds anything but a store or the beginning of one is not written into."""
    ours = {MANIFEST, _WORK, ".lock", "tokenizer.json", *SPLITS}
    if folder.is_dir() and not (folder / MANIFEST).exists() and not (folder / _WORK).exists():
        foreign = sorted(path.name for path in folder.iterdir() if path.name != ".lock")
        if foreign and (set(foreign) - ours or "index.json" in foreign):
            raise ValueError(f"output: {folder} holds other files ({', '.join(foreign[:3])}); give a new folder")


def _existing_store(
    folder: Path, name: str, loaded: DocumentTokenizer | None, request: dict[str, Any]
) -> StoreManifest:
    manifest = read_manifest(folder)
    same = manifest.tokenizer == name if loaded is None else manifest.tokenizer_fingerprint == loaded.fingerprint()
    if not same:
        raise ValueError(
            f"output: {folder} holds a store made with tokenizer {manifest.tokenizer!r}"
            f" ({manifest.tokenizer_fingerprint[:12]}), not {name!r};\ngive another --output, or delete that folder"
        )
    if manifest.sources.get("request") != request:
        raise ValueError(
            f"output: {folder} holds a store made from other files or with other settings\n(the text, text_field,"
            " validation_fraction, seed or training_characters differ); give another --output, or delete that folder"
        )
    return manifest


def _start_or_continue(folder: Path, request: dict[str, Any]) -> None:
    """Keeps the finished units of an interrupted run of the same request, and clears away those of another."""
    work = folder / _WORK
    try:
        same = json.loads((work / "request.json").read_text(encoding="utf-8")) == request
    except (OSError, ValueError):
        same = False
    if same:
        for unfinished in work.glob("*.tmp"):
            shutil.rmtree(unfinished)
        return
    for path in (work, *(folder / split for split in SPLITS)):
        if path.exists():
            shutil.rmtree(path)
    work.mkdir()
    write_json(work / "request.json", request)


def _trained_tokenizer(
    folder: Path, name: str, units: list[Unit], text_field: str, characters: int, progress: Progress
) -> DocumentTokenizer:
    """Trains the BPE on evenly spread documents, or reads the one that an interrupted run has trained."""
    saved = folder / _WORK / "tokenizer.json"
    size = parse_bpe_name(name)
    assert size is not None
    if saved.exists():
        import tokenizers

        return DocumentTokenizer(tokenizers.Tokenizer.from_file(str(saved)), name, 0, 1)
    total = sum(unit.size for unit in units)
    every_unit = max(1, total // (16 * characters))
    every_document = max(1, -(-total // (every_unit * characters)))
    chosen = units[::every_unit]

    def documents() -> Iterator[str]:
        number = 0
        for unit in chosen:
            for part in unit.parts:
                done = 0
                for _, text, read in read_documents(part, text_field):
                    if number % every_document == 0:
                        yield text
                    number += 1
                    progress.advance(read - done)
                    done = read

    progress.start(f"training {name}", sum(unit.size for unit in chosen))
    allow_parallel_encoding(True)
    trained = train_bpe(documents(), size)
    write_text(saved, trained.to_json())
    return trained


def _finish(
    folder: Path,
    tokenizer: DocumentTokenizer,
    units: list[Unit],
    request: dict[str, Any],
    inputs: list[str],
    sources: list[Source],
) -> StoreManifest:
    """Moves the units' chunks into place and writes the manifest; may be repeated after a crash."""
    work = folder / _WORK
    summaries = [json.loads((unit.folder(work) / "unit.json").read_text(encoding="utf-8")) for unit in units]
    documents = {split: sum(summary["documents"][split] for summary in summaries) for split in SPLITS}
    tokens = {split: sum(summary["tokens"][split] for summary in summaries) for split in SPLITS}
    if not documents["train"]:
        names = ", ".join(source.path for source in sources[:3])
        names += f" and {len(sources) - 3} more" if len(sources) > 3 else ""
        s = "s" if len(sources) == 1 else ""
        if not documents["validation"]:
            raise ValueError(
                f"inputs: {names} hold{s} no text: all documents are empty; give others, or another --text_field"
            )
        raise ValueError(
            f"inputs: {names} leave{s} no document for training;"
            f" lower validation_fraction={request['validation_fraction']}"
        )

    train = folder / "train"
    chunks: list[dict[str, Any]] = []
    config = None
    train.mkdir(exist_ok=True)
    for unit, summary in zip(units, summaries, strict=True):
        for chunk in summary["index"]["chunks"] if summary["index"] else []:
            target = train / f"chunk-0-{len(chunks)}.bin"
            made = unit.folder(work) / "train" / chunk["filename"]
            if made.exists():
                os.replace(made, target)
            elif not target.exists():
                raise ValueError(f"output: {made} is missing; delete {folder} and prepare again")
            chunks.append({**chunk, "filename": target.name})
            config = summary["index"]["config"]
    write_json(train / "index.json", {"chunks": chunks, "config": config})
    if tokens["validation"]:
        validation = folder / "validation"
        if validation.exists():
            shutil.rmtree(validation)
        dtype = token_dtype(tokenizer.vocab_size)
        parts = [np.fromfile(unit.folder(work) / "validation.bin", dtype) for unit in units]
        write_json(validation / "index.json", write_chunk(validation, np.concatenate(parts)))

    fingerprint = hashlib.sha256(tokenizer.fingerprint().encode())
    for summary in summaries:
        fingerprint.update(json.dumps(summary["digests"], sort_keys=True).encode())
    manifest = StoreManifest(
        fingerprint=fingerprint.hexdigest(),
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint(),
        vocab_size=tokenizer.vocab_size,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        max_token_id=max(summary["max_token_id"] for summary in summaries),
        dtype=np.dtype(token_dtype(tokenizer.vocab_size)).name,
        documents=documents,
        tokens=tokens,
        validation_fraction=request["validation_fraction"],
        seed=request["seed"],
        sources={
            "inputs": inputs[:20],
            "files": len(sources),
            "bytes": sum(source.size for source in sources),
            "request": request,
        },
    )
    manifest.write(folder)
    shutil.rmtree(work, ignore_errors=True)
    return manifest


def describe(manifest: StoreManifest) -> str:
    """Returns what a store holds, for the end of the command."""
    counts = ", ".join(
        f"{manifest.tokens[split]:,} {split} tokens in {manifest.documents[split]:,} documents" for split in SPLITS
    )
    text = f"{counts}; tokenizer {manifest.tokenizer}, vocabulary {manifest.vocab_size:,}"
    if manifest.validation_fraction and not manifest.documents["validation"]:
        text += (
            f"\nno document fell into validation: {manifest.validation_fraction} of {manifest.documents['train']:,}"
            " documents is too small a part; raise validation_fraction"
        )
    return text
