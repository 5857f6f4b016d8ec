"""Runs a check of Triton kernels in Triton's interpreter, so that no GPU is needed."""

import os
import subprocess
import sys

import pytest


def run_interpreted(code: str) -> None:
    """Runs Python code that ends by printing ``equal``, in a process where Triton interprets kernels."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    if "active drivers" in result.stderr:
        pytest.skip("this version of Triton needs a driver even to interpret")
    assert result.stdout.strip() == "equal", result.stderr[-2000:]
