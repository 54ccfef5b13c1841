"""Constants of the methods that need them: given, or calibrated on the text behind the one that is read."""

import contextlib
import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path

import kvq_jax as kvq
import models
from experiments.harness import environment, inputs
from experiments.harness import flags as common
from experiments.harness.progress import Progress

# Methods that need constants and get none from --constants are calibrated on sequences of the same text that nothing
# is measured on: those right after. Kept in the folder, by all that determines them.
SEQUENCES, TOKENS, CONSTANTS = 4, 1024, Path("out", "constants")


def load_or_calibrate(schemes: Iterable[kvq.Scheme], model: models.Model) -> dict[str, kvq.Constants]:
    """As `inputs.load_constants`, with what is missing made."""
    found = inputs.load_constants(schemes, model, make=_calibrated)
    shutil.rmtree(CONSTANTS / "captures", ignore_errors=True)
    return found


def _calibrated(scheme: kvq.Scheme, model: models.Model) -> kvq.Constants:
    """The constants of a method, read or made."""
    start = common.TEXT_START.value + common.BATCH.value * common.NUM_TOKENS.value
    tokens = inputs.read_windows(model, SEQUENCES, TOKENS, start)
    versions = environment.versions()
    determines = [scheme.calibrated(), model.digest, inputs.digest(tokens), versions["jax"], versions["kvq-jax"]]
    path = CONSTANTS / hashlib.sha256("\n".join(determines).encode()).hexdigest()[:16]
    if path.is_dir():
        with contextlib.suppress(ValueError):  # an interrupted save is made again
            return kvq.load_constants(path, scheme, model_digest=model.digest)
    with Progress(f"calibration of {scheme.calibrated()}, {SEQUENCES} times {TOKENS} tokens", unit="step") as progress:
        constants = kvq.calibrate(
            scheme,
            model.forward,
            tokens,
            model_digest=model.digest,
            text_digest=inputs.digest(tokens),
            progress=progress,
            workdir=CONSTANTS / "captures",
        )
    kvq.save_constants(path, constants)
    return constants
