"""The tokenizer of a Hugging Face folder: pieces and casing from vocab.txt or tokenizer.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from core.errors import UserError, short
from core.files import is_there, json_value, read_json
from core.urls import is_url
from data_pipeline.corpus.manifest import VOCAB
from data_pipeline.corpus.tokenizer import (
    MAX_WORD_CHARACTERS,
    SPECIAL_TOKENS,
    Tokenizer,
    is_line,
)

FAST = "tokenizer.json"  # all that transformers 5 writes
_SETTINGS = "tokenizer_config.json"
_CASED_SHARE = 0.01
_NAMED = 5  # of the tokens that are left out
# Keys of FAST's model and normalizer, with what BERT's have.
_SPLITS = (
    ("model", "type", "WordPiece"),
    ("model", "continuing_subword_prefix", "##"),
    ("model", "unk_token", "[UNK]"),
    ("model", "max_input_chars_per_word", MAX_WORD_CHARACTERS),
    ("normalizer", "clean_text", True),
)
# tokenizer_class of folders whose text is split as BERT splits it. The general ones leave that to
# tokenizer.json, and of transformers 5 give no types unless model_input_names does.
_GENERAL = ("PreTrainedTokenizerFast", "TokenizersBackend")
_CLASSES = (None, "BertTokenizer", "BertTokenizerFast", *_GENERAL)


class Found(NamedTuple):
    """A folder's tokenizer. added: tokens beyond its pieces, by how many tokens there are up to
    each. left_out: a line where other libraries find such tokens, or pieces, whole in the text
    before it is split, which ours does not do; "" where nothing was added. untyped: a line where
    the model of other libraries gets no types, so 0 for both texts of a pair; "" where it does."""

    tokenizer: Tokenizer
    added: dict[int, str] = {}
    left_out: str = ""
    untyped: str = ""


def given(path: str, lowercase: bool | None) -> Found:
    """The vocabulary that a configuration names: a folder, or a vocab.txt.

    lowercase: what is asked for; None: as the folder says, else as the pieces show. UserError
    where a folder says otherwise, or upper-case pieces would never be met.
    """
    if not is_url(path) and Path(path).is_dir():
        found = read(Path(path), lowercase)
        if found is None:
            raise UserError(
                f"{path}: holds neither {VOCAB} nor {FAST}; `python -m pretrain export RUN DIR` "
                "makes such a folder of a run"
            )
        return found
    if str(path).endswith(".json"):
        raise UserError(f"{path}: is not a {VOCAB}; name the folder that it lies in")
    pieces = Tokenizer.pieces_of(path)
    if lowercase is not False:
        lowercase = _casing(Path(path), pieces, None, lowercase)
    return Found(Tokenizer(pieces, lowercase, path))


def read(folder: Path, lowercase: bool | None = None) -> Found | None:
    """BERT's tokenizer of the folder, None where it has none. `lowercase`: what the casing must
    be."""
    file = file_of(folder)
    if not is_there(file):
        return None
    pieces = Tokenizer.pieces_of(file) if file.name == VOCAB else _fast_pieces(file)
    fast = folder / FAST
    if file.name == VOCAB and is_there(fast):
        ids = (json_value(fast, read_json(fast), "model", dict) or {}).get("vocab")
        ids = ids if isinstance(ids, dict) else {}
        other = next((n for n, piece in enumerate(pieces) if ids.get(piece) != n), None)
        if len(ids) > len(pieces) and other is None:
            raise UserError(
                f"{file}: {len(pieces):,} pieces, but {FAST} beside it has {len(ids):,}"
            )
        if ids and other is not None:
            raise UserError(
                f"{file}: piece {other}, {short(pieces[other])!r}, is another in {FAST}, which "
                "other libraries read: take away the file that is not of these weights"
            )
    cased = _casing(file, pieces, _declared_casing(folder), lowercase)
    tokenizer = Tokenizer(pieces, cased, str(file))
    if is_there(fast):
        _check_frame(fast, tokenizer)
    added = list(_added_tokens(folder))
    beyond = {n + 1: s for _, s, n in added if type(n) is int and n >= len(pieces)}
    return Found(tokenizer, dict(sorted(beyond.items())), _left_out(added), _untyped(folder))


def file_of(folder: Path) -> Path:
    """Where the pieces of a folder stand, or would stand."""
    plain, fast = folder / VOCAB, folder / FAST
    return fast if is_there(fast) and not is_there(plain) else plain


def _added_tokens(folder: Path) -> Iterator[tuple[Path, str, Any]]:
    """All that a library finds whole in a text, the five special ones too: the file, the token and
    its id where that is said."""
    for name in (FAST, "added_tokens.json", _SETTINGS, "special_tokens_map.json"):
        file = folder / name
        plain = read_json(file) if is_there(file) else {}
        said: list[tuple[Any, Any]] = []
        if name == FAST:
            tokens = json_value(file, plain, "added_tokens", list) or []
            said += [(t.get("content"), t.get("id")) for t in tokens if isinstance(t, dict)]
        elif name == "added_tokens.json":
            said += plain.items()
        else:
            by_id = json_value(file, plain, "added_tokens_decoder", dict) or {}
            said += [(token, int(n)) for n, token in by_id.items() if re.fullmatch("[0-9]{1,9}", n)]
            for key in ("additional_special_tokens", "extra_special_tokens"):
                more = plain.get(key)
                more = list(more.values()) if isinstance(more, dict) else more
                said += [(token, None) for token in more] if isinstance(more, list) else []
            said += [(token, None) for key, token in plain.items() if key.endswith("_token")]
        for token, number in said:
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str) and token:
                yield file, token, number


def _left_out(added: Iterable[tuple[Path, str, Any]]) -> str:
    files: dict[str, Path] = {}
    for file, token, _ in added:
        if token not in SPECIAL_TOKENS:
            files.setdefault(token, file)
    if not files:
        return ""
    more = f" and {len(files) - _NAMED:,} more" if len(files) > _NAMED else ""
    names = ", ".join(short(token, 40) for token in list(files)[:_NAMED]) + more
    return (
        f"{next(iter(files.values()))}: without the tokens added to it: {names}; text that spells "
        "them is split as any other"
    )


def _settings(folder: Path) -> tuple[Path, dict[str, Any]]:
    file = folder / _SETTINGS
    return file, read_json(file) if is_there(file) else {}


def _class(folder: Path) -> tuple[Path, Any]:
    """tokenizer_class, and the file that says it: config.json where the tokenizer's own does not.
    None where neither does."""
    file, plain = _settings(folder)
    config = folder / "config.json"
    if plain.get("tokenizer_class") is None and is_there(config):
        file, plain = config, read_json(config)
    return file, plain.get("tokenizer_class")


def _untyped(folder: Path) -> str:
    file, plain = _settings(folder)
    names = json_value(file, plain, "model_input_names", list)
    if "token_type_ids" in names if names is not None else _class(folder)[1] not in _GENERAL:
        return ""
    return (
        f"{file}: model_input_names: no token_type_ids, so the texts of a pair do not get BERT's "
        "types 0 and 1"
    )


def _fast_pieces(path: Path) -> list[str]:
    model = json_value(path, read_json(path), "model", dict) or {}
    if model.get("type") != "WordPiece" or model.get("continuing_subword_prefix") != "##":
        raise UserError(f"{path}: not a WordPiece vocabulary with ## before inner pieces")
    ids = json_value(path, model, "vocab", dict) or {}
    if not ids:
        raise UserError(f"{path}: vocab: no pieces")
    numbered = all(type(number) is int for number in ids.values())
    if not numbered or sorted(ids.values()) != list(range(len(ids))):
        raise UserError(f"{path}: ids of the vocabulary are not 0 to {len(ids) - 1}")
    pieces = sorted(ids, key=ids.__getitem__)
    for piece in pieces:
        if not is_line(piece):
            raise UserError(f"{path}: vocab: {short(repr(piece))} cannot be a line of a vocab.txt")
    return pieces


def _check_frame(fast: Path, tokenizer: Tokenizer) -> None:
    """UserError where the file puts other special tokens around texts, or gives other types."""
    found = json_value(fast, read_json(fast), "post_processor", dict) or {}
    kind, cls, sep = found.get("type"), tokenizer.cls_id, tokenizer.sep_id
    if kind == "BertProcessing":
        ends = [found.get("cls"), found.get("sep")]
        same = [n[-1] if isinstance(n, list) and n else None for n in ends] == [cls, sep]
    else:
        single = [(cls, 0), ("A", 0), (sep, 0)]
        wanted = {"single": single, "pair": [*single, ("B", 1), (sep, 1)]}
        same = kind == "TemplateProcessing" and all(
            _frame(found, key) == frame for key, frame in wanted.items()
        )
    if not same:
        raise UserError(
            f"{fast}: post_processor: {short(json.dumps(kind))} does not make BERT's "
            "[CLS] A [SEP] B [SEP] of types 0 and 1 of texts"
        )


def _frame(found: dict[str, Any], key: str) -> list[tuple[str | int, int]] | None:
    """Of a template each text, by name, and special token, by id, and its type; None where it is
    none."""
    frame: list[tuple[str | int, int]] = []
    try:
        for part in found[key]:
            ((what, said),) = part.items()
            name = said["id"]
            if what == "SpecialToken":
                (name,) = found["special_tokens"][name]["ids"]
            frame.append((name, said["type_id"]))
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return frame


def _declared_casing(folder: Path) -> bool | None:
    """UserError where the folder says that text is not split as BERT splits it."""
    fast = folder / FAST
    file, plain = _settings(folder)
    where, kind = _class(folder)
    if kind not in _CLASSES:
        raise UserError(
            f"{where}: tokenizer_class: {short(json.dumps(kind))} is not BERT's; without this key "
            "the text is split as BERT splits it"
        )
    special = folder / "special_tokens_map.json"
    for where, known in ((file, plain), (special, read_json(special) if is_there(special) else {})):
        for token in SPECIAL_TOKENS:
            key = f"{token[1:-1].lower()}_token"
            said = known.get(key)
            said = (said.get("content") or "") if isinstance(said, dict) else said
            if said not in (None, token):
                raise UserError(f"{where}: {key}: {short(json.dumps(said))} is not BERT's {token}")
    cut = plain.get("truncation_side")
    if cut not in (None, "right"):
        raise UserError(
            f"{file}: truncation_side: {short(json.dumps(cut))} is not supported; without this "
            "key a long text loses its end"
        )
    if json_value(file, plain, "do_basic_tokenize", bool) is False:
        raise UserError(f"{file}: do_basic_tokenize: false is not supported")
    if is_there(fast):
        whole = read_json(fast)
        side = (json_value(fast, whole, "truncation", dict) or {}).get("direction", "Right")
        if cut is None and side != "Right":
            raise UserError(
                f"{fast}: truncation: direction {short(json.dumps(side))} is not supported"
            )
        for key, wanted in (
            ("normalizer", "BertNormalizer"),
            ("pre_tokenizer", "BertPreTokenizer"),
        ):
            if (json_value(fast, whole, key, dict) or {}).get("type") != wanted:
                raise UserError(f"{fast}: {key}: its type is not BERT's, which is {wanted}")
        for part, key, wanted in _SPLITS:
            said = (json_value(fast, whole, part, dict) or {}).get(key, wanted)
            if said != wanted:
                raise UserError(
                    f"{fast}: {part}.{key}: {short(json.dumps(said))} is not BERT's "
                    f"{json.dumps(wanted)}"
                )
    if is_there(fast) and ("do_lower_case" not in plain or kind in _GENERAL):
        file, normal = fast, whole["normalizer"]
        plain = {
            "do_lower_case": json_value(fast, normal, "lowercase", bool),
            "strip_accents": normal.get("strip_accents"),
            "tokenize_chinese_chars": normal.get("handle_chinese_chars", True),
        }
    if json_value(file, plain, "tokenize_chinese_chars", bool) is False:
        raise UserError(f"{file}: tokenize_chinese_chars: false is not supported")
    lowercase = json_value(file, plain, "do_lower_case", bool)
    if plain.get("strip_accents") not in (None, lowercase):
        raise UserError(f"{file}: strip_accents other than do_lower_case is not supported")
    return lowercase


def _casing(vocab: Path, pieces: list[str], declared: bool | None, asked: bool | None) -> bool:
    """Whether text is lower-cased: as declared, else as asked, else as the pieces show."""
    words = [p for p in pieces if not p.startswith("[")]
    cased = sum(p != p.lower() for p in words)
    if asked is not None and declared is not None and asked != declared:
        raise UserError(
            f"lowercase: {str(asked).lower()}, but {vocab.parent} was trained with "
            f"{str(declared).lower()}"
        )
    known = declared if declared is not None else asked
    few = cased <= _CASED_SHARE * len(words)
    lowercase = known if known is not None else few
    if lowercase and not few:
        told = "; do_lower_case of its tokenizer_config.json is wrong" if declared else ""
        raise UserError(f"{vocab}: has upper-case pieces, but the text would be lower-cased{told}")
    if declared is None and not lowercase and not cased:
        raise UserError(f"{vocab}: has no upper-case piece, but the text would keep its case")
    return lowercase
