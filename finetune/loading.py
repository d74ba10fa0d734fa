"""Weights, vocabulary and casing from a folder, or a reason why not; nothing in silence."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from core.errors import UserError
from core.files import read_json
from data_pipeline.corpus.tokenizer import Tokenizer
from finetune.config import EncoderConfig
from finetune.heads import FineTuned, HeadSpec, initialise_head
from pretrain.checkpoint import load_model_state
from pretrain.convert import import_hugging_face
from pretrain.model import SHARED_KEYS, ModelConfig, initialise

# Layers of other tasks that a folder may hold and this task leaves behind; they are named.
_EMBEDDINGS = "bert.embeddings.word_embeddings.weight"
_OTHER_HEADS = ("cls.", "classifier.", "qa_outputs.")


@dataclass(frozen=True)
class Source:
    """An encoder's folder, read. `labels`: of the classes its head was trained on, if any.

    notes: which checkpoint of a run it is, and which newer ones are damaged.
    """

    path: Path
    config: ModelConfig
    state: dict[str, Tensor]
    tokenizer: Tokenizer
    labels: tuple[str, ...]
    random: bool
    notes: tuple[str, ...] = ()


def read(config: EncoderConfig, max_seq_len: int) -> Source:
    """Read and check `encoder.path`. UserError when vocabulary, casing or length do not fit."""
    path = Path(config.path)
    if not path.is_dir():
        raise UserError(f"encoder.path: {path}: no such folder")
    labels: tuple[str, ...] = ()
    notes: list[str] = []
    if (path / "config.json").exists():
        state, shape = import_hugging_face(path, vocab_multiple=1)
        declared = _declared_casing(path)
        labels = _labels(path / "config.json")
    else:
        state, pretrained, facts, path = load_model_state(path, notes)
        shape = pretrained.model
        declared = bool(facts.dataset["lowercase"])
        notes.insert(0, f"encoder: {path}, step {facts.position.step}")
    vocab, pieces = _vocabulary(path)
    tokenizer = Tokenizer(pieces, _casing(vocab, pieces, declared, config.lowercase), str(vocab))
    if not (path / "config.json").exists():
        # A checkpoint's vocabulary is padded for the hardware by less than one multiple.
        shape = shape.with_vocab_size(len(tokenizer))
        if len(state[_EMBEDDINGS]) == shape.padded_vocab_size:
            state[_EMBEDDINGS] = state[_EMBEDDINGS][: shape.vocab_size]
    rows = len(state[_EMBEDDINGS])
    if len(tokenizer) != rows:
        raise UserError(f"{vocab}: {len(tokenizer)} pieces, but the weights beside it have {rows}")
    if max_seq_len > shape.max_position_embeddings:
        raise UserError(
            f"max_seq_len: {max_seq_len} is more than the {shape.max_position_embeddings} "
            f"positions of {path}"
        )
    # Fine-tuning has no product with the vocabulary, so no padding of it, and rows of many
    # lengths, which compiled code would be made anew for.
    shape = shape.model_copy(
        update={"vocab_multiple": 1, "compile": False, "activation_checkpointing": False}
    )
    return Source(path, shape, state, tokenizer, labels, config.init == "random", tuple(notes))


def build(
    source: Source, head: HeadSpec, config: EncoderConfig, seed: int
) -> tuple[FineTuned, list[str]]:
    """The model with its weights in place, and what was new or left behind, a line each.

    New layers depend on `seed` alone. UserError on any missing or unexpected key but a head's.
    """
    generator = torch.Generator().manual_seed(seed)
    model = FineTuned(source.config, head, frozen=config.trained == "head")
    if source.config.type_vocab_size < 2:
        raise UserError(f"{source.path}: type_vocab_size is 1; pairs of texts need two")
    if source.random:
        initialise(model.bert, source.config, generator)
        initialise_head(model, source.config, generator)
        return model, ["encoder: random weights, as asked (encoder.init)"]
    state, notes = dict(source.state), []
    wanted = model.state_dict()
    own = {name for name in wanted if name.startswith(head.layer + ".")}
    spare = set() if head.pooled else {n for n in wanted if n.startswith("bert.pooler.")}
    unexpected = state.keys() - wanted.keys()
    left = {name for name in unexpected if name.startswith(_OTHER_HEADS)}
    fresh = own if config.new_head or not own & state.keys() else set()
    new = fresh | (spare - state.keys())
    missing = wanted.keys() - state.keys() - new
    if missing or unexpected - left:
        raise UserError(
            f"{source.path}: the weights do not fit"
            + _listed("; missing", missing)
            + _listed("; unexpected", unexpected - left)
        )
    for name in sorted(wanted.keys() - new):
        if state[name].shape != wanted[name].shape:
            hint = "; encoder.new_head: true starts it afresh" if name in own else ""
            raise UserError(
                f"{source.path}: {name} is {list(state[name].shape)}, "
                f"{list(wanted[name].shape)} is needed{hint}"
            )
    if not fresh and head.labels and source.labels and source.labels != head.labels:
        raise UserError(
            f"{source.path}: its head tells {', '.join(source.labels)} apart, the task has "
            f"{', '.join(head.labels)}; encoder.new_head: true starts it afresh"
        )
    if fresh:
        notes.append(f"new layer: {head.layer} ({head.width} outputs)")
        initialise_head(model, source.config, generator)
    else:
        notes.append(f"{head.layer} goes on from {source.path}")
    if spare - state.keys():
        notes.append("bert.pooler is not in the folder; this task does not use it")
    if left:
        notes.append("left behind:" + _listed("", left))
    notes += source.notes
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name not in new:
                tensor.copy_(state[name])
            elif name not in own:
                tensor.zero_()
    return model, notes


def save(model: FineTuned, source: Source, folder: Path) -> None:
    """A Hugging Face folder of the fine-tuned model: config, weights, vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
    c, head = source.config, model.head
    plain = {
        "architectures": [head.architecture],
        "model_type": "bert",
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "pad_token_id": source.tokenizer.pad_id,
        **{key: getattr(c, key) for key in SHARED_KEYS},
    }
    if head.labels:
        plain["id2label"] = {str(i): label for i, label in enumerate(head.labels)}
        plain["label2id"] = {label: i for i, label in enumerate(head.labels)}
    elif head.regression:
        plain |= {"id2label": {"0": "LABEL_0"}, "problem_type": "regression"}
    _json(folder / "config.json", plain)
    _json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "BertTokenizer", "do_lower_case": source.tokenizer.lowercase},
    )
    text = "".join(piece + "\n" for piece in source.tokenizer.pieces)
    (folder / "vocab.txt").write_text(text, encoding="utf-8", newline="\n")


