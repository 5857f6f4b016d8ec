"""Kernels that take numbers of rows are compiled once, whatever the routing makes of these numbers."""

import importlib

import pytest

pytest.importorskip("triton")
import triton

# The same in every step. For all else Triton would compile again once it is a multiple of 16, or 1, and when it is not.
_FIXED = {"hidden", "num_experts", "tiles", "values_stride", "scales_stride", "largest"}


@pytest.mark.parametrize("module", ["plan_kernel", "permute_kernel", "fp8_rows_kernel"])
def test_what_routing_changes_does_not_choose_the_compiled_kernel(module: str) -> None:
    names = vars(importlib.import_module(f"lightning_moe.dispatch.{module}"))
    kernels = [value for name, value in names.items() if name.startswith("_") and hasattr(value, "params")]
    assert kernels
    for kernel in kernels:
        assert isinstance(kernel, triton.JITFunction)
        changing = [p for p in kernel.params if not (p.is_constexpr or p.name.endswith("_ptr") or p.name in _FIXED)]
        assert {p.name: p.do_not_specialize for p in changing} == dict.fromkeys([p.name for p in changing], True)
