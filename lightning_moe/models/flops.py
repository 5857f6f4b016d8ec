"""Counts the floating-point operations of training, by which speed is compared with what a device can do.

The rule: a multiplication and an addition are two operations, and backward costs twice forward. So each element of a
matrix that a token is multiplied by costs 6, each logit of attention 6 for each dimension of queries and of values, and
causal attention has half of the logits. Recomputation is not counted: it is a cost, not work.
"""

from torch import nn

from lightning_moe.moe.layer import MoELayer


def active_matmul_parameters(module: nn.Module) -> int:
    """Elements of the matrices that one token is multiplied by, each once.

    Counted are the parameters of two and more dimensions: projections, gates, head, and of the routed experts those
    that a token takes. An embedding is looked up, not multiplied, and is left out.

    Args:
        module: A model or a part of it, on any device, sharded or not.
    """
    looked_up = {p for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    matrices = sum(p.numel() for p in module.parameters() if p.ndim >= 2 and p not in looked_up)
    return matrices - sum(idle_parameters(layer) for layer in module.modules() if isinstance(layer, MoELayer))


def idle_parameters(layer: MoELayer) -> int:
    """Parameters of the routed experts that one token does not take."""
    routed = sum(p.numel() for p in layer.experts.parameters())
    return routed - routed * layer.router.num_experts_per_tok // layer.router.n_routed_experts


def causal_attention_flops(num_heads: int, query_dim: int, value_dim: int, sequence_length: int) -> float:
    """Operations per token of one causal attention over whole rows, forward and backward.

    Args:
        num_heads: Heads.
        query_dim: Dimensions of a head's queries and keys.
        value_dim: Dimensions of a head's values.
        sequence_length: Tokens of a row. Documents packed into it see less, and are counted as if they did not.
    """
    return 6.0 * num_heads * (query_dim + value_dim) * sequence_length / 2
