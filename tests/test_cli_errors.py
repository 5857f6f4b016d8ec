from pathlib import Path

import pytest
import torch

from lightning_moe.cli import MoECLI, main
from lightning_moe.usage_errors import MAX_LINES, UsageError, explain, name_field, shorten
from tests.callbacks.standins import arguments

# What is wrong on the command line, and what the message must hold: the field, the value, and a way out
WRONG = [
    ("--trainer.max_stepss=3", ["trainer.max_stepss", "trainer.max_steps"]),
    ("--trainer.max_steps=three", ["trainer.max_steps", "three", "whole number"]),
    ("--trainer.max_steps=1.5", ["trainer.max_steps", "1.5", "whole number"]),
    ("--trainer.precision=int3", ["trainer.precision", "int3", "bf16-mixed"]),
    ("--trainer.precision=mxfp8", ["is 'mxfp8', which is a plugin", "plugins+=lightning_moe.MXFP8Precision"]),
    ("--trainer.strategy=nonsense", ["trainer.strategy", "nonsense", "there is expert_parallel"]),
    ("--trainer.callbacks+=lightning.pytorch.callbacks.EarlyStoping", ["trainer.callbacks", "EarlyStopping"]),
    ("--checkpoint.every_n_step=3", ["checkpoint.every_n_step", "checkpoint.every_n_train_steps"]),
    ("--checkpoint.save_top_k=-5", ["save_top_k", "-5", "-1"]),
    ("--checkpoint.mode=most", ["checkpoint.mode", "most", "max"]),
    ("--seed_everything=abc", ["seed_everything", "abc", "whole number"]),
    ("--model=lightning_moe.DeepSeekV4", ["model", "lightning_moe.DeepSeekV3"]),
    ("--model=no_such_module.Model", ["model", "no_such_module", "this folder"]),
    ("--model=tests.callbacks.standins.RandomTokens", ["model", "MoELightningModule"]),
    ("--model.config.hiden_size=3", ["model.config.hiden_size", "model.config.hidden_size"]),
    ("--model.config.hidden_size=wide", ["model.config.hidden_size", "wide", "whole number"]),
    ("--model.config.hidden_size=-1", ["model.config.hidden_size", "-1", "positive"]),
    ("--model.config.n_group=3", ["model.config.n_group", "3", "n_routed_experts", "n_group="]),
    ("--model.config.scoring_func=tanh", ["model.config.scoring_func", "tanh", "sigmoid"]),
    ("--model.config=missing/config.json", ["model.config", "missing/config.json", "tiny"]),
    ("--model.config=tinny", ["model.config", "tinny", "tiny"]),
    ("--model.optimizer.lr=fast", ["model.optimizer.lr", "fast", "a number"]),
    ("--model.optimizer.lrr=1", ["model.optimizer.lrr", "model.optimizer.lr"]),
    ("--model.optimizer=lightning_moe.Adam", ["model.optimizer", "lightning_moe.AdamW"]),
    ("--model.optimizer.lr=-1", ["error: model.optimizer.lr=-1.0: must be", "2.2e-4"]),
    ("--model.mtp_loss_weight={0: much}", ["model.mtp_loss_weight", "much", "a number"]),
    ("--model.mtp_loss_weight={5: 0.1}", ["model.mtp_loss_weight", "{0: 0.1"]),
    ("--model.balancing.bias_update_speed=-1", ["model.balancing.bias_update_speed", "-1"]),
    ("--model.schedule.warmup=-1", ["model.schedule.warmup", "-1"]),
    ("--data=tests.callbacks.standins.Random", ["data", "tests.callbacks.standins.RandomTokens"]),
    ("--data.micro_batch=3", ["data.micro_batch", "data.micro_batch_size"]),
    ("--data.global_batch_size=3", ["data.global_batch_size", "3", "micro_batch_size", "A value that works"]),
    ("--data.path=/no/such/store", ["data.path", "/no/such/store", "prepare"]),
    ("--data.max_tokens=null", ["data.max_tokens", "1e9"]),
    ("--trainer.gradient_clip_val=-1", ["trainer.gradient_clip_val", "-1", "1.0"]),
    ("--model.balancing.bias_update_speed=x", ["model.balancing.bias_update_speed", "x", "a mapping", "a number"]),
    ("--model.config=missing.json", ["model.config", "missing.json", "in this folder."]),
    ("--ckpt_path=missing.ckpt", ["ckpt_path", "missing.ckpt", "last"]),
    ("--config=missing.yaml", ["config", "missing.yaml"]),
    ("--trainer.val_check_interval=0", ["trainer.val_check_interval is 0", "1 micro-batch", "limit_val_batches to 0"]),
    ("--trainer.val_check_interval=0.0", ["trainer.val_check_interval is 0.0", "0.25"]),
    ("--trainer.devices=-3", ["trainer.devices is -3", "auto, -1", "at least 1 or a list"]),
    ("--trainer.devices=0", ["trainer.devices is 0", "auto, -1", "at least 1 or a list"]),
    ("--trainer.devices=[]", ["trainer.devices is []", "auto, -1"]),
    ("--trainer.devices=two", ["trainer.devices is two", "auto, -1"]),
    ("--trainer.devices=[0, 1]", ["trainer.devices is [0, 1], but on the CPU it must be auto or a number"]),
    ("--trainer.logger=TensorBoardLoger", ["trainer.logger", "mean lightning.pytorch.loggers.TensorBoardLogger?"]),
    ("--trainer.logger=5", ["trainer.logger: 5 is not allowed; it must be the path of a class", "a list"]),
    ("--trainer.callbacks+=EarlyStoping", ["trainer.callbacks", "mean lightning.pytorch.callbacks.EarlyStopping?"]),
    ("--model=DeepSeekV4", ["model: there is no class DeepSeekV4.", "mean lightning_moe.DeepSeekV3"]),
    ("--model=a/b", ["model: a/b is not allowed; it must be the path of a class, as in package.Name or null"]),
    ("--data=TokenDataModul", ["data: there is no class TokenDataModul.", "mean lightning_moe.TokenDataModule"]),
    ("--model.optimizer=AdmW", ["model.optimizer: there is no class AdmW.", "mean lightning_moe.AdamW"]),
    ("--model.schedule=TokenSchedul", ["model.schedule: there is no", "mean lightning_moe.TokenSchedule"]),
    ("--model.config=tyny", ["model.config", "tyny", "mean tiny?", "deepseek_v3_671b", "moonlight_16b"]),
    ("--trainer=missing.yaml", ["trainer: There is no file missing.yaml."]),
    ("--trainer.strategy=expert_paralel", ["trainer.strategy", "expert_paralel.", "mean expert_parallel?"]),
    ("--trainer.strategy=dpp", ["trainer.strategy: there is no strategy dpp.", "mean ddp?"]),
    ("--trainer.strategy=lightning_moe.ExpertParalelStrategy", ["mean lightning_moe.ExpertParallelStrategy?"]),
    ("--seed_everything=-1", ["seed_everything is -1", "0 to 4294967295", "1337"]),
    ("--trainer.accelerator=gpus", ["trainer.accelerator: there is no accelerator gpus.", "mean gpu?"]),
    ("--trainer.accelerator=tpu", ["trainer.accelerator is tpu", "auto or cpu"]),
]


