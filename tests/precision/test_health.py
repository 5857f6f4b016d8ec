"""Precision health sees what quantisation does to a run's own values, and leaves the run as it was."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_moe import BlockwiseFP8Precision, DeepSeekV3, ExpertParallelStrategy, Float8Precision, MXFP8Precision
from lightning_moe.precision.health import PrecisionHealth
from lightning_moe.precision.recipes import fp8_rowwise, fp8_tensorwise, mxfp8
from tests.models.test_module import make_trainer
from tests.models.tiny import tiny_config
from tests.strategies import processes
from tests.strategies.processes import save
from tests.strategies.training import Rows

CONFIG = tiny_config(vocab_size=64, num_hidden_layers=2, num_nextn_predict_layers=0, q_lora_rank=64)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)


def run(
    health: PrecisionHealth | None, plugin: Any = None, steps: int = 4, module: Any = None, **kwargs: Any
) -> DeepSeekV3:
    torch.manual_seed(0)
    module = module or DeepSeekV3(CONFIG, sgd)
    trainer = make_trainer(
        plugins=[plugin or MXFP8Precision()],
        max_steps=steps,
        callbacks=[] if health is None else [health],
        use_distributed_sampler=False,
        **kwargs,
    )
    trainer.fit(module, DataLoader(Rows(1, 4), batch_size=2))
    return module


def note(operand: Tensor, recipe: Any, rows: int = 512) -> Any:
    from lightning_moe.precision import health as module

    callback = PrecisionHealth(rows=rows)
    callback._note("x", operand, recipe.activation_tile, recipe, "e4m3")
    return module._health(*callback._sums["x"].tolist())


def test_values_by_hand() -> None:
    x = torch.ones(4, 64)
    x[:, 0] = 448.0
    x[:, 1] = 2.0**-11  # half of the smallest value beside 448, a tie, which goes to zero
    health = note(x, mxfp8())
    assert health.underflow == pytest.approx(1 / 64)
    assert health.sqnr == pytest.approx(10 * math.log10((448**2 + 62) / 2.0**-22), rel=1e-3)
    assert (health.saturation, health.nonfinite) == (0.0, 0.0)
    assert health.log2_amax == pytest.approx((math.log2(448) + 0) / 2)
    assert note(torch.full((2, 32), 1.9), mxfp8(scale="floor")).saturation == 1.0
    assert note(torch.full((2, 32), 1.9), mxfp8()).saturation == 0.0
    assert note(torch.zeros(2, 32), mxfp8()).sqnr == math.inf
    x[1, 3] = math.nan
    assert note(x, mxfp8()).nonfinite == 1


def test_an_outlier_shows_as_underflow_under_one_scale() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 1e7
    assert note(x, fp8_tensorwise()).underflow > 0.99
    assert note(x, fp8_rowwise()).underflow < 0.05


def test_rows_are_sampled_from_all_over() -> None:
    x = torch.ones(1000, 32)
    x[500:] = 1e-3
    assert -6 < note(x, mxfp8(), rows=10).log2_amax < -4
    assert note(x, mxfp8(), rows=10).sqnr > 20


def test_the_last_rows_are_looked_at_too() -> None:
    for count in (1000, 1023, 1535):
        x = torch.ones(count, 32)
        x[-4:] = math.nan
        assert note(x, mxfp8(), rows=512).nonfinite >= 1, count
        x[-4:], x[-1, 0] = 1.0, 1e7
        # The one scale is that of all rows, whether they are looked at or not.
        assert note(x, fp8_tensorwise(), rows=10).underflow > 0.99, count
        assert note(x, fp8_rowwise(), rows=10).underflow < 0.05, count


@pytest.mark.parametrize("plugin", [MXFP8Precision, Float8Precision, BlockwiseFP8Precision])
def test_every_converted_module_is_measured_and_nothing_else_changes(plugin: Any, tmp_path: Path) -> None:
    health = PrecisionHealth(every_n_steps=2)
    module = run(health, plugin(), logger=CSVLogger(tmp_path, name="", version=""), accumulate_grad_batches=2)
    places = {name.rpartition("/")[0] for name in health.latest}
    assert "layers.1.mlp.experts.gate_up_proj" in places
    assert "layers.0.self_attn.o_proj" in places
    assert len(health.latest) == 3 * len(places)
    assert len(places) == 2 * 4 + 2 + 2 + 2  # attention, dense, experts, shared
    assert all(20 < value.sqnr < 45 for value in health.latest.values())
    header = (tmp_path / "metrics.csv").read_text().splitlines()[0]
    for metric in ("precision/gradient_sqnr_min", "precision_modules/layers.0.self_attn.o_proj/weight/underflow"):
        assert metric in header
    expected = run(None, plugin(), accumulate_grad_batches=2)
    for name, value in expected.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name
    assert not any("grouped_mm" in vars(m) or "forward" in vars(m) for m in module.modules() if is_converted(m))


def is_converted(module: nn.Module) -> bool:
    return hasattr(type(module), "_recipe")


def test_recomputation_is_not_measured_twice_and_compilation_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    graphs = []

    class Counted(DeepSeekV3):
        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            graphs.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))

    torch._dynamo.reset()
    counters.clear()
    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: original(function, backend="aot_eager"))
    strategy = ExpertParallelStrategy(compile=True, activation_checkpointing="selective")
    health = PrecisionHealth(every_n_steps=4)
    run(health, steps=8, module=Counted(CONFIG, sgd), strategy=strategy)
    assert len(health.latest) == 3 * 14
    assert graphs[2][0] > 0
    assert graphs[2:] == [graphs[2]] * 6
    assert graphs[-1][1] == 0


class Broken(DeepSeekV3):
    """Loses one weight before the second step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            with torch.no_grad():
                weight = self.built_model.get_submodule("layers.0.mlp.down_proj")._parameters["weight"]
                assert weight is not None
                weight[0, 0] = math.nan


