"""The command line: :class:`MoECLI` (a ``LightningCLI``) and the console command ``lightning-moe``."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.distributed.checkpoint.api import CheckpointException
from typing_extensions import override

import lightning_moe
from lightning_moe import _stop_importing, run_directory
from lightning_moe.argument_parser import MoEArgumentParser
from lightning_moe.callbacks.interrupt import EXIT_STATUS, TrainingInterrupted
from lightning_moe.callbacks.preemption import Preemption
from lightning_moe.callbacks.progress_bar import TokenProgressBar
from lightning_moe.callbacks.run_checkpoint import RunCheckpoint
from lightning_moe.callbacks.run_table import RunTable
from lightning_moe.config_loader import command_folder, expand_arguments
from lightning_moe.console_noise import quiet_console
from lightning_moe.models.module import MoELightningModule
from lightning_moe.strategies.launching import brings_cluster_environment, choose_devices, is_requeued
from lightning_moe.strategies.names import check_accelerator, check_strategy
from lightning_moe.tools import TOOLS, gather_arguments_of_fit, tool_function
from lightning_moe.usage_errors import UsageError, explain, explain_full_disk, name_field, shorten

DEFAULT_SEED = 1337
LARGEST_SEED = 2**32 - 1
DEFAULT_RUN = "runs/default"
_USER_ERRORS = (ValueError, MisconfigurationException, FileNotFoundError, ModuleNotFoundError, NotImplementedError)


class SaveRunConfig(SaveConfigCallback):
    """Saves the configuration of a training as ``config.yaml`` in its run directory."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Saves nothing yet: settings that turn out wrong must not become those of the run."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save_config(trainer, pl_module, "fit")

    @override
    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.is_global_zero:
            text = self.parser.dump(self.config, skip_none=False)
            path = Path(trainer.default_root_dir, run_directory.CONFIG_FILE)
            run_directory.write_atomically(path, lambda temporary: _write(temporary, text))


