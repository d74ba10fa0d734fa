import bz2
import gzip
import random

import pytest
import zstandard

from data_pipeline.corpus import compressed
from data_pipeline.corpus.compressed import Broken, bzip2_blocks, chunks, numbered_lines
from data_pipeline.corpus.parts import Part, line_records
from data_pipeline.corpus.sources import SourceConfig

TEXT = "".join(f"line {i} {random.Random(i).getrandbits(200):x}\n" for i in range(40_000)).encode()


def lines(pieces):
    at = 0
    for found, line in numbered_lines(pieces):
        assert found == at
        at += len(line) + 1
        yield line


def zstd(data):
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


@pytest.mark.parametrize(
    ("ending", "pack"),
    [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".zst", zstd)],
)
def test_every_packing_gives_the_bytes_in_one_or_several_members(tmp_path, ending, pack):
    path = tmp_path / f"f{ending}"
    half = len(TEXT) // 2
    path.write_bytes(pack(TEXT[:half]) + pack(TEXT[half:]))
    assert b"".join(chunks(path)) == TEXT
    assert list(lines(chunks(path))) == TEXT.splitlines()


@pytest.mark.parametrize(
    ("ending", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".zst", zstd)]
)
def test_a_cut_or_corrupt_file_gives_what_can_be_read_then_says_where(tmp_path, ending, pack):
    path = tmp_path / f"f{ending}"
    packed = pack(TEXT)
    path.write_bytes(packed[: len(packed) * 3 // 4])
    found = []
    with pytest.raises(Broken, match="ends early"):
        found.extend(lines(chunks(path)))
    assert found == TEXT.splitlines()[: len(found)]
    # bzip2 and zstd give whole blocks, gzip gives everything up to the cut.
    assert len(found) > 0.1 * TEXT.count(b"\n") or ending == ".zst"
    flipped = bytearray(packed)
    flipped[len(flipped) // 2] ^= 0xFF
    path.write_bytes(flipped)
    with pytest.raises(Broken):
        list(chunks(path))


@pytest.mark.parametrize("streams", [1, 3])
def test_bzip2_parts_together_are_the_file(tmp_path, streams):
    path = tmp_path / "f.bz2"
    step = -(-len(TEXT) // streams)
    # Level 1 has blocks of 100 kB: many of them, beginning at any bit.
    path.write_bytes(
        b"".join(bz2.compress(TEXT[i : i + step], 1) for i in range(0, len(TEXT), step))
    )
    size = path.stat().st_size
    for parts in (1, 2, 3, 7):
        cuts = [size * i // parts for i in range(parts + 1)]
        found = []
        for start, end in zip(cuts[:-1], cuts[1:], strict=True):
            for at, data in bzip2_blocks(path, start):
                if at >= end:
                    break
                found.append(data)
        assert b"".join(found) == TEXT
        assert len(found) >= 15


def test_a_block_mark_across_two_reads_is_found(tmp_path, monkeypatch):
    path, text = tmp_path / "f.bz2", TEXT[:500_000]
    path.write_bytes(bz2.compress(text, 1))
    at = [at for at, _ in bzip2_blocks(path)][3]
    for cut in range(1, 7):
        monkeypatch.setattr(compressed, "CHUNK", at + cut)
        assert b"".join(data for _, data in bzip2_blocks(path)) == text


def test_a_flipped_bzip2_block_costs_only_itself(tmp_path):
    path = tmp_path / "f.bz2"
    packed = bytearray(bz2.compress(TEXT, 1))
    packed[len(packed) // 2] ^= 0x10
    path.write_bytes(packed)
    blocks = [data for _, data in bzip2_blocks(path)]
    broken = [data for data in blocks if isinstance(data, Broken)]
    assert len(broken) == 1 and "corrupt" in broken[0].what
    good = b"".join(data for data in blocks if isinstance(data, bytes))
    assert len(TEXT) - 110_000 < len(good) < len(TEXT)
    path.write_bytes(packed[: len(packed) // 4])
    *_, last = [data for _, data in bzip2_blocks(path)]
    assert isinstance(last, Broken) and "ends early" in last.what


def test_a_block_without_its_mark_is_named(tmp_path):
    """Also the first block of a stream, which no block stands before."""
    path = tmp_path / "f.bz2"
    one = bz2.compress(TEXT[:300_000], 1)
    path.write_bytes(one + one)
    marks = [at for at, _ in bzip2_blocks(path)]
    assert marks[0] == 4
    for at in marks:
        packed = bytearray(one + one)
        packed[at + 2] ^= 0x10
        path.write_bytes(packed)
        found = [data for _, data in bzip2_blocks(path)]
        assert [data for data in found if isinstance(data, Broken)], at
    for rest, words in ((b"rest", ["bytes after the end"]), (bytes(9), [])):
        path.write_bytes(one + rest)
        what = [data.what for _, data in bzip2_blocks(path) if isinstance(data, Broken)]
        assert [w in said for w, said in zip(words, what, strict=True)] == [True] * len(words)
    path.write_bytes(b"no bzip2 data at all")
    assert [data.what for _, data in bzip2_blocks(path)] == [
        "not bzip2 data, though its name says so"
    ]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, zstd])
def test_checked_bytes_are_those_that_a_sum_vouches_for(tmp_path, pack):
    path = tmp_path / "f"
    first, second = pack(TEXT[:70_000]), pack(TEXT[70_000:])
    for packed in (first + second[:-9], first + second[: len(second) // 2] + second):
        path.write_bytes(packed)
        given = b""
        with pytest.raises(Broken):
            for piece in chunks(path, checked=True):
                given += piece
        assert TEXT.startswith(given) and len(given) >= 70_000
        assert pack is bz2.compress or len(given) == 70_000
    path.write_bytes(first + second)
    assert b"".join(chunks(path, checked=True)) == TEXT


@pytest.mark.parametrize("parts", [1, 5, 64])
def test_ranges_of_a_plain_file_give_each_line_once(tmp_path, parts):
    path = tmp_path / "f"
    text = TEXT[:5000]
    path.write_bytes(text)
    source = SourceConfig(name="s", kind="text", path=str(path))
    cuts = [len(text) * i // parts for i in range(parts + 1)]
    found = []
    for start, end in zip(cuts[:-1], cuts[1:], strict=True):
        given = source.input(str(path), "f", Part(start, end), checked=False, told=pytest.fail)
        for at, line, _ in line_records(given):
            assert text[at : at + len(line)] == line
            found.append(line)
    assert found == text.splitlines()