@pytest.mark.parametrize(("wrong", "expected"), WRONG, ids=[wrong for wrong, _ in WRONG])
def test_short_errors(wrong: str, expected: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *arguments(tmp_path / "run"), wrong]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines[0].startswith("error: ")
    assert len(lines) <= MAX_LINES
    assert "Traceback" not in captured.err
    assert "usage:" not in captured.err
    for part in expected:
        assert part in captured.err
    assert not list((tmp_path / "run").rglob("*.ckpt"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trainer: {max_stepss: 3}", ["trainer.max_stepss", "trainer.max_steps"]),
        ("modell: {class_path: x}", ["modell", "model"]),
        ("model: {init_args: {config: {hiden_size: 3}}}", ["model.config.hiden_size", "model.config.hidden_size"]),
        ("model: {init_args: {optimizer: {init_args: {lrr: 3}}}}", ["model.optimizer.lrr", "model.optimizer.lr"]),
        ("data: {init_args: {micro_batch_sizes: 3}}", ["data.micro_batch_sizes", "data.micro_batch_size"]),
        ("trainer: {max_steps: [}", ["line 1"]),
        ("trainer: {precision: fp8}", ["'fp8'", "configs/precision/float8.yaml", "lightning_moe.Float8Precision"]),
        (
            "trainer: {strategy: {class_path: lightning_moe.ExpertParallelStrategy, init_args: {dispatcher: deepep}}}",
            ["trainer.strategy.dispatcher: deepep", "one of auto, all_to_all, deep_ep", "mean deep_ep?"],
        ),
        (
            "trainer: {strategy: {class_path: lightning_moe.ExpertParallelStrategy, init_args: {dispatcher: "
            "{class_path: lightning_moe.DeepEPDispatcher, init_args: {num_sm: 3}}}}}",
            ["trainer.strategy.dispatcher.num_sm: there is no such setting", "trainer.strategy.dispatcher.num_sms?"],
        ),
        ("just a text", ["wrong.yaml is the text just a text, but must be settings; write"]),
        ("trainer:\n  max_steps: 3\n bad: [1\n", ["/wrong.yaml, line 3: ", "expected <block end>", "\n     bad: [1"]),
        ("", ["config: ", "/wrong.yaml is empty."]),
        ("# nothing yet\n", ["config: ", "/wrong.yaml is empty."]),
        ("- a\n- b\n", ["/wrong.yaml is a list, but must be settings", "trainer: {max_steps: 1000}"]),
        ("3", ["/wrong.yaml is 3, but must be settings"]),
        ("trainer:\n", ["/wrong.yaml gives no value to trainer"]),
        ("trainer: {max_steps: 3} # \xe9", ["/wrong.yaml is not UTF-8 text (byte 26)."]),
    ],
)
def test_short_errors_of_files(
    text: str, expected: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.yaml").write_bytes(text.encode("latin-1"))
    assert main(["fit", *arguments(tmp_path / "run"), f"--config={tmp_path / 'wrong.yaml'}"]) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: ")
    assert len(err.splitlines()) <= MAX_LINES
    for part in expected:
        assert part in err or part in err.replace("\n  ", " ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["gpu", "cuda"])
def test_a_gpu_that_is_not_there(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *arguments(tmp_path / "run"), f"--trainer.accelerator={name}"]) == 2
    assert capfd.readouterr().err == (
        f"error: trainer.accelerator is {name}, but torch sees no GPU here. What works here: auto or cpu.\n"
    )


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ([], "fit, validate, test, prepare, doctor"),
        (["fitt"], "Did you mean fit?"),
        (["docter"], "Did you mean doctor?"),
        (["fit"], "--config configs/tiny.yaml"),
        (["prepare", "--outputt=x"], "Did you mean output?"),
        (["validate", *arguments("run")], "--ckpt_path last"),
        (["test", *arguments("run"), "--ckpt_path=last"], "no complete checkpoint in run"),
    ],
)
def test_wrong_commands(command: list[str], expected: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 2
    err = capfd.readouterr().err
    assert expected in err
    assert len(err.splitlines()) <= MAX_LINES


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="n_group") as error:
        main(["fit", *arguments(tmp_path), "--model.config.n_group=3", "--debug"])
    assert isinstance(error.value.__cause__, ValueError)


