"""The Hadamard rotation against scipy's matrix."""

import jax
import numpy as np
import pytest
from scipy.linalg import block_diag, hadamard

import kvq_jax as kvq
from kvq_jax.rotation import block_size

RNG = np.random.default_rng(0)
# head_dim -> block: Sylvester matrices exist for powers of two; other sizes are block-diagonal
BLOCKS = {2: 2, 6: 2, 64: 64, 80: 16, 96: 32, 128: 128, 256: 256}


@pytest.mark.parametrize(("size", "block"), BLOCKS.items())
def test_is_the_sylvester_matrix_or_blocks_of_it(size: int, block: int) -> None:
    assert block_size(size) == block
    matrix = block_diag(*[hadamard(block) / np.sqrt(block)] * (size // block))
    x = RNG.standard_normal((3, 5, size))
    np.testing.assert_allclose(kvq.hadamard(x.astype(np.float32)), x @ matrix, atol=3e-6)
    np.testing.assert_allclose(kvq.hadamard(kvq.hadamard(x.astype(np.float32))), x, atol=3e-6)


def test_any_axis_and_float32_inside_and_out() -> None:
    x = RNG.standard_normal((64, 3)).astype(np.float16)
    y = kvq.hadamard(x, axis=0)
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y, kvq.hadamard(x.T.astype(np.float32)).T)


def test_a_token_is_rotated_the_same_alone_and_among_others_and_compiled() -> None:
    x = RNG.standard_normal((2, 3, 17, 96)).astype(np.float32)
    together = np.asarray(jax.jit(kvq.hadamard)(x))
    np.testing.assert_array_equal(together[1:, 1:2, 4:5], jax.jit(kvq.hadamard)(x[1:, 1:2, 4:5]))
    np.testing.assert_array_equal(together, kvq.hadamard(x))


def test_norms_and_products_are_kept() -> None:
    q, k = RNG.standard_normal((2, 40, 80)).astype(np.float32)
    np.testing.assert_allclose(kvq.hadamard(q) @ kvq.hadamard(k).T, q @ k.T, atol=2e-5)


def test_a_size_without_a_power_of_two_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"odd head_dim \(65\)"):
        kvq.hadamard(np.zeros((2, 65)))
