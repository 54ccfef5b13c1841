"""The constants of a method that needs them, from a text that the unquantized model reads; saved for --constants=DIR.

What is finished is kept in DIR/captures until the constants are saved; after an interruption the same command goes on.
Read another text, or another part of it (--text_start), than the one that the method is measured on. Example:

  python -m experiments.calibrate --method=kvquant:bits=3 --model=smollm2-135m --text=hamlet --out=out/constants
  python -m experiments.calibrate --method=ultraquant --granularity=head --text_start=20000 --out=out/clipping
"""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

import kvq_jax as kvq
import models
from experiments import clipping_report
from experiments.harness import environment, inputs
from experiments.harness import flags as common
from experiments.harness.progress import Progress
from experiments.harness.run import plain, write_atomically
from experiments.harness.table import table

BINARY = "calibrate"
for one in (common.METHOD, common.MODEL, common.TEXT, common.TEXT_START, common.NUM_TOKENS, common.BATCH, common.DTYPE):
    flags.declare_key_flag(one.name)
flags.declare_key_flag(common.OUT.name)
OVERWRITE = flags.DEFINE_bool("overwrite", False, "Replace the constants in --out that were made with other settings.")
CHOICES = {
    "granularity": flags.DEFINE_string(
        "granularity", None, "What shares a constant, where the method lets you choose."
    ),
    "objective": flags.DEFINE_string(
        "objective", None, "What the constants minimize, where the method lets you choose."
    ),
}
REPORT = "report.txt"
REPORTS: dict[str, Callable[[Mapping[str, Any]], str]] = {"k_curve": clipping_report.report}  # by what was found


@dataclass(frozen=True)
class Inputs:
    """Everything that is read, checked."""

    scheme: kvq.Scheme
    choices: dict[str, str]
    model: models.Model
    tokens: np.ndarray  # int32 [batch, num_tokens]


def load_inputs() -> Inputs:
    """Read and check the flags, the text and the model."""
    if len(common.METHOD.value) != 1:
        raise ValueError(f"--method was given {len(common.METHOD.value)} times; calibrate one method a run")
    (scheme,) = common.methods().values()
    scheme = kvq.scheme(scheme.calibrated())
    if not scheme.captures:
        raise ValueError(f"--method={scheme}: {scheme.name} takes no constants, so there is nothing to calibrate")
    choices = scheme.chosen({name: flag.value for name, flag in CHOICES.items() if flag.value is not None})
    inputs.read_text(common.TEXT.value)
    model = inputs.load_model()
    return Inputs(scheme, choices, model, inputs.windows(model))


def determines(given: Inputs) -> dict[str, Any]:
    """Everything that the constants depend on."""
    versions = environment.versions()
    return {
        "method": str(given.scheme),
        **given.choices,
        "model_digest": given.model.digest,
        "text_digest": inputs.digest(given.tokens),
        "num_tokens": common.NUM_TOKENS.value,
        "batch": common.BATCH.value,
        "dtype": common.DTYPE.value,
        "jax": versions["jax"],
        "kvq_jax": versions["kvq-jax"],
    }


def default_path(given: Inputs) -> Path:
    """out/calibrate/<method>/<model>."""
    method = ",".join([str(given.scheme), *(f"{name}={value}" for name, value in given.choices.items())])
    return Path("out", BINARY, re.sub(r"[^\w.=,-]", "-", method), Path(common.MODEL.value).name)


