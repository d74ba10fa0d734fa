"""What a run learned, on one page: `python -m pretrain report RUN`.

With --html FILE a page of curves, speed, health, history and configuration, from the files of one
or several run folders alone, without the model.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path

import torch

from core.console import notice, printable, show, table
from core.errors import UserError
from core.urls import is_command
from data_pipeline.stream.dataset import Dataset
from pretrain import page
from pretrain.checkpoint import load_model_state
from pretrain.evaluate import Guessing, Scores, guessing, score
from pretrain.layout import held_out
from pretrain.model import BertForPreTraining, pack_dense
from pretrain.run_state import sequences_per_step

_WIDTH = 78
_COUNTED = 1_000_000


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(
        prog="python -m pretrain report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("runs", nargs="+", metavar="RUN", help="a run folder or one of its checkpoints")
    p.add_argument(
        "--html",
        metavar="FILE",
        help="write the page of curves, of run folders",
    )
    p.add_argument("--data", metavar="DIR", help="its data set (default: what its config names)")
    p.add_argument("--sentences", type=int, default=5, help="filled-in sentences to show")
    p.add_argument("--json", action="store_true", help="the figures as one JSON object, no page")
    arguments = p.parse_args(argv)

    if arguments.html is not None:
        page.write(arguments.runs, Path(arguments.html))
        show(f"{arguments.html}: {', '.join(arguments.runs)}")
        return 0
    if len(arguments.runs) > 1:
        raise UserError("several runs are laid over each other by --html FILE alone")
    weights, config, state, folder = load_model_state(arguments.runs[0])
    if arguments.data is not None:
        data = config.data.model_copy(update={"dir": arguments.data})
        config = config.model_copy(update={"data": data})
    elif is_command(config.data.dir):
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
    model = BertForPreTraining(config.model.with_vocab_size(manifest.vocab_size), generator=None)
    model.load_state_dict(weights, strict=True)
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    model.eval().to("cuda" if on_gpu else "cpu")

    rows, counts, sizes = [], token_counts(dataset), sequences_per_step(state, config)
    for index, phase in enumerate(config.phases[: state.position.phase + 1]):
        where = "" if on_gpu else " on the CPU (hours, where the model is large)"
        what = f"{config.evaluation.rows} rows of held-out text at length {phase.max_seq_len}"
        notice(f"scoring {what}{where}", sys.stderr)
        batches = held_out(config, dataset, index)
        guesses = guessing(batches, counts, dataset.tokenizer.sep_id)
        rows.append((phase.max_seq_len, score(model, batches, batches.sources), guesses))
    if arguments.json:
        by_length = {length: vars(scores) | vars(guess) for length, scores, guess in rows}
        for phase, sequences in zip(config.phases[: len(rows)], sizes, strict=False):
            by_length[phase.max_seq_len]["sequences_per_step"] = sequences
        last = by_length[rows[-1][0]]
        print(json.dumps(last | {"step": state.position.step, "by_length": by_length}))
        return 0
    filled = _fill_in(model, dataset, arguments.sentences, config.seed)
    run = folder.parents[1] if folder.parent.name == "checkpoints" else folder
    trained = ", ".join(f"{sequences:,}" for sequences in sizes[: len(rows)])
    show(_page(folder, state.position.step, trained, rows, filled, run))
    return 0


def token_counts(dataset: Dataset) -> torch.Tensor:
    """fp64 [V]: of the first million tokens of training text, repeats counted, and one more of
    each."""
    counts = torch.ones(len(dataset.tokenizer), dtype=torch.float64)
    sources, weights = dataset.manifest.sources, dataset.data.weights
    of_place = {place: weights.get(source.name, 1.0) for place, source in enumerate(sources)}
    for document in dataset.documents("train"):
        ids = torch.from_numpy(document.ids.astype("int64"))
        weight = of_place.get(document.source, 1.0)
        counts += weight * torch.bincount(ids, minlength=len(counts))
        if counts.sum() > _COUNTED:
            break
    return counts


def _page(
    folder: Path,
    step: int,
    sequences: str,
    rows: list[tuple[int, Scores, Guessing]],
    filled: list[tuple[str, str, list[tuple[str, float]]]],
    run: Path,
) -> str:
    figures = [("length", "words right", "(commonest)", "loss", "(frequencies)", "next sentence")]
    figures += [
        (
            str(length),
            f"{scores.mlm_accuracy:.1%}",
            f"{guess.commonest:.1%}",
            f"{scores.mlm_loss:.3f}",
            f"{guess.entropy:.3f}",
            "no task" if scores.nsp_accuracy is None else f"{scores.nsp_accuracy:.1%}",
        )
        for length, scores, guess in rows
    ]
    by_source = [("length", "source", "words right", "loss")]
    by_source += [
        (str(length), printable(name), f"{one['mlm_accuracy']:.1%}", f"{one['mlm_loss']:.3f}")
        for length, scores, _ in rows
        for name, one in scores.by_source.items()
    ]
    lines = [
        f"What {folder} learned in {step} steps, on text it never saw",
        "",
        *(f"  {line}" for line in table(figures)),
        "  length: of the sequences, at most, in tokens; words: predicted ones right, and",
        "  the loss on them in nats; (commonest): of always guessing the commonest token;",
        "  (frequencies): of those in training text; next sentence: right (a coin: 50%)",
        f"  sequences a step of training: about {sequences}",
        "",
        *([*(f"  {line}" for line in table(by_source)), ""] if by_source[1:] else []),
        "Fill in the blank (held-out text; the true word, then the model's guesses)",
    ]
    for sentence, truth, guesses in filled:
        lines.append("")
        lines += textwrap.wrap(sentence, _WIDTH - 2, initial_indent="  ", subsequent_indent="  ")
        listed = ", ".join(f"{word} {p:.0%}" for word, p in guesses)
        lines.append(f"    {truth}  <-  {listed}")
    lines += [
        "",
        "Go on with",
        f"  .venv/bin/tensorboard --logdir {run.parent}",
        "GLUE, with its folders (gluebenchmark.com) in FOLDER:",
        "  .venv/bin/python finetune/run.py --config configs/finetune_glue.yaml \\",
        f"      --set encoder.path={run} glue.dir=FOLDER",
        "BERT-BASE on a GPU, with the texts that docs/corpus.md names:",
        "  .venv/bin/python -m data_pipeline prepare --config configs/data_wikibooks.yaml",
        "  .venv/bin/deepspeed pretrain/run.py --config configs/pretrain_base.yaml",
    ]
    return "\n".join(lines)


@torch.no_grad()
def _fill_in(
    model: BertForPreTraining, dataset: Dataset, count: int, seed: int
) -> list[tuple[str, str, list[tuple[str, float]]]]:
    """(sentence with a blank, true word, [(guess, probability)]) from held-out sentences."""
    tokenizer, generator = dataset.tokenizer, torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    candidates = []
    for document in dataset.documents("heldout"):
        candidates += [s for s in document.sentences() if 9 <= len(s) <= 26]
    order = torch.randperm(len(candidates), generator=generator).tolist()
    result = []
    for at in order:
        ids = torch.from_numpy(candidates[at].astype("int64"))
        places = [
            i
            for i in range(2, len(ids) - 1)
            if tokenizer.word_start[ids[i]]
            and tokenizer.word_start[ids[i + 1]]
            and tokenizer.decode([int(ids[i])]).isalpha()
        ]
        if len(places) < 3:
            continue
        place = places[int(torch.randint(len(places), (), generator=generator))]
        truth = tokenizer.decode([int(ids[place])])
        # Left to right the token before the blank tells, and what comes after it is not seen.
        causal = model.config.is_decoder
        ids = ids[:place] if causal else ids.index_fill(0, torch.tensor(place), tokenizer.mask_id)
        cls, sep = torch.tensor([tokenizer.cls_id]), torch.tensor([tokenizer.sep_id])
        row = torch.cat([cls, ids, sep])[None].to(device)
        packed = pack_dense(row, torch.ones_like(row))
        logits, _ = model(
            *packed,
            masked_lm_positions=torch.tensor([place if causal else place + 1], device=device),
            cls_positions=torch.tensor([0], device=device),
        )
        top = logits[0].float().softmax(-1).topk(4)
        guesses = [
            (tokenizer.decode([int(i)]), float(p))
            for i, p in zip(top.indices, top.values, strict=True)
        ]
        before, after = tokenizer.decode(ids[:place].tolist()), ids[place + 1 :].tolist()
        result.append((f"{before} ____ {tokenizer.decode(after)}", truth, guesses))
        if len(result) == count:
            break
    return result
