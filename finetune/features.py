"""The feature-based approach (section 5.3): the encoder's states, computed once and kept, under a
BiLSTM that is trained alone.

Legend: W words, D hidden, E features a word.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.errors import disk_error
from core.files import disk_errors, is_alive, named, open_regular, replacing, write_json
from finetune import loading
from finetune.batches import by_tokens
from finetune.config import NerConfig
from finetune.examples import Item
from finetune.heads import BiLstm, FineTuned, HeadSpec, TaskModel, initialise_lstm
from finetune.ner import Ner, Window
from finetune.tasks import Context, Outputs
from pretrain.fragments import write_safetensors

TOKENS = 8192  # computed at a time
_SUM = hashlib.sha256  # of an array, behind it in its file


def layers_of(choice: str, layers: int) -> list[int]:
    """States that a choice needs, of 0 (embeddings) to `layers` (last)."""
    last = list(range(max(1, layers - 3), layers + 1))
    return {
        "embeddings": [0],
        "second_to_last": [layers - 1],
        "last": [layers],
        "sum_last_four": last,
        "concat_last_four": last,
        "weighted_sum": list(range(1, layers + 1)),
    }[choice]


def cache_key(model: FineTuned, items: list[Item], places: list[np.ndarray]) -> str:
    """Of everything that a set's states depend on: weights, shape, tokens."""
    digest = hashlib.sha256(repr(model.bert.config).encode())
    for name, tensor in model.bert.state_dict().items():
        digest.update(name.encode() + tensor.cpu().numpy().tobytes())
    for item, place in zip(items, places, strict=True):
        digest.update(item.sequences[0].ids.tobytes() + b"|" + place.tobytes())
    return digest.hexdigest()[:24]


def compute(
    model: FineTuned,
    items: list[Item],
    windows: list[Window],
    layers: list[int],
    cache: Path,
    context: Context,
) -> tuple[list[np.ndarray], str]:
    """For each layer float16 [W, D], the state of every word's first piece; memory-mapped files.

    Whole files that are there already are used; the second value says what was done.
    """
    shape = (sum(len(w.words) for w in windows), model.bert.config.hidden_size)
    key = cache_key(model, items, [w.places for w in windows])
    paths = {layer: cache / f"{key}-layer{layer:02}.npy" for layer in layers}
    found = {layer: _open(path, shape) for layer, path in paths.items()}
    todo = {layer: paths[layer] for layer, array in found.items() if array is None}
    damaged = sum(path.exists() for path in todo.values())
    if todo:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            _remove_stale(cache)
            _write(model, items, windows, todo, shape, context)
        except OSError as error:
            raise disk_error(error, cache, "ner.cache_dir") from None
    done = f"computed {len(todo)}, re-used {len(layers) - len(todo)}"
    if damaged:
        done += f" ({damaged} damaged files made anew)"
    found |= {layer: _open(path, shape) for layer, path in todo.items()}
    return list(found.values()), done


def _open(path: Path, shape: tuple[int, int]) -> np.ndarray | None:
    """None: not there, or not as it was written."""
    try:
        with open_regular(path) as file:
            file.seek(-_SUM().digest_size, os.SEEK_END)
            written = file.read()
        array = np.lib.format.open_memmap(path, "r")
        as_asked = array.shape == shape and array.dtype == np.float16
        return array if as_asked and _SUM(array).digest() == written else None
    except (OSError, ValueError, SyntaxError, OverflowError, TokenError):  # of its header
        return None


def _remove_stale(cache: Path) -> None:
    """Files of processes of this machine that were killed."""
    host = re.escape(socket.gethostname())
    name = re.compile(rf"[0-9a-f]{{24}}-layer[0-9]{{2}}\.{host}\.([0-9]{{1,9}})\.new")
    for path in cache.glob("*.new"):
        if (made := name.fullmatch(path.name)) and not is_alive(int(made[1])):
            path.unlink(missing_ok=True)


def _empty(path: Path, shape: tuple[int, int]) -> np.ndarray:
    """To be written, mapped. OSError where the disk has no room for all of it: a page that gets
    none would end the process."""
    np.lib.format.open_memmap(path, "w+", np.float16, shape)
    with named(path), path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    return np.lib.format.open_memmap(path, "r+")


@torch.no_grad()
def _write(
    model: FineTuned,
    items: list[Item],
    windows: list[Window],
    paths: dict[int, Path],
    shape: tuple[int, int],
    context: Context,
) -> None:
    mine = f".{socket.gethostname()}.{os.getpid()}.new"
    with contextlib.ExitStack() as open_files:
        temporary = {
            n: open_files.enter_context(replacing(path, part=path.with_suffix(mine), durable=False))
            for n, path in paths.items()
        }
        arrays = {n: _empty(path, shape) for n, path in temporary.items()}
        model.to(context.device).eval()
        done = 0
        for part in by_tokens(items, TOKENS):
            context.heed()
            batch = model.collate(part, context.device)
            states = model.bert.encode(*batch.packed, all_layers=True)
            for n, array in arrays.items():
                flat = states[n].flatten(0, 1)[batch.positions].cpu().numpy()
                at = 0
                here = windows[done : done + len(part)]
                for window, length in zip(here, batch.lengths, strict=True):
                    array[window.words] = flat[at + window.places]
                    at += length
            done += len(part)
        for n, array in arrays.items():
            array.flush()
            with temporary[n].open("ab") as file:
                file.write(_SUM(array).digest())


