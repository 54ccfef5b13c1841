"""`python -m experiments.leaderboard` on a tiny checkpoint: one ranking at equal windows, resumed, with its plot."""

from pathlib import Path

import pytest
from running import METHODS as TWO
from running import SMALL, run

from experiments import leaderboard, pseudo_decode_report

METHODS = (TWO[0], "fp16", TWO[1])


def test_methods_are_ranked_by_accumulated_kl_and_a_rerun_computes_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "words.txt", tmp_path / "board"
    text.write_text("".join(f"{i} sheep jumped over the fence. " for i in range(12)))
    argv = [f"--model={model}", f"--text={text}", f"--out={out}", *SMALL, *(f"--method={m}" for m in METHODS)]
    assert run(leaderboard, argv) == 0
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if line.startswith(METHODS) and "bits a number" not in line]
    assert [line.split()[0] for line in lines] == ["fp16", "kvarn:bits=2", "kivi:bits=2,subgroup=32"]
    assert all("[" in line and "%" in line for line in lines[1:])  # intervals
    assert (out / "kl_against_bytes.png").read_bytes().startswith(b"\x89PNG")
    assert len((out / "summary.csv").read_text().splitlines()) == 1 + 2 * len(METHODS)
    assert run(leaderboard, [*argv, "--resume"]) == 0
    assert capsys.readouterr().out.count("already in") == len(METHODS)


def unit(name: str, size: int, kl: float) -> pseudo_decode_report.Unit:
    row = {"regime": "accumulated", "cache_bytes": size, "kl_nats": kl}
    return pseudo_decode_report.Unit([row], name)


def test_the_front_holds_what_nothing_beats_in_both() -> None:
    units = [unit("large", 30, 0.1), unit("beaten", 20, 0.4), unit("small", 10, 0.3), unit("same bytes", 10, 0.5)]
    assert [u.name for u in leaderboard.pareto(units)] == ["small", "large"]
