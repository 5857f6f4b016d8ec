import math
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback, ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_moe.data.datamodule import TokenDataModule
from lightning_moe.data.order import SampleOrder
from lightning_moe.data.store import TokenBlocks
from lightning_moe.tools.prepare import prepare

from .conftest import Recorder, make_trainer, write_documents

SEQUENCE = 32


def data(store: Path, **settings: Any) -> TokenDataModule:
    defaults = {"sequence_length": SEQUENCE, "micro_batch_size": 2, "global_batch_size": 4, "seed": 7}
    return TokenDataModule(str(store), **{**defaults, **settings})


def expected_samples(store: Path, number: int, seed: int = 7) -> list[list[int]]:
    """The first samples of training, read without the data module."""
    blocks = TokenBlocks(store, "train", SEQUENCE)
    positions = SampleOrder(len(blocks), seed).store_indices(np.arange(number))
    return blocks.read(positions)[:, :-1].tolist()


def fit(folder: Path, datamodule: TokenDataModule, module: Recorder | None = None, **settings: Any) -> Recorder:
    module = module or Recorder()
    checkpoint = settings.pop("ckpt_path", None)
    make_trainer(folder, **settings).fit(module, datamodule=datamodule, ckpt_path=checkpoint)
    return module


def test_reads_the_store_in_the_global_order_and_ends_after_max_tokens(store: Path, tmp_path: Path) -> None:
    # 5 steps of 4 samples of 32 tokens: 639 tokens need the fifth, which ends at 640
    module = fit(tmp_path, data(store, max_tokens=639))
    assert module.samples == expected_samples(store, 20)
    assert module.windows == [2] * 5
    assert module.global_step == 5


@pytest.mark.parametrize(("max_tokens", "max_steps", "steps"), [(640, -1, 5), (641, -1, 6), (1e6, 3, 3), (None, 4, 4)])
def test_the_first_limit_ends_training(
    store: Path, tmp_path: Path, max_tokens: float | None, max_steps: int, steps: int
) -> None:
    datamodule = data(store, max_tokens=max_tokens)
    module = fit(tmp_path, datamodule, max_steps=max_steps)
    assert module.global_step == steps
    assert datamodule.total_steps() == steps


def test_passes_over_the_store_as_often_as_needed(store: Path, tmp_path: Path) -> None:
    number = len(TokenBlocks(store, "train", SEQUENCE))
    steps = number // 16 * 2 + 3
    module = fit(tmp_path, data(store, micro_batch_size=16, global_batch_size=16, max_tokens=steps * 16 * SEQUENCE))
    assert module.global_step == steps
    assert module.samples == expected_samples(store, steps * 16)
    first, second = module.samples[:number], module.samples[number : 2 * number]
    assert sorted(first) == sorted(second)
    assert first != second


