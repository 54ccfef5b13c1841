"""A run's folder: config.json, rows.jsonl, summary.csv and plots, whole at every moment, and able to go on.

A row is on the disk before the next is begun. Every other file is written beside its place and renamed into it.
"""

import contextlib
import csv
import fcntl
import hashlib
import io
import json
import math
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

Row = dict[str, Any]


def default_path(binary: str) -> Path:
    """out/<binary>/<time>."""
    return Path("out", binary, datetime.now().strftime("%Y%m%d-%H%M%S"))


def plain(value: Any) -> Any:
    """What JSON can hold; a number that is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if hasattr(value, "tolist"):  # arrays and their scalars
        return plain(np.asarray(value).tolist())
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the file at `path`: afterwards it holds the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """config.json of the run at `path`."""
    write_atomically(path / "config.json", (json.dumps(config, indent=1) + "\n").encode())


def read_rows(path: Path) -> tuple[list[Row], int]:
    """The rows of a rows.jsonl and the bytes they take; a last line that was not written to its end is left out."""
    rows: list[Row] = []
    size, lines = 0, path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not line.endswith(b"\n"):
                raise ValueError
        except ValueError:
            if number == len(lines):
                break
            message = f"{path}: line {number} is not a row; take the line out, or pass another --out"
            raise ValueError(message) from None
        rows.append(row)
        size += len(line)
    return rows, size


def as_csv(rows: Sequence[Row]) -> bytes:
    """The rows' single values as a table; lists stay in rows.jsonl."""
    columns = list(
        dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, list | dict))
    )
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


class Run:
    """The open folder. `open_run` makes it."""

    def __init__(
        self, path: Path, file: BinaryIO, rows: list[Row], *, key: Sequence[str], determines: Mapping[str, Any]
    ) -> None:
        self.path, self.rows = path, rows
        self._file, self._key = file, tuple(key)
        self._digest = hashlib.sha256(json.dumps(determines, sort_keys=True).encode()).hexdigest()[:16]

    def _id(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in self._key)

    def has(self, **key: Any) -> bool:
        """Whether the row of this key is there."""
        return self._id(key) in {self._id(row) for row in self.rows}

    def append(self, rows: Sequence[Row]) -> None:
        """Write the rows of a finished unit of work that are not there yet; returns when they are on the disk."""
        new = [plain(row | {"config_digest": self._digest}) for row in rows if not self.has(**row)]
        self._file.write("".join(json.dumps(row, allow_nan=False) + "\n" for row in new).encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.rows += new
        self.write("summary.csv", as_csv(self.rows))

    def write(self, name: str, content: bytes) -> Path:
        """A file of the run."""
        write_atomically(self.path / name, content)
        return self.path / name

    def tell(self, findings: str) -> None:
        """Print what was found, and keep it as findings.txt."""
        print(findings)
        self.write("findings.txt", (findings.strip("\n") + "\n").encode())


def check_same(path: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ValueError naming the first field in which two configurations differ."""
    for name in {**then, **now}:
        if then.get(name) != now.get(name):
            raise ValueError(
                f"--resume: {path} was made with {name}={then.get(name)}, this command has {name}={now.get(name)}; "
                "pass what it was made with, or another --out"
            )


def _existing(path: Path, resume: bool, determines: Mapping[str, Any], key: Sequence[str]) -> list[Row]:
    """The rows that are there, their file cut after the last whole one."""
    file, config = path / "rows.jsonl", path / "config.json"
    if not resume:
        if file.stat().st_size:
            raise ValueError(f"--out={path} holds a run already; pass --resume to go on with it, or another --out")
        return []
    if not file.stat().st_size:
        return []
    try:
        then = dict(json.loads(config.read_bytes())["determines"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"--resume: {config} is missing or damaged; pass another --out") from None
    check_same(path, then, determines)
    rows, size = read_rows(file)
    for row in rows:
        if missing := [name for name in key if name not in row]:
            raise ValueError(f"--resume: a row of {file} has no {missing[0]}; pass another --out")
    os.truncate(file, size)
    return rows


@contextlib.contextmanager
def open_run(
    path: Path, *, config: Mapping[str, Any], determines: Mapping[str, Any], key: Sequence[str], resume: bool
) -> Iterator[Run]:
    """Open or go on with the run at `path`.

    `determines` is everything besides a row's `key` that its numbers depend on; a run goes on only where it is equal.
    An error before the first row leaves nothing behind; an interruption says how to go on. config.json says whether the
    run has `finished`.
    """
    determines = plain(determines)
    if path.is_dir() and any(path.iterdir()) and not (path / "rows.jsonl").is_file():
        raise ValueError(f"--out={path} holds other files; pass a new or an empty folder")
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    with contextlib.ExitStack() as stack:
        try:
            path.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((path / "rows.jsonl").open("ab"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends, however it ends
            rows = _existing(path, resume, determines, key)
            content: Row = plain(config) | {"determines": determines}
            write_config(path, content | {"finished": False})
        except BlockingIOError:
            raise OSError(f"--out={path}: another process is writing to it; wait for it, or pass another") from None
        except OSError as error:
            _remove(new)
            raise OSError(f"--out={path}: cannot be written ({error.strerror}); pass a folder that can") from None
        run = Run(path, file, rows, key=key, determines=determines)
        try:
            yield run
            write_config(path, content | {"finished": True})
        except KeyboardInterrupt as stop:
            stop.add_note(f"{len(rows)} finished rows are in {path}/rows.jsonl; to go on: {_command(path)}")
            raise
        except Exception:
            if not rows:
                for name in ("rows.jsonl", "config.json"):
                    (path / name).unlink(missing_ok=True)
                _remove(new)
            raise


def _command(path: Path) -> str:
    """This process's command line, to go on with the run at `path`."""
    spec = sys.modules["__main__"].__spec__
    program = ["python", "-m", spec.name] if spec else sys.argv[:1]
    given = [arg for arg in sys.argv[1:] if arg != "--resume" and not arg.startswith("--out=")]
    return shlex.join([*program, *given, f"--out={path}", "--resume"])


def _remove(folders: Sequence[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # not empty, or never made
            folder.rmdir()
