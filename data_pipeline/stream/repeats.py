"""How often each document stands in an epoch, by the weight of its source.

Legend: D documents of a window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from core.errors import UserError
from data_pipeline.corpus.manifest import Manifest, ShardInfo, SourceMap
from data_pipeline.stream import draws


@dataclass(frozen=True)
class Repeats:
    """weights: by name, of the sources that have another than 1; of_places: of all, in the order of
    `manifest.sources`; drawn_of_places: tokens that a document of each gives an epoch, in the
    mean."""

    weights: dict[str, float]
    of_places: np.ndarray
    drawn_of_places: np.ndarray
    sources: SourceMap

    @classmethod
    def of(cls, weights: dict[str, float], manifest: Manifest, sources: SourceMap) -> Repeats:
        """weights: as `other_weights` gives them."""
        of_places = np.array([weights.get(source.name, 1.0) for source in manifest.sources])
        means = [source.tokens / max(source.documents_out, 1) for source in manifest.sources]
        return cls(weights, of_places, of_places * np.array(means), sources)

    def present(self, shard: ShardInfo) -> bool:
        """Whether some document of the shard may stand in an epoch."""
        return any(n and self.of_places[place] > 0 for place, n in self.sources.shards[shard.name])

    def tokens_of(self, shard: ShardInfo) -> float:
        """About how many tokens of the shard stand in an epoch."""
        runs = self.sources.shards[shard.name]
        return sum(n * float(self.drawn_of_places[place]) for place, n in runs)

    def sources_of(self, shards: Sequence[ShardInfo]) -> np.ndarray:
        """int64 [D]: of the documents of these shards, the places of their sources."""
        runs = np.array([run for shard in shards for run in self.sources.shards[shard.name]])
        return np.repeat(runs[:, 0], runs[:, 1])

    def draw(self, key: int, sources_D: np.ndarray) -> np.ndarray:
        """int64 [D]: how often each document stands there. Of a source with weight w each stands
        floor(w) times; of its documents here the rest of w is the share that stands once more. At
        least one of a weight above 0 stands there: a window is never empty."""
        whole = np.floor(self.of_places).astype(np.int64)
        drawn_D = draws.fold_in(key, np.arange(len(sources_D)))
        counts_D = whole[sources_D]
        for place in np.flatnonzero(self.of_places > whole):
            own = np.flatnonzero(sources_D == place)
            share = (self.of_places[place] - whole[place]) * len(own)
            # What is left of a document is one by chance, so that the mean over windows is exact.
            up = draws.bernoulli(draws.fold_in(draws.key(key, 1), np.array([place])), share % 1)
            chosen = np.argsort(drawn_D[own], kind="stable")[: int(share) + int(up[0])]
            counts_D[own[chosen]] += 1
        if not counts_D.any():
            able = np.flatnonzero(self.of_places[sources_D] > 0)
            counts_D[able[drawn_D[able].argmin()]] = 1
        return counts_D


def other_weights(weights: Mapping[str, float], manifest: Manifest, key: str) -> dict[str, float]:
    """Those that are not 1. UserError, which names `key`, for a source that the data set does not
    have, and where they leave no text."""
    names = [source.name for source in manifest.sources]
    for name in weights:
        if name not in names:
            raise UserError(f"{key}.{name}: no such source; there are {', '.join(names)}")
    if all(weights.get(name, 1) == 0 for name in names):
        raise UserError(f"{key}: every source has weight 0: no text is left")
    return {name: float(weights[name]) for name in sorted(weights) if weights[name] != 1}


def copied(
    lengths: np.ndarray, counts: np.ndarray, document: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The lengths of sentences, and their counts by document, of the documents `document` of
    (lengths, counts), one after the other."""
    of_copies = counts[document]
    ends = np.cumsum(of_copies)
    first = (np.cumsum(counts) - counts)[document]
    at = np.arange(int(of_copies.sum())) + np.repeat(first - (ends - of_copies), of_copies)
    return lengths[at], of_copies
