"""What the oldest PyTorch that is supported cannot do, where tests ask for it."""

import pytest
import torch

_OLDEST = torch.__version__.startswith("2.11.")

fp8_rows_on_cpu = pytest.mark.skipif(_OLDEST, reason="PyTorch 2.11 multiplies FP8 with a scale per row on CUDA only")
compiled_float64_attention = pytest.mark.skipif(
    _OLDEST, reason="PyTorch 2.11 cannot compile float64 attention on a CPU"
)
