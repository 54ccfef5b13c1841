"""Constants: refused where they make no sense, saved and loaded whole, and never of another scheme or model."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax import schemes
from kvq_jax.quantizers.base import ConstantSpec, Leaves, Quantizer
from kvq_jax.schemes import Scheme, Side, Window, option, register

ROOT = Path(__file__).parents[2]
LAYERS, HEADS, D = 3, 2, 8


@dataclass(frozen=True)
class Scaled(Quantizer):
    """round(x / scale) · scale, one scale a head; and an order of two thresholds that nothing reads."""

    def constants(self, kv_heads: int) -> dict[str, ConstantSpec]:
        low, high = ConstantSpec((self.head_dim,)), ConstantSpec((self.head_dim,), above="low")
        return {"scale": ConstantSpec((kv_heads, 1), positive=True), "low": low, "high": high}

    def encode(self, tiles: jax.Array, constants: Leaves) -> Leaves:
        return {"codes": jnp.clip(jnp.round(tiles[..., 0, :] / self.scale(constants)), -127, 127).astype(jnp.int8)}

    def decode(self, leaves: Leaves, constants: Leaves) -> jax.Array:
        return (leaves["codes"] * self.scale(constants))[..., None, :]

    def scale(self, constants: Leaves) -> jax.Array:  # [heads or 1, tiles 1, 1]
        return constants["scale"][:, None] if constants else jnp.ones((1, 1, 1))


def register_schemes() -> None:
    """`scaled` needs constants for K and V; `lenient` can do without."""

    @register("scaled", "test")
    @dataclass(frozen=True, kw_only=True)
    class ScaledScheme(Scheme):
        needs_constants = True
        levels: int = option(255, minimum=3)

        def sides(self, head_dim: int) -> tuple[Side, Side]:
            side = Side(Scaled(head_dim), Window(recent=0, group=1))
            return side, side

    @register("lenient", "test")
    @dataclass(frozen=True, kw_only=True)
    class Lenient(ScaledScheme):
        needs_constants = False


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    register_schemes()
    yield
    for name in ("scaled", "lenient"):
        del schemes._REGISTRY[name]


def arrays(seed: int = 0, layers: int = LAYERS, heads: int = HEADS) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    found = {}
    for side in "kv":
        found[f"{side}_scale"] = rng.uniform(0.01, 0.02, (layers, heads, 1)).astype(np.float32)
        found[f"{side}_low"] = rng.standard_normal((layers, D)).astype(np.float32)
        found[f"{side}_high"] = found[f"{side}_low"] + np.float32(1)
    return found


def constants(seed: int = 0, **changed: Any) -> kvq.Constants:
    fields = {"scheme": "scaled:levels=255", "kv_heads": HEADS, "head_dim": D, "model_digest": "m1", "tokens": 7}
    return kvq.Constants(**{"arrays": arrays(seed)} | fields | changed)


def cache(given: Any, scheme: str = "scaled:", layers: int = LAYERS, kv_heads: int = HEADS, head_dim: int = D) -> Any:
    shape = {"batch": 1, "kv_heads": kv_heads, "head_dim": head_dim, "capacity": 4}
    return kvq.init_cache(scheme, **shape, dtype=jnp.float32, layers=layers, constants=given)


def test_saved_and_loaded_are_equal_and_quantize_by_layer(tmp_path: Path) -> None:
    kvq.save_constants(tmp_path / "c", constants())
    loaded = kvq.load_constants(tmp_path / "c", "scaled:sink=2,protect=1", model_digest="m1")  # windows do not matter
    assert loaded.about() == constants().about()
    assert loaded.digest == constants().digest
    for name, x in constants().arrays.items():
        np.testing.assert_array_equal(loaded.arrays[name], x)
    assert kvq.load_constants(tmp_path / "c").digest == loaded.digest  # of whichever scheme they are
    x = jnp.full((1, HEADS, 1, D), 0.5)
    for i, one in enumerate(cache(loaded)):
        k, v = kvq.read(kvq.append(one, x, x))
        for name, got in (("k_scale", k), ("v_scale", v)):
            scale = loaded.arrays[name][i][None, :, None]
            np.testing.assert_allclose(got, np.broadcast_to(np.round(0.5 / scale) * scale, got.shape), rtol=1e-6)


def test_the_digest_names_arrays_and_provenance() -> None:
    base = constants().digest
    assert base == constants().digest == dataclasses.replace(constants(), arrays=jax.device_put(arrays())).digest
    nudged = arrays()
    nudged["v_low"][-1, -1] = np.nextafter(nudged["v_low"][-1, -1], np.float32(9))
    others = [constants(arrays=nudged), constants(model_digest="m2"), constants(text_digest="t"), constants(tokens=8)]
    assert len({base, *(one.digest for one in others)}) == 5


def bad(name: str, value: float) -> dict[str, Any]:
    found = arrays()
    found[name][1].flat[-1] = value
    return found


BAD = {
    "NaN": (lambda: bad("k_low", np.nan), "k_low is not finite"),
    "infinity": (lambda: bad("v_scale", np.inf), "v_scale is not finite"),
    "zero": (lambda: bad("k_scale", 0), "k_scale is 0 somewhere, and must be positive"),
    "negative": (lambda: bad("v_scale", -0.5), "v_scale is -0.5 somewhere"),
    "order": (lambda: bad("k_high", -9), "k_high is not above k_low"),
    "missing": (lambda: {n: x for n, x in arrays().items() if n != "v_low"}, "needs the constant 'v_low'"),
    "unknown": (lambda: arrays() | {"k_zero": np.ones(3)}, "has no constant 'k_zero'; its constants: k_scale"),
    "heads": (lambda: arrays() | {"k_scale": np.ones((LAYERS, 5, 1))}, r"k_scale has shape \(3, 5, 1\).*needs"),
    "layers": (lambda: arrays() | {"k_low": np.zeros((4, D))}, r"k_low has shape \(4, 8\).*\(3 layers first\)"),
    "nothing": (dict, "hold no array|needs the constant"),
}


@pytest.mark.parametrize("case", BAD)
def test_requirement_12_senseless_constants_are_refused_on_use_save_and_load(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, says = BAD[case]
    with pytest.raises(ValueError, match=says):
        cache(make())
    with pytest.raises(ValueError, match=says):
        cache(constants(arrays=make()))
    with pytest.raises(ValueError, match=says):
        kvq.save_constants(tmp_path / "c", constants(arrays=make()))
    assert not (tmp_path / "c").exists()
    if case == "nothing":
        return
    with monkeypatch.context() as patch:  # a writer that does not look
        patch.setattr(kvq.Constants, "check", lambda *_, **__: None)
        kvq.save_constants(tmp_path / "c", constants(arrays=make()))
    with pytest.raises(ValueError, match=says):
        kvq.load_constants(tmp_path / "c", "scaled:")


def test_requirement_12_there_is_no_default_where_constants_are_needed() -> None:
    with pytest.raises(ValueError, match=r"scaled needs constants.*experiments\.calibrate --method=scaled:levels=255 "):
        cache(None)
    assert len(cache(None, "bf16")) == LAYERS
    with pytest.raises(ValueError, match="bf16 takes no constants"):
        cache(arrays(), "bf16")


def test_a_side_that_can_do_without_constants_has_all_or_none() -> None:
    only_k = {name: x for name, x in arrays().items() if name.startswith("k_")}
    first = cache(only_k, "lenient:")[0]
    assert set(first.k.constants) == {"scale", "low", "high"}
    assert not first.v.constants
    with pytest.raises(ValueError, match="lenient needs the constant 'k_low'"):
        cache({"k_scale": only_k["k_scale"]}, "lenient:")


def test_protected_layers_take_none() -> None:
    ends = cache(constants(), "scaled:protect=1")
    assert [one.scheme.name for one in ends] == ["fp32", "scaled", "fp32"]
    np.testing.assert_array_equal(ends[1].k.constants["scale"], arrays()["k_scale"][1])


def test_constants_of_something_else_are_refused_by_name(tmp_path: Path) -> None:
    kvq.save_constants(tmp_path / "c", constants())
    with pytest.raises(ValueError, match=r"scaled:levels=255 were given to scaled:levels=15"):
        kvq.load_constants(tmp_path / "c", "scaled:levels=15")
    with pytest.raises(ValueError, match="model with digest m1 were given to the model with digest m2"):
        kvq.load_constants(tmp_path / "c", "scaled:", model_digest="m2")
    loaded = kvq.load_constants(tmp_path / "c", "scaled:")
    with pytest.raises(ValueError, match="scaled:levels=255 were given to lenient"):
        cache(loaded, "lenient:")
    with pytest.raises(ValueError, match="constants of 3 layers were given to a model of 4"):
        cache(loaded, layers=4)
    with pytest.raises(ValueError, match="constants of 2 KV heads were given to a model of 1"):
        cache(loaded, kv_heads=1)
    with pytest.raises(ValueError, match="constants of 8 channels a head were given to a model of 16"):
        cache(loaded, head_dim=16)


def test_what_is_not_there_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no such folder; make them with python -m experiments\.calibrate"):
        kvq.load_constants(tmp_path / "nowhere", "scaled:")
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(ValueError, match="no complete checkpoint"):
        kvq.load_constants(tmp_path, "scaled:")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match="no such folder"):
        kvq.load_constants(tmp_path / "file", "scaled:")
    with pytest.raises(OSError, match="file"):
        kvq.save_constants(tmp_path / "file", constants())


@pytest.mark.parametrize("damage", ["truncated", "emptied", "removed", "flipped"])
def test_damage_is_one_line_or_harmless(damage: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kvq.save_constants(tmp_path / "c", constants())
    files = [path for path in sorted((tmp_path / "c").rglob("*")) if path.is_file()]
    refused: list[str] = []
    for file in files:
        content = file.read_bytes()
        if damage == "removed":
            file.unlink()
        elif damage == "flipped":
            middle = len(content) // 2
            file.write_bytes(
                content[:middle] + bytes([content[middle] ^ 0x55] if content else []) + content[middle + 1 :]
            )
        else:
            file.write_bytes(content[: len(content) // 2 if damage == "truncated" else 0])
        try:
            loaded = kvq.load_constants(tmp_path / "c", "scaled:", model_digest="m1")
        except ValueError as error:
            refused.append(str(error))
        else:  # what the file said was of no consequence
            assert loaded.digest == constants().digest
        file.write_bytes(content)
    assert len(refused) >= 3
    for message in refused:
        assert "\n" not in message
        assert str(tmp_path / "c") in message
    kvq.load_constants(tmp_path / "c", "scaled:")
    assert "Traceback" not in capfd.readouterr().err


def child(program: str, *arguments: object, devices: int = 1) -> str:
    """The output of a Python process that has these test schemes, with the warnings that it prints on stderr."""
    flags = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, Path(__file__).parent)))
    command = [sys.executable, "-W", "error", "-c", "import test_constants as t; t.register_schemes()\n" + program]
    done = subprocess.run(
        [*command, *map(str, arguments)], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def test_nothing_is_printed_logged_or_left_running(tmp_path: Path) -> None:
    program = """
