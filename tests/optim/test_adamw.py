import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI, OptimizerCallable
from lightning.pytorch.demos.boring_classes import BoringDataModule
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import lightning_moe
from lightning_moe.optim.adamw import AdamW


def _parameters() -> dict[str, nn.Parameter]:
    shapes = {"experts": (2, 3, 4), "weight": (3, 4), "norm": (4,), "scale": ()}
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


def _decays(optimizer: AdamW, parameters: dict[str, nn.Parameter]) -> dict[str, float]:
    names = {id(parameter): name for name, parameter in parameters.items()}
    return {names[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}


def test_defaults_of_the_report() -> None:
    optimizer = AdamW(_parameters().values())
    assert optimizer.defaults["lr"] == 2.2e-4
    assert optimizer.defaults["betas"] == (0.9, 0.95)
    assert optimizer.defaults["eps"] == 1e-8
    assert optimizer.defaults["weight_decay"] == 0.1


@pytest.mark.parametrize("named", [False, True])
def test_only_matrices_decay(named: bool) -> None:
    parameters = _parameters()
    given: Iterator[Any] = iter(parameters.items() if named else parameters.values())
    optimizer = AdamW(given)
    assert _decays(optimizer, parameters) == {"experts": 0.1, "weight": 0.1, "norm": 0.0, "scale": 0.0}
    if named:
        assert [group["param_names"] for group in optimizer.param_groups] == [["experts", "weight"], ["norm", "scale"]]


def test_groups_are_split_unless_they_set_weight_decay() -> None:
    parameters = _parameters()
    first = {"params": (parameters[name] for name in ("experts", "norm")), "lr": 1e-3}
    second = {"params": [parameters["weight"], parameters["scale"]], "weight_decay": 0.3}
    optimizer = AdamW([first, second], lr=1e-2)
    assert _decays(optimizer, parameters) == {"experts": 0.1, "norm": 0.0, "weight": 0.3, "scale": 0.3}
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 1e-3, 1e-2]
    assert set(first) == {"params", "lr"}, "the caller's dict changed"


def test_a_group_of_one_tensor_and_one_added_later() -> None:
    parameters = _parameters()
    optimizer = AdamW([{"params": parameters["norm"]}])
    optimizer.add_param_group({"params": [parameters["weight"], parameters["scale"]]})
    assert _decays(optimizer, parameters) == {"norm": 0.0, "weight": 0.1, "scale": 0.0}


def test_step_by_hand() -> None:
    matrix, vector = nn.Parameter(torch.full((1, 1), 2.0)), nn.Parameter(torch.tensor([2.0]))
    optimizer = AdamW([matrix, vector], lr=0.1, eps=0.0, weight_decay=0.5)
    matrix.grad, vector.grad = torch.tensor([[3.0]]), torch.tensor([3.0])
    optimizer.step()
    # First step of Adam: the sign of the gradient times lr; decay: 2 * (1 - 0.1 * 0.5)
    torch.testing.assert_close(matrix.detach(), torch.tensor([[1.8]]))
    torch.testing.assert_close(vector.detach(), torch.tensor([1.9]))


def test_fused_by_default_on_cpu_and_not_on_meta() -> None:
    assert AdamW(_parameters().values()).defaults["fused"] is True
    assert AdamW(_parameters().values(), fused=False).defaults["fused"] is False
    assert AdamW([nn.Parameter(torch.empty(2, 2, device="meta"))]).defaults["fused"] is None


def test_fused_matches_unfused_and_does_not_depend_on_shards() -> None:
    weight = torch.randn(37, 13)
    gradients = [torch.randn(37, 13) for _ in range(5)]

    def train(splits: list[int], fused: bool) -> torch.Tensor:
        shards = [nn.Parameter(shard.clone()) for shard in weight.split(splits)]
        optimizer = AdamW(shards, lr=1e-2, fused=fused)
        for gradient in gradients:
            for shard, part in zip(shards, gradient.split(splits), strict=True):
                shard.grad = part.clone()
            optimizer.step()
        return torch.cat([shard.detach() for shard in shards])

    whole = train([37], fused=True)
    assert torch.equal(whole, train([11, 26], fused=True))
    torch.testing.assert_close(whole, train([37], fused=False), rtol=1e-6, atol=1e-7)


