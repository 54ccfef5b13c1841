"""Codes to bytes and back, against a reading of the bits one by one."""

import numpy as np
import pytest

from kvq_jax.packing import BITS, interleave, pack, packed_size, planes, unpack


def bits_of(codes: np.ndarray, bits: int) -> bytes:
    """The little-endian byte string whose bits [j·b, (j+1)·b) are code j."""
    number = sum(int(code) << (bits * j) for j, code in enumerate(codes))
    return number.to_bytes(len(codes) * bits // 8, "little")


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("axis", [-1, 1])
def test_bytes_are_the_bits_in_order_and_unpack_inverts(bits: int, axis: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, (2, 16, 24)).astype(np.uint8)
    codes[0, 0] = 2**bits - 1
    codes[:, 0, 0] = 2**bits - 1
    packed = np.asarray(pack(codes, bits, axis))
    assert packed.dtype == np.uint8
    assert packed.shape[axis] == packed_size(codes.shape[axis], bits) == codes.shape[axis] * bits // 8
    runs, rows = np.moveaxis(packed, axis, -1), np.moveaxis(codes, axis, -1)
    for i in np.ndindex(rows.shape[:-1]):
        assert runs[i].tobytes() == bits_of(rows[i], bits)
    back = np.asarray(unpack(packed, bits, axis))
    assert back.dtype == np.uint8
    np.testing.assert_array_equal(back, codes)


@pytest.mark.parametrize("bits", BITS)
def test_planes_are_every_pth_code_and_interleave_puts_them_in_order(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 5, 48)).astype(np.uint8)
    parts = planes(pack(codes, bits), bits)
    assert len(parts) == (8 if bits == 3 else 8 // bits)
    for i, part in enumerate(parts):
        np.testing.assert_array_equal(part, codes[..., i :: len(parts)])
    np.testing.assert_array_equal(interleave(parts), codes)


def test_what_cannot_be_packed_is_named() -> None:
    with pytest.raises(ValueError, match=r"bits=5 cannot be packed; allowed: 1, 2, 3, 4, 8"):
        pack(np.zeros(8, np.uint8), 5)
    with pytest.raises(ValueError, match=r"an axis of 6 codes of 2 bits .* multiple of 4"):
        pack(np.zeros(6, np.uint8), 2)
    with pytest.raises(ValueError, match="4 bytes do not hold whole units of 3-bit codes"):
        unpack(np.zeros(4, np.uint8), 3)
