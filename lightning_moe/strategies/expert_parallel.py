"""The Lightning strategy that owns expert-parallel groups."""

from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lightning_moe.models.base import MoEModel
from lightning_moe.strategies.mesh import Layout, MoEMesh, resolve_layout
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
        compute_dtype: ``"auto"`` computes in bfloat16 over float32 master weights on CUDA and in the parameters' own
            dtype on CPU; ``"float32"`` is full float32 anywhere.
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
        compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        reduce_every_micro_batch: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self.expert_parallel_size = expert_parallel_size
        self.data_parallel_replicate_size = data_parallel_replicate_size
        self.data_parallel_shard_size = data_parallel_shard_size
        self.reshard_after_forward = reshard_after_forward
        self.compute_dtype = compute_dtype
        self.reduce_every_micro_batch = reduce_every_micro_batch
        self.mesh: MoEMesh | None = None

    @override
    def setup_environment(self) -> None:
        """Checks the layout, starts the processes' group, and makes the meshes."""
        # The base class would make a mesh of its own.
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        layout = self._resolve_layout()
        self._setup_distributed()
        self.mesh = MoEMesh(layout, self.root_device.type)
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
    def moe_mesh(self) -> MoEMesh:
        """The meshes.

        Raises:
            RuntimeError: The processes have not been set up yet.
        """
        if self.mesh is None:
            raise RuntimeError(f"{type(self).__name__} has no mesh before the Trainer has set up its processes.")
        return self.mesh

    def describe(self) -> str:
        """The layout in one line, for the table at the start of a run."""
        return str(self.moe_mesh.layout)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every process reads different data, expert-parallel peers too."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def assemble(self, model: MoEModel, seed: int) -> Callable[[Tensor], Tensor]:
        """Spreads a model over the processes and gives it its initial weights.

        Args:
            model: The model, on the meta device.
            seed: Seed of the initial weights.

        Returns:
            A function that sums a tensor over all processes that read data.
        """
        shard_model(
            model,
            self.moe_mesh,
            self.root_device,
            seed,
            compute_dtype=self._resolve_compute_dtype(),
            reshard_after_forward=self.reshard_after_forward,
        )
        return self.moe_mesh.sum_over_data_ranks

    def _resolve_compute_dtype(self) -> torch.dtype | None:
        if self.compute_dtype == "auto":
            return torch.bfloat16 if self.root_device.type == "cuda" else None
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.compute_dtype]

    @contextmanager
    @override
    def block_backward_sync(self) -> Any:
        """Defers the reduction of gradients to the last micro-batch of a step, where that was asked for."""
        if self.reduce_every_micro_batch or self.model is None:
            yield
            return
        sharded = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        for module in sharded:
            module.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for module in sharded:
                module.set_requires_gradient_sync(True, recurse=False)