def test_found_inf_skips_the_whole_step() -> None:
    parameters = _parameters()
    optimizer = AdamW(parameters.values(), lr=1e-2)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before, state_before = copy.deepcopy(parameters), copy.deepcopy(optimizer.state_dict()["state"])
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    optimizer.step()
    for name, parameter in parameters.items():
        assert torch.equal(parameter, before[name])
    for index, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, state_before[index][key]) for key, value in state.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"betas": (0.9, 1.0)}, "betas=.*0.9, 1.0"),
        ({"betas": (0.9,)}, "betas="),
        ({"eps": -1e-8}, "eps=-1e-08"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
    ],
)
def test_bad_values(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdamW(_parameters().values(), **options)


def test_bad_parameters() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        AdamW([])
    with pytest.raises(TypeError, match="not one tensor"):
        AdamW(nn.Parameter(torch.zeros(2, 2)))
    with pytest.raises(TypeError, match="a set has no order"):
        AdamW(set(_parameters().values()))


class OptimizerModule(LightningModule):
    def __init__(self, optimizer: OptimizerCallable = lambda params: AdamW(params)) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.layer = nn.Linear(4, 2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())


def _optimizer(*args: str) -> torch.optim.Optimizer:
    cli = LightningCLI(
        OptimizerModule,
        BoringDataModule,
        subclass_mode_model=True,
        auto_configure_optimizers=False,
        run=False,
        save_config_callback=None,
        seed_everything_default=False,
        trainer_defaults={"accelerator": "cpu", "logger": False},
        args=list(args),
    )
    return cli.model.configure_optimizers()


_MODEL = f"--model={__name__}.OptimizerModule"


def test_command_line_lr_alone() -> None:
    optimizer = _optimizer(_MODEL, "--model.optimizer.lr=1e-3")
    assert type(optimizer) is AdamW
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(1e-3, 0.1), (1e-3, 0.0)]


def test_command_line_other_optimizer() -> None:
    optimizer = _optimizer(_MODEL, "--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=0.1")
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("path", [None, "lightning_moe.AdamW", "lightning_moe.optim.adamw.AdamW"])
def test_print_config_names_the_short_path_and_reloads(
    path: str | None, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    choice = [f"--model.optimizer={path}"] if path else []
    with pytest.raises(SystemExit):
        _optimizer(_MODEL, *choice, "--model.optimizer.lr=1e-3", "--print_config")
    text = capsys.readouterr().out
    printed = yaml.safe_load(text)["model"]["init_args"]["optimizer"]
    assert printed["class_path"] == "lightning_moe.AdamW"
    assert printed["init_args"] == {
        "lr": 1e-3,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "weight_decay": 0.1,
        "fused": None,
        "moments": "float32",
    }
    (tmp_path / "config.yaml").write_text(text)
    optimizer = _optimizer(f"--config={tmp_path / 'config.yaml'}")
    assert type(optimizer) is lightning_moe.AdamW
    assert optimizer.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize("fused", [True, False])
def test_bfloat16_moments(fused: bool) -> None:
    torch.manual_seed(1)
    weight, gradients = torch.randn(64, 32), [torch.randn(64, 32) for _ in range(20)]

    def train(moments: str, reload_at: int | None = None) -> tuple[torch.Tensor, AdamW]:
        parameter = nn.Parameter(weight.clone())
        optimizer = AdamW([parameter], lr=1e-2, fused=fused, moments=moments)  # type: ignore[arg-type]
        for number, gradient in enumerate(gradients):
            if number == reload_at:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = AdamW([parameter], lr=1e-2, fused=fused, moments=moments)  # type: ignore[arg-type]
                optimizer.load_state_dict(state)
            parameter.grad = gradient.clone()
            optimizer.step()
        return parameter.detach(), optimizer

    exact, _ = train("float32")
    low, optimizer = train("bfloat16")
    state = next(iter(optimizer.state.values()))
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    difference = (low - exact).norm() / (exact - weight).norm()
    assert 1e-5 < difference < 1e-2
    resumed, _ = train("bfloat16", reload_at=10)
    assert torch.equal(resumed, low)
    copied = copy.deepcopy(optimizer)
    copied.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert {group["moments"] for group in copied.param_groups} == {"bfloat16"}


def test_moments_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match=r"moments='fp8'.*float32 or bfloat16"):
        AdamW([nn.Parameter(torch.ones(1))], moments="fp8")  # type: ignore[arg-type]