def _vocabulary(path: Path) -> tuple[Path, list[str]]:
    """(file, pieces by id): vocab.txt, or tokenizer.json, all that transformers 5 writes."""
    file, fast = path / "vocab.txt", path / "tokenizer.json"
    if file.exists() or not fast.exists():
        try:
            text = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise UserError(f"{file}: no such vocabulary file") from None
        except OSError as error:
            raise UserError(f"{file}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{file}: not UTF-8 at byte {error.start}") from None
        pieces = text.split("\n")
        while pieces and not pieces[-1]:
            pieces.pop()
        return file, pieces
    model = _value(fast, read_json(fast), "model", dict) or {}
    if model.get("type") != "WordPiece" or model.get("continuing_subword_prefix") != "##":
        raise UserError(f"{fast}: not a WordPiece vocabulary with ## before inner pieces")
    ids = _value(fast, model, "vocab", dict) or {}
    if not ids:
        raise UserError(f"{fast}: vocab: no pieces")
    numbered = all(type(number) is int for number in ids.values())
    if not numbered or sorted(ids.values()) != list(range(len(ids))):
        raise UserError(f"{fast}: ids of the vocabulary are not 0 to {len(ids) - 1}")
    return fast, sorted(ids, key=ids.__getitem__)


def _labels(file: Path) -> tuple[str, ...]:
    names = _value(file, read_json(file), "id2label", dict) or {}
    if not all(key.isdecimal() and isinstance(name, str) for key, name in names.items()):
        raise UserError(f"{file}: id2label: names of classes by number are expected")
    return tuple(names[key] for key in sorted(names, key=int))


def _declared_casing(path: Path) -> bool | None:
    file, fast = path / "tokenizer_config.json", path / "tokenizer.json"
    plain = read_json(file) if file.exists() else {}
    if "do_lower_case" not in plain and fast.exists():
        file, normal = fast, _value(fast, read_json(fast), "normalizer", dict) or {}
        plain = {
            "do_lower_case": _value(fast, normal, "lowercase", bool),
            "strip_accents": normal.get("strip_accents"),
            "tokenize_chinese_chars": normal.get("handle_chinese_chars", True),
        }
    if _value(file, plain, "tokenize_chinese_chars", bool) is False:
        raise UserError(f"{file}: tokenize_chinese_chars: false is not supported")
    lowercase = _value(file, plain, "do_lower_case", bool)
    if plain.get("strip_accents") not in (None, lowercase):
        raise UserError(f"{file}: strip_accents other than do_lower_case is not supported")
    return lowercase


def _casing(vocab: Path, pieces: list[str], declared: bool | None, asked: bool | None) -> bool:
    plain = [p for p in pieces if not p.startswith("[")]
    cased = any(p != p.lower() for p in plain)
    known = declared if declared is not None else not cased
    if asked is not None and declared is not None and asked != declared:
        raise UserError(
            f"encoder.lowercase: {str(asked).lower()}, but {vocab.parent} was trained with "
            f"{str(declared).lower()}"
        )
    lowercase = known if asked is None else asked
    if lowercase and sum(p != p.lower() for p in plain) > 0.01 * len(plain):
        raise UserError(f"{vocab}: has upper-case pieces, but the text would be lower-cased")
    if not lowercase and not cased:
        raise UserError(f"{vocab}: has no upper-case piece, but the text would keep its case")
    return lowercase


def _listed(what: str, names: set[str]) -> str:
    if not names:
        return ""
    shown = sorted(names)
    more = f" and {len(shown) - 6} more" if len(shown) > 6 else ""
    return f"{what} {', '.join(shown[:6])}{more}"


def _value(file: Path, plain: dict, key: str, kind: type) -> Any:
    """`plain[key]`, None where it is absent; UserError when it is of another kind."""
    value = plain.get(key)
    if value is not None and not isinstance(value, kind):
        wanted = {dict: "an object", bool: "true or false"}[kind]
        raise UserError(f"{file}: {key}: {wanted} is expected, not {json.dumps(value)[:60]}")
    return value


def _json(path: Path, plain: dict) -> None:
    path.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
