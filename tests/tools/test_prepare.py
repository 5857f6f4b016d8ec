import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_moe.data import units as units_module
from lightning_moe.data.store import StoreManifest, TokenBlocks, read_manifest
from lightning_moe.data.tokenizers import load_tokenizer
from lightning_moe.data.units import in_validation, token_dtype
from lightning_moe.tools import prepare as prepare_module
from lightning_moe.tools.prepare import describe, prepare
from lightning_moe.usage_errors import UsageError


@pytest.fixture
def text(tmp_path: Path) -> Path:
    draw = random.Random(1)
    with open(tmp_path / "text.jsonl", "w") as file:
        for number in range(200):
            body = f"{number} " + " ".join(draw.choices(["alpha", "beta", "gamma", "delta", "\n"], k=20))
            file.write(json.dumps({"text": body}) + "\n")
    return tmp_path / "text.jsonl"


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units_module, "SMALLEST_UNIT", 4000)


def make(text: Path, output: Path, tokenizer: str = "byte", **settings: Any) -> StoreManifest:
    defaults = {"validation_fraction": 0.1, "num_workers": 1, "progress_bar": False}
    return prepare([str(text)], str(output), tokenizer, **{**defaults, **settings})


def all_tokens(store: Path, split: str) -> list[int]:
    return TokenBlocks(store, split, 1).read(np.arange(len(TokenBlocks(store, split, 1)))).ravel().tolist()


def chunks(store: Path, split: str) -> list[np.ndarray]:
    dtype = read_manifest(store).dtype
    index = json.loads((store / split / "index.json").read_text())["chunks"]
    # a chunk of one item: the number of items, two offsets, the tokens
    return [np.fromfile(store / split / chunk["filename"], dtype, offset=12) for chunk in index]


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {".lock"}


def test_every_document_is_in_its_split_between_bos_and_eos(text: Path, tmp_path: Path) -> None:
    manifest = make(text, tmp_path / "store")
    at = 0
    expected: dict[str, list[int]] = {"train": [], "validation": []}
    for line in text.read_text().splitlines(keepends=True):
        split = "validation" if in_validation(f"text.jsonl:{at}", 0, 0.1) else "train"
        expected[split] += [256, *json.loads(line)["text"].encode(), 257]
        at += len(line)
    for split in ("train", "validation"):
        assert np.concatenate(chunks(tmp_path / "store", split)).tolist() == expected[split]
        assert manifest.tokens[split] == len(expected[split])
    assert sum(manifest.documents.values()) == 200
    assert 8 <= manifest.documents["validation"] <= 35
    assert (manifest.vocab_size, manifest.max_token_id, manifest.dtype) == (258, 257, "uint16")
    # several units of input, but one validation chunk
    assert len(chunks(tmp_path / "store", "train")) > 3
    assert len(chunks(tmp_path / "store", "validation")) == 1