def test_errors_of_a_step_keep_their_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr("lightning_moe.DeepSeekV3.training_step", broken)
    with pytest.raises(ValueError, match="a bug"):
        main(["fit", *arguments(tmp_path / "run")])


def test_shorten() -> None:
    assert shorten("one\n\ntwo\n") == "one\ntwo"
    lines = shorten("\n".join(f"line {number}" for number in range(20))).splitlines()
    assert len(lines) == MAX_LINES
    assert lines[-1].startswith("…")


def test_a_message_is_wrapped_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *arguments(tmp_path / "run"), "--model.config.num_experts_per_tok=9"]) == 2
    *full, last = capfd.readouterr().err.removeprefix("error: ").splitlines()
    assert full
    assert all(len(line) > 100 for line in full)


def test_explain_reads_the_innermost_rule() -> None:
    message = """Parser key "data":
  Does not validate against any of the Union subtypes
  Errors:
    - Problem with given class_path 'tests.callbacks.standins.RandomTokens':
        Parser key "max_tokens":
          Errors:
            - Expected a <class 'int'>. Got value: much
            - Expected a <class 'NoneType'>. Got value: much
    - Expected a <class 'NoneType'>
  Given value: NestedArg(key='max_tokens', val='much')"""
    assert explain(message) == "data.max_tokens: much is not allowed; it must be a whole number or null"


