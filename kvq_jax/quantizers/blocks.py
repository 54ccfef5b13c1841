"""Four-bit codes with one scale for each block of consecutive channels of one token: UltraQuant, MXFP4, NVFP4, MXINT4.

Nothing is shared between tokens, so a tile is one token and a token can be quantized the moment it is written. Reads
decode the tile: a scale per block of channels can be folded neither into the query nor into the probabilities.
"""

import abc
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from kvq_jax.packing import pack, unpack
from kvq_jax.quantizers.base import Leaves, Quantizer

BLOCKS = (16, 32, 64, 128)


@dataclass(frozen=True)
class Blocks(Quantizer):
    """x̂ = value(code) · scale. Leaves: codes uint8 `[tiles, 1, head_dim/2]`, an even channel in the low nibble; scale
    `[tiles, 1, head_dim/block]`."""

    block: int

    def __post_init__(self) -> None:
        if self.head_dim % self.block:
            fits = [str(block) for block in BLOCKS if self.head_dim % block == 0]
            raise ValueError(
                f"head_dim={self.head_dim} is not a multiple of block={self.block}, the channels that share a scale; "
                f"blocks that divide it: {', '.join(fits) or 'none of ' + ', '.join(map(str, BLOCKS))}"
            )

    @abc.abstractmethod
    def round_blocks(self, blocks: Array, constants: Leaves) -> tuple[Array, Array]:
        """float32 `[..., blocks, block]` -> codes uint8 in [0, 16) of the same shape, scale leaf `[..., blocks]`."""

    @abc.abstractmethod
    def values(self, codes: Array, constants: Leaves) -> Array:
        """What the codes (int32 in [0, 16)) stand for, up to the factor in `scale`, float32."""

    @abc.abstractmethod
    def scale(self, leaf: Array, constants: Leaves) -> Array:
        """The scale leaf as float32 factors."""

    def _split(self, x: Array) -> Array:
        return x.reshape(*x.shape[:-1], self.head_dim // self.block, self.block)

    def encode(self, tiles: Array, constants: Leaves) -> Leaves:
        codes, scale = self.round_blocks(self._split(tiles), constants)
        return {"codes": pack(codes.reshape(tiles.shape), 4), "scale": scale}

    def decode(self, leaves: Leaves, constants: Leaves) -> Array:
        values = self.values(unpack(leaves["codes"], 4, dtype=jnp.int32), constants)
        return (self._split(values) * self.scale(leaves["scale"], constants)[..., None]).reshape(values.shape)
