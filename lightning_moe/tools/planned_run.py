"""What a run of `fit` would use on this machine, found out without a Trainer: see :class:`PlannedRun`."""

import contextlib
import io
import os
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.setup import _parse_time_interval_seconds
from torch import nn
from typing_extensions import override

from lightning_moe.cli import MoECLI
from lightning_moe.data.batch_plan import batch_size_steps
from lightning_moe.data.datamodule import TokenDataModule
from lightning_moe.data.standard_library import LARGEST_VOCABULARY
from lightning_moe.dispatch.deep_ep.dispatcher import DeepEPDispatcher
from lightning_moe.dispatch.deep_ep.found import find_deep_ep
from lightning_moe.dispatch.deep_ep.rules import estimate_buffer_bytes
from lightning_moe.dispatch.fp8_rows import check_hidden_size
from lightning_moe.models.base import MoEModel
from lightning_moe.models.deepseek_v3 import DeepSeekV3
from lightning_moe.models.deepseek_v3.attention_backends import attention_backend
from lightning_moe.models.module import MoEShape
from lightning_moe.precision.plugin import MoEPrecision, QuantisedPrecision, tokens_of_forward
from lightning_moe.strategies.expert_parallel import ExpertParallelStrategy
from lightning_moe.strategies.launching import brings_cluster_environment, choose_devices, read_launch
from lightning_moe.strategies.mesh import Layout, resolve_layout
from lightning_moe.strategies.names import check_strategy
from lightning_moe.tools.doctor import Row, count, device_here, gpus, memory, processes
from lightning_moe.usage_errors import UsageError


class FitSettings(MoECLI):
    """Reads what ``fit`` is given through its parser, and builds model, data, strategy, plugins and callbacks.

    There is no Trainer and no logger, and the run directory is neither read nor written.

    Args:
        arguments: What ``fit`` is given on the command line.

    Raises:
        UsageError: It cannot be read.
    """

    trainer_settings: Any

    def __init__(self, arguments: list[str]) -> None:
        super().__init__(args=["fit", *arguments])

    @override
    def _set_seed(self) -> None:
        """Nothing random is drawn."""

    @override
    def before_instantiate_classes(self) -> None:
        """Nothing is resumed."""

    @override
    def instantiate_classes(self) -> None:
        settings = self.config["fit"].clone()
        settings.trainer.logger = settings.trainer.profiler = None  # they may open files and connections
        try:
            built = self._parser("fit").instantiate_classes(settings)
        except Exception as error:
            raise self.explain(error) from error
        self.model, self.datamodule, self.trainer_settings = built.model, built.get("data"), built.trainer

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        """Nothing is run."""

    def explain(self, error: Exception) -> UsageError:
        """Says in a few lines what is wrong, with the setting's full name."""
        if isinstance(error, UsageError):
            return error
        known = isinstance(error, (ValueError, TypeError, FileNotFoundError, NotImplementedError))
        return self._usage_error(error if known else RuntimeError(f"{type(error).__name__}: {error}"))

    def check_limits(self) -> None:
        """Checks what ``fit`` checks before it trains.

        Raises:
            UsageError: The clipping norm or the interval of validation cannot be, or nothing ends the training.
        """
        self._check_trainer_settings()
        self._check_that_it_ends()


