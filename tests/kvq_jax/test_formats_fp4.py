"""E2M1, UE8M0 and E4M3 against ml_dtypes and against exact arithmetic."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kvq_jax.block_formats import ROUNDINGS, e2m1, e2m1_codes, e4m3, is_finite, largest, log2_rounded, power_of_two

GRID = np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def around(x: np.ndarray) -> np.ndarray:
    """x, its two neighbours in float32, and all of them negated."""
    x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))])
    return np.concatenate([x, -x])


ELEMENTS = np.concatenate(
    [around((GRID[1:] + GRID[:-1]) / 2), around(GRID), np.linspace(-9, 9, 3001, dtype=np.float32), np.float32([3e38])]
)


def test_e2m1_stands_for_what_ml_dtypes_says_for_all_16_codes() -> None:
    codes = np.arange(16)
    expected = codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    got = np.asarray(e2m1(jnp.asarray(codes)))
    assert got.tobytes() == expected.tobytes()  # the sign of zero too


@pytest.mark.parametrize("byte", [0, 1, 2, 60, 127, 128, 200, 254])
def test_e2m1_ties_to_even_are_those_of_ml_dtypes_at_every_scale(byte: int) -> None:
    with np.errstate(over="ignore"):
        x = np.ldexp(ELEMENTS, byte - 127).astype(np.float32)
    exact = np.isfinite(x) & (np.ldexp(x.astype(np.float64), 127 - byte) == ELEMENTS)  # not below the denormals
    assert exact.sum() > 500
    expected = np.clip(ELEMENTS, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    got = np.asarray(jax.jit(lambda x: e2m1_codes(x, jnp.uint8(byte), ties_to_even=True))(x))
    np.testing.assert_array_equal(got[exact], expected[exact])


@pytest.mark.parametrize("byte", [1, 2, 127, 254])
def test_e2m1_ties_down_go_to_the_lower_value_and_zero_has_no_sign(byte: int) -> None:
    with np.errstate(over="ignore"):
        x = np.ldexp(ELEMENTS, byte - 127).astype(np.float32)
    x = x[np.isfinite(x)]
    levels = np.sort(np.concatenate([-GRID[1:], GRID])).astype(np.float64)
    scaled = np.clip(np.ldexp(x.astype(np.float64), 127 - byte), -10, 10)
    nearest = np.argmin(np.abs(scaled[:, None] - levels), axis=1)  # the first of two is the lower
    codes = e2m1_codes(x, jnp.uint8(byte), ties_to_even=False)
    np.testing.assert_array_equal(e2m1(codes.astype(jnp.int32)), levels[nearest])
    assert not (np.asarray(codes) == 8).any()


def exact_log2(x: Fraction, rule: str) -> int:
    """Rounded by comparing exact numbers."""
    floor = 0
    while Fraction(2) ** (floor + 1) <= x:
        floor += 1
    while Fraction(2) ** floor > x:
        floor -= 1
    mantissa = x / Fraction(2) ** floor
    up = {"nearest": mantissa**2 >= 2, "even": mantissa >= Fraction(7, 4), "floor": False, "ceil": mantissa > 1}
    return floor + up[rule]


@pytest.mark.parametrize("rule", ROUNDINGS)
@pytest.mark.parametrize("factor", [0.156, 0.25, 1.0, 3.0])
def test_log2_is_rounded_exactly_from_the_denormals_to_the_largest_number(rule: str, factor: float) -> None:
    boundary = np.float32([1, np.sqrt(2), 1.5, 1.75, 1.2]) / np.float32(factor)
    x = np.abs(around(np.ldexp(boundary[:, None], np.arange(-120, 120, 7)).astype(np.float32).ravel()))
    x = np.concatenate([x, np.float32([1e-45, 3e-45, 1e-40, 5e-39, 1.17549435e-38, 3.4e38])])
    got, vanishes = jax.jit(lambda x: log2_rounded(largest(x[:, None]), factor, ROUNDINGS[rule]))(x)
    for value, exponent in zip(x, np.asarray(got), strict=True):
        # float32's product of the mantissas, the power of two kept apart
        mantissa, two = np.frexp(value)
        product = Fraction(float(np.float32(mantissa) * np.float32(factor))) * Fraction(2) ** int(two)
        assert exponent == exact_log2(product, rule), (value, factor)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(vanishes, x * np.float32(factor) == 0)


def test_scale_bytes_are_ml_dtypes_powers_of_two() -> None:
    byte = np.arange(1, 255, dtype=np.uint8)
    expected = byte.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(power_of_two(byte), expected)
    assert float(power_of_two(jnp.uint8(0))) == 0


def test_the_largest_magnitude_sees_denormals_and_what_is_not_finite() -> None:
    x = np.float32([[0, -0.0], [1e-45, -3e-45], [1, -np.inf], [np.inf, np.nan], [-2, 1]])
    bits = largest(x)
    np.testing.assert_array_equal(is_finite(bits), [True, True, False, False, True])
    np.testing.assert_array_equal(np.asarray(bits)[[0, 1, 4]].view(np.float32), np.float32([0, 3e-45, 2]))


def test_e4m3_is_ml_dtypes_up_to_448_and_saturates_beyond() -> None:
    grid = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    x = np.concatenate([around((grid[1:] + grid[:-1]) / 2), around(grid)])
    expected = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(e4m3)(x), expected)
    np.testing.assert_array_equal(e4m3(jnp.float32([1e30, -np.inf, np.nan])), np.float32([448, -448, np.nan]))
    np.testing.assert_array_equal(jax.grad(lambda x: e4m3(x).sum() * 1e-6)(jnp.float32([0.3])), np.float32([1e-6]))
