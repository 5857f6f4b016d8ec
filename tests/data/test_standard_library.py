import platform
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_moe.data import standard_library
from lightning_moe.data.datamodule import TokenDataModule
from lightning_moe.data.standard_library import standard_library_files, standard_library_store
from lightning_moe.data.store import read_manifest

from .conftest import Recorder, make_trainer


@pytest.fixture
def few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Lets the store be made of a few files in a cache of the test's own; returns that cache."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [str(path) for path in sorted((root / "json").glob("*.py")) + sorted((root / "email").glob("*.py"))]
    monkeypatch.setattr(standard_library, "standard_library_files", lambda: files)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_lists_the_library_without_installed_packages() -> None:
    files = [Path(file) for file in standard_library_files()]
    assert {"json", "asyncio"} <= {file.parent.name for file in files}
    assert not any("site-packages" in file.parts for file in files)
    assert sum(file.stat().st_size for file in files) > 8_000_000


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="XDG_CACHE_HOME"):
        standard_library_store(512, progress_bar=False)


def test_is_prepared_once_in_the_cache(few_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = standard_library_store(512, progress_bar=False)
    assert folder == few_files / "lightning-moe" / f"python-{platform.python_version()}-bpe-512"
    assert read_manifest(folder).vocab_size == 512
    monkeypatch.setattr(standard_library, "standard_library_files", lambda: pytest.fail("prepared again"))
    assert standard_library_store(512, progress_bar=False) == folder


def test_serves_a_model_without_a_path(few_files: Path, tmp_path: Path) -> None:
    module = Recorder(vocab_size=600)
    module.moe_shape = lambda: SimpleNamespace(vocab_size=600)  # type: ignore[assignment]
    datamodule = TokenDataModule(sequence_length=64, max_tokens=4096, progress_bar=False)
    make_trainer(tmp_path).fit(module, datamodule=datamodule)
    assert module.global_step == 4
    assert datamodule.manifest.vocab_size == 600
    assert str(few_files) in datamodule.describe()


def test_larger_vocabularies_need_a_path(tmp_path: Path) -> None:
    module = Recorder()
    module.moe_shape = lambda: SimpleNamespace(vocab_size=129280)  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"up to 32768, the model's vocab_size is 129280(?s:.)*set data\.path"):
        make_trainer(tmp_path).fit(module, datamodule=TokenDataModule(max_tokens=1e6))


def test_a_model_without_a_vocabulary_needs_a_path(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"does not say its vocab_size(?s:.)*set data\.path"):
        make_trainer(tmp_path).fit(Recorder(), datamodule=TokenDataModule(max_tokens=1e6))
