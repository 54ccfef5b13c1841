"""`python -m experiments.report`: one page of several runs that needs nothing else, and what is not a run."""

import base64
import hashlib
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from running import run

from experiments import report
from experiments.harness.run import open_run

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def write(path: Path, rows: int = 2, finish: bool = True, **config: Any) -> Path:
    """A run as the harness writes it."""
    about = {"binary": "trial", "git_commit": "c0ffee", "flags": {"method": ["kivi:bits=2"], "note": "<b>&"}} | config
    try:
        with open_run(path, config=about, determines={"model_digest": "d1g3st"}, key=("method",), resume=False) as out:
            for i in range(rows):
                row = {"method": f"m{i}<script>", "kl_nats": 0.123456789 * (i + 1), "curve": [1.0], "device": "cpu: x"}
                out.append([row])
            if not finish:
                raise KeyboardInterrupt
            out.write("kl.png", PNG)
            out.write("findings.txt", "• Found: a < b & c\n".encode())
    except KeyboardInterrupt:
        pass
    return path


class Reader(HTMLParser):
    """Every tag with its attributes, balanced, and the text outside of tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data.strip())


def pages(out: Path, *runs: Path) -> Reader:
    assert run(report, [*(f"--runs={path}" for path in runs), f"--out={out}"]) == 0
    assert [file.name for file in out.iterdir()] == ["report.html"]
    return Reader((out / "report.html").read_text())


def test_the_page_holds_tables_plots_findings_configuration_and_digests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = write(tmp_path / "one"), write(tmp_path / "two & more", rows=3)
    page = pages(tmp_path / "out", one, two)
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert [image["alt"] for image in images] == ["kl.png", "kl.png"]
    assert all(image["src"] == f"data:image/png;base64,{base64.b64encode(PNG).decode()}" for image in images)
    for shown in ("m0<script>", "m2<script>", "0.12346", "0.37037", "• Found: a < b & c", "c0ffee", "d1g3st", "<b>&"):
        assert shown in page.text, shown
    assert '["kivi:bits=2"]' in page.text
    assert page.text.count("cpu: x") == 2  # equal in all rows of a run: once
    for path in (one, two):
        assert hashlib.sha256((path / "rows.jsonl").read_bytes()).hexdigest() in page.text
    assert "2. trial: two & more" in page.text
    assert "script" not in {tag for tag, _ in page.tags}
    links = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("href", "src")]
    assert all(link is not None and link.startswith(("#", "data:")) for link in links)
    assert "no recorded end" not in " ".join(page.text)
    assert f"trial: {one}, 2 rows, 1 plots" in capsys.readouterr().out


@pytest.mark.parametrize("rows", [0, 1])
def test_an_interrupted_run_is_shown_as_such(rows: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = pages(tmp_path / "out", write(tmp_path / "stopped", rows=rows, finish=False))
    (said,) = (one for one in page.text if "no recorded end" in one)
    assert f"{rows} finished rows" in said
    assert ("m0<script>" in page.text) == (rows == 1)
    assert "no recorded end" in capsys.readouterr().out


def test_what_was_kept_of_a_run_is_enough_and_the_same_runs_give_the_same_page(tmp_path: Path) -> None:
    path = write(tmp_path / "kept")
    for _ in range(2):
        page = pages(tmp_path / "out", path)
    first = (tmp_path / "out" / "report.html").read_bytes()
    pages(tmp_path / "other", path)
    assert (tmp_path / "other" / "report.html").read_bytes() == first
    (path / "rows.jsonl").unlink()  # as in docs/results
    page = pages(tmp_path / "out", path)
    assert "m1<script>" in page.text
    (path / "summary.csv").rename(tmp_path / "summary.csv")
    (path / "rows.jsonl").write_text('{"method": "m0<script>", "kl_nats": 0.5}\n{"torn')  # killed before its summary
    assert "m0<script>" in pages(tmp_path / "out", path).text


def test_what_is_not_a_run_is_one_line_and_leaves_the_page_as_it_was(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    good = write(tmp_path / "good")
    pages(tmp_path / "out", good)
    before = (tmp_path / "out" / "report.html").read_bytes()
    (tmp_path / "empty").mkdir()
    for name, config in (("checkpoint", "{}"), ("list", "[]"), ("torn", '{"binary": '), ("odd", '{"binary": 1}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
        (tmp_path / name / "rows.jsonl").write_text("")
    (tmp_path / "checkpoint" / "rows.jsonl").unlink()
    damaged = write(tmp_path / "damaged")
    (damaged / "summary.csv").write_bytes(b"\xff\xfe")
    (write(tmp_path / "ragged") / "summary.csv").write_bytes(b"method,kl_nats\na,1,2\n")
    capfd.readouterr()
    for folder, says in (
        ("nowhere", "there is no such folder"),
        ("empty", "is not a run: it must hold config.json"),
        ("checkpoint", "is not a run"),
        ("list", "config.json is not that of a run"),
        ("torn", "config.json is not that of a run"),
        ("odd", "config.json is not that of a run"),
        ("damaged", "run it again"),
        ("ragged", "more or fewer values than columns"),
    ):
        assert run(report, [f"--runs={good}", f"--runs={tmp_path / folder}", f"--out={tmp_path / 'out'}"]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith(f"error: --runs={tmp_path / folder}")
        assert says in line
        assert (tmp_path / "out" / "report.html").read_bytes() == before
    assert run(report, []) == 2
    assert "--runs names no run" in capfd.readouterr().err
    for inside in (good, good / "page"):
        assert run(report, [f"--runs={good}", f"--out={inside}"]) == 2
        assert f"--out={inside} lies in --runs={good}" in capfd.readouterr().err
    assert not (good / "page").exists()


def test_only_numbers_are_shown_as_numbers() -> None:
    shown = [report.text(one) for one in ("0.123456789", "1e-05", "12345678e9012345", "0.10", "7", 0.5, True, "<b>")]
    assert shown == ["0.12346", "1e-05", "12345678e9012345", "0.10", "7", "0.5", "True", "&lt;b&gt;"]


def test_config_says_whether_a_run_has_ended(tmp_path: Path) -> None:
    for finish in (True, False):
        path = write(tmp_path / str(finish), finish=finish)
        assert json.loads((path / "config.json").read_text())["finished"] is finish
