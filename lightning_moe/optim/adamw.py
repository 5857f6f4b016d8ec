"""AdamW as DeepSeek-V3 is trained with it."""

from collections.abc import Callable, Iterable
from inspect import unwrap
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adam import adam

_FUSED_DEVICES = {"cuda", "cpu"}
_KERNEL_DTYPES = {torch.float32, torch.bfloat16}


class AdamW(torch.optim.AdamW):
    """AdamW with the defaults of the DeepSeek-V3 report (section 4.2) and weight decay on matrices only.

    Every parameter group is split in two: tensors of two or more dimensions (projections, stacked expert weights,
    embedding and head) decay, vectors (norm weights) do not. A group that sets ``weight_decay`` itself is left whole.

    The fused kernel is the default where all parameters are on CUDA or on the CPU. Each element's result depends on
    that element alone, so it is the same for sharded parameters. The fused kernel also reads ``optimizer.found_inf``
    (a scalar tensor): while that is 1, ``step`` changes no parameter, moment or step count, without a host sync.

    On CUDA the fused kernel is one of our own, in one pass over memory. It takes ``optimizer.gradient_factor`` (a
    scalar tensor, for one step) as a factor on all gradients, and gradients of another dtype than the parameters';
    :attr:`takes_gradient_factor` says whether it may be set.

    Args:
        params: Parameters, ``(name, parameter)`` pairs, or groups (dicts) of either.
        lr: Learning rate; with a :class:`~lightning_moe.TokenSchedule` the peak learning rate.
        betas: Decay rates of the first and the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay of the matrices.
        fused: Whether to use the fused kernel; ``None`` chooses as described above.
        moments: Dtype that moments are stored in: ``"float32"`` stands for the parameters' own dtype; ``"bfloat16"``,
            as in the report (section 3.3.2), halves their memory. They are updated in at least float32 either way.

    Raises:
        ValueError: If a value is out of range.

    """

    gradient_factor: Tensor | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 2.2e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        fused: bool | None = None,
        moments: Literal["float32", "bfloat16"] = "float32",
    ) -> None:
        _check_hyperparameters(lr, betas, eps, weight_decay)
        groups = [{"moments": moments, **group} for group in _as_groups(params)]
        if fused is None:
            devices = {_tensor(entry).device.type for group in groups for entry in group["params"]}
            # `None` and not `False`: on other devices torch still chooses its multi-tensor kernels
            dense = all(_is_dense(_local(_tensor(entry))) for group in groups for entry in group["params"])
            fused = True if devices and devices <= _FUSED_DEVICES and dense else None
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused)
        self.defaults["moments"] = moments

    @property
    def takes_gradient_factor(self) -> bool:
        """Whether ``gradient_factor`` and gradients of other dtypes are understood: where our kernel runs."""
        if unwrap(type(self).step) is not unwrap(AdamW.step):
            return False  # a subclass that steps by itself
        for group in self.param_groups:
            if not group["fused"] or group["amsgrad"] or group["maximize"] or group["differentiable"]:
                return False
            # Not kept from step to step, as a parameter's data may be replaced; so only what is cheap to ask.
            with torch.no_grad():
                held = [_local(param) for param in group["params"]]
            if not all(param.is_cuda for param in held) or not {param.dtype for param in held} <= _KERNEL_DTYPES:
                return False
            if not all(_is_dense(param) for param in held):
                return False
        return True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Takes one step.

        Args:
            closure: Computes the loss again; it is called first.

        Returns:
            What the closure returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Who sets a factor has asked: parameters are gone through once a step, and no factor is left out.
        with_kernel = self.gradient_factor is not None or self.takes_gradient_factor
        for group in self.param_groups:
            lists: tuple[list[Tensor], ...] = ([], [], [], [], [], [])
            self._init_group(group, *lists)
            if not lists[0]:
                continue
            if with_kernel:
                self._step_with_kernel(group, *lists)
            else:
                self._step_with_torch(group, *lists)
        self.gradient_factor = None
        return loss

    def _step_with_kernel(self, group: dict[str, Any], *lists: list[Tensor]) -> None:
        from lightning_moe.optim.adamw_kernel import adamw_

        skip: Tensor | None = getattr(self, "found_inf", None)
        factor, grad_scale = self.gradient_factor, getattr(self, "grad_scale", None)
        if grad_scale is not None:  # a GradScaler leaves it to the kernel to undo its scale
            factor = 1.0 / grad_scale if factor is None else factor / grad_scale
        params, grads, exp_avgs, exp_avg_sqs, _, steps = lists
        # A list, as a tensor for all would be read by the host.
        torch._foreach_add_(steps, 1 if skip is None else [1 - skip] * len(steps))
        for param, grad, exp_avg, exp_avg_sq, step in zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True):
            adamw_(
                _local(param),
                _local(grad),
                _local(exp_avg),
                _local(exp_avg_sq),
                step,
                factor=factor,
                skip=skip,
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
            )

    def _step_with_torch(self, group: dict[str, Any], *lists: list[Tensor]) -> None:
        params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps = lists
        rounded = [
            (stored, stored.to(param.dtype))
            for moments in (exp_avgs, exp_avg_sqs)
            for stored, param in zip(moments, params, strict=True)
        ]
        count = len(params)
        adam(
            params,
            grads,
            [wide for _, wide in rounded[:count]],
            [wide for _, wide in rounded[count:]],
            max_exp_avg_sqs,
            steps,
            foreach=group["foreach"],
            capturable=group["capturable"],
            differentiable=group["differentiable"],
            fused=group["fused"],
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            decoupled_weight_decay=True,
            amsgrad=group["amsgrad"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
        for stored, wide in rounded:
            if stored is not wide:
                stored.copy_(wide)

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        for param in group["params"] if group["moments"] == "bfloat16" else ():
            if param.grad is not None and not self.state[param]:
                on_device = group["fused"] or group["capturable"]
                self.state[param] = {
                    "step": torch.zeros((), dtype=torch.float32, device=param.device if on_device else "cpu"),
                    "exp_avg": torch.zeros_like(param, dtype=torch.bfloat16),
                    "exp_avg_sq": torch.zeros_like(param, dtype=torch.bfloat16),
                }
                if group["amsgrad"]:  # the largest second moment so far stays exact
                    self.state[param]["max_exp_avg_sq"] = torch.zeros_like(param)
        has_complex = super()._init_group(group, *lists)
        # Loading a state has cast its moments to the parameter's dtype, or it was saved with another setting.
        for number, param in enumerate(lists[0]):
            dtype = torch.bfloat16 if group["moments"] == "bfloat16" else param.dtype
            for moments, name in ((lists[2], "exp_avg"), (lists[3], "exp_avg_sq")):
                moments[number] = self.state[param][name] = moments[number].to(dtype)
        return has_complex

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("moments", "float32")  # states of older versions

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, split into decaying matrices and other parameters unless it sets ``weight_decay``.

        Args:
            param_group: Parameters or ``(name, parameter)`` pairs under ``"params"``, with options of the group.

        """
        moments = param_group.get("moments", "float32")
        if moments not in ("float32", "bfloat16"):
            raise ValueError(f"AdamW moments={moments!r}: must be float32 or bfloat16.")
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


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_dense(tensor: Tensor) -> bool:
    """Whether elements follow one another in memory in some order, without gaps: fused kernels count on it."""
    if tensor.is_contiguous():
        return True
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


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
