"""The checkout comes first on the path: `tests/kvq_jax` and `tests/models` must not be taken for the packages."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
