"""KVarN's ablation (arXiv:2606.03458): the rotation alone, then KIVI's axes and rounding."""

from dataclasses import dataclass

from kvq_jax.quantizers.affine import ChannelRows, TokenRows
from kvq_jax.schemes import Bits, Side, Window, option, register


@register("hadamard", "rotation, then K per channel and V per token, min/max")
@dataclass(frozen=True, kw_only=True)
class Hadamard(Bits):
    """K and V are rotated. K: groups of `group` tokens of one channel; V: one group a token. Both sides flush `group`
    tokens at a time.

    Bits a value, main store: K bits + 2·bits(scales)/group, V bits + 2·bits(scales)/head_dim.
    """

    group: int = option(128, minimum=2, about="tokens of a K group, and of a flush")
    scales: str = option("f16", allowed=("f16", "bf16", "f32"))

    def sides(self, head_dim: int) -> tuple[Side, Side]:
        k = ChannelRows(head_dim, self.key_bits, self.group, self.scales)
        v = TokenRows(head_dim, self.value_bits, head_dim, self.scales)
        window = Window(recent=0, group=self.group)
        return Side(k, window, rotate=True), Side(v, window, rotate=True)
