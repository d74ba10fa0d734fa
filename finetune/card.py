"""The model card of a fine-tuned folder: data, scores, seeds."""

from __future__ import annotations

from core.console import markdown_table, printable
from finetune.tasks import Context, Score, Task

_PIPELINES = {"sequence": "text-classification", "tokens": "token-classification"}


def model_card(task: Task, context: Context, setting: str, seed: int, score: Score) -> str:
    """Text of README.md. `setting`: batch, rate, epochs and seed of the job, as its folder says."""
    config, head = context.config, task.head
    tag = _PIPELINES.get(head.kind, "question-answering" if head.kind == "span" else "")
    measures = [(name, f"{value:.2f}") for name, value in score.values.items()]
    sizes = [
        (name, f"{len(items):,}", task.config.files.get(name.split()[0], ""))
        for name, items in task.sets.items()
    ]
    lines = [
        "---",
        "library_name: transformers",
        f"tags: [bert{', ' + tag if tag else ''}]",
        "---",
        "",
        f"# {task.name}",
        "",
        f"{head.architecture}, fine-tuned from `{context.encoder.path}` "
        f"({context.encoder.origin}; weights: {config.encoder.init}).",
        "",
        "## Data",
        "",
        *markdown_table([("set", "items", "file"), *sizes]),
    ]
    left_out = [line for problems in task.problems for line in problems.lines()]
    lines += ["", *(f"- {line}" for line in [*task.notes, *left_out])]
    if head.labels:
        lines += ["", f"Labels: {', '.join(head.labels)}."]
    lines += [
        "",
        "## Scores on dev",
        "",
        *markdown_table([("measure", "0 to 100"), *measures]),
        "",
        "## Training",
        "",
        f"- setting: {setting} (batch, peak rate, epochs, seed)",
        f"- seed {seed} of {', '.join(map(str, config.grid.seeds))}; "
        f"kept: {config.train.select} on dev",
    ]
    return "\n".join(map(printable, lines)) + "\n"
