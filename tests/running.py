"""Running a binary of `experiments` in this process, as its command line would."""

import contextlib
from collections.abc import Iterator, Sequence
from types import ModuleType

from absl.testing import flagsaver

from experiments.harness import flags

# What the tests of several binaries read, in the same shapes: compiling is what they cost, and programs are kept.
SMALL = ["--num_tokens=192", "--block_size=32", "--sink=32", "--recent=0", "--group=32", "--skip_positions=64"]
SMALL += ["--bucket=64"]
METHODS = ("kivi:bits=2,subgroup=32", "kvarn:bits=2")


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Flags are afterwards what they were before."""
    saved = flagsaver.save_flag_values()
    try:
        yield
    finally:
        flagsaver.restore_flag_values(saved)


@contextlib.contextmanager
def parsed(*argv: str) -> Iterator[None]:
    """Flags as a command line sets them."""
    with restored():
        flags.parse(["test", *argv])
        yield


def run(binary: ModuleType, argv: Sequence[str]) -> int:
    """The exit status of a binary, from flags at their defaults."""

    def whole() -> None:
        flags.parse([binary.__name__, *argv])
        binary.body()

    with restored():
        return flags.status(whole)