class PlannedRun:
    """What a run would use on this machine, and why it cannot run.

    Args:
        arguments: What ``fit`` is given on the command line.
        world_size: Processes of the run; ``None`` for those that a launcher has started or ``trainer`` asks for.

    Attributes:
        rows: What it would use.
        errors: Why it cannot run, in the house's short form; empty if it can.
    """

    def __init__(self, arguments: list[str], world_size: int | None = None) -> None:
        self.rows: list[Row] = []
        self.errors: list[str] = []
        self.asked_world_size = world_size
        self.world_size = 1
        self.local_processes = 0  # of each host
        self.shape: MoEShape | None = None
        self.model: MoEModel | None = None
        self.layout: Layout | None = None
        try:
            self.device = device_here()
            self.fit = FitSettings(arguments)
        except (UsageError, RuntimeError) as error:  # RuntimeError: a GPU does not answer
            self.errors.append(str(error))
            return
        self.trainer = self.fit.trainer_settings
        self.strategy = self.trainer.strategy
        plugins = self.trainer.plugins or []
        plugins = plugins if isinstance(plugins, list) else [plugins]
        self.precision = next((plugin for plugin in plugins if isinstance(plugin, Precision)), None)
        checks: tuple[Callable[[], None], ...] = (
            self._check_processes,
            self._check_model,
            self._check_layout,
            self._check_memory,
            self._check_data,
            self._check_dispatcher,
            self._check_precision,
            self._check_attention,
        )
        for check in checks:
            try:
                check()
            except Exception as error:
                self.errors.append(str(self.fit.explain(error)))

    def _tell(self, name: str, value: str, *, fine: bool = True) -> None:
        self.rows.append(Row(name, value, fine))

    def _check_processes(self) -> None:
        asked = self.trainer.accelerator
        if asked in ("gpu", "cuda") and self.device.type != "cuda":
            raise ValueError(
                f"trainer.accelerator is {asked}, but torch sees no GPU here. What works here: auto or cpu."
            )
        if asked == "cpu":
            self.device = torch.device("cpu")
        devices, nodes = self.trainer.devices, self.trainer.num_nodes
        if not brings_cluster_environment(vars(self.trainer)):
            devices, nodes = choose_devices(devices, nodes)
        accelerator: Any = CUDAAccelerator if self.device.type == "cuda" else CPUAccelerator
        present = len(gpus()) if self.device.type == "cuda" else accelerator.auto_device_count()
        if devices in ("auto", -1, "-1"):
            local = present
        elif isinstance(devices, str) and "," in devices:
            local = len([part for part in devices.split(",") if part.strip()])
        else:
            local = len(devices) if isinstance(devices, list) else int(devices)
        if self.device.type == "cuda" and local > present:
            raise ValueError(
                f"trainer.devices is {self.trainer.devices}, which is {local} on each node, but there "
                f"{'is' if present == 1 else 'are'} {present} here. A value that works: {present}."
            )
        self.local_processes = local
        self.world_size = self.asked_world_size or local * nodes
        launch = read_launch()
        source = "world_size" if self.asked_world_size else launch.launcher if launch else "trainer.devices"
        self._tell("processes", f"{self.world_size} (by {source}), on {self.device.type} here")

    def _check_model(self) -> None:
        module = self.fit.model
        self.shape = module.moe_shape()
        with torch.device("meta"):
            model = module.build_model()
        if not isinstance(model, MoEModel):
            raise TypeError(f"{type(module).__name__}.build_model() returned a {type(model).__name__}, not a MoEModel.")
        model.check_structure()
        self.model = model
        counts = model.parameter_counts()
        numbers = f"{count(counts['total'])} parameters, {count(counts['activated'])} active per token"
        self._tell("model", f"{type(module).__name__}: {numbers}")

    def _check_layout(self) -> None:
        strategy = self.strategy
        check_strategy(strategy)
        if self.world_size > 1 and not callable(getattr(strategy, "assemble", None)):
            name = type(strategy).__name__ if isinstance(strategy, Strategy) else strategy
            raise ValueError(
                f"trainer.strategy is {name} with {self.world_size} processes, which would train each on gradients of "
                "its own.\nGive --trainer.strategy expert_parallel, or --trainer.devices 1."
            )
        if self.shape is None:
            return
        if not isinstance(strategy, ExpertParallelStrategy):
            self.layout = Layout(1, 1, 1)
            return
        self.layout = resolve_layout(
            self.world_size,
            self.shape.n_routed_experts,
            expert_parallel_size=strategy.expert_parallel_size,
            data_parallel_replicate_size=strategy.data_parallel_replicate_size,
            data_parallel_shard_size=strategy.data_parallel_shard_size,
        )
        self._tell("layout", str(self.layout))

    def _check_memory(self) -> None:
        """Weights and moments have to fit; gradients and activations come on top, and depend on more."""
        optimizer = self.fit.model.optimizer_factory([nn.Parameter(torch.zeros(1))])
        if self.model is None or self.layout is None:
            return
        item = {"64-true": 8, "64": 8, 64: 8, "bf16-true": 2, "16-true": 2}.get(self.trainer.precision, 4)
        number = sum(parameter.numel() for parameter in self.model.parameters())
        weights, moments = number * item, 0
        if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            lowered = optimizer.param_groups[0].get("moments") == "bfloat16"
            moments = 2 * number * (2 if lowered else item)
        what = f"weights {memory(weights)}"
        if moments:
            what += f" and moments of {type(optimizer).__name__} {memory(moments)}"
        share = (weights + moments) / self.layout.data_parallel_shard_size
        each = f"{memory(share)} on {'each of the ' * (self.world_size > 1)}{processes(self.world_size)}"
        self._tell("memory", f"{what}: {each}, without gradients and activations")
        if self.device.type == "cuda":
            there, owner = min(gpu.memory for gpu in gpus()), gpus()[0].name
        elif self.asked_world_size is None:
            there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // max(self.local_processes, 1)
            owner = "this machine"
        else:
            return  # a plan for processes that are elsewhere
        if share > there:
            fewest = -(-int(weights + moments) // there)
            raise ValueError(
                f"trainer.devices: {what} are {each}, but {owner} has {memory(there)} for each.\n"
                f"At least {fewest} processes hold them; --world_size {fewest} asks about so many."
            )

    def _check_data(self) -> None:
        self.fit.check_limits()
        data = self.fit.datamodule
        micro, sequence = getattr(data, "micro_batch_size", None), getattr(data, "sequence_length", None)
        sizes = getattr(data, "global_batch_size", None)
        if isinstance(micro, int) and isinstance(sequence, int) and sizes is not None:
            unit = micro * self.world_size
            for _, size in batch_size_steps(sizes):
                if size % unit:
                    raise ValueError(
                        f"data.global_batch_size is {size}, but it must be a multiple of micro_batch_size ({micro}) x "
                        f"{processes(self.world_size)}. A value that works: {-(-size // unit) * unit}."
                    )
            first = batch_size_steps(sizes)[0][1]
            accumulated = f"{micro} x {first // unit} accumulated x {processes(self.world_size)} = {first} sequences"
            self._tell("global batch", f"{accumulated}, {first * sequence:,} tokens")
        if not isinstance(data, TokenDataModule):
            self._tell("data", type(data).__name__)
        elif data.path is None:
            if self.shape is not None and self.shape.vocab_size > LARGEST_VOCABULARY:
                raise ValueError(
                    f"data.path is not set, and the standard library's text serves a vocab_size of up to "
                    f"{LARGEST_VOCABULARY}, not {self.shape.vocab_size}. Set it to a store of lightning-moe prepare."
                )
            self._tell("data", "no path: the source of Python's standard library, prepared at the first start")
        else:
            data.trainer = self._trainer_for_data()
            data.setup("fit")
            self._tell("data", data.describe())
        steps = getattr(data, "total_steps", None)
        if callable(steps) and steps() is not None:
            self._tell("steps", f"{steps():,}")

    def _trainer_for_data(self) -> Any:
        """What a data module asks of its trainer: the settings, the module and the number of processes."""
        settings = dict(vars(self.trainer))
        callbacks = settings["callbacks"] or []
        callbacks = [*callbacks] if isinstance(callbacks, list) else [callbacks]
        if settings["max_time"]:
            callbacks.append(Timer(settings["max_time"]))
        interval = settings["val_check_interval"]
        timed = isinstance(interval, (str, dict, timedelta))  # in time, as the Trainer reads it
        settings |= {
            "callbacks": callbacks,
            "val_check_interval": None if timed else interval,
            "_val_check_time_interval": _parse_time_interval_seconds(interval) if timed else None,
            "lightning_module": self.fit.model,
            "world_size": self.world_size,
            "strategy": SimpleNamespace(distributed_sampler_kwargs={"num_replicas": self.world_size, "rank": 0}),
            "limit_train_batches": settings["limit_train_batches"] or 1.0,
            "fit_loop": SimpleNamespace(epoch_loop=SimpleNamespace()),
            "global_step": 0,
        }
        return SimpleNamespace(**settings)

    def _check_dispatcher(self) -> None:
        if self.layout is None or self.model is None or self.shape is None:
            return
        group_size = self.layout.expert_parallel_size
        if group_size == 1:
            self._tell("dispatcher", "LocalDispatcher: each process holds all experts")
            return
        given = self.strategy.dispatcher
        if not isinstance(given, str):  # its settings are known before it is made
            given = self.fit.config["fit"].trainer.strategy.init_args.dispatcher
        chosen = given if isinstance(given, str) else given.class_path.rpartition(".")[2]
        settings = {} if isinstance(given, str) else given.get("init_args", {})
        num_sms = settings.get("num_sms", 20)
        sizes = {layer.experts.num_experts for _, layer in self.model.moe_layers()}
        reasons = [self._why_not_deep_ep(experts, group_size, num_sms) for experts in sorted(sizes)]
        reason = next(filter(None, reasons), None)
        if chosen in ("deep_ep", "DeepEPDispatcher") and reason is not None:
            raise ValueError(
                f"trainer.strategy.dispatcher is {chosen}, but {reason}\nWhat works here: auto or all_to_all."
            )
        if chosen == "auto":
            chosen = "deep_ep" if reason is None else "all_to_all"
        else:
            reason = None
        name = {"deep_ep": "DeepEPDispatcher", "all_to_all": "AllToAllDispatcher"}.get(chosen, chosen)
        told = name if reason is None else f"{name}, because {reason}"
        if settings.get("fp8_dispatch"):
            check_hidden_size(self.shape.hidden_size)
            told += ", tokens travel in E4M3"
        self._tell("dispatcher", told)
        if name == "DeepEPDispatcher":
            self._tell_buffers(
                group_size, num_sms, settings.get("max_tokens_per_rank") or tokens_of_forward(self.fit.datamodule)
            )

    def _why_not_deep_ep(self, experts: int, group_size: int, num_sms: int) -> str | None:
        assert self.shape is not None
        if self.device.type != "cuda":
            return "DeepEP needs GPUs, and this runs on the CPU."
        ranks = range(group_size if self.local_processes else 0)
        return DeepEPDispatcher.why_not(
            experts,
            group_size,
            self.shape.hidden_size,
            self.shape.num_experts_per_tok,
            dtype=self._compute_dtype(),
            num_sms=num_sms,
            hosts=[f"number {rank // self.local_processes}" for rank in ranks],
        )

    def _tell_buffers(self, group_size: int, num_sms: int, tokens: int | None) -> None:
        assert self.shape is not None
        generation = find_deep_ep().generation
        size = estimate_buffer_bytes(
            generation,
            group_size=group_size,
            hidden_size=self.shape.hidden_size,
            num_experts_per_tok=self.shape.num_experts_per_tok,
            max_tokens_per_rank=tokens or 0,
            num_sms=num_sms,
        )
        known = size is not None and (generation == "V1" or tokens is not None)
        text = f"about {memory(size or 0)} on each process" if known else "known at the first dispatch only"
        self._tell("DeepEP buffers", f"{generation}: {text}")

    def _compute_dtype(self) -> torch.dtype:
        asked, flag = getattr(self.strategy, "compute_dtype", None), str(self.trainer.precision)
        mixed = flag in ("bf16", "bf16-mixed") or isinstance(self.precision, MixedPrecision)  # wins over compute_dtype
        if asked in ("float32", "bfloat16") and not mixed:
            return torch.float32 if asked == "float32" else torch.bfloat16
        lowered = mixed or flag.startswith("bf16") or isinstance(self.precision, MoEPrecision)
        if asked == "auto" and not lowered:
            lowered = self.device.type == "cuda"
        return torch.bfloat16 if lowered else torch.float32

    def _check_precision(self) -> None:
        plugin, flag = self.precision, self.trainer.precision
        if plugin is not None and flag is not None:
            raise ValueError(
                f"trainer.precision is {flag}, but {type(plugin).__name__} in trainer.plugins decides it too. "
                "Leave one of them out, as in --trainer.precision null."
            )
        if not isinstance(plugin, MoEPrecision):
            name = f"{type(plugin).__name__}: " if plugin is not None else ""
            self._tell("precision", f"{name}computes in {str(self._compute_dtype()).removeprefix('torch.')}")
            return
        if self.model is None:
            return
        expert_parallel_size = self.layout.expert_parallel_size if self.layout is not None else 1
        plugin.compute_dtype = self._compute_dtype()
        computes_in = str(plugin.compute_dtype).removeprefix("torch.")
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # its own table
                plugin.convert(
                    self.model,
                    self.device,
                    tokens=tokens_of_forward(self.fit.datamodule),
                    expert_parallel_size=expert_parallel_size,
                )
        except (ValueError, RuntimeError, ImportError) as error:
            raise ValueError(f"trainer.plugins: {error}") from error
        report = plugin.report if isinstance(plugin, QuantisedPrecision) else None
        if report is None:
            self._tell("precision", f"{type(plugin).__name__}: computes in {computes_in}")
            return
        counts = f"{report.converted} multiplications in {report.precision}, {report.skipped} in {report.compute_dtype}"
        self._tell("precision", f"{type(plugin).__name__}: {counts}", fine=report.converted > 0)
        for text in report.emulated:
            self._tell("precision", f"EMULATED: {text}", fine=False)

    def _check_attention(self) -> None:
        module = self.fit.model
        if not isinstance(module, DeepSeekV3):
            return
        asked, dtype = module.asked_attention, self._compute_dtype()
        with_documents = bool(getattr(self.fit.datamodule, "document_mask", False))
        for name, documents in (("attention", False), ("attention of documents", True)):
            try:
                kernel = attention_backend(module.config, self.device, dtype, asked, documents=documents)
            except ValueError as error:
                if documents == with_documents:
                    raise
                kernel = f"none: {error}".partition("\n")[0]
            self._tell(name, kernel, fine="slow" not in kernel or documents != with_documents)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
