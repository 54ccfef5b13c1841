"""`python -m experiments.retrieval` on a tiny checkpoint; its prompts, and the statistics against known answers."""

import csv
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import run
from scipy import stats

from experiments import retrieval as binary
from experiments import retrieval_prompts, retrieval_report
from experiments.harness import proportions, tasks

METHOD = "kivi:bits=2,subgroup=16"
SMALL = [
    "--length=384",
    "--depths=2",
    "--contexts=3",
    "--batch=3",
    "--read_block=8",
    "--sink=8",
    "--recent=0",
    "--group=16",
]
TIMES = {"seconds"}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("".join(f"{i} sheep jumped over the fence. " for i in range(40)))
    return path


def arguments(model: Path, text: Path, out: Path, *more: str) -> list[str]:
    common = [f"--model={model}", f"--text={text}", f"--out={out}", f"--method={METHOD}", "--family=needles"]
    return [*common, *SMALL, *more]


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


def test_both_regimes_are_asked_and_a_run_that_lost_rows_goes_on_to_the_same(
    model: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    argv = arguments(model, text, out, "--min_reference=0")
    assert run(binary, argv) == 0
    whole = read(out)
    assert [(row["label"], row["regime"], row["depth"]) for row in whole] == [
        (label, regime, depth)
        for label, regime in ((tasks.REFERENCE, "none"), (METHOD, "static"), (METHOD, "accumulated"))
        for depth in (0, 1)
    ]
    for row in whole:
        hits = row["ranked_each"]
        assert row["ranked"] == pytest.approx(np.mean(hits))
        assert (row["ranked_lo"], row["ranked_hi"]) == pytest.approx(tuple(wilson(sum(hits), 3)))
        assert len(row["answer_nats_each"]) == len(row["generated_each"]) == 3
        assert (row["quantized_tokens"] > 300) == row["packed"]
    static, accumulated = (np.array([whole[i]["answer_nats_each"] for i in at]) for at in ((2, 3), (4, 5)))
    assert (static != accumulated).all()  # errors that became inputs
    with (out / "summary.csv").open() as file:
        assert [float(row["answer_nats"]) for row in csv.DictReader(file)] == [row["answer_nats"] for row in whole]
    assert (out / "needles.png").read_bytes().startswith(b"\x89PNG")
    printed = capfd.readouterr().out
    for word in ("Asked:", "Found", "How sure:", "rows.jsonl"):
        assert word in printed

    lines = (out / "rows.jsonl").read_text().splitlines(keepends=True)
    (out / "rows.jsonl").write_text("".join(lines[:3]) + lines[3][:20])  # killed while it wrote a unit's second row
    assert run(binary, [*argv, "--resume"]) == 0
    assert capfd.readouterr().out.count("already in") == 1
    strip = [[{k: v for k, v in row.items() if k not in TIMES} for row in rows] for rows in (read(out), whole)]
    assert strip[0] == strip[1]


def test_a_family_that_the_reference_fails_is_not_used(
    model: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(binary, arguments(model, text, tmp_path / "out", "--min_reference=1")) == 0
    assert {row["label"] for row in read(tmp_path / "out")} == {tasks.REFERENCE}
    printed = capfd.readouterr().out
    assert "not used, the reference is below --min_reference=1" in printed
    assert "Found: nothing about the methods." in printed


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--length=3000", "beyond the 2048"),
        ("--sink=400", "quantizes nothing that is read"),
        ("--depths=9", "leaves -"),
        ("--method=kivy", "did you mean 'kivi'"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    argument: str, says: str, model: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(binary, arguments(model, text, tmp_path / "out", argument)) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert says in line
    assert not (tmp_path / "out").exists()


class Bytes:
    """A tokenizer."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode()


@pytest.mark.parametrize("family", list(retrieval_prompts.FAMILIES))
def test_every_question_has_its_answer_at_its_depth(family: str) -> None:
    tokenizer: Any = Bytes()
    text = tokenizer.encode("the fence of the field " * 200)
    for number, length in enumerate((1024, 1024, 1024, 4096)):  # there are not enough single keys for the last
        draw = random.Random(number)
        context = retrieval_prompts.FAMILIES[family](tokenizer, text, length, 5, draw)
        whole = tokenizer.decode(context.tokens)
        assert length - 56 <= len(context.tokens) <= length
        assert len(context.questions) == 5
        for question in context.questions:
            prompt = tokenizer.decode(question.prompt)
            assert whole.count(f"{prompt} {question.answer}") == 1
            assert whole.count(prompt) == 1
            assert len(set(question.candidates)) == 1 + retrieval_prompts.DISTRACTORS
            assert abs(whole.find(prompt) / len(whole) - question.depth) < 0.12


def test_the_first_word_is_what_counts_as_generated() -> None:
    assert binary.right("castle", " castle.\n")
    assert binary.right("4711", " 4711 is")
    assert not binary.right("castle", " castles")
    assert not binary.right("castle", " a castle")
    assert not binary.right("castle", " ")


def wilson(right: int, of: int) -> tuple[float, float]:
    """scipy's."""
    interval = stats.binomtest(right, of).proportion_ci(0.95, method="wilson")
    return interval.low, interval.high


@pytest.mark.parametrize(("right", "of"), [(0, 8), (3, 8), (8, 8), (61, 80)])
def test_intervals_of_a_rate_are_wilsons(right: int, of: int) -> None:
    found = proportions.wilson(right, of)
    assert found.value == right / of
    assert (found.low, found.high) == pytest.approx(wilson(right, of), abs=1e-9)


def test_paired_differences_draw_units_for_both_at_once() -> None:
    draw = np.random.default_rng(0)
    easy = draw.normal(size=(200, 1)) * 5  # what both share cancels
    a = easy + 1 + draw.normal(size=(200, 4))
    b = easy + draw.normal(size=(200, 4))
    found = proportions.paired_difference(a, b, seed=0)
    means = (a - b).mean(1)
    half = 1.96 * means.std(ddof=1) / np.sqrt(200)
    assert found.value == pytest.approx(means.mean())
    assert (found.low, found.high) == pytest.approx((found.value - half, found.value + half), abs=0.25 * half)
    within = proportions.paired_difference(a, b, seed=0, within=True)
    assert within.high - within.low > found.high - found.low
    assert np.isnan(proportions.paired_difference(a[:1], b[:1], seed=0).low)


@pytest.mark.parametrize("within", [False, True])
def test_the_interval_of_few_units_is_students(within: bool) -> None:
    x = np.random.default_rng(0).normal(size=(4, 5))
    found = proportions.bootstrap(x, seed=0, within=within)
    of_units = x.mean(1)
    want = stats.t.interval(0.95, 3, loc=of_units.mean(), scale=stats.sem(of_units))
    assert found == pytest.approx((of_units.mean(), *want))


def test_where_nothing_differs_the_interval_is_not_a_point() -> None:
    hits = np.array([[1, 0], [1, 1], [0, 0]])
    _, most = wilson(0, 3)
    assert proportions.paired_difference(hits, hits, seed=0) == pytest.approx((0, -most, most))
    assert np.isnan(proportions.paired_difference(hits * 7.0, hits * 7.0, seed=0).low)
    with pytest.raises(ValueError, match="are not paired"):
        proportions.paired_difference(hits, hits[:, :1], seed=0)


def test_rank_correlation_is_spearmans() -> None:
    draw = np.random.default_rng(1)
    x = draw.integers(10, size=(120, 2))
    y = x + draw.integers(10, size=x.shape)
    found = proportions.spearman(x, y, seed=0)
    assert found.value == pytest.approx(stats.spearmanr(x.ravel(), y.ravel()).statistic)
    assert found.low < found.value < found.high
    assert 0.1 < found.high - found.low < 0.4  # about 4 / √240
    assert np.isnan(proportions.spearman(x, np.ones_like(x), seed=0).value)


def test_the_reference_passes_by_the_scores_that_reach_the_limit() -> None:
    row = {"family": "f", "length": 8, "label": tasks.REFERENCE, "generated_each": [1, 1, 0, 0], "ranked_each": [1] * 4}
    assert retrieval_report.passing([row], "f", 8, 0.8) == ("ranked",)
    assert retrieval_report.passing([row], "f", 8, 0.5) == ("generated", "ranked")


def test_a_method_that_changed_nothing_is_an_error_and_not_a_perfect_result() -> None:
    row = {"family": "f", "length": 8, "depth": 0, "label": tasks.REFERENCE, "regime": "none", "packed": False}
    row |= {"answer_nats_each": [-1.0, -2.0]}
    method = row | {"label": "kivi", "regime": "static", "packed": True}
    retrieval_report.check_changed([row, method | {"answer_nats_each": [-1.0, -2.5]}])
    with pytest.raises(ValueError, match="kivi, static: nothing differs from the reference"):
        retrieval_report.check_changed([row, method])