def test_what_is_not_finite_is_named() -> None:
    with pytest.warns(UserWarning, match="layers.0.mlp.down_proj/weight has 1 values that are not finite"):
        run(PrecisionHealth(every_n_steps=2), steps=2, module=Broken(CONFIG, sgd))


@pytest.mark.parametrize(
    ("bounds", "message"),
    [({"min_sqnr": 60.0}, "below min_sqnr 60"), ({"max_underflow": -1.0}, "to zero, above max_underflow")],
)
def test_bounds_warn_or_stop(bounds: Any, message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        module = run(PrecisionHealth(every_n_steps=2, action="stop", **bounds), steps=6)
    assert module.trainer.global_step == 2
    with pytest.warns(UserWarning, match="Training goes on"):
        module = run(PrecisionHealth(every_n_steps=2, **bounds), steps=4)
    assert module.trainer.global_step == 4


def test_drift_counts_from_the_first_measurement_of_the_run() -> None:
    health = PrecisionHealth(every_n_steps=1, max_drift=0.5)
    run(health, steps=1)
    again = PrecisionHealth(every_n_steps=1, max_drift=0.5)
    again.load_state_dict(health.state_dict())
    again.first_log2_amax = {name: value - 3 for name, value in again.first_log2_amax.items()}
    with pytest.warns(UserWarning, match=r"has drifted by 2\*\*\+3.0, above max_drift 0.5"):
        run(again, steps=1)


def test_drift_is_from_the_first_magnitude_there_is() -> None:
    health = PrecisionHealth(max_drift=0.5)
    for operand, drift in ((0.0, 0.0), (math.inf, 0.0), (2.0, 0.0), (16.0, 3.0), (0.0, 0.0)):
        health.latest = {"x": note(torch.full((2, 32), operand), mxfp8())}
        health._remember_first()
        assert health._drift("x") == drift
    assert health.first_log2_amax == {"x": 1.0}


def on_two(folder: Path) -> None:
    health = PrecisionHealth(every_n_steps=2, min_sqnr=60.0, action="stop")
    module = DeepSeekV3(CONFIG, sgd)
    torch.manual_seed(0)
    trainer = make_trainer(
        devices=2,
        strategy=ExpertParallelStrategy(expert_parallel_size=2),
        plugins=[MXFP8Precision()],
        max_steps=6,
        callbacks=[health],
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(Rows(2, 4), batch_size=2))
    seen = {name: (value.sqnr, value.underflow) for name, value in health.latest.items()}
    gathered: list[Any] = [None, None]
    torch.distributed.all_gather_object(gathered, (seen, trainer.global_step))
    save(folder / "seen.pt", gathered)


def test_processes_decide_alike(tmp_path: Path) -> None:
    processes.run(2, on_two, tmp_path)
    first, second = torch.load(tmp_path / "seen.pt")
    assert first == second
    assert first[1] == 2
    assert len(first[0]) == 3 * 14


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_steps": 0}, "at least 1"),
        ({"rows": 0}, "rows is 0, but it must be at least 1"),
        ({"action": "abort"}, "must be warn or stop"),
    ],
)
def test_wrong_values(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrecisionHealth(**arguments)
