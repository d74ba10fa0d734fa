"""The account of an epoch: counts, the promises they must keep, and a page of text."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from core.console import histogram, printable


@dataclass
class Account:
    """What an epoch of a phase is made of. Counts over the whole epoch."""

    title: str
    max_seq_len: int
    row_len: int
    # [MASK], unchanged, another; None: nothing is masked, the next token is predicted
    replacement_shares: tuple[float, float, float] | None
    windows: int = 0
    documents: int = 0
    sentences: int = 0
    not_once: int = 0
    lost: int = 0
    random_uses: np.ndarray = field(default_factory=lambda: np.zeros(6, np.int64))
    rows: int = 0
    sequences: int = 0
    tokens: int = 0
    source_tokens: int = 0
    cut_tokens: int = 0
    random: int = 0
    forced: int = 0
    short: int = 0
    cut_pairs: int = 0
    same_document: int = 0
    predictions: int = 0
    planned_predictions: int = 0
    candidates: int = 0
    replaced: np.ndarray = field(default_factory=lambda: np.zeros(3, np.int64))
    specials_hit: int = 0
    wrong_labels: int = 0
    compared: int = 0
    wrong_ids: int = 0
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    fills: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    hashes: list[np.ndarray] = field(default_factory=list)
    per_step: list[int] = field(default_factory=list)
    rows_per_step: int = 0
    wanted_sequences: int = 0
    next_sentence: str = "original"
    # With data.weights, by source: its weight, documents, how often they stand in the epoch.
    sources: dict[str, tuple[float, int, int]] = field(default_factory=dict)
    wrong_repeats: int = 0

    @property
    def once(self) -> str:
        """What must be used exactly once, in words."""
        return "tokens" if self.next_sentence == "none" else "sentences as A or true B"

    @property
    def fill(self) -> float:
        return self.tokens / max(self.rows * self.row_len, 1)

    @property
    def duplicates(self) -> int:
        every = np.concatenate(self.hashes) if self.hashes else np.zeros(0, np.uint64)
        return len(every) - len(np.unique(every))

    def broken(self) -> list[str]:
        """The promises this epoch breaks, in words."""
        trouble = []
        if self.not_once:
            trouble.append(f"{self.not_once} {self.once} not used exactly once")
        if self.wrong_repeats:
            trouble.append(f"{self.wrong_repeats} documents not as often as their weight says")
        if self.lost:
            trouble.append(f"{self.lost} pairs lost or planned twice")
        if self.predictions != self.planned_predictions:
            trouble.append(f"{self.predictions} predictions, planned {self.planned_predictions}")
        if self.specials_hit:
            trouble.append(f"{self.specials_hit} special tokens chosen for prediction")
        if self.wrong_ids:
            trouble.append(f"{self.wrong_ids} sequences that do not hold the planned sentences")
        if self.wrong_labels:
            trouble.append(f"{self.wrong_labels} labels that are not the sequence's next token")
        if self.replacement_shares is None:
            return trouble
        # Five standard deviations of a fair coin.
        for name, count, share in zip(
            ("[MASK]", "unchanged", "random"), self.replaced, self.replacement_shares, strict=True
        ):
            spread = 5 * np.sqrt(share * (1 - share) / max(self.predictions, 1))
            if abs(count / max(self.predictions, 1) - share) > spread + 0.001:
                trouble.append(f"{name} at {count / max(self.predictions, 1):.2%} of predictions")
        return trouble

    def page(self) -> str:
        """The account as a page of text."""
        lines = [
            self.title,
            "",
            f"  {self.documents:,} documents, {self.sentences:,} sentences, "
            f"{self.source_tokens:,} tokens in {self.windows} windows"
            + (", each repeat counted" if self.sources else ""),
            f"  {self.sequences:,} sequences in {self.rows:,} rows of {self.row_len}; "
            f"{self.tokens:,} tokens with specials",
            "",
        ]
        for heading, table in self._tables().items():
            lines += [heading, *(f"  {label:<29} {value}" for label, value in table), ""]
        lines += ["Sequence lengths, tokens", *bars(self.lengths, self.max_seq_len, 8), ""]
        lines += ["Free tokens of a row", *bars(self.fills, self.row_len, 8, tail=True), ""]
        lines += [f"BROKEN: {t}" for t in self.broken()] or ["All promises kept."]
        return "\n".join(lines) + "\n"

    def _tables(self) -> dict[str, list[tuple[str, str]]]:
        pairs, predictions, compared = self.sequences, self.predictions, self.compared
        times = [f"{n}x {share(c, self.sentences)}" for n, c in enumerate(self.random_uses) if c]
        low, high = min(self.per_step, default=0), max(self.per_step, default=0)
        mean = float(np.mean(self.per_step)) if self.per_step else 0.0
        off = mean / self.wanted_sequences - 1 if self.wanted_sequences else 0.0
        every = self.source_tokens if self.next_sentence == "none" else self.sentences
        once = f"{every - self.not_once:,} of {every:,}"
        equal = f"equal {compared - self.wrong_ids:,} of {compared:,}"
        cut = f"{share(self.cut_tokens, self.source_tokens)} (of {share(self.cut_pairs, pairs)}"
        predicted = f"{predictions:,}, {share(predictions, self.tokens)} of all tokens"
        masked = f"{predicted}, {share(predictions, self.candidates)} of the candidates"
        replaced = " / ".join(share(int(count), predictions) for count in self.replaced)
        if self.replacement_shares is None:
            task = {
                "Next token (nothing is masked)": [
                    ("predictions", predicted),
                    ("labels of another token", f"{self.wrong_labels:,}"),
                ]
            }
        else:
            task = {
                "Masked LM": [
                    ("predictions", masked),
                    ("[MASK] / unchanged / random", replaced),
                    ("special tokens chosen", f"{self.specials_hit:,}"),
                ]
            }
        realised = f"{mean:,.1f} (least {low:,}, most {high:,}) in {self.rows_per_step:,} rows; "
        recipe = f"{self.wanted_sequences:,} ({off:+.2%})"
        text = [
            (f"exactly once: {self.once}", once),
            ("sequences read again by another road and", equal),
            ("documents' short targets", f"{share(self.short, pairs)} of the sequences"),
            ("same sequence twice", f"{self.duplicates:,}"),
        ]
        next_sentence = [
            ("B is random", share(self.random, pairs)),
            ("no choice: one-sentence chunk", share(self.forced, pairs)),
            ("random B from the same document", f"{self.same_document:,}"),
            ("sentences as a random B", ", ".join(times)),
            ("tokens cut off to fit", f"{cut} of the pairs)"),
        ]
        without = self.next_sentence == "none"
        weights = [
            (f"{printable(name)}, weight {weight:g}", f"{documents:,} documents, {times:,} times")
            for name, (weight, documents, times) in self.sources.items()
        ]
        return {
            **({"Sources": weights} if weights else {}),
            "Text": text,
            **({} if without else {f"Next sentence ({self.next_sentence})": next_sentence}),
            **task,
            "Rows": [
                ("fill", f"{self.fill:.2%}"),
                ("sequences a row", f"{pairs / max(self.rows, 1):.2f}"),
                ("sequences a step", f"{realised}the recipe's batch {recipe}"),
            ],
        }


def share(count: int, total: int) -> str:
    return f"{count / max(total, 1):.2%}"


def bars(counts: np.ndarray, top: int, bins: int, tail: bool = False) -> list[str]:
    """Lines of a bar chart of `counts[value]`; `tail`: bins double in width from 0 on."""
    if tail:
        edges = [0, 1]
        while edges[-1] < top:
            edges.append(min(edges[-1] * 4, top))
    else:
        edges = [round(i * top / bins) for i in range(bins)] + [top]
    edges[-1] = max(edges[-1], len(counts))
    sums = [int(counts[a:b].sum()) for a, b in itertools.pairwise(edges)]
    names = [f"{a} to {b - 1}" for a, b in itertools.pairwise(edges)]
    return histogram([(name, count) for name, count in zip(names, sums, strict=True) if count])