class MoECLI(LightningCLI):
    """Lightning's CLI for MoE models: any model and data class, and one run directory that survives restarts.

    ``trainer.default_root_dir`` is the run: ``config.yaml``, ``checkpoints/`` and ``logs/`` keep their paths.

    Args:
        args: Command line arguments, or a configuration; ``None`` takes those of the process.
        run: Whether to run a subcommand. If false, only the model, the data module and the trainer are built.

    Raises:
        UsageError: What was given cannot work.
    """

    def __init__(self, args: ArgsType = None, run: bool = True) -> None:
        self.resume_path: str | None = None
        self.resume_progress = run_directory.Progress(0, None)
        self._nothing_to_resume = False
        self._changes: list[run_directory.Change] = []
        with command_folder(Path.cwd()):
            super().__init__(
                MoELightningModule,
                LightningDataModule,
                save_config_callback=SaveRunConfig,
                save_config_kwargs={"save_to_log_dir": False},
                trainer_defaults={"default_root_dir": DEFAULT_RUN, "max_epochs": -1, "enable_model_summary": False},
                seed_everything_default=DEFAULT_SEED,
                parser_class=MoEArgumentParser,
                subclass_mode_model=True,
                subclass_mode_data=True,
                args=args,
                run=run,
                auto_configure_optimizers=False,
            )

    @staticmethod
    @override
    def subcommands() -> dict[str, set[str]]:
        # Checkpoints are always loaded without executing code, so there is no `weights_only` to set
        skipped = {"model", "datamodule", "weights_only"}
        return {
            "fit": skipped | {"train_dataloaders", "val_dataloaders"},
            "validate": skipped | {"dataloaders"},
            "test": skipped | {"dataloaders"},
        }

    @override
    def setup_parser(self, add_subcommands: bool, main_kwargs: Any, subparser_kwargs: Any) -> None:
        main_kwargs.setdefault("prog", "lightning-moe")
        main_kwargs.setdefault("description", "Train DeepSeek-V3-class mixture-of-experts models.")
        super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)
        self.parser.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
        if not add_subcommands:
            # So that the YAML files of `fit` can be read without running anything
            self.parser.add_argument("--ckpt_path", type=str, default=None, help="Not used.")

    @override
    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        for action in parser._actions:
            if action.dest == "ckpt_path":
                without = "a new run" if subcommand == "fit" else "an error"
                action.help = f"'last' for the newest checkpoint of the run directory, or a path; without: {without}."
        return parser

    @override
    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        super()._add_subcommands(parser, **kwargs)
        commands: Any = parser._subcommands_action
        for name in TOOLS:
            function = tool_function(name)
            description = (function.__doc__ or "").strip().splitlines()[0]
            tool_parser = MoEArgumentParser(description=description)
            tool_parser.add_function_arguments(function)
            commands.add_subcommand(name, tool_parser, help=description)

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(RunCheckpoint, "checkpoint")
        parser.link_arguments("trainer.default_root_dir", "checkpoint.dirpath", compute_fn=_checkpoint_folder)

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        if args is None:
            args = sys.argv[1:]
        if isinstance(args, list):
            self.config = parser.parse_args(expand_arguments(gather_arguments_of_fit(args)))
        else:
            self.config = parser.parse_object(args)

    @override
    def _parse_ckpt_path(self) -> None:
        """Does nothing: the configuration counts on resume, and Lightning would put the checkpoint's values over it."""

    @override
    def _set_seed(self) -> None:
        if self.subcommand in TOOLS:
            return
        seed = self._get(self.config, "seed_everything")
        if not 0 <= seed <= LARGEST_SEED:
            raise UsageError(
                f"seed_everything is {seed}, but must be 0 to {LARGEST_SEED}, for example {DEFAULT_SEED}, or true for "
                "a random seed."
            )
        super()._set_seed()

    @override
    def before_instantiate_classes(self) -> None:
        if self.subcommand is not None and self.subcommand not in TOOLS:
            self._choose_checkpoint(self.subcommand)

    @override
    def instantiate_classes(self) -> None:
        if self.subcommand in TOOLS:
            return
        try:
            super().instantiate_classes()
        except _USER_ERRORS as error:
            raise self._usage_error(error) from error

    @override
    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        own = config.get("callbacks") or []
        own = own if isinstance(own, list) else [own]
        if config.get("enable_checkpointing") is False:
            callbacks = [callback for callback in callbacks if not isinstance(callback, ModelCheckpoint)]
        if not config.get("barebones"):
            callbacks = [*callbacks, RunTable(self.resume_path, self.resume_progress.global_step)]
            with_bar = config.get("enable_progress_bar") is not False
            if with_bar and not any(isinstance(callback, ProgressBar) for callback in own):
                callbacks.append(TokenProgressBar())
            if not any(isinstance(callback, Preemption) for callback in own):
                callbacks.append(Preemption())
            if config.get("logger") in (None, True):
                config["logger"] = self._default_logger(config["default_root_dir"])
        check_accelerator(config["accelerator"])
        check_strategy(config["strategy"])
        devices = config["devices"]
        if not brings_cluster_environment(config):
            config["devices"], config["num_nodes"] = choose_devices(devices, config["num_nodes"])
        try:
            trainer = super()._instantiate_trainer(config, callbacks)
        except TypeError as error:
            if "CPUAccelerator" not in str(error):
                raise
            raise UsageError(
                f"trainer.devices is {devices}, but on the CPU it must be auto or a number of processes, such as 1."
            ) from error
        if trainer.world_size > 1 and not callable(getattr(trainer.strategy, "assemble", None)):
            # The module checks this too, but only in each of the processes.
            raise UsageError(
                f"trainer.strategy: {type(trainer.strategy).__name__} with {trainer.world_size} devices would train "
                "each on gradients of its own.\n"
                "Give --trainer.strategy expert_parallel, or --trainer.devices 1."
            )
        if type(trainer.strategy.checkpoint_io) is run_directory.TorchCheckpointIO:
            trainer.strategy.checkpoint_io = run_directory.AtomicCheckpointIO()
        return trainer

    def _default_logger(self, run_dir: str) -> TensorBoardLogger:
        # What was logged after the checkpoint will be logged again
        purge: dict[str, Any] = {"purge_step": self.resume_progress.global_step} if self.resume_path else {}
        return TensorBoardLogger(run_dir, name="", version=run_directory.LOG_FOLDER, default_hp_metric=False, **purge)

    @override
    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        return {**kwargs, "ckpt_path": self.resume_path, "weights_only": True}

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        try:
            if subcommand in TOOLS:
                settings = self.parser.instantiate_classes(self.config)[subcommand]
                status = tool_function(subcommand)(**settings.as_dict())
                if isinstance(status, int) and status:
                    raise SystemExit(status)
            elif subcommand == "fit":
                self._fit()
            else:
                super()._run_subcommand(subcommand)
        except UsageError:
            raise
        except _USER_ERRORS as error:
            if _in_a_step(error):
                raise
            raise self._usage_error(error) from error
        except (Exception, CheckpointException) as error:
            message = explain_full_disk(error, self._run_dir) if subcommand == "fit" else None
            if message is None:
                raise
            raise UsageError(message) from error

    def _fit(self) -> None:
        self._check_trainer_settings()
        self._check_that_it_ends()
        if self._is_at_end():
            return
        self._say_changes()
        self._check_run_dir()
        if self._nothing_to_resume:
            _say(f"ckpt_path last: there is no checkpoint in {self._run_dir} yet, starting a new run.")
        unlock = self._lock_run_dir()
        try:
            super()._run_subcommand("fit")
        finally:
            unlock()
        where = "" if self._get(self.config, "trainer").fast_dev_run else f" Run directory: {self._run_dir}"
        _say(f"Done after step {self.trainer.global_step}.{where}")

    @property
    def _run_dir(self) -> str:
        return str(self._get(self.config, "trainer").default_root_dir)

    def _choose_checkpoint(self, subcommand: str) -> None:
        """Decides what to start from, before anything is built, and compares with the run's last configuration."""
        settings, run_dir = self.config[subcommand], Path(self._run_dir)
        path, fast = settings.ckpt_path, bool(settings.trainer.fast_dev_run)
        if subcommand != "fit" and path is None and not fast:
            raise UsageError(
                f"ckpt_path: {subcommand} needs a checkpoint.\n"
                f"Give --ckpt_path last for the newest one of {run_dir}, or the path of one."
            )
        if fast and path == "last":
            return
        if subcommand == "fit" and path is None:
            if fast:
                return
            found = run_directory.find_last_checkpoint(run_dir)
            if found is not None and is_requeued():
                path = "last"
            elif found is not None:
                raise UsageError(
                    f"trainer.default_root_dir: {run_dir} already holds a run ({os.path.relpath(found)}).\n"
                    "Continue it with --ckpt_path last, or start another with --trainer.default_root_dir "
                    f"{_other_run(run_dir)}"
                )
            else:
                return
        if path == "last":
            found = run_directory.find_last_checkpoint(run_dir)
            if found is None and subcommand != "fit":
                raise UsageError(
                    f"ckpt_path: there is no complete checkpoint in {run_dir}.\n"
                    "Train first with lightning-moe fit, or set trainer.default_root_dir to a run that has one."
                )
            if found is None:
                self._nothing_to_resume = True
                return
            path = os.path.relpath(found)
        elif not os.path.exists(path):
            raise UsageError(f"ckpt_path: {path} does not exist. Give --ckpt_path last or the path of a checkpoint.")
        self.resume_path, self.resume_progress = path, run_directory.read_progress(Path(path))
        _say(
            f"ckpt_path {settings.ckpt_path or 'last'}: {path}" if path != settings.ckpt_path else f"ckpt_path: {path}"
        )
        if subcommand == "fit" and run_dir.resolve() in Path(path).resolve().parents:
            self._compare_with_last_run(run_dir)

    def _compare_with_last_run(self, run_dir: Path) -> None:
        file = run_dir / run_directory.CONFIG_FILE
        if not file.is_file():
            return
        saved = yaml.safe_load(file.read_text(encoding="utf-8"))
        parser, settings = self._parser(self.subcommand), self.config[str(self.subcommand)]
        present = yaml.safe_load(parser.dump(settings, skip_none=False))
        changes = run_directory.compare_configurations(saved, present)
        fixed = [change for change in changes if change.fixed_as is not None]
        if fixed:
            listed = [f"  {change.key}: {change.saved} -> {change.present}" for change in fixed[:3]]
            more = f" and {len(fixed) - 3} more" if len(fixed) > 3 else ""
            raise UsageError(
                f"{run_dir} was trained with another {str(fixed[0].fixed_as).removeprefix('the ')}{more}, "
                "which cannot change within a run:\n"
                + "\n".join(listed)
                + f"\nStart another run with --trainer.default_root_dir {_other_run(run_dir)}"
            )
        self._changes = changes

    def _say_changes(self) -> None:
        for change in self._changes:
            _say(f"changed since the last run: {change.key} {_in_yaml(change.saved)} -> {_in_yaml(change.present)}")

    def _check_trainer_settings(self) -> None:
        settings = self._get(self.config, "trainer")
        # Lightning takes any number, and a negative one turns the gradients round: the loss rises
        norm = settings.gradient_clip_val
        if norm is not None and not norm >= 0:
            raise UsageError(
                f"trainer.gradient_clip_val is {norm}, but a norm is at least 0.\n"
                "Set it to 1.0 as in the DeepSeek-V3 report, or to null to clip nothing."
            )
        interval = settings.val_check_interval
        if isinstance(interval, (int, float)) and not interval > 0:
            raise UsageError(
                f"trainer.val_check_interval is {interval}, but must be at least 1 micro-batch, or a fraction such as "
                "0.25.\nTo validate nothing, set trainer.limit_val_batches to 0."
            )

    def _check_run_dir(self) -> None:
        # Without this, the first to write there fails, after the data has been prepared
        if self._get(self.config, "trainer").fast_dev_run or "://" in self._run_dir:
            return
        run_dir = Path(self._run_dir)
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            reason = None if os.access(run_dir, os.W_OK | os.X_OK) else "Permission denied"
        except OSError as error:
            reason = error.strerror
        if reason is not None:
            raise UsageError(
                f"trainer.default_root_dir: {run_dir} cannot be written ({reason}).\n"
                f"Set it to a folder that can, for example {DEFAULT_RUN}."
            )

    def _lock_run_dir(self) -> Callable[[], None]:
        """Keeps a second training out of the run directory; returns what lets it in again."""
        fast = self._get(self.config, "trainer").fast_dev_run
        first = not fast and rank_zero_only.rank == 0  # type: ignore[attr-defined]
        if not first or "://" in self._run_dir:
            return lambda: None
        try:
            return run_directory.lock(Path(self._run_dir))
        except BlockingIOError as error:
            raise UsageError(
                f"trainer.default_root_dir: another training runs in {self._run_dir} now.\n"
                f"Wait for its end, or set another one, for example {_other_run(Path(self._run_dir))}."
            ) from error

    def _check_that_it_ends(self) -> None:
        limits = self._get(self.config, "trainer")
        if limits.max_time or limits.fast_dev_run or limits.max_steps >= 0 or limits.max_epochs not in (None, -1):
            return
        if getattr(self.datamodule, "max_tokens", None) is None:
            raise UsageError(
                "data.max_tokens: nothing ends this training.\n"
                "Set data.max_tokens, for example 1e9, or trainer.max_steps, for example 1000."
            )

    def _is_at_end(self) -> bool:
        """Whether the checkpoint is at the end of training already; says so."""
        data, done = self.datamodule, self.resume_progress
        max_tokens, total_steps = getattr(data, "max_tokens", None), getattr(data, "total_steps", None)
        if max_tokens is not None and done.tokens_seen is not None:
            by_tokens = done.tokens_seen >= max_tokens
        else:
            by_tokens = callable(total_steps) and 0 <= (total_steps() or -1) <= done.global_step
        if self.resume_path and (by_tokens or 0 <= self.trainer.max_steps <= done.global_step):
            tokens = f" and {done.tokens_seen:,} tokens" if done.tokens_seen is not None else ""
            _say(f"{self._run_dir} is at its end already: {done.global_step} steps{tokens}. Nothing to do.")
            return True
        return False

    def _usage_error(self, error: Exception) -> UsageError:
        keys = _keys(self.config.get(str(self.subcommand), self.config))
        return UsageError(shorten(name_field(explain(str(error) or repr(error)), keys)))


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command ``lightning-moe``.

    Args:
        args: The arguments; ``None`` takes those of the process.

    Returns:
        The exit status: 0, 2 for what the user has to correct, 1 for a run that ``doctor`` finds not to work, 128 and
        the signal's number (130 after Ctrl-C, 143 after SIGTERM) when training was asked to stop.
    """
    arguments = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in arguments
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    quiet_console()
    if "-h" in arguments or any(argument.startswith("--help") for argument in arguments):
        for name in lightning_moe.__all__:  # what is imported is listed among the known subclasses
            getattr(lightning_moe, name)
    try:
        if signal.getsignal(signal.SIGINT) is _stop_importing:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        MoECLI(args=[argument for argument in arguments if argument != "--debug"])
    except TrainingInterrupted as interrupt:
        return interrupt.status
    except KeyboardInterrupt:
        _say("Stopped by Ctrl-C.")
        return EXIT_STATUS
    except SystemExit as end:
        # Lightning turns Ctrl-C into an exit with status 1
        if isinstance(end.__context__, KeyboardInterrupt):
            return EXIT_STATUS
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except (UsageError, FloatingPointError, *_USER_ERRORS) as error:
        says_all = isinstance(error, (UsageError, FloatingPointError))
        if debug or not (says_all or not _in_a_step(error)):
            raise
        sys.stderr.write(f"error: {shorten(str(error))}\n")
        return 2
    return 0


@rank_zero_only
def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _in_yaml(value: Any) -> str:
    return "null" if value is None else str(value)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _checkpoint_folder(default_root_dir: str | None) -> str:
    return os.path.join(default_root_dir or os.getcwd(), run_directory.CHECKPOINT_FOLDER)


def _other_run(run_dir: Path) -> Path:
    number = 2
    while run_dir.with_name(f"{run_dir.name}-{number}").exists():
        number += 1
    return run_dir.with_name(f"{run_dir.name}-{number}")


def _keys(settings: Any) -> list[str]:
    return [] if settings is None else list(map(str, settings.keys()))


def _in_a_step(error: BaseException) -> bool:
    """Whether an error comes from a training or evaluation step, where a traceback is what helps."""
    frame = error.__traceback__
    while frame is not None:
        code = frame.tb_frame.f_code
        if (os.path.basename(code.co_filename), code.co_name) in _STEPS:
            return True
        frame = frame.tb_next
    return False


_STEPS = {("training_epoch_loop.py", "advance"), ("evaluation_loop.py", "_evaluation_step")}
