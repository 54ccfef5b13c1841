"""Every experiment: killed after its first finished unit and resumed, it gives the rows of a run that was not killed.

A row of EXPERIMENTS is a binary and what makes it small. In the process a kill is an exception that nothing catches,
raised when the rows are on the disk and nothing else is; one test sends real signals, for what all binaries share.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from running import METHODS, SMALL, run

from experiments import (
    constant_ablation,
    error_anatomy,
    leaderboard,
    pseudo_decode,
    ranking,
    reasoning,
    retrieval,
    scale_ablation,
    tile_ablation,
    trajectory,
)
from experiments.harness.run import Run

ROOT = Path(__file__).parents[2]
# What may differ between two runs of the same thing.
TIMES = {"tokens_per_second", "seconds", "peak_memory_bytes"}

TEXT = "--text={here}/words.txt"
TWO = [TEXT, *SMALL, *(f"--method={spec}" for spec in METHODS)]
# The ablations read in blocks of 128.
ABLATION = [TEXT, "--num_tokens=512", "--sink=16", "--recent=32", "--group=32", "--skip_positions=256", "--bucket=64"]
GRIDS = [f"--method=blockgrid:rotate=true,block=16,grid={grid}" for grid in ("uniform", "lloyd")]
CLIPPING = ["--method=ultraquant:c=0.156", "--method=ultraquant:c=1.0"]
STRETCHES = [TEXT, "--num_tokens=384", "--sink=16", "--recent=0", "--group=32", "--skip_positions=128", "--bucket=64"]
PROMPTS = [TEXT, "--num_tokens=112", "--prompt_tokens=96", "--batch=2", "--sink=16", "--recent=0", "--group=32"]
TASKS = ["--method=kivi:bits=2,subgroup=8", "--batch=3", "--sink=4", "--recent=0", "--group=8", "--read_block=16"]
NEEDLES = [TEXT, "--family=needles", "--length=384", "--depths=2", "--contexts=3", "--min_reference=0"]
SUMS = ["--problems={here}/sums.jsonl", "--max_response=8", "--temperature=1"]
EXPERIMENTS: dict[str, tuple[ModuleType, list[str]]] = {
    "pseudo_decode": (pseudo_decode, TWO),
    "leaderboard": (leaderboard, TWO),
    "ranking": (ranking, [*TWO, "--bucket=32", "--quick"]),
    "tile_ablation": (tile_ablation, [*TWO, "--quick"]),
    "scale_ablation": (scale_ablation, [*ABLATION, *GRIDS, "--calibration_tokens=256", "--quick"]),
    "constant_ablation": (constant_ablation, [*ABLATION, *CLIPPING, "--quick"]),
    "error_anatomy": (error_anatomy, [*STRETCHES, "--quick"]),
    "trajectory": (trajectory, [*PROMPTS, "--method=kivi:bits=2", "--quick"]),
    "retrieval": (retrieval, [*NEEDLES, *TASKS, "--quick"]),
    "reasoning": (reasoning, [*SUMS, *TASKS, "--quick"]),
}


class Killed(BaseException):
    """The process ends here."""


def kill(*_: Any) -> None:
    raise Killed


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What there is to read."""
    path = tmp_path_factory.mktemp("here")
    words = "".join(f"{i} sheep jumped over fence {i * i}. " for i in range(40))  # some 1,400 bytes
    (path / "words.txt").write_text(words)
    problems = [{"prompt": f"How many are {i} and {i}?\nAnswer:", "answer": 2 * i} for i in range(3)]
    (path / "sums.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    return path


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rows.jsonl").read_bytes().splitlines()]


def without_times(out: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows(out)]


def files(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir())


def config(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "config.json").read_text()))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_killed_and_resumed_it_gives_the_rows_of_a_run_that_was_not(
    name: str, model: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary, small = EXPERIMENTS[name]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    argv = [f"--model={model}", *(flag.format(here=here) for flag in small)]
    assert run(binary, [*argv, f"--out={whole}"]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(Run, "write", kill)  # what follows when rows are on the disk
        with pytest.raises(Killed):
            run(binary, [*argv, f"--out={parts}"])
    assert files(parts) == ["config.json", "rows.jsonl"]
    assert config(parts)["finished"] is False
    kept = (parts / "rows.jsonl").read_bytes()
    assert 0 < len(rows(parts)) < len(rows(whole))
    with (parts / "rows.jsonl").open("ab") as file:
        file.write(b'{"method": "torn')

    assert run(binary, [*argv, f"--out={parts}", "--resume"]) == 0
    assert (parts / "rows.jsonl").read_bytes().startswith(kept)  # not measured again
    assert without_times(parts) == without_times(whole)
    assert files(parts) == files(whole)
    assert any(file.endswith(".png") for file in files(whole))
    assert config(parts)["determines"] == config(whole)["determines"]
    assert config(parts)["finished"] is True


def start(argv: list[str], log: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-W", "error", "-m", "experiments.pseudo_decode", *argv]
    with log.open("wb") as file:
        return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)


def wait_for(condition: Callable[[], bool], process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


def test_a_process_is_killed_then_interrupted_and_its_run_goes_on(model: Path, here: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    argv = [f"--model={model}", *(flag.format(here=here) for flag in TWO)]
    log = tmp_path / "log1"
    process = start([*argv, f"--out={parts}"], log)
    wait_for(lambda: (parts / "rows.jsonl").exists() and (parts / "rows.jsonl").stat().st_size > 0, process, log)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(rows(parts)) == 2  # one method, both regimes

    log = tmp_path / "log2"
    process = start([*argv, f"--out={parts}", "--resume"], log)
    wait_for(lambda: "[2/2]" in log.read_text(), process, log)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    assert log.read_text().splitlines()[-1].endswith(f"--out={parts} --resume")
    assert "Traceback" not in log.read_text()
    assert "WARNING" not in log.read_text()
    assert len(rows(parts)) == 2

    for out, more in ((parts, ["--resume"]), (whole, [])):
        assert run(pseudo_decode, [*argv, f"--out={out}", *more]) == 0
    assert without_times(parts) == without_times(whole)
