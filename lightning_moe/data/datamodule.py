"""TokenDataModule: batches of a token store in the global order, the batch size of every step, and exact resume."""

import os
from math import isfinite
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, Timer
from lightning.pytorch.utilities import rank_zero_info

from lightning_moe.data.batch_plan import BatchPlan, Phase, batch_size_steps
from lightning_moe.data.loaders import TokenBatches, TrainLoader, ValidationLoader
from lightning_moe.data.loop_state import FollowDataPosition, LoopPosition
from lightning_moe.data.order import SampleOrder
from lightning_moe.data.standard_library import standard_library_store
from lightning_moe.data.store import StoreManifest, TokenBlocks, read_manifest

# Lightning's value for a max_epochs that nobody set
_UNSET_MAX_EPOCHS = 1000
# settings of the trainer that are set for the fit, and given back after it
_TRAINER_SETTINGS = (
    "accumulate_grad_batches",
    "limit_train_batches",
    "limit_val_batches",
    "check_val_every_n_epoch",
    "reload_dataloaders_every_n_epochs",
)
# the length of a run that only a time limit ends
_UNLIMITED_STEPS = 10**9
# tokens that the fits of a trainer have read: its step goes on in the next fit, which may have another data module
_tokens_read: WeakKeyDictionary[Trainer, int] = WeakKeyDictionary()


