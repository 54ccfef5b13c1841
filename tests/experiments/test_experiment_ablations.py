"""The scale and constant ablations on a tiny checkpoint, and how they compare settings."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from absl.testing import flagsaver
from running import run

import kvq_jax as kvq
import models
from experiments import ablation, constant_ablation, scale_ablation

WINDOWS = ["--num_tokens=512", "--sink=16", "--recent=32", "--group=32", "--skip_positions=256", "--bucket=64"]


@pytest.fixture
def argv(model: Path, tmp_path: Path) -> list[str]:
    text = tmp_path / "words.txt"
    text.write_text("".join(f"{i} sheep jumped over fence {i * i}. " for i in range(40)))
    return [f"--model={model}", f"--text={text}", f"--out={tmp_path / 'out'}", *WINDOWS]


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


def test_scales_are_measured_refitted_resumed_and_told_apart(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    specs = [
        "rotate=true,scale=l2,grid=uniform",
        "rotate=true,block=16,grid=uniform",
        "rotate=true,block=16,grid=lloyd",
    ]
    specs += ["rotate=false,block=16,grid=lloyd", "rotate=false,block=16,grid=refit"]
    argv = [*argv, "--calibration_tokens=256", *(f"--method=blockgrid:{spec}" for spec in specs)]
    assert run(scale_ablation, argv) == 0
    shown = capsys.readouterr().out
    found = rows(out)
    assert len(found) == 2 * len(specs)
    mse = [row["key_relative_mse"] for row in found if row["regime"] == "static"]
    assert mse[0] > mse[1] > mse[2]  # finer scales, then a fitted book
    assert mse[3] > mse[4]  # its own keys
    assert {row["scale"] for row in found} == {"ℓ2, token", "absmax/16"}
    assert [row["constants_digest"] is None for row in found] == [True] * 8 + [False] * 2
    for sentence in ("• Asked:", "• Found: Lloyd–Max levels in place of", "• How sure:", "(1 pairs)", "Spearman's"):
        assert sentence in shown
    for name in ("by_scale.png", "kl_against_mse.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert len((out / "summary.csv").read_text().splitlines()) == 1 + len(found)
    assert run(scale_ablation, [*argv, "--resume"]) == 0
    assert capsys.readouterr().out.count("already in") == len(specs)
    assert rows(out) == found


def test_constants_and_solved_ones_of_the_same_scheme_are_rows_of_their_own(
    argv: list[str], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = "ultraquant:c=0.156,rounding=nearest"
    loaded = models.load(str(model), context=64)
    config, digest = loaded.config, loaded.digest
    c = np.full((config.num_hidden_layers, config.num_key_value_heads), 0.156, np.float32)
    layers = np.where(np.arange(len(c))[:, None] == 0, 1.0, c).astype(np.float32)
    folders = []
    for name, array in (("global", c), ("layer", layers)):
        constants = kvq.Constants(
            {"k_c": array, "v_c": array},
            scheme=kvq.scheme(spec).calibrated(),
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            model_digest=digest,
        )
        folders.append(tmp_path / name)
        kvq.save_constants(folders[-1], constants)
    argv = [*argv, f"--method={spec}", "--method=ultraquant:c=1.0", *(f"--constants={folder}" for folder in folders)]
    assert run(constant_ablation, argv) == 0
    shown = capsys.readouterr().out
    by_c = {row["c"]: row for row in rows(tmp_path / "out") if row["regime"] == "static"}
    assert list(by_c) == ["0.156", "1.0", "solved, global", "solved, layer"]
    same = ("key_relative_mse", "value_relative_mse", "kl_nats")
    assert [by_c["0.156"][name] for name in same] == [by_c["solved, global"][name] for name in same]
    mse = [by_c[c]["key_relative_mse"] for c in ("0.156", "solved, layer", "1.0")]
    assert mse == sorted(mse)
    assert mse[0] < mse[1] < mse[2]
    for sentence in ("• Asked:", "• Found: the lowest accumulated KL has c =", "Spearman's", "• How sure:"):
        assert sentence in shown
    assert (tmp_path / "out" / "by_c.png").read_bytes().startswith(b"\x89PNG")
    assert run(constant_ablation, [*argv, "--resume"]) == 0
    assert capsys.readouterr().out.count("already in") == 4


def test_constants_are_solved_kept_and_not_solved_again(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [*argv, "--quick", "--calibration_tokens=64"]
    assert run(constant_ablation, argv) == 0
    assert "c solved for a layer in place of the model by ×" in " ".join(capsys.readouterr().out.split())
    found = rows(tmp_path / "out")
    static = {row["c"]: row for row in found if row["regime"] == "static" and row["rounding"] == "nearest"}
    kinds = ["solved, layer", "solved, global"]  # with one head a layer, those for a head are those for a layer
    assert list(static) == ["0.156", "1/6", "0.195", "1.0", *kinds]
    # Least on the text behind, so nearly so on this one: more freedom, less error than the worst constant of all.
    assert max(static[c]["key_relative_mse"] for c in kinds) < static["1.0"]["key_relative_mse"]
    assert len({row["constants_digest"] for row in found}) == 3
    torn = tmp_path / "out" / "constants" / "nearest-global"
    shutil.rmtree(torn)
    torn.mkdir()  # as a kill leaves it
    assert run(constant_ablation, [*argv, "--resume"]) == 0
    assert rows(tmp_path / "out") == found  # solved again, to the same digits
    capsys.readouterr()
    monkeypatch.setattr(kvq, "calibrate", None)  # it would fail
    assert run(constant_ablation, [*argv, "--resume"]) == 0
    assert capsys.readouterr().out.count("already in") == 9
    assert rows(tmp_path / "out") == found


def test_what_the_ablations_do_not_measure_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for module, given, message in (
        (scale_ablation, "--method=kivi:bits=2", "this ablation is of blockgrid:…"),
        (constant_ablation, "--method=mxfp4:", "this ablation is of ultraquant:…"),
        (constant_ablation, "--regime=static", "both regimes, blocks of 128"),
        (constant_ablation, "--bucket=128", "leave 2 stretches of --bucket=128 positions, of which intervals need 4"),
        (scale_ablation, "--method=blockgrid:grid=refit", "--calibration_tokens=2048 are needed"),
    ):
        assert run(module, [*argv, given]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("quick", [False, True])
def test_every_setting_of_the_designs_is_another_scheme(quick: bool) -> None:
    with flagsaver.flagsaver((ablation.QUICK, quick)):
        for specs, count in (
            (scale_ablation.design(64), 28),
            (scale_ablation.design(128), 35),
            (constant_ablation.design(), 16),
        ):
            schemes = [kvq.scheme(spec) for spec in specs]
            assert len({str(scheme) for scheme in schemes}) == len(specs) == (len(specs) if quick else count)
            for scheme in schemes:
                scheme.resolve(128 if count == 35 else 64)


def unit(kl: list[float], mse: float, **axes: str) -> ablation.Unit:
    row = {"label": str(axes), "bucket_start": [0, 64, *range(128, 64 * (2 + len(kl)), 64)], "skip_positions": 128}
    row |= {"kl_by_bucket": [99.0, 99.0, *kl], "key_relative_mse": mse, "method": str(axes), "constants_digest": None}
    return ablation.units([row | axes | {"regime": regime} for regime in ablation.REGIMES], list(axes))[0]


def test_an_effect_is_over_matched_pairs_and_paired_stretches() -> None:
    base = np.exp(np.random.default_rng(0).standard_normal(30))  # stretches differ far more than settings do
    factor = {("off", "a"): 1.0, ("on", "a"): 0.5, ("off", "b"): 3.0, ("on", "b"): 1.5 / 2, ("on", "c"): 7.0}
    measured = [unit(list(base * f), f, rotation=r, levels=x) for (r, x), f in factor.items()]
    mean_kl = ablation.draws(measured, "static", seed=0)
    found = ablation.effect(measured, mean_kl, {"rotation": "off"}, {"rotation": "on"})
    assert found is not None
    estimate, pairs = found
    assert pairs == 2  # c has no twin
    np.testing.assert_allclose([estimate.value, estimate.low, estimate.high], (0.5 * 0.25) ** 0.5)
    assert ablation.effect(measured, mean_kl, {"rotation": "off"}, {"rotation": "elsewhere"}) is None


def test_ranks_and_inversions() -> None:
    values = [(1, 0.1), (2, 0.2), (3, 0.4), (4, 0.3)]
    measured = [unit([kl] * 8, mse, c=str(kl)) for kl, mse in values]
    mean_kl = ablation.draws(measured, "accumulated", seed=0)
    rho = ablation.rank_correlation(measured, mean_kl, "key")
    np.testing.assert_allclose([rho.value, rho.low, rho.high], 1 - 6 * 2 / (4 * 15))
    assert ablation.inversions(measured, mean_kl) == (1, 6)
