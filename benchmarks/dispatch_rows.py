"""Rows and bytes that all-to-all dispatch moves per token: once per destination rank against once per expert.

    python benchmarks/dispatch_rows.py

The 671B router (256 experts, top-8 of 4 groups out of 8) routes random hidden states; rows that stay on their own rank
are not counted as moved.
"""

from typing import Any

import torch
from record import machine, save
from rich.console import Console
from rich.table import Table

from lightning_moe import DeepSeekV3Config
from lightning_moe.moe.router import Router

TOKENS = 16384


def measure() -> list[dict[str, Any]]:
    """Counts the rows for several sizes of the expert-parallel group."""
    torch.manual_seed(0)
    config = DeepSeekV3Config.preset("deepseek_v3_671b")
    router = Router(
        config.hidden_size,
        config.n_routed_experts,
        config.num_experts_per_tok,
        n_group=config.n_group,
        topk_group=config.topk_group,
        routed_scaling_factor=config.routed_scaling_factor,
    )
    with torch.no_grad():
        indices = router(torch.randn(TOKENS, config.hidden_size)).indices_TK
    rows = []
    for size in (8, 32, 64):
        destination = indices // (config.n_routed_experts // size)
        source = (torch.arange(TOKENS) % size)[:, None]
        goes = torch.zeros(TOKENS, size, dtype=torch.bool).scatter_(1, destination, True)
        once_per_rank = goes.sum(1) - goes.gather(1, source).squeeze(1).long()
        once_per_expert = (destination != source).sum(1)
        per_row = config.hidden_size * 2
        rows.append(
            {
                "expert_parallel_size": size,
                "rows_per_rank": once_per_rank.double().mean().item(),
                "rows_per_expert": once_per_expert.double().mean().item(),
                "bytes_per_rank": once_per_rank.double().mean().item() * per_row,
                "bytes_per_expert": once_per_expert.double().mean().item() * per_row,
            }
        )
    return rows


def main() -> None:
    """Prints the table and writes the record."""
    rows = measure()
    table = Table(
        title="Moved per token and dispatch, hidden size 7168, bfloat16, top-8 of 256 experts in 4 of 8 groups"
    )
    for column in ("expert-parallel size", "rows, once per rank", "rows, once per expert", "KiB", "KiB", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row["expert_parallel_size"]),
            f"{row['rows_per_rank']:.2f}",
            f"{row['rows_per_expert']:.2f}",
            f"{row['bytes_per_rank'] / 1024:.1f}",
            f"{row['bytes_per_expert'] / 1024:.1f}",
            f"{row['bytes_per_rank'] / row['bytes_per_expert']:.2f}",
        )
    console = Console()
    console.print(table)
    path = save("dispatch_rows", {"machine": machine(torch.get_num_threads()), "tokens": TOKENS, "rows": rows})
    console.print(f"Record: benchmarks/results/{path.name}")


if __name__ == "__main__":
    main()
