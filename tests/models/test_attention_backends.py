"""The choice of the attention kernel as a table, and FlexAttention, made to run on the CPU, against a dense mask."""

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend
from torch.utils.data import DataLoader

from lightning_moe import DeepSeekV3, DeepSeekV3Config
from lightning_moe.models.deepseek_v3 import attention_backends
from lightning_moe.models.deepseek_v3.attention_backends import (
    AttentionBackend,
    AttentionCase,
    AttentionMask,
    attention_backend,
    attention_kernels,
    causal_attention,
    check_backend_name,
    document_blocks,
    document_mask,
    plan_attention,
)
from lightning_moe.models.deepseek_v3.model import DeepSeekV3Model
from lightning_moe.strategies.regions import ActivationCheckpointing, apply_to_regions
from tests.models.test_module import Rows, make_trainer
from tests.models.tiny import randomise, smaller_config
from tests.tensors import grad

HERE = "lightning_moe.models.deepseek_v3.attention_backends"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16 = torch.bfloat16


# The choice


@pytest.fixture
def gpu_that_takes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Says which of PyTorch's own kernels a GPU takes, and whether Triton is there."""

    def put_in_place(*kernels: str, triton: bool = True, capability: tuple[int, int] = (9, 0)) -> None:
        monkeypatch.setattr(f"{HERE}._why_not_sdpa", lambda kernel, _: None if kernel in kernels else "refused")
        monkeypatch.setattr(f"{HERE}.importlib.util.find_spec", lambda _: object() if triton else None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)

    attention_backends._warn_once.cache_clear()
    yield put_in_place
    attention_backends._warn_once.cache_clear()


ALL = ("cudnn", "flash", "efficient")


@pytest.mark.parametrize(
    ("takes", "triton", "dims", "dtype", "documents", "expected"),
    [
        (ALL, True, (192, 128), BF16, False, "SDPA cuDNN"),
        (ALL, True, (192, 128), BF16, True, "FlexAttention"),
        (ALL, True, (192, 128), torch.float16, True, "FlexAttention"),
        (("flash", "efficient"), True, (128, 128), BF16, False, "SDPA flash"),
        (("efficient",), True, (192, 128), BF16, False, "FlexAttention"),
        (("efficient",), False, (192, 128), BF16, False, "SDPA memory-efficient (slow)"),
        (ALL, False, (192, 128), BF16, True, "SDPA cuDNN (slow)"),
        (("efficient",), False, (192, 128), BF16, True, "SDPA memory-efficient (slow)"),
        (("efficient",), True, (192, 128), torch.float32, True, "SDPA memory-efficient (slow)"),
        (("efficient",), True, (192, 128), torch.float32, False, "SDPA memory-efficient (slow)"),
        ((), True, (192, 128), torch.float64, False, "SDPA math (slow)"),
        ((), True, (24, 8), BF16, True, "SDPA math (slow)"),
        (("flash",), False, (128, 128), BF16, True, "SDPA math (slow)"),  # flash takes no mask
    ],
)
def test_order_on_cuda(
    takes: tuple[str, ...],
    triton: bool,
    dims: tuple[int, int],
    dtype: torch.dtype,
    documents: bool,
    expected: str,
    gpu_that_takes: Callable[..., None],
) -> None:
    gpu_that_takes(*takes, triton=triton)
    config = DeepSeekV3Config(qk_nope_head_dim=dims[0] - 8, qk_rope_head_dim=8, v_head_dim=dims[1])
    assert attention_backend(config, CUDA, dtype, documents=documents) == expected


@pytest.mark.parametrize(
    ("backend", "case", "reason", "working"),
    [
        ("flash", AttentionCase(192, 128, CUDA, BF16, True), "it takes no mask", "flex; slower: efficient, math"),
        ("cudnn", AttentionCase(192, 128, CUDA, BF16), "refused", "flex; slower: efficient, math"),
        (
            "flex",
            AttentionCase(192, 128, CUDA, torch.float32),
            "it computes in bfloat16 or float16",
            "efficient; slower: math",
        ),
        ("flex", AttentionCase(24, 8, CUDA, BF16), "heads need at least 16 dimensions", "efficient; slower: math"),
        ("flex", AttentionCase(24, 16, CPU, BF16), "it has no backward pass on CPU", "flash; slower: math"),
        ("cudnn", AttentionCase(24, 16, CPU, BF16), "it needs a CUDA GPU", "flash; slower: math"),
        ("efficient", AttentionCase(24, 16, CPU, BF16), "it needs a CUDA GPU", "flash; slower: math"),
        ("flash", AttentionCase(16, 24, CPU, BF16), "values are wider than queries", "math"),
    ],
)
def test_a_kernel_that_cannot_is_refused(
    backend: AttentionBackend,
    case: AttentionCase,
    reason: str,
    working: str,
    gpu_that_takes: Callable[..., None],
) -> None:
    gpu_that_takes("efficient")
    with pytest.raises(ValueError, match=f"^attention_backend is {backend}, but .*{reason}") as caught:
        case.choose(backend)
    first, last = str(caught.value).splitlines()
    assert f" does not take {case}: " in first
    assert last == f"What works here: auto, which takes {working}."