def test_the_result_does_not_depend_on_the_workers(text: Path, tmp_path: Path) -> None:
    one = make(text, tmp_path / "one", "bpe:300", num_workers=1)
    two = make(text, tmp_path / "two", "bpe:300", num_workers=2)
    assert one == two
    assert files(tmp_path / "one") == files(tmp_path / "two")
    for name in files(tmp_path / "one"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_the_store_holds_its_tokenizer(text: Path, tmp_path: Path) -> None:
    manifest = make(text, tmp_path / "store", "bpe:300")
    assert load_tokenizer(str(tmp_path / "store")).fingerprint() == manifest.tokenizer_fingerprint
    assert manifest.vocab_size == 300
    assert manifest.max_token_id < 300
    assert "bpe:300" in describe(manifest)
    again = make(text, tmp_path / "again", str(tmp_path / "store" / "tokenizer.json"))
    assert again.fingerprint == manifest.fingerprint


def test_int32_where_the_vocabulary_needs_it() -> None:
    assert token_dtype(65536) is np.uint16
    assert token_dtype(65537) is np.int32


def test_the_split_is_by_document_and_seed() -> None:
    chosen = [{i for i in range(2000) if in_validation(f"a:{i}", seed, 0.1)} for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert 150 < len(chosen[0]) < 250
    assert not any(in_validation(f"a:{i}", 0, 0.0) for i in range(100))


def test_continues_after_an_interruption(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make(text, tmp_path / "whole", "bpe:300")
    original = units_module._tokenize_unit
    done: list[int] = []

    def interrupted(job: Any, unit: Any, *rest: Any) -> None:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(unit.number)
        original(job, unit, *rest)

    monkeypatch.setattr(units_module, "_tokenize_unit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(text, tmp_path / "store", "bpe:300")
    with pytest.raises(ValueError, match="is not a token store"):
        read_manifest(tmp_path / "store")

    def resumed(job: Any, unit: Any, *rest: Any) -> None:
        done.append(unit.number)
        original(job, unit, *rest)

    monkeypatch.setattr(units_module, "_tokenize_unit", resumed)
    assert make(text, tmp_path / "store", "bpe:300") == whole
    assert len(set(done)) == len(done) > 4  # nothing was done twice
    assert files(tmp_path / "store") == files(tmp_path / "whole")


def test_continues_and_keeps_a_store_inside_its_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("outside", "texts"):
        (tmp_path / folder).mkdir()
        for number in range(20):
            (tmp_path / folder / f"{number}.txt").write_text(f"document {number} " * 100)
            os.utime(tmp_path / folder / f"{number}.txt", (0, 0))
    whole = make(tmp_path / "outside", tmp_path / "store")

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "_finish", fail)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path / "texts", tmp_path / "texts" / "store")
    assert (tmp_path / "texts" / "store" / "tokenizer.json").exists()
    manifest = make(tmp_path / "texts", tmp_path / "texts" / "store")
    assert (manifest.fingerprint, sum(manifest.documents.values())) == (whole.fingerprint, 20)
    assert make(tmp_path / "texts", tmp_path / "texts" / "store") == manifest


@pytest.mark.parametrize("crash_after", [1, 3])
def test_continues_after_a_crash_while_chunks_are_moved(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_after: int
) -> None:
    whole = make(text, tmp_path / "whole")
    original, moved = os.replace, 0

    def crashing(source: Any, target: Any) -> None:
        nonlocal moved
        if Path(target).name.startswith("chunk-"):
            moved += 1
            if moved > crash_after:
                raise KeyboardInterrupt
        original(source, target)

    monkeypatch.setattr(os, "replace", crashing)
    with pytest.raises(KeyboardInterrupt):
        make(text, tmp_path / "store")
    assert not (tmp_path / "store" / "store.json").exists()
    monkeypatch.undo()
    monkeypatch.setattr(units_module, "SMALLEST_UNIT", 4000)
    assert make(text, tmp_path / "store") == whole
    assert all_tokens(tmp_path / "store", "train") == all_tokens(tmp_path / "whole", "train")


def test_another_request_starts_over(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "_finish", fail)
        with pytest.raises(KeyboardInterrupt):
            make(text, tmp_path / "store", seed=5)
    assert make(text, tmp_path / "store") == make(text, tmp_path / "fresh")


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "no space left for .*run the same command again"),
        (errno.EDQUOT, "no space left for .*run the same command again"),
        (errno.EFBIG, "is larger than ulimit -f .*raise the limit and run the same command again"),
    ],
)
def test_a_full_disk_leaves_nothing_that_looks_complete(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, message: str
) -> None:
    original, written = units_module.write_chunk, 0

    def full(folder: Path, tokens: Any) -> Any:
        nonlocal written
        written += 1
        if written == 3:
            raise OSError(number, os.strerror(number))
        return original(folder, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(units_module, "write_chunk", full)
        with pytest.raises(UsageError, match=message):
            make(text, tmp_path / "store")
    assert not (tmp_path / "store" / "store.json").exists()
    assert make(text, tmp_path / "store") == make(text, tmp_path / "fresh")


def test_a_complete_store_is_kept_or_refused(text: Path, tmp_path: Path) -> None:
    first = make(text, tmp_path / "store", "bpe:300")
    before = (tmp_path / "store" / "store.json").stat().st_mtime_ns
    assert make(text, tmp_path / "store", "bpe:300") == first
    assert (tmp_path / "store" / "store.json").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match=r"made with tokenizer 'bpe:300' \(\w{12}\), not 'byte'"):
        make(text, tmp_path / "store", "byte")
    with pytest.raises(ValueError, match="made from other files or with other settings"):
        make(text, tmp_path / "store", "bpe:300", seed=3)


