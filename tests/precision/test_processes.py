"""Low-precision multiplications over expert-parallel processes with FSDP2: what one process computes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch.utils.data import DataLoader

from lightning_moe import AdamW, DeepSeekV3, DeepSeekV3Config, Float8Precision, MXFP8Precision
from lightning_moe.strategies.expert_parallel import ExpertParallelStrategy
from tests.models.test_module import make_trainer
from tests.models.tiny import tiny_config
from tests.strategies import processes
from tests.strategies.processes import save, whole
from tests.strategies.training import GradNorms, Rows

CONFIG = tiny_config(vocab_size=64, num_hidden_layers=2, num_nextn_predict_layers=1, q_lora_rank=64)


def fit(
    world_size: int,
    plugin: Any,
    *,
    steps: int,
    ckpt_path: Path | None = None,
    optimizer: Any = None,
    config: DeepSeekV3Config = CONFIG,
    **layout: Any,
) -> tuple[Any, DeepSeekV3, dict[int, float]]:
    seed_everything(11, verbose=False)
    norms = GradNorms()
    module = DeepSeekV3(config, optimizer or (lambda params: AdamW(params, lr=1e-2)))
    trainer = make_trainer(
        devices=world_size,
        strategy=ExpertParallelStrategy(**layout),
        plugins=[plugin],
        max_steps=steps,
        max_epochs=-1,
        accumulate_grad_batches=4 // world_size,
        use_distributed_sampler=False,
        callbacks=[norms],
    )
    trainer.fit(module, DataLoader(Rows(world_size, 4), batch_size=1), ckpt_path=ckpt_path)
    return trainer, module, norms.by_step


def layouts(world_size: int, folder: Path) -> None:
    # In float32 and with gradients of weights in high precision, nothing depends on which rows share a process.
    plugin = MXFP8Precision(wgrad_in_high_precision=True)
    sizes: list[dict[str, Any]] = (
        [{}] if world_size == 1 else [{"expert_parallel_size": 2}, {"expert_parallel_size": 1}]
    )
    for number, size in enumerate(sizes):
        sgd = lambda params: torch.optim.SGD(params, lr=0.5)
        _, module, norms = fit(world_size, plugin, steps=1, optimizer=sgd, compute_dtype="float32", **size)
        classes = {type(m).__name__ for m in module.built_model.modules()}
        save(folder / f"{world_size}-{number}.pt", (whole(module.state_dict()), norms, sorted(classes)))


def test_gradients_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    processes.run(1, layouts, 1, tmp_path)
    processes.run(2, layouts, 2, tmp_path)
    expected, expected_norms, _ = torch.load(tmp_path / "1-0.pt")
    for number in (0, 1):
        weights, norms, classes = torch.load(tmp_path / f"2-{number}.pt")
        assert "FSDPBlock" in classes
        assert norms == pytest.approx(expected_norms, rel=1e-3)
        assert list(weights) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-5, msg=name)


def resumed(folder: Path) -> None:
    trainer, module, _ = fit(2, MXFP8Precision(), steps=4, expert_parallel_size=2)
    save(folder / "straight.pt", whole(module.state_dict()))
    trainer, module, _ = fit(2, MXFP8Precision(), steps=2, expert_parallel_size=2)
    trainer.save_checkpoint(folder / "half.ckpt")
    _, module, _ = fit(2, MXFP8Precision(), steps=4, ckpt_path=folder / "half.ckpt", expert_parallel_size=2)
    save(folder / "resumed.pt", whole(module.state_dict()))
    _, module, _ = fit(2, Float8Precision(), steps=4, ckpt_path=folder / "half.ckpt", expert_parallel_size=1)
    save(folder / "resharded.pt", whole(module.state_dict()))


def test_resume_and_reshard(tmp_path: Path) -> None:
    processes.run(2, resumed, tmp_path)
    straight, same, other = (torch.load(tmp_path / f"{name}.pt") for name in ("straight", "resumed", "resharded"))
    start = DeepSeekV3.load_from_checkpoint(tmp_path / "half.ckpt", config=CONFIG).state_dict()
    for name, value in straight.items():
        assert torch.equal(same[name], value), name
        if value.is_floating_point() and value.dim() > 1:
            # The same moments and data in another layout and recipe: a move of much the same size and direction.
            moves = torch.stack([(value - start[name]).flatten(), (other[name] - start[name]).flatten()])
            assert torch.corrcoef(moves)[0, 1] > 0.9, name
    (checkpoint,) = [torch.load(tmp_path / "half.ckpt" / "meta.pt", weights_only=True)]
    assert checkpoint["MXFP8Precision"]["emulated"] is True


def compiled(folder: Path) -> None:
    from torch._dynamo.utils import counters

    smaller = replace(CONFIG, num_hidden_layers=2, num_nextn_predict_layers=0, n_shared_experts=0)
    seen = []

    class Counted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            seen.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
            return result

    layout: Any = {"expert_parallel_size": 2, "activation_checkpointing": "selective", "config": smaller}
    sgd = lambda params: Counted(params, lr=0.5)
    _, _, norms = fit(2, MXFP8Precision(), steps=8, optimizer=sgd, compile=True, **layout)
    _, _, eager = fit(2, MXFP8Precision(), steps=8, optimizer=sgd, **layout)
    save(folder / "compiled.pt", (seen[:8], norms, eager))


def test_compiled_regions_have_no_breaks_and_do_not_recompile(tmp_path: Path) -> None:
    processes.run(2, compiled, tmp_path)
    seen, norms, eager = torch.load(tmp_path / "compiled.pt")
    graphs = [graphs for graphs, _ in seen]
    assert graphs[0] > 0
    assert [breaks for _, breaks in seen] == [0] * 8
    assert graphs[3:] == [graphs[3]] * 5  # routed rows change in each step
    assert list(norms.values())[:3] == pytest.approx(list(eager.values())[:3], rel=0.05)
