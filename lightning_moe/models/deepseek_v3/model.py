"""DeepSeek-V3 on one device.

Multi-head latent attention, DeepSeekMoE with group-limited routing and a selection bias, multi-token prediction, and
chunked losses computed inside the forward pass.

Shapes: ``B`` batch, ``S`` sequence, ``D`` hidden size, ``V`` vocabulary.
"""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from lightning_moe.losses.linear_cross_entropy import IGNORE_INDEX
from lightning_moe.losses.mtp import shift_sequence, shift_valid, within_documents
from lightning_moe.metrics.mtp_accuracy import count_mtp_hits
from lightning_moe.models.base import MoEModel, MoEModelOutput
from lightning_moe.models.deepseek_v3.attention_backends import AttentionBackend, plan_attention
from lightning_moe.models.deepseek_v3.block import Block
from lightning_moe.models.deepseek_v3.config import DeepSeekV3Config
from lightning_moe.models.deepseek_v3.mtp import MultiTokenPrediction
from lightning_moe.models.deepseek_v3.rope import rotation_of
from lightning_moe.models.flops import active_matmul_parameters, causal_attention_flops, idle_parameters
from lightning_moe.models.head import Head
from lightning_moe.moe.layer import RouterStats


class Embedding(nn.Embedding):
    """A token embedding that starts from N(0, ``initializer_range``)."""

    def __init__(self, vocab_size: int, hidden_size: int, initializer_range: float) -> None:
        self.initializer_range = initializer_range
        super().__init__(vocab_size, hidden_size)

    def reset_parameters(self) -> None:
        """Draws the weight anew."""
        nn.init.normal_(self.weight, std=self.initializer_range)


class DeepSeekV3Model(MoEModel):
    """The DeepSeek-V3 language model with its multi-token-prediction depths.

    Blocks keep their global index in their names: ``layers.0`` …, and ``mtp_layers.{num_hidden_layers}`` … for the
    multi-token-prediction depths.

    Args:
        config: The architecture.
        attention_backend: The attention kernel; ``"auto"`` for the fastest that takes what comes.
    """

    def __init__(self, config: DeepSeekV3Config, attention_backend: AttentionBackend = "auto") -> None:
        super().__init__()
        self.config = config
        self.attention_backend: AttentionBackend = attention_backend
        depth = config.num_hidden_layers
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, config.initializer_range)
        self.layers = nn.ModuleDict({str(i): Block(config, i) for i in range(depth)})
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mtp_layers = nn.ModuleDict(
            {str(i): MultiTokenPrediction(config, i) for i in range(depth, depth + config.num_nextn_predict_layers)}
        )
        self.lm_head = Head(config.hidden_size, config.vocab_size, config.initializer_range)

    def blocks(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields every block, first those of the main model, then those of multi-token prediction."""
        for index, block in self.layers.items():
            yield f"layers.{index}", block
        for index, depth in self.mtp_layers.items():
            yield f"mtp_layers.{index}.block", depth.get_submodule("block")

    def parameter_counts(self) -> dict[str, int]:
        """Counts parameters without multi-token prediction, which is counted apart; see the base class."""
        mtp = sum(p.numel() for p in self.mtp_layers.parameters())
        main = sum(p.numel() for p in self.parameters()) - mtp
        idle = sum(idle_parameters(layer) for name, layer in self.moe_layers() if name.startswith("layers."))
        return {"total": main, "activated": main - idle, "mtp": mtp}

    def flops_per_token(self, sequence_length: int, *, mtp: bool = True) -> float:
        """Counts matrices, the head once for each prediction, and attention at its own widths; see the base class."""
        config, depths = self.config, len(self.mtp_layers)
        attention = causal_attention_flops(
            config.num_attention_heads, config.qk_head_dim, config.v_head_dim, sequence_length
        )
        if not mtp:
            matrices = active_matmul_parameters(self) - active_matmul_parameters(self.mtp_layers)
            return 6.0 * matrices + len(self.layers) * attention
        matrices = active_matmul_parameters(self) + depths * active_matmul_parameters(self.lm_head)
        return 6.0 * matrices + (len(self.layers) + depths) * attention

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        document_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        valid: Tensor | None = None,
        mtp: bool = True,
        balance: bool = True,
        predictions: bool = False,
    ) -> MoEModelOutput:
        """Runs the model to sums of losses, or to logits when there are no labels; see the base class.

        Args:
            input_ids: See the base class, as for all that is not named here.
            labels: See the base class.
            document_ids: See the base class.
            position_ids: See the base class.
            valid: See the base class.
            mtp: Whether to run the multi-token-prediction depths.
            balance: See the base class.
            predictions: Whether to count correct and accepted predictions of the depths.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        embedded_BSD = self.embed_tokens(input_ids)
        accurate = torch.promote_types(embedded_BSD.dtype, torch.float32)
        rotation = rotation_of(self.config, position_ids, accurate)
        mask = plan_attention(self.config, embedded_BSD, document_ids, self.attention_backend)
        statistics: list[RouterStats] = []

        hidden_BSD = embedded_BSD
        for block in self.layers.values():
            hidden_BSD, stats = block(
                hidden_BSD, rotation, mask, valid_BS=valid, document_ids_BS=document_ids, balance=balance
            )
            if stats is not None:
                statistics.append(stats)
        normed_BSD = self.norm(hidden_BSD)

        # What each multi-token-prediction depth hands to the head, with its shift and where it is valid.
        ahead: list[tuple[Tensor, int, Tensor]] = []
        previous_BSD = normed_BSD if self.config.mtp_input == "post_norm" else hidden_BSD
        for shift, depth in enumerate(self.mtp_layers.values() if mtp else (), start=1):
            ahead_valid = shift_valid(document_ids, valid, input_ids, shift)
            previous_BSD, stats = depth(
                shift_sequence(embedded_BSD, shift, ahead_valid, 0.0),
                previous_BSD,
                rotation,
                mask,
                valid_BS=ahead_valid,
                document_ids_BS=document_ids,
                balance=balance,
            )
            if stats is not None:
                statistics.append(stats)
            ahead.append((previous_BSD, shift, ahead_valid))

        balance_sums = [stats.balance_sum for stats in statistics if stats.balance_sum is not None]
        output = MoEModelOutput(
            balance_loss=torch.stack(balance_sums).sum() if balance_sums else None,
            expert_counts=tuple(stats.counts_E for stats in statistics),
        )
        if labels is None:
            return output._replace(
                logits=self.lm_head(normed_BSD), mtp_logits=tuple(self.lm_head(hidden) for hidden, _, _ in ahead)
            )
        if document_ids is not None:
            labels = within_documents(labels, document_ids)
        targets = [shift_sequence(labels, shift, ahead_valid, IGNORE_INDEX) for _, shift, ahead_valid in ahead]
        main, *depths = self.lm_head.cross_entropies(
            [hidden.flatten(0, 1) for hidden in (normed_BSD, *(hidden for hidden, _, _ in ahead))],
            [target.flatten() for target in (labels, *targets)],
            predictions=predictions,
        )
        output = output._replace(
            loss=main.loss,
            num_tokens=main.num_tokens,
            mtp_losses=tuple(depth.loss for depth in depths),
            mtp_num_tokens=tuple(depth.num_tokens for depth in depths),
        )
        if not predictions or not depths:
            return output
        chosen = [cast(Tensor, result.predictions_T).view_as(labels) for result in (main, *depths)]
        correct, _, accepted = count_mtp_hits(chosen[0], torch.stack(chosen[1:]), torch.stack(targets))
        return output._replace(mtp_correct=correct, mtp_accepted=accepted)
