"""Where a result comes from: what every file of results is stored with."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def provenance() -> dict[str, Any]:
    """Versions, commit and machine of this process, ready for JSON."""
    packages = ("cbsql", "gymnasium", "numba", "numpy", "stable-baselines3", "torch")
    return {
        "commit": _commit(),
        "machine": {"cpu": _cpu_name(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": {
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in packages},
        },
    }


def _commit() -> str | None:
    """The commit of the checkout this package runs from, with ``-dirty`` if it was edited."""
    try:
        # A wheel may be installed within a checkout of something else.
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        return _git("describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return None  # installed from a wheel: the version says it all


def _git(*command: str) -> str:
    here = Path(__file__).parent
    run = subprocess.run(["git", *command], cwd=here, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def _cpu_name() -> str:
    """The processor's name, with the numbers that tell generations of one name apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    cpu = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    numbers = [f"{key} {cpu[key]}" for key in ("cpu family", "model") if key in cpu]
    return ", ".join([cpu.get("model name", "unknown"), *numbers])
