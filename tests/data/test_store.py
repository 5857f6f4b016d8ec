import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_moe.data import store as store_module
from lightning_moe.data.store import TokenBlocks, read_manifest, write_chunk, write_json


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_blocks_of_any_length_from_one_store(tmp_path: Path, dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_ITEM_TOKENS", 40)
    tokens: Any = np.arange(60_000, 60_105).astype(dtype)
    write_json(tmp_path / "train" / "index.json", write_chunk(tmp_path / "train", tokens))
    for length, blocks in ((4, 21), (9, 10), (49, 2), (104, 1), (105, 0)):
        reader = TokenBlocks(tmp_path, "train", length)
        assert len(reader) == blocks
        read = reader.read(np.arange(blocks)[::-1].copy())
        assert read.dtype == np.int64
        assert np.array_equal(read[::-1].ravel(), tokens[: blocks * (length + 1)])


def test_litdata_reads_the_store(store: Path) -> None:
    from litdata import StreamingDataset, TokensLoader

    dataset = StreamingDataset(str(store / "train"), item_loader=TokensLoader(block_size=33))
    blocks = TokenBlocks(store, "train", 32)
    assert len(dataset) == len(blocks)
    assert dataset[5].tolist() == blocks.read(np.array([5]))[0].tolist()


def test_a_missing_split_is_empty(store: Path) -> None:
    assert len(TokenBlocks(store, "nothing", 4)) == 0


def test_what_is_not_a_store(store: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"does not exist(?s:.)*lightning-moe prepare"):
        read_manifest(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"is not a token store \(it has no store\.json\)"):
        read_manifest(tmp_path)
    (tmp_path / "tiny.yaml").write_text("a: 1")
    with pytest.raises(ValueError, match=r"tiny\.yaml is a file, not a token store(?s:.)*--output data/mine"):
        read_manifest(tmp_path / "tiny.yaml")
    shutil.copytree(store, tmp_path / "copy")
    manifest = json.loads((tmp_path / "copy" / "store.json").read_text())
    assert read_manifest(tmp_path / "copy") == read_manifest(store)
    write_json(tmp_path / "copy" / "store.json", {**manifest, "format_version": 9})
    with pytest.raises(ValueError, match="format version 9, this release reads version 1"):
        read_manifest(tmp_path / "copy")
    (tmp_path / "copy" / "store.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        read_manifest(tmp_path / "copy")
