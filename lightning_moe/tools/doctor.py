"""The `doctor` command: what this machine has for training, and whether a run of `fit` works on it."""

import contextlib
import importlib
import importlib.metadata
import logging
import os
import platform
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from json import dumps
from pathlib import Path
from typing import NamedTuple

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.table import Table

from lightning_moe.callbacks.peak_flops import peak_of
from lightning_moe.dispatch.deep_ep.found import find_deep_ep
from lightning_moe.dispatch.deep_ep.rules import broken_rule
from lightning_moe.models.deepseek_v3.attention_backends import attention_backend
from lightning_moe.models.deepseek_v3.config import DeepSeekV3Config
from lightning_moe.precision.capability import why_not
from lightning_moe.precision.machine import probe
from lightning_moe.precision.recipes import Kind, fp8_blockwise, fp8_rowwise, fp8_tensorwise, mxfp8

# Distribution, module, and what it is for if it is optional
_PACKAGES = (
    ("triton", "triton", "kernels on GPUs"),
    ("torchao", "torchao", None),
    ("lightning", "lightning", None),
    ("jsonargparse", "jsonargparse", None),
    ("torchmetrics", "torchmetrics", None),
    ("litdata", "litdata", None),
    ("transformers", "transformers", "only to compare with its models"),
)
_RECIPES = (
    ("MXFP8", mxfp8()),
    ("FP8 rowwise", fp8_rowwise()),
    ("FP8 tensorwise", fp8_tensorwise()),
    ("FP8 blockwise", fp8_blockwise()),
)
_KINDS: tuple[Kind, ...] = ("linear", "grouped")
_GROUP_SIZES_OVER_HOSTS = (16, 32, 64, 128, 144, 160)
_GPUS_OF_A_HOST = 8


class Row(NamedTuple):
    """A line of the report.

    Args:
        name: What it is about.
        value: What there is.
        fine: Whether all is as one would wish.
    """

    name: str
    value: str
    fine: bool = True


class GPU(NamedTuple):
    """A GPU that torch sees.

    Args:
        name: Its name.
        memory: Its memory in bytes.
        compute_capability: Major and minor.
    """

    name: str
    memory: int
    compute_capability: tuple[int, int]


def doctor(config: list[str] | None = None, world_size: int | None = None, json: bool = False) -> int:
    """Shows what this machine has for training, and whether a run works on it.

    With the settings of a run, as ``fit`` takes them, it also shows what that run would use here, and ends with status
    1 and the reasons if it cannot run. Nothing is trained or written, and no memory of a GPU is kept.

    Args:
        config: A YAML file of ``fit``. As with ``fit`` there may be several, and single settings after them, such as
            ``--config configs/tiny.yaml --trainer.devices 2``.
        world_size: Processes of the run; by default those of torchrun or SLURM, or of ``trainer.devices`` and
            ``trainer.num_nodes``.
        json: Whether to print JSON, for bug reports, instead of tables.

    Returns:
        The exit status: 1 if the run cannot work here.

    Raises:
        ValueError: A ``world_size`` that is no number of processes, or without a run.
    """
    if world_size is not None and world_size < 1:
        raise ValueError(f"world_size is {world_size}, but it must be at least 1, as in --world_size 8.")
    if world_size is not None and not config:
        raise ValueError("world_size is of a run, and none is given. Add one, as in --config configs/tiny.yaml.")
    sections = {"machine": list(machine_rows())}
    errors: list[str] = []
    if config:
        from lightning_moe.tools.planned_run import PlannedRun  # it needs the command line, which needs this

        with _quietly():
            run = PlannedRun(config, world_size)
        sections["run"], errors = run.rows, run.errors
    _print(sections, errors, json)
    return 1 if errors else 0


def gpus() -> list[GPU]:
    """The GPUs that torch sees; none where their driver does not work."""
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [GPU(one.name, one.total_memory, (one.major, one.minor)) for one in found]


