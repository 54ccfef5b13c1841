"""What was run, on one page: every run's table, plots, findings, configuration and digests in one HTML file.

Design: each --runs is a folder that a binary wrote (config.json, rows.jsonl, summary.csv, plots). The page needs no
server, no script and no other file: plots are inside it. It holds nothing but what is in the folders, so that the same
folders give the same bytes. Reading it: of a run's table, what is equal in all rows stands once below it; a run that
did not come to its end says so, with the rows that it has. Example:

  python -m experiments.report --runs=out/ranking --runs=out/scale --out=out/report
"""

import base64
import csv
import hashlib
import html
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from absl import flags

from experiments.harness import flags as common
from experiments.harness import run

BINARY = "report"
flags.declare_key_flag(common.OUT.name)
RUNS = flags.DEFINE_multi_string("runs", [], "A folder that a binary wrote; repeat for several.")
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #1a1a1a }
h2 { border-top: 1px solid #ccc; margin-top: 2.5em; padding-top: 1em }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
td, th { border-bottom: 1px solid #e4e4e4; padding: 2px 10px 2px 0; text-align: left; vertical-align: top }
td.number { text-align: right } img { max-width: 100% } pre { overflow-x: auto; font-size: 12px }
.open { background: #fff3d6; padding: 0.5em 1em }
"""


@dataclass(frozen=True)
class Found:
    """A run's folder, read."""

    path: Path
    config: dict[str, Any]
    rows: list[dict[str, str]]  # single values, as summary.csv has them
    complete: bool
    texts: dict[str, str]
    plots: dict[str, bytes]
    digests: dict[str, str]  # SHA-256 of the files


def load(path: Path) -> Found:
    """Raises ValueError for a folder that is not a run, or whose files are damaged."""
    if not path.is_dir():
        raise ValueError(f"--runs={path}: there is no such folder; pass one that a binary of experiments wrote")
    files = {file.name: file.read_bytes() for file in sorted(path.iterdir()) if file.is_file() and file.name[0] != "."}
    if "config.json" not in files or not files.keys() & {"rows.jsonl", "summary.csv"}:
        raise ValueError(f"--runs={path} is not a run: it must hold config.json, and rows.jsonl or summary.csv")
    try:
        config = dict(json.loads(files["config.json"]))
        config["binary"], dict(config["determines"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"--runs={path}: config.json is not that of a run, or damaged; run it again") from None
    try:
        table = files.get("summary.csv") or run.as_csv(run.read_rows(path / "rows.jsonl")[0])
        rows = list(csv.DictReader(io.StringIO(table.decode()), strict=True))
        if any(None in row or None in row.values() for row in rows):
            raise csv.Error("summary.csv has a line with more or fewer values than columns")
        texts = {name: content.decode() for name, content in files.items() if name.endswith(".txt")}
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"--runs={path}: {error}; run it again") from None
    return Found(
        path,
        config,
        rows,
        bool(config.get("finished")) and "summary.csv" in files,
        texts,
        {name: content for name, content in files.items() if name.endswith(".png")},
        {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    )


def text(value: Any) -> str:
    """A value as it is shown, escaped: numbers that are not whole with five digits."""
    if isinstance(value, Mapping | list | tuple):
        return html.escape(json.dumps(value, ensure_ascii=False))
    try:
        number = float(value)
    except (TypeError, ValueError):
        return html.escape("" if value is None else str(value))
    if isinstance(value, str) and repr(number) != value:  # text that only looks like a number, as a digest may
        return html.escape(value)
    return html.escape(str(value)) if number.is_integer() else f"{number:.5g}"


def is_number(shown: str) -> bool:
    try:
        float(shown)
    except ValueError:
        return False
    return True


def as_table(rows: Sequence[Mapping[str, Any]], columns: Iterable[str]) -> str:
    """Rows as an HTML table."""
    columns = list(columns)
    lines = ["<tr>", *(f"<th>{html.escape(name)}</th>" for name in columns), "</tr>"]
    for row in rows:
        shown = [text(row.get(name)) for name in columns]
        cells = [f'<td class="number">{one}</td>' if is_number(one) else f"<td>{one}</td>" for one in shown]
        lines += ["<tr>", *cells, "</tr>"]
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def pairs(values: Mapping[str, Any]) -> str:
    """Names and values, one a line."""
    lines = (f"<tr><th>{html.escape(name)}</th><td>{text(value)}</td></tr>" for name, value in values.items())
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def folded(title: str, content: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary>{content}</details>"


def section(found: Found, number: int) -> str:
    """One run."""
    config, rows = found.config, found.rows
    parts = [f'<h2 id="run{number}">{number}. {text(config["binary"])}: {html.escape(found.path.name)}</h2>']
    if not found.complete:
        parts.append(
            '<p class="open">This run has no recorded end: it was interrupted, still goes on, or is older than such '
            f"records. {len(rows)} finished rows are there.</p>"
        )
    parts += [f"<pre>{html.escape(content)}</pre>" for content in found.texts.values()]
    for name, png in found.plots.items():
        source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        parts.append(f'<p><img alt="{html.escape(name)}" src="{source}"></p>')
    if rows:
        columns = list(rows[0])
        varied = [name for name in columns if len({row[name] for row in rows}) > 1] or columns
        equal = {name: rows[0][name] for name in columns if name not in varied and rows[0][name]}
        parts.append(f"<h3>{len(rows)} rows</h3>{as_table(rows, varied)}")
        parts.append(folded("Equal in all rows", pairs(equal)))
    about = {name: value for name, value in config.items() if name not in ("flags", "determines")}
    parts.append(f"<h3>Configuration</h3>{pairs(about)}")
    parts += [folded(title, pairs(config.get(name) or {})) for title, name in TITLES.items()]
    parts.append(folded("SHA-256 of the files", pairs(found.digests)))
    return "\n".join(parts)


TITLES = {"What the numbers depend on": "determines", "Flags": "flags"}


def page(runs: Sequence[Found]) -> str:
    """The whole HTML document."""
    contents = [
        {
            "run": f"{i}. {one.config['binary']}: {one.path.name}",
            "rows": len(one.rows),
            "ended": "yes" if one.complete else "no",
            "model digest": one.config["determines"].get("model_digest"),
            "commit": one.config.get("git_commit"),
        }
        for i, one in enumerate(runs, start=1)
    ]
    links = "".join(f'<li><a href="#run{i}">{text(one["run"])}</a></li>' for i, one in enumerate(contents, start=1))
    body = [section(one, i) for i, one in enumerate(runs, start=1)]
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>kvq_jax: what was run</title>',
            f"<style>{STYLE}</style></head><body><h1>What was run</h1>",
            as_table(contents, contents[0]),
            f"<ul>{links}</ul>",
            *body,
            "</body></html>\n",
        ]
    )


def body() -> None:
    """The binary, after its flags have been parsed."""
    if not RUNS.value:
        raise ValueError("--runs names no run; pass a folder that a binary of experiments wrote, once for each")
    runs = [load(Path(name)) for name in dict.fromkeys(RUNS.value)]
    out = Path(common.OUT.value) if common.OUT.value else run.default_path(BINARY)
    if inside := next((one.path for one in runs if out.resolve().is_relative_to(one.path.resolve())), None):
        raise ValueError(f"--out={out} lies in --runs={inside}, whose files are its results alone; pass another folder")
    out.mkdir(parents=True, exist_ok=True)
    file = out / "report.html"
    run.write_atomically(file, page(runs).encode())
    for one in runs:
        ended = "" if one.complete else ", no recorded end"
        print(f"{one.config['binary']}: {one.path}, {len(one.rows)} rows, {len(one.plots)} plots{ended}")
    print(f"\nWritten:\n  {file}")


if __name__ == "__main__":
    common.main(body)
