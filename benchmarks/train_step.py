"""Training step (forward, backward, AdamW) of our DeepSeek-V3 and of transformers' on one batch, on CPU.

Both have the same architecture, weights, batch, optimizer and threads; no multi-token prediction and no balance loss.
A third row is our model as it trains, with both. Steps are interleaved, so that another load on the machine meets all;
fastest and median step are printed, and the ratio of the fastest. Peak memory is measured in a process per system.

    python benchmarks/train_step.py            (needs the extra "hf")
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from record import machine, peak_memory, resident_memory, save
from rich.console import Console
from rich.table import Table

from lightning_moe.convert import from_hf_state_dict, to_hf_state_dict
from lightning_moe.models.deepseek_v3.config import DeepSeekV3Config
from lightning_moe.models.deepseek_v3.model import DeepSeekV3Model

OURS, THEIRS, OURS_FULL = "lightning-moe", "transformers", "lightning-moe, MTP and balance loss"
SYSTEMS = (OURS, THEIRS, OURS_FULL)
Step = Callable[[], float]


def config_of(arguments: argparse.Namespace) -> DeepSeekV3Config:
    """The preset ``tiny`` without multi-token prediction."""
    return DeepSeekV3Config.preset("tiny", num_nextn_predict_layers=0, max_position_embeddings=arguments.sequence)


def make_step(system: str, arguments: argparse.Namespace) -> Step:
    """Builds a model and its optimizer, and returns a function that trains one step and returns the loss."""
    config = config_of(arguments)
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(0, config.vocab_size, (arguments.batch, arguments.sequence), generator=generator)
    model: Any
    if system == THEIRS:
        model = _theirs(config)

        def loss_of() -> torch.Tensor:
            return model(input_ids=input_ids, labels=input_ids, use_cache=False).loss  # it shifts the labels itself

    else:
        if system == OURS_FULL:
            config = replace(config, num_nextn_predict_layers=1)
        model = DeepSeekV3Model(config)
        model.init_weights(0)
        labels = input_ids.roll(-1, dims=1)
        labels[:, -1] = -100

        def loss_of() -> torch.Tensor:
            full = system == OURS_FULL
            output = model(input_ids, labels, balance=full)
            loss = output.loss
            if full:
                loss = loss + 0.3 * output.mtp_losses[0] + 1e-4 * output.balance_loss
            return loss / output.num_tokens

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def _theirs(config: DeepSeekV3Config) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    same = asdict(config)
    for name in ("mtp_input", "rope_scaling", "scoring_func", "topk_method"):
        del same[name]
    same.update(num_key_value_heads=config.num_attention_heads)
    hf_config = transformers.DeepseekV3Config(**same)
    model = transformers.DeepseekV3ForCausalLM(hf_config).train()
    ours = DeepSeekV3Model(config)
    ours.init_weights(0)
    state = to_hf_state_dict(ours.state_dict())
    stacked = {name: t for name, t in ours.state_dict().items() if ".mlp.experts." in name}
    state = {name: t for name, t in state.items() if ".mlp.experts." not in name}
    state.update({f"model.{name}": t for name, t in stacked.items()})
    model.load_state_dict(state)
    check = from_hf_state_dict(model.state_dict(), config)
    assert all(torch.equal(check[name], t) for name, t in ours.state_dict().items())
    return model


def measure_time(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Times interleaved repeats; the first step of each system is not timed."""
    steps = {system: make_step(system, arguments) for system in SYSTEMS}
    first_losses = {system: step() for system, step in steps.items()}
    seconds: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    for _ in range(arguments.repeats):
        for system, step in steps.items():
            start = time.perf_counter()
            for _ in range(arguments.steps):
                step()
            seconds[system].append((time.perf_counter() - start) / arguments.steps)
    tokens = arguments.batch * arguments.sequence
    return {
        system: {
            "first_loss": first_losses[system],
            "seconds_per_step": seconds[system],
            "tokens_per_second": tokens / min(seconds[system]),
            "median_tokens_per_second": tokens / statistics.median(seconds[system]),
        }
        for system in SYSTEMS
    }


def measure_memory(system: str, arguments: argparse.Namespace) -> int:
    """Peak resident memory of building and training, over that after the imports, in a process of its own."""
    command = [sys.executable, __file__, "--memory-of", system]
    for name in ("batch", "sequence", "threads"):
        command += [f"--{name}", str(getattr(arguments, name))]
    return int(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["peak"])


def _print_memory_of_this_process(arguments: argparse.Namespace) -> None:

    before = resident_memory()
    step = make_step(arguments.memory_of, arguments)
    for _ in range(3):
        step()
    print(json.dumps({"peak": peak_memory() - before}))


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--sequence", type=int, default=256, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=1, help="steps per repeat")
    parser.add_argument("--repeats", type=int, default=20, help="interleaved repeats")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--memory-of", choices=SYSTEMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.memory_of:
        _print_memory_of_this_process(arguments)
        return

    results = measure_time(arguments)
    for system in SYSTEMS:
        results[system]["peak_memory_bytes"] = measure_memory(system, arguments)
    title = (
        f"Training step on CPU, {arguments.threads} threads, float32, preset tiny, "
        f"{arguments.batch} x {arguments.sequence} tokens"
    )
    table = Table(title=title, caption="tokens/s: fastest step; ratio: to transformers; peak: over the imports")
    for column in ("", "tokens/s", "ratio", "median tokens/s", "peak MiB", "first loss"):
        table.add_column(column, justify="left" if not column else "right")
    for system, result in results.items():
        ratio = result["tokens_per_second"] / results[THEIRS]["tokens_per_second"]
        result["ratio_to_transformers"] = ratio
        table.add_row(
            system,
            f"{result['tokens_per_second']:,.0f}",
            f"{ratio:.2f}x",
            f"{result['median_tokens_per_second']:,.0f}",
            f"{result['peak_memory_bytes'] / 2**20:,.0f}",
            f"{result['first_loss']:.5f}",
        )
    console = Console(width=120)
    console.print(table)
    settings = {name: value for name, value in vars(arguments).items() if name != "memory_of"}
    path = save("train_step", {"machine": machine(arguments.threads), "settings": settings, "results": results})
    console.print(f"Record: {path.relative_to(path.parents[2])}")


if __name__ == "__main__":
    main()