def test_a_folder_with_other_files_is_left_alone(text: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(ValueError, match=r"holds other files \(thesis\.txt\)"):
        make(text, tmp_path / "mine")
    assert files(tmp_path / "mine") == {"thesis.txt"}
    with pytest.raises(ValueError, match="is a file; give a folder"):
        make(text, tmp_path / "mine" / "thesis.txt")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_is_named_and_leaves_no_store(text: Path, tmp_path: Path, workers: int) -> None:
    lines = text.read_text().splitlines()
    lines[150] = '{"text": '
    text.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"text\.jsonl:151 is not a line of JSON"):
        make(text, tmp_path / "store", num_workers=workers)
    assert not (tmp_path / "store" / "store.json").exists()


def test_bad_arguments_fail_before_anything_is_written(text: Path, tmp_path: Path) -> None:
    for settings, message in (
        ({"validation_fraction": 1.0}, "validation_fraction=1.0"),
        ({"num_workers": 0}, "num_workers=0"),
        ({"training_characters": -4}, "training_characters=-4 must be at least 1, such as"),
        ({"tokenizer": "nothing.json"}, "neither a file nor a known name"),
    ):
        with pytest.raises(ValueError, match=message):
            make(text, tmp_path / "store", **settings)
    assert not (tmp_path / "store").exists()
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="no text found"):
        make(tmp_path / "empty.txt", tmp_path / "store")
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(ValueError, match=r"inputs: \S*/blank\.jsonl holds no text: all documents are empty"):
        make(tmp_path / "blank.jsonl", tmp_path / "store")
    with pytest.raises(ValueError, match=r"inputs: \S*/text\.jsonl leaves no document for training; lower"):
        make(text, tmp_path / "store", validation_fraction=0.999999)


def test_files_without_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "blank").mkdir()
    for name in "abcde":
        (tmp_path / "blank" / f"{name}.jsonl").write_text('{"text": null}\n')
    with pytest.raises(ValueError, match=r"/a\.jsonl, \S*/b\.jsonl, \S*/c\.jsonl and 2 more hold no text"):
        make(tmp_path / "blank", tmp_path / "store")


def nothing_left(group: int) -> bool:
    """Whether the process group ends within a few seconds."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


SCRIPT = """
import sys
from lightning_moe import cli
from lightning_moe.data import units
units.SMALLEST_UNIT = 200_000
if __name__ == "__main__":
    sys.exit(cli.main(["prepare", "--inputs", sys.argv[1], "--output", sys.argv[2], "--tokenizer", "byte",
                       "--num_workers", "2"]))
"""


@pytest.mark.parametrize("pause", [None, 0.1])
def test_ctrl_c_ends_quickly_with_all_workers_and_can_continue(tmp_path: Path, pause: float | None) -> None:
    (tmp_path / "text").mkdir()
    line = json.dumps({"text": "some words here " * 50}) + "\n"
    for number in range(10):
        (tmp_path / "text" / f"{number}.jsonl").write_text(line * 1200)
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "text"), str(tmp_path / "store")]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.PIPE)
    work = tmp_path / "store" / ".prepare"
    deadline = time.monotonic() + 60
    while not list(work.glob("unit-??????")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    if pause is not None:
        time.sleep(pause)
        os.killpg(process.pid, signal.SIGINT)
    try:
        _, errors = process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    # the second may come when all is done and Python ends, which is 130 for a shell too
    assert process.returncode in ((130,) if pause is None else (130, -signal.SIGINT))
    assert b"interrupted; run the same command again" in errors
    assert b"Traceback" not in errors
    assert b"leaked" not in errors
    assert nothing_left(process.pid)
    assert list(work.glob("unit-??????"))
    assert not (tmp_path / "store" / "store.json").exists()
    subprocess.run(command, env=environment, check=True, capture_output=True)
    assert read_manifest(tmp_path / "store").documents["train"] > 11_000
