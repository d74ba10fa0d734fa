"""The model card of an export, from the run's own record alone."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from core.console import markdown_table, printable
from core.errors import short
from data_pipeline.corpus.manifest import Manifest
from pretrain.config import PretrainConfig
from pretrain.memory import parameter_count
from pretrain.metrics import last_evaluation, records_from_the_end
from pretrain.model import ModelConfig
from pretrain.run_state import State, sequences_per_step


def model_card(
    state: State,
    config: PretrainConfig,
    shape: ModelConfig,
    checkpoint: Path,
    manifest: Manifest | None,
    *,
    average: int = 1,
    language: str | None = None,
    licence: str | None = None,
) -> str:
    """Text of README.md. `shape`: its vocabulary is not padded. `manifest`: of the run's data set,
    where it is at hand. `average`: of so many checkpoints the mean; `language`, `licence`: as the
    hub names them."""
    trained = "masked language modelling" + " and next-sentence prediction" * config.data.paired
    if shape.is_decoder:
        trained = "left-to-right language modelling (the next token, under a causal mask)"
    run = Path(os.path.abspath(checkpoint)).parent.parent
    pipeline = "text-generation" if shape.is_decoder else "fill-mask"
    head: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": pipeline}
    head |= {"tags": ["bert", pipeline]}
    if language is not None:
        head["language"] = [language]
    head["license"] = licence or "other"
    if licence is None:
        head["license_name"] = "not-stated"
    # What was measured is of the last checkpoint's weights, and not of a mean.
    measured = _measured(run, state.position.step) if average == 1 else []
    if measured:
        task = {"type": pipeline}
        data = {"type": "held-out", "name": f"held-out text of {state.dataset['dataset_id']}"}
        result = {"task": task, "dataset": data, "metrics": measured}
        head["model-index"] = [{"name": run.name, "results": [result]}]
    lines = [
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in head.items()),  # which is YAML
        "---",
        "",
        f"# {run.name}",
        "",
        f"A BERT with {shape.num_hidden_layers} layers, {shape.hidden_size} wide, "
        f"{shape.num_attention_heads} heads, {parameter_count(shape) / 1e6:.1f} M parameters, "
        f"pretrained by {trained}; "
        f"{'lower-cased' if state.dataset['lowercase'] else 'cased'} vocabulary of "
        f"{shape.vocab_size:,} pieces.",
        "",
        "## Training",
        "",
        f"- optimiser steps: {state.position.step:,} of {config.total_steps:,} "
        f"({state.position.skipped:,} skipped)",
    ]
    batches = sequences_per_step(state, config)
    for i, (phase, sequences) in enumerate(zip(config.phases, batches, strict=True)):
        lines.append(
            f"- phase {i + 1}: {phase.steps:,} steps of about {sequences:,} "
            f"sequences of up to {phase.max_seq_len} tokens, peak rate {phase.learning_rate:g}"
        )
    lines += [
        f"- optimiser: {config.optimizer.name}, seed {config.seed}",
        f"- code: {short(state.code_version) or 'unknown version'}",
    ]
    if average > 1:
        lines.append(
            f"- weights: mean of the last {average} whole checkpoints; the figures below are of "
            "the last one's"
        )
    lines += [
        "",
        "## Losses and accuracies",
        "",
        *training_results(run, state.position.step),
        "",
        "## Data",
        "",
        f"Dataset `{state.dataset['dataset_id']}`.",
    ]
    if manifest is None:
        lines.append("Its manifest was not at hand at the export: sources and licences unknown.")
    else:
        sources = [("source", "documents", "words", "licence", "origin")]
        for s in manifest.sources:
            cells = (s.name, f"{s.documents_out:,}", f"{s.words:,}", s.licence, s.provenance)
            sources.append(tuple(cell or "not stated" for cell in cells))
        lines += ["", *markdown_table(sources)]
        if config.data.weights:
            times = ", ".join(f"{name} {w:g}" for name, w in config.data.weights.items())
            lines += ["", f"Times that a document stood in an epoch: {times}; of other sources 1."]
    return "\n".join(map(printable, lines)) + "\n"


def _measured(run: Path, step: int) -> list[dict[str, Any]]:
    """Of an evaluation at `step`, as the hub's model-index has it; of none: the model of another
    step is another one."""
    newest = last_evaluation(run / "metrics.jsonl", step)
    names = {"mlm_loss": ("loss", "loss, nats"), "mlm_accuracy": ("accuracy", "tokens right")}
    return [
        {
            "type": kind,
            "name": f"{name}, sequences of up to {length}",
            "value": round(record[f"heldout/{tag}"], 4),
        }
        for length, record in sorted(newest.items())
        if record["step"] == step
        for tag, (kind, name) in names.items()
        if math.isfinite(record.get(f"heldout/{tag}", math.nan))
    ]


def training_results(run: Path, step: int) -> list[str]:
    """The last losses and accuracies of the run's metrics.jsonl up to `step`."""
    last: dict[str, tuple[float, float]] = {}
    for record in records_from_the_end(run / "metrics.jsonl"):
        for tag, value in record.items() if record["step"] <= step else ():
            if "loss" in tag or "accuracy" in tag:
                last.setdefault(tag, (record["step"], value))
    if not last:
        return ["No metrics.jsonl was at hand at the export."]
    rows = [(tag, f"{at:,}", f"{value:.4g}") for tag, (at, value) in sorted(last.items())]
    return markdown_table([("figure (losses in nats)", "at step", "value"), *rows])
