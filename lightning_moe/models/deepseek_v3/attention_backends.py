"""The choice of the attention kernel, and causal attention through it.

Shapes: ``B`` batch, ``S`` sequence, ``H`` heads.
"""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from lightning_moe.models.deepseek_v3.config import DeepSeekV3Config

Kernel = Literal["cudnn", "flash", "efficient", "math", "flex"]
AttentionBackend = Literal["auto", "cudnn", "flash", "efficient", "math", "flex"]

# On CUDA, fastest first, without and with documents; docs/model.md has the measurement.
_CUDA_ORDER: dict[bool, tuple[Kernel, ...]] = {
    False: ("cudnn", "flash", "flex", "efficient", "math"),
    True: ("flex", "cudnn", "efficient", "math"),
}
_SDPA: dict[str, SDPBackend] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_SDPA_ORDER = list(_SDPA.values())
_NAMES: dict[Kernel, str] = {
    "cudnn": "SDPA cuDNN",
    "flash": "SDPA flash",
    "efficient": "SDPA memory-efficient",
    "math": "SDPA math",
    "flex": "FlexAttention",
}
# Measured with 192 and 128 dimensions on compute capability 9.0: 1.2 to 1.5 times as fast as FlexAttention's own.
_HOPPER_192_128 = {
    "fwd_BLOCK_M": 128,
    "fwd_BLOCK_N": 64,
    "fwd_num_warps": 8,
    "bwd_BLOCK_M1": 32,
    "bwd_BLOCK_N1": 64,
    "bwd_BLOCK_M2": 64,
    "bwd_BLOCK_N2": 32,
}
_FLEX_BLOCK = 128  # side of a block of a block mask
_FLEX_SMALLEST_HEAD = 16


def _on_cuda(device: torch.device) -> bool:
    return device.type == "cuda"


@dataclass(frozen=True)
class AttentionMask:
    """What tokens may see, and the kernel that is told so; one for all layers of a forward pass.

    No pytree knows it, so that FSDP and recomputation hand it on as it is.

    Args:
        backend: The kernel; ``"auto"`` for PyTorch's own choice.
        dense: :func:`document_mask`, for all kernels but FlexAttention; ``None`` for plain causal attention.
        blocks: The block mask of FlexAttention, which holds the document ids that it was made from.
        kernel_options: Block sizes of FlexAttention; ``None`` for its own.
    """

    backend: AttentionBackend = "auto"
    dense: Tensor | None = None
    blocks: BlockMask | None = None
    kernel_options: dict[str, int] | None = None


def document_mask(document_ids_BS: Tensor) -> Tensor:
    """Causal mask within documents: bool ``(B, 1, S, S)``, True where a query may see a key."""
    same = document_ids_BS[:, None, :, None] == document_ids_BS[:, None, None, :]
    return same.tril()


def document_blocks(document_ids_BS: Tensor) -> BlockMask:
    """The same as blocks of 128 x 128, of which those without a visible key are skipped.

    Args:
        document_ids_BS: Document of each token; a copy is kept, so that recomputation sees the same.
    """
    documents = document_ids_BS.clone()

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[b, query] == documents[b, key])

    batch, length = documents.shape
    return _block_mask(visible, batch, length, documents.device)