class TokenDataModule(LightningDataModule):
    """Reads a token store in an order that depends on the seed alone, and ends training after ``max_tokens``.

    Optimizer step ``s`` reads the ``B_s`` samples after those of the steps before it, whatever the number of data ranks
    and workers and the micro-batch size are. The module owns gradient accumulation: it follows from
    ``global_batch_size``, ``micro_batch_size`` and the number of data ranks, and is set on the trainer. Every phase of
    one batch size is one Lightning epoch; without batch size steps, training is one epoch.

    Args:
        path: Folder of a store made by ``lightning-moe prepare``. Unset, the Python standard library's own source is
            prepared once into the user's cache, with a tokenizer of exactly the model's ``vocab_size`` (at most 32768).
        sequence_length: Tokens per sample.
        micro_batch_size: Samples that one device computes at a time.
        global_batch_size: Samples per optimizer step over all devices, or steps ``{from this token: samples}``, for
            example ``{0: 16, 1e6: 32}``.
        max_tokens: Training ends after the first step at which this many tokens are seen, or after
            ``trainer.max_steps``, whichever is first; the store is passed over as often as needed.
        document_mask: Whether batches tell packed documents apart (``document_ids``).
        num_workers: Processes that read ahead; 0 reads in the training process.
        seed: Seed of the order; unset, the seed of ``seed_everything``.
        shuffle: ``False`` reads the store in its own order.
        progress_bar: Whether to show progress while the default store is prepared.

    Raises:
        ValueError: Sizes that do not fit each other.
    """

    def __init__(
        self,
        path: str | None = None,
        sequence_length: int = 256,
        micro_batch_size: int = 8,
        global_batch_size: int | dict[float, int] = 16,
        max_tokens: float | None = None,
        document_mask: bool = False,
        num_workers: int = 0,
        seed: int | None = None,
        shuffle: bool = True,
        progress_bar: bool = True,
    ) -> None:
        super().__init__()
        for name, value in (("sequence_length", sequence_length), ("micro_batch_size", micro_batch_size)):
            if value < 1:
                raise ValueError(f"data.{name}={value} must be at least 1")
        if num_workers < 0:
            raise ValueError(f"data.num_workers={num_workers} must be at least 0")
        if max_tokens is not None and (not isfinite(max_tokens) or max_tokens < 1):
            raise ValueError(
                f"data.max_tokens={max_tokens} must be finite and at least 1, such as 1e6; leave it out for no limit"
            )
        self.path = path
        self.sequence_length = sequence_length
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = global_batch_size
        self.max_tokens = None if max_tokens is None else int(max_tokens)
        self.document_mask = document_mask
        self.num_workers = num_workers
        self.seed = seed
        self.shuffle = shuffle
        self.progress_bar = progress_bar

        self._plan = BatchPlan(global_batch_size, sequence_length)
        self._store: Path | None = None
        self._manifest: StoreManifest | None = None
        self._blocks: dict[str, TokenBlocks] = {}
        # (data rank, number of data ranks)
        self._ranks = (0, 1)
        self._limit: int | None = None
        self._resumed: dict[str, Any] | None = None
        self._resumed_step = 0
        # the trainer's own limits, which fit overwrites
        self._given: dict[str, Any] | None = None

    # What others read

    def total_steps(self) -> int | None:
        """Returns the optimizer step at which training ends, or None where nothing limits it (yet)."""
        if self._limit is not None:
            return self._limit
        return None if self.max_tokens is None else self._plan.total_steps(self.max_tokens)

    def accumulation_at(self, step: int) -> int:
        """Returns how many micro-batches each data rank runs for optimizer step ``step``."""
        return self._plan.phase_at(step).batch_size // (self.micro_batch_size * self._ranks[1])

    def samples_before(self, step: int) -> int:
        """Returns how many samples the optimizer steps before ``step`` consume, over all data ranks."""
        return self._plan.samples_before(step)

    @property
    def manifest(self) -> StoreManifest:
        """The manifest of the store; known after ``setup``, or at once where ``path`` is set."""
        if self._manifest is None:
            if self.path is None:
                raise ValueError("data.path is not set: the store is known when the trainer has set the data up")
            self._manifest = read_manifest(Path(self.path).expanduser())
        return self._manifest

    def describe(self) -> str:
        """Returns one line about the store: where it is, its tokens and its tokenizer."""
        manifest, where = self.manifest, self._store or self.path
        return (
            f"{where}: {manifest.tokens['train']:,} train + {manifest.tokens['validation']:,} validation tokens,"
            f" tokenizer {manifest.tokenizer} ({manifest.vocab_size:,} ids)"
        )

    def fingerprint(self) -> dict[str, Any]:
        """Returns what must not change when a run is resumed: store, tokenizer, seed, sequence length and shuffle."""
        return {
            "store": self.manifest.fingerprint,
            "tokenizer": self.manifest.tokenizer_fingerprint,
            "seed": self._order_seed(),
            "sequence_length": self.sequence_length,
            "shuffle": self.shuffle,
        }

    # Hooks of Lightning

    def prepare_data(self) -> None:
        """Prepares the default store where ``path`` is unset; Lightning calls this in one process of each node."""
        if self.trainer is not None:
            self._check_model()
        if self.path is None:
            standard_library_store(self._model_vocab_size(), self.progress_bar)

    def setup(self, stage: str) -> None:
        """Opens the store and, for training, fits the trainer's limits to the batch plan.

        Raises:
            ValueError: A store, model or trainer setting that does not go with the data module's.
        """
        self._check_model()
        self._store = (
            standard_library_store(self._model_vocab_size(), self.progress_bar)
            if self.path is None
            else Path(self.path).expanduser()
        )
        self._manifest = read_manifest(self._store)
        self._check_vocabulary()
        self._blocks = {
            split: TokenBlocks(self._store, split, self.sequence_length) for split in ("train", "validation")
        }
        # Any: Lightning sets many of its attributes where a type checker does not see them
        trainer: Any = self.trainer
        if trainer is None:
            return
        # strategies with data ranks say which part of the data is theirs; one device reads all of it
        sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
        self._ranks = (int(sampler.get("rank", 0)), int(sampler.get("num_replicas", 1)))
        if stage == "fit":
            self._setup_fit(trainer)
        elif self._validates_with_store(stage) and not len(self._blocks["validation"]):
            raise ValueError(
                f"data.path: {self._no_validation()};\nprepare more text, or with a validation_fraction such as 0.01"
            )

    def _setup_fit(self, trainer: Any) -> None:
        if not len(self._blocks["train"]):
            raise ValueError(
                f"data.sequence_length={self.sequence_length}: the store {self._store} has no sample of that length"
                f" ({self.manifest.tokens['train']:,} train tokens); use a shorter one or more text"
            )
        if self._given is None:
            self._given = {name: getattr(trainer, name) for name in _TRAINER_SETTINGS}
            self._given |= {"max_steps": trainer.max_steps, "max_epochs": trainer.max_epochs}
        self._resumed, self._resumed_step = None, 0
        read = _tokens_read.get(trainer, 0) // self.sequence_length if trainer.global_step else 0
        self._plan = BatchPlan(self.global_batch_size, self.sequence_length, trainer.global_step, read)
        self._check_trainer(trainer, self._given)
        self._check_batch_sizes(self._given["accumulate_grad_batches"])
        self._set_limits(trainer)
        trainer.limit_train_batches = 1.0
        trainer.limit_val_batches = self._given["limit_val_batches"]
        if not len(self._blocks["validation"]) and self._validates_with_store("validate"):
            trainer.limit_val_batches = 0  # Lightning warns of loaders without batches
            if self.manifest.tokens["validation"]:
                rank_zero_info(f"data.path: {self._no_validation()}; nothing is validated")
        # a Trainer that validates by time has no such attribute
        if isinstance(getattr(trainer, "val_check_interval", None), int):
            # counted over the whole training: how long a phase is does not matter
            trainer.check_val_every_n_epoch = None
        # one epoch for each phase, with a loader of its own
        trainer.reload_dataloaders_every_n_epochs = 1
        trainer.callbacks.insert(0, FollowDataPosition(self))

    def train_dataloader(self) -> TrainLoader:
        """Returns the loader of the phase that the next optimizer step belongs to, and sets the accumulation for it."""
        phase = self._phase_of(self._next_step())
        accumulation = phase.batch_size // (self.micro_batch_size * self._ranks[1])
        if self.trainer is not None:
            self.trainer.accumulate_grad_batches = accumulation
        blocks = self._blocks["train"]
        order = SampleOrder(len(blocks), self._order_seed(), self.shuffle)
        batches = TokenBatches(blocks, order, self.manifest.bos_id, self.document_mask)
        return TrainLoader(batches, phase, self._next_step, self.micro_batch_size, *self._ranks, self.num_workers)

    def val_dataloader(self) -> ValidationLoader | list[Any]:
        """Returns the validation split in store order, or nothing where the store has none."""
        blocks = self._blocks["validation"]
        if not len(blocks):
            return []
        batches = TokenBatches(blocks, None, self.manifest.bos_id, self.document_mask)
        return ValidationLoader(batches, self.micro_batch_size, *self._ranks, self.num_workers)

    def test_dataloader(self) -> ValidationLoader | list[Any]:
        """Returns the validation split: a store has no third one."""
        return self.val_dataloader()

    def teardown(self, stage: str) -> None:
        """Gives the trainer its own limits back, so that it can fit again with other data."""
        if stage == "fit" and self._given is not None and self.trainer is not None:
            trainer: Any = self.trainer
            _tokens_read[trainer] = self._plan.samples_before(trainer.global_step) * self.sequence_length
            trainer.fit_loop.epoch_loop.max_steps = self._given["max_steps"]
            trainer.fit_loop.max_epochs = self._given["max_epochs"]
            for name in _TRAINER_SETTINGS:
                setattr(trainer, name, self._given[name])
            trainer.callbacks[:] = [cb for cb in trainer.callbacks if not isinstance(cb, FollowDataPosition)]
            self._given = None

    def on_exception(self, exception: BaseException) -> None:
        """Gives the trainer its own limits back: Lightning does not call ``teardown`` after an error."""
        self.teardown("fit")

    # Resume

    def state_dict(self) -> dict[str, Any]:
        """Returns the data position: the samples consumed by complete optimizer steps, and what it refers to."""
        if self.trainer is None or not self._blocks:
            return {}
        step = self.trainer.global_step
        return {"step": step, "samples_consumed": self._plan.samples_before(step), **self.fingerprint()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the data position of a checkpoint.

        Raises:
            ValueError: A checkpoint of another store, tokenizer, seed or sequence length; names both values.
        """
        if self.trainer is None or self.trainer.state.fn != "fit":
            return
        for name, now in self.fingerprint().items():
            before = state_dict.get(name, now)
            if before != now:
                raise ValueError(
                    f"data: the checkpoint was made with {name} {_short(before)}, this run has {_short(now)}.\n"
                    "A run keeps its data; start a new one with another trainer.default_root_dir"
                )
        self._resumed = state_dict

    def resume_at(self, step: int) -> LoopPosition:
        """Continues after ``step`` complete optimizer steps; called while Lightning restores a checkpoint.

        Args:
            step: The checkpoint's number of optimizer steps.

        Returns:
            Where Lightning's loops stand.
        """
        assert self.trainer is not None
        # the checkpoint's position replaces that of an earlier fit of this trainer
        self._plan = BatchPlan(self.global_batch_size, self.sequence_length)
        if self._resumed is not None and self._resumed.get("step") == step:
            consumed = int(self._resumed["samples_consumed"])
            if consumed != self._plan.samples_before(step):
                # the batch size was another one: what was read stays read, the new plan holds from here
                self._plan = BatchPlan(self.global_batch_size, self.sequence_length, step, consumed)
        self._set_limits(self.trainer)
        self._resumed_step = step
        phase = self._phase_of(step)
        samples = self.micro_batch_size * self._ranks[1]
        earlier = self._plan.first_step * self.accumulation_at(self._plan.first_step)
        return LoopPosition(
            step=step,
            epoch=self._plan.phase_index(phase.first_step),
            batches=(step - phase.first_step) * (phase.batch_size // samples),
            total_batches=earlier + self._plan.micro_batches_before(step, samples),
        )

    def _next_step(self) -> int:
        # while a checkpoint is restored, the trainer does not know its step yet
        return self._resumed_step if self.trainer is None else max(self.trainer.global_step, self._resumed_step)

    def _phase_of(self, step: int) -> Phase:
        """The phase of a step, cut at the end of training; at that end, the last phase."""
        end = self.total_steps()
        phase = self._plan.phase_at(step if end is None else max(0, min(step, end - 1)))
        ends = [value for value in (phase.last_step, end) if value is not None]
        last = max(min(ends), phase.first_step + 1) if ends else _UNLIMITED_STEPS
        return Phase(phase.first_step, last, phase.first_sample, phase.batch_size)

    # Checks

    def _order_seed(self) -> int:
        # seed_everything leaves its seed in this variable, also for other processes
        return self.seed if self.seed is not None else int(os.environ.get("PL_GLOBAL_SEED", 0))

    def _model_shape(self) -> Any:
        module: Any = None if self.trainer is None else self.trainer.lightning_module
        return module.moe_shape() if hasattr(module, "moe_shape") else None

    def _model_vocab_size(self) -> int:
        shape = self._model_shape()
        if shape is None:
            raise ValueError(
                "data.path is not set, and the model does not say its vocab_size (it has no moe_shape()):\n"
                "set data.path to a store made by lightning-moe prepare"
            )
        return int(shape.vocab_size)

    def _check_model(self) -> None:
        shape = self._model_shape()
        limit = getattr(shape, "max_position_embeddings", None)
        if limit is not None and self.sequence_length > limit:
            raise ValueError(
                f"data.sequence_length={self.sequence_length} is longer than the model's"
                f" max_position_embeddings={limit}; use at most {limit}"
            )
        depth = getattr(shape, "num_nextn_predict_layers", 0)
        if depth >= self.sequence_length:
            raise ValueError(
                f"data.sequence_length={self.sequence_length} must be longer than the model's"
                f" num_nextn_predict_layers={depth}; use at least {depth + 1}"
            )

    def _check_vocabulary(self) -> None:
        shape, manifest = self._model_shape(), self.manifest
        if shape is not None and manifest.max_token_id >= shape.vocab_size:
            raise ValueError(
                f"data.path: {self._store} has token ids up to {manifest.max_token_id} (tokenizer"
                f" {manifest.tokenizer}), the model's vocab_size is {shape.vocab_size};\nset vocab_size to"
                f" {manifest.vocab_size}, or prepare the text with a smaller tokenizer"
            )

    def _validates_with_store(self, stage: str) -> bool:
        """Whether a stage reads the store's validation samples, and not a subclass's own loader."""
        loaders = {"validate": ("val_dataloader",), "test": ("test_dataloader", "val_dataloader")}
        names = loaders.get(stage, ())
        return bool(names) and all(getattr(type(self), name) is getattr(TokenDataModule, name) for name in names)

    def _no_validation(self) -> str:
        return (
            f"{self._store} has no validation sample of {self.sequence_length} tokens"
            f" ({self.manifest.tokens['validation']:,} validation tokens)"
        )

    def _check_trainer(self, trainer: Any, given: dict[str, Any]) -> None:
        if not trainer.lightning_module.automatic_optimization:
            raise ValueError("TokenDataModule needs automatic optimization: it sets how many batches make one step")
        if trainer.overfit_batches:
            raise ValueError(
                f"trainer.overfit_batches={trainer.overfit_batches} does not go with TokenDataModule, which reads the"
                " store in its own order; to overfit, prepare a small store and train on it"
            )
        limit = given["limit_train_batches"]
        if not trainer.fast_dev_run and limit not in (None, 1.0):
            raise ValueError(
                f"trainer.limit_train_batches={limit} does not go with TokenDataModule; to train less, set"
                " data.max_tokens or trainer.max_steps"
            )
        seconds = trainer._val_check_time_interval
        if seconds is not None and trainer.world_size > 1:
            raise ValueError(
                f"trainer.val_check_interval of {seconds:g} seconds does not go with {trainer.world_size} processes:"
                " each would validate by its own clock, and wait for the others;\ngive a number of micro-batches, such"
                " as 1000"
            )
        for callback in trainer.callbacks:
            if isinstance(callback, GradientAccumulationScheduler):
                raise ValueError(
                    f"trainer.callbacks: GradientAccumulationScheduler({callback.scheduling}) does not go with"
                    " TokenDataModule, which sets how many batches make one step;\nto change that in training, set"
                    " data.global_batch_size: {from this token: sequences}, such as {0: 16, 1e6: 32}"
                )

    def _check_batch_sizes(self, accumulation: int) -> None:
        micro, ranks = self.micro_batch_size, self._ranks[1]
        unit = micro * ranks
        sizes = [size for _, size in batch_size_steps(self.global_batch_size)]
        for size in sizes:
            if size % unit:
                near = sorted({max(unit, size // unit * unit), -(-size // unit) * unit})
                raise ValueError(
                    f"data.global_batch_size={size} is not a multiple of micro_batch_size {micro} x {ranks} data"
                    f" rank{'s' * (ranks > 1)} = {unit}; use {' or '.join(map(str, near))}"
                )
        derived = [size // unit for size in sizes]
        if accumulation != 1 and set(derived) != {accumulation}:
            nearest = min(derived, key=lambda value: abs(value - accumulation))
            raise ValueError(
                f"trainer.accumulate_grad_batches={accumulation} contradicts data.global_batch_size"
                f" {sizes if len(sizes) > 1 else sizes[0]} = micro_batch_size {micro} x {ranks} data"
                f" rank{'s' * (ranks > 1)} x {derived if len(derived) > 1 else derived[0]};\nleave it out"
                + (f", or set it to {nearest}" if len(set(derived)) == 1 else ": it changes with the batch size")
            )

    def _set_limits(self, trainer: Any) -> None:
        """Sets the trainer's number of optimizer steps; the epochs are ours to count."""
        assert self._given is not None
        max_steps, max_epochs = self._given["max_steps"], self._given["max_epochs"]
        limits = [] if max_steps == -1 else [max_steps]
        if self.max_tokens is not None:
            limits.append(self._plan.total_steps(self.max_tokens))
        unset_epochs = max_epochs in (None, -1) or (max_epochs == _UNSET_MAX_EPOCHS and limits)
        if not unset_epochs and not trainer.fast_dev_run:
            # an epoch that the user asks for is one pass over the store
            tokens = max_epochs * len(self._blocks["train"]) * self.sequence_length
            limits.append(self._plan.total_steps(tokens))
        if not limits and not any(isinstance(callback, Timer) for callback in trainer.callbacks):
            raise ValueError("nothing ends the training: set data.max_tokens (such as 1e6) or trainer.max_steps")
        self._limit = min(limits) if limits else None
        trainer.fit_loop.epoch_loop.max_steps = -1 if self._limit is None else self._limit
        trainer.fit_loop.max_epochs = -1


def _short(value: Any) -> str:
    return value[:12] if isinstance(value, str) and len(value) == 64 else repr(value)
