"""The model in examples/custom_moe: what it computes, under every layout, and what such a class may not leave out."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from examples.custom_moe.custom_moe import CustomMoE, CustomMoEConfig, CustomMoEModel
from lightning_moe import AdamW, ExpertParallelStrategy, MoELightningModule, MoEShape
from lightning_moe.cli import main
from lightning_moe.models.base import MoEModel, MoEModelOutput
from lightning_moe.tools.prepare import prepare
from tests.data.conftest import write_documents
from tests.models.test_module import make_trainer
from tests.models.tiny import randomise
from tests.strategies import processes
from tests.strategies.training import GradNorms, sgd
from tests.torch_version import compiled_float64_attention

FOLDER = Path(__file__).parents[2] / "examples" / "custom_moe"
SEQUENCE = 12
CONFIG = CustomMoEConfig(
    vocab_size=31,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    n_routed_experts=8,
    moe_intermediate_size=8,
    initializer_range=0.1,
)


class Rows(Dataset):
    """The same global batch over and over; a process takes its share. Every row has its own valid tokens."""

    def __init__(self, world_size: int = 1, batch: int = 8, batches: int = 64) -> None:
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(0, CONFIG.vocab_size, (batch, SEQUENCE + 1), generator=generator)
        share = batch // world_size
        self.mine = [processes.rank() * share + i for _ in range(batches) for i in range(share)]

    def __len__(self) -> int:
        return len(self.mine)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.mine[index]
        labels = self.tokens[row, 1:].clone()
        labels[: (row * 5) % SEQUENCE] = -100
        return {"input_ids": self.tokens[row, :-1], "labels": labels}


def built_model(config: CustomMoEConfig = CONFIG) -> CustomMoEModel:
    model = CustomMoEModel(config)
    randomise(model)
    return model


def test_it_is_short() -> None:
    assert len((FOLDER / "custom_moe.py").read_text(encoding="utf-8").splitlines()) < 150


# What it computes


def test_logits_and_losses_equal_those_of_mixtral() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.24")
    ours = built_model()
    for _, layer in ours.moe_layers():
        layer.router.e_score_correction_bias.zero_()
    theirs = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=CONFIG.vocab_size,
            hidden_size=CONFIG.hidden_size,
            intermediate_size=CONFIG.moe_intermediate_size,
            num_hidden_layers=CONFIG.num_hidden_layers,
            num_attention_heads=CONFIG.num_attention_heads,
            num_key_value_heads=CONFIG.num_key_value_heads,
            num_local_experts=CONFIG.n_routed_experts,
            num_experts_per_tok=CONFIG.num_experts_per_tok,
            rope_parameters={"rope_theta": CONFIG.rope_theta, "rope_type": "default"},
            rms_norm_eps=1e-5,
            sliding_window=None,
            tie_word_embeddings=True,
        )
    ).eval()
    state: dict[str, Tensor] = {"model.embed_tokens.weight": ours.embedding_VD, "model.norm.weight": ours.norm.weight}
    state["lm_head.weight"] = ours.embedding_VD
    width = CONFIG.hidden_size // CONFIG.num_attention_heads
    for index, block in enumerate(ours.layers):
        own, prefix = dict(block.named_parameters()), f"model.layers.{index}."
        qkv = own["qkv_proj.weight"].split([heads * width for heads in (4, 2, 2)])
        for name, weight in zip("qkv", qkv, strict=True):
            state[f"{prefix}self_attn.{name}_proj.weight"] = weight
        state[f"{prefix}self_attn.o_proj.weight"] = own["o_proj.weight"]
        state[f"{prefix}input_layernorm.weight"] = own["attention_norm.weight"]
        state[f"{prefix}post_attention_layernorm.weight"] = own["moe_norm.weight"]
        state[f"{prefix}mlp.gate.weight"] = own["moe.router.weight"]
        for name in ("gate_up_proj", "down_proj"):
            state[f"{prefix}mlp.experts.{name}"] = own[f"moe.experts.{name}"]
    theirs.load_state_dict(state)

    tokens = torch.randint(0, CONFIG.vocab_size, (3, SEQUENCE + 1))
    with torch.no_grad():
        expected = theirs(tokens[:, :-1]).logits
        logits = ours(tokens[:, :-1]).logits
        output = ours(tokens[:, :-1], tokens[:, 1:])
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)
    loss = nn.functional.cross_entropy(expected.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(output.loss, loss, rtol=1e-5, atol=0)
    assert output.num_tokens == 3 * SEQUENCE


def test_documents_of_a_row_do_not_see_each_other() -> None:
    model = built_model()
    tokens = torch.randint(0, CONFIG.vocab_size, (1, SEQUENCE))
    document_ids = torch.tensor([[0] * 5 + [1] * 7])
    positions = torch.cat((torch.arange(5), torch.arange(7)))
    packed = model(tokens, document_ids=document_ids, position_ids=positions[None]).logits
    apart = torch.cat((model(tokens[:, :5]).logits, model(tokens[:, 5:]).logits), dim=1)
    torch.testing.assert_close(packed, apart, rtol=0, atol=1e-5)
    assert (model(tokens).logits - apart)[:, 5:].abs().max() > 1e-2


def test_padding_is_not_routed_and_the_balance_loss_can_be_left_out() -> None:
    model = built_model()
    tokens = torch.randint(0, CONFIG.vocab_size, (2, SEQUENCE))
    valid = torch.arange(SEQUENCE) < torch.tensor([[SEQUENCE], [7]])
    output = model(tokens, valid=valid)
    assert [int(counts.sum()) for counts in output.expert_counts] == [(SEQUENCE + 7) * 2] * 2
    assert output.balance_loss is not None
    assert output.balance_loss > 0
    assert model(tokens, balance=False).balance_loss is None


def test_names_of_blocks_are_those_of_the_whole_model() -> None:
    model = built_model()
    assert [name for name, _ in model.blocks()] == ["layers.0", "layers.1"]
    assert [name for name, _ in model.moe_layers()] == ["layers.0.moe", "layers.1.moe"]
    assert all(model.get_submodule(name) is block for name, block in model.blocks())


def test_loss_falls() -> None:
    torch.manual_seed(3)
    module = CustomMoE(CONFIG, optimizer=lambda params: AdamW(params, lr=1e-2))
    trainer = make_trainer(strategy=ExpertParallelStrategy(), devices=1, max_steps=60, max_epochs=-1)
    trainer.fit(module, DataLoader(Rows(), batch_size=8))
    assert trainer.logged_metrics["train/loss"] < 1.0  # 3.4 for random guesses


# Under every layout


def train(world_size: int, layout: dict[str, Any] | None, **options: Any) -> tuple[Any, CustomMoE, list[float]]:
    seed_everything(11, verbose=False)
    torch.set_default_dtype(torch.float64)
    norms = GradNorms()
    module = CustomMoE(CONFIG, optimizer=options.get("optimizer", sgd))
    trainer = make_trainer(
        devices=world_size,
        strategy="auto" if layout is None else ExpertParallelStrategy(**layout),
        max_steps=options.get("steps", 2),
        max_epochs=-1,
        accumulate_grad_batches=8 // world_size // 2,
        use_distributed_sampler=False,
        callbacks=[norms],
    )
    trainer.fit(module, DataLoader(Rows(world_size), batch_size=2), ckpt_path=options.get("ckpt_path"))
    torch.set_default_dtype(torch.float32)
    return trainer, module, list(norms.by_step.values())


def train_and_keep(world_size: int, layouts: list[dict[str, Any] | None], folder: Path) -> None:
    for number, layout in enumerate(layouts):
        trainer, module, norms = train(world_size, layout)
        processes.save(folder / f"{world_size}-{number}.pt", (processes.whole(module.state_dict()), norms))
        trainer.strategy.barrier()


LAYOUTS = [
    {"expert_parallel_size": 1},
    {"expert_parallel_size": 2},
    {"expert_parallel_size": 2, "activation_checkpointing": "selective"},
    {"expert_parallel_size": 2, "activation_checkpointing": "full"},
]


def test_two_steps_on_two_processes_equal_those_of_one(tmp_path: Path) -> None:
    processes.run(1, train_and_keep, 1, [None, {"activation_checkpointing": "selective"}], tmp_path)
    processes.run(2, train_and_keep, 2, LAYOUTS, tmp_path)
    expected, expected_norms = torch.load(tmp_path / "1-0.pt")
    assert len(expected_norms) == 2
    assert "model.layers.1.moe.experts.gate_up_proj" in expected
    for file, layout in [("1-1.pt", "selective"), *((f"2-{n}.pt", str(layout)) for n, layout in enumerate(LAYOUTS))]:
        weights, norms = torch.load(tmp_path / file)
        assert norms == pytest.approx(expected_norms, rel=1e-10), layout
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-10, msg=f"{name} with {layout}")


def compiled(folder: Path) -> None:
    from torch._dynamo.utils import counters

    _, _, norms = train(1, {"compile": True, "activation_checkpointing": "selective"})
    processes.save(folder / "compiled.pt", (counters["stats"]["unique_graphs"], dict(counters["graph_break"]), norms))


@compiled_float64_attention
def test_its_regions_compile_without_breaks(tmp_path: Path) -> None:
    processes.run(1, compiled, tmp_path)
    processes.run(1, train_and_keep, 1, [None], tmp_path)
    graphs, breaks, norms = torch.load(tmp_path / "compiled.pt")
    assert graphs > 0
    assert breaks == {}
    assert norms == pytest.approx(torch.load(tmp_path / "1-0.pt")[1], rel=1e-8)


def adamw(params: Any) -> torch.optim.Optimizer:
    return AdamW(params, lr=1e-2)


def two_steps_saved(folder: Path) -> None:
    trainer, _, _ = train(2, {"expert_parallel_size": 2}, optimizer=adamw)
    trainer.save_checkpoint(folder / "two.ckpt")


def four_steps(folder: Path, ckpt_path: Path | None) -> None:
    _, module, _ = train(1, {}, optimizer=adamw, steps=4, ckpt_path=ckpt_path)
    processes.save(
        folder / ("straight.pt" if ckpt_path is None else "resumed.pt"), processes.whole(module.state_dict())
    )


def test_checkpoint_of_two_processes_goes_on_in_one_and_loads(tmp_path: Path) -> None:
    processes.run(2, two_steps_saved, tmp_path)
    processes.run(1, four_steps, tmp_path, tmp_path / "two.ckpt")
    processes.run(1, four_steps, tmp_path, None)
    resumed, straight = torch.load(tmp_path / "resumed.pt"), torch.load(tmp_path / "straight.pt")
    for name, value in straight.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=1e-10, msg=name)

    module = CustomMoE.load_from_checkpoint(tmp_path / "two.ckpt")
    assert module.config == CONFIG
    assert module.tokens_seen == 2 * 8 * SEQUENCE
    moved = module.built_model.embedding_VD.double() - straight["model.embedding_VD"]
    assert 0 < moved.abs().max() < 0.1  # two steps of 1e-2 behind


# The command line


@pytest.fixture
def beside_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for file in ("custom_moe.py", "custom_moe.yaml"):
        shutil.copy(FOLDER / file, tmp_path)
    text = write_documents(tmp_path / "text.jsonl", 60)
    prepare([str(text)], str(tmp_path / "store"), "byte", validation_fraction=0.1, num_workers=1, progress_bar=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_fit_resume_and_validate_from_its_folder(
    beside_the_example: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ["--model.config.vocab_size=258", "--model.config.num_hidden_layers=2", "--data.path=store"]
    arguments = ["--config=custom_moe.yaml", *small, "--data.sequence_length=32", "--data.global_batch_size=4"]
    assert main(["fit", *arguments, "--data.max_tokens=512"]) == 0
    assert "Done after step 4" in capsys.readouterr().err
    assert main(["fit", *arguments, "--data.max_tokens=768"]) == 0
    assert "Done after step 6" in capsys.readouterr().err
    assert main(["validate", *arguments, "--data.max_tokens=768"]) == 0
    assert "val/loss" in capsys.readouterr().out
    assert main(["fit", *arguments, "--data.max_tokens=768", "--model.config.n_routed_experts=6"]) == 2
    assert "n_routed_experts" in capsys.readouterr().err


def test_config_errors_name_the_setting(beside_the_example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--config=custom_moe.yaml", "--model.config.num_key_value_heads=3"]) == 2
    assert "model.config.num_attention_heads is 8, but must be a multiple of 3, as in 9." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 0}, "vocab_size is 0, but it must be positive, as in 4096"),
        ({"rope_theta": -1.0}, r"rope_theta is -1.0, but it must be positive"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but it must be at most 8"),
        ({"num_attention_heads": 9}, "num_attention_heads is 9, but must be a multiple of 2, as in 10"),
        ({"hidden_size": 100}, "hidden_size is 100, but must be a multiple of 64, as in 128"),
        ({"moe_intermediate_size": 20}, "moe_intermediate_size is 20, but must be a multiple of 8, as in 24"),
    ],
)
def test_config_rules(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CustomMoEConfig(**fields)


# What a class of one's own leaves out


class NoShape(MoELightningModule):
    def build_model(self) -> MoEModel:
        return CustomMoEModel(CONFIG)


class NoModel(CustomMoE):
    build_model = MoELightningModule.build_model


class Other(CustomMoE):
    """Builds the model of the class attribute ``model_class``."""

    model_class: type[CustomMoEModel]

    def build_model(self) -> MoEModel:
        return self.model_class(CONFIG)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))


class NoReset(Other):
    class model_class(CustomMoEModel):
        def __init__(self, config: CustomMoEConfig) -> None:
            super().__init__(config)
            self.scaling = Scale()


class ForgottenBlock(Other):
    class model_class(CustomMoEModel):
        def blocks(self) -> Iterator[tuple[str, nn.Module]]:
            yield from list(super().blocks())[:-1]


class NoBlocks(Other):
    class model_class(MoEModel):  # type: ignore[assignment]
        def __init__(self, config: CustomMoEConfig) -> None:
            super().__init__()

        def forward(self, *args: Any, **kwargs: Any) -> MoEModelOutput:
            return MoEModelOutput()


class Outside(CustomMoE):
    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.probe = nn.Linear(2, 2)


@pytest.mark.parametrize("strategy", ["auto", "expert_parallel"])
@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (NoModel, NotImplementedError, r"NoModel must override build_model\(\)"),
        (NoShape, NotImplementedError, r"NoShape must override moe_shape\(\)"),
        (NoReset, TypeError, r"Scale \(scaling\) owns parameters .* must have a method reset_parameters\(\)"),
        (NoBlocks, TypeError, r"model_class.*blocks"),
        (Outside, ValueError, r"Outside has parameters outside the model it builds \(probe.weight"),
        (ForgottenBlock, ValueError, r"model_class.blocks\(\) leaves out .*layers.1.moe"),
    ],
)
def test_what_is_left_out_is_named(module: Any, error: type[Exception], message: str, strategy: str) -> None:
    trainer = make_trainer(strategy=strategy, devices=1, max_steps=1, max_epochs=-1)
    with pytest.raises(error, match=message):
        trainer.fit(module(), DataLoader(Rows(), batch_size=8))


def test_shape_is_asked_for_before_anything_is_built() -> None:
    assert CustomMoE(CONFIG).moe_shape() == MoEShape(
        vocab_size=31, hidden_size=32, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=8
    )
    with pytest.raises(ValueError, match="expert_parallel_size is 3"):
        make_trainer(strategy=ExpertParallelStrategy(expert_parallel_size=3), devices=1).fit(
            CustomMoE(CONFIG), DataLoader(Rows(), batch_size=8)
        )