import sys, threading
import kvq_jax as kvq
for seed in (1, 2):
    kvq.save_constants(sys.argv[1], t.constants(seed))
    assert kvq.load_constants(sys.argv[1], "scaled:").digest == t.constants(seed).digest
others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
for thread in others:  # one may be about to end
    thread.join(30)
assert not any(thread.is_alive() for thread in others), others
"""
    assert child(program, tmp_path / "c") == ""
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["2"]  # the earlier one is gone


def test_constants_load_on_another_number_of_devices(tmp_path: Path) -> None:
    program = """
import sys
import jax, kvq_jax as kvq
from jax.sharding import NamedSharding, PartitionSpec as P
assert len(jax.devices()) == 4
mesh = jax.make_mesh((4,), ("x",))
split = NamedSharding(mesh, P(None, "x"))
arrays = {name: x if "scale" in name else jax.device_put(x, split) for name, x in t.arrays().items()}
kvq.save_constants(sys.argv[1], t.constants(arrays=arrays))
print(kvq.load_constants(sys.argv[1], "scaled:").digest)
"""
    assert child(program, tmp_path / "c", devices=4).split() == [constants().digest]
    loaded = kvq.load_constants(tmp_path / "c", "scaled:")
    assert len(jax.devices()) != 4
    assert loaded.digest == constants().digest


# Saves over a copy of `v1`, in a process that kills itself at its n-th access to the folder, for every n.
KILLED = """
import os, shutil, signal, sys
from pathlib import Path
import kvq_jax as kvq
import orbax.checkpoint  # before the fork: no thread is running yet

