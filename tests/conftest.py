"""The checkout comes first on the path: `tests/kvq_jax` and `tests/models` must not be taken for the packages."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))


MOST_MAPS = 30_000  # of memory, of which a process may have 65,530; each compiled program takes a few


@pytest.fixture(scope="module", autouse=True)
def _not_too_many_compiled_programs() -> Iterator[None]:
    """A worker that kept every program of every file would abort."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()