def device_here() -> torch.device:
    """The device that a run takes unless it is told otherwise."""
    return torch.device("cuda", 0) if gpus() else torch.device("cpu")


def memory(size: float) -> str:
    """Writes a number of bytes, such as ``139.8 GiB``."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB")):
        if size >= 2**power:
            return f"{size / 2**power:.4g} {unit}"
    return f"{size / 2**10:.4g} KiB"


def count(number: float) -> str:
    """Writes a number, such as ``671.03B``."""
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:,.2f}{suffix}"
    return f"{number:,.0f}"


def processes(number: int) -> str:
    """Writes a number of processes."""
    return f"{number} process{'es' if number > 1 else ''}"


def machine_rows() -> Iterator[Row]:
    """Yields what there is; what is missing or broken is a row that says so."""
    yield Row("system", f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores")
    yield Row("Python", platform.python_version())
    yield from _package("torch", "torch", None)
    yield from _rows("CUDA", _cuda)
    yield from _rows("NCCL", _nccl)
    yield from _rows("GPUs", _gpus)
    yield from _rows("peak", _peaks)
    packages = [row for package in _PACKAGES for row in _package(*package)]
    yield from packages
    torchao = next(row for row in packages if row.name == "torchao")
    yield from _rows("precision", lambda: _precisions(torchao))
    yield from _rows("DeepEP", _deep_ep)
    yield from _rows("attention", _attention)


def _rows(name: str, tell: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """What a probe tells, or that it fails: a broken installation may raise anything."""
    try:
        with _quietly():
            yield from list(tell())
    except Exception as error:
        yield Row(name, f"cannot be told: {_first_line(error)}", fine=False)


def _cuda() -> Iterator[Row]:
    built = torch.version.cuda
    if built is None:
        yield Row("CUDA", "none: this torch is built without it", fine=False)
    elif not torch.cuda.is_available():
        yield Row("CUDA", f"{built}, but torch sees no GPU", fine=False)
    else:
        yield Row("CUDA", built)


def _nccl() -> Iterator[Row]:
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        yield Row("NCCL", "none in this torch", fine=False)
    else:
        version = torch.cuda.nccl.version()
        yield Row("NCCL", ".".join(map(str, version if isinstance(version, tuple) else (version,))))


def _gpus() -> Iterator[Row]:
    for gpu, number in Counter(gpus()).items():
        capability = ".".join(map(str, gpu.compute_capability))
        yield Row("GPUs", f"{number} x {gpu.name}, {memory(gpu.memory)}, compute capability {capability}")
    if not gpus():
        yield Row("GPUs", "none: runs take the CPU", fine=False)


def _peaks() -> Iterator[Row]:
    for name in dict.fromkeys(gpu.name for gpu in gpus()):
        peak = peak_of(name)
        if peak is None:
            yield Row("peak", f"not known for {name}: MFU is not logged", fine=False)
        else:
            rates = ", ".join(f"{dtype} {rate:,.0f}" for dtype, rate in peak.rates.items())
            yield Row("peak", f"{rates} TFLOP/s ({peak.source})")


def _package(distribution: str, module: str, purpose: str | None) -> Iterator[Row]:
    return _rows(distribution, lambda: iter([_package_row(distribution, module, purpose)]))


def _package_row(distribution: str, module: str, purpose: str | None) -> Row:
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        wanted = f"not installed{f' (optional: {purpose})' if purpose else ''}"
        return Row(distribution, wanted, fine=purpose is not None)
    try:
        with _quietly():
            importlib.import_module(module)
    except Exception as error:
        return Row(distribution, f"{version}, but its import fails: {_first_line(error)}", fine=False)
    bounds = _bounds(distribution)
    if not bounds.contains(version, prereleases=True):
        return Row(distribution, f"{version}, but lightning-moe needs {distribution}{bounds}", fine=False)
    return Row(distribution, version)


def _bounds(distribution: str) -> SpecifierSet:
    """Which versions lightning-moe's own metadata asks for."""
    try:
        requirements = [Requirement(text) for text in importlib.metadata.requires("lightning-moe") or []]
    except importlib.metadata.PackageNotFoundError:
        return SpecifierSet()
    found = [requirement.specifier for requirement in requirements if requirement.name == distribution]
    return found[0] if found else SpecifierSet()