def test_what_is_asked_for_is_taken(gpu_that_takes: Callable[..., None]) -> None:
    gpu_that_takes(*ALL)
    case = AttentionCase(192, 128, CUDA, BF16)
    for backend in ("cudnn", "flash", "efficient", "math", "flex"):
        assert case.choose(cast(AttentionBackend, backend)) == backend


def test_a_name_that_is_none() -> None:
    check_backend_name("flex")
    with pytest.raises(ValueError, match="attention_backend is 'fast', but it must be one of auto, cudnn, flash"):
        check_backend_name("fast")


def test_both_kinds_of_rows_are_named(gpu_that_takes: Callable[..., None]) -> None:
    gpu_that_takes(*ALL)
    config = DeepSeekV3Config()
    assert attention_kernels(config, CUDA, BF16) == "SDPA cuDNN; FlexAttention with documents"
    assert attention_kernels(config, CUDA, BF16, "flash") == "SDPA flash; none with documents"
    assert attention_kernels(config, CUDA, BF16, "flex") == "FlexAttention"
    assert attention_kernels(config, CPU, torch.float32) == "SDPA flash, values padded"
    assert attention_kernels(config, CPU, torch.float32, "math") == "SDPA math"


def test_a_slow_kernel_is_warned_of_once(gpu_that_takes: Callable[..., None], recwarn: pytest.WarningsRecorder) -> None:
    gpu_that_takes(*ALL)
    fast = AttentionCase(192, 128, CUDA, BF16, documents=True)
    fast.warn_if_slow(fast.choose("auto"))
    assert not recwarn.list
    slow = AttentionCase(192, 128, CUDA, torch.float32, documents=True)
    gpu_that_takes("efficient")
    for _ in range(2):
        slow.warn_if_slow(slow.choose("auto"))
    assert [str(warning.message) for warning in recwarn.list] == [
        "Attention of documents with 192 and 128 dimensions in float32 on cuda goes through SDPA memory-efficient, "
        "which is SLOW. Faster but not taken: FlexAttention: it computes in bfloat16 or float16 here; "
        "SDPA cuDNN: refused"
    ]


def test_on_cuda_the_chosen_kernel_is_the_only_one(
    gpu_that_takes: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{HERE}._on_cuda", lambda _: True)
    gpu_that_takes("cudnn", triton=False)
    config, x, ids = DeepSeekV3Config(), torch.zeros(1, 3, 16, dtype=BF16), torch.tensor([[0, 0, 1]])
    assert plan_attention(config, x, None) == AttentionMask("cudnn")
    with pytest.warns(match="Attention of documents .* goes through SDPA cuDNN, which is SLOW"):
        mask = plan_attention(config, x, ids)
    assert mask is not None
    assert (mask.backend, mask.blocks) == ("cudnn", None)
    assert torch.equal(cast(Tensor, mask.dense), document_mask(ids))


@pytest.mark.parametrize(
    ("dims", "length", "capability", "measured"),
    [
        ((192, 128), 4096, (9, 0), True),
        ((192, 128), 128, (9, 0), True),
        ((192, 128), 127, (9, 0), False),
        ((192, 128), 4096, (10, 0), False),
        ((128, 128), 4096, (9, 0), False),
    ],
)
def test_block_sizes_only_where_they_were_measured(
    dims: tuple[int, int],
    length: int,
    capability: tuple[int, int],
    measured: bool,
    gpu_that_takes: Callable[..., None],
) -> None:
    gpu_that_takes(*ALL, capability=capability)
    options = AttentionCase(*dims, CUDA, BF16, documents=True, length=length).flex_options()
    assert (options is not None) == measured
    if options is not None:
        assert {name.partition("_")[0] for name in options} == {"fwd", "bwd"}
        sizes = {name: size for name, size in options.items() if "BLOCK" in name}
        assert all(128 % size == 0 for size in sizes.values())
        # What its backward kernels assert
        assert sizes["bwd_BLOCK_N1"] % sizes["bwd_BLOCK_M1"] == sizes["bwd_BLOCK_M2"] % sizes["bwd_BLOCK_N2"] == 0


# FlexAttention against a dense mask


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes FlexAttention on the CPU, where PyTorch refuses gradients although its eager kernel has them."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    monkeypatch.setattr(AttentionCase, "choose", lambda *_: "flex")


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def random_documents(batch: int, length: int, seed: int, share: float = 0.03) -> Tensor:
    starts = torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) < share
    starts[:, 0] = False
    return starts.cumsum(dim=1)