@contextmanager
def opened(out: Path) -> Iterator[None]:
    """The folder exists, can be written, and is this process's alone."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (out / "captures").mkdir(exist_ok=True)
        except BlockingIOError:
            os.close(descriptor)
            raise OSError(f"--out={out}: another process is writing to it; wait for it, or pass another") from None
    except OSError as error:
        if error.strerror is None:
            raise
        raise OSError(f"--out={out}: cannot be written ({error.strerror}); pass a folder that can") from None
    try:
        yield
    except Exception:
        with suppress(OSError):  # not empty: there is finished work to go on with
            (out / "captures").rmdir()
        if [path.name for path in out.iterdir()] == ["config.json"]:
            shutil.rmtree(out)
        raise
    finally:
        os.close(descriptor)


def existing(out: Path, now: dict[str, Any]) -> str | None:
    """The digest of the constants that are there, of these settings and whole; None where there is work to do.

    Raises ValueError where the folder holds anything else.
    """
    if not out.is_dir() or not any(out.iterdir()):
        return None
    try:
        config = json.loads((out / "config.json").read_bytes())
        then, digest = dict(config["determines"]), config["constants_digest"]
        if config["binary"] != BINARY:
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"--out={out} holds other files; pass a new or an empty folder") from None
    for name in now:
        if then.get(name) != now[name] and not OVERWRITE.value:
            raise ValueError(
                f"--out={out} was made with {name}={then.get(name)}, this command has {name}={now[name]}; pass another "
                "--out, or --overwrite"
            )
    return digest if then == now else None


def show(constants: kvq.Constants) -> str:
    """The range of every constant in every layer."""
    names = sorted(constants.arrays)
    rows = [
        [str(i), *(f"{np.min(constants.arrays[n][i]):.3g} … {np.max(constants.arrays[n][i]):.3g}" for n in names)]
        for i in range(constants.layers)
    ]
    return table(["layer", *names], rows)


def body() -> None:
    """The binary, after its flags have been parsed."""
    given = common.interruptible(load_inputs)
    out = Path(common.OUT.value) if common.OUT.value else default_path(given)
    settings = determines(given)
    digest = existing(out, settings)
    batch, count = given.tokens.shape
    start = common.TEXT_START.value
    print(
        f"{given.scheme}: {common.MODEL.value} reads {batch} sequences of {count:,} tokens of {common.TEXT.value}, "
        f"tokens {start:,} to {start + given.tokens.size - 1:,}."
    )
    if digest is not None:
        constants = kvq.load_constants(out, given.scheme, model_digest=given.model.digest)
        if constants.digest != digest:
            raise ValueError(f"--out={out}: the constants are not those of its config.json; pass another --out")
        print(f"Already in {out}:")
    else:
        constants = compute(given, out, settings)
    if (report := out / REPORT).exists():
        print(f"\n{report.read_text()}", end="")
    print(f"\n{show(constants)}\n\nConstants {constants.digest} in {out}; pass --constants={out}")


def compute(given: Inputs, out: Path, settings: dict[str, Any]) -> kvq.Constants:
    """Calibrate, save, and clean up."""
    config = common.about(BINARY) | {"determines": settings}

    def write(digest: str | None) -> None:
        text = json.dumps(plain(config | {"constants_digest": digest}), indent=1) + "\n"
        write_atomically(out / "config.json", text.encode())

    found: dict[str, Any] = {}

    def calibrate() -> kvq.Constants:
        return kvq.calibrate(
            given.scheme,
            given.model.forward,
            given.tokens,
            model_digest=given.model.digest,
            text_digest=settings["text_digest"],
            progress=progress,
            workdir=out / "captures",
            choices=given.choices,
            inspect=found.update,
        )

    with opened(out):
        write(None)  # whose captures these are; the digest says that the constants are there
        try:
            with Progress(str(given.scheme), unit="step") as progress:
                constants = common.interruptible(calibrate)
        except KeyboardInterrupt as stop:
            stop.add_note(f"what is finished is in {out}/captures; the same command goes on")
            raise
        kvq.save_constants(out, constants)
        (out / REPORT).unlink(missing_ok=True)
        for name in REPORTS.keys() & found.keys():
            write_atomically(out / REPORT, (REPORTS[name](found) + "\n").encode())
        write(constants.digest)
        shutil.rmtree(out / "captures")
    return constants


if __name__ == "__main__":
    flags.set_default(common.NUM_TOKENS, 2048)  # of this program, not of whoever imports it beside another binary
    flags.set_default(common.BATCH, 16)
    common.main(body)
