from lightning_moe.metrics.expert_load import ExpertLoad
from lightning_moe.metrics.mtp_accuracy import MTPAccuracy, count_mtp_hits
from lightning_moe.metrics.token_mean import TokenMean

__all__ = ["ExpertLoad", "MTPAccuracy", "TokenMean", "count_mtp_hits"]