class Words(NamedTuple):
    """A sentence: int64 [words] rows of its words in the feature matrices, and their labels."""

    rows: np.ndarray
    label: np.ndarray

    @property
    def tokens(self) -> int:
        return len(self.rows)


class FeatureBatch(NamedTuple):
    """states: for each layer float32 [W, D], sentence after sentence; lengths: of the sentences;
    labels int64 [W]."""

    states: list[Tensor]
    lengths: tuple[int, ...]
    labels: Tensor


class Tagger(TaskModel):
    """A BiLSTM over the words' features, then a layer that tells the tags apart; all in fp32."""

    trained = "features"

    def __init__(
        self,
        features: list[np.ndarray],
        head: HeadSpec,
        config: NerConfig,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.features, self.choice, self.head = features, config.features, head
        width = features[0].shape[1] * (len(features) if self.choice == "concat_last_four" else 1)
        self.dropout_p = config.lstm_dropout
        self.lstm = BiLstm(width, config.lstm_size, config.lstm_layers, config.lstm_dropout)
        self.classifier = nn.Linear(2 * config.lstm_size, head.outputs)
        if self.choice == "weighted_sum":
            self.mix = nn.Parameter(torch.zeros(len(features)))
            self.scale = nn.Parameter(torch.ones(()))
        new = (*self.lstm.parameters(), *self.classifier.parameters())
        initialise_lstm(new, config.lstm_size, generator)

    def collate(self, items: Sequence[Words], device: torch.device) -> FeatureBatch:
        at = np.concatenate([item.rows for item in items])
        states = [torch.from_numpy(f[at].astype(np.float32)).to(device) for f in self.features]
        labels = torch.from_numpy(np.concatenate([item.label for item in items]))
        return FeatureBatch(states, tuple(len(item.rows) for item in items), labels.to(device))

    def inputs(self, batch: FeatureBatch) -> Tensor:
        """The chosen combination of layers: [W, E]."""
        if self.choice == "concat_last_four":
            return torch.cat(batch.states, -1)
        if self.choice == "weighted_sum":
            weights = self.scale * torch.softmax(self.mix, 0)
            return sum(w * s for w, s in zip(weights, batch.states, strict=True))
        return sum(batch.states)

    def forward(self, batch: FeatureBatch) -> Tensor:
        """[W, K], sentence after sentence."""
        x_WE = F.dropout(self.inputs(batch), self.dropout_p, self.training)
        out = self.lstm(x_WE, batch.lengths)
        return self.classifier(F.dropout(out, self.dropout_p, self.training))

    def loss_sum(self, logits: Tensor, batch: FeatureBatch) -> Tensor:
        return F.cross_entropy(logits, batch.labels, reduction="sum")

    def split(self, logits: Tensor, batch: FeatureBatch) -> list[np.ndarray]:
        parts = torch.split(logits.detach().cpu(), list(batch.lengths))
        return [part.numpy() for part in parts]

    def save(
        self, folder: Path, reading: Mapping[str, Any] | None = None, card: str | None = None
    ) -> None:
        tensors = {n: t.detach().cpu() for n, t in self.state_dict().items()}
        plain = {"features": self.choice, "labels": self.head.labels}
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_safetensors(folder / "model.safetensors", tensors)
            write_json(folder / "tagger.json", plain, durable=False)
            (folder / "README.md").write_text(card or "", encoding="utf-8")


class FeatureNer(Ner):
    """`Ner` whose items are sentences of words; the encoder sees the windows of `Ner`, once."""

    def load(self) -> None:
        super().load()
        self.encoded, self.sets = self.sets, {}
        first = 0
        for set_name, sentences in self.sentences.items():
            labels = self.labels_of(set_name)
            ends = np.cumsum([len(s.words) for s in sentences])
            rows = first + np.arange(len(labels))
            parts = zip(np.split(rows, ends[:-1]), np.split(labels, ends[:-1]), strict=True)
            self.sets[set_name] = [Words(*part) for part in parts]
            first += len(labels)

    def training_ids(self) -> np.ndarray:
        return np.concatenate([item.sequences[0].ids for item in self.encoded["train"]])

    def model(self, context: Context, seed: int) -> tuple[Tagger, list[str]]:
        """The tagger over the states that `ner.features` chooses; they are kept in a cache."""
        encoder, notes = loading.build(context.encoder, self.head, context.config.encoder, seed)
        cache = Path(self.config.cache_dir or Path(context.config.run_dir) / "features")
        layers = layers_of(self.config.features, context.encoder.shape.num_hidden_layers)
        matrices: list[list[np.ndarray]] = []
        for set_name, items in self.encoded.items():
            found, done = compute(encoder, items, self.windows[set_name], layers, cache, context)
            context.console.say(f"{self.name}: features of {set_name}: layers {layers}: {done}")
            matrices.append(found)
        features = [np.concatenate(parts) for parts in zip(*matrices, strict=True)]
        generator = torch.Generator().manual_seed(seed)
        tagger = Tagger(features, self.head, self.config, generator)
        return tagger, [*notes[1:], f"new layers: BiLSTM and classifier on {self.config.features}"]

    def classes(self, outputs: Outputs) -> dict[str, np.ndarray]:
        return {name: np.concatenate(logits).argmax(1) for name, logits in outputs.items()}
