"""Ranks, rank correlations and block sizes from rows whose answer is known, and what is measured."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from running import parsed

from experiments import ablation, pseudo_decode, ranking, ranking_report
from experiments.harness import run

STRETCHES = 20
TEXT = np.random.default_rng(0).gamma(2.0, size=STRETCHES)  # stretches differ far more than methods do


def rows(label: str, block: int, static: Any, accumulated: Any, nll: Any = 1.0, **also: Any) -> list[dict[str, Any]]:
    """Both regimes of a method: its KL, attention error (half of it) and loss, by stretch."""
    found = []
    for regime, kl in (("static", static), ("accumulated", accumulated)):
        kl = np.broadcast_to(kl, STRETCHES)
        row = {"label": label, "method": label, "constants_digest": None, "block_size": block, "regime": regime}
        row |= {"bucket": 64, "bucket_start": list(range(0, 64 * (STRETCHES + 1), 64)), "skip_positions": 64}
        for name, x in (("kl", kl), ("attention_mae", kl / 2), ("nll", np.broadcast_to(nll, STRETCHES))):
            row[f"{name}_by_bucket"] = [99.0, *x.tolist()]  # the first is not counted
        row |= {"kl_nats": float(kl.mean()), "bits_per_element_store": 2.5, "model": "m", "text": "t"}
        found.append(row | {"layers_quantized": 2, "at_once": False, "identity": False} | also)
    return found


@pytest.mark.parametrize("values", [5, 3])  # of 3, with ties
def test_kendall_is_scipys(values: int) -> None:
    x, y = np.random.default_rng(values).integers(values if values == 3 else 1000, size=(2, 9, 30)).astype(float)
    want = [scipy.stats.kendalltau(x[:, i], y[:, i]).statistic for i in range(30)]
    np.testing.assert_allclose(ranking_report.kendall(x, y), want, atol=1e-12)
    assert np.isnan(ranking_report.kendall(np.ones((4, 1)), y[:4, :1])).all()


def test_one_bootstrap_draws_the_same_stretches_for_all() -> None:
    (block,) = ranking_report.blocks(
        [
            *rows("a", 16, TEXT, 2.2 * TEXT, 1 + TEXT),
            *rows("b", 16, 1.01 * TEXT, 2.1 * TEXT, 1 + 0.9 * TEXT),
            *rows("c", 16, 1.02 * TEXT, 3 * TEXT, 1 + 2 * TEXT),
        ],
        seed=0,
    )
    ranks = {regime: [(one.value, one.low, one.high) for one in found] for regime, found in block.ranks.items()}
    assert ranks == {
        "static": [(1, 1, 1), (2, 2, 2), (3, 3, 3)],
        "accumulated": [(2, 2, 2), (1, 1, 1), (3, 3, 3)],
    }
    assert block.reordered() == [("a", "b", True)]
    for name, tau in {
        ranking_report.ORDER_OF: 1 / 3,
        "KL, accumulated": 1.0,
        "attention error, static": 1 / 3,
        "attention error, accumulated": 1.0,
        "attention error, gap": 1.0,
    }.items():
        one = block.tau[name]
        np.testing.assert_allclose([one.value, one.low, one.high], tau, err_msg=name)


def test_an_interval_of_a_mean_is_scipys_percentile_interval_and_open_ranks_stay_open() -> None:
    noise = np.random.default_rng(1).normal(1.0, 0.2, size=(2, STRETCHES))
    both = [*rows("a", 16, noise[0], noise[0]), *rows("b", 16, noise[1], noise[1])]
    (block,) = ranking_report.blocks(both, seed=0)
    found = ablation.Estimate.of(block.kl["static"][0])
    want = scipy.stats.bootstrap((noise[0],), np.mean, method="percentile", n_resamples=4000, rng=1).confidence_interval
    assert (found.low, found.high) == pytest.approx(tuple(want), abs=0.01)
    assert {(one.low, one.high) for one in block.ranks["static"]} == {(1, 2)}


def test_draws_without_a_tau_are_left_out() -> None:
    one = ranking_report.defined(np.array([0.5, np.nan, 0.5, 0.5]))
    assert (one.value, one.low, one.high) == (0.5, 0.5, 0.5)
    assert np.isnan(ranking_report.defined(np.array([np.nan, 0.5, 0.5])).value)


def whole() -> list[dict[str, Any]]:
    """Two methods whose accumulated KL does not depend on b ≤ 16, one that hides a tenth, one of large b only."""
    found = []
    for block, static, accumulated in ((64, 0.8, 0.5), (1, 0.5, 1.0), (16, 0.8, 1.0)):  # not in order
        found += rows("a", block, static * TEXT, accumulated * TEXT)
        found += rows("b", block, 2 * static * TEXT, 2 * accumulated * TEXT)
        hidden = 1.0 if block == 1 else 0.9
        found += rows("b, rounded at once", block, hidden * TEXT, hidden * TEXT, at_once=True)
        if block > 1:
            found += rows("c", block, 3 * static * TEXT, 3 * accumulated * TEXT)
            found += rows("fp32", block, 0.0, -2e-9, identity=True, layers_quantized=0)
    return found


def test_block_sizes_are_set_against_the_smallest() -> None:
    of = ranking_report.curves(whole(), seed=0)
    assert list(of) == ["a", "b", "b, rounded at once", "c"]
    ratios = ranking_report.over_smallest(of["b"], "accumulated")
    assert [(size, one.value, one.low, one.high) for size, one in ratios.items()] == [
        (1, 1.0, 1.0, 1.0),
        (16, 1.0, 1.0, 1.0),
        (64, pytest.approx(0.5), pytest.approx(0.5), pytest.approx(0.5)),
    ]
    saturated = {
        name: ranking_report.saturated(ranking_report.over_smallest(x, "accumulated")) for name, x in of.items()
    }
    assert saturated == {"a": 16, "b": 16, "b, rounded at once": 1, "c": 16}
    gaps = ranking_report.gaps(list(of.values()))  # of c there is no b = 1
    want = {1: (2 * 2 * 1) ** (1 / 3), 16: (1.25 * 1.25) ** (1 / 3), 64: (0.625 * 0.625) ** (1 / 3)}
    assert {size: one.value for size, one in gaps.items()} == pytest.approx(want)


def test_tables_sentences_and_plots_say_what_the_rows_do() -> None:
    ranked = ranking_report.blocks(whole(), seed=0)
    assert [(block.size, len(block.units)) for block in ranked] == [(16, 3), (64, 3)]  # where all were measured
    shown = ranking_report.tables(whole(), ranked, seed=0)
    line = next(line for line in shown.splitlines() if line.startswith("c "))
    assert line.split() == ["c", "2.50", *["3", "[3,", "3]"] * 4]
    asked, found, sure = ranking_report.sentences(whole(), ranked, seed=0)
    assert asked.startswith("Asked: does the order of 3 methods")
    assert "0 of 3 pairs change places" in found
    assert "up to b = 16 (a, b, c)" in found
    assert "up to b = 1 (b, rounded at once)" in found
    assert "2.00 [2.00, 2.00] at b = 1, 1.25 [1.25, 1.25] at b = 16" in found
    assert "same 20 stretches of 64" in sure
    assert "leave 0 of 12 ranks open" in sure
    assert "2.0e-09" in sure
    drawn = ranking_report.draw(whole(), ranked, seed=0)
    assert sorted(drawn) == ["block_sizes.png", "ranks.png"]
    assert all(png.startswith(b"\x89PNG") for png in drawn.values())


def test_the_design_holds_every_method_at_three_block_sizes_and_a_few_at_all() -> None:
    argv = ["--sink=128", "--recent=128", "--group=128", *(f"--block_size={block}" for block in ranking.BLOCKS)]
    with parsed(*argv):
        methods, work = ranking.design()
        assert {scheme.sink for scheme in methods.values()} == {128}
        by_block = {block: {one.label for one in work if one.block == block} for block in ranking.BLOCKS}
        every = {*ranking.METHODS, "fp32", "ultraquant, rounded at once"}
        assert all(by_block[block] == every for block in (16, 128, 512))
        assert by_block[1] == by_block[64] == {*ranking.FEW, "ultraquant, rounded at once"}
        assert [one.label for one in work if one.identity] == ["fp32"] * 3
        k, v = methods["ultraquant, rounded at once"].resolve(64)
        assert (k.window.recent, k.window.group, v.window.recent, v.window.group) == (0, 1, 0, 1)
    with parsed(*argv, "--quick"):
        assert len({one.label for one in ranking.design()[1]}) == len(ranking.QUICK) + 2


def test_a_design_that_cannot_be_ranked_is_refused() -> None:
    with parsed("--method=kivi:bits=2", "--method=fp32"), pytest.raises(ValueError, match="two methods that quantize"):
        ranking.design()
    few = ["--num_tokens=192", "--skip_positions=140", "--bucket=64"]
    with parsed(*few), pytest.raises(ValueError, match="leave 0 stretches of --bucket=64"):
        ablation.check_stretches()


def test_an_unquantized_cache_that_changes_the_model_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ranking_run(tmp_path) as results:
        given = pseudo_decode.Inputs(None, None, {"fp32": "fp32"}, {}, (32,), ablation.REGIMES, "xla")  # type: ignore[arg-type]
        monkeypatch.setattr(pseudo_decode, "measure", lambda *_: rows("fp32", 32, 0.1, 0.2))
        with pytest.raises(ValueError, match="unquantized cache changes the model"):
            ranking.measure_all(given, [ranking.Work("fp32", 32, identity=True)], results)


def ranking_run(path: Path) -> Any:
    return run.open_run(path / "r", config={}, determines={}, key=pseudo_decode.KEY, resume=False)
