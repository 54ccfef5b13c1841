"""The run folder: whole files, rows that survive, resuming, and errors that leave nothing behind."""

import csv
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from experiments.harness import flags, run
from experiments.harness.table import table

SAME = {"num_tokens": 64, "seed": 0}
KEY = ("method", "regime")


def open_run(path: Path, resume: bool = False, **changed: Any) -> Any:
    return run.open_run(path, config={"binary": "test"}, determines=SAME | changed, key=KEY, resume=resume)


def row_and_then(path: Path, error: BaseException) -> None:
    with open_run(path) as results:
        results.append([row("x")])
        raise error


def row(method: str, **values: Any) -> dict[str, Any]:
    return {"method": method, "regime": "static", "kl_nats": 0.5} | values


def test_rows_are_on_the_disk_while_the_run_goes_on(tmp_path: Path) -> None:
    with open_run(tmp_path / "a" / "b") as results:
        results.append([row("x", kl_nats=float("nan"), curve=[1.0, float("inf")])])
        line = json.loads((tmp_path / "a" / "b" / "rows.jsonl").read_text())
        assert line["kl_nats"] is None
        assert line["curve"] == [1.0, None]
        with (tmp_path / "a" / "b" / "summary.csv").open() as file:
            assert [r["method"] for r in csv.DictReader(file)] == ["x"]


def test_resume_drops_a_torn_line_and_skips_what_is_there(tmp_path: Path) -> None:
    with open_run(tmp_path / "r") as results:
        results.append([row("x"), row("y")])
    with (tmp_path / "r" / "rows.jsonl").open("a") as file:
        file.write('{"method": "z", "regi')
    with open_run(tmp_path / "r", resume=True) as results:
        assert results.has(method="x", regime="static")
        assert not results.has(method="z", regime="static")
        results.append([row("x", kl_nats=9.0), row("z")])
    rows, _ = run.read_rows(tmp_path / "r" / "rows.jsonl")
    assert [(r["method"], r["kl_nats"]) for r in rows] == [("x", 0.5), ("y", 0.5), ("z", 0.5)]


def test_a_damaged_line_inside_is_an_error_that_names_it(tmp_path: Path) -> None:
    with open_run(tmp_path / "r") as results:
        results.append([row("x")])
    with (tmp_path / "r" / "rows.jsonl").open("a") as file:
        file.write("not a row\n" + json.dumps(row("y")) + "\n")
    with pytest.raises(ValueError, match="line 2 is not a row"), open_run(tmp_path / "r", resume=True):
        pass


def test_resume_with_another_configuration_names_the_field(tmp_path: Path) -> None:
    with open_run(tmp_path / "r") as results:
        results.append([row("x")])
    before = (tmp_path / "r" / "config.json").read_bytes()
    with pytest.raises(ValueError, match="num_tokens=64, this command has num_tokens=128"):
        open_run(tmp_path / "r", resume=True, num_tokens=128).__enter__()
    with pytest.raises(ValueError, match="made with protect=1, this command has protect=None"):
        run.check_same(tmp_path, {"sink": 4, "protect": 1}, {"sink": 4})
    assert (tmp_path / "r" / "config.json").read_bytes() == before


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    with open_run(tmp_path / "r") as results:
        results.append([row("x")])
    with pytest.raises(ValueError, match="holds a run already; pass --resume"):
        open_run(tmp_path / "r").__enter__()


def test_two_processes_do_not_write_to_one_run(tmp_path: Path) -> None:
    with open_run(tmp_path / "r"), pytest.raises(OSError, match="another process is writing"):
        open_run(tmp_path / "r", resume=True).__enter__()


def test_an_error_before_the_first_row_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="broken"), open_run(tmp_path / "a" / "b"):
        raise ValueError("broken")
    assert not (tmp_path / "a").exists()
    with pytest.raises(ValueError, match="broken"):
        row_and_then(tmp_path / "a", ValueError("broken"))
    assert run.read_rows(tmp_path / "a" / "rows.jsonl")[0]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    run.write_atomically(path, b"old")

    def fail(fd: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        run.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_interruptible_returns_raises_and_ends_at_once() -> None:
    assert flags.interruptible(lambda: 7) == 7
    with pytest.raises(TimeoutError, match="its own"):
        flags.interruptible(lambda: (_ for _ in ()).throw(TimeoutError("its own")))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        start = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            flags.interruptible(lambda: time.sleep(3))
        assert time.perf_counter() - start < 1.5
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interruption_says_how_to_go_on(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as stop:
        row_and_then(tmp_path / "r", KeyboardInterrupt())
    (note,) = stop.value.__notes__
    assert "1 finished rows" in note
    assert note.endswith(f"--out={tmp_path / 'r'} --resume")


def test_table_aligns_by_what_is_seen() -> None:
    lines = table(["a", "k\u0302\nmean"], [["x", "1"], ["long", "22"]]).splitlines()
    assert lines == ["         k\u0302", "a     mean", "────  ────", "x        1", "long    22"]


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds other files; pass a new or an empty folder"):
        open_run(folder).__enter__()
    assert [file.name for file in folder.iterdir()] == ["config.json"]
    assert (folder / "config.json").read_text() == "{}"


@pytest.mark.parametrize("damage", ["[]", '{"determines": 3}', "{"])
def test_a_damaged_configuration_is_named_at_resume(tmp_path: Path, damage: str) -> None:
    with open_run(tmp_path / "r") as results:
        results.append([dict.fromkeys(KEY, 1)])
    (tmp_path / "r" / "config.json").write_text(damage)
    with pytest.raises(ValueError, match=r"config\.json is missing or damaged"):
        open_run(tmp_path / "r", resume=True).__enter__()


def test_what_was_found_is_told_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_run(tmp_path / "r") as results:
        results.append([row("x")])
        results.tell("\n• Found: x.")
    assert capsys.readouterr().out == "\n• Found: x.\n"
    assert (tmp_path / "r" / "findings.txt").read_text() == "• Found: x.\n"
