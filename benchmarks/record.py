"""What all benchmarks share: the description of the machine, and the record they leave behind."""

import datetime
import importlib.metadata
import json
import platform
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def peak_memory() -> int:
    """Largest resident memory of this process so far, in bytes."""
    return _status("VmHWM")


def resident_memory() -> int:
    """Resident memory of this process, in bytes."""
    return _status("VmRSS")


def _status(key: str) -> int:
    match = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"/proc/self/status has no {key}; this benchmark measures memory on Linux.")
    return int(match[1]) * 1024


def machine(threads: int) -> dict[str, Any]:
    """Describes processor and versions."""
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    versions = {}
    for package in ("torch", "transformers", "lightning-moe"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed as a package"
    return {
        "date": datetime.date.today().isoformat(),
        "processor": cpu[1] if cpu else platform.processor(),
        "threads": threads,
        "python": platform.python_version(),
        "versions": versions,
    }


def save(name: str, content: dict[str, Any]) -> Path:
    """Writes the record ``results/<name>.json``."""
    return write(RESULTS / f"{name}.json", content)


def write(path: Path, content: dict[str, Any]) -> Path:
    """Writes a record whole or not at all, in place of what there was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".partial")
    written.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    written.replace(path)
    return path
