"""`python -m experiments.benchmark` measures every ratio that the README speaks of."""

import json
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest
from jax import Array
from running import run

from experiments import benchmark, kernel_times
from pallas_kernels import dispatch, report


def test_every_ratio_is_measured_and_written(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("All work and no play makes Jack a dull boy. " * 20)
    sizes = ["--num_tokens=288", "--context=1024", "--repeats=1", "--group=64", "--method=int4"]
    assert run(benchmark, [f"--model={model}", f"--text={text}", *sizes, f"--out={tmp_path / 'out'}"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert [row["target"] for row in rows] == [
        ">= 1",
        "",
        "<= 1",
        ">= 0.5",
        ">= 0.5",
        ">= 0.7",
        "<= 1",
        ">= 0.7",
        ">= 10",
    ]
    assert all(row["above"] > 0 and row["below"] > 0 for row in rows)  # how fast this machine is, is no test
    temporaries = next(row for row in rows if row["unit"] == "MiB")
    assert temporaries["ratio"] < 1, "the tiled path must not hold a decoded cache"


def test_kernels_are_compiled_where_they_cannot_be_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "METHODS", ("ultraquant:",))
    assert run(benchmark, ["--kernels", f"--out={tmp_path / 'out'}"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert [(row["measure"], row["status"], row["spills"]) for row in rows] == [
        ("ultraquant: for sm_90", "compiled, not timed", 0),
        ("ultraquant: for gfx942", "compiled, not timed", 0),
    ]


def test_kernel_and_xla_are_timed_side_by_side_where_a_kernel_runs() -> None:
    """Interpreted here, so that the times mean nothing; that both are of one call is what counts."""

    def clock(kernel: Callable[[], Array], xla: Callable[[], Array]) -> list[float]:
        difference = jnp.abs(kernel().astype(jnp.float32) - xla().astype(jnp.float32)).max()
        assert float(difference) < 0.02, "bfloat16 outputs"
        return [2e-6, 8e-6]

    with dispatch.interpreted():
        row = kernel_times.timed("ultraquant:", 128, clock, seed=0)
    assert (row["status"], row["ratio"], row["kernel_us"]) == ("timed", 4.0, 2.0)
    assert row["gib_per_s"] == 8 * 128 * 136 / 2e-6 / 2**30
