"""The examples of the documentation run as they are printed."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("document", ["README.md", "docs/embedding.md"])
def test_the_python_examples_run_as_printed(document: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks, f"{document} has lost its example"
    for block in blocks:
        exec(compile(block, document, "exec"), {})
    printed = capsys.readouterr().out
    assert "nan" not in printed
    assert re.search(r"\d\.\d", printed), "the example prints the numbers that it is there for"
