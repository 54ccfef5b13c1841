"""What does a quantized cache cost on the tasks of EleutherAI's lm-evaluation-harness?

Every task is run once with the unquantized model (the reference) and once a method, all at the same windows. Contexts
are read block by block through the packed cache, and continuations are scored or generated against it, so that a short
context, which never leaves the full-precision window, costs nothing: the column `quantized` says how much of what was
read lay quantized. In `metrics.png` a panel is a metric and a line a method; bars that do not reach the dashed line of
the reference are a change beyond the choice of documents. Needs the package lm-eval; a task of one's own is a folder
with its YAML file (--include_path); the default is such a task, since others download their data.

  python -m experiments.lm_eval --tasks=arc_easy --tasks=hellaswag --limit=200 --out=out/lm_eval
"""

import hashlib
import importlib
import importlib.metadata
import math
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from absl import flags

from experiments import lm_eval_report as report
from experiments.harness import flags as common
from experiments.harness import proportions, quick, run, tasks
from experiments.harness.conclusion import conclude
from experiments.harness.progress import Progress
from experiments.lm_eval_requests import Answers

BINARY = "lm_eval"
INSTALL = "pip install lm-eval==0.4.13"
OWN_TASKS = Path(__file__).parent / "lm_eval_tasks"
flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(quick)
flags.adopt_module_key_flags(tasks)
TASKS = flags.DEFINE_multi_string("tasks", ["hidden_facts"], "Names of the harness's tasks. Repeat for several.")
INCLUDE_PATH = flags.DEFINE_multi_string("include_path", [], "Folders with YAML files of tasks of one's own.")
LIMIT = flags.DEFINE_integer("limit", 32, "Documents of each task; 0: all.", lower_bound=0)
NUM_FEWSHOT = flags.DEFINE_integer("num_fewshot", None, "Examples before a document; default: the task's own.", 0)
PREFIX = flags.DEFINE_string("prefix", "<|endoftext|>", "Stands before what has no context, where there is no BOS.")
KEY = ("task", "metric", "method")


def harness() -> ModuleType:
    """The package `lm_eval`, not this file. Raises ValueError with the command that installs it."""
    try:
        return importlib.import_module("lm_eval")
    except ModuleNotFoundError as error:
        if error.name != "lm_eval":
            raise
        raise ValueError(f"the package lm-eval is not installed; {INSTALL}") from None


def adapter(answers: Answers) -> Any:
    """A model for the harness."""
    harness()
    base = importlib.import_module("lm_eval.api.model").LM

    class Adapter(base):  # type: ignore[misc, valid-type]
        def loglikelihood(self, requests: Any) -> list[tuple[float, bool]]:
            return answers.loglikelihood(requests)

        def loglikelihood_rolling(self, requests: Any) -> list[float]:
            return answers.loglikelihood_rolling(requests)

        def generate_until(self, requests: Any) -> list[str]:
            return answers.generate_until(requests)

    return Adapter()


def evaluate(answers: Answers, task: str, manager: Any) -> dict[str, np.ndarray | float]:
    """Each metric of a task: one value a document where it is a mean over documents, else the task's value."""
    found = harness().simple_evaluate(
        model=adapter(answers),
        tasks=[task],
        num_fewshot=NUM_FEWSHOT.value,
        limit=LIMIT.value or None,
        task_manager=manager,
        bootstrap_iters=0,
        log_samples=True,
        random_seed=common.SEED.value,
        fewshot_random_seed=common.SEED.value,
    )
    metrics: dict[str, np.ndarray | float] = {}
    for name, result in found["results"].items():
        for column, value in result.items():
            metric, _, filtered = column.partition(",")
            if not filtered or "_stderr" in metric or not isinstance(value, int | float):
                continue
            mine = [one for one in found["samples"].get(name, []) if one["filter"] == filtered]
            each = [one[metric] for one in mine if isinstance(one.get(metric), int | float)]
            of_documents = bool(each) and math.isclose(float(np.mean(each)), value, abs_tol=1e-9)
            label = (f"{name}: " if name != task else "") + metric + ("" if filtered == "none" else f" ({filtered})")
            metrics[label] = np.array(each, float) if of_documents else float(value)
    if not metrics:
        raise ValueError(f"--tasks={task} gave no number")
    return metrics


