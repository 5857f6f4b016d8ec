from lightning_moe.models.deepseek_v3.config import DeepSeekV3Config, YarnScaling
from lightning_moe.models.deepseek_v3.model import DeepSeekV3Model
from lightning_moe.models.deepseek_v3.module import DeepSeekV3

__all__ = ["DeepSeekV3", "DeepSeekV3Config", "DeepSeekV3Model", "YarnScaling"]
