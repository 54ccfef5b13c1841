"""A progress bar for one unit of work, and the speed of what it saw."""

import sys
import time
from typing import Any

from tqdm import tqdm

_open: list["Progress"] = []


class Progress:
    """`progress(done, total)` moves the bar. Used as a context manager; lines go to stderr.

    All are equal, and a call moves the bar that was opened last: a compiled program remembers whom it reports to, and
    would be compiled again for every bar.
    """

    def __init__(self, title: str, unit: str = "block") -> None:
        self._title = title
        interval = 0.2 if sys.stderr.isatty() else 5.0  # a log file needs no smooth bar
        done = f"{{n_fmt}}/{{total_fmt}} {unit}s"
        self._bar: Any = tqdm(
            desc=f"{title}, compiling",
            unit=unit,
            mininterval=interval,
            maxinterval=interval,
            bar_format="{desc}: {percentage:3.0f}% |{bar:24}| " + done + ", {remaining} left",
        )
        self._times: dict[int, float] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Progress)

    def __hash__(self) -> int:
        return hash(Progress)

    def __call__(self, done: int, total: int) -> None:
        if _open:
            _open[-1]._move(done, total)

    def _move(self, done: int, total: int) -> None:
        self._times[done] = time.perf_counter()
        if self._bar.total != total:
            self._bar.total = total
            self._bar.reset(total)  # the bar's clock starts when the first block is through: compiling comes before
            self._bar.set_description_str(self._title)
        self._bar.update(max(done - self._bar.n, 0))

    def __enter__(self) -> "Progress":
        _open.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _open[:] = [bar for bar in _open if bar is not self]
        self._bar.close()

    def seconds(self) -> float:
        """From the end of the first block to the end of the last, so without compilation; NaN for a single block."""
        first, last = min(self._times, default=0), max(self._times, default=0)
        return self._times[last] - self._times[first] if last > first else float("nan")
