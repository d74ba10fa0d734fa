"""Blanks in held-out sentences, and what a model fills in: the same ones at every evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pydantic
import torch

from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.stream.dataset import Dataset
from pretrain.metrics import lines_from_the_end
from pretrain.model import BertForPreTraining, pack_dense

KEY = "fill_in"  # of a line of metrics.jsonl
_LENGTHS = range(9, 27)  # of a sentence, in tokens
_LOOKED_AT = 2000  # sentences, at most: the choice takes no longer with more text
_GUESSES = 4


@dataclass(frozen=True)
class Blank:
    """A sentence of tokens `ids`, of which the one at `place`, a whole word, is to be guessed."""

    ids: tuple[int, ...]
    place: int


@dataclass(frozen=True)
class Filled:
    """A sentence with ____ for a word, the word, and guesses with their probabilities, the best
    first."""

    sentence: str
    word: str
    guesses: tuple[tuple[str, float], ...]

    def listed(self, count: int = _GUESSES) -> str:
        shown = [(w if w.isalnum() else f"`{w}`", p) for w, p in self.guesses[:count]]
        return ", ".join(f"{word} {p:.0%}" for word, p in shown)


def choose(dataset: Dataset, count: int, seed: int, positions: int) -> list[Blank]:
    """Up to `count` blanks in sentences of the first held-out documents, by the seed. positions:
    of the model, which a sentence is to fit with [CLS] and [SEP]."""
    tokenizer, generator = dataset.tokenizer, torch.Generator().manual_seed(seed)
    sentences: list[tuple[int, ...]] = []
    lengths = _LENGTHS[: max(positions - 1 - _LENGTHS[0], 0)]
    for document in dataset.documents("heldout"):
        sentences += [tuple(s.tolist()) for s in document.sentences() if len(s) in lengths]
        if len(sentences) >= _LOOKED_AT:
            break
    found: list[Blank] = []
    for at in torch.randperm(len(sentences), generator=generator).tolist():
        ids = sentences[at]
        places = [
            i
            for i in range(2, len(ids) - 1)
            if tokenizer.word_start[ids[i]]
            and tokenizer.word_start[ids[i + 1]]
            and _is_word(tokenizer.decode([ids[i]]))
        ]
        if len(found) < count and len(places) > 2:
            place = places[int(torch.randint(len(places), (), generator=generator))]
            found.append(Blank(ids, place))
    return found


def _is_word(text: str) -> bool:
    return text.isalnum() and not text.isdigit()


@torch.no_grad()
def fill(model: BertForPreTraining, blanks: Sequence[Blank], tokenizer: Tokenizer) -> list[Filled]:
    """The guesses of the model, which is left in the mode that it is in; none at a blank where its
    logits are not finite. Nothing is compiled for it."""
    if not blanks:
        return []
    device, causal = next(model.parameters()).device, model.config.is_decoder
    rows, places = [], []
    for blank in blanks:
        # Left to right the token before the blank tells, and what comes after it is not seen.
        hidden = [] if causal else [tokenizer.mask_id, *blank.ids[blank.place + 1 :]]
        ids = [tokenizer.cls_id, *blank.ids[: blank.place], *hidden, tokenizer.sep_id]
        rows.append(torch.tensor(ids))
        places.append(blank.place if causal else blank.place + 1)
    ids_BL = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_id)
    lengths_B = torch.tensor([len(row) for row in rows])
    mask_BL = torch.arange(ids_BL.shape[1]) < lengths_B[:, None]
    starts_B = torch.arange(len(rows), device=device) * ids_BL.shape[1]
    training = model.training
    model.eval()
    with torch.compiler.set_stance("force_eager"):
        logits_BV, _ = model(
            *pack_dense(ids_BL.to(device), mask_BL.to(device)),
            masked_lm_positions=starts_B + torch.tensor(places, device=device),
            cls_positions=starts_B,
        )
    model.train(training)
    logits_BV = logits_BV[:, : len(tokenizer)].float()  # behind them the padding of the vocabulary
    finite = logits_BV.isfinite().all(-1).tolist()
    top = logits_BV.softmax(-1).topk(min(_GUESSES, logits_BV.shape[1]))
    result = []
    for blank, known, ids, chances in zip(
        blanks, finite, top.indices.tolist(), top.values.tolist(), strict=True
    ):
        if not known:
            continue
        before = tokenizer.decode(list(blank.ids[: blank.place]))
        after = "" if causal else tokenizer.decode(list(blank.ids[blank.place + 1 :]))
        guesses = tuple(
            (tokenizer.decode([i]), round(p, 4)) for i, p in zip(ids, chances, strict=True)
        )
        word = tokenizer.decode([blank.ids[blank.place]])
        result.append(Filled(f"{before} ____ {after}", word, guesses))
    return result


_LINE = pydantic.TypeAdapter(list[Filled])


def recorded(metrics: Path) -> dict[int, list[Filled]]:
    """By step, the first one first, what metrics.jsonl has; damaged lines are passed over."""
    found = {}
    for line in lines_from_the_end(metrics):
        try:
            if KEY in line:
                found[line["step"]] = _LINE.validate_python(line[KEY])
        except pydantic.ValidationError:
            continue
    return dict(reversed(found.items()))
