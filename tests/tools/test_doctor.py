"""The report of a machine and of a planned run, on machines that are put in place of this one."""

import importlib.metadata
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_moe.cli import MoECLI, main
from lightning_moe.dispatch.deep_ep.rules import estimate_buffer_bytes
from lightning_moe.models.deepseek_v3.attention_backends import attention_backend
from lightning_moe.precision.capability import Machine
from lightning_moe.tools import gather_arguments_of_fit
from lightning_moe.tools.doctor import GPU, Row, count, machine_rows, memory
from lightning_moe.tools.planned_run import PlannedRun
from lightning_moe.tools.prepare import prepare
from lightning_moe.usage_errors import MAX_LINES
from tests.callbacks.standins import SMALL_MODEL, arguments
from tests.dispatch import deep_ep_standin
from tests.precision.test_capability import B200, H200

DOCTOR = "lightning_moe.tools.doctor"
PLAN = "lightning_moe.tools.planned_run"


def _attention_of_hopper(*_: Any, documents: bool) -> str:
    return "FlexAttention" if documents else "SDPA cuDNN"


def put_in_place(patch: pytest.MonkeyPatch, machine: Machine, number: int, size: int = 150_000_000_000) -> None:
    """Makes this machine seem to be another one with GPUs."""
    assert machine.compute_capability is not None
    found = [GPU(machine.name, size, machine.compute_capability)] * number
    for module in (DOCTOR, PLAN):
        patch.setattr(f"{module}.gpus", lambda: found)
        patch.setattr(f"{module}.device_here", lambda: torch.device("cuda", 0))
        patch.setattr(f"{module}.attention_backend", _attention_of_hopper)
    for module in (DOCTOR, "lightning_moe.precision.plugin"):
        patch.setattr(f"{module}.probe", lambda _: machine)
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    patch.setattr(torch.cuda, "empty_cache", lambda: None)
    patch.setattr(torch.version, "cuda", "13.0")


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (DOCTOR, PLAN):
        monkeypatch.setattr(f"{module}.gpus", list)
        monkeypatch.setattr(f"{module}.device_here", lambda: torch.device("cpu"))


def tell() -> dict[str, Row]:
    return {row.name: row for row in machine_rows()}


def values() -> dict[str, str]:
    return {name: row.value for name, row in tell().items()}


# The machine


