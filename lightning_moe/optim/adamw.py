from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_FUSED_DEVICES = {"cuda", "cpu"}


class AdamW(torch.optim.AdamW):
    """AdamW with the defaults of the DeepSeek-V3 report (section 4.2) and weight decay on matrices only.

    Every parameter group is split in two: tensors of two or more dimensions (projections, stacked expert weights,
    embedding and head) decay, vectors (norm weights) do not. A group that sets ``weight_decay`` itself is left whole.

    The fused kernel is the default where all parameters are on CUDA or on the CPU. Each element's result depends on
    that element alone, so it is the same for sharded parameters. The fused kernel also reads ``optimizer.found_inf``
    (a scalar tensor): while that is 1, ``step`` changes no parameter, moment or step count, without a host sync.

    Args:
        params: Parameters, ``(name, parameter)`` pairs, or groups (dicts) of either.
        lr: Learning rate; with a :class:`~lightning_moe.TokenSchedule` the peak learning rate.
        betas: Decay rates of the first and the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay of the matrices.
        fused: Whether to use the fused kernel; ``None`` chooses as described above.

    Raises:
        ValueError: If a value is out of range.

    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 2.2e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        fused: bool | None = None,
    ) -> None:
        _check_hyperparameters(lr, betas, eps, weight_decay)
        groups = _as_groups(params)
        if fused is None:
            devices = {_tensor(entry).device.type for group in groups for entry in group["params"]}
            # `None` and not `False`: on other devices torch still chooses its multi-tensor kernels
            fused = True if devices and devices <= _FUSED_DEVICES else None
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, split into decaying matrices and other parameters unless it sets ``weight_decay``.

        Args:
            param_group: Parameters or ``(name, parameter)`` pairs under ``"params"``, with options of the group.

        """
        if "weight_decay" in param_group:
            super().add_param_group(param_group)
            return
        entries = _as_list(param_group["params"])
        matrices = [entry for entry in entries if _tensor(entry).ndim >= 2]
        others = [entry for entry in entries if _tensor(entry).ndim < 2]
        if matrices:
            super().add_param_group({**param_group, "params": matrices})
        if others:
            super().add_param_group({**param_group, "params": others, "weight_decay": 0.0})


def _tensor(entry: Any) -> Tensor:
    return entry[1] if isinstance(entry, tuple) else entry


def _as_list(params: Any) -> list[Any]:
    # Lists can be walked twice, generators cannot; sets have no order, which optimizer states need
    if isinstance(params, set):
        raise TypeError("AdamW params: a set has no order; give a list of parameters.")
    return [params] if isinstance(params, Tensor) else list(params)


def _as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    if isinstance(params, Tensor):
        raise TypeError("AdamW params: must be an iterable of parameters, such as model.parameters(), not one tensor.")
    entries = _as_list(params)
    if entries and isinstance(entries[0], dict):
        return [{**group, "params": _as_list(group["params"])} for group in entries]
    return [{"params": entries}] if entries else []


def _check_hyperparameters(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    # Comparisons are written so that NaN fails them
    if not 0.0 <= lr < float("inf"):
        raise ValueError(f"AdamW lr={lr!r}: must be a finite number of at least 0, for example 2.2e-4.")
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"AdamW betas={betas!r}: must be two numbers in [0, 1), for example [0.9, 0.95].")
    if not 0.0 <= eps < float("inf"):
        raise ValueError(f"AdamW eps={eps!r}: must be a finite number of at least 0, for example 1e-8.")
    if not 0.0 <= weight_decay < float("inf"):
        raise ValueError(f"AdamW weight_decay={weight_decay!r}: must be a finite number of at least 0, such as 0.1.")
