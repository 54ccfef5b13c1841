"""The adapter for lm-evaluation-harness: its answers come from the cache, and an exact cache gives the plain forward's.

The package is heavy, so that what needs it is skipped where it is not installed; what turns requests into numbers is
tested always, with plain request objects.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from running import parsed, run

import kvq_jax as kvq
import models
from experiments import lm_eval as binary
from experiments.harness import generation, tasks
from experiments.lm_eval_requests import ENDS, SCORED, Answers, options

KIVI = "kivi:bits=2,subgroup=8"
# Three rows in every batch, so that few programs compile.
CONTEXTS = (
    "The quick brown fox jumped over the lazy dog, once",
    "Sheep may safely graze where a good shepherd is",
    "A third",
)
PAIRS = [
    (CONTEXTS[0], " and for all"),
    (CONTEXTS[1], " watching"),
    (CONTEXTS[0], " upon a time, in a land far away"),  # in more than one block
    ("", "Nothing before"),
    (CONTEXTS[1] + " ", "awake"),  # the blank belongs to the continuation
]


@pytest.fixture(scope="module")
def given(model: Path) -> tasks.Given:
    return tasks.Given(
        models.load(model, scan_layers=True), {KIVI: kvq.scheme(KIVI, sink=4, recent=0, group=8)}, {}, "xla"
    )


def answers(given: tasks.Given, label: str, limit: int = 512) -> Answers:
    return Answers(given, label, batch=3, block=SCORED, prefix="!", limit=limit)


def requests(*args: tuple[Any, ...]) -> list[SimpleNamespace]:
    return [SimpleNamespace(args=one) for one in args]


def plain(given: tasks.Given, rows: list[list[int]]) -> np.ndarray:
    """ln p of every token of the vocabulary after each token, `[rows, 128, vocab]`."""
    return np.asarray(jax.nn.log_softmax(given.model.logits(generation.padded(rows, 128)[0])))


def test_an_exact_cache_gives_the_plain_forward_and_a_quantized_one_does_not(given: tasks.Given) -> None:
    exact = answers(given, tasks.REFERENCE)
    found = exact.loglikelihood(requests(*PAIRS))
    encode = given.model.tokenizer.encode
    tokens = [(encode((a or "!").rstrip()), encode(" " * a.endswith(" ") + b)) for a, b in PAIRS]
    p = plain(given, [a + b for a, b in tokens])
    wanted = [sum(p[i, len(a) + j - 1, t] for j, t in enumerate(b)) for i, (a, b) in enumerate(tokens)]
    np.testing.assert_allclose([nats for nats, _ in found], wanted, rtol=1e-4, atol=1e-3)
    assert not any(greedy for _, greedy in found)
    assert exact.quantized == 0
    assert exact.cached == len(CONTEXTS[0]) + len(CONTEXTS[1]) + 1  # the prefix; contexts that are shared are read once

    through = answers(given, KIVI)
    moved = through.loglikelihood(requests(*PAIRS))
    difference = np.abs(np.array([one for one, _ in moved]) - [one for one, _ in found])
    assert (difference[[0, 1, 2, 4]] > 1e-3).all()
    assert difference[3] < 1e-3  # in one block after one token: nothing has left the window
    assert 0.5 < through.quantized / through.cached < 1


def test_greedy_text_is_that_of_a_plain_loop_and_stops(given: tasks.Given) -> None:
    rows = [given.model.tokenizer.encode(context) for context in CONTEXTS]
    for _ in range(6):
        p = plain(given, rows)
        for i, row in enumerate(rows):
            row.append(int(p[i, len(row) - 1].argmax()))
    texts = [given.model.tokenizer.decode(row[-6:]) for row in rows]
    exact = answers(given, tasks.REFERENCE)
    how = {"until": [], "max_gen_toks": 6, "do_sample": False, "temperature": 0.0}
    assert exact.generate_until(requests(*((c, how) for c in CONTEXTS))) == texts
    until = texts[0][2]
    stopped = exact.generate_until(requests(*((c, how | {"until": until}) for c in CONTEXTS)))
    assert stopped == [text.partition(until)[0] for text in texts]


def test_a_long_text_is_scored_in_windows(given: tasks.Given) -> None:
    text = CONTEXTS[0] + CONTEXTS[1]
    whole, parts = answers(given, tasks.REFERENCE), answers(given, tasks.REFERENCE, limit=65)
    tokens = given.model.tokenizer.encode(text)
    p = plain(given, [given.model.tokenizer.encode("!") + tokens, tokens[63:]])
    first = sum(p[0, i, t] for i, t in enumerate(tokens))
    asked = requests((text,), ("a",), ("b",))
    assert whole.loglikelihood_rolling(asked)[0] == pytest.approx(first, rel=1e-4)
    # 64 tokens after the prefix, the others after the last of these
    windows = sum(p[0, i, t] for i, t in enumerate(tokens[:64])) + sum(p[1, i, t] for i, t in enumerate(tokens[64:]))
    assert parts.loglikelihood_rolling(asked)[0] == pytest.approx(windows, rel=1e-4)


def test_a_context_that_is_too_long_loses_its_beginning_and_is_counted(given: tasks.Given) -> None:
    short = answers(given, tasks.REFERENCE, limit=24)
    found, *_ = short.loglikelihood(requests((CONTEXTS[0], " now"), ("a", "b"), ("c", "d")))
    tokens, after = (given.model.tokenizer.encode(one) for one in (CONTEXTS[0], " now"))
    p = plain(given, [tokens[-20:] + after])
    assert found[0] == pytest.approx(sum(p[0, 19 + j, t] for j, t in enumerate(after)), rel=1e-4)
    assert short.cut == 1
    with pytest.raises(ValueError, match="--num_tokens=24 leaves no room"):
        short.loglikelihood(requests(("a", "b" * 24)))


def test_only_greedy_decoding_is_promised() -> None:
    assert options({"until": "x", "max_gen_toks": 3, "do_sample": False}) == (("x", *ENDS), 3)
    assert options({})[0] == ENDS
    for wrong in ({"do_sample": True}, {"temperature": 0.7}, {"top_k": 5}):
        with pytest.raises(ValueError, match="is not supported: decoding is greedy"):
            options(wrong)


def test_a_missing_package_is_one_line_with_its_command(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert run(binary, [f"--model={model}", f"--out={tmp_path / 'out'}", f"--method={KIVI}"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith("the package lm-eval is not installed; pip install lm-eval==0.4.13")
    assert not (tmp_path / "out").exists()


def test_the_digest_of_ones_own_tasks_is_of_what_defines_them(tmp_path: Path) -> None:
    task = tmp_path / "own" / "task.yaml"
    task.parent.mkdir()
    task.write_text("task: a")
    with parsed(f"--include_path={tmp_path}"):
        first = binary.own_files_digest()
        (tmp_path / "rows.jsonl").write_text("{}")
        assert binary.own_files_digest() == first
        task.write_text("task: b")
        assert binary.own_files_digest() != first
    with parsed():
        assert binary.own_files_digest() is None


@pytest.mark.filterwarnings("ignore")
def test_the_harness_runs_a_local_task_through_the_cache(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(
        "lm_eval", reason="lm-eval adds over 500 MB (pandas, pyarrow, scikit-learn), so that CI does without"
    )
    documents = tmp_path / "documents.jsonl"
    with documents.open("w") as file:
        for i in range(3):
            line = {"context": CONTEXTS[i % 2], "choices": [" and for all", f" number {i}"], "label": i % 2}
            file.write(json.dumps(line) + "\n")
    (tmp_path / "local.yaml").write_text(
        f"task: local_facts\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {documents}}}}}\n"
        'test_split: test\noutput_type: multiple_choice\ndoc_to_text: "{{context}}"\ntarget_delimiter: ""\n'
        'doc_to_choice: "{{choices}}"\ndoc_to_target: "{{label}}"\nmetric_list: [{metric: acc}]\n'
    )
    out = tmp_path / "out"
    argv = [f"--model={model}", f"--out={out}", "--tasks=local_facts", f"--include_path={tmp_path}", f"--method={KIVI}"]
    argv += ["--sink=4", "--recent=0", "--group=8", "--batch=3", "--read_block=16", "--num_tokens=128"]
    assert run(binary, argv) == 0
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert [(row["label"], row["metric"], len(row["value_each"])) for row in rows] == [
        (tasks.REFERENCE, "acc", 3),
        (KIVI, "acc", 3),
    ]
    assert rows[0]["quantized"] == 0
    assert rows[1]["quantized"] > 0.5
    assert (out / "metrics.png").read_bytes().startswith(b"\x89PNG")
    capfd.readouterr()
    assert run(binary, [*argv, "--resume"]) == 0
    assert capfd.readouterr().out.count("already in") == 2