def measure(given: tasks.Given, label: str, task: str, manager: Any, title: str) -> list[run.Row]:
    """One unit of work: a row for each metric."""
    start = time.perf_counter()
    answers = Answers(
        given,
        label,
        batch=common.BATCH.value,
        block=tasks.READ.value,
        prefix=PREFIX.value,
        limit=common.NUM_TOKENS.value,
    )
    with Progress(title, unit="group") as answers.progress:
        metrics = common.interruptible(lambda: evaluate(answers, task, manager))
    if given.scheme(label).quantizes and not answers.quantized:
        raise ValueError(
            f"--method={label} quantized nothing of --tasks={task}: its contexts fit the full-precision window; pass a "
            "smaller --sink, --recent or --group, a larger --num_fewshot, or another task"
        )
    about = {"quantized": answers.quantized / max(answers.cached, 1), "contexts_cut": answers.cut}
    about |= {"seconds": time.perf_counter() - start} | tasks.about(given, label)
    rows = []
    for metric, value in metrics.items():
        each = value if isinstance(value, np.ndarray) else None
        if isinstance(value, np.ndarray):
            found = proportions.mean(value, seed=common.SEED.value)
        else:
            found = proportions.Interval(value, math.nan, math.nan)
        row: run.Row = {"task": task, "metric": metric, "value": found.value, "value_lo": found.low}
        row |= {
            "value_hi": found.high,
            "metrics": len(metrics),
            "documents": None if each is None else len(each),
            "value_each": each,
        }
        rows.append(row | about)
    return rows


def own_files_digest() -> str | None:
    """SHA-256 of what defines the tasks in --include_path, with the files' names; None without it."""
    if not INCLUDE_PATH.value:
        return None
    every = (path for folder in INCLUDE_PATH.value for path in Path(folder).rglob("*"))
    files = sorted(path for path in every if path.suffix in (".yaml", ".yml", ".py") and path.is_file())
    whole = hashlib.sha256()
    for path in files:
        whole.update(f"{path.name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return whole.hexdigest()[:16]


def body() -> None:
    """The binary, after its flags have been parsed."""
    if quick.QUICK.value:
        for flag, value in (LIMIT, 4), (common.METHOD, ["kivi:bits=2"]):
            if not common.FLAGS[flag.name].present:
                common.FLAGS[flag.name].value = value
    harness()
    folders = [str(OWN_TASKS), *INCLUDE_PATH.value]
    manager = importlib.import_module("lm_eval.tasks").TaskManager(include_path=folders)
    for task in TASKS.value:
        if not manager.match_tasks([task]):
            raise ValueError(
                f"--tasks={task} is unknown to the harness; with --include_path, a folder with its YAML file"
            )
    given = common.interruptible(lambda: tasks.load(common.NUM_TOKENS.value, scan=True))
    design = {
        "limit": LIMIT.value,
        "num_tokens": common.NUM_TOKENS.value,  # longer contexts are cut
        "num_fewshot": NUM_FEWSHOT.value,
        "read_block": tasks.READ.value,
        "prefix": PREFIX.value,
        "include_digest": own_files_digest(),
    }
    versions = {"lm_eval": importlib.metadata.version("lm-eval"), **common.window_flags()}
    with tasks.open_results(BINARY, given, key=KEY, **design, **versions) as results:
        units = [(task, label) for task in dict.fromkeys(TASKS.value) for label in (tasks.REFERENCE, *given.methods)]
        for i, (task, label) in enumerate(units, start=1):
            title, method = f"[{i}/{len(units)}] {task}: {label}", str(given.scheme(label))
            there = [row for row in results.rows if (row["task"], row["method"]) == (task, method)]
            if there and len(there) == there[0]["metrics"]:  # a unit's rows may have been killed half written
                print(f"{title}: already in {results.path}")
                continue
            results.append(measure(given, label, task, manager, title))
        rows = results.rows
        conclude(results, {"metrics.png": report.metrics_png(rows)}, report.shown(rows), report.sentences(rows))


if __name__ == "__main__":
    tasks.set_defaults(sink=16, recent=0, group=32, batch=16)
    common.main(body)
