"""What a compiler makes of the decode kernels, for every target, without a GPU: `make kernels` writes the table of
docs/kernels.md."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import kvq_jax as kvq
from pallas_kernels import dispatch, lowering
from pallas_kernels._internals import LoweredKernel
from pallas_kernels.configurations import Config, configuration
from pallas_kernels.decode_attention import split_attention

METHODS = ("ultraquant:", "mxfp4:", "kivi:bits=2", "kvarn:bits=2", "tile:bits=2", "bf16:")
HEAD_DIMS = dispatch.HEAD_DIMS
QUERIES, KV_HEADS, CONTEXT = 4, 8, 32768  # queries a KV head; of one row
BEGIN, END = "<!-- resources: written by make kernels -->", "<!-- end of resources -->"
COLUMNS = ("method", "head_dim", "target", "tokens", "warps", "stages", "registers", "spills", "shared", "instructions")


@dataclass(frozen=True)
class Resources:
    """A row of the table: a kernel at its default configuration, and what it takes on a target."""

    method: str
    head_dim: int
    target: str
    config: Config
    taken: lowering.Resources

    def cells(self) -> list[str]:
        names = sorted({_short(name) for name in self.taken.matrix_instructions})
        numbers = (self.config.tokens, self.config.warps, self.config.stages, self.taken.registers, self.taken.spills)
        cells = [f"`{self.method}`", str(self.head_dim), self.target, *map(str, numbers)]
        return [*cells, str(self.taken.shared_bytes), ", ".join(f"`{name}`" for name in names)]


def _short(instruction: str) -> str:
    """An instruction without what is said by the table or by all of its kind."""
    for part in (".sync", ".aligned", ".row.col", ".cta_group::1", "_async"):
        instruction = instruction.replace(part, "")
    return instruction


def operands(spec: str, head_dim: int, target: str, context: int = CONTEXT) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Shapes of the arguments of `split_attention` for one decoded token, and its keyword arguments."""
    cache = jax.eval_shape(
        lambda: kvq.init_cache(spec, batch=1, kv_heads=KV_HEADS, head_dim=head_dim, capacity=context)
    )
    keys, values = dispatch.layouts(cache, scaled=dispatch.native(target, head_dim))
    config = configuration(keys, values, rows=QUERIES, programs=KV_HEADS, tokens=context, target=target)
    q = jax.ShapeDtypeStruct((1, KV_HEADS, QUERIES, head_dim), jnp.float32)
    interval = jax.ShapeDtypeStruct((1, QUERIES), jnp.int32)
    how = {"keys": keys, "values": values, "config": config, "scale": head_dim**-0.5, "windowed": False}
    return (q, interval, interval, cache.k.store, cache.v.store), how


def lowered(spec: str, head_dim: int, target: str) -> tuple[LoweredKernel, Config]:
    """The kernel of one decoded token, as it would be lowered on a machine with `target`."""
    arguments, how = operands(spec, head_dim, target)
    (kernel,) = lowering.kernels(
        functools.partial(split_attention, **how), *arguments, platform=lowering.platform_of(target)
    )
    return kernel, how["config"]


def resources(spec: str, head_dim: int, target: str) -> Resources:
    """Compile it. Raises RuntimeError where the target cannot."""
    kernel, config = lowered(spec, head_dim, target)
    taken = lowering.compile_ir(kernel.text, target, kernel.num_warps, kernel.num_stages)
    return Resources(spec, head_dim, target, config, taken)


def table(rows: Iterator[Resources]) -> str:
    lines = [" | ".join(COLUMNS), " | ".join("---" for _ in COLUMNS)]
    for row in rows:
        lines.append(" | ".join(row.cells()))
        print(lines[-1], flush=True)
    return "\n".join(f"| {line} |" for line in lines)


def committed(text: str) -> dict[tuple[str, int, str], dict[str, str]]:
    """The rows of the table in the text of docs/kernels.md, by method, head_dim and target."""
    lines = text[text.index(BEGIN) : text.index(END)].splitlines()[3:]
    rows = [dict(zip(COLUMNS, (cell.strip() for cell in line.strip("| ").split(" | ")), strict=True)) for line in lines]
    return {(row["method"].strip("`"), int(row["head_dim"]), row["target"]): row for row in rows}


def main() -> None:
    path = Path(__file__).parents[1] / "docs" / "kernels.md"
    rows = (
        resources(spec, head_dim, target) for spec in METHODS for head_dim in HEAD_DIMS for target in lowering.TARGETS
    )
    new = table(rows)
    text = path.read_text()  # now: what was edited in the meantime stays
    path.write_text(text[: text.index(BEGIN) + len(BEGIN)] + "\n" + new + "\n" + text[text.index(END) :])


if __name__ == "__main__":
    main()
