"""Takes messages off the screen that tell the user of the command line nothing they could act on."""

import logging
import warnings

# Starts of log messages: the start-of-run table says what matters of them, or they are advertisements
_LOG_PREFIXES = (
    "💡 Tip",
    "GPU available",
    "TPU available",
    "HPU available",
    "IPU available",
    "Using default `ModelCheckpoint`",
    "Restoring states from the checkpoint path",
    "Restored all states from the checkpoint",
    "`Trainer.fit` stopped:",
    "Seed set to",
    "`Trainer(limit_",
)
_WARNINGS = (
    r".*does not have many workers which may be a bottleneck.*",  # the data module chooses the number of workers
    r"Checkpoint directory .* exists and is not empty",  # it is the run directory
    r".*`isinstance\(treespec, LeafSpec\)` is deprecated.*",  # inside Lightning
    r"You're resuming from a checkpoint that ended before the epoch ended.*",  # the data module resumes exactly
)


class _Unwanted(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().strip().startswith(_LOG_PREFIXES)


def quiet_console() -> None:
    """Filters messages of Lightning that a user of the command line cannot act on; all other warnings stay."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed", "lightning.pytorch"):
        logger = logging.getLogger(name)
        if not any(isinstance(present, _Unwanted) for present in logger.filters):
            logger.addFilter(_Unwanted())
    for message in _WARNINGS:
        warnings.filterwarnings("ignore", message=message)
