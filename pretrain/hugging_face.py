"""Hugging Face BERT folders, in (`read`) and out (`write`): a bijection of names, nothing passed
over in silence.

Our parameter names are Hugging Face's. The differences: in training the vocabulary is padded for
the hardware (here it never is), and the decoder tied to the word embeddings is stored once.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

from core.console import printable
from core.errors import UserError, disk_error, short
from core.files import (
    disk_errors,
    is_there,
    json_value,
    open_regular,
    read_json,
    replace_folder,
    write_json,
)
from data_pipeline.corpus import tokenizer_files
from data_pipeline.corpus.tokenizer import Tokenizer
from pretrain import torch_files
from pretrain.fragments import check_shapes, write_safetensors
from pretrain.model import BertForPreTraining
from pretrain.model_config import SHARED_KEYS, ModelConfig
from pretrain.origin import folder_config

WORD_EMBEDDINGS = "bert.embeddings.word_embeddings.weight"
OUTPUT_BIAS = "cls.predictions.bias"
# Parts that a model may lack as a whole.
PARTS = ("bert.pooler.", "cls.predictions.", "cls.seq_relationship.")

_WRITTEN = {
    "config.json",
    "model.safetensors",
    "vocab.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "README.md",
}
# In the header of model.safetensors: transformers keeps unknown keys of config.json when it saves
# a model of its own there, but not these.
_MARK = "written_by"


def add_weights(digest: hashlib._Hash, weights: Mapping[str, Tensor]) -> None:
    """Names and bytes, in the order of names."""
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].cpu().contiguous().flatten().view(torch.uint8).numpy())


@dataclass(frozen=True)
class Pretrained:
    """A BERT, read and checked.

    weights: fp32 by name; heads of other tasks (`other_heads`) come along, parts may be absent.
    shape: its vocabulary is not padded. tokenizer: None where the folder has no vocabulary.
    labels: of the classes that its head was trained on, if any. origin, notes and left_out (tokens
    that were added to the vocabulary, "" where none were): for the console. untyped: a line where
    its own tokenizer gives the texts of a pair no types, "" where it does.
    """

    path: Path
    weights: dict[str, Tensor]
    shape: ModelConfig
    tokenizer: Tokenizer | None
    labels: tuple[str, ...] = ()
    origin: str = "a Hugging Face folder"
    notes: tuple[str, ...] = ()
    left_out: str = ""
    untyped: str = ""

    @cached_property
    def digest(self) -> str:
        """Of weights, shape and vocabulary; keys of the shape that are as usual do not count, so
        that one more changes nothing."""
        found = hashlib.sha256(self.shape.model_dump_json(exclude_defaults=True).encode())
        add_weights(found, self.weights)
        if self.tokenizer is not None:
            found.update(f"{self.tokenizer.sha256} {self.tokenizer.lowercase}".encode())
        return found.hexdigest()

    @property
    def other_heads(self) -> list[str]:
        return sorted(name for name in self.weights if is_other_head(name))

    @property
    def absent_parts(self) -> list[str]:
        return [part for part in PARTS if not any(name.startswith(part) for name in self.weights)]


def is_other_head(name: str) -> bool:
    """Of a layer beside the encoder that BERT's pretraining has not."""
    return "." in name and not name.startswith(("bert.", *PARTS))


def listed(names: Iterable[str]) -> str:
    """Layers of these parameters in one line, inner ones left out: `cls.chain, classifier`."""
    layers: list[str] = []
    for layer in sorted({name.rpartition(".")[0] for name in names}):
        if not layers or not layer.startswith(layers[-1] + "."):
            layers.append(layer)
    layers = [short(printable(layer), 120) for layer in layers]
    return ", ".join(layers[:12]) + (f" and {len(layers) - 12} more" if len(layers) > 12 else "")


# -------------------------------------------------------------------------------------------- read


