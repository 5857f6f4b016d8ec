from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_moe.callbacks.run_table import RunTable, _batch, _size
from lightning_moe.cli import MoECLI
from tests.callbacks.standins import arguments


def test_rows_of_a_run(tmp_path: Path) -> None:
    cli: Any = MoECLI(args=arguments(tmp_path, "--trainer.max_steps=1"), run=False)
    cli.trainer.fit(cli.model, cli.datamodule)
    rows = dict(RunTable("runs/a/checkpoints/step=7.ckpt", 7).rows(cli.trainer, cli.model))
    counts = cli.model.parameter_counts()
    assert rows["model"].startswith(
        f"DeepSeekV3: {_size(counts['total'])} parameters, {_size(counts['activated'])} active"
    )
    assert rows["layout"] == "1 cpu device (SingleDeviceStrategy)"
    assert rows["global batch"] == "2 x 2 accumulated x 1 data rank = 4 sequences"
    assert rows["tokens per step"] == "32"
    assert rows["max_tokens"] == "320"
    assert rows["steps"] == "1"
    assert rows["attention"] == cli.model.attention_backend()
    assert (rows["dispatcher"], rows["precision"]) == ("local", "32-true")
    assert rows["run directory"] == str(tmp_path)
    assert rows["resumed from"] == "runs/a/checkpoints/step=7.ckpt (step 7)"


class _Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(10, 10, bias=False)


def test_what_a_model_does_not_tell_is_left_out() -> None:
    trainer = Trainer(accelerator="cpu", max_steps=3, logger=False, enable_checkpointing=False)
    rows = dict(RunTable().rows(trainer, _Plain()))
    assert rows["model"] == "_Plain: 100 parameters"
    assert rows["accumulation"] == "1 batches per step"
    assert rows["steps"] == "3"
    assert rows["resumed from"] == "nothing, new run"
    assert not {"attention", "max_tokens", "tokens per step"} & set(rows)


def test_batch_that_grows() -> None:
    data = SimpleNamespace(
        micro_batch_size=1,
        sequence_length=4096,
        global_batch_size={0: 2, 1e6: 4},
        accumulation_at=lambda step: 2 + step,
    )
    trainer = SimpleNamespace(datamodule=data, distributed_sampler_kwargs={"num_replicas": 2, "rank": 0})
    rows = dict(_batch(cast(Trainer, trainer), 1))
    assert rows["global batch"].endswith("x 2 data ranks = 6 sequences (at this step; grows)")
    assert rows["tokens per step"] == "24,576"


def test_sizes() -> None:
    assert [_size(value) for value in (5, 3.289e6, 671_026_404_352, 14.8e12)] == ["5", "3.289M", "671B", "14.8T"]
