"""What a run has learned, on one page: `python -m pretrain report RUN`.

From what the run has recorded at its last evaluation, in a moment; --score evaluates the newest
checkpoint instead, on the device of its configuration. With --html FILE a page of curves, speed,
health, history and configuration, of one or several run folders.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from core.console import Console, notice, printable, show, table, wrap
from core.errors import UserError
from core.urls import is_command, path_here
from data_pipeline.stream.batch import Batch
from data_pipeline.stream.dataset import Dataset
from data_pipeline.stream.plan import StreamConfig
from pretrain import page
from pretrain.checkpoint import load_model_state, newest_checkpoint
from pretrain.config import PretrainConfig
from pretrain.evaluate import Guessing, Scores, guessing, guessing_sums, score, token_counts
from pretrain.fill_in import Filled, choose, fill, recorded
from pretrain.hugging_face import check_finite, check_names_and_shapes
from pretrain.layout import evaluated_lengths, held_out
from pretrain.metrics import last_evaluation
from pretrain.model import BertForPreTraining
from pretrain.run_state import State, sequences_per_step
from pretrain.status import read_config

# What a checkpoint of others must not say of the disk and the patience of whoever scores it.
_OWN = "cache_dir cache_bytes prefetch_bytes fetch_retries fetch_timeout fetch_pause".split()
_ROWS = 4  # scored at a time, on devices smaller than the run's too


@dataclass(frozen=True)
class Learned:
    """What weights can do at a step: scores, and what guessing gives there, by the length of
    sequences, that of the phase last. sequences: of a step, in the phase of a length."""

    where: str
    step: int
    by_length: dict[int, tuple[Scores, Guessing]]
    filled: list[Filled]
    sequences: dict[int, float]
    text: str = "text it never saw"

    def to_json(self) -> str:
        """One line; what is not known is null."""
        each = {
            length: _finite(dataclasses.asdict(pair[0]) | dataclasses.asdict(pair[1]))
            for length, pair in self.by_length.items()
        }
        for length in each.keys() & self.sequences.keys():
            each[length]["sequences_per_step"] = self.sequences[length]
        return json.dumps(each[list(each)[-1]] | {"step": self.step, "by_length": each})


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(
        prog="python -m pretrain report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run folder, with --score also a checkpoint"
    )
    p.add_argument("--score", action="store_true", help="evaluate the newest checkpoint")
    p.add_argument(
        "--html",
        type=path_here,
        metavar="FILE",
        help="write the page of curves, of run folders, to FILE.html; over an earlier page alone",
    )
    p.add_argument(
        "--scores", nargs="+", default=[], metavar="DIR", help="fine-tuning runs, for --html"
    )
    p.add_argument(
        "--data", metavar="DIR", help="its data set, for --score (default: what its config names)"
    )
    p.add_argument(
        "--cache-dir",
        metavar="DIR",
        help=f"where --score puts what it fetches (default: {StreamConfig().cache_dir})",
    )
    p.add_argument("--sentences", type=int, default=5, help="filled-in sentences to show, at most")
    p.add_argument("--json", action="store_true", help="the figures as one JSON object, no page")
    a = p.parse_args(argv)

    if a.data is not None and not a.score:
        raise UserError("--data: names the data set of --score")
    if a.cache_dir is not None and not a.score:
        raise UserError("--cache-dir: only --score fetches")
    if a.scores and a.html is None:
        raise UserError("--scores: stand on the page of --html FILE")
    if a.html is not None:
        page.write(a.runs, a.html, a.scores)
        show(f"{a.html}: {', '.join(a.runs)}")
        return 0
    if len(a.runs) > 1:
        raise UserError("several runs are laid over each other by --html FILE alone")
    run = Path(a.runs[0])
    if a.score:
        learned = scored(run, a.data, a.sentences, a.cache_dir)
    else:
        learned = from_records(run, a.sentences)
    if a.json:
        print(learned.to_json())
        return 0
    folder = Path(learned.where)
    show(text(learned, folder.parents[1] if folder.parent.name == "checkpoints" else folder))
    return 0


def from_records(run: Path, sentences: int) -> Learned:
    """By a run's last evaluation. UserError where there was none."""
    if (run / "state.json").exists():
        raise UserError(f"{run}: a checkpoint, which has no records; --score evaluates it")
    config, metrics = read_config(run), run / "metrics.jsonl"
    newest = last_evaluation(metrics)
    if not newest:
        raise UserError(f"{metrics}: no evaluation is recorded in it; --score makes one")

    def of(record: dict[str, float]) -> tuple[Scores, Guessing]:
        names = ("mlm_loss", "nsp_loss", "mlm_accuracy", "nsp_accuracy")
        guesses = ("frequencies_loss", "commonest_accuracy")
        by_source: dict[str, dict[str, float]] = {}
        for tag, value in record.items():
            if tag.count("/") > 1 and tag.startswith("heldout/"):
                source, _, name = tag.removeprefix("heldout/").rpartition("/")
                by_source.setdefault(source, {})[name] = value
        return (
            Scores(*(record.get(f"heldout/{name}") for name in names), by_source),
            Guessing(*(record.get(f"heldout/{name}", math.nan) for name in guesses)),
        )

    filled = list(recorded(metrics).values())[-1:]
    checkpoint = newest_checkpoint(run / "checkpoints")
    return Learned(
        str(run),
        int(max(record["step"] for record in newest.values())),
        {length: of(record) for length, record in newest.items()},
        [x for found in filled for x in found[:sentences]],
        {} if checkpoint is None else _sequences(checkpoint[1], config),
    )


