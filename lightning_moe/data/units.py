"""Units of work: parts of the input that one worker turns into one chunk of tokens."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from lightning_moe.data.documents import Part, Source, read_documents, split_into_parts
from lightning_moe.data.progress import Progress
from lightning_moe.data.store import SPLITS, tokens_digest, write_chunk, write_json
from lightning_moe.data.tokenizers import DocumentTokenizer, allow_parallel_encoding

SMALLEST_UNIT, LARGEST_UNIT = 4 << 20, 256 << 20
_BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Job:
    """What a worker needs to know, besides the unit.

    Args:
        work: Folder of the finished units; the tokenizer.json lies beside it.
        text_field: JSONL field or Parquet column of the text.
        validation_fraction: Fraction of documents for validation.
        seed: Seed of the split.
        bos_id: Id before each document.
        eos_id: Id after each document.
    """

    work: str
    text_field: str
    validation_fraction: float
    seed: int
    bos_id: int
    eos_id: int


@dataclass(frozen=True)
class Unit:
    """Parts of files that one worker turns into one chunk.

    Args:
        number: Position in the store.
        parts: The parts, in order.
    """

    number: int
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """About how many bytes of input it is."""
        return sum(part.size for part in self.parts)

    def folder(self, work: str | Path) -> Path:
        """Where it lies when it is finished."""
        return Path(work) / f"unit-{self.number:06d}"


def plan_units(sources: list[Source], text_field: str) -> list[Unit]:
    """Cuts the input into units of about a 64th of it, 4 to 256 MiB; they depend on the input alone."""
    total = sum(source.size for source in sources)
    target = min(max(total // 64, SMALLEST_UNIT), LARGEST_UNIT)
    units: list[Unit] = []
    parts: list[Part] = []
    size = 0
    for source in sources:
        for part in split_into_parts(source, target, text_field):
            parts.append(part)
            size += part.size
            if size >= target:
                units.append(Unit(len(units), tuple(parts)))
                parts, size = [], 0
    if parts:
        units.append(Unit(len(units), tuple(parts)))
    return units


def tokenize_units(job: Job, units: list[Unit], num_workers: int, progress: Progress) -> None:
    """Tokenizes the units that are not finished yet.

    Args:
        job: What to do.
        units: All units.
        num_workers: Processes; with one, it happens in this process.
        progress: Shows it.

    Raises:
        ValueError: Input that cannot be used.
        OSError: Output that cannot be written.
    """
    tokenizer_file = str(Path(job.work).parent / "tokenizer.json")
    missing = [unit for unit in units if not unit.folder(job.work).exists()]
    total = sum(unit.size for unit in units)
    progress.start("tokenizing", total, total - sum(unit.size for unit in missing))
    num_workers = min(num_workers, len(missing))
    if num_workers <= 1:
        # one process, with the threads of `tokenizers`
        allow_parallel_encoding(True)
        tokenizer = _tokenizer_of(job, tokenizer_file) if missing else None
        for unit in missing:
            assert tokenizer is not None
            _tokenize_unit(job, unit, tokenizer, progress.advance)
        return

    # spawn: a fork after `tokenizers` or torch have started threads can hang
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    with _held_ctrl_c() as let_it_through:
        pool = ProcessPoolExecutor(num_workers, context, _start_worker, (job, tokenizer_file, counter))
        try:
            pending = _submit(pool, missing)
            seen = 0
            while pending:
                done, pending = wait(pending, timeout=0.1, return_when=FIRST_COMPLETED)
                progress.advance(counter.value - seen)
                seen = counter.value
                let_it_through()
                for future in done:
                    future.result()
        except BaseException:
            # a document may take minutes, and what a unit has not finished is of no use
            for process in list(pool._processes.values()):
                process.terminate()
            raise
        finally:
            pool.shutdown(wait=True)


@contextmanager
def _held_ctrl_c() -> Iterator[Callable[[], None]]:
    """Holds Ctrl-C back until the function that it yields is called.

    A ``KeyboardInterrupt`` while workers are started or waited for leaves some behind, for which Python then waits for
    ever at its exit.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    held: list[tuple[int, FrameType | None]] = []

    def let_it_through() -> None:
        while held:
            handler(*held.pop(0))

    signal.signal(signal.SIGINT, lambda signum, frame: held.append((signum, frame)))
    try:
        yield let_it_through
    finally:
        signal.signal(signal.SIGINT, handler)
    let_it_through()


