"""The Lightning strategy that owns expert-parallel groups."""

from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from typing_extensions import override

from lightning_moe.dispatch.base import TokenDispatcher
from lightning_moe.dispatch.local import LocalDispatcher
from lightning_moe.models.base import MoEModel
from lightning_moe.precision.casting import cast_on_use, keep_gradients_lowered
from lightning_moe.precision.plugin import MoEPrecision, tokens_of_forward
from lightning_moe.strategies.checkpointing import load_directory, load_file, save_directory
from lightning_moe.strategies.dispatchers import DispatcherCallable, DispatcherName, distribute_experts
from lightning_moe.strategies.equal_batches import before_prefetched, equal_batches
from lightning_moe.strategies.gathering import forget_gradients, release_gathered, sharded_modules
from lightning_moe.strategies.launching import check_launch
from lightning_moe.strategies.lost_ranks import report_lost_ranks
from lightning_moe.strategies.mesh import Layout, MoEMesh, resolve_layout, sum_over_processes
from lightning_moe.strategies.regions import apply_to_regions
from lightning_moe.strategies.sharding import shard_model


class ExpertParallelStrategy(ModelParallelStrategy):
    """Expert parallelism with FSDP2: experts over an expert-parallel group, all else sharded over all processes.

    All processes read different data; expert-parallel peers are data-parallel ranks too. Gradients, initial weights and
    balancing are those of one process with the same global batch.

    Args:
        expert_parallel_size: Processes that hold different experts; ``"auto"`` takes the largest that fits.
        data_parallel_replicate_size: Copies of the (sharded) model.
        data_parallel_shard_size: Processes that dense parameters are sharded over; ``"auto"`` takes all of a copy.
        reshard_after_forward: Whether gathered parameters of a block are released between forward and backward.
        activation_checkpointing: ``"none"``; ``"selective"`` recomputes attention, expert computation and
            feed-forwards in backward, but neither routes nor sends tokens again; ``"full"`` also dispatches once more.
        compile: Whether to compile the same regions with ``torch.compile``.
        dispatcher: What moves tokens where experts are spread: ``"all_to_all"``, ``"deep_ep"``, or ``"auto"`` for
            DeepEP where it can serve the model and all-to-all otherwise; or a dispatcher class, in YAML with its
            settings as ``class_path`` and ``init_args``.
        compute_dtype: ``"auto"`` computes in bfloat16 over float32 master weights on CUDA, and otherwise in the
            parameters' own dtype; ``"float32"`` is full float32 anywhere.
        reduce_every_micro_batch: Whether gradients are reduced after each micro-batch. Without, they are reduced once
            per optimizer step and each process holds the whole gradient in between.
        process_group_backend: ``"nccl"`` or ``"gloo"``; by default the one for the device.
        timeout: How long a collective may take.
    """

    strategy_name = "expert_parallel"

    def __init__(
        self,
        expert_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_replicate_size: int = 1,
        data_parallel_shard_size: int | Literal["auto"] = "auto",
        reshard_after_forward: bool = True,
        activation_checkpointing: Literal["none", "selective", "full"] = "none",
        compile: bool = False,
        dispatcher: DispatcherName | DispatcherCallable = "auto",
        compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        reduce_every_micro_batch: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        for name, value, allowed in (
            ("activation_checkpointing", activation_checkpointing, ("none", "selective", "full")),
            ("dispatcher", dispatcher, ("auto", "all_to_all", "deep_ep")),
            ("compute_dtype", compute_dtype, ("auto", "float32", "bfloat16")),
            ("process_group_backend", process_group_backend, (None, "nccl", "gloo", "cpu:gloo,cuda:nccl")),
        ):
            if name == "dispatcher" and callable(value):
                continue
            if value not in allowed:
                listed = ", ".join(choice for choice in allowed if choice)
                raise ValueError(f"trainer.strategy.{name} is {value!r}, but it must be one of {listed}.")
        self.expert_parallel_size = expert_parallel_size
        self.data_parallel_replicate_size = data_parallel_replicate_size
        self.data_parallel_shard_size = data_parallel_shard_size
        self.reshard_after_forward = reshard_after_forward
        self.activation_checkpointing = activation_checkpointing
        self.compile = compile
        self.dispatcher = dispatcher
        self.compute_dtype = compute_dtype
        self.reduce_every_micro_batch = reduce_every_micro_batch
        self.layout = Layout(1, 1, 1)
        self.mesh: MoEMesh | None = None
        self._host_group: dist.ProcessGroup | None = None  # the default group, where that works on the host
        self.dispatchers: list[TokenDispatcher] = []
        self._sharded: list[FSDPModule] = []  # of the module; not looked for in each step

    @override
    def _configure_launcher(self) -> None:
        # The trainer calls this when it is made, before any process group exists.
        check_launch(self.num_processes, self.num_nodes, self.cluster_environment)
        super()._configure_launcher()

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Names the processes that were lost, where that is why training ends."""
        report_lost_ranks(exception)

    @override
    def setup_environment(self) -> None:
        """Checks the layout, starts the processes' group, and makes the meshes."""
        # The base class would make a mesh of its own.
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        if isinstance(self.precision_plugin, MixedPrecision):
            # `bf16-mixed`, the only one that reaches this strategy: the same by gathering parameters in bfloat16.
            self.precision_plugin = Precision()
            self.compute_dtype = "bfloat16"
        self.layout = self._resolve_layout()
        if self.layout.world_size == 1:
            return  # one process needs no group
        assert self.lightning_module is not None
        for callback in self.lightning_module.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, WeightAveraging):
                raise TypeError(
                    f"{type(callback).__name__} copies whole models and would average only what one process holds; it "
                    "works on one process. On several, average the checkpoints that were saved."
                )
        self._setup_distributed()
        self.mesh = MoEMesh(self.layout, self.root_device.type)
        self._device_mesh = self.mesh.dense

    def _resolve_layout(self) -> Layout:
        shape = getattr(self.lightning_module, "moe_shape", None)
        if shape is None:
            raise TypeError(
                f"{type(self).__name__} trains subclasses of lightning_moe's MoELightningModule, but the module is a "
                f"{type(self.lightning_module).__name__}."
            )
        return resolve_layout(
            self.num_nodes * self.num_processes,
            shape().n_routed_experts,
            expert_parallel_size=self.expert_parallel_size,
            data_parallel_replicate_size=self.data_parallel_replicate_size,
            data_parallel_shard_size=self.data_parallel_shard_size,
        )

    @property
    def dispatcher_name(self) -> str:
        """What moves tokens, for the table at the start of a run."""
        names = {type(dispatcher).__name__ for dispatcher in self.dispatchers}
        return ", ".join(sorted(names)) or LocalDispatcher.__name__

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every process reads different data, expert-parallel peers too."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Makes loaders give all processes equally many batches, of one shape."""
        dataloader = before_prefetched(dataloader, self._has_read_ahead)
        if self.layout.world_size == 1:
            return dataloader
        if self._host_group is None and dist.get_backend() != "gloo":
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup)  # all processes are in it
            self._host_group = group
        return equal_batches(dataloader, self._host_group)

    def assemble(self, model: MoEModel, seed: int) -> Callable[[Tensor], Tensor]:
        """Spreads a model over the processes and gives it its initial weights.

        Args:
            model: The model, on the meta device.
            seed: Seed of the initial weights.

        Returns:
            A function that sums a tensor over all processes that read data.
        """
        seed = self.broadcast(seed)  # copies of the model must not differ
        if self.mesh is None:
            model.to_empty(device=self.root_device)
            model.init_weights(seed)
            self.adopt(model)
            return _identity
        self._convert(model)
        self.dispatchers = distribute_experts(
            model, self.mesh, self.dispatcher, self._max_tokens(), self._resolve_compute_dtype()
        )
        apply_to_regions(model, self.activation_checkpointing, self.compile)
        shard_model(
            model,
            self.mesh,
            self.root_device,
            seed,
            compute_dtype=self._resolve_compute_dtype(),
            reshard_after_forward=self.reshard_after_forward,
        )
        return sum_over_processes

    def _max_tokens(self) -> int | None:
        """Most tokens of this process in a forward pass, where the data module tells."""
        module = self.lightning_module
        return None if module is None else tokens_of_forward(getattr(module.trainer, "datamodule", None))

    def adopt(self, model: MoEModel) -> None:
        """Applies regions and compute dtype to a model that one process holds whole, with its weights as they are."""
        self._convert(model)
        apply_to_regions(model, self.activation_checkpointing, self.compile)
        compute_dtype = self._resolve_compute_dtype()
        if compute_dtype is not None:
            cast_on_use(model, compute_dtype)

    @property
    def assembly(self) -> tuple[Any, ...]:
        """What is made of a model: recomputation, compilation, and compute dtype."""
        return self.activation_checkpointing, self.compile, self._resolve_compute_dtype()

    def _convert(self, model: MoEModel) -> None:
        """Replaces multiplications, where the precision plugin has some of its own; before anything is sharded."""
        if isinstance(self.precision_plugin, MoEPrecision):
            dtype = self._resolve_compute_dtype()
            assert dtype is not None
            self.precision_plugin.compute_dtype = dtype  # an explicit compute_dtype wins
            self.precision_plugin.convert(
                model,
                self.root_device,
                tokens=self._max_tokens(),
                expert_parallel_size=self.layout.expert_parallel_size,
            )

    def _resolve_compute_dtype(self) -> torch.dtype | None:
        if self.compute_dtype == "auto" and isinstance(self.precision_plugin, MoEPrecision):
            return self.precision_plugin.compute_dtype
        if self.compute_dtype == "auto":
            lowered = self.root_device.type == "cuda" and torch.get_default_dtype() == torch.float32
            return torch.bfloat16 if lowered else None
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.compute_dtype]

    @contextmanager
    @override
    def block_backward_sync(self) -> Any:
        """Defers the reduction of gradients to the last micro-batch of a step, where that was asked for."""
        if self.reduce_every_micro_batch or self.model is None:
            yield
            return
        for module in self._sharded:
            module.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for module in self._sharded:
                module.set_requires_gradient_sync(True, recurse=False)

    @override
    def setup(self, trainer: Any) -> None:
        """Makes the optimizers; the model has been spread by :meth:`assemble` before."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.model_to_device()
        self.barrier()
        # FSDP2 cannot train parameters that it has gathered in inference mode.
        evaluations = (trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
        for loop in (trainer.fit_loop.epoch_loop.val_loop, *evaluations):
            loop.inference_mode = False
        self._sharded = [] if self.lightning_module is None else sharded_modules(self.lightning_module)
        release_gathered(self._sharded)
        forget_gradients(self._sharded)
        model = getattr(self.lightning_module, "model", None)
        if not self.dispatchers and isinstance(model, MoEModel):  # assembled for a Trainer before
            self.dispatchers = list(dict.fromkeys(layer.dispatcher for _, layer in model.moe_layers()))
        if trainer.state.fn == TrainerFn.FITTING:
            _check_checkpoints(trainer)
            self.setup_optimizers(trainer)
            trained: Any = self.lightning_module
            by_value = trainer.gradient_clip_val is not None and trainer.gradient_clip_algorithm == "value"
            as_they_come = not by_value and trained.leaves_gradients_to_optimizer
            optimizers_can = all(getattr(one, "takes_gradient_factor", False) for one in self.optimizers)
            keep_gradients_lowered(trained, as_they_come and optimizers_can)
        self.setup_precision_plugin()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a training step, on weights as they are now."""
        release_gathered(self._sharded)
        return super().training_step(*args, **kwargs)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Weights and buffers by qualified name, sharded as they are."""
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing here: :meth:`save_checkpoint` writes the states by the parameters' names."""
        return {}

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Writes a checkpoint directory that loads under any layout; see :mod:`lightning_moe.strategies.checkpointing`.

        Raises:
            TypeError: Storage options were given, which are not used.
        """
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} writes directories itself and takes no storage_options.")
        _check_local("A checkpoint's path", filepath)
        rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        with_optimizers = self._named_optimizers() if "optimizer_states" in checkpoint else []
        save_directory(Path(self.broadcast(filepath)), checkpoint["state_dict"], with_optimizers, rest, self.barrier)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a checkpoint directory of any layout, or a single file of Lightning, always with ``weights_only``.

        Weights go into the module, and are returned as it has them; optimizers get their states in training alone.
        """
        assert self.lightning_module is not None
        _check_local("ckpt_path", checkpoint_path)
        path = Path(self.broadcast(checkpoint_path))
        load = load_directory if path.is_dir() else load_file
        weights = self.lightning_module.state_dict()
        fits = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        optimizers = self._named_optimizers() if fits else []
        rest = load(path, weights, optimizers, strict=self.lightning_module.strict_loading)
        return {**rest, "state_dict": weights}

    @override
    def teardown(self) -> None:
        """Frees communication buffers, while their process groups exist."""
        self._sharded = []
        try:
            for dispatcher in self.dispatchers:
                dispatcher.close()
        finally:
            super().teardown()

    def _has_read_ahead(self) -> bool:
        assert self.lightning_module is not None
        fetcher = self.lightning_module.trainer.fit_loop._data_fetcher
        return fetcher is not None and fetcher.length is None

    def _named_optimizers(self) -> list[tuple[nn.Module, Optimizer]]:
        assert self.lightning_module is not None
        return [(self.lightning_module, optimizer) for optimizer in self.optimizers]


def _check_checkpoints(trainer: Any) -> None:
    _check_local("trainer.default_root_dir", trainer.default_root_dir)
    for callback in trainer.checkpoint_callbacks:
        _check_local(f"{type(callback).__name__}.dirpath", getattr(callback, "dirpath", None))
        if trainer.world_size > 1 and getattr(callback, "save_on_exception", False):
            raise ValueError(
                f"{type(callback).__name__} has save_on_exception=True, but where one of {trainer.world_size} "
                "processes fails the others do not save with it, and all would wait for the timeout.\n"
                "Leave it out, and save more often: every_n_train_steps."
            )


def _check_local(name: str, path: Any) -> None:
    if path is not None and "://" in str(path):
        raise ValueError(
            f"{name} is {path}, but checkpoint directories are written to file systems that are mounted; give a "
            "folder of one, such as runs/tiny."
        )


def _identity(tensor: Tensor) -> Tensor:
    return tensor
