"""How a binary ends: its plots, a table, what the table says, and where it all is."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from experiments.harness.run import Run


def wrap(text: str, indent: str = "", first: str | None = None) -> str:
    """The text in lines of the terminal."""
    return textwrap.fill(text, 116, initial_indent=indent if first is None else first, subsequent_indent=indent)


def said(sentences: Iterable[str]) -> list[str]:
    """Sentences as items of a list."""
    return [wrap(sentence, "  ", "• ") for sentence in sentences]


def written(path: Path, plots: Iterable[Path]) -> str:
    """The files of a run."""
    files = [*(path / name for name in ("config.json", "rows.jsonl", "summary.csv", "findings.txt")), *plots]
    return "\n".join(["", "Written:", *(f"  {file}" for file in files if file.exists())])


def conclude(results: Run, plots: Mapping[str, bytes], table: str, sentences: Sequence[str]) -> None:
    """Write the plots and findings.txt, and print the table, what it says and the files."""
    drawn = [results.write(name, png) for name, png in plots.items()]
    results.tell("\n".join(["", table, "", *said(sentences)]))
    print(written(results.path, drawn))
