"""The model card of an export, from the run's own record alone."""

from __future__ import annotations

from pathlib import Path

from core.console import markdown_table, printable
from data_pipeline.corpus.manifest import Manifest
from pretrain.config import PretrainConfig
from pretrain.metrics import records_from_the_end
from pretrain.model import ModelConfig
from pretrain.planner import parameter_count
from pretrain.run_state import State, sequences_per_step


def model_card(
    state: State,
    config: PretrainConfig,
    shape: ModelConfig,
    checkpoint: Path,
    manifest: Manifest | None,
) -> str:
    """Text of README.md. `shape`: its vocabulary is not padded. `manifest`: of the run's data set,
    where it is at hand."""
    task = "masked language modelling" + " and next-sentence prediction" * config.data.paired
    if shape.is_decoder:
        task = "left-to-right language modelling (the next token, under a causal mask)"
    lines = [
        "---",
        "library_name: transformers",
        f"tags: [bert, {'text-generation' if shape.is_decoder else 'fill-mask'}]",
        "---",
        "",
        f"# {checkpoint.parent.parent.name}",
        "",
        f"A BERT with {shape.num_hidden_layers} layers, {shape.hidden_size} wide, "
        f"{shape.num_attention_heads} heads, {parameter_count(shape) / 1e6:.1f} M parameters, "
        f"pretrained by {task}; "
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
        f"- code: {state.code_version or 'unknown version'}",
        "",
        "## Losses and accuracies",
        "",
        *training_results(checkpoint.parent.parent, state.position.step),
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
    return "\n".join(lines) + "\n"


def training_results(run: Path, step: int) -> list[str]:
    """The last losses and accuracies of the run's metrics.jsonl up to `step`."""
    last: dict[str, tuple[float, float]] = {}
    for record in records_from_the_end(run / "metrics.jsonl"):
        for tag, value in record.items() if record["step"] <= step else ():
            if "loss" in tag or "accuracy" in tag:
                last.setdefault(printable(tag), (record["step"], value))
    if not last:
        return ["No metrics.jsonl was at hand at the export."]
    rows = [(tag, f"{at:,}", f"{value:.4g}") for tag, (at, value) in sorted(last.items())]
    return markdown_table([("figure (losses in nats)", "at step", "value"), *rows])
