"""Tokens per second of `lightning-moe prepare` against `tokenizers` alone, on the same documents in one run.

Both use the same number of processes or threads: first one process with the threads of `tokenizers`, then several
processes, whose start is counted. What prepare adds to the encoding is reading, the split, joining, hashing and writing
the store.

    python benchmarks/prepare.py [--tokenizer bpe:4096] [--workers 2] [--every 4] [--turns 2]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_moe.data.standard_library import standard_library_files
from lightning_moe.data.tokenizers import (
    DocumentTokenizer,
    allow_parallel_encoding,
    load_tokenizer,
    parse_bpe_name,
    train_bpe,
)
from lightning_moe.tools.prepare import prepare

_tokenizer: Any = None


def load_in_worker(tokenizer_file: str, parallel: bool) -> None:
    global _tokenizer
    import tokenizers

    allow_parallel_encoding(parallel)
    _tokenizer = tokenizers.Tokenizer.from_file(tokenizer_file)


def encode_alone(texts: list[str]) -> int:
    """Encodes texts with nothing but `tokenizers`, in batches like prepare's; returns the number of tokens."""
    tokens = characters = 0
    batch: list[str] = []
    for number, text in enumerate(texts):
        batch.append(text)
        characters += len(text)
        if characters >= 1 << 20 or number + 1 == len(texts):
            tokens += sum(
                len(encoding.ids) for encoding in _tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            )
            batch, characters = [], 0
    return tokens


def measure_alone(tokenizer_file: str, texts: list[str], workers: int) -> float:
    started = time.perf_counter()
    if workers == 1:
        load_in_worker(tokenizer_file, parallel=True)
        return encode_alone(texts) / (time.perf_counter() - started)
    with ProcessPoolExecutor(workers, get_context("spawn"), load_in_worker, (tokenizer_file, False)) as pool:
        size = -(-len(texts) // (4 * workers))
        tokens = sum(pool.map(encode_alone, [texts[start : start + size] for start in range(0, len(texts), size)]))
        return tokens / (time.perf_counter() - started)


def measure_prepare(files: list[str], tokenizer_file: str, output: Path, workers: int) -> float:
    started = time.perf_counter()
    manifest = prepare(files, str(output), tokenizer_file, num_workers=workers, progress_bar=False)
    return sum(manifest.tokens.values()) / (time.perf_counter() - started)


def load(name: str, texts: list[str]) -> DocumentTokenizer:
    size = parse_bpe_name(name)
    return load_tokenizer(name) if size is None else train_bpe(texts[::4], size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default="bpe:4096")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--every", type=int, default=1, help="use every n-th file of the standard library")
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()

    files = standard_library_files()[:: arguments.every]
    texts = [Path(file).read_text(encoding="utf-8-sig") for file in files]
    table = Table(title=f"{arguments.tokenizer}, {sum(map(len, texts)) / 1e6:.1f} M characters, {os.cpu_count()} cores")
    for column in ("", "tokenizers alone (tokens/s)", "prepare (tokens/s)", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer_file = Path(folder) / "tokenizer.json"
        tokenizer_file.write_text(load(arguments.tokenizer, texts).to_json(), encoding="utf-8")
        for workers in sorted({1, arguments.workers}):
            # the best of a few, in turns: other work on the machine disturbs both alike
            alone = ours = 0.0
            for turn in range(arguments.turns):
                alone = max(alone, measure_alone(str(tokenizer_file), texts, workers))
                output = Path(folder) / f"store-{workers}-{turn}"
                ours = max(ours, measure_prepare(files, str(tokenizer_file), output, workers))
            label = "1 process, threads" if workers == 1 else f"{workers} processes"
            table.add_row(label, f"{alone:,.0f}", f"{ours:,.0f}", f"{ours / alone:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