def test_parameters_with_gaps_are_left_to_the_unfused_step() -> None:
    memory = torch.zeros(4, 6)
    parameter = nn.Parameter(memory[:, :3])
    optimizer = AdamW([parameter], lr=0.1)
    assert optimizer.defaults["fused"] is None
    parameter.grad = torch.ones(4, 3)
    optimizer.step()
    torch.testing.assert_close(memory[:, :3], torch.full((4, 3), -0.1))
    assert not memory[:, 3:].any()
    assert AdamW([nn.Parameter(torch.zeros(4, 6).T)]).defaults["fused"] is True


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_options_of_torch_in_a_group_are_honoured(option: str) -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(5, 3) for _ in range(4)]
    trained = []
    for kind in (AdamW, torch.optim.AdamW):
        parameter = nn.Parameter(torch.ones(5, 3))
        optimizer = kind([{"params": [parameter], option: True}], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
        trained.append(parameter.detach())
    torch.testing.assert_close(*trained, rtol=1e-6, atol=1e-7)


def test_amsgrad_goes_with_moments_in_bfloat16() -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(64, 32) for _ in range(6)]
    trained = []
    for moments in ("float32", "bfloat16"):
        parameter = nn.Parameter(torch.ones(64, 32))
        optimizer = AdamW([{"params": [parameter], "amsgrad": True}], lr=0.01, moments=moments)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
        state = optimizer.state[parameter]
        assert (state["exp_avg"].dtype is torch.bfloat16) is (moments == "bfloat16")
        assert state["max_exp_avg_sq"].dtype is torch.float32
        trained.append(parameter.detach())
    torch.testing.assert_close(*trained, rtol=0, atol=6 * 0.01 * 2**-7)  # the moments' rounding, in each update


def test_moments_of_a_group_are_checked() -> None:
    with pytest.raises(ValueError, match="AdamW moments='fp8': must be float32 or bfloat16"):
        AdamW([{"params": [nn.Parameter(torch.ones(2))], "moments": "fp8"}])


def _on_cuda(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="cuda", dtype=dtype))


def test_whether_the_kernel_runs_is_asked_of_the_parameters_as_they_are() -> None:
    with FakeTensorMode():  # seems to be on CUDA, without a GPU
        parameter = _on_cuda(4, 3)
        optimizer = AdamW([parameter, _on_cuda(3, dtype=torch.bfloat16)])
        assert optimizer.takes_gradient_factor
        parameter.grad_dtype = None
        assert optimizer.takes_gradient_factor
        for option in ("amsgrad", "maximize", "differentiable"):
            optimizer.param_groups[1][option] = True
            assert not optimizer.takes_gradient_factor, option
            optimizer.param_groups[1][option] = False
        state = copy.deepcopy(optimizer.state_dict())
        state["param_groups"][0]["fused"] = None
        optimizer.load_state_dict(state)
        assert not optimizer.takes_gradient_factor
        optimizer.param_groups[0]["fused"] = True
        assert optimizer.takes_gradient_factor
        parameter.data = torch.empty(3, 4, device="cuda").T
        assert optimizer.takes_gradient_factor
        for data in (torch.empty(4, 6, device="cuda")[:, :3], torch.empty(4, 3, device="cuda", dtype=torch.float64)):
            before, parameter.data = parameter.data, data
            assert not optimizer.takes_gradient_factor
            parameter.data = before
        assert optimizer.takes_gradient_factor
        optimizer.add_param_group({"params": [nn.Parameter(torch.empty(2, 2))]})
        assert not optimizer.takes_gradient_factor
    assert not AdamW(_parameters().values()).takes_gradient_factor


@pytest.mark.parametrize("with_factor", [False, True])
def test_parameters_are_gone_through_once_a_step(with_factor: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, stepped = [], []

    def takes(self: AdamW) -> bool:
        asked.append(self)
        return True

    monkeypatch.setattr(AdamW, "takes_gradient_factor", property(takes))
    monkeypatch.setattr(AdamW, "_step_with_kernel", lambda self, *_: stepped.append(self.gradient_factor))
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones(2, 2)
    optimizer, factor = AdamW([parameter]), torch.tensor(0.5)
    if with_factor and optimizer.takes_gradient_factor:
        optimizer.gradient_factor = factor
    optimizer.step()
    assert len(asked) == 1
    assert stepped == [factor if with_factor else None]
    assert optimizer.gradient_factor is None
