"""Conversion of checkpoints from and to the names and files of Hugging Face."""

from lightning_moe.convert.huggingface import hf_config, load_hf_checkpoint, save_hf_checkpoint
from lightning_moe.convert.state import from_hf_state_dict, to_hf_state_dict

__all__ = ["from_hf_state_dict", "hf_config", "load_hf_checkpoint", "save_hf_checkpoint", "to_hf_state_dict"]
