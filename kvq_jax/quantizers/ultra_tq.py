"""Ultra-TQ (arXiv:2606.20474): TurboQuant, its books refitted to captured keys where the normal one fits worst."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from kvq_jax.calibration.kmeans import weighted_kmeans
from kvq_jax.quantizers.turboquant import Codebook, UniformRows, normalized
from kvq_jax.schemes import Bits, Side, Window, option, register


@register("ultra_tq", "turboquant with books of K refitted to the model's own keys")
@dataclass(frozen=True, kw_only=True)
class UltraTQ(Bits):
    """TurboQuant's K and V, K with the constant `k_book` `[2^bits]` a layer: Lloyd–Max levels of the coordinates of
    captured keys, rotated and normalized. Of all layers the share `layers_share` whose per-element MSE with the normal
    book is largest gets its own book; the others keep the normal one. 1 refits all.

    Bits a value: those of TurboQuant; a book is a layer's, and weighs nothing.
    """

    needs_constants: ClassVar[bool] = True
    captures: ClassVar[tuple[str, ...]] = ("k",)

    bits: int | None = option(4, optional=True, allowed=(1, 2, 3, 4))
    k_bits: int | None = option(None, kind=int, allowed=(1, 2, 3, 4))
    norm_correction: bool = option(True, about="codes are read as a vector of length 1")
    layers_share: float = option(0.1, minimum=0, maximum=1, about="of the layers, those with a book of their own")

    def sides(self, head_dim: int) -> tuple[Side, Side]:
        window = Window(recent=0, group=1)
        v = UniformRows(head_dim, self.value_bits, head_dim, "f16")
        return Side(self._keys(head_dim), window, rotate=True), Side(v, window)

    def _keys(self, head_dim: int) -> Codebook:
        return Codebook(head_dim, self.key_bits, self.norm_correction)

    def calibrate(self, samples: Mapping[str, Array]) -> dict[str, Array]:
        """The layer's own book, and the error of the normal one, by which `compare_layers` ranks it."""
        y, _ = normalized(samples["k"])
        normal = self._keys(y.shape[-1])
        error = jnp.mean(jnp.square(y - normal.directions(normal.nearest(y, {}), {})))
        own = weighted_kmeans(np.asarray(y), np.ones(y.shape), 2**self.key_bits)
        return {"k_book": jnp.asarray(own, jnp.float32), "normal_book": normal.levels({}), "normal_error": error}

    def compare_layers(self, found: dict[str, Array]) -> dict[str, Array]:
        layers = len(found["k_book"])
        refitted = math.ceil(round(self.layers_share * layers, 6))  # 0.1 · 30 is 3.0000000000000004
        worst = np.argsort(found["normal_error"])[::-1][:refitted]
        own = np.isin(np.arange(layers), worst)[:, None]
        return {"k_book": jnp.where(own, found["k_book"], found["normal_book"])}
