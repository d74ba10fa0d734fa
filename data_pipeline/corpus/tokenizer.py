"""WordPiece as BERT has it: train a vocabulary, encode, decode, word starts.

Encoding equals Hugging Face's BertTokenizer, save that text which spells a special token
("[MASK]") stays text, as in google-research/bert. The ids of each word of ASCII (a run of letters
and digits, or a punctuation mark) and of each chunk of other text between white space, across which
the library never looks, are remembered and looked up. Where a self-check at construction finds
another answer than the library's, the library is used for all text.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import tokenizers

from core.errors import UserError
from core.urls import NotThere, join, read
from data_pipeline.corpus.manifest import (
    VOCAB,
    Manifest,
    load_manifest,
    load_vocabulary,
    vocab_bytes,
)
from data_pipeline.corpus.sentences import slices

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_WORD_CHARACTERS = 100
_LONG_CHUNK = re.compile(rf"\S{{{MAX_WORD_CHARACTERS + 1},}}")
ALPHABET = 1000  # most different characters of a trained vocabulary
REMEMBERED = 1 << 18  # words, whose ids are kept
# The library deletes control characters, also within a word, and Python splits at some: only the
# library is right then. Two of them, never in a text that is looked up, mark places in it.
_SENTENCE_END, _NOT_ASCII = "\x1c\x1d"
_DELETED = "".join(map(chr, (*range(9), 11, 12, *range(14, 28), 29, 30, 31, 127, 133)))
ASCII_WORDS = re.compile(r"[A-Za-z0-9]+|[^A-Za-z0-9 \t\n\r]")
_NO_PIECE = re.compile("[ \t\r\n\ud800-\udfff]")
_UNUSED = re.compile(r"\[unused\d+\]")

_SELF_CHECK = (
    "The quick brown fox, isn't it?  $3.50 (e.g. 1,000%) U.S.A. <tag> a_b-c@d.org x^2 ~ `` |",
    "Crème brûlée naïve ﬁancé İstanbul ΑΣ ẞ ǅ e\u0301 n\u0303 \u0301x",
    "日本語 text 中文字 한국어 ไทย عربى हिन्दी \U0001f600 emoji👍🏽 \U00020000",
    "zero\u200bwidth soft\u00adhyphen nb\u00a0sp thin\u2009sp ideo\u3000sp",
    "\ufeffbom \ufffd replaced \u2028 line \u2029 paragraph",
    "“quotes” ‘single’ – — … «guillemets» ¿qué? ½ ² № ™ € £",
    "[MASK] [CLS] [unused1] ##ing " + "x" * 101 + " " + "y" * 100,
    "tab\tnew\nline\rreturn \x00nul \x07bell \x7fdel \x85nel \x0bvt \x1ffs",
)


class Tokenizer:
    """A WordPiece vocabulary at work.

    pad_id, unk_id, cls_id, sep_id, mask_id: looked up in the vocabulary, never assumed.
    word_start: bool [V], the piece does not begin with ##.
    ordinary_ids: int64, the ids a random replacement may take: no special, no [unusedN].
    """

    def __init__(self, pieces: Sequence[str], lowercase: bool, name: str = VOCAB) -> None:
        self.pieces = list(pieces)
        self.lowercase = lowercase
        self.ids = {piece: number for number, piece in enumerate(self.pieces)}
        if len(self.ids) != len(self.pieces):
            twice = next(p for number, p in enumerate(self.pieces) if self.ids[p] != number)
            raise UserError(f"{name}: piece {twice!r} stands there twice")
        if len(self.pieces) > 65536:
            raise UserError(
                f"{name}: {len(self.pieces)} pieces; ids are 16 bits wide, so at most 65,536"
            )
        for token in SPECIAL_TOKENS:
            if token not in self.ids:
                raise UserError(f"{name}: no line {token}; is it a BERT vocabulary?")
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (
            self.ids[token] for token in SPECIAL_TOKENS
        )
        self.word_start = np.array([not piece.startswith("##") for piece in self.pieces])
        self.ordinary_ids = np.array(
            [
                number
                for number, piece in enumerate(self.pieces)
                if not (piece[:1] == "[" and (piece in SPECIAL_TOKENS or _UNUSED.fullmatch(piece)))
            ],
            dtype=np.int64,
        )
        self._library = tokenizers.Tokenizer(
            tokenizers.models.WordPiece(
                self.ids, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARACTERS
            )
        )
        self._library.normalizer = _normalizer(lowercase)
        self._library.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        self._of_words = tokenizers.Tokenizer(self._library.model)
        self._of_words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        self._forget()
        self.quick = True
        if any(self.encode(text) != self._library.encode(text).ids for text in _SELF_CHECK):
            self.quick = False
        self._forget()

    @classmethod
    def from_file(cls, path: str | Path, lowercase: bool) -> Tokenizer:
        """From a vocab.txt. UserError names the file and what is wrong."""
        return cls(cls.pieces_of(path), lowercase, str(path))

    @classmethod
    def from_bytes(cls, data: bytes, manifest: Manifest, name: str) -> Tokenizer:
        """From the bytes of a dataset's vocab.txt; `name` is for messages. UserError where it has
        not as many pieces as the manifest says."""
        pieces, stated = _pieces(data, name), manifest.vocab_size
        if len(pieces) != stated:
            raise UserError(f"{name}: {len(pieces):,} pieces, the manifest says {stated:,}")
        return cls(pieces, manifest.lowercase, name)

    @classmethod
    def from_dataset(cls, directory: str | Path, manifest: Manifest | None = None) -> Tokenizer:
        """The tokenizer of a prepared dataset; UserError if its vocab.txt is not the manifest's."""
        manifest = manifest or load_manifest(directory)
        data = load_vocabulary(directory, manifest)
        return cls.from_bytes(data, manifest, join(directory, VOCAB))

    @staticmethod
    def pieces_of(path: str | Path) -> list[str]:
        """The pieces of a vocab.txt, one a line. UserError names the file and what is wrong."""
        try:
            return _pieces(read(path), str(path))
        except NotThere:
            raise UserError(f"{path}: no such vocabulary file") from None

    def __len__(self) -> int:
        return len(self.pieces)

    @property
    def sha256(self) -> str:
        """Of its vocab.txt, as a manifest has it."""
        return hashlib.sha256(vocab_bytes(self.pieces)).hexdigest()

    @property
    def unused_ids(self) -> list[int]:
        """Of the pieces [unusedN], in order."""
        return [number for number, piece in enumerate(self.pieces) if _UNUSED.fullmatch(piece)]

    def words(self, text: str) -> list[str]:
        """What the text is split into before pieces are looked for, normalised."""
        text = self._library.normalizer.normalize_str(text)
        return [word for word, _ in self._library.pre_tokenizer.pre_tokenize_str(text)]

    def encode(self, text: str) -> list[int]:
        """Ids of the text, without [CLS] and [SEP]."""
        return self.encode_sentences([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text."""
        ids, lengths = self.encode_sentences(texts)
        return (
            [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])] if len(texts) else []
        )

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """`encode`, and for each piece the characters [start, end) of the text it came from."""
        encoding = self._library.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def encode_sentences(self, sentences: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """All ids of all sentences, uint16 [tokens], and the number of each sentence's, int64
        [sentences]."""
        joined = _SENTENCE_END.join(sentences)
        marked = joined.count(_SENTENCE_END) >= max(1, len(sentences))
        if not self.quick or marked or any(c in joined for c in _DELETED):
            encodings = self._library.encode_batch(list(sentences))
            ids = np.fromiter(chain.from_iterable(e.ids for e in encodings), np.uint16)
            return ids, np.fromiter((len(e.ids) for e in encodings), np.int64, len(encodings))
        if not sentences:
            return np.empty(0, np.uint16), np.empty(0, np.int64)
        strange: list[str] = []
        if not joined.isascii():
            joined = _SENTENCE_END.join([_without_strange(s, strange) for s in sentences])
        words = ASCII_WORDS.findall(joined.lower() if self.lowercase else joined)
        numbers = self._numbers(words + strange)
        numbers, others = numbers[: len(words)], numbers[len(words) :]
        numbers[numbers == self._seen[_NOT_ASCII]] = others
        counts = self._counts[numbers]
        after = np.cumsum(counts)
        total = int(after[-1]) if len(after) else 0
        shift = np.repeat(self._starts[numbers] - (after - counts), counts)
        ids = self._flat[shift + np.arange(total)]
        ends = after[numbers == self._seen[_SENTENCE_END]]
        return ids, np.diff(ends, prepend=0, append=total)

    def decode(self, ids: Iterable[int]) -> str:
        """The pieces joined into words; what lower-casing and normalisation took is not given
        back."""
        return " ".join(self.pieces[i] for i in ids).replace(" ##", "")

    def _forget(self) -> None:
        # The marks are words of no pieces.
        self._seen: dict[str, int] = {_SENTENCE_END: 0, _NOT_ASCII: 1}
        self._flat = np.empty(0, np.uint16)
        self._starts = np.zeros(2, np.int32)
        self._counts = np.zeros(2, np.int32)

    def _numbers(self, words: list[str]) -> np.ndarray:
        """The place in the memory of each word; those never seen are encoded first."""
        numbers = np.fromiter(map(self._seen.get, words, repeat(-1)), np.int64, len(words))
        missing = np.flatnonzero(numbers < 0)
        if not len(missing):
            return numbers
        strange = [words[i] for i in missing.tolist()]
        new = dict.fromkeys(strange)
        if len(self._seen) + len(new) > REMEMBERED:
            self._forget()
            self._learn([word for word in dict.fromkeys(words) if word not in self._seen])
            return np.fromiter(map(self._seen.__getitem__, words), np.int64, len(words))
        self._learn(list(new))
        numbers[missing] = np.fromiter(map(self._seen.__getitem__, strange), np.int64, len(strange))
        return numbers

    def _learn(self, words: list[str]) -> None:
        # Words of the kind that `ASCII_WORDS` finds need no normalising, and all their pieces but
        # the first begin with ##: one text of them all can be taken apart again.
        easy = [word for word in words if word.isascii() and word.isprintable()]
        hard = [word for word in words if not (word.isascii() and word.isprintable())]
        encoding = self._of_words.encode_batch_fast([" ".join(easy)], add_special_tokens=False)[0]
        flat = np.array(encoding.ids, np.uint16)
        easy_counts = np.diff(np.flatnonzero(self.word_start[flat]), append=len(flat))
        encodings = self._library.encode_batch_fast(hard, add_special_tokens=False)
        hard_counts = np.array([len(e.ids) for e in encodings], np.int64)
        hard_flat = np.fromiter(chain.from_iterable(e.ids for e in encodings), np.uint16)
        counts = np.concatenate((easy_counts, hard_counts)).astype(np.int32)
        starts = (len(self._flat) + np.cumsum(counts) - counts).astype(np.int32)
        known = len(self._seen)
        self._seen.update(zip(easy + hard, range(known, known + len(words)), strict=True))
        self._flat = np.concatenate((self._flat, flat, hard_flat))
        self._starts = np.concatenate((self._starts, starts))
        self._counts = np.concatenate((self._counts, counts))


def _without_strange(sentence: str, strange: list[str]) -> str:
    """The sentence with a mark in place of each chunk that is not ASCII; those go to `strange`."""
    if sentence.isascii():
        return sentence
    chunks = sentence.split()
    strange += [chunk for chunk in chunks if not chunk.isascii()]
    return " ".join([chunk if chunk.isascii() else _NOT_ASCII for chunk in chunks])


def _normalizer(lowercase: bool) -> tokenizers.normalizers.Normalizer:
    return tokenizers.normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=lowercase
    )


def special_layout(unused: int) -> list[str]:
    """The head of a BERT vocabulary: [PAD], 99 [unusedN], the four others, the remaining
    [unusedN]."""
    names = [f"[unused{number}]" for number in range(unused)]
    return ["[PAD]", *names[:99], "[UNK]", "[CLS]", "[SEP]", "[MASK]", *names[99:]]


def train_vocabulary(texts: Iterable[str], *, size: int, lowercase: bool, unused: int) -> list[str]:
    """WordPiece vocabulary of `size` pieces at most, laid out as BERT's (uncased: 994 [unusedN],
    specials at 0, 100..103).

    `texts` are gone through twice. UserError when they are too poor or `size` too small.
    """
    head = special_layout(unused)
    # The library numbers single characters as its hash table happens to hold them, and ties
    # between merges are decided by those numbers: given all characters, it has no choice.
    normalizer = _normalizer(lowercase)
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalizer.normalize_str(text))
    characters = [c for c in counts if not c.isspace()]
    characters = sorted(sorted(characters, key=lambda c: (-counts[c], c))[:ALPHABET])
    inner = [f"##{c}" for c in characters]
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=size,
        special_tokens=[*head, *characters, *inner],
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        continuing_subword_prefix="##",
        show_progress=False,
    )
    trained = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    trained.normalizer = normalizer
    trained.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    split = trained.pre_tokenizer.pre_tokenize_str

    def words(chunk: re.Match[str]) -> str:
        pieces = map(normalizer.normalize_str, slices(chunk[0], 1 << 16))
        found = (word for piece in pieces for word, _ in split(piece))
        return " ".join(word for word in found if len(word) <= MAX_WORD_CHARACTERS)

    # A longer word is [UNK] whatever the pieces, and to train on it costs the square of its length.
    trained.train_from_iterator((_LONG_CHUNK.sub(words, text) for text in texts), trainer)
    ids = trained.get_vocab()
    pieces = sorted(ids, key=ids.__getitem__)
    if len(pieces) <= len(head):
        raise UserError("vocabulary: the sample held no text to train on")
    if len(pieces) > size:
        raise UserError(
            f"vocabulary.size: {size} leaves no room for {len(head)} specials and the alphabet; "
            f"say at least {len(pieces)}"
        )
    return pieces


def extend_vocabulary(
    base: Tokenizer, chunks: Mapping[str, int], most: int
) -> tuple[list[str], list[str], float]:
    """(pieces, the words in them that stand where `base` has [unusedN], share of tokens saved).

    chunks: how often the text has what stands between white space. Taken are the `most` words that
    cost `base` the most pieces too many: those it splits in several, each met twice or more.
    """
    counts: Counter[str] = Counter()
    for chunk, count in chunks.items():
        for word in base.words(chunk):
            counts[word] += count
    words = sorted(counts)
    before = [len(ids) for ids in base.encode_batch(words)]
    saved = {
        word: counts[word] * (pieces - 1)
        for word, pieces in zip(words, before, strict=True)
        if pieces > 1 and counts[word] > 1 and any(map(str.isalpha, word))
    }
    chosen = sorted(saved, key=lambda word: (-saved[word], word))[:most]
    pieces = list(base.pieces)
    for number, word in zip(base.unused_ids, chosen, strict=False):
        pieces[number] = word
    after = [len(ids) for ids in Tokenizer(pieces, base.lowercase).encode_batch(words)]
    old, new = (
        sum(counts[word] * n for word, n in zip(words, lengths, strict=True))
        for lengths in (before, after)
    )
    return pieces, chosen, 1 - new / max(1, old)


def is_line(piece: str) -> bool:
    """Whether a vocab.txt can hold it: its readers take any blank off a line's end."""
    return bool(piece) and piece == piece.rstrip() and not _NO_PIECE.search(piece)


def _pieces(data: bytes, name: str) -> list[str]:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 at byte {error.start}") from None
    if text.startswith("\ufeff"):
        raise UserError(f"{name}: begins with a byte order mark; save it as UTF-8 without one")
    pieces = [line.rstrip("\r") for line in text.split("\n")]
    while pieces and not pieces[-1]:
        pieces.pop()
    for number, piece in enumerate(pieces, 1):
        if not is_line(piece):
            what = "holds a blank" if piece else "is empty"
            raise UserError(f"{name}: line {number} {what}; a vocabulary has one piece a line")
    return pieces
