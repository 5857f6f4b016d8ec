"""Replacing the multiplications of a model, in place, by the class of the modules that do them.

Parameters stay as they are: names, types, optimizer and checkpoints do not know.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lightning_moe.models.base import MoEModel
from lightning_moe.models.head import Head
from lightning_moe.moe.experts import GroupedExperts
from lightning_moe.precision.recipes import Kind, Recipe

# Linears whose precision matters more than their time; the gate of another model's router is one too.
SAFE_EXCLUDE = ("*lm_head*", "*embed*", "*router*", "*.gate", "*eh_proj*", "*kv_a_proj*")


@dataclass(frozen=True)
class Candidate:
    """A module that multiplies, and may be converted.

    Args:
        name: Qualified name in its model.
        place: Name in its block, or the qualified name outside of blocks.
        module: An ``nn.Linear`` or :class:`~lightning_moe.moe.experts.GroupedExperts`.
        kind: ``"linear"`` or ``"grouped"``.
        weights: Inner and outer width of each of its weights.
        excluded: Why it must not be converted, or ``None``.
    """

    name: str
    place: str
    module: nn.Module
    kind: Kind
    weights: tuple[tuple[int, int], ...]
    excluded: str | None


def candidates(model: nn.Module, include: list[str] | None, exclude: list[str] | None) -> Iterator[Candidate]:
    """Yields every linear and every expert layer of a model, with the reason why some stay out.

    Args:
        model: The model; of a :class:`~lightning_moe.models.base.MoEModel`, only what is in a block is converted unless
            ``include`` names it.
        include: Patterns of the names to convert, as of :mod:`fnmatch`; ``None`` for all.
        exclude: Patterns of the names to leave out; ``None`` for :data:`SAFE_EXCLUDE`.
    """
    patterns = SAFE_EXCLUDE if exclude is None else exclude
    blocks = model.blocks() if isinstance(model, MoEModel) else [("", model)]
    places = {module: place for _, block in blocks for place, module in block.named_modules()}
    for name, module in model.named_modules():
        kind: Kind
        if isinstance(module, GroupedExperts):
            kind, method = "grouped", "grouped_mm"
            # One matrix for each expert; what else experts of one's own have is not multiplied
            shapes = [weight.shape for weight in module.parameters(recurse=False) if weight.ndim == 3]
        elif isinstance(module, nn.Linear):
            kind, method = "linear", "forward"
            shapes = [module.weight.shape]
        else:
            continue
        excluded = None
        if isinstance(module, Head) or name.rpartition(".")[2] == "lm_head":
            excluded = "the loss reads the head's weight itself"
        elif isinstance(module, NonDynamicallyQuantizableLinear):
            excluded = "its parent reads the weight itself"
        elif include is not None and not _matches(name, include):
            excluded = "not included"
        elif _matches(name, patterns):
            excluded = "excluded"
        elif include is None and module not in places:
            excluded = "outside of the blocks"
        elif multiplication_of(module) is None and not _inherits(module, method):
            excluded = f"{type(module).__name__} has a {method} of its own"
        weights = tuple((shape[-1], shape[-2]) for shape in shapes)
        yield Candidate(name, places.get(module, name), module, kind, weights, excluded)


def replace_multiplication(
    candidate: Candidate,
    multiply: Callable[..., Tensor],
    recipe: Recipe,
    compute: Callable[..., Tensor] | None = None,
) -> None:
    """Makes a module multiply by another function, in place.

    Args:
        candidate: The module.
        multiply: For a linear ``(x, weight) -> product`` without the bias, for experts ``(a, b, offsets) -> products``.
        recipe: What the function multiplies in.
        compute: For experts a function that takes the place of all of their ``compute``, unless something has been put
            in the place of ``grouped_mm`` of the module itself, to look at what is multiplied.

    Raises:
        ValueError: The module multiplies by another function already.
    """
    present = multiplication_of(candidate.module)
    if present is multiply and getattr(type(candidate.module), "_compute_as_one", None) is compute:
        return
    if present is not None:
        raise ValueError(
            f"{candidate.name} has been converted to another precision before; give the Trainer a new module, and its "
            "weights as ckpt_path."
        )
    original: Any = type(candidate.module)
    converted: Any = _multiplying_class(original, candidate.kind, multiply, recipe, compute)
    candidate.module.__class__ = converted


def multiplication_of(module: nn.Module) -> Callable[..., Tensor] | None:
    """The function that a converted module multiplies by, or ``None``."""
    return getattr(type(module), "_multiplication", None)


def can_compute_as_one(module: nn.Module) -> bool:
    """Whether a function can take the place of all that experts compute: they have no ``compute`` of their own."""
    if not isinstance(module, GroupedExperts):
        return False
    # Of a module that has been converted before, what it was before that.
    converted = (c for c in type(module).__mro__ if "_compute_as_one" in vars(c))
    original: Any = next((c.__base__ for c in converted), type(module))
    return "compute" not in vars(module) and original.compute is GroupedExperts.compute


def recipe_of(module: nn.Module) -> Recipe | None:
    """What a converted module multiplies in, or ``None``."""
    return getattr(type(module), "_recipe", None)


@functools.cache
def _multiplying_class(
    original: type[nn.Module],
    kind: Kind,
    multiply: Callable[..., Tensor],
    recipe: Recipe,
    compute_as_one: Callable[..., Tensor] | None,
) -> type[nn.Module]:
    # One class for all modules of a kind, so that torch.compile takes them for the same.
    def forward(self: Any, x: Tensor) -> Tensor:
        product = multiply(x, self.weight)
        return product if self.bias is None else product + self.bias

    def grouped_mm(self: Any, a_RK: Tensor, b_eKN: Tensor, offsets_e: Tensor) -> Tensor:
        return multiply(a_RK, b_eKN, offsets_e)

    def compute(
        self: Any,
        rows_RD: Tensor,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        offsets_e: Tensor,
        weights_R: Tensor | None,
    ) -> Tensor:
        arguments = (rows_RD, gate_up_proj, down_proj, offsets_e, weights_R)
        if compute_as_one is None or "grouped_mm" in self.__dict__:
            return GroupedExperts.compute(self, *arguments)
        return compute_as_one(*arguments)

    members: dict[str, Any] = {"forward": forward} if kind == "linear" else {"grouped_mm": grouped_mm}
    if compute_as_one is not None:
        members["compute"] = compute
    if kind == "grouped":
        members["_compute_as_one"] = compute_as_one and staticmethod(compute_as_one)
    members |= {"__module__": original.__module__, "_multiplication": staticmethod(multiply), "_recipe": recipe}
    return type(original.__name__, (original,), members)


def _inherits(module: nn.Module, method: str) -> bool:
    owner = GroupedExperts if isinstance(module, GroupedExperts) else nn.Linear
    return method not in vars(module) and getattr(type(module), method) is getattr(owner, method)


def _matches(name: str, patterns: list[str] | tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
