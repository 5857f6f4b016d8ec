"""Loss curves of a small model through both dispatchers on the same data, in ``expert_parallel.py``.

The data is a random Markov chain: from each token four others follow, so that the loss falls from log(V) to log(4).
"""

import argparse

import torch
from ep_dispatch import ALL_TO_ALL, DEEP_EP, why_no_deep_ep
from ep_processes import Worker
from ep_training import dispatcher_of, fit, free_memory
from gpu_ours import AfterStep
from gpu_shapes import Batch
from lightning.pytorch import seed_everything
from torch import Tensor

from lightning_moe import AdamW, DeepSeekV3, DeepSeekV3Config, ExpertParallelStrategy

NOISE = "all_to_all, rows in another order"
_FOLLOWERS = 4
CONFIG = DeepSeekV3Config.preset("tiny", vocab_size=256, hidden_size=512, num_nextn_predict_layers=0)
_ROWS, _SEQUENCE, _LEARNING_RATE = 8, 256, 1e-3


def measure_curves(worker: Worker, arguments: argparse.Namespace) -> None:
    """Trains three times: all-to-all, the same with the rows of each step in another order, and DeepEP.

    The second differs from the first in rounding only: each step has the same rows, on other processes.
    """
    rows = _ROWS if worker.on_cuda else 1
    data = _markov_chain(arguments.curve_steps, rows * worker.world_size, arguments.seed)
    systems = [(ALL_TO_ALL, ALL_TO_ALL), (NOISE, ALL_TO_ALL)]
    if why_no_deep_ep() is None:
        systems.append((DEEP_EP, DEEP_EP))
    for name, system in systems:
        seed_everything(arguments.seed, verbose=False)
        batches = _own_batches(worker, data, rows, shuffled=name == NOISE)
        losses: list[Tensor] = []
        fit(
            worker,
            DeepSeekV3(CONFIG, lambda params: AdamW(params, lr=_LEARNING_RATE)),
            ExpertParallelStrategy(
                expert_parallel_size=worker.world_size,
                dispatcher=dispatcher_of(system, arguments),
                compute_dtype="bfloat16",
            ),
            batches,
            [AfterStep(losses.append, rows * _SEQUENCE)],
            [],
        )
        means = worker.mean(torch.stack(losses).tolist())
        row = {"part": "curves", "system": name, "gpus": worker.world_size, "losses": means}
        worker.send(row, f"curves {name}: loss {means[0]:.4f} to {means[-1]:.4f} in {len(means)} steps")
        free_memory()


def verdict(curves: dict[str, list[float]]) -> str:
    """Says in a line whether the dispatchers' losses differ by more than rounding.

    Args:
        curves: Losses of each system's steps.
    """
    if not {ALL_TO_ALL, NOISE} <= set(curves):
        return "curves: not all systems have losses."
    noise = _difference(curves[ALL_TO_ALL], curves[NOISE])
    rounding = f"rows in another order: max {noise[0]:.2e}, mean {noise[1]:.2e}"
    if DEEP_EP not in curves:
        return f"curves: no DeepEP to compare with; all_to_all with {rounding}."
    largest, mean = _difference(curves[ALL_TO_ALL], curves[DEEP_EP])
    found = "equal within bf16 noise" if mean <= 2 * noise[1] else "NOT equal within bf16 noise"
    return f"curves: {found}; deep_ep - all_to_all: max {largest:.2e}, mean {mean:.2e}; {rounding}."


def _difference(one: list[float], other: list[float]) -> tuple[float, float]:
    differences = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return max(differences), sum(differences) / len(differences)


def _markov_chain(steps: int, rows: int, seed: int) -> Tensor:
    """Tokens ``(steps, rows, sequence + 1)``."""
    generator = torch.Generator().manual_seed(seed)
    followers = torch.randint(0, CONFIG.vocab_size, (CONFIG.vocab_size, _FOLLOWERS), generator=generator)
    tokens = torch.randint(0, CONFIG.vocab_size, (1, steps * rows), generator=generator)
    columns = [tokens[0]]
    for _ in range(_SEQUENCE):
        choice = torch.randint(0, _FOLLOWERS, (steps * rows,), generator=generator)
        columns.append(followers[columns[-1], choice])
    return torch.stack(columns, dim=1).view(steps, rows, _SEQUENCE + 1)


def _own_batches(worker: Worker, data: Tensor, rows: int, shuffled: bool) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    batches = []
    for step in data:
        order = torch.randperm(len(step), generator=generator) if shuffled else torch.arange(len(step))
        own = step[order[worker.rank * rows : (worker.rank + 1) * rows]].to(worker.device)
        batches.append((own[:, :-1].contiguous(), own[:, 1:].contiguous()))
    return batches
