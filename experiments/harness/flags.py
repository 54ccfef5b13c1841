"""The flags that every binary with a model, a text and methods has, and how a command line becomes an exit status."""

import concurrent.futures
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

import jax
from absl import app, flags, logging

import kvq_jax as kvq
from experiments.harness import environment

T = TypeVar("T")
FLAGS = flags.FLAGS

MODEL = flags.DEFINE_string("model", "smollm2-135m", "A model's name, a Hugging Face directory, or a .gguf file.")
TEXT = flags.DEFINE_string("text", "hamlet", "The text that is read: hamlet, argparse, or a UTF-8 file.")
NUM_TOKENS = flags.DEFINE_integer("num_tokens", 2176, "Tokens of each sequence.", lower_bound=1)
BATCH = flags.DEFINE_integer("batch", 1, "Sequences: consecutive windows of the text.", lower_bound=1)
TEXT_START = flags.DEFINE_integer("text_start", 0, "Tokens of the text that are skipped before it.", lower_bound=0)
METHOD = flags.DEFINE_multi_string("method", [], "A scheme's spec, name:field=value,...; repeat for several.")
SINK = flags.DEFINE_integer("sink", None, "First tokens kept in full precision, of every method; default: its own.")
RECENT = flags.DEFINE_integer("recent", None, "Newest tokens kept in full precision, of every method.")
GROUP = flags.DEFINE_integer("group", None, "Tokens that leave the full-precision window at a time, of every method.")
PROTECT = flags.DEFINE_integer("protect", None, "First and last layers kept in full precision, of every method.")
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16", "float16"], "Of the model and the caches.")
SCAN_LAYERS = flags.DEFINE_bool(
    "scan_layers",
    None,
    "Scan over stacked layers, which compiles in less time; default: for blocks of 16 or more, up to 8,192.",
)
IMPLEMENTATION = flags.DEFINE_string(
    "implementation", None, "Of attention: xla, reference or pallas_triton; default: picked."
)
CONSTANTS = flags.DEFINE_multi_string(
    "constants", [], "A folder that experiments.calibrate wrote; one for each method."
)
SEED = flags.DEFINE_integer("seed", 0, "Of everything random (here: the bootstrap's resampling).", lower_bound=0)
OUT = flags.DEFINE_string("out", None, "Folder for the results; default out/<binary>/<time>.")
RESUME = flags.DEFINE_bool("resume", False, "Go on with the run in --out: rows that it has are not computed again.")


def window_flags() -> dict[str, int]:
    """The common scheme fields that were given."""
    given = {"sink": SINK.value, "recent": RECENT.value, "group": GROUP.value, "protect": PROTECT.value}
    return {name: value for name, value in given.items() if value is not None}


def methods() -> dict[str, kvq.Scheme]:
    """Every --method as it was typed, with the window flags applied; the same scheme twice counts once."""
    schemes: dict[str, kvq.Scheme] = {}
    for spec in METHOD.value:
        try:
            scheme = kvq.scheme(spec, **window_flags())
        except ValueError as error:
            raise ValueError(f"--method={spec}: {error}") from None
        if scheme not in schemes.values():
            schemes[spec.strip()] = scheme
    return schemes


def designed(specs: Iterable[str]) -> None:
    """What a binary with a design of its own measures where --method was not given: config.json says so."""
    FLAGS.set_default(METHOD.name, list(specs))


def interruptible(call: Callable[[], T]) -> T:
    """`call()` in a thread, so that Ctrl-C ends the wait even while the device computes.

    A signal is handled by Python's main thread between two bytecodes, which a long compiled loop never reaches.
    """
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    while not concurrent.futures.wait([future], timeout=0.2).done:
        pass
    return future.result()


def about(binary: str) -> dict[str, Any]:
    """What config.json says of every run: the command and what it ran on."""
    return {
        "binary": binary,
        "flags": as_config(),
        "versions": environment.versions(),
        "device": environment.device(),
        "git_commit": environment.git_commit(),
    }


def parse(argv: list[str]) -> None:
    """Parse a command line, program name first."""
    extra = FLAGS(argv)[1:]
    if extra:
        raise flags.Error(f"unexpected argument {extra[0]!r}; flags are spelled --name=value")


def status(body: Callable[[], None]) -> int:
    """Run `body` and return the exit status; what the user can put right is one line on stderr."""
    try:
        body()
    except (flags.Error, ValueError, NotImplementedError, OSError, jax.errors.JaxRuntimeError) as error:
        print("error:", one_line(error), file=sys.stderr)
        return 2
    return 0


def one_line(error: Exception) -> str:
    """The message without line breaks; a device's report of several lines is cut to its first, with the remedy."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        return f"{str(error).splitlines()[0]}; if memory ran out, lower --batch, --num_tokens or --block_size"
    return " ".join(str(error).split()) or type(error).__name__


def main(body: Callable[[], None]) -> NoReturn:
    """Run a binary as the process's main program."""

    def parser(argv: list[str]) -> list[str]:
        if code := status(lambda: parse(argv)):
            sys.exit(code)
        logging.set_verbosity(logging.WARNING)  # JAX tells which backends it does not find
        return argv[:1]

    def run(_: list[str]) -> int:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs with it ignored
        try:
            return status(body)
        except KeyboardInterrupt as stop:
            print("\ninterrupted;", *getattr(stop, "__notes__", ["nothing was written"]), file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(130)  # the device's thread is still computing; an orderly exit would wait for it

    app.run(run, flags_parser=parser)
    raise AssertionError("app.run exits")


def as_config() -> dict[str, Any]:
    """The value of every flag that this project defines."""
    return {
        flag.name: flag.value
        for module, defined in FLAGS.flags_by_module_dict().items()
        if not module.startswith("absl")
        for flag in defined
    }