def read(folder: str | Path, lowercase: bool | None = None) -> Pretrained:
    """A Hugging Face BERT: with or without heads, vocabulary and the `bert.` prefix.

    Weights from model.safetensors (also in parts) or pytorch_model.bin, of which only tensors are
    ever read; pieces from vocab.txt or tokenizer.json; casing from tokenizer_config.json,
    tokenizer.json or, where neither tells, from the pieces. `lowercase`: what the casing must be.
    Raises UserError on a key that is unknown or missing, a shape that does not fit, tied tensors
    that differ, mathematics that is not BERT's, or a vocabulary that is not the weights'. Rows of
    embeddings that pad the vocabulary, and tokens that were added to it, are left out, and said.
    """
    folder = Path(folder)
    shape, plain = folder_config(folder)
    labels = _labels(folder / "config.json", plain)
    weights = _canonical(_read_tensors(folder), folder)
    check_names_and_shapes(weights, shape, str(folder))
    check_finite(weights, str(folder))
    found = tokenizer_files.read(folder, lowercase)
    tokenizer, added, left_out, untyped = found or (None, {}, "", "")
    if tokenizer is not None:
        _check_rows(tokenizer, added, shape, folder)
    origin = "a Hugging Face folder"
    padding = shape.vocab_size - len(tokenizer) if tokenizer is not None else 0
    if padding:
        weights, shape = without_padding(weights, shape.with_vocab_size(len(tokenizer)))
        origin += f", without {padding} rows that pad its vocabulary"
    return Pretrained(
        folder, weights, shape, tokenizer, labels, origin, left_out=left_out, untyped=untyped
    )


def without_padding(
    weights: dict[str, Tensor], shape: ModelConfig
) -> tuple[dict[str, Tensor], ModelConfig]:
    """Of weights by name what belongs to the vocabulary of `shape`, and the shape of that."""
    there = {WORD_EMBEDDINGS, OUTPUT_BIAS} & weights.keys()
    cut = {name: weights[name][: shape.vocab_size] for name in there}
    return weights | cut, shape.model_copy(update={"vocab_multiple": 1})


def _labels(path: Path, plain: dict[str, Any]) -> tuple[str, ...]:
    """Names of the classes of its head."""
    names = json_value(path, plain, "id2label", dict) or {}
    numbers = [str(number) for number in range(len(names))]
    if names.keys() == set(numbers):
        # No texts, or half of a surrogate pair, which JSON takes and answers in UTF-8 do not.
        with contextlib.suppress(TypeError, UnicodeEncodeError):
            "".join(names.values()).encode()
            return tuple(names[number] for number in numbers)
    raise UserError(f"{path}: id2label: names of classes by number, from 0, are expected")


def _check_rows(
    tokenizer: Tokenizer, added: dict[int, str], shape: ModelConfig, folder: Path
) -> None:
    """UserError where the weights have more or fewer rows than pieces, tokens that were added to
    them, and a padding to a multiple of a power of two explain. `write` pads nothing."""
    own = _mark(folder / "model.safetensors") is not None
    multiples = [1] if own else [1, *(2**n for n in range(3, 11))]
    counts = {-(-count // m) * m for m in multiples for count in (len(tokenizer), *added)}
    if shape.vocab_size not in counts:
        raise UserError(
            f"{tokenizer_files.file_of(folder)}: {len(tokenizer)} pieces, but the weights beside "
            f"it have {shape.vocab_size}"
        )


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    whole, parts = folder / "model.safetensors", folder / "model.safetensors.index.json"
    pickled = folder / "pytorch_model.bin"
    path = whole
    try:
        if is_there(whole):
            return _load(whole)
        if is_there(parts):
            path = parts
            names = read_json(parts)["weight_map"].values()
            state: dict[str, Tensor] = {}
            for name in sorted(set(names)):
                if Path(name).name != name:
                    raise UserError(f"{parts}: {short(name)!r} is not a file of this folder")
                path = folder / name
                part = _load(path)
                if twice := state.keys() & part.keys():
                    named = short(min(twice), 120)
                    raise UserError(f"{path}: holds {named}, as a file before it does")
                state |= part
            return state
        if is_there(pickled):
            path = pickled
            found = _load_pickle(path)
            if not isinstance(found, Mapping) or not all(isinstance(n, str) for n in found):
                raise UserError(f"{path}: is not a table of tensors by name")
            return found
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path}: holds more than tensors, which is not executed: {short(str(error), 120)}"
        ) from None
    except (AttributeError, TypeError):
        raise UserError(f"{path}: weight_map is not file names by tensor name") from None
    except OSError as error:
        raise disk_error(error, path) from None
    except (EOFError, RuntimeError, ValueError, KeyError, safetensors.SafetensorError) as error:
        why = (str(error).splitlines() or ["it is empty"])[0]
        raise UserError(f"{path}: cannot be read: {short(why, 200)}") from None
    raise UserError(f"{folder}: holds neither {whole.name} nor {pickled.name}")


