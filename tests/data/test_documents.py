import json
from pathlib import Path

import pytest

from lightning_moe.data.documents import Part, find_sources, read_documents, split_into_parts


def documents(path: Path, part_bytes: int = 1 << 30, text_field: str = "text") -> list[tuple[str, str]]:
    (source,) = find_sources([str(path)])
    parts = split_into_parts(source, part_bytes, text_field)
    return [(name, text) for part in parts for name, text, _ in read_documents(part, text_field)]


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_folders_are_listed_in_a_fixed_order(tmp_path: Path) -> None:
    for name in ("b/two.txt", "a.txt", "b/one.md", ".hidden/x.txt", "b/.y.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    assert [source.name for source in find_sources([str(tmp_path)])] == ["a.txt", "b/one.md", "b/two.txt"]
    assert [source.name for source in find_sources([str(tmp_path)], "*.md")] == ["b/one.md"]


def test_an_output_inside_a_folder_is_no_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.txt", "out/tokenizer.json", "out/train/index.json", "outside.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    monkeypatch.chdir(tmp_path)

    def names(given: str, output: Path) -> list[str]:
        return [source.name for source in find_sources([given], output=output)]

    assert names(str(tmp_path), Path("out")) == ["a.txt", "outside.txt"]
    assert names(".", tmp_path / "out") == ["a.txt", "outside.txt"]
    # what is named itself is read
    assert names("out", tmp_path / "out") == ["tokenizer.json", "train/index.json"]
    assert names("out/train", tmp_path / "out") == ["index.json"]
    assert names("out/tokenizer.json", tmp_path / "out") == ["tokenizer.json"]


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfh\xc3\xa9\n\n")
    assert documents(tmp_path / "a.txt") == [("a.txt", "hé\n\n")]


@pytest.mark.parametrize("part_bytes", [1, 7, 20, 21, 1000])
def test_jsonl_parts_read_every_line_once(tmp_path: Path, part_bytes: int) -> None:
    lines = [json.dumps({"text": "é" * number}, ensure_ascii=False) for number in range(1, 9)]
    path = write_lines(tmp_path / "a.jsonl", *lines[:3], "", *lines[3:], json.dumps({"text": None}))
    read = documents(path, part_bytes)
    assert [text for _, text in read] == ["é" * number for number in range(1, 9)]
    # ids do not depend on the parts
    assert read == documents(path)


def test_whole_surrogate_pairs_and_other_fields_are_read(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", r'{"text": "\ud83d\ude00", "title": "\ud800"}')
    assert documents(path) == [("a.jsonl:0", "\U0001f600")]


def test_jsonl_without_a_last_line_end(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b"}')
    assert [text for _, text in documents(tmp_path / "a.jsonl", 3)] == ["a", "b"]


@pytest.mark.parametrize("part_bytes", [1, 1 << 30])
def test_parquet_row_groups(tmp_path: Path, part_bytes: int) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": ["a", None, "b", "", "c"], "other": [1, 2, 3, 4, 5]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    expected = [("a.parquet:0", "a"), ("a.parquet:2", "b"), ("a.parquet:4", "c")]
    assert documents(tmp_path / "a.parquet", part_bytes) == expected
    with pytest.raises(ValueError, match=r"no column 'body' \(it has \['text', 'other'\]\); name it with --text_field"):
        documents(tmp_path / "a.parquet", text_field="body")
    with pytest.raises(ValueError, match="column 'other' is int64, not text"):
        documents(tmp_path / "a.parquet", text_field="other")


def test_progress_adds_up_to_the_size(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", *[json.dumps({"text": "x" * 10})] * 5)
    (source,) = find_sources([str(path)])
    assert [read for *_, read in read_documents(Part(source, 0, source.size, source.size), "text")][-1] == source.size


@pytest.mark.parametrize("part_bytes", [10, 1000])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{bad", r"a\.jsonl:3 is not a line of JSON"),
        ('{"body": "x"}', r"a\.jsonl:3 has no field 'text' \(it has \['body'\]\); name it with --text_field"),
        ("[1]", r"a\.jsonl:3 has no field 'text' \(it has list\)"),
        ('{"text": 5}', r"a\.jsonl:3: field 'text' is int, not a text"),
        (
            r'{"text": "é\ud800"}',
            r"a\.jsonl:3: field 'text' holds half a surrogate pair \(\\ud800\), .*replace it with",
        ),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str, part_bytes: int) -> None:
    path = write_lines(tmp_path / "a.jsonl", '{"text": "a"}', "", line, '{"text": "b"}')
    with pytest.raises(ValueError, match=message):
        documents(path, part_bytes)


def test_bad_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"abc\xff")
    with pytest.raises(ValueError, match=r"bad\.txt is not UTF-8 text \(byte 3\)"):
        documents(tmp_path / "bad.txt")
    (tmp_path / "bad.parquet").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"bad\.parquet is not a Parquet file"):
        documents(tmp_path / "bad.parquet")
    (tmp_path / "a.jsonl.gz").write_bytes(b"x")
    with pytest.raises(ValueError, match="compressed"):
        documents(tmp_path / "a.jsonl.gz")
    with pytest.raises(ValueError, match="does not exist"):
        find_sources([str(tmp_path / "nothing")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no text found"):
        find_sources([str(tmp_path / "empty")])


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.txt", "text")
    (source,) = find_sources([str(path)])
    path.unlink()
    with pytest.raises(ValueError, match=r"a\.txt cannot be read \(No such file"):
        list(read_documents(Part(source, 0, 5, 5), "text"))


def test_folders_behind_links_are_read_once(tmp_path: Path) -> None:
    texts, more = tmp_path / "texts", tmp_path / "more"
    for folder in (texts, more / "deep"):
        folder.mkdir(parents=True)
        (folder / "a.txt").write_text("text")
    (texts / "link").symlink_to(more)
    (texts / "link" / "back").symlink_to(texts)
    (texts / "again").symlink_to(more)
    (texts / "b.txt").symlink_to(texts / "a.txt")
    assert [source.name for source in find_sources([str(texts)])] == ["a.txt", "again/deep/a.txt", "b.txt"]