def test_max_epochs_without_other_limits_means_passes(store: Path, tmp_path: Path) -> None:
    number = len(TokenBlocks(store, "train", SEQUENCE))
    module = fit(tmp_path, data(store, micro_batch_size=16, global_batch_size=16), max_epochs=2)
    assert module.global_step == -(-2 * number // 16)


@pytest.mark.parametrize("max_tokens", [0, -1e6, math.inf, math.nan])
def test_max_tokens_are_a_finite_number(store: Path, max_tokens: float) -> None:
    with pytest.raises(ValueError, match=rf"data\.max_tokens={max_tokens} must be finite and at least 1, such as 1e6"):
        data(store, max_tokens=max_tokens)


def test_without_any_limit_is_an_error(store: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"set data\.max_tokens \(such as 1e6\) or trainer\.max_steps"):
        fit(tmp_path, data(store))


@pytest.mark.parametrize(("micro", "workers"), [(1, 0), (4, 0), (2, 2)])
def test_order_depends_neither_on_micro_batch_nor_on_workers(
    store: Path, tmp_path: Path, micro: int, workers: int
) -> None:
    module = fit(tmp_path, data(store, micro_batch_size=micro, num_workers=workers, max_tokens=640))
    assert module.samples == expected_samples(store, 20)


def test_seed_of_seed_everything_is_the_default(store: Path, tmp_path: Path) -> None:
    seed_everything(99)
    module = fit(tmp_path, data(store, seed=None, max_tokens=128))
    assert module.samples == expected_samples(store, 4, seed=99)


@pytest.mark.parametrize("rank", [0, 1])
def test_data_ranks_share_each_micro_batch(store: Path, tmp_path: Path, rank: int) -> None:
    datamodule = data(store, global_batch_size=8, max_tokens=1e5)
    trainer: Any = make_trainer(tmp_path, max_steps=2)
    trainer.strategy.distributed_sampler_kwargs = {"num_replicas": 2, "rank": rank}
    module = Recorder()
    trainer.fit(module, datamodule=datamodule)
    expected = expected_samples(store, 16)
    mine = [sample for start in range(2 * rank, 16, 4) for sample in expected[start : start + 2]]
    assert module.samples == mine
    assert datamodule.accumulation_at(0) == 2


def test_windows_follow_the_batch_size_steps_exactly(store: Path, tmp_path: Path) -> None:
    # 3 steps of 4 (12 samples = 384 tokens >= 300), 2 of 6 (768 >= 700), then 10
    datamodule = data(store, global_batch_size={0: 4, 300: 6, 700: 10}, max_tokens=2000)
    module = fit(tmp_path, datamodule)
    assert module.windows == [2, 2, 2, 3, 3, 5, 5, 5, 5]
    assert module.accumulations == module.windows
    assert [datamodule.accumulation_at(step) for step in range(9)] == module.windows
    assert module.samples == expected_samples(store, 24 + 40)


STEPS = [(4, [2] * 9), ({0: 4, 300: 6, 700: 10}, [2, 2, 2, 3, 3, 5, 5, 5, 5])]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("sizes", "windows"), STEPS)
def test_resumes_exactly_at_every_step_twice(
    store: Path, tmp_path: Path, sizes: Any, windows: list[int], workers: int
) -> None:
    def saving(folder: Path) -> ModelCheckpoint:
        return ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)

    def run(folder: Path, **settings: Any) -> Recorder:
        callback = saving(folder)
        datamodule = data(store, global_batch_size=sizes, max_tokens=1e6, num_workers=workers)
        return fit(tmp_path, datamodule, callbacks=[callback], enable_checkpointing=True, **settings)

    whole = run(tmp_path / "whole", max_steps=9)
    starts = [sum(windows[:step]) for step in range(10)]
    for step in (1, 2, 3, 4, 5, 8) if workers == 0 else (3, 4):
        once = run(tmp_path / f"once{step}", max_steps=step + 1, ckpt_path=tmp_path / "whole" / f"step={step}.ckpt")
        assert once.seen == whole.seen[starts[step] : starts[step + 1]]
        twice = run(
            tmp_path / f"twice{step}", max_steps=9, ckpt_path=tmp_path / f"once{step}" / f"step={step + 1}.ckpt"
        )
        assert twice.seen == whole.seen[starts[step + 1] :]
        assert once.windows + twice.windows == windows[step:]
        assert once.accumulations + twice.accumulations == windows[step:]
        torch.testing.assert_close(twice.head.weight, whole.head.weight, rtol=0, atol=0)


def interrupted(store: Path, folder: Path, batches: int, **settings: Any) -> Path:
    """Trains until an error in micro-batch ``batches``, saving then; returns the checkpoint."""

    class SaveOnError(ModelCheckpoint):
        def on_exception(self, trainer: Any, *args: Any) -> None:
            trainer.save_checkpoint(folder / "error.ckpt")

    with pytest.raises(RuntimeError, match="interrupted"):
        fit(
            folder,
            data(store, **settings),
            Recorder(fail_at=batches),
            callbacks=[SaveOnError(folder)],
            enable_checkpointing=True,
        )
    return folder / "error.ckpt"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batches", [1, 7, 8, 9])
