"""What a run ran on: versions, device, commit, memory."""

import importlib.metadata
import platform
import resource
import subprocess
import sys
from pathlib import Path

import jax


def versions() -> dict[str, str]:
    """Python and the packages whose version can change a number."""
    found = {"python": platform.python_version()}
    for package in ("jax", "jaxlib", "numpy", "kvq-jax"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "from the checkout"
    return found


def device() -> str:
    """Platform, kind and number of the devices, e.g. `cpu: cpu × 1`."""
    devices = jax.devices()
    return f"{devices[0].platform}: {devices[0].device_kind} × {len(devices)}"


def git_commit() -> str | None:
    """The checkout's commit, `+changes` where files differ from it; None outside of a checkout."""
    here = Path(__file__).parent

    def git(*args: str) -> str:
        return subprocess.run(("git", *args), cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def peak_memory_bytes() -> int:
    """The most memory that this process has held so far: of the device where it counts, else of the host."""
    stats = jax.devices()[0].memory_stats() or {}
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return int(stats.get("peak_bytes_in_use", host))
