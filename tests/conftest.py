"""The checkout comes first on the path: `tests/kvq_jax` and `tests/models` must not be taken for the packages."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture(scope="module", autouse=True)
def _programs_of_a_file_go_with_it() -> Iterator[None]:
    """Compiled programs are memory maps, of which a process may have 65,530; a worker that kept all would abort."""
    yield
    jax.clear_caches()
    gc.collect()