def test_a_checkpoint_inside_a_window_begins_that_window_again(
    store: Path, tmp_path: Path, batches: int, workers: int
) -> None:
    settings = {"global_batch_size": {0: 4, 300: 6}, "max_tokens": 2000, "num_workers": workers}
    checkpoint = interrupted(store, tmp_path, batches, **settings)
    steps = {1: 0, 7: 3, 8: 3, 9: 4}[batches]
    module = fit(tmp_path, data(store, **settings), ckpt_path=checkpoint)
    first = steps * 4 if steps < 3 else 12 + (steps - 3) * 6
    # 12 samples in 3 steps of 4, then 9 steps of 6 to 2112 tokens
    assert module.samples == expected_samples(store, 66)[first:]
    assert module.windows == ([2] * 3 + [3] * 9)[steps:]


@pytest.mark.parametrize("moment", ["on_train_epoch_end", "on_validation_end", "on_train_epoch_start"])
def test_resumes_from_checkpoints_at_the_edges_of_phases(store: Path, tmp_path: Path, moment: str) -> None:
    settings = {"global_batch_size": {0: 4, 300: 6}, "max_tokens": 2000}

    def save(trainer: Any, module: Any) -> None:
        if module.global_step == 3:
            trainer.save_checkpoint(tmp_path / "edge.ckpt")

    fit(tmp_path, data(store, **settings), callbacks=[LambdaCallback(**{moment: save})])
    module = fit(tmp_path, data(store, **settings), ckpt_path=tmp_path / "edge.ckpt")
    assert module.samples == expected_samples(store, 66)[12:]
    assert module.windows == [3] * 9


def test_resumes_after_an_interrupted_validation(store: Path, tmp_path: Path) -> None:
    class Failing(Recorder):
        def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
            if self.global_step == 4 and batch_idx == 1:
                self.trainer.save_checkpoint(tmp_path / "validation.ckpt")
                raise RuntimeError("interrupted")
            super().validation_step(batch, batch_idx)

    settings: dict[str, Any] = {"val_check_interval": 4, "limit_val_batches": 3}
    with pytest.raises(RuntimeError, match="interrupted"):
        fit(tmp_path, data(store, max_tokens=1280), Failing(), **settings)
    module = fit(tmp_path, data(store, max_tokens=1280), ckpt_path=tmp_path / "validation.ckpt", **settings)
    assert module.samples == expected_samples(store, 40)[16:]
    assert module.validated_at == [6] * 3 + [8] * 3 + [10] * 3


def test_a_time_limit_may_be_the_only_limit(store: Path, tmp_path: Path) -> None:
    module = fit(tmp_path, data(store), max_time={"seconds": 1}, max_epochs=None)
    assert module.global_step > 2
    assert module.samples == expected_samples(store, len(module.samples))


def test_serves_a_loop_without_a_trainer(store: Path) -> None:
    datamodule = data(store, max_tokens=640)
    datamodule.setup("fit")
    samples = [row for batch in datamodule.train_dataloader() for row in batch["input_ids"].tolist()]
    assert samples == expected_samples(store, 20)