def test_a_machine_without_gpu(without_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    rows = tell()
    assert rows["CUDA"] == ("CUDA", "none: this torch is built without it", False)
    assert rows["GPUs"] == ("GPUs", "none: runs take the CPU", False)
    assert rows["bf16"].value == "native"
    assert rows["MXFP8"] == ("MXFP8", "emulated: there are no FP8 kernels for CPU", False)
    assert rows["FP8 tensorwise"].value.endswith("for CPU; experts not, they take rowwise scales")
    assert rows["attention"].value == "SDPA flash, values padded (DeepSeek-V3's heads)"
    assert rows["attention of documents"] == rows["attention"]._replace(name="attention of documents")
    assert rows["DeepEP"].value.startswith("none: deep_ep is not installed; https://github.com/deepseek-ai/DeepEP")
    assert "peak" not in rows
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert values()["CUDA"] == "13.0, but torch sees no GPU"


def test_packages_and_python_are_named(without_gpu: None) -> None:
    rows = tell()
    for name in ("torch", "lightning", "litdata", "jsonargparse", "torchmetrics", "torchao"):
        assert rows[name] == (name, importlib.metadata.version(name), True)
    assert rows["Python"].value == sys.version.split()[0]


def test_hopper_with_the_first_deep_ep(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(monkeypatch, H200, 8)
    deep_ep_standin.install(monkeypatch, "V1")
    rows = tell()
    assert rows["GPUs"] == ("GPUs", "8 x NVIDIA H200, 139.7 GiB, compute capability 9.0", True)
    assert "bfloat16 989, float8 1,979 TFLOP/s (NVIDIA H200 data sheet, SXM)" in rows["peak"].value
    assert rows["MXFP8"].value.startswith("emulated: MXFP8 needs a GPU of compute capability 10.x (B200, GB200)")
    assert rows["FP8 rowwise"] == ("FP8 rowwise", "native", True)
    assert rows["FP8 tensorwise"] == (
        "FP8 tensorwise",
        "linears native; experts not, they take rowwise scales",
        True,
    )
    assert rows["FP8 blockwise"].value.startswith("linears native; experts emulated: its grouped multiplication needs")
    assert rows["DeepEP"].value == ("V1: groups of 2, 4, 8 processes; over hosts of 8 16, 32, 64, 128, 144, 160")
    assert rows["attention"].value == "SDPA cuDNN (DeepSeek-V3's heads)"
    assert rows["attention of documents"].value == "FlexAttention (DeepSeek-V3's heads)"


@pytest.mark.parametrize(
    ("generation", "number", "groups"),
    [
        ("V1", 1, "V1: no groups on this host alone"),
        ("V1", 4, "V1: groups of 2, 4 processes"),
        ("V2", 3, "V2: groups of 2, 3 processes; over several hosts any size"),
    ],
)
def test_groups_of_deep_ep(generation: str, number: int, groups: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(monkeypatch, H200, number)
    deep_ep_standin.install(monkeypatch, generation)
    assert values()["DeepEP"] == groups


def test_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(monkeypatch, B200, 1)
    rows = tell()
    assert rows["MXFP8"] == ("MXFP8", "native", True)
    assert rows["FP8 blockwise"].value.startswith("emulated: blockwise FP8 needs a GPU of compute capability 9.x")
    put_in_place(monkeypatch, replace(B200, modules=frozenset()), 1)
    assert values()["MXFP8"].startswith("linears native; experts emulated: its kernels need more packages: pip install")


def test_a_gpu_that_no_data_sheet_is_known_of(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(monkeypatch, replace(H200, name="NVIDIA X1"), 1)
    assert values()["peak"] == "not known for NVIDIA X1: MFU is not logged"


def test_deep_ep_that_cannot_be_imported(without_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep_ep.py").write_text("raise OSError('libcudart.so.12: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    assert values()["DeepEP"] == (
        "none: deep_ep is installed, but its import fails: OSError: libcudart.so.12: cannot open "
        "All-to-all takes its place."
    )


def test_packages_that_are_broken_old_or_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(monkeypatch, H200, 1)
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("litdata", "transformers"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "2.10.0" if name == "torch" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["torch>=2.11", "torchao>=0.17"])
    monkeypatch.setitem(sys.modules, "torchao", None)
    rows = tell()
    assert rows["torch"] == ("torch", "2.10.0, but lightning-moe needs torch>=2.11", False)
    assert rows["litdata"] == ("litdata", "not installed", False)
    assert rows["transformers"] == ("transformers", "not installed (optional: only to compare with its models)", True)
    fails = f"{real('torchao')}, but its import fails: ModuleNotFoundError: import of torchao halted"
    assert rows["torchao"].value.startswith(fails)
    assert rows["FP8 rowwise"].value.startswith(f"emulated: torchao is {fails}")


def test_a_probe_that_fails_is_a_row(without_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise AttributeError("no such operator\nand more")

    monkeypatch.setattr(f"{DOCTOR}.probe", broken)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", broken)
    monkeypatch.setattr(f"{DOCTOR}.Requirement", broken)
    rows = tell()
    assert rows["precision"] == ("precision", "cannot be told: AttributeError: no such operator", False)
    assert rows["NCCL"] == ("NCCL", "cannot be told: AttributeError: no such operator", False)
    assert rows["torch"].value == "cannot be told: AttributeError: no such operator"
    assert "DeepEP" in rows


def test_sizes_in_words() -> None:
    assert [memory(size) for size in (2048, 3 * 2**20, 2**40)] == ["2 KiB", "3 MiB", "1 TiB"]
    assert [count(number) for number in (12, 3.29e6, 671_026_404_352)] == ["12", "3.29M", "671.03B"]


# The command


def test_json_for_bug_reports(
    without_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "deep_ep.py").write_text(f"raise OSError('{tmp_path}/lib.so is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    assert main(["doctor", "--json", *arguments(tmp_path / "run", f"--data.path={tmp_path}/none")]) == 0
    captured = capfd.readouterr()
    assert captured.err == ""
    assert str(tmp_path) not in captured.out
    told = json.loads(captured.out)
    assert list(told) == ["machine", "run", "errors"]
    assert told["errors"] == []
    assert told["machine"]["torch"] == importlib.metadata.version("torch")
    assert "OSError: ~/lib.so is missing" in told["machine"]["DeepEP"]
    assert told["run"]["processes"] == "1 (by trainer.devices), on cpu here"


def test_tables(without_gpu: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert "this machine" in capfd.readouterr().out
    assert main(["doctor", *arguments(tmp_path / "run")]) == 0
    out = capfd.readouterr().out
    for part in ("this machine", "this run here", "LocalDispatcher", "computes in float32"):
        assert part in out


def test_only_one_of_several_processes_prints(
    without_gpu: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(f"{DOCTOR}.rank_zero_only.rank", 1)
    assert main(["doctor"]) == 0
    assert capfd.readouterr().out == ""


def test_help(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "    doctor " in capfd.readouterr().out
    assert main(["doctor", "--help"]) == 0
    text = " ".join(capfd.readouterr().out.split())
    for part in ("--config CONFIG", "--world_size", "--json", "Shows what this machine has", "A YAML file of ``fit``"):
        assert part in text
    assert "--trainer.accelerator" not in text


def test_arguments_of_fit_are_gathered() -> None:
    given = ["doctor", "--config", "a.yaml", "--world-size", "8", "--trainer.devices=2", "--json", "--help"]
    gathered = '--config=["--config", "a.yaml", "--trainer.devices=2"]'
    assert gather_arguments_of_fit(given) == ["doctor", "--world_size=8", "--json=true", "--help", gathered]
    assert gather_arguments_of_fit(["doctor", "--json=false"]) == ["doctor", "--json=false"]
    assert gather_arguments_of_fit(["fit", "--config", "a.yaml"]) == ["fit", "--config", "a.yaml"]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["--world-size", "0", "--config=x"], "world_size is 0, but it must be at least 1"),
        (["--world-size=4"], "world_size is of a run, and none is given"),
        (["--world-size=four"], "four is not allowed"),
    ],
)
def test_a_wrong_command(command: list[str], expected: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *command]) == 2
    assert expected in capfd.readouterr().err


def test_importing_it_loads_no_package_that_it_reports_on() -> None:
    code = (
        "import sys, lightning.pytorch; before = set(sys.modules); import lightning_moe.tools.doctor; "
        "print(*sorted({'torchao', 'litdata', 'deep_ep', 'transformers'} & (set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


# A planned run


def plan(tmp_path: Path, *more: str, world_size: int | None = None) -> tuple[dict[str, str], list[str]]:
    run = PlannedRun(arguments(tmp_path / "run", *more), world_size)
    told: dict[str, str] = {}
    for name, value, _ in run.rows:
        told[name] = f"{told[name]} / {value}" if name in told else value
    return told, run.errors


EXPERT_PARALLEL = "--trainer.strategy=expert_parallel"


def test_what_a_run_uses(without_gpu: None, tmp_path: Path) -> None:
    parallel = [EXPERT_PARALLEL, "--data.global_batch_size=16", "--model.config.num_hidden_layers=3"]
    told, errors = plan(tmp_path, *parallel, world_size=4)
    assert errors == []
    run = PlannedRun(arguments(tmp_path / "run", *parallel))
    assert run.model is not None
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    assert told == {
        "processes": "4 (by world_size), on cpu here",
        "model": "DeepSeekV3: {total} parameters, {activated} active per token".format(
            **{name: count(number) for name, number in run.model.parameter_counts().items()}
        ),
        "layout": "data parallel 1 x 4, expert parallel 4",
        "memory": f"weights {memory(4 * parameters)} and moments of AdamW {memory(8 * parameters)}: "
        f"{memory(3 * parameters)} on each of the 4 processes, without gradients and activations",
        "global batch": "2 x 2 accumulated x 4 processes = 16 sequences, 128 tokens",
        "data": "RandomTokens",
        "steps": "3",
        "dispatcher": "AllToAllDispatcher, because DeepEP needs GPUs, and this runs on the CPU.",
        "precision": "computes in float32",
        "attention": "SDPA flash, values padded",
        "attention of documents": "SDPA flash, values padded",
    }


def test_nothing_is_built_or_written(without_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def built(*_: object, **__: object) -> None:
        raise AssertionError("a Trainer was built")

    monkeypatch.setattr("lightning.pytorch.trainer.trainer._AcceleratorConnector", built)
    with pytest.raises(AssertionError, match="a Trainer was built"):
        Trainer()
    logger = ["--trainer.logger=lightning.pytorch.loggers.TensorBoardLogger", f"--trainer.logger.save_dir={tmp_path}"]
    assert plan(tmp_path, *logger, "--ckpt_path=last")[1] == []
    assert list(tmp_path.iterdir()) == []


FP8_DISPATCH = [
    "--trainer.strategy.dispatcher=lightning_moe.AllToAllDispatcher",
    "--trainer.strategy.dispatcher.fp8_dispatch=true",
]


def test_dispatch_in_eight_bits(without_gpu: None, tmp_path: Path) -> None:
    wide = [EXPERT_PARALLEL, *FP8_DISPATCH, "--model.config.hidden_size=128", "--data.global_batch_size=16"]
    told, errors = plan(tmp_path, *wide, world_size=4)
    assert errors == []
    assert told["dispatcher"] == "AllToAllDispatcher, tokens travel in E4M3"


# What cannot run here, and what the message must hold
CANNOT: list[tuple[list[str], int | None, list[str]]] = [
    (["--trainer.accelerator=gpu"], None, ["trainer.accelerator is gpu", "no GPU", "auto or cpu"]),
    ([], 2, ["trainer.strategy is auto with 2 processes", "--trainer.strategy expert_parallel"]),
    ([EXPERT_PARALLEL], 4, ["data.global_batch_size is 4", "micro_batch_size (2) x 4 processes", "works: 8"]),
    ([EXPERT_PARALLEL, "--trainer.strategy.expert_parallel_size=3"], 2, ["expert_parallel_size is 3", "works: 2"]),
    ([EXPERT_PARALLEL, "--trainer.strategy.dispatcher=deep_ep"], 2, ["dispatcher is deep_ep", "all_to_all"]),
    (
        [EXPERT_PARALLEL, "--trainer.strategy.dispatcher=lightning_moe.DeepEPDispatcher"],
        2,
        ["dispatcher is DeepEPDispatcher, but DeepEP needs GPUs", "auto or all_to_all"],
    ),
    (
        [EXPERT_PARALLEL, *FP8_DISPATCH],
        2,
        ["model.config.hidden_size is 16, but fp8_dispatch needs a multiple of 128", "fp8_dispatch: false"],
    ),
    (
        ["--trainer.plugins+=lightning_moe.MXFP8Precision", "--trainer.plugins.emulate=never"],
        None,
        ["trainer.plugins: MXFP8Precision cannot run mxfp8", "no FP8 kernels for CPU", "Here BF16Precision runs"],
    ),
    (
        ["--trainer.plugins+=lightning_moe.BF16Precision", "--trainer.precision=bf16-mixed"],
        None,
        ["trainer.precision is bf16-mixed, but BF16Precision", "--trainer.precision null"],
    ),
    (["--trainer.precision=mxfp8"], None, ["--config configs/precision/mxfp8.yaml"]),
    (["--trainer.max_stepss=3"], None, ["trainer.max_stepss", "trainer.max_steps"]),
    (["--model.config.n_group=3"], None, ["model.config.n_group is 3", "n_group=2"]),
    (["--model.optimizer.lr=-1"], None, ["lr=-1", "2.2e-4"]),
    (["--trainer.gradient_clip_val=-1"], None, ["trainer.gradient_clip_val is -1", "1.0"]),
    (["--data.max_tokens=null"], None, ["data.max_tokens: nothing ends this training", "1e9"]),
    (["--config=missing.yaml"], None, ["config", "missing.yaml"]),
]


@pytest.mark.parametrize(("wrong", "world_size", "expected"), CANNOT, ids=[" ".join(wrong) for wrong, *_ in CANNOT])
def test_what_cannot_run(
    wrong: list[str],
    world_size: int | None,
    expected: list[str],
    without_gpu: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(f"{DOCTOR}.machine_rows", lambda: iter([Row("torch", "2.14")]))
    size = [] if world_size is None else [f"--world-size={world_size}"]
    assert main(["doctor", *size, *arguments(tmp_path / "run"), *wrong]) == 1
    captured = capfd.readouterr()
    assert "2.14" in captured.out  # the machine is shown all the same
    assert captured.err.count("error: ") == 1
    assert len(captured.err.splitlines()) <= MAX_LINES
    assert "Traceback" not in captured.err
    text = " ".join(captured.err.split())
    for part in expected:
        assert part in text


def test_several_reasons_are_all_told(without_gpu: None, tmp_path: Path) -> None:
    _, errors = plan(tmp_path, EXPERT_PARALLEL, "--trainer.strategy.dispatcher=deep_ep", world_size=4)
    assert [error.split(" is ")[0] for error in errors] == ["data.global_batch_size", "trainer.strategy.dispatcher"]


def test_processes_of_a_launcher(without_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("LOCAL_WORLD_SIZE", "2"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    told, errors = plan(tmp_path, EXPERT_PARALLEL, "--data.global_batch_size=8")
    assert (told["processes"], errors) == ("4 (by torchrun), on cpu here", [])
    _, errors = plan(tmp_path, EXPERT_PARALLEL, "--data.global_batch_size=8", "--trainer.devices=3")
    assert "trainer.devices is 3, but torchrun started 2 processes on each node" in errors[0]


@pytest.mark.parametrize(
    ("asked", "more", "expected"),
    [
        ("float32", ["--trainer.plugins+=lightning_moe.BF16Precision"], "BF16Precision: computes in float32"),
        ("auto", ["--trainer.plugins+=lightning_moe.BF16Precision"], "BF16Precision: computes in bfloat16"),
        ("float32", ["--trainer.plugins+=lightning_moe.Float8Precision"], " in float32 / EMULATED: fp8_rowwise"),
        ("bfloat16", ["--trainer.plugins+=lightning_moe.Float8Precision"], " in bfloat16 / EMULATED: fp8_rowwise"),
        ("float32", ["--trainer.precision=bf16-true"], "computes in float32"),
        ("float32", ["--trainer.precision=bf16-mixed"], "computes in bfloat16"),
        ("bfloat16", [], "computes in bfloat16"),
    ],
)
def test_the_compute_dtype_of_the_strategy_wins(
    asked: str, more: list[str], expected: str, without_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes = []

    def attention_backend(config: Any, device: Any, dtype: torch.dtype, backend: str, *, documents: bool) -> str:
        dtypes.extend([] if documents else [dtype])
        return "SDPA flash"

    monkeypatch.setattr(f"{PLAN}.attention_backend", attention_backend)
    given = [EXPERT_PARALLEL, f"--trainer.strategy.compute_dtype={asked}", *more]
    told, errors = plan(tmp_path, *given)
    assert errors == []
    assert expected in told["precision"]
    # The same as what the run computes in
    cli: Any = MoECLI(args=[*arguments(tmp_path / "run"), *given], run=False)
    strategy = cli.trainer.strategy
    strategy.connect(cli.model)
    strategy.setup_environment()
    assert dtypes == [strategy._resolve_compute_dtype()]


def test_attention_that_is_asked_for(without_gpu: None, tmp_path: Path) -> None:
    told, errors = plan(tmp_path, "--model.attention_backend=math")
    assert (told["attention"], told["attention of documents"], errors) == ("SDPA math", "SDPA math", [])
    _, errors = plan(tmp_path, "--model.attention_backend=cudnn")
    assert [" ".join(error.split()) for error in errors] == [
        "model.attention_backend is cudnn, but SDPA cuDNN does not take rows with 12 and 8 dimensions in float32 on "
        "cpu: it needs a CUDA GPU. What works here: auto, which takes flash; slower: math."
    ]


def test_a_kernel_without_documents_where_there_are_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = attention_backend
    put_in_place(monkeypatch, H200, 1)
    monkeypatch.setattr(f"{PLAN}.attention_backend", real)
    monkeypatch.setattr("lightning_moe.models.deepseek_v3.attention_backends._why_not_sdpa", lambda *_: None)
    given = ["--trainer.accelerator=auto", "--trainer.precision=bf16-mixed", "--model.attention_backend=flash"]
    told, errors = plan(tmp_path, *given)
    assert (told["attention"], errors) == ("SDPA flash", [])
    assert told["attention of documents"].startswith("none: attention_backend is flash, but SDPA flash does not take")
    monkeypatch.setattr("tests.callbacks.standins.RandomTokens.document_mask", True, raising=False)
    _, errors = plan(tmp_path, *given)
    assert "in bfloat16 on cuda: it takes no mask. What works" in " ".join(errors[0].split())


def test_emulation_is_no_error(without_gpu: None, tmp_path: Path) -> None:
    told, errors = plan(tmp_path, "--trainer.plugins+=lightning_moe.Float8Precision")
    assert errors == []
    assert "EMULATED: fp8_rowwise linears have its numbers and not its speed" in told["precision"]


@pytest.mark.parametrize("generation", deep_ep_standin.GENERATIONS)
def test_deep_ep_is_chosen_where_it_fits(generation: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(monkeypatch, H200, 2)
    deep_ep_standin.install(monkeypatch, generation)
    wide = [EXPERT_PARALLEL, "--model.config.hidden_size=256"]
    settings: dict[str, Any] = {"group_size": 2, "hidden_size": 256, "num_experts_per_tok": 2}
    size = estimate_buffer_bytes(generation, **settings, max_tokens_per_rank=16, num_sms=20)
    assert size is not None
    told, errors = plan(tmp_path, *wide, "--trainer.accelerator=auto")
    assert errors == []
    assert told["processes"] == "2 (by trainer.devices), on cuda here"
    assert told["dispatcher"] == "DeepEPDispatcher"
    assert told["DeepEP buffers"] == f"{generation}: about {memory(size)} on each process"
    assert told["precision"] == "computes in bfloat16"
    by_class = [
        "--trainer.strategy.dispatcher=lightning_moe.DeepEPDispatcher",
        "--trainer.strategy.dispatcher.num_sms=24",
    ]
    size = estimate_buffer_bytes(generation, **settings, max_tokens_per_rank=16, num_sms=24)
    assert size is not None
    told, errors = plan(tmp_path, *wide, "--trainer.accelerator=auto", *by_class)
    assert (told["DeepEP buffers"], errors) == (f"{generation}: about {memory(size)} on each process", [])
    told, _ = plan(tmp_path, EXPERT_PARALLEL, "--model.config.hidden_size=24", "--trainer.accelerator=auto")
    assert "AllToAllDispatcher, because hidden_size is 24, but DeepEP" in told["dispatcher"]


def test_hosts_with_too_few_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(monkeypatch, H200, 2)
    deep_ep_standin.install(monkeypatch, "V1")
    told, errors = plan(
        tmp_path, EXPERT_PARALLEL, "--trainer.accelerator=auto", "--data.global_batch_size=8", world_size=4
    )
    assert errors == []
    assert "because ranks 0 to 3 of the expert-parallel group are on the hosts number 0, number 1" in told["dispatcher"]


def test_gpus_that_are_not_there_or_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(monkeypatch, H200, 1, size=20_000)
    _, errors = plan(tmp_path, "--trainer.accelerator=auto")
    assert len(errors) == 1
    assert "on 1 process, but NVIDIA H200 has 19.53 KiB for each" in " ".join(errors[0].split())
    fewest = int(errors[0].split("At least ")[1].split()[0])
    enough = ["--trainer.accelerator=auto", EXPERT_PARALLEL, f"--data.global_batch_size={2 * fewest}"]
    assert plan(tmp_path, *enough, world_size=fewest)[1] == []
    _, errors = plan(tmp_path, *enough, world_size=fewest - 1)
    assert errors[0].startswith("trainer.devices: weights")
    _, errors = plan(tmp_path, "--trainer.accelerator=gpu", "--trainer.devices=4", EXPERT_PARALLEL)
    assert "trainer.devices is 4, which is 4 on each node, but there is 1 here. A value that works: 1." in errors


def test_native_kernels_are_found_for_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(monkeypatch, H200, 1)
    told, errors = plan(
        tmp_path,
        "--trainer.accelerator=auto",
        "--trainer.plugins+=lightning_moe.Float8Precision",
        "--trainer.plugins.linears=rowwise",
        "--trainer.plugins.emulate=never",
        "--model.config.hidden_size=32",
    )
    assert errors == []
    assert told["precision"].startswith("Float8Precision: ")
    assert "EMULATED" not in told["precision"]


def test_data_of_a_store(without_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("some text. " * 200)
    prepare(str(tmp_path / "text.txt"), str(tmp_path / "store"), "byte", num_workers=1, progress_bar=False)
    tokens = ["--data=lightning_moe.TokenDataModule", "--data.sequence_length=8", "--data.max_tokens=1280"]
    tokens.append(f"--data.path={tmp_path}/store")
    told, errors = plan(tmp_path, *tokens)
    assert "token ids up to" in errors[0]
    assert f"vocab_size is {SMALL_MODEL['vocab_size']}" in errors[0]
    told, errors = plan(tmp_path, *tokens, "--model.config.vocab_size=300", "--trainer.val_check_interval=00:00:15:00")
    assert errors == []
    assert told["data"].startswith(f"{tmp_path}/store: ")
    assert "tokenizer byte" in told["data"]
    assert told["global batch"] == "8 x 2 accumulated x 1 process = 16 sequences, 128 tokens"
    assert told["steps"] == "10"
    _, errors = plan(tmp_path, *tokens, f"--data.path={tmp_path}/other")
    assert errors[0].startswith(f"data.path: {tmp_path}/other does not exist.")
    _, errors = plan(tmp_path, *tokens, "--model.config.vocab_size=40000", "--data.path=null")
    assert "serves a vocab_size of up to 32768, not 40000" in errors[0]
    told, errors = plan(tmp_path, *tokens, "--model.config.vocab_size=300", "--data.path=null")
    assert (told["data"].partition(":")[0], errors) == ("no path", [])
