"""Running a binary of `experiments` in this process, as its command line would."""

from collections.abc import Sequence
from types import ModuleType

from absl.testing import flagsaver

from experiments.harness import flags


def run(binary: ModuleType, argv: Sequence[str]) -> int:
    """The exit status of a binary, from flags at their defaults."""

    def whole() -> None:
        flags.parse([binary.__name__, *argv])
        binary.body()

    saved = flagsaver.save_flag_values()
    try:
        return flags.status(whole)
    finally:
        flagsaver.restore_flag_values(saved)