@pytest.mark.parametrize("micro", [1, 3, 6])
def test_resumes_with_another_micro_batch_size(store: Path, tmp_path: Path, micro: int) -> None:
    settings = {"global_batch_size": {0: 6, 700: 12}, "max_tokens": 3000}
    checkpoint = interrupted(store, tmp_path, 8, **settings)
    module = fit(tmp_path, data(store, micro_batch_size=micro, **settings), ckpt_path=checkpoint)
    assert module.samples == expected_samples(store, 96)[12:]
    assert module.windows == [6 // micro] * 2 + [12 // micro] * 6


def test_resumes_with_another_number_of_data_ranks(store: Path, tmp_path: Path) -> None:
    checkpoint = interrupted(store, tmp_path, 6, global_batch_size=8, max_tokens=2000)
    trainer: Any = make_trainer(tmp_path)
    trainer.strategy.distributed_sampler_kwargs = {"num_replicas": 2, "rank": 1}
    module = Recorder()
    trainer.fit(module, datamodule=data(store, global_batch_size=8, max_tokens=2000), ckpt_path=checkpoint)
    rest = expected_samples(store, 64)[8:]
    assert module.samples == [sample for start in range(2, 56, 4) for sample in rest[start : start + 2]]
    assert module.windows == [2] * 7


def test_another_batch_size_takes_effect_after_the_samples_that_were_read(store: Path, tmp_path: Path) -> None:
    checkpoint = interrupted(store, tmp_path, 6, global_batch_size=4, max_tokens=2000)
    module = fit(tmp_path, data(store, global_batch_size=8, max_tokens=2000), ckpt_path=checkpoint)
    # 3 steps of 4 were done; 2000 tokens need 63 samples: 7 steps of 8 after the first 12
    assert module.samples == expected_samples(store, 68)[12:]
    assert module.windows == [4] * 7
    assert module.global_step == 10


def test_more_tokens_continue_a_finished_run(store: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "callbacks": [ModelCheckpoint(tmp_path, "end", every_n_train_steps=5)],
        "enable_checkpointing": True,
    }
    fit(tmp_path, data(store, max_tokens=640), **settings)
    again = fit(tmp_path, data(store, max_tokens=640), ckpt_path=tmp_path / "end.ckpt")
    assert again.samples == []
    assert again.global_step == 5
    more = fit(tmp_path, data(store, max_tokens=1280), ckpt_path=tmp_path / "end.ckpt")
    assert more.samples == expected_samples(store, 40)[20:]


def test_resumes_when_the_module_asks_for_estimated_stepping_batches(store: Path, tmp_path: Path) -> None:
    """Lightning#20550: asking makes the loader before the checkpoint is read."""

    class Cosine(Recorder):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            steps = int(self.trainer.estimated_stepping_batches)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    settings = {"global_batch_size": {0: 4, 300: 6}, "max_tokens": 2000}
    for step in (2, 3, 5):
        folder = tmp_path / str(step)
        callback = ModelCheckpoint(folder, "{step}", every_n_train_steps=step)
        fit(
            tmp_path, data(store, **settings), Cosine(), callbacks=[callback], enable_checkpointing=True, max_steps=step
        )
        module = fit(tmp_path, data(store, **settings), Cosine(), ckpt_path=folder / f"step={step}.ckpt")
        first = step * 4 if step <= 3 else 12 + (step - 3) * 6
        assert module.samples == expected_samples(store, 66)[first:]


def test_validation_interval_counts_over_all_phases(store: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"val_check_interval": 4, "limit_val_batches": 1}
    # the steps end after 2, 4, 6, 9, 12, 17, 22, 27 and 32 micro-batches
    module = fit(tmp_path, data(store, global_batch_size={0: 4, 300: 6, 700: 10}, max_tokens=2000), **settings)
    assert module.validated_at == [2, 3, 5, 5, 6, 7, 8, 9]
    assert fit(tmp_path, data(store, max_tokens=128), val_check_interval=100).validated_at == []


def test_validates_by_time_in_one_process(store: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"global_batch_size": {0: 4, 300: 6}, "max_tokens": 385}
    # no time at all is over after each micro-batch
    module = fit(tmp_path, data(store, **settings), val_check_interval=timedelta(0), limit_val_batches=1)
    assert module.validated_at == [0, 1, 1, 2, 2, 3, 3, 3, 4]
    assert fit(tmp_path, data(store, **settings), val_check_interval="00:00:15:00").validated_at == []
    trainer: Any = make_trainer(tmp_path, val_check_interval="00:00:15:00")
    trainer.strategy.world_size = 2
    with pytest.raises(ValueError, match=r"val_check_interval of 900 seconds does not go with 2 processes"):
        trainer.fit(Recorder(), datamodule=data(store, **settings))


def test_validates_at_the_same_steps_after_a_resume(store: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"val_check_interval": 4, "check_val_every_n_epoch": None, "limit_val_batches": 1}
    whole = fit(tmp_path, data(store, max_tokens=1280), **settings)
    assert whole.validated_at == [2, 4, 6, 8, 10]
    checkpoint = interrupted(store, tmp_path, 11, max_tokens=1280)
    assert fit(tmp_path, data(store, max_tokens=1280), ckpt_path=checkpoint, **settings).validated_at == [6, 8, 10]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 8}, r"seed 7, this run has 8"),
        ({"sequence_length": 16}, r"sequence_length 32, this run has 16"),
        ({"shuffle": False}, r"shuffle True, this run has False"),
    ],
)
def test_a_resumed_run_keeps_its_data(store: Path, tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    checkpoint = interrupted(store, tmp_path, 3, max_tokens=2000)
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, data(store, max_tokens=2000, **changed), ckpt_path=checkpoint)