v1, where = Path(sys.argv[1]), Path(sys.argv[2])
FILES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.scandir", "shutil.rmtree")

def save_until(n, path):
    seen = 0
    def hook(event, args):
        nonlocal seen
        if event in FILES and args and isinstance(args[0], str | os.PathLike) and str(args[0]).startswith(str(path)):
            seen += 1
            if seen == n:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    kvq.save_constants(path, t.constants(2))

n, status = 0, -1
while status:
    n += 1
    path = where / str(n)
    shutil.copytree(v1, path)
    child = os.fork()
    if not child:
        save_until(n, path)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), status
print(n)
"""


def test_a_save_killed_at_any_moment_leaves_the_earlier_or_the_new_constants(tmp_path: Path) -> None:
    kvq.save_constants(tmp_path / "v1", constants(1))
    (tmp_path / "killed").mkdir()
    ended = int(
        child("import warnings; warnings.simplefilter('ignore')" + KILLED, tmp_path / "v1", tmp_path / "killed")
    )
    assert ended > 10
    digests = [kvq.load_constants(tmp_path / "killed" / str(n), "scaled:").digest for n in range(1, ended + 1)]
    old, new = constants(1).digest, constants(2).digest
    when = digests.index(new)
    assert digests == [old] * when + [new] * (ended - when)
    assert 5 < when < ended - 1  # it was killed on both sides of the commit
    for n in (1, when, when + 1):  # the next save cleans up
        kvq.save_constants(tmp_path / "killed" / str(n), constants(3))
        assert kvq.load_constants(tmp_path / "killed" / str(n), "scaled:").digest == constants(3).digest
        assert len(list((tmp_path / "killed" / str(n)).iterdir())) == 1