def _sequences(state: State, config: PretrainConfig) -> dict[int, float]:
    """By the length of the phases so far."""
    phases = config.phases[: state.position.phase + 1]
    sizes = sequences_per_step(state, config)
    return {phase.max_seq_len: n for phase, n in zip(phases, sizes, strict=False)}


def scored(path: Path, data_dir: str | None, sentences: int, cache_dir: str | None) -> Learned:
    """By an evaluation of the newest checkpoint."""
    passed_over: list[str] = []
    weights, config, state, folder = load_model_state(path, passed_over)
    for line in passed_over:
        notice(line, sys.stderr)
    own = {key: getattr(StreamConfig(), key) for key in _OWN}
    own |= {"cache_dir": cache_dir or own["cache_dir"], "dir": data_dir or config.data.dir}
    config = config.model_copy(update={"data": config.data.model_copy(update=own)})
    if data_dir is None and is_command(config.data.dir):
        raise UserError(
            f"{folder}: its data set is a command ({config.data.dir!r:.200}), which a checkpoint "
            "alone does not get run: name the data set by --data"
        )
    dataset = Dataset(config.data, config.objective)
    manifest = dataset.manifest
    if manifest.vocab_sha256 != state.dataset["vocab_sha256"]:
        raise UserError(
            f"{config.data.dir}: its vocabulary {manifest.vocab_sha256[:12]} is not the one that "
            f"{folder} was trained with, {state.dataset['vocab_sha256'][:12]}"
        )
    other = manifest.dataset_id != state.dataset["dataset_id"]
    if other and data_dir is None:
        raise UserError(
            f"{config.data.dir}: data set {manifest.dataset_id[:12]} is not the one that {folder} "
            f"was trained on, {state.dataset['dataset_id'][:12]}: what it holds out may have been "
            "trained on; --data scores on it all the same"
        )
    shape = config.model.with_vocab_size(len(dataset.tokenizer))
    check_names_and_shapes(weights, shape, str(folder), whole=True)
    check_finite(weights, str(folder))
    shape = shape.model_copy(update={"compile": False, "attention": "auto"})  # it is fp32 here
    model = BertForPreTraining(shape, generator=None)
    model.load_state_dict(weights, strict=True)
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    model.eval().to("cuda" if on_gpu else "cpu")
    batches, counts = held_out(config, dataset, most_rows=_ROWS), token_counts(dataset)
    by_length = {}
    for length in evaluated_lengths(config, state.position.phase):
        seen = list(batches[length])
        guesses = guessing(guessing_sums(seen, counts, dataset.tokenizer.sep_id))
        by_length[length] = (
            score(model, _watched(seen, length, on_gpu), batches[length].sources),
            guesses,
        )
    filled = fill(
        model,
        choose(dataset, sentences, config.seed, shape.max_position_embeddings),
        dataset.tokenizer,
    )
    steps = _sequences(state, config)
    text = f"what {config.data.dir} holds out, another data set" if other else Learned.text
    return Learned(str(folder), state.position.step, by_length, filled, steps, text)