def _causal(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def _block_mask(visible: Callable[..., Tensor], batch: int | None, length: int, device: torch.device) -> BlockMask:
    create = _compiled(create_block_mask) if _on_cuda(device) else create_block_mask
    with torch.no_grad():  # compiled once, not for training and evaluation each
        return create(visible, batch, None, length, length, device=str(device), BLOCK_SIZE=_FLEX_BLOCK)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles once. What does not compile as a whole is an error: run eagerly, it holds S x S values for each head."""
    compiled = torch.compile(function, fullgraph=True)
    # Training, evaluation and rows of other lengths or numbers need one each, which may be more than PyTorch's 8.
    return torch._dynamo.config.patch(recompile_limit=64)(compiled)


def plan_attention(
    config: DeepSeekV3Config, x_BSD: Tensor, document_ids_BS: Tensor | None, backend: AttentionBackend = "auto"
) -> AttentionMask | None:
    """Chooses the kernel of a forward pass, and makes what it needs to tell documents apart.

    Args:
        config: The architecture.
        x_BSD: Hidden states that go into the first layer.
        document_ids_BS: Document of each token; ``None`` makes each row one document.
        backend: The kernel that was asked for.

    Returns:
        What attention takes; ``None`` is plain causal attention by PyTorch's own choice.

    Raises:
        ValueError: A kernel was asked for that cannot compute this.
    """
    device, length = x_BSD.device, x_BSD.shape[1]
    lowered = _on_cuda(device) and torch.is_autocast_enabled("cuda")
    dtype = torch.get_autocast_dtype("cuda") if lowered else x_BSD.dtype
    documents = document_ids_BS is not None
    case = AttentionCase(config.qk_head_dim, config.v_head_dim, device, dtype, documents, length)
    kernel = case.choose(backend)
    if backend == "auto":
        case.warn_if_slow(kernel)
    if kernel == "flex":
        if document_ids_BS is None:
            blocks = _block_mask(_causal, None, length, device)
        else:
            blocks = document_blocks(document_ids_BS)
        return AttentionMask("flex", blocks=blocks, kernel_options=case.flex_options())
    # Only this one on CUDA: PyTorch would go on to a slower one without a word.
    named = kernel if _on_cuda(device) else backend
    if document_ids_BS is not None:
        return AttentionMask(named, dense=document_mask(document_ids_BS))
    return AttentionMask(named) if named != "auto" else None


def causal_attention(
    q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor, *, scale: float, mask: AttentionMask | None = None
) -> Tensor:
    """Causal attention through the kernel that :func:`plan_attention` has chosen.

    Without a choice, CUDA takes the first of cuDNN, FlashAttention, memory-efficient and math that takes the shapes.
    On CPU only the kernel for equal dimensions avoids the S x S matrix, so values are padded to the queries' width.

    Args:
        q_BHSd: Queries.
        k_BHSd: Keys.
        v_BHSd: Values; their width may differ.
        scale: Factor on the logits.
        mask: What tokens may see, or ``None`` for plain causal attention.
    """
    on_cuda = _on_cuda(q_BHSd.device)
    backend, dense = ("auto", None) if mask is None else (mask.backend, mask.dense)
    if mask is not None and mask.blocks is not None:
        # Compiled by itself, unless it is part of what is being compiled.
        alone = on_cuda and not torch.compiler.is_compiling()
        flex: Any = _compiled(flex_attention) if alone else flex_attention
        return flex(q_BHSd, k_BHSd, v_BHSd, block_mask=mask.blocks, scale=scale, kernel_options=mask.kernel_options)
    missing = 0 if on_cuda else q_BHSd.shape[-1] - v_BHSd.shape[-1]
    values = F.pad(v_BHSd, (0, missing)) if missing > 0 else v_BHSd
    if backend == "auto" and not on_cuda:
        out = _sdpa(q_BHSd, k_BHSd, values, dense, scale)
    else:
        with sdpa_kernel(_SDPA_ORDER if backend == "auto" else [_SDPA[backend]], set_priority=True):
            out = _sdpa(q_BHSd, k_BHSd, values, dense, scale)
    return out[..., : v_BHSd.shape[-1]] if missing > 0 else out


def _sdpa(q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor, dense: Tensor | None, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(q_BHSd, k_BHSd, v_BHSd, dense, is_causal=dense is None, scale=scale)


@dataclass(frozen=True)
class AttentionCase:
    """What a kernel has to take.

    Args:
        qk_dim: Query and key dimensions of a head.
        v_dim: Value dimensions of a head.
        device: Where it runs.
        dtype: Compute dtype.
        documents: Whether rows hold documents that do not see each other.
        length: Tokens of a row.
    """

    qk_dim: int
    v_dim: int
    device: torch.device
    dtype: torch.dtype
    documents: bool = False
    length: int = 128

    @property
    def order(self) -> tuple[Kernel, ...]:
        """Kernels from the fastest on; the last one takes everything."""
        return _CUDA_ORDER[self.documents] if _on_cuda(self.device) else ("flash", "math")

    def choose(self, backend: AttentionBackend) -> Kernel:
        """Returns the kernel that is asked for, or the fastest that takes this.

        Args:
            backend: What is asked for.

        Raises:
            ValueError: A kernel that does not take this.
        """
        if backend == "auto":
            return next(kernel for kernel in self.order if self.why_not(kernel) is None)
        reason = self.why_not(backend)
        if reason is None:
            return backend
        fastest, *slower = [kernel for kernel in self.order if self.why_not(kernel) is None]
        others = f"; slower: {', '.join(slower)}" if slower else ""
        raise ValueError(
            f"attention_backend is {backend}, but {_NAMES[backend]} does not take {self}: {reason}.\n"
            f"What works here: auto, which takes {fastest}{others}."
        )

    def why_not(self, kernel: Kernel) -> str | None:
        """Says why a kernel does not take this; ``None`` if it does.

        Args:
            kernel: The kernel.
        """
        if kernel == "math":
            return None
        if not _on_cuda(self.device):
            if kernel == "flash":
                return "values are wider than queries" if self.v_dim > self.qk_dim else None
            return "it has no backward pass on CPU" if kernel == "flex" else "it needs a CUDA GPU"
        if kernel == "flex":
            return self._why_not_flex()
        if kernel == "flash" and self.documents:
            return "it takes no mask"
        return _why_not_sdpa(kernel, self)

    def _why_not_flex(self) -> str | None:
        if self.dtype not in (torch.bfloat16, torch.float16):
            return "it computes in bfloat16 or float16 here"
        if min(self.qk_dim, self.v_dim) < _FLEX_SMALLEST_HEAD:
            return f"heads need at least {_FLEX_SMALLEST_HEAD} dimensions"
        return None if importlib.util.find_spec("triton") else "Triton is not installed"

    def flex_options(self) -> dict[str, int] | None:
        """Block sizes of FlexAttention where they have been measured, ``None`` elsewhere."""
        # Rows shorter than a block go through another kernel, with sizes of its own.
        if (self.qk_dim, self.v_dim) != (192, 128) or not _on_cuda(self.device) or self.length < _FLEX_BLOCK:
            return None
        return dict(_HOPPER_192_128) if torch.cuda.get_device_capability(self.device) == (9, 0) else None

    def slow(self, kernel: Kernel) -> bool:
        """Whether a kernel takes several times as long as the fastest that GPUs have for this.

        Args:
            kernel: The kernel.
        """
        if not _on_cuda(self.device):
            return False
        return kernel in ("efficient", "math") or (self.documents and kernel != "flex")

    def warn_if_slow(self, kernel: Kernel) -> None:
        """Warns, once in a process, where a kernel is slow, and says why the faster ones are not taken.

        Args:
            kernel: The kernel that is taken.
        """
        if self.slow(kernel):
            faster = self.order[: self.order.index(kernel)]
            reasons = "; ".join(f"{_NAMES[name]}: {self.why_not(name)}" for name in faster)
            _warn_once(
                f"Attention of {self} goes through {_NAMES[kernel]}, which is SLOW. Faster but not taken: {reasons}"
            )

    def name(self, kernel: Kernel) -> str:
        """Names a kernel for people.

        Args:
            kernel: The kernel that is taken.
        """
        padded = kernel == "flash" and not _on_cuda(self.device) and self.v_dim < self.qk_dim
        return _NAMES[kernel] + ", values padded" * padded + " (slow)" * self.slow(kernel)

    def __str__(self) -> str:
        what = "documents" if self.documents else "rows"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{what} with {self.qk_dim} and {self.v_dim} dimensions in {dtype} on {self.device.type}"


def _why_not_sdpa(kernel: Kernel, case: AttentionCase) -> str | None:
    """Asks PyTorch about one of its own kernels on CUDA."""
    empty = functools.partial(torch.empty, device=case.device, dtype=case.dtype, requires_grad=True)
    q, v = empty(1, 1, case.length, case.qk_dim), empty(1, 1, case.length, case.v_dim)
    mask = torch.ones(1, 1, case.length, case.length, dtype=torch.bool, device=case.device) if case.documents else None
    params = torch.backends.cuda.SDPAParams(q, q, v, mask, 0.0, not case.documents, False)
    takes = {
        "cudnn": torch.backends.cuda.can_use_cudnn_attention,
        "flash": torch.backends.cuda.can_use_flash_attention,
        "efficient": torch.backends.cuda.can_use_efficient_attention,
    }[kernel]
    with sdpa_kernel(_SDPA[kernel]):  # as it will be called, whatever is switched off elsewhere
        if takes(params):
            return None
    if kernel != "efficient" and case.dtype not in (torch.bfloat16, torch.float16):
        return "it computes in bfloat16 or float16"
    if kernel == "flash" and case.qk_dim != case.v_dim:
        return "it needs equal dimensions"
    return "PyTorch refuses it on this GPU"


@functools.cache
def _warn_once(text: str) -> None:
    rank_zero_warn(text)


def attention_backend(
    config: DeepSeekV3Config,
    device: torch.device,
    dtype: torch.dtype,
    backend: AttentionBackend = "auto",
    *,
    documents: bool = False,
) -> str:
    """Names the kernel that attention takes for an architecture on a device.

    Args:
        config: The architecture.
        device: Where it runs.
        dtype: Compute dtype.
        backend: The kernel that is asked for.
        documents: Whether rows hold documents that do not see each other.

    Raises:
        ValueError: A kernel was asked for that cannot compute this.
    """
    case = AttentionCase(config.qk_head_dim, config.v_head_dim, device, dtype, documents)
    return case.name(case.choose(backend))


def attention_kernels(
    config: DeepSeekV3Config, device: torch.device, dtype: torch.dtype, backend: AttentionBackend = "auto"
) -> str:
    """Names the kernels of both kinds of rows, such as ``SDPA cuDNN; FlexAttention with documents``.

    Args:
        config: The architecture.
        device: Where it runs.
        dtype: Compute dtype.
        backend: The kernel that is asked for.
    """
    names = []
    for documents in (False, True):
        try:
            names.append(attention_backend(config, device, dtype, backend, documents=documents))
        except ValueError:
            names.append("none")
    return names[0] if names[0] == names[1] else f"{names[0]}; {names[1]} with documents"


def check_backend_name(backend: str) -> None:
    """Refuses a name that is no kernel.

    Args:
        backend: What ``attention_backend`` was given.

    Raises:
        ValueError: It is none.
    """
    if backend not in get_args(AttentionBackend):
        allowed = ", ".join(get_args(AttentionBackend))
        raise ValueError(f"attention_backend is {backend!r}, but it must be one of {allowed}.")
