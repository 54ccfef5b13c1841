"""`python -m experiments.calibrate` on a tiny checkpoint, and its constants in pseudo_decode: kill, go on, errors."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from running import run

import kvq_jax as kvq
import models
from experiments import calibrate, pseudo_decode
from experiments.harness.progress import Progress
from kvq_jax import schemes
from kvq_jax.quantizers.base import ConstantSpec, Leaves, Quantizer
from kvq_jax.schemes import Bits, Side, Window, register

METHOD = "ranged:bits=4"


@dataclass(frozen=True)
class Ranged(Quantizer):
    """Codes of bits over a calibrated range of each KV head: x̂ = scale · round(x / scale)."""

    bits: int

    def constants(self, kv_heads: int) -> dict[str, ConstantSpec]:
        return {"scale": ConstantSpec((kv_heads,), positive=True)}

    def encode(self, tiles: jax.Array, constants: Leaves) -> Leaves:
        most = 2 ** (self.bits - 1) - 1
        codes = jnp.round(tiles[..., 0, :] / constants["scale"][:, None, None])
        return {"codes": jnp.clip(codes, -most, most).astype(jnp.int8)}

    def decode(self, leaves: Leaves, constants: Leaves) -> jax.Array:
        return (leaves["codes"] * constants["scale"][:, None, None])[..., None, :]


def register_scheme() -> None:
    """A scheme `ranged` that needs constants."""

    @register("ranged", "test")
    @dataclass(frozen=True, kw_only=True)
    class RangedScheme(Bits):
        needs_constants = True
        captures = ("k", "v", "k_fisher")

        def sides(self, head_dim: int) -> tuple[Side, Side]:
            k, v = (Ranged(head_dim, bits) for bits in (self.key_bits, self.value_bits))
            return Side(k, Window(recent=0, group=1), pre_rope=True), Side(v, Window(recent=0, group=1))

        def calibrate(self, samples: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
            most = {side: jnp.abs(samples[side]).max((0, 2, 3)) for side in "kv"}
            return {f"{side}_scale": x / (2 ** (self.key_bits - 1) - 1) for side, x in most.items()}


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    register_scheme()
    yield
    del schemes._REGISTRY["ranged"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("".join(f"{i} sheep jumped over the fence. " for i in range(20)))  # some 640 bytes
    return path


def arguments(model: Path, text: Path, out: Path | None, *more: str) -> list[str]:
    given = [] if out is None else [f"--out={out}"]
    given += [] if any(one.startswith("--method") for one in more) else [f"--method={METHOD}"]
    return [f"--model={model}", f"--text={text}", "--num_tokens=64", "--batch=4", *given, *more]


def decode_arguments(model: Path, text: Path, out: Path, *more: str) -> list[str]:
    windows = ["--num_tokens=96", "--block_size=32", "--skip_positions=40", "--bucket=32", "--text_start=256"]
    return [f"--model={model}", f"--text={text}", f"--out={out}", *windows, *more]


@pytest.fixture(scope="module")
def made(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "c"
    assert run(calibrate, arguments(model, text, out)) == 0
    return out


def test_the_constants_are_those_of_the_library_and_the_folder_is_clean(
    made: Path, model: Path, text: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    loaded = models.load(model, context=64)
    tokens = np.frombuffer(text.read_bytes()[:256], np.uint8).reshape(4, 64)  # the tiny tokenizer's tokens are bytes
    tokens = np.array([loaded.tokenizer.encode(bytes(row).decode()) for row in tokens])
    want = kvq.calibrate(METHOD, loaded.forward, tokens)
    found = kvq.load_constants(made, METHOD, model_digest=loaded.digest)
    assert (found.layers, found.tokens, found.text_digest) == (2, 256, want.text_digest)
    for name, x in want.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], x)
    assert sorted(path.name for path in made.iterdir()) == ["1", "config.json"]
    config = json.loads((made / "config.json").read_text())
    assert config["constants_digest"] == found.digest
    assert config["flags"]["num_tokens"] == 64

    before = (made / "config.json").read_bytes()
    capfd.readouterr()
    assert run(calibrate, arguments(model, text, made)) == 0  # nothing to do
    printed, errors = capfd.readouterr()
    assert (made / "config.json").read_bytes() == before
    assert errors == ""
    assert "tokens 0 to 255" in printed
    assert f"Already in {made}" in printed
    scales = found.arrays["k_scale"][1]
    assert f"{scales.min():.3g} … {scales.max():.3g}" in printed
    assert f"--constants={made}" in printed


class Killed(BaseException):
    """The process ends here."""


def test_killed_and_interrupted_it_goes_on_with_the_same_command(
    made: Path,
    model: Path,
    text: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "c"

    def captures() -> list[Path]:
        return sorted(out.glob("captures/*.npz"))

    for number, stop in ((1, Killed), (4, KeyboardInterrupt)):

        def report(bar: Progress, done: int, total: int, number: int = number, stop: type = stop) -> None:
            if done == number:
                raise stop

        with monkeypatch.context() as patch:
            patch.setattr(Progress, "__call__", report)
            with pytest.raises(stop) as stopped:
                run(calibrate, arguments(model, text, out))
        assert len(captures()) == number
        assert json.loads((out / "config.json").read_text())["constants_digest"] is None
        with pytest.raises(ValueError, match="no complete checkpoint"):
            kvq.load_constants(out, METHOD)
    assert stopped.value.__notes__ == [f"what is finished is in {out}/captures; the same command goes on"]

    kept = {path: path.stat().st_mtime_ns for path in captures()}
    assert run(calibrate, arguments(model, text, out, "--num_tokens=32")) == 2
    assert "was made with text_digest=" in capfd.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in captures()} == kept
    assert run(calibrate, arguments(model, text, out)) == 0
    assert sorted(path.name for path in out.iterdir()) == ["1", "config.json"]
    assert kvq.load_constants(out, METHOD).digest == kvq.load_constants(made, METHOD).digest


def test_other_settings_replace_constants_only_when_asked(
    model: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "c"
    assert run(calibrate, arguments(model, text, out)) == 0
    first = kvq.load_constants(out, METHOD).digest
    capfd.readouterr()
    assert run(calibrate, arguments(model, text, out, "--batch=2")) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "pass another --out, or --overwrite" in line
    assert kvq.load_constants(out, METHOD).digest == first
    assert run(calibrate, arguments(model, text, out, "--batch=2", "--overwrite")) == 0
    assert kvq.load_constants(out, METHOD).tokens == 128
    assert sorted(path.name for path in out.iterdir()) == ["2", "config.json"]


def test_the_default_folder_is_named_by_method_and_model(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(calibrate, arguments(model, text, None, "--batch=1", "--sink=3")) == 0
    kvq.load_constants(tmp_path / "out" / "calibrate" / "ranged-bits=4" / "tiny", METHOD)


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


def test_pseudo_decode_takes_each_folder_for_the_method_it_is_of(
    made: Path, model: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    coarse = tmp_path / "coarse"
    assert run(calibrate, arguments(model, text, coarse, "--method=ranged:bits=2")) == 0
    methods = [f"--method={METHOD}", "--method=kivi:bits=2,residual=32", "--method=ranged:bits=2,sink=8"]
    out, given = tmp_path / "out", [f"--constants={coarse}", f"--constants={made}"]
    argv = decode_arguments(model, text, out, *methods, *given, "--regime=static")
    assert run(pseudo_decode, argv) == 0
    four, two = kvq.load_constants(made).digest, kvq.load_constants(coarse).digest
    found = rows(out)
    assert [row["constants_digest"] for row in found] == [four, None, two]
    assert found[0]["key_relative_mse"] < 0.02 < found[2]["key_relative_mse"]
    determines = json.loads((out / "config.json").read_text())["determines"]
    assert determines["constants_digest"] == {"ranged:bits=2": two, "ranged:bits=4": four}

    other = tmp_path / "other"
    assert run(calibrate, arguments(model, text, other, "--batch=2")) == 0
    capfd.readouterr()
    again = [arg.replace(str(made), str(other)) for arg in argv]
    assert run(pseudo_decode, [*again, "--resume"]) == 2
    assert "made with constants_digest=" in capfd.readouterr().err
    assert len(rows(out)) == 3


def test_requirement_12_missing_foreign_and_unused_constants_are_one_line(
    made: Path, model: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    twin = tmp_path / "twin"
    assert run(calibrate, arguments(model, text, twin, "--batch=1")) == 0
    foreign = tmp_path / "foreign"
    kvq.save_constants(foreign, dataclasses.replace(kvq.load_constants(made), model_digest="0"))
    needs = f"python -m experiments.calibrate --method={METHOD} --model={model} --text={text} --out=DIR"
    for more, says in (
        ([f"--method={METHOD}"], ["ranged needs constants", needs]),
        ([f"--method={METHOD}", f"--constants={nothing}"], [f"--constants={nothing}", "no complete checkpoint"]),
        ([f"--method={METHOD}", f"--constants={tmp_path / 'x'}"], ["no such folder"]),
        ([f"--method={METHOD}", f"--constants={foreign}"], ["model with digest 0 were given to"]),
        (["--method=kivi:residual=32", f"--constants={made}"], [METHOD, "no --method is that", "kivi:bits=2"]),
        (["--method=ranged:bits=3", f"--constants={made}"], [METHOD, "no --method is that", "ranged:bits=3"]),
        ([f"--method={METHOD}", f"--constants={made}", f"--constants={twin}"], ["has constants already", str(twin)]),
    ):
        capfd.readouterr()
        assert run(pseudo_decode, decode_arguments(model, text, tmp_path / "out", *more)) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith("error: ")
        for part in says:
            assert part in line
        assert not (tmp_path / "out").exists()


ULTRAQUANT = "--method=ultraquant:rounding=floor"


@pytest.mark.parametrize(("granularity", "objective"), [("global", None), ("layer", "scores"), ("head", "attention")])
def test_clipping_constants_are_shared_as_asked_and_reported(
    granularity: str, objective: str | None, model: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "c"
    choices = {"granularity": granularity} | ({} if objective is None else {"objective": objective})
    argv = arguments(model, text, out, ULTRAQUANT, *(f"--{name}={value}" for name, value in choices.items()))
    assert run(calibrate, argv) == 0
    printed = capfd.readouterr().out
    found = kvq.load_constants(out, "ultraquant:rounding=floor")
    loaded = models.load(model, context=64)
    tokens = np.frombuffer(text.read_bytes()[:256], np.uint8).reshape(4, 64)
    tokens = np.array([loaded.tokenizer.encode(bytes(row).decode()) for row in tokens])
    seen: dict[str, jax.Array] = {}
    want = kvq.calibrate(
        "ultraquant:rounding=floor", loaded.forward, tokens, choices=choices, inspect=lambda x: seen.update(x)
    )
    assert {name: np.shape(x) for name, x in found.arrays.items()} == {"k_c": (2, 1), "v_c": (2, 1)}
    for side in "kv":
        c = found.arrays[f"{side}_c"]
        np.testing.assert_array_equal(c, want.arrays[f"{side}_c"])
        assert len(np.unique(c)) == (1 if granularity == "global" else 2)
        assert (np.abs(np.log2(c / 0.27)) < 0.4).all()

        curve, norm = (np.asarray(seen[f"{side}_{name}"])[:, -1].sum(1) for name in ("curve", "norm"))
        best = [line.split()[:3] for line in printed.splitlines() if line[:1] in "01" and "%" in line]
        best = best[:2] if side == "k" else best[2:4]
        assert [line[0] for line in best] == ["0", "1"]
        for line, errors, whole in zip(best, curve, norm, strict=True):
            assert float(line[1]) == pytest.approx(float(seen["grid"][0][errors.argmin()]), rel=0.04)
            assert float(line[2]) == pytest.approx(errors.min() / whole, rel=0.02)
    for part in ("K: layers' best c", "V: layers' best c", "of all together", "64 tokens", f"--constants={out}"):
        assert part in printed
    assert sorted(path.name for path in out.iterdir()) == ["1", "config.json", "report.txt"]
    assert (out / "report.txt").read_text() in printed

    assert run(calibrate, argv) == 0
    assert (out / "report.txt").read_text() in capfd.readouterr().out
    other = "head" if granularity == "global" else "global"
    assert run(calibrate, [*argv, f"--granularity={other}"]) == 2
    assert f"was made with granularity={granularity}" in capfd.readouterr().err

    if objective is None:
        decoded = tmp_path / "decoded"
        assert (
            run(
                pseudo_decode,
                decode_arguments(model, text, decoded, ULTRAQUANT, f"--constants={out}", "--regime=static"),
            )
            == 0
        )
        assert {row["constants_digest"] for row in rows(decoded)} == {found.digest}


def test_another_method_over_ultraquants_leaves_no_report(
    model: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "c"
    assert run(calibrate, arguments(model, text, out, "--method=ultraquant", "--batch=1")) == 0
    assert run(calibrate, arguments(model, text, out, "--batch=1", "--overwrite")) == 0
    assert sorted(path.name for path in out.iterdir()) == ["2", "config.json"]
    assert "best c" not in capfd.readouterr().out.split("ranged")[-1]


BAD = {
    "no such granularity": (["--method=ultraquant", "--granularity=row"], ["granularity='row'", "layer, global, head"]),
    "no such objective": (["--method=ultraquant", "--objective=kl"], ["objective='kl'", "mse, scores, attention"]),
    "nothing to choose": (["--granularity=head"], ["ranged", "has no granularity to choose"]),
    "no method": (["--method="], ["--method=", "unknown scheme"]),
    "two methods": (["--method=ranged", "--method=ranged:bits=3"], ["given 2 times"]),
    "nothing to calibrate": (["--method=kivi"], ["kivi takes no constants"]),
    "unknown field": (["--method=ranged:bit=3"], ["bit", "its fields"]),
    "text too short": (["--batch=16"], ["--batch=16", "longer text"]),
    "text that begins too late": (["--text_start=500"], ["--text_start=500", "longer text"]),
    "beyond the context": (["--num_tokens=4000"], ["--num_tokens=4000", "2048"]),
    "no such model": (["--model=nowhere"], ["nowhere", "does not exist"]),
    "no such text": (["--text=macbeth"], ["macbeth", "no such file"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(
    case: str, model: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    more, says = BAD[case]
    assert run(calibrate, arguments(model, text, tmp_path / "out", *more)) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ")
    for part in says:
        assert part in line
    assert not list(tmp_path.iterdir())
