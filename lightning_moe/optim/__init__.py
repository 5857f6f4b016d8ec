from lightning_moe.optim.adamw import AdamW
from lightning_moe.optim.schedules import TokenSchedule, TokenValue, check_token_value, value_at

__all__ = ["AdamW", "TokenSchedule", "TokenValue", "check_token_value", "value_at"]