def _precisions(torchao: Row) -> Iterator[Row]:
    device = device_here()
    bf16 = device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
    yield Row("bf16", "native" if bf16 else "emulated by torch: slow", fine=bf16)
    machine = probe(device)
    broken = torchao.value if "import fails" in torchao.value and device.type == "cuda" else None
    for name, recipe in _RECIPES:
        reasons = [f"torchao is {broken}" if broken else why_not(recipe, kind, machine) for kind in _KINDS]
        linears, experts = ("native" if reason is None else f"emulated: {reason}" for reason in reasons)
        if recipe.name == "fp8_tensorwise":
            yield Row(name, f"linears {linears}; experts not, they take rowwise scales", fine=reasons[0] is None)
        else:
            text = linears if linears == experts else f"linears {linears}; experts {experts}"
            yield Row(name, text, fine=reasons == [None, None])


def _deep_ep() -> Iterator[Row]:
    try:
        generation = find_deep_ep().generation
    except ImportError as error:
        yield Row("DeepEP", f"none: {error} All-to-all takes its place.", fine=False)
        return
    present = len(gpus())
    config = DeepSeekV3Config()

    def serves(size: int) -> bool:
        return None is broken_rule(
            generation,
            num_experts=size,
            group_size=size,
            hidden_size=config.hidden_size,
            num_experts_per_tok=config.num_experts_per_tok,
            num_sms=20,
        )

    here = [size for size in range(2, present + 1) if serves(size)]
    if present == 0:
        groups = "no groups: it needs GPUs"
    else:
        groups = f"groups of {', '.join(map(str, here))} processes" if here else "no groups on this host alone"
        over_hosts = [size for size in _GROUP_SIZES_OVER_HOSTS if serves(size)]
        if generation == "V2":
            groups += "; over several hosts any size"
        elif present >= _GPUS_OF_A_HOST:
            groups += f"; over hosts of {_GPUS_OF_A_HOST} {', '.join(map(str, over_hosts))}"
    yield Row("DeepEP", f"{generation}: {groups}", fine=present > 0)


def _attention() -> Iterator[Row]:
    device = device_here()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for name, documents in (("attention", False), ("attention of documents", True)):
        kernel = attention_backend(DeepSeekV3Config(), device, dtype, documents=documents)
        yield Row(name, f"{kernel} (DeepSeek-V3's heads)", fine="slow" not in kernel)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _print(sections: dict[str, list[Row]], errors: list[str], json: bool) -> None:
    if getattr(rank_zero_only, "rank", 0) == 0:
        if json:
            content = {name: _as_mapping(rows) for name, rows in sections.items()}
            sys.stdout.write(dumps({**content, "errors": [_without_home(error) for error in errors]}, indent=2) + "\n")
        else:
            for name, rows in [(name, rows) for name, rows in sections.items() if rows]:
                Console().print(_table("this machine" if name == "machine" else "this run here", rows))
    for error in errors:
        sys.stderr.write(f"error: {error}\n")


def _as_mapping(rows: list[Row]) -> dict[str, str]:
    told: dict[str, str] = {}
    for name, value, _ in rows:
        value = _without_home(value)
        told[name] = f"{told[name]}; {value}" if name in told else value
    return told


def _table(title: str, rows: list[Row]) -> Table:
    table = Table(show_header=False, title=title, title_justify="left", title_style="bold")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value, fine in rows:
        table.add_row(name, value, style=None if fine else "yellow")
    return table


def _without_home(text: str) -> str:
    home = str(Path.home())
    return text if home == "/" else text.replace(home, "~")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without what packages say while they are imported; the table says what matters."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