def _load(path: Path) -> dict[str, Tensor]:
    open_regular(path).close()  # the library would wait for a pipe
    # Its tensors are the file's own pages, and change where something is written into that.
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def _load_pickle(path: Path) -> Any:
    with open_regular(path) as file:
        return torch_files.load(file)


def _canonical(found: Mapping[str, object], folder: Path) -> dict[str, Tensor]:
    """Our names: the prefix added, old LayerNorm names renewed, what is stored twice checked."""
    prefixed = any(name.startswith("bert.") for name in found)
    state: dict[str, Tensor] = {}
    for name, tensor in found.items():
        if not isinstance(tensor, Tensor):
            raise UserError(f"{folder}: {short(name, 120)} is not a plain tensor")
        new = name.replace("LayerNorm.gamma", "LayerNorm.weight")
        new = new.replace("LayerNorm.beta", "LayerNorm.bias")
        if not prefixed and new.startswith(("embeddings.", "encoder.", "pooler.")):
            new = "bert." + new
        if new in state:
            raise UserError(f"{folder}: {name} is there twice under different names")
        try:
            state[new] = tensor.float() if tensor.is_floating_point() else tensor
        except RuntimeError:  # two numbers a byte
            raise UserError(f"{folder}: {name} holds {tensor.dtype}, which is not read") from None

    # Buffers of older versions of the library: derived, so checked and left out.
    positions = state.pop("bert.embeddings.position_ids", None)
    if positions is not None and positions.flatten().tolist() != list(range(positions.numel())):
        raise UserError(f"{folder}: bert.embeddings.position_ids do not count from 0")
    _untie(state, "cls.predictions.decoder.weight", WORD_EMBEDDINGS, folder)
    _untie(state, "cls.predictions.decoder.bias", OUTPUT_BIAS, folder)
    return state


def _untie(state: dict[str, Tensor], copy: str, name: str, folder: Path) -> None:
    tensor = state.pop(copy, None)
    if tensor is not None and not torch.equal(state.setdefault(name, tensor), tensor):
        raise UserError(f"{folder}: {copy} differs from {name}, to which BERT ties it")


def check_names_and_shapes(
    weights: Mapping[str, Tensor], shape: ModelConfig, where: str, whole: bool = False
) -> None:
    """UserError unless these are the tensors of `shape`; if not `whole`, whole parts may be absent
    and other heads there."""
    with torch.device("meta"):
        model = BertForPreTraining(shape, generator=None)
    absent = tuple(p for p in PARTS if not (whole or any(n.startswith(p) for n in weights)))
    wanted = {n: t.shape for n, t in model.state_dict().items() if not n.startswith(absent)}
    given = {name: t.shape for name, t in weights.items() if whole or not is_other_head(name)}
    check_shapes(given, wanted, where)


def check_finite(weights: Mapping[str, Tensor], where: str) -> None:
    for name, tensor in weights.items():
        if not is_other_head(name):
            if not tensor.is_floating_point() or not tensor.isfinite().all():
                raise UserError(f"{where}: {name} holds values that are not finite real numbers")


# ------------------------------------------------------------------------------------------- write