@pytest.mark.parametrize("name", ["mxfp8", "fp8", "float8", "FP8", "blockwise_fp8", "fp8_blockwise"])
def test_a_precision_that_is_a_plugin_is_answered_with_what_works(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    overlay, plugin = {
        "mxfp8": ("mxfp8", "MXFP8Precision"),
        "fp8": ("float8", "Float8Precision"),
        "float8": ("float8", "Float8Precision"),
        "blockwise_fp8": ("blockwise_fp8", "BlockwiseFP8Precision"),
        "fp8_blockwise": ("blockwise_fp8", "BlockwiseFP8Precision"),
    }[name.lower()]
    assert main(["fit", *arguments(tmp_path / "run"), f"--trainer.precision={name}"]) == 2
    assert " ".join(capfd.readouterr().err.split()) == (
        f"error: trainer.precision is '{name}', which is a plugin here: add --config "
        f"configs/precision/{overlay}.yaml, or --trainer.plugins+=lightning_moe.{plugin}"
    )
    # What it says works
    configs = Path(__file__).parents[1] / "configs" / "precision"
    for works in (f"--config={configs / f'{overlay}.yaml'}", f"--trainer.plugins+=lightning_moe.{plugin}"):
        cli = MoECLI(args=[*arguments(tmp_path / "run"), works], run=False)
        assert type(cli.trainer.precision_plugin).__name__ == plugin


@pytest.mark.parametrize(
    ("dispatcher", "expected"),
    [
        (
            "deepep",
            "deepep is not allowed; it must be one of auto, all_to_all, deep_ep or the path of a class, as in "
            "package.Name Did you mean deep_ep?",
        ),
        (
            "lightning_moe.AdamW",
            "lightning_moe.AdamW is not allowed; it must be one of auto, all_to_all, deep_ep or a subclass of "
            "TokenDispatcher",
        ),
        (
            "lightning_moe.DeepEPDispatch",
            "There is no DeepEPDispatch in lightning_moe. Did you mean lightning_moe.DeepEPDispatcher?",
        ),
    ],
)
def test_a_wrong_dispatcher(dispatcher: str, expected: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    strategy = ["--trainer.strategy=expert_parallel", f"--trainer.strategy.dispatcher={dispatcher}"]
    assert main(["fit", *arguments(tmp_path / "run"), *strategy]) == 2
    assert " ".join(capfd.readouterr().err.split()) == f"error: trainer.strategy.dispatcher: {expected}"


def test_name_field() -> None:
    keys = ["model.init_args.config.n_group", "data.init_args.path"]
    assert name_field("n_group is 3, but", keys) == "model.config.n_group is 3, but"
    assert name_field("data.path: no", keys) == "data.path: no"
    assert name_field("other is 3", keys) == "other is 3"
    assert name_field("Store path=x: must be", keys) == "data.path=x: must be"
    assert name_field("Store name=x: must be", keys) == "Store name=x: must be"


def test_several_devices_need_a_strategy_that_knows_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["fit", *arguments(tmp_path), "--trainer.accelerator=cpu", "--trainer.devices=4"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "4 devices would train each on gradients of its own" in error
    assert "--trainer.strategy expert_parallel" in error
