"""`python -m experiments.pseudo_decode` on a tiny checkpoint: results, what they are checked for, and bad input."""

import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from running import METHODS, SMALL, run

import kvq_jax as kvq
from experiments import pseudo_decode as binary
from experiments.harness import trace_rows


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("".join(f"{i} sheep jumped over the fence. " for i in range(12)))  # some 400 bytes
    return path


def arguments(model: Path, text: Path, out: Path, *more: str) -> list[str]:
    methods = [] if any(one.startswith("--method") for one in more) else [f"--method={spec}" for spec in METHODS]
    return [f"--model={model}", f"--text={text}", f"--out={out}", *SMALL, *methods, *more]


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


def test_every_number_of_a_run_is_written_and_told(
    model: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(binary, arguments(model, text, out)) == 0
    printed = capfd.readouterr().out
    rows = read(out)
    assert [(row["label"], row["regime"]) for row in rows] == [
        (m, r) for m in METHODS for r in ("static", "accumulated")
    ]
    for row in rows:
        assert row["method"] == str(kvq.scheme(row["label"], sink=32, recent=0, group=32))
        assert row["positions_counted"] == 192 - 64
        assert len(row["kl_by_bucket"]) == len(row["attention_mae_by_bucket"]) == 3
        # nothing has left the window in the first 64 positions; all that is counted lies in the other two buckets
        assert row["kl_by_bucket"][0] < 1e-6
        assert row["kl_nats"] == pytest.approx(np.mean(row["kl_by_bucket"][1:]))
        assert row["cache_bytes"] == sum(row["cache_bytes_by_leaf"].values())
        assert row["bits_per_element_cache"] == pytest.approx(8 * row["cache_bytes"] / (row["cache_bytes_16_bit"] / 2))
        assert row["perplexity_reference_lo"] < row["perplexity_reference"] < row["perplexity_reference_hi"]
        assert row["layers_quantized"] == row["layers"] == 2
        assert row["tokens_per_second"] > 0
    bits = {row["label"]: row["bits_per_element_store"] for row in rows}
    assert bits[METHODS[0]] == pytest.approx(2 + 2 * 16 / 32)
    config = json.loads((out / "config.json").read_text())
    assert config["flags"]["method"] == list(METHODS)
    with (out / "summary.csv").open() as file:
        summary = list(csv.DictReader(file))
    assert [float(row["kl_nats"]) for row in summary] == [row["kl_nats"] for row in rows]
    for name in ("kl_by_position.png", "attention_error_by_position.png", "kl_against_bytes.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
        assert f"{out}/{name}" in printed
    assert "Lowest accumulated KL" in printed
    assert not list(out.glob(".*"))


def broken(model: Path, where: Path, kind: str) -> Path:
    """A copy of the checkpoint that cannot be used."""
    path = where / kind
    shutil.copytree(model, path)
    file = path / "model.safetensors"
    if kind == "truncated":
        os.truncate(file, file.stat().st_size // 2)
    if kind == "nan":
        weights = safetensors.numpy.load_file(file)
        weights["model.layers.1.self_attn.k_proj.weight"][:] = np.nan
        safetensors.numpy.save_file(weights, file)
    return path


BAD = {
    "unknown method": (["--method=kivy"], ["kivy", "did you mean 'kivi'"]),
    "unknown field": (["--method=kivi:bit=2"], ["bit", "its fields"]),
    "given twice": (["--method=kvarn:group=64"], ["--method=kvarn:group=64", "group is both 64 and 32"]),
    "bits": (["--method=kivi:bits=5"], ["bits=5", "allowed"]),
    "group not divisible": (["--group=100"], ["group=100", "not divisible", "multiple of 32"]),
    "text too short": (["--num_tokens=1024"], ["1024", "words.txt", "longer text"]),
    "batch too large": (["--batch=9"], ["--batch=9", "longer text"]),
    "beyond the context": (["--num_tokens=4000"], ["--num_tokens=4000", "2048"]),
    "shorter than a block": (["--block_size=500"], ["--block_size=500", "shorter"]),
    "block size": (["--block_size=0"], ["block_size", "positive"]),
    "regime": (["--regime=dynamic"], ["regime", "dynamic", "static|accumulated"]),
    "number": (["--num_tokens=many"], ["num_tokens", "many"]),
    "dtype": (["--dtype=float64"], ["dtype", "float64"]),
    "implementation": (["--implementation=cuda"], ["cuda", "allowed"]),
    "unknown flag": (["--num_token=5"], ["num_token"]),
    "positional": (["192"], ["unexpected argument '192'"]),
    "nothing counted": (["--skip_positions=192"], ["--skip_positions=192"]),
    "nothing quantized": (["--sink=180"], ["quantizes nothing", "--sink"]),
    "protect": (["--protect=1"], ["protect=1", "2 layers"]),
    "no such text": (["--text=macbeth"], ["macbeth", "no such file", "hamlet"]),
    "no such model": (["--model=nowhere"], ["nowhere", "does not exist"]),
    "resume without a run": (["--out=", "--resume"], ["--resume", "--out"]),
}


def assert_one_error(argv: list[str], says: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(binary, argv) == 2
    errors = [line for line in capfd.readouterr().err.splitlines() if "error:" in line]
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
    for part in says:
        assert part in errors[0]


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(
    case: str, model: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    more, says = BAD[case]
    assert run(binary, arguments(model, text, tmp_path / "out", *more)) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ")
    for part in says:
        assert part in line
    assert not list(tmp_path.iterdir())


def test_bad_files_are_one_line_and_leave_nothing(
    model: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe" * 500)
    (tmp_path / "file").write_text("in the way")
    assert_one_error(arguments(model, tmp_path / "binary.txt", tmp_path / "out"), ["binary.txt", "UTF-8"], capfd)
    truncated = broken(model, tmp_path, "truncated")
    assert_one_error(arguments(truncated, text, tmp_path / "out"), ["model.safetensors"], capfd)
    assert_one_error(arguments(model, text, tmp_path / "file" / "out"), ["file/out", "cannot be written"], capfd)
    assert not (tmp_path / "out").exists()


def test_nan_in_the_keys_names_method_layer_and_position(
    model: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = arguments(broken(model, tmp_path, "nan"), text, tmp_path / "out", f"--method={METHODS[0]}")
    assert_one_error(argv, ["kivi", "reference", "position 0, layer 1", "--dtype=float32"], capfd)
    assert not (tmp_path / "out").exists()


def trace(**changed: Any) -> kvq.Trace:
    """Two layers, one regime, one row of 8 positions, everything in order."""
    ones = np.ones((1, 8), np.float32)
    fields: dict[str, Any] = {
        "scheme": kvq.scheme("kivi"),
        "regimes": ("static",),
        "block": 2,
        "implementation": "xla",
        "cache_bytes": {"k_codes": 8},
        "bits": {"store": 2.0, "cache": 4.0},
        "valid": ones > 0,
        "scored": (ones > 0) & (np.arange(8) < 7),
        "kl": ones[None],
        "agree": ones[None] > 0,
        "nll": ones[None],
        "nll_reference": ones,
        "attention_mae": np.stack([ones, ones])[None],
        "attention_scale": np.stack([ones, ones]),
        "quantized_tokens": np.array([4, 4]),
    }
    for name in ("key_relative_mse", "key_norm_ratio_mean", "key_norm_ratio_std", "value_relative_mse"):
        fields[name] = np.array([[0.1, np.nan]], np.float32)
    return kvq.Trace(**fields | changed)


def rows(one: kvq.Trace) -> list[dict[str, Any]]:
    return trace_rows.rows(one, skip=2, bucket=4, seed=0)


def test_layers_that_are_not_quantized_do_not_count() -> None:
    (row,) = rows(trace(quantized_tokens=np.array([4, 0])))
    assert row["layers_quantized"] == 1
    assert row["key_relative_mse"] == pytest.approx(0.1)


def test_a_method_that_changes_nothing_is_an_error() -> None:
    nothing = trace(quantized_tokens=np.array([0, 0]))
    with pytest.raises(ValueError, match="no token was quantized"):
        rows(nothing)
    still = trace(attention_mae=np.full((1, 2, 1, 8), 1e-7, np.float32))
    with pytest.raises(ValueError, match="never read"):
        rows(still)
    with pytest.raises(ValueError, match="never read"):
        rows(trace(kl=np.zeros((1, 1, 8), np.float32)))
    identity = trace(scheme=kvq.scheme("fp32"), kl=np.zeros((1, 1, 8), np.float32), quantized_tokens=np.array([0, 0]))
    assert rows(identity)[0]["kl_nats"] == 0


def test_what_is_not_finite_is_named_with_the_place_where_it_begins() -> None:
    mae = np.ones((1, 2, 1, 8), np.float32)
    mae[0, 1, 0, 5:] = np.nan
    mae[0, 0, 0, 6:] = np.nan
    with pytest.raises(ValueError, match=r"kivi.*static: attention is not finite from position 5, layer 1; pass"):
        rows(trace(attention_mae=mae))
    kl = np.ones((1, 1, 8), np.float32)
    kl[0, 0, 3] = np.inf
    with pytest.raises(ValueError, match=r"static: the logits are not finite from position 3; pass"):
        rows(trace(kl=kl))


def test_scanned_and_unrolled_layers_measure_the_same(model: Path, text: Path, tmp_path: Path) -> None:
    for flag in ("--scan_layers", "--noscan_layers"):
        assert run(binary, arguments(model, text, tmp_path / flag, "--method=kvarn:bits=2", flag)) == 0
    scanned, unrolled = (read(tmp_path / flag) for flag in ("--scan_layers", "--noscan_layers"))
    for one, other in zip(scanned, unrolled, strict=True):
        for name in ("kl_nats", "attention_mae", "key_relative_mse", "perplexity"):
            assert one[name] == pytest.approx(other[name], rel=1e-3), name
        assert one["cache_bytes_by_leaf"] == other["cache_bytes_by_leaf"]
