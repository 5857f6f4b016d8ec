"""What devices can do at most, by their makers' data sheets."""

import re
from typing import Literal, NamedTuple

PeakDtype = Literal["float32", "tfloat32", "bfloat16", "float8"]


class Peak(NamedTuple):
    """Dense peaks of a device, in TFLOP/s; data sheets often print twice as much, for sparse matrices.

    Args:
        source: The data sheet.
        rates: TFLOP/s by dtype of the operands.
    """

    source: str
    rates: dict[str, float]


def _peak(source: str, float32: float, tfloat32: float | None, bfloat16: float, float8: float | None) -> Peak:
    rates = {"float32": float32, "tfloat32": tfloat32, "bfloat16": bfloat16, "float8": float8}
    return Peak(source, {dtype: rate for dtype, rate in rates.items() if rate is not None})


_H100_SXM = _peak("NVIDIA H100 data sheet, SXM", 66.9, 494.7, 989.4, 1978.9)

# The first whose name the device's name contains, as a word.
_PEAKS = {
    "GB200": _peak("NVIDIA GB200 NVL72 data sheet", 80.0, 1250.0, 2500.0, 5000.0),
    "B200": _peak("NVIDIA HGX B200 data sheet", 75.0, 1125.0, 2250.0, 4500.0),
    "H200 NVL": _peak("NVIDIA H200 data sheet, NVL", 60.0, 417.5, 835.5, 1670.5),
    "H200": _peak("NVIDIA H200 data sheet, SXM", 66.9, 494.7, 989.4, 1978.9),
    "GH200": _peak("NVIDIA GH200 data sheet", 66.9, 494.7, 989.4, 1978.9),
    "H100 PCIe": _peak("NVIDIA H100 data sheet, PCIe", 51.2, 378.0, 756.0, 1513.0),
    "H100 NVL": _peak("NVIDIA H100 data sheet, NVL", 60.0, 417.5, 835.5, 1670.5),
    "H100": _H100_SXM,
    "H800": _H100_SXM._replace(source="NVIDIA H100 data sheet, SXM: the H800 multiplies as fast"),
    "A100": _peak("NVIDIA A100 data sheet", 19.5, 156.0, 312.0, None),
    "A800": _peak("NVIDIA A100 data sheet: the A800 multiplies as fast", 19.5, 156.0, 312.0, None),
    "L40S": _peak("NVIDIA L40S data sheet", 91.6, 183.0, 362.0, 733.0),
    "MI325X": _peak("AMD Instinct MI325X data sheet", 163.4, 653.7, 1307.4, 2614.9),
    "MI300X": _peak("AMD Instinct MI300X data sheet", 163.4, 653.7, 1307.4, 2614.9),
}


def peak_of(device_name: str) -> Peak | None:
    """Returns the peaks of a device, or ``None`` where they are not known.

    Args:
        device_name: Name as ``torch.cuda.get_device_name`` gives it.
    """
    for name, peak in _PEAKS.items():
        if re.search(rf"\b{name}\b", device_name, re.IGNORECASE):
            return peak
    return None