def write(
    folder: str | Path,
    weights: Mapping[str, Tensor],
    shape: ModelConfig,
    tokenizer: Tokenizer | None,
    *,
    by: str,
    config: Mapping[str, Any] | None = None,
    card: str | None = None,
    force: bool = False,
) -> Path:
    """Write a folder that transformers' models and tokenizers load as it stands.

    `weights`: fp32, named as the model's, with or without heads; `shape`: the vocabulary not
    padded. `by`: the command, which is kept as a mark in the weights. `config`: keys of config.json
    beside the shape. `card`: the text of README.md. The folder appears whole or not at all. What
    `by` wrote there before is replaced, with `force` any Hugging Face folder. Raises UserError for
    anything else that is there, for tensors that are not this model's, for a disk that is full.
    """
    out = Path(folder)
    if tokenizer is not None and len(tokenizer) != shape.vocab_size:
        raise UserError(f"{out}: {len(tokenizer)} pieces, but the model has {shape.vocab_size}")
    check_names_and_shapes(weights, shape, str(out))
    check_replaceable(out, by, force)
    if ".." in out.parts:  # its way may lead through what is replaced
        out = out.parent.resolve() / out.name
    tensors = {name: t.detach().cpu() for name, t in weights.items()}
    heads = any(name.startswith("cls.") for name in tensors)
    architecture = "BertLMHeadModel" if shape.is_decoder else "BertForPreTraining"
    plain = {
        "architectures": [architecture if heads else "BertModel"],
        "model_type": "bert",
        **{key: getattr(shape, key) for key in SHARED_KEYS},
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "pad_token_id": tokenizer.pad_id if tokenizer is not None else 0,
        "torch_dtype": "float32",
        "use_cache": True,
        **(config or {}),
    }
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
            new = Path(temporary) / "new"
            new.mkdir()
            file = new / "model.safetensors"
            try:
                write_safetensors(file, tensors, {"format": "pt", _MARK: by})
            except OSError as error:
                raise disk_error(OSError(error.errno, error.strerror), out / file.name) from None
            write_json(new / "config.json", plain)
            if card is not None:
                (new / "README.md").write_text(card, encoding="utf-8", errors="replace")
            if tokenizer is not None:
                _write_tokenizer(new, tokenizer, shape)
            replace_folder(new, out)
    return out


def check_replaceable(out: Path, by: str, force: bool) -> None:
    """UserError when `write` would replace what it must not."""
    if not out.name:
        raise UserError(f"{out}: the folder to write wants a name of its own")
    with disk_errors(out):
        for above in (out, *out.parents):  # made on the way, it would lead elsewhere
            if above.name == ".." and not above.exists():
                raise UserError(f"{out}: {above.parent}: no such folder")
        if not out.exists():
            return
    if not out.is_dir():
        raise UserError(f"{out}: is not a folder")
    inside = sorted(out.iterdir())
    strange = [p.name for p in inside if p.name not in _WRITTEN or p.is_dir()]
    if not inside or (not strange and _mark(out / "model.safetensors") == by):
        return
    if not force:
        why = f"it holds {strange[0]}" if strange else "its weights do not carry that mark"
        raise UserError(
            f"{out}: was not written by {by} ({why}), so it is not replaced without --force"
        )
    if not (out / "config.json").is_file() or any(p.is_dir() for p in inside):
        raise UserError(f"{out}: is not a Hugging Face folder; --force replaces nothing else")


def _mark(file: Path) -> str | None:
    try:
        open_regular(file).close()  # the library would wait for a pipe
        with safetensors.safe_open(file, "pt") as opened:
            return (opened.metadata() or {}).get(_MARK)
    except (OSError, safetensors.SafetensorError):
        return None


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, shape: ModelConfig) -> None:
    names = ("pad", "unk", "cls", "sep", "mask")
    special = {f"{n}_token": tokenizer.pieces[getattr(tokenizer, f"{n}_id")] for n in names}
    text = "".join(piece + "\n" for piece in tokenizer.pieces)
    (folder / "vocab.txt").write_text(text, encoding="utf-8", newline="\n")
    write_json(folder / "special_tokens_map.json", special)
    plain = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": tokenizer.lowercase,
        "tokenize_chinese_chars": True,
        "strip_accents": None,
        "model_max_length": shape.max_position_embeddings,
    }
    write_json(folder / "tokenizer_config.json", plain | special)
