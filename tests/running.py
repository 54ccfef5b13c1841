"""Running a binary of `experiments` in this process, as its command line would."""

import contextlib
from collections.abc import Iterator, Sequence
from types import ModuleType

from absl.testing import flagsaver

from experiments.harness import flags


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
