"""Trajectories on a tiny checkpoint: what a step's attention is, when things begin, what the binary says."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from running import run

import kvq_jax as kvq
import models
from experiments import trajectory, trajectory_report
from experiments.harness import decode_steps

SMALL = ["--num_tokens=112", "--prompt_tokens=96", "--batch=2", "--sink=16", "--recent=0", "--group=32"]
PROMPTS, STEPS = 2, 16


@pytest.fixture(scope="module")
def loaded(model: Path) -> models.Model:
    return models.load(str(model), context=112)


@pytest.fixture(scope="module")
def reference(loaded: models.Model) -> decode_steps.Reference:
    prompts = np.random.default_rng(0).integers(0, 250, (PROMPTS, 96)).astype(np.int32)
    return decode_steps.read_reference(
        loaded.forward,
        prompts,
        steps=STEPS,
        stops=(),
        dtype="float32",
        implementation="xla",
        progress=lambda done, total: None,
    )


def test_the_reference_is_greedy_and_its_attention_that_of_its_outputs(
    loaded: models.Model, reference: decode_steps.Reference
) -> None:
    prompts = np.random.default_rng(0).integers(0, 250, (PROMPTS, 96))
    whole = loaded.logits(np.concatenate([prompts, reference.answer[:, :STEPS]], axis=1))
    np.testing.assert_array_equal(np.argmax(whole[:, 95:], -1), reference.answer)
    np.testing.assert_allclose(np.stack(reference.logits, 1), whole[:, 96:], atol=1e-3)


@pytest.mark.parametrize("spec", ["ultraquant", "fp32"])  # which rotates keys and rounds queries, or nothing
def test_the_distributions_are_those_that_attention_uses(spec: str, reference: decode_steps.Reference) -> None:
    scheme = kvq.scheme(spec, sink=16, recent=0, group=32)
    (k, v), asked = reference.prompt[1], reference.asked[0][1]
    size = {"batch": PROMPTS, "kv_heads": k.shape[1], "head_dim": k.shape[3], "capacity": 112, "dtype": jnp.float32}
    cache = kvq.append(kvq.init_cache(scheme, **size), k, v)
    new = reference.keys[1][:, :, 96:97]
    p = jax.nn.softmax(decode_steps.cached_logits(asked, cache, new), -1)
    assert p.shape == (PROMPTS, asked.q.shape[1], 1, 112)
    assert float(p[..., 96].min()) > 0
    assert not p[..., 97:].any()
    values = jnp.repeat(kvq.read(cache)[1], asked.q.shape[1] // k.shape[1], axis=1)
    wanted = kvq.attend(asked.q, cache, new, jnp.zeros_like(new), implementation="reference")
    np.testing.assert_allclose(p[..., :96] @ values, wanted, atol=1e-6)
    exact = jax.nn.softmax(decode_steps.exact_logits(asked, reference.keys[1], jnp.full(PROMPTS, 96)), -1)
    most = float(jnp.abs(p - exact).max())
    assert most < 1e-6 if spec == "fp32" else most > 1e-4


def test_a_sliding_window_hides_what_is_behind_it_and_a_sink_is_one_more_key() -> None:
    rng = np.random.default_rng(1)
    q, keys = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((1, 4, 1, 8), (1, 2, 10, 8)))
    asked = decode_steps.Asked(q, scale=0.5, sinks=jnp.zeros(4), sliding_window=3)
    p = jax.nn.softmax(decode_steps.exact_logits(asked, keys, jnp.array([6])), -1)
    assert (np.asarray(p[0, :, 0]) > 0).tolist() == [[4 <= i <= 6 or i == 10 for i in range(11)]] * 4
    scores = 0.5 * q[0, 3, 0] @ keys[0, 1, 4:7].T
    np.testing.assert_allclose(p[0, 3, 0, 4:7], jnp.exp(scores) / (1 + jnp.exp(scores).sum()), rtol=1e-5)


def test_responses_end_at_the_first_stop() -> None:
    answer = np.array([[5, 9, 7, 9], [1, 2, 3, 4], [9, 1, 1, 1]])
    assert decode_steps.responses(answer, (9,)).tolist() == [2, 4, 1]
    assert decode_steps.responses(answer, ()).tolist() == [4, 4, 4]


def row(i: int, flips: list[float], own: list[int], reference: list[int], length: int) -> dict[str, Any]:
    curves = {name: np.array([flips]) for name in ("flips_of_all_mass", "flips")}
    known = decode_steps.Reference([], np.array([reference]), np.array([length]), [], [], [])
    return trajectory.row(curves, np.array([own]), known, i, flipped=0.1)


def test_when_flips_and_the_other_text_begin() -> None:
    found = row(0, [0.0, 0.1, 0.11, 0.0], [1, 2, 3, 4, 9], [1, 2, 3, 4, 5], 5)
    assert (found["flip_step"], found["divergence_step"], found["steps"]) == (3, 4, 4)
    assert found["flips"] == pytest.approx(0.21 / 4)
    found = row(0, [0.0, 0.0, 0.5, 0.5], [1, 2, 3, 4, 9], [1, 2, 3, 4, 5], 3)  # both after the answer's end
    assert (found["flip_step"], found["divergence_step"], found["steps"]) == (None, None, 2)
    assert (found["flip_step_or_end"], found["divergence_step_or_end"]) == (3, 3)
    assert found["flips_by_step"] == [0, 0]


def test_rank_correlation_is_scipys_and_blind_to_differences_between_settings() -> None:
    rng = np.random.default_rng(2)
    x, y = rng.integers(0, 9, (2, 3, 12)).astype(float)  # with ties
    found = trajectory_report.rank_correlation(x, y, within=False, seed=0)
    assert found.value == pytest.approx(scipy.stats.spearmanr(x.ravel(), y.ravel()).statistic)
    assert found.low < found.value < found.high
    own = [scipy.stats.spearmanr(a, b).statistic for a, b in zip(x, y, strict=True)]
    moved = 100.0 * np.arange(3)[:, None]
    found = trajectory_report.rank_correlation(x + moved, y + moved, within=True, seed=0)
    assert found.value == pytest.approx(np.mean(own))
    assert trajectory_report.rank_correlation(x + moved, y + moved, within=False, seed=0).value > 0.8
    perfect = trajectory_report.rank_correlation(x, 2 * x, within=True, seed=0)
    np.testing.assert_allclose([perfect.value, perfect.low, perfect.high], 1)
    assert np.isnan(trajectory_report.rank_correlation(0 * x, y, within=True, seed=0).value)
    few = trajectory_report.rank_correlation(x[:, :2], 2 * x[:, :2], within=True, seed=0)  # whose resamples are alike
    assert few.value == pytest.approx(1)
    assert np.isnan(few.low)


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


def test_the_binary_compares_a_method_with_its_control_and_goes_on(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "words.txt", tmp_path / "out"
    text.write_text("".join(f"{i} sheep jumped over fence {i * i}. " for i in range(40)))
    argv = [f"--model={model}", f"--text={text}", f"--out={out}", *SMALL, "--method=kivi:bits=2"]
    assert run(trajectory, argv) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in (
        "• Asked:",
        "• Found: the step at which more than 0%",
        "• How sure: 4 pairs from 2 prompts",
        "Spearman's ρ",
    ):
        assert part in shown
    rows = read(out)
    assert [(row["control"], row["prompt"], row["packed"]) for row in rows] == [
        (control, prompt, not control) for control in (False, True) for prompt in range(PROMPTS)
    ]
    for own, noise in zip(rows[:PROMPTS], rows[PROMPTS:], strict=True):
        assert own["key_relative_mse"] > 0.01
        for side in ("key", "value"):
            assert noise[f"{side}_relative_mse"] == pytest.approx(own[f"{side}_relative_mse"], rel=1e-4)
        assert own["attention_kl_nats"] != noise["attention_kl_nats"]
        assert len(own["flips_by_step"]) == own["steps"] == STEPS
        assert 0 < own["flips"] < 1
        assert own["response_length"] == STEPS + 1
    for name in ("by_step.png", "flips_and_text.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert run(trajectory, [*argv, "--resume"]) == 0
    assert capsys.readouterr().out.count("already in") == 2
    assert read(out) == rows


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--prompt_tokens=112", "leaves nothing of --num_tokens=112 to decode"),
        ("--method=kivi:group=96", "quantizes nothing of --prompt_tokens=96"),
        ("--method=bf16", "rounds nothing"),
        ("--method=kivi:reads_own=quantized", "use raw"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    argument: str, says: str, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "words.txt"
    text.write_text("sheep " * 100)
    argv = [f"--model={model}", f"--text={text}", f"--out={tmp_path / 'out'}", *SMALL, "--method=kivi:bits=2"]
    argv = [one for one in argv if not ("group" in argument and one.startswith("--group"))]
    assert run(trajectory, [*argv, argument]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert says in line
    assert not (tmp_path / "out").exists()