def _watched(batches: Sequence[Batch], length: int, on_gpu: bool) -> Iterable[Batch]:
    """The batches, and on stderr how many of them have been asked for."""
    console, where = Console(True, sys.stderr), "" if on_gpu else " on the CPU"
    for number, batch in enumerate(batches, 1):
        what = f"scoring at length {length}{where}: batch {number} of {len(batches)}"
        console.progress(what, last=number == len(batches))
        yield batch


_AFTER_THE_DEMO = (
    "BERT-BASE on a GPU, with the texts that docs/corpus.md names:",
    "  .venv/bin/python -m data_pipeline prepare --config configs/data_wikibooks.yaml",
    "  .venv/bin/deepspeed pretrain/run.py --config configs/pretrain_base.yaml",
)
_OWN_TABLE = """\
A table of your own, a text and a label a row:
  .venv/bin/python finetune/run.py --config configs/finetune_classify.yaml \\
      --set {encoder} classify.train_file=FILE"""


def text(learned: Learned, run: Path) -> str:
    """For a console: what `learned` says of a run folder, and what to do next."""
    demo = (run / "config.yaml").exists() and Path(read_config(run).data.dir).name == "demo"
    figures = [("length", "words right", "(commonest)", "loss", "(frequencies)", "next sentence")]
    figures += [
        (
            str(length),
            f"{scores.mlm_accuracy:.1%}",
            _known(guess.commonest, ".1%"),
            f"{scores.mlm_loss:.3f}",
            _known(guess.entropy, ".3f"),
            "no task" if scores.nsp_accuracy is None else f"{scores.nsp_accuracy:.1%}",
        )
        for length, (scores, guess) in sorted(learned.by_length.items())
    ]
    by_source = [("length", "source", "words right", "loss")]
    by_source += [
        (
            str(length),
            printable(name),
            _known(one.get("mlm_accuracy", math.nan), ".1%"),  # a bit of its name may have turned
            _known(one.get("mlm_loss", math.nan), ".3f"),
        )
        for length, (scores, _) in sorted(learned.by_length.items())
        for name, one in scores.by_source.items()
    ]
    took = ", ".join(f"{n:,}" for _, n in sorted(learned.sequences.items()))
    encoder = shlex.quote(f"encoder.path={run}")
    lines = [
        f"What {learned.where} has learned by step {learned.step:,}, on {learned.text}",
        "",
        *(f"  {line}" for line in table(figures)),
        "  length: of the sequences, at most, in tokens; words: predicted ones right, and",
        "  the loss on them in nats; (commonest): of always guessing the commonest token;",
        "  (frequencies): of those in training text; next sentence: right (a coin: 50%)",
        *([f"  sequences a step of training: about {took}"] if took else []),
        "",
        *([*(f"  {line}" for line in table(by_source)), ""] if by_source[1:] else []),
    ]
    if learned.filled:
        lines.append("Fill in the blank (held-out text; the true word, then the model's guesses)")
    for x in learned.filled:
        lines.append("")
        lines += wrap(x.sentence, "  ")
        lines.append(f"    {x.word}  <-  {x.listed()}")
    lines += [
        *([""] if learned.filled else []),
        "Go on with",
        f"  .venv/bin/tensorboard --logdir {shlex.quote(str(run.parent))}",
        "GLUE, with its folders (gluebenchmark.com) in FOLDER:",
        "  .venv/bin/python finetune/run.py --config configs/finetune_glue.yaml \\",
        f"      --set {encoder} glue.dir=FOLDER",
        *(_AFTER_THE_DEMO if demo else _OWN_TABLE.format(encoder=encoder).split("\n")),
    ]
    return "\n".join(lines)


def _finite(figures: dict[str, Any]) -> dict[str, Any]:
    """None for those that are not."""
    return {
        key: _finite(value)
        if isinstance(value, dict)
        else value
        if value is not None and math.isfinite(value)
        else None
        for key, value in figures.items()
    }


def _known(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "-"
