"""`python -m experiments.benchmark` measures every ratio that the README speaks of."""

import json
from pathlib import Path

from running import run

from experiments import benchmark


def test_every_ratio_is_measured_and_written(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("All work and no play makes Jack a dull boy. " * 20)
    sizes = ["--num_tokens=288", "--context=1024", "--repeats=1", "--group=64", "--method=int4"]
    assert run(benchmark, [f"--model={model}", f"--text={text}", *sizes, f"--out={tmp_path / 'out'}"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert [row["target"] for row in rows] == [">= 1", "", "<= 1", ">= 0.7", "<= 1", ">= 0.7", ">= 10"]
    assert all(row["above"] > 0 and row["below"] > 0 for row in rows)  # how fast this machine is, is no test
    temporaries = next(row for row in rows if row["unit"] == "MiB")
    assert temporaries["ratio"] < 1, "the tiled path must not hold a decoded cache"
