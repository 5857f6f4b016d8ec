"""Which generation of DeepEP is installed.

Four incompatible interfaces are imported as ``deep_ep``. They are told apart by their classes, as builds keep version
numbers of others.
"""

from importlib import import_module
from typing import Any, Literal, NamedTuple

REPOSITORY = "https://github.com/deepseek-ai/DeepEP"

Generation = Literal["V1", "V2"]

_NOT_SUPPORTED = {
    "EPBuffer": "DeepEP 2.5 (EPBuffer)",
    "HybridEPBuffer": "the HybridEP branch of DeepEP (HybridEPBuffer)",
}


class Found(NamedTuple):
    """An installed DeepEP.

    Args:
        generation: ``"V1"`` for ``deep_ep.Buffer``, ``"V2"`` for ``deep_ep.ElasticBuffer``.
        module: The module ``deep_ep``.
    """

    generation: Generation
    module: Any


def find_deep_ep() -> Found:
    """Imports ``deep_ep`` and recognises it.

    Raises:
        ImportError: There is none, it fails while it is imported, or it is one that is not supported.
    """
    try:
        module = import_module("deep_ep")
    except ModuleNotFoundError as error:
        if error.name != "deep_ep":
            raise ImportError(f"deep_ep is installed, but lacks {error.name}; see {REPOSITORY}.") from error
        raise ImportError(f"deep_ep is not installed; {REPOSITORY} tells how to build it.") from None
    except Exception as error:  # its import looks for CUDA and NCCL and asserts what it finds
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise ImportError(f"deep_ep is installed, but its import fails: {type(error).__name__}: {reason}") from error
    for name, what in _NOT_SUPPORTED.items():
        if hasattr(module, name):
            raise ImportError(f"the installed deep_ep is {what}; supported are V1 (v1.2.1) and V2 (2.1), {REPOSITORY}.")
    if hasattr(module, "ElasticBuffer"):
        return Found("V2", module)
    if hasattr(module, "Buffer"):
        return Found("V1", module)
    raise ImportError(f"the installed deep_ep has neither Buffer nor ElasticBuffer; {REPOSITORY} has those that do.")
