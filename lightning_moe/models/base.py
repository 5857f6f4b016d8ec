"""The contract of a MoE language model: blocks, a forward pass to sums of losses, initial weights."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_moe.models.flops import active_matmul_parameters, idle_parameters
from lightning_moe.moe.layer import MoELayer


class MoEModelOutput(NamedTuple):
    """What a MoE model returns. Losses are sums over tokens; the training module divides them once per optimizer step.

    Args:
        loss: Sum of the next-token cross-entropy over valid tokens; ``None`` without labels.
        num_tokens: Valid tokens of the main loss, int64; ``None`` without labels.
        mtp_losses: Sum of the cross-entropy of each multi-token-prediction depth.
        mtp_num_tokens: Valid tokens of each depth, int64.
        mtp_correct: Tokens that each depth predicted as the data has them, int64 ``(depths,)``; ``None`` unless asked
            for.
        mtp_accepted: Tokens for which each depth predicted what the main model predicts at that place (what greedy
            speculative decoding would accept), int64 ``(depths,)``; ``None`` unless asked for.
        balance_loss: Sum over layers and sequences of length times sequence-wise balance loss; ``None`` unless asked
            for.
        expert_counts: Tokens that each expert got, int64 ``(E,)``, for each MoE layer in the order of
            :meth:`MoEModel.moe_layers`.
        logits: Main logits ``(B, S, V)``, only without labels.
        mtp_logits: Logits of each depth, only without labels.
    """

    loss: Tensor | None = None
    num_tokens: Tensor | None = None
    mtp_losses: tuple[Tensor, ...] = ()
    mtp_num_tokens: tuple[Tensor, ...] = ()
    mtp_correct: Tensor | None = None
    mtp_accepted: Tensor | None = None
    balance_loss: Tensor | None = None
    expert_counts: tuple[Tensor, ...] = ()
    logits: Tensor | None = None
    mtp_logits: tuple[Tensor, ...] = ()


class MoEModel(nn.Module, ABC):
    """A MoE language model on one device: no process group, mesh or rank. A strategy distributes it from outside."""

    @abstractmethod
    def blocks(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields the qualified name and the module of every transformer block, multi-token-prediction ones included."""

    @abstractmethod
    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        document_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        valid: Tensor | None = None,
        balance: bool = True,
    ) -> MoEModelOutput:
        """Runs the model to sums of losses, or to logits when there are no labels.

        A model with multi-token prediction takes two more: ``mtp``, whether to run its depths, and ``predictions``,
        whether to count their correct and accepted predictions.

        Args:
            input_ids: Tokens ``(B, S)``, int64.
            labels: Next token of each position ``(B, S)``, int64; -100 is ignored.
            document_ids: Document of each token ``(B, S)``, int64, counted from 0 in each row; tokens see only their
                own document. ``None`` makes each row one document.
            position_ids: Positions ``(B, S)`` or ``(S,)``, int64; 0 to S - 1 by default.
            valid: Bool ``(B, S)``, False for padding at the end of rows; ``None`` when there is none.
            balance: Whether to compute the balance loss.
        """

    def moe_layers(self) -> Iterator[tuple[str, MoELayer]]:
        """Yields the qualified name and the module of every MoE layer, in the order of the blocks."""
        for block_name, block in self.blocks():
            for name, module in block.named_modules():
                if isinstance(module, MoELayer):
                    yield f"{block_name}.{name}" if name else block_name, module

    def check_structure(self) -> None:
        """Refuses what would train wrongly without saying so; called before the model gets memory.

        Raises:
            ValueError: ``blocks()`` gives a block another name than its qualified one, or leaves out a MoE layer; or
                two modules own one parameter, which come apart when they leave the meta device.
        """
        where = f"{type(self).__name__}.blocks()"
        modules = dict(self.named_modules())
        names = {module: name for name, module in modules.items()}
        for name, block in self.blocks():
            if modules.get(name) is not block:
                raise ValueError(
                    f"{where} names a block {name!r}, but it must be its qualified name, {names.get(block)!r}."
                )
        in_blocks = {layer for _, layer in self.moe_layers()}
        for name, module in modules.items():
            if isinstance(module, MoELayer) and module not in in_blocks:
                raise ValueError(
                    f"{where} leaves out the block of the MoE layer {name}, which would be neither balanced nor spread "
                    "over processes."
                )
        owners: dict[nn.Parameter, str] = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            if owners.setdefault(parameter, name) != name:
                raise ValueError(
                    f"{type(self).__name__} owns one parameter as {owners[parameter]} and as {name}; give it to one "
                    "module, and use it from there in forward()."
                )

    def init_weights(self, seed: int) -> None:
        """Gives every parameter and buffer its initial value, as a function of the seed and its qualified name alone.

        Each module that owns parameters or buffers draws with generators seeded by its name, so that the values
        depend neither on the order of construction nor on what else the model holds.

        Args:
            seed: Any integer.

        Raises:
            TypeError: A module owns parameters or buffers but has no ``reset_parameters`` method.
        """
        for name, module in self.named_modules():
            if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                init_own_weights(module, seed, name)

    def parameter_counts(self) -> dict[str, int]:
        """Counts parameters.

        Returns:
            ``total``, and ``activated``: those that one token uses, that is all but the routed experts it does not
            take. Multi-token prediction, which is dropped after training, counts as ``mtp`` apart from both.
        """
        total = sum(p.numel() for p in self.parameters())
        idle = sum(idle_parameters(layer) for _, layer in self.moe_layers())
        return {"total": total, "activated": total - idle, "mtp": 0}

    def flops_per_token(self, sequence_length: int, *, mtp: bool = True) -> float:
        """Floating-point operations of training on one token, forward and backward; recomputation is not counted.

        6 for each matrix element that the token is multiplied by. Override it to add what attention costs, which
        parameters do not tell; :mod:`lightning_moe.models.flops` has the formula.

        Args:
            sequence_length: Tokens of a row.
            mtp: Whether multi-token prediction runs, for a model that has it.
        """
        return 6.0 * active_matmul_parameters(self)


def init_own_weights(module: nn.Module, seed: int, name: str) -> None:
    """Gives the parameters and buffers that a module owns itself, without its children, their initial values.

    They are a function of the seed and the module's name alone. The global random state is left as it was.

    Args:
        module: The module.
        seed: Any integer.
        name: Qualified name of the module in its model.

    Raises:
        TypeError: The module has no ``reset_parameters`` method.
    """
    reset_parameters: Any = getattr(module, "reset_parameters", None)
    if not callable(reset_parameters):
        raise TypeError(
            f"{type(module).__name__} ({name}) owns parameters or buffers, so it must have a method "
            "reset_parameters() that gives all of them their initial values."
        )
    devices = {p.device for p in module.parameters(recurse=False) if p.device.type not in ("cpu", "meta")}
    device_type = next(iter(devices)).type if devices else "cuda"
    with torch.random.fork_rng([d.index or 0 for d in devices], device_type=device_type):
        torch.manual_seed(seed_of(seed, name))
        reset_parameters()


def seed_of(seed: int, name: str) -> int:
    """Derives the seed of a name: 63 bits of a hash, equal on every machine and version."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big") >> 1