def _submit(pool: ProcessPoolExecutor, units: list[Unit]) -> set[Future[None]]:
    """Starts the workers, with SIGINT blocked: it would end them with a traceback while they import."""
    if not hasattr(signal, "pthread_sigmask"):
        return {pool.submit(_run_in_worker, unit) for unit in units}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return {pool.submit(_run_in_worker, unit) for unit in units}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


# what a worker process keeps between its units, set once by _start_worker
_worker: tuple[Job, DocumentTokenizer, Any] | None = None


def _start_worker(job: Job, tokenizer_file: str, counter: Any) -> None:
    global _worker
    # Ctrl-C reaches the whole group: the main process decides, and ends its workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.name == "posix":
        # of the lock that litdata makes when imported, any other kind warns when a worker is terminated
        multiprocessing.set_start_method("fork", force=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    allow_parallel_encoding(False)
    _worker = (job, _tokenizer_of(job, tokenizer_file), counter)


def _run_in_worker(unit: Unit) -> None:
    assert _worker is not None
    job, tokenizer, counter = _worker

    def advance(size: int) -> None:
        with counter.get_lock():
            counter.value += size

    _tokenize_unit(job, unit, tokenizer, advance)


def _tokenizer_of(job: Job, tokenizer_file: str) -> DocumentTokenizer:
    import tokenizers

    return DocumentTokenizer(tokenizers.Tokenizer.from_file(tokenizer_file), "", job.bos_id, job.eos_id)


def _tokenize_unit(job: Job, unit: Unit, tokenizer: DocumentTokenizer, advance: Callable[[int], None]) -> None:
    """Tokenizes one unit into its folder: a litdata chunk of train tokens, and validation tokens as they are."""
    dtype = token_dtype(tokenizer.vocab_size)
    tokens: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
    for names, texts, read in _batches(unit, job.text_field):
        for name, ids in zip(names, tokenizer.encode(texts), strict=True):
            validation = in_validation(name, job.seed, job.validation_fraction)
            tokens["validation" if validation else "train"].append(ids.astype(dtype))
        advance(read)

    folder = unit.folder(job.work)
    temporary = folder.with_suffix(".tmp")
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir()
    joined = {split: np.concatenate(parts) if parts else np.empty(0, dtype) for split, parts in tokens.items()}
    index = write_chunk(temporary / "train", joined["train"]) if joined["train"].size else None
    # tofile() does not tell why it could not write
    (temporary / "validation.bin").write_bytes(joined["validation"].data)
    summary = {
        "index": index,
        "documents": {split: len(tokens[split]) for split in SPLITS},
        "tokens": {split: int(joined[split].size) for split in SPLITS},
        "digests": {split: tokens_digest(joined[split]) for split in SPLITS},
        "max_token_id": max((int(array.max()) for array in joined.values() if array.size), default=-1),
    }
    write_json(temporary / "unit.json", summary)
    os.replace(temporary, folder)


def _batches(unit: Unit, text_field: str) -> Iterator[tuple[list[str], list[str], int]]:
    """Groups a unit's documents: names, texts, and the bytes read since the group before."""
    names: list[str] = []
    texts: list[str] = []
    characters = pending = 0
    for part in unit.parts:
        done = 0
        for name, text, read in read_documents(part, text_field):
            names.append(name)
            texts.append(text)
            characters, pending, done = characters + len(text), pending + read - done, read
            if characters >= _BATCH_CHARACTERS:
                yield names, texts, pending
                names, texts, characters, pending = [], [], 0, 0
        pending += part.size - done
    yield names, texts, pending


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """Returns the smallest type of the store that holds every id: uint16 up to 65536 ids, then int32."""
    return np.uint16 if vocab_size <= 1 << 16 else np.int32


def in_validation(document_id: str, seed: int, fraction: float) -> bool:
    """Tells whether a document belongs to validation: a hash of its id and the seed, whatever else is prepared."""
    digest = hashlib.blake2b(f"{seed}:{document_id}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2.0**64
