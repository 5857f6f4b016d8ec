"""DeepSeek-V3 as a LightningModule."""

from dataclasses import asdict
from typing import Any, Literal

import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities import rank_zero_info

from lightning_moe.models.assembly import compute_dtype_of
from lightning_moe.models.base import MoEModel
from lightning_moe.models.deepseek_v3.attention_backends import (
    AttentionBackend,
    AttentionCase,
    attention_kernels,
    check_backend_name,
)
from lightning_moe.models.deepseek_v3.config import DeepSeekV3Config, with_yarn
from lightning_moe.models.deepseek_v3.model import DeepSeekV3Model
from lightning_moe.models.module import MoELightningModule, MoEShape
from lightning_moe.moe.balance import Balancing
from lightning_moe.optim.adamw import AdamW
from lightning_moe.optim.schedules import TokenSchedule


class DeepSeekV3(MoELightningModule):
    """Trains a DeepSeek-V3 model with multi-token prediction.

    Args:
        config: The architecture, in the field names of the Hugging Face ``config.json``.
        optimizer: Makes the optimizer from the parameters.
        schedule: Learning-rate schedule in tokens; ``None`` keeps the optimizer's learning rate.
        balancing: How the load of the experts is kept even.
        mtp_loss_weight: Weight lambda of the multi-token-prediction loss: ``{from this token: value}`` or one number.
        nonfinite_gradients: ``"skip"`` leaves out a step whose gradients are not finite, ``"stop"`` also ends training.
        attention_backend: The attention kernel. ``"auto"`` takes the fastest, by measurement, of those that can compute
            this model here; a kernel by name is taken or refused before training.
    """

    def __init__(
        self,
        config: DeepSeekV3Config = DeepSeekV3Config(),  # noqa: B008 - frozen
        optimizer: OptimizerCallable = lambda params: AdamW(params),
        schedule: TokenSchedule | None = None,
        balancing: Balancing = Balancing(),  # noqa: B008 - frozen
        mtp_loss_weight: dict[float, float] | float = {0: 0.3, 10e12: 0.1},  # noqa: B006 - never changed
        nonfinite_gradients: Literal["skip", "stop"] = "skip",
        attention_backend: AttentionBackend = "auto",
    ) -> None:
        super().__init__(optimizer, schedule, balancing, mtp_loss_weight, nonfinite_gradients)
        check_backend_name(attention_backend)
        self.asked_attention: AttentionBackend = attention_backend
        self.config = _config_of(config)
        # Plain values, so that checkpoints load with weights_only=True.
        self.save_hyperparameters(
            {
                "config": asdict(self.config),
                "balancing": asdict(self.balancing),
                "mtp_loss_weight": mtp_loss_weight,
            }
        )

    def build_model(self) -> MoEModel:
        """Builds the model."""
        return DeepSeekV3Model(self.config, self.asked_attention)

    def setup(self, stage: str) -> None:
        """Also refuses an attention kernel that cannot compute this, and says which one is taken."""
        super().setup(stage)
        strategy, data = self.trainer.strategy, getattr(self.trainer, "datamodule", None)
        case = AttentionCase(
            self.config.qk_head_dim,
            self.config.v_head_dim,
            strategy.root_device,
            compute_dtype_of(strategy),
            documents=bool(getattr(data, "document_mask", False)),
        )
        kernel = case.choose(self.asked_attention)
        rank_zero_info(f"Attention of {case}: {case.name(kernel)}.")
        if self.asked_attention == "auto":
            case.warn_if_slow(kernel)

    def moe_shape(self) -> MoEShape:
        """Returns the model's sizes."""
        return MoEShape(
            vocab_size=self.config.vocab_size,
            hidden_size=self.config.hidden_size,
            n_routed_experts=self.config.n_routed_experts,
            num_experts_per_tok=self.config.num_experts_per_tok,
            moe_intermediate_size=self.config.moe_intermediate_size,
            max_position_embeddings=self.config.max_position_embeddings,
            num_nextn_predict_layers=self.config.num_nextn_predict_layers,
        )

    def attention_backend(self) -> str:
        """Names the attention kernels that are used on this device, with and without documents."""
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        if self._trainer is not None:
            dtype = compute_dtype_of(self._trainer.strategy)
        return attention_kernels(self.config, self.device, dtype, self.asked_attention)


def _config_of(config: Any) -> DeepSeekV3Config:
    if isinstance(config, dict):  # from a checkpoint
        return DeepSeekV3Config(**with_yarn(config))
    if not isinstance(config, DeepSeekV3Config):
        raise ValueError(
            f"config is {config!r}, but it must be a DeepSeekV3Config. One that works: DeepSeekV3Config.preset('tiny')."
        )
    return config
