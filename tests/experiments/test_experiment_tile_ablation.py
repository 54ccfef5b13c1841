"""The ablation on a tiny checkpoint: what is measured, the tables, the plot, and going on."""

import json
from pathlib import Path
from typing import Any

import pytest
from running import SMALL, parsed, run

import kvq_jax as kvq
from experiments import tile_ablation as binary


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("texts")
    for animal in ("sheep", "goats"):
        (folder / f"{animal}.txt").write_text("".join(f"{i} {animal} jumped over the fence. " for i in range(9)))
    return sorted(folder.iterdir())


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


def test_two_texts_give_rows_tables_and_a_plot_and_a_second_run_goes_on(
    model: Path, texts: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    both = ",".join(map(str, texts))
    methods = ["--method=kvarn:bits=2", "--method=tile:v_mean=token,grid=lloyd"]
    argv = [f"--model={model}", f"--text={both}", f"--out={tmp_path / 'out'}", *SMALL]
    assert run(binary, [*argv, methods[0]]) == 0
    assert run(binary, [*argv, *methods, "--resume"]) == 0
    rows = read(tmp_path / "out")
    assert [(Path(row["text"]).stem, row["label"], row["regime"]) for row in rows] == [
        (text, spec, regime)
        for spec in ("kvarn:bits=2", "tile:v_mean=token,grid=lloyd")
        for text in ("goats", "sheep")
        for regime in ("static", "accumulated")
    ]
    assert {row["part"] for row in rows} == {"KVarN published", "equivariant, Lloyd–Max, norm"}
    assert rows[0]["text_digest"] != rows[2]["text_digest"]
    printed = capfd.readouterr().out
    for text in ("goats.txt: parts", "sheep.txt: parts"):
        assert text in printed
    ratio = rows[5]["kl_nats"] / rows[1]["kl_nats"]
    line = next(line for line in printed.splitlines() if line.startswith("equivariant, Lloyd–Max, norm"))
    assert f" {ratio:.2f} " in line
    assert (tmp_path / "out" / "kl_against_bits.png").read_bytes().startswith(b"\x89PNG")


def test_quick_measures_three_methods_of_one_text(model: Path, texts: list[Path], tmp_path: Path) -> None:
    argv = [f"--model={model}", f"--text={texts[0]}", f"--out={tmp_path / 'out'}", *SMALL, "--quick"]
    assert run(binary, argv) == 0
    assert [row["label"] for row in read(tmp_path / "out")][::2] == list(binary.QUICK_SPECS)


def test_the_plan_holds_every_part_once_and_every_family_at_other_bits() -> None:
    with parsed():
        plan = binary.plan()
    schemes = [(one.text, binary.build(one.spec)) for one in plan]
    assert len(set(schemes)) == len(schemes)
    assert {one.text for one in plan} == {"hamlet", "argparse"}
    assert {one.part for one in plan} == {*binary.PARTS.values(), ""}
    assert all(scheme.sink == 128 and scheme.recent == 0 and scheme.group == 128 for _, scheme in schemes)
    for family in ("kivi", "hadamard", "kvarn", "tile"):
        assert {scheme.key_bits for _, scheme in schemes if scheme.name == family} == {1, 2, 3, 4}
    with parsed("--constants=somewhere"):
        assert {one.spec for one in binary.plan()} == {one.spec for one in plan} | {binary.CALIBRATED}
    for part, spec in ((part, spec) for spec, part in binary.PARTS.items()):
        if spec.startswith("tile"):
            bytes_here = kvq.bits_per_element(binary.build(spec), head_dim=64)["store"]
            assert bytes_here <= kvq.bits_per_element("kvarn:bits=2,scales=f16", head_dim=64)["store"], part


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--method=kvarm", "did you mean 'kvarn'"),
        ("--text=hamlet,macbeth", "macbeth"),
        ("--group=100", "an axis of 100 codes"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    argument: str, says: str, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(binary, [f"--model={model}", f"--out={tmp_path / 'out'}", argument]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert says in line
    assert not (tmp_path / "out").exists()