class Renamed(TokenDataModule):
    """The same under another name, by which Lightning saves its state."""


@pytest.mark.parametrize(("before", "after"), [(TokenDataModule, Renamed), (Renamed, TokenDataModule)])
def test_resumes_through_another_class(
    store: Path, tmp_path: Path, before: type[TokenDataModule], after: type[TokenDataModule]
) -> None:
    def of(cls: type[TokenDataModule], **settings: Any) -> TokenDataModule:
        defaults = {"sequence_length": SEQUENCE, "micro_batch_size": 2, "global_batch_size": 4, "seed": 7}
        return cls(str(store), **{**defaults, **settings})

    trainer = make_trainer(tmp_path, max_steps=3)
    trainer.fit(Recorder(), datamodule=of(before))
    trainer.save_checkpoint(tmp_path / "step3.ckpt")
    module = fit(tmp_path, of(after, global_batch_size=8), ckpt_path=tmp_path / "step3.ckpt", max_steps=5)
    assert module.samples == expected_samples(store, 28)[12:]
    with pytest.raises(ValueError, match="seed 7, this run has 8"):
        fit(tmp_path, of(after, seed=8), ckpt_path=tmp_path / "step3.ckpt", max_steps=5)


def test_accumulation_that_contradicts_is_an_error(store: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"accumulate_grad_batches=3 contradicts(?s:.)*set it to 2"):
        fit(tmp_path, data(store, max_tokens=640), accumulate_grad_batches=3)
    with pytest.raises(ValueError, match="it changes with the batch size"):
        fit(tmp_path, data(store, global_batch_size={0: 4, 100: 8}, max_tokens=640), accumulate_grad_batches=2)
    assert fit(tmp_path, data(store, max_tokens=640), accumulate_grad_batches=2).windows == [2] * 5


def test_batch_size_that_does_not_divide_is_an_error(store: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"global_batch_size=7 is not a multiple.*use 6 or 8"):
        fit(tmp_path, data(store, global_batch_size=7, max_tokens=640))


@pytest.mark.parametrize("setting", [{"limit_train_batches": 3}, {"limit_train_batches": 0.5}, {"overfit_batches": 2}])
def test_settings_that_cut_the_data_are_refused(store: Path, tmp_path: Path, setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"trainer.{next(iter(setting))}"):
        fit(tmp_path, data(store, max_tokens=640), **setting)


def test_a_callback_that_sets_the_accumulation_is_refused(store: Path, tmp_path: Path) -> None:
    message = (
        r"GradientAccumulationScheduler\(\{2: 4, 0: 1\}\)(?s:.)*data\.global_batch_size: \{from this token: sequences\}"
    )
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, data(store, max_tokens=640), callbacks=[GradientAccumulationScheduler({2: 4})])


def test_fast_dev_run_runs_whole_optimizer_steps(store: Path, tmp_path: Path) -> None:
    module = fit(tmp_path, data(store, max_tokens=1e6), fast_dev_run=2)
    assert module.windows == [2, 2]
    assert len(module.validated) == 2


def test_trainer_can_fit_again_with_other_data(store: Path, tmp_path: Path) -> None:
    trainer, module = make_trainer(tmp_path), Recorder()
    trainer.fit(module, datamodule=data(store, max_tokens=640))
    assert (trainer.max_steps, trainer.accumulate_grad_batches) == (-1, 1)
    trainer.fit(module, datamodule=data(store, global_batch_size=4, max_tokens=1280))
    assert module.samples == expected_samples(store, 40)


