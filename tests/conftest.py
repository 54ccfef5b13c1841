"""How programs are compiled, and the path: `tests/kvq_jax` and `tests/models` must not be taken for the packages.

What a test of this suite costs is the compiling of its programs. `--compile=quick`, the default, asks XLA for simple
machine code; `--compile=full` for that of production. `make test` runs the tests marked `compiled` with the second (the
golden vectors, and that what is stored does not depend on how a program was fused), and all others with the first.
"""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

QUICK = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
MOST_MAPS = 30_000  # of memory, of which a process may have 65,530; each compiled program takes a few


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--compile", choices=("quick", "full"), default="quick", help="how hard XLA works on a program")


def pytest_configure(config: pytest.Config) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    if config.getoption("compile") == "quick" and QUICK not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {QUICK}".strip()  # read at the first program, also by child processes


@pytest.fixture(scope="module", autouse=True)
def _not_too_many_compiled_programs() -> Iterator[None]:
    """A worker that kept every program of every file would abort."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()
