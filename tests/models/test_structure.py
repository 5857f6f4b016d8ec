"""Mistakes in a model's structure that would train wrongly without a word are refused before it is built."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_moe import DeepSeekV3
from lightning_moe.models.base import MoEModel, MoEModelOutput
from lightning_moe.models.deepseek_v3 import DeepSeekV3Model
from lightning_moe.strategies.regions import apply_to_regions
from tests.models.test_module import CONFIG, fit


class Tied(DeepSeekV3Model):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lm_head.weight = self.embed_tokens.weight


class ShortNames(DeepSeekV3Model):
    def blocks(self) -> Iterator[tuple[str, nn.Module]]:
        for name, block in super().blocks():
            yield name.removeprefix("layers."), block


class NoDepths(DeepSeekV3Model):
    def blocks(self) -> Iterator[tuple[str, nn.Module]]:
        yield from (entry for entry in super().blocks() if entry[0].startswith("layers."))


@pytest.mark.parametrize(
    ("model_class", "message"),
    [
        (Tied, r"Tied owns one parameter as embed_tokens.weight and as lm_head.weight"),
        (ShortNames, r"ShortNames.blocks\(\) names a block '0', but it must be.*'layers.0'"),
        (NoDepths, r"NoDepths.blocks\(\) leaves out the block of the MoE layer mtp_layers.2.block.mlp"),
    ],
)
def test_mistakes_are_named(model_class: type[DeepSeekV3Model], message: str) -> None:
    class Module(DeepSeekV3):
        def build_model(self) -> MoEModel:
            return model_class(self.config)

    with pytest.raises(ValueError, match=message):
        Module(CONFIG).configure_model()


class NoAttend(nn.Module):
    pass


def test_a_block_without_the_attention_region_is_refused_where_regions_count() -> None:
    class Model(DeepSeekV3Model):
        def blocks(self) -> Iterator[tuple[str, nn.Module]]:
            yield "layers.0", NoAttend()

    with torch.device("meta"):
        model = Model(CONFIG)
    apply_to_regions(model, "none", compile_regions=False)
    with pytest.raises(TypeError, match=r"NoAttend \(layers.0\) must have a method attend\(\)"):
        apply_to_regions(model, "selective", compile_regions=False)


class LosesCounts(DeepSeekV3Model):
    def forward(self, *args: Any, **kwargs: Any) -> MoEModelOutput:
        output = super().forward(*args, **kwargs)
        return output._replace(expert_counts=output.expert_counts[1:])


def test_counts_of_too_few_layers_move_no_biases() -> None:
    class Module(DeepSeekV3):
        def build_model(self) -> MoEModel:
            return LosesCounts(self.config)

    config = replace(CONFIG, num_hidden_layers=3)
    with pytest.raises(ValueError, match="expert_counts of 2 layers, but the model has 3 MoE layers"):
        fit(Module(config), max_steps=1)