DOCUMENTS: dict[str, Callable[[int], Tensor]] = {
    "random": lambda length: random_documents(2, length, 0),
    "one": lambda length: torch.zeros(2, length, dtype=torch.int64),
    "of one token": lambda length: torch.arange(length).expand(2, -1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [5, 200, 256])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_flex_against_a_dense_mask(documents: str, length: int, dtype: torch.dtype, flex_on_cpu: None) -> None:
    ids = DOCUMENTS[documents](length)
    tensors = [draw(2, 2, length, width, seed=seed, dtype=dtype) for seed, width in enumerate((24, 24, 16))]
    found = []
    for mask in (AttentionMask("flex", blocks=document_blocks(ids)), AttentionMask(dense=document_mask(ids))):
        q, k, v = (tensor.clone().requires_grad_() for tensor in tensors)
        out = causal_attention(q, k, v, scale=0.3, mask=mask)
        out.square().sum().backward()
        found.append((out, grad(q), grad(k), grad(v)))
    rtol, atol = (1e-4, 1e-5) if dtype == torch.float32 else (1e-9, 1e-11)
    for ours, expected in zip(*found, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, expected, rtol=rtol, atol=atol)


def test_flex_without_documents(flex_on_cpu: None) -> None:
    config = smaller_config()
    mask = plan_attention(config, torch.zeros(2, 150, 16), None, "flex")
    assert mask is not None
    assert mask.blocks is not None
    q, k, v = (draw(2, 2, 150, width, seed=seed) for seed, width in enumerate((10, 10, 6)))
    out = causal_attention(q, k, v, scale=0.3, mask=mask)
    torch.testing.assert_close(out, causal_attention(q, k, v, scale=0.3), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("backend", ["flash", "math"])
@pytest.mark.parametrize("documents", [False, True])
def test_kernels_by_name_on_the_cpu(backend: AttentionBackend, documents: bool) -> None:
    config = smaller_config()
    ids = random_documents(2, 40, 1, share=0.2) if documents else None
    mask = plan_attention(config, torch.zeros(2, 40, 16), ids, backend)
    assert mask is not None
    assert mask.backend == backend
    q, k, v = (draw(2, 2, 40, width, seed=seed) for seed, width in enumerate((10, 10, 6)))
    out = causal_attention(q, k, v, scale=0.3, mask=mask)
    usual = causal_attention(q, k, v, scale=0.3, mask=plan_attention(config, torch.zeros(2, 40, 16), ids))
    torch.testing.assert_close(out, usual, rtol=1e-9, atol=1e-11)


# In the model


CONFIG = smaller_config(vocab_size=64, num_hidden_layers=2, first_k_dense_replace=1, num_nextn_predict_layers=1)


def build_model(dtype: torch.dtype = torch.float64) -> DeepSeekV3Model:
    model = DeepSeekV3Model(CONFIG).to(dtype)
    randomise(model, std=0.3)
    return model


def losses_and_gradients(model: DeepSeekV3Model, length: int, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    tokens = torch.randint(CONFIG.vocab_size, (2, length + 1), generator=torch.Generator().manual_seed(seed))
    ids = random_documents(2, length, seed, share=0.1)
    output = model(tokens[:, :-1], tokens[:, 1:], document_ids=ids)
    total = cast(Tensor, output.loss) + output.mtp_losses[0] + cast(Tensor, output.balance_loss)
    ids.zero_()  # recomputation must not see it
    total.backward()
    return total.detach(), {name: grad(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_model_with_flex_against_dense_masks(
    mode: ActivationCheckpointing, compiled: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = [losses_and_gradients(build_model(), 24, seed) for seed in range(3)]
    request.getfixturevalue("flex_on_cpu")
    create = Mock(wraps=attention_backends.create_block_mask)
    monkeypatch.setattr(attention_backends, "create_block_mask", create)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    torch._dynamo.reset()
    counters.clear()
    model = build_model()
    apply_to_regions(model, mode, compile_regions=compiled)
    graphs = []
    for seed, (expected, expected_gradients) in enumerate(dense):
        loss, gradients = losses_and_gradients(model, 24, seed)
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0.0)
        for name, value in expected_gradients.items():
            torch.testing.assert_close(gradients[name], value, rtol=1e-7, atol=1e-9, msg=name)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [graphs[0]] * 3
    assert create.call_count == 3  # one for all layers and depths of a forward pass
    assert sum(counters["graph_break"].values()) == 0
    assert graphs[0] > 1 or not compiled  # the eager kernel is one for itself


def test_other_documents_are_compiled_once(flex_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of compiled regions, as on a GPU."""
    monkeypatch.setattr(f"{HERE}._on_cuda", lambda _: True)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    # Compiled anew, and not kept
    monkeypatch.setattr(attention_backends, "_compiled", functools.cache(attention_backends._compiled.__wrapped__))
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(AttentionCase, "flex_options", lambda _: None)
    q, k, v = (draw(2, 2, 200, width, seed=seed).requires_grad_() for seed, width in enumerate((10, 10, 6)))
    graphs = []
    for seed in range(4):
        ids = random_documents(2, 200, seed)
        out = causal_attention(q, k, v, scale=0.3, mask=plan_attention(CONFIG, torch.zeros(2, 200, 16), ids))
        out.sum().backward()
        with monkeypatch.context() as patch:
            patch.setattr(f"{HERE}._on_cuda", lambda _: False)
            expected = causal_attention(q, k, v, scale=0.3, mask=AttentionMask(dense=document_mask(ids)))
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-11)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [2] * 4  # the mask's and attention's
    assert sum(counters["graph_break"].values()) == 0


# In training


def test_training_with_a_kernel_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("lightning_moe.models.deepseek_v3.module.rank_zero_info", said.append)
    module = DeepSeekV3(CONFIG, attention_backend="math")
    sdpa_kernel = Mock(wraps=attention_backends.sdpa_kernel)
    monkeypatch.setattr(attention_backends, "sdpa_kernel", sdpa_kernel)
    make_trainer(max_steps=1).fit(module, DataLoader(Rows(2), batch_size=2))
    assert [call.args[0] for call in sdpa_kernel.mock_calls] == [[SDPBackend.MATH]] * 3
    assert said == ["Attention of rows with 10 and 6 dimensions in float32 on cpu: SDPA math."]
    assert module.attention_backend() == "SDPA math"


def test_what_auto_takes_is_said_for_documents_too(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("lightning_moe.models.deepseek_v3.module.rank_zero_info", said.append)
    data = LightningDataModule.from_datasets(Rows(2), batch_size=2)
    cast(Any, data).document_mask = True
    make_trainer(max_steps=1, precision="64-true").fit(DeepSeekV3(CONFIG), data)
    assert said == ["Attention of documents with 10 and 6 dimensions in float64 on cpu: SDPA flash, values padded."]


def test_training_does_not_begin_with_a_kernel_that_cannot() -> None:
    module = DeepSeekV3(CONFIG, attention_backend="cudnn")
    with pytest.raises(ValueError, match="attention_backend is cudnn, but SDPA cuDNN does not take rows with 10 and 6"):
        make_trainer(max_steps=1).fit(module, DataLoader(Rows(2), batch_size=2))
    assert module.model is None
    with pytest.raises(ValueError, match="attention_backend is 'fast'"):
        DeepSeekV3(CONFIG, attention_backend=cast(Any, "fast"))


def test_documents_that_nobody_announced_are_refused_too() -> None:
    x = torch.zeros(1, 8, 16)
    assert plan_attention(CONFIG, x, None) is None
    with pytest.raises(ValueError, match="attention_backend is flex, but FlexAttention does not take documents"):
        plan_attention(CONFIG, x, torch.zeros(1, 8, dtype=torch.int64), "flex")


def test_documents_are_told_apart_by_all_of_their_number() -> None:
    ids = torch.tensor([[0, 0, 2**32, 2**32]])
    blocks = document_blocks(ids)
    seen = [
        [bool(blocks.mask_mod(torch.tensor(0), torch.tensor(0), torch.tensor(i), torch.tensor(j))) for j in range(4)]
        for i in range(4)
    ]
    assert seen == document_mask(ids)[0, 0].tolist()