@pytest.mark.parametrize(
    ("sizes", "windows"),
    # 640 tokens were read; 1920 take 40 samples more, the larger batch of the second case from sample 32 on
    [(8, [4] * 5), ({0: 4, 1000: 8}, [2] * 3 + [4] * 4)],
)
def test_a_second_fit_goes_on_after_the_samples_of_the_first(
    store: Path, tmp_path: Path, sizes: Any, windows: list[int]
) -> None:
    trainer, module = make_trainer(tmp_path), Recorder()
    trainer.fit(module, datamodule=data(store, max_tokens=640))
    second = data(store, global_batch_size=sizes, max_tokens=1920)
    trainer.fit(module, datamodule=second)
    assert module.samples == expected_samples(store, 20 + sum(windows) * 2)
    assert module.windows == [2] * 5 + windows
    assert second.samples_before(trainer.global_step) == 20 + sum(windows) * 2
    trainer.save_checkpoint(tmp_path / "second.ckpt")
    resumed = fit(tmp_path, data(store, max_tokens=2560), ckpt_path=tmp_path / "second.ckpt")
    assert resumed.samples == expected_samples(store, 80)[len(module.samples) :]


def test_a_second_fit_goes_on_after_a_first_that_was_stopped_inside_a_phase(store: Path, tmp_path: Path) -> None:
    def stop(trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == 3

    stopper = LambdaCallback(on_train_batch_end=stop)
    trainer: Any = make_trainer(tmp_path, callbacks=[stopper])
    module = Recorder()
    trainer.fit(module, datamodule=data(store, max_tokens=640))
    assert module.windows == [2] * 3
    trainer.callbacks.remove(stopper)
    trainer.should_stop = False  # Lightning leaves it as it was
    trainer.fit(module, datamodule=data(store, global_batch_size=8, max_tokens=1408))
    assert module.windows == [2] * 3 + [4] * 4
    assert module.samples == expected_samples(store, 12 + 32)


def test_a_second_fit_counts_tokens_where_samples_are_longer(store: Path, tmp_path: Path) -> None:
    trainer, module = make_trainer(tmp_path), Recorder()
    trainer.fit(module, datamodule=data(store, max_tokens=640))
    trainer.fit(module, datamodule=data(store, sequence_length=64, max_tokens=1280))
    # 20 samples of 32 tokens, then 10 of 64 in steps of 4
    assert [len(sample) for sample in module.samples] == [32] * 20 + [64] * 12


def test_a_second_fit_may_go_back_to_a_checkpoint(store: Path, tmp_path: Path) -> None:
    checkpoint = interrupted(store, tmp_path, 4, max_tokens=1280)
    trainer = make_trainer(tmp_path)
    trainer.fit(Recorder(), datamodule=data(store, max_tokens=640))
    for sizes, windows in ((4, [2] * 8), ({0: 4, 500: 8}, [2] * 2 + [4] * 3)):
        module = Recorder()
        trainer.fit(module, datamodule=data(store, global_batch_size=sizes, max_tokens=1280), ckpt_path=checkpoint)
        assert module.windows == windows
        assert module.samples == expected_samples(store, 40)[8:]


def test_validation_reads_the_split_in_store_order_with_the_last_partial_batch(store: Path, tmp_path: Path) -> None:
    blocks = TokenBlocks(store, "validation", SEQUENCE)
    assert len(blocks) % 4 != 0
    module = Recorder()
    make_trainer(tmp_path).validate(module, datamodule=data(store, micro_batch_size=4), verbose=False)
    assert [sample for batch in module.validated for sample in batch] == blocks.read(np.arange(len(blocks)))[
        :, :-1
    ].tolist()


def test_document_mask_reaches_the_batches(store: Path, tmp_path: Path) -> None:
    datamodule = data(store, document_mask=True)
    datamodule.setup("validate")
    (batch, *_), bos = datamodule.val_dataloader(), datamodule.manifest.bos_id
    begins = batch["input_ids"] == bos
    assert begins.any()
    assert ((batch["document_ids"].diff(dim=1) == 1) == begins[:, 1:]).all()
    assert "document_ids" not in next(iter(data_of(store).val_dataloader()))


def data_of(store: Path) -> TokenDataModule:
    datamodule = data(store)
    datamodule.setup("validate")
    return datamodule


def test_shape_of_the_model_is_checked(store: Path, tmp_path: Path) -> None:
    from types import SimpleNamespace

    def shaped(**values: Any) -> Recorder:
        module = Recorder()
        shape = {"vocab_size": 258, "max_position_embeddings": 64, "num_nextn_predict_layers": 1, **values}
        module.moe_shape = lambda: SimpleNamespace(**shape)  # type: ignore[assignment]
        return module

    for values, message in (
        ({"vocab_size": 64}, r"token ids up to 257(?s:.)*vocab_size is 64"),
        ({"max_position_embeddings": 16}, r"longer than the model's max_position_embeddings=16; use at most 16"),
        ({"num_nextn_predict_layers": 32}, r"num_nextn_predict_layers=32; use at least 33"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(tmp_path, data(store, max_tokens=640), shaped(**values))
    assert fit(tmp_path, data(store, max_tokens=640), shaped()).global_step == 5


def test_describe_and_fingerprint(store: Path) -> None:
    datamodule = data(store)
    assert str(store) in datamodule.describe()
    assert "tokenizer byte (258 ids)" in datamodule.describe()
    assert datamodule.fingerprint()["seed"] == 7
    assert len(datamodule.fingerprint()["store"]) == 64


def test_a_store_without_validation_warns_of_nothing_and_refuses_to_be_validated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    text = write_documents(tmp_path / "text.jsonl", 60)
    for fraction in (0.0, 0.02):
        folder = tmp_path / f"store{fraction}"
        prepare([str(text)], str(folder), "byte", validation_fraction=fraction, num_workers=1, progress_bar=False)
        trainer = make_trainer(tmp_path, max_steps=2, num_sanity_val_steps=2)
        datamodule, module = data(folder, sequence_length=1000), Recorder()
        caplog.clear()
        with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
            trainer.fit(module, datamodule=datamodule)
        assert (module.global_step, module.validated) == (2, [])
        assert trainer.limit_val_batches == 1.0
        said = [record.getMessage() for record in caplog.records if "validat" in record.getMessage()]
        few = datamodule.manifest.tokens["validation"]
        expected = f"{folder} has no validation sample of 1000 tokens ({few:,} validation tokens)"
        assert said == ([f"data.path: {expected}; nothing is validated"] if fraction else [])
        assert bool(few) is bool(fraction)
        with pytest.raises(ValueError, match=re.escape(f"data.path: {expected}")):
            trainer.validate(module, datamodule=datamodule)
    assert [str(warning.message) for warning in recwarn if "is zero" in str(warning.message)] == []


class OwnValidation(TokenDataModule):
    """Validates and tests with rows of its own."""

    def val_dataloader(self) -> Any:
        rows: Any = [{"input_ids": torch.full((8,), value)} for value in range(3)]
        return DataLoader(rows, batch_size=1)

    test_dataloader = val_dataloader


def test_a_loader_of_a_subclass_validates_where_the_store_has_nothing(tmp_path: Path) -> None:
    text = write_documents(tmp_path / "text.jsonl", 60)
    prepare([str(text)], str(tmp_path / "store"), "byte", validation_fraction=0.0, num_workers=1, progress_bar=False)
    datamodule = OwnValidation(str(tmp_path / "store"), sequence_length=100, micro_batch_size=2, global_batch_size=4)
    trainer, module = make_trainer(tmp_path, max_steps=2, val_check_interval=2), Recorder()
    trainer.fit(module, datamodule=datamodule)
    assert len(module.validated) == 6  # after each step of two batches
    trainer.validate(module, datamodule=datamodule)
    assert len(module.validated) == 9
