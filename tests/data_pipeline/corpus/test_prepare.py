import bz2
import contextlib
import errno
import gzip
import hashlib
import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from configs.load import load
from core.errors import TryAgain, UserError
from data_pipeline.corpus import assembly, job, source_map, store
from data_pipeline.corpus import prepare as module
from data_pipeline.corpus.manifest import SOURCES, Manifest, load_manifest
from data_pipeline.corpus.prepare import PrepareConfig, Ranks, prepare
from data_pipeline.corpus.shards import iterate_documents, read_index
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.corpus.units import cut_sentences
from data_pipeline.corpus.verify import verify
from tests.data_pipeline.corpus.text import (
    WORDS,
    document,
    dump,
    sentence,
    vocabulary,
    wikiextractor,
    write_config,
    write_vocabulary,
)

ROOT = Path(__file__).parents[3]
MPIEXEC = Path(sys.executable).parent / "mpiexec"
mpi = pytest.mark.mpi


@pytest.fixture
def corpus(tmp_path):
    """A vocabulary, a WikiExtractor folder of 60 pages and 8 books; returns the two sources."""
    write_vocabulary(tmp_path / "vocab.txt")
    wiki, books = tmp_path / "wiki", tmp_path / "books"
    wiki.mkdir()
    books.mkdir()
    for part in range(4):
        text = wikiextractor(range(15 * part, 15 * part + 15))
        (wiki / f"wiki_{part:02d}").write_text(text)
    for book in range(8):
        paragraphs = [p for seed in range(5) for p in document(1000 + 10 * book + seed, 6)]
        (books / f"book{book}.txt").write_text("\n\n".join(paragraphs))
    return [
        {"name": "wiki", "kind": "wikiextractor", "path": str(wiki), "licence": "CC BY-SA"},
        {"name": "books", "kind": "books", "path": str(books)},
    ]


def make(
    tmp_path, sources, name="out", ranks=None, fresh=False, strict=False, rejects=None, **more
):
    """Runs the job in this process; returns the manifest."""
    config = write_config(
        tmp_path / f"{name}.yaml",
        tmp_path / "vocab.txt",
        sources,
        **{"out": str(tmp_path / name), **more},
    )
    settings = load(config, PrepareConfig)
    return prepare(settings, ranks or Ranks(), fresh=fresh, strict=strict, rejects=rejects)


def command(ranks, *arguments):
    """(argv, environment) of a job started as a user starts it."""
    argv = [sys.executable, "-m", "data_pipeline", "prepare", *map(str, arguments)]
    if ranks:
        argv = [str(MPIEXEC), "-n", str(ranks), *argv]
    hidden = ("PMI_", "MPI_", "SLURM_", "OMPI_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    return argv, {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def run(ranks, *arguments, **environment):
    argv, variables = command(ranks, *arguments)
    return subprocess.run(
        argv, env={**variables, **environment}, capture_output=True, text=True, timeout=120
    )


def bytes_of(folder):
    """Name -> sha256 of all that a dataset consists of."""
    names = [
        p
        for p in folder.iterdir()
        if p.suffix in (".tar", ".idx") or p.stem in ("manifest", "sources", "vocab")
    ]
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in names}


# --- what comes out


def test_every_document_is_in_exactly_one_shard(tmp_path, corpus):
    manifest = make(tmp_path, corpus)
    out = tmp_path / "out"
    found = {s: [d.id for d in iterate_documents(out, s)] for s in ("train", "heldout")}
    expected = [str(n) for n in range(60)] + [f"book{n}" for n in range(8)]
    assert sorted(found["train"] + found["heldout"]) == sorted(expected)
    assert found["heldout"]
    assert len(manifest.split("train")) > 2
    assert [s.documents_out for s in manifest.sources] == [60, 8]
    assert manifest.sources[0].licence == "CC BY-SA"
    tokenizer = Tokenizer.from_dataset(out)
    for split in ("train", "heldout"):
        for record in iterate_documents(out, split):
            if manifest.sources[record.source].name == "wiki":
                text = " ".join(tokenizer.decode(s.tolist()) for s in record.sentences())
                wanted = tokenizer.decode(tokenizer.encode(" ".join(document(int(record.id)))))
                assert text == wanted
    written = (out / SOURCES).read_bytes()
    assert source_map.main([str(out)]) == 0 and (out / SOURCES).read_bytes() == written
    assert verify(out) == []
    assert not (out / "work").exists()


def test_counts_of_the_manifest_are_those_of_the_shards(tmp_path, corpus):
    manifest = make(tmp_path, corpus)
    for shard in manifest.shards:
        index = read_index(tmp_path / "out" / f"{shard.name}.idx")
        assert int(index.sentence_lengths.sum()) == shard.tokens
    assert sum(s.tokens for s in manifest.shards) == sum(s.tokens for s in manifest.sources)
    words = sum(len(p.split()) for n in range(60) for p in document(n))
    assert manifest.sources[0].words == words


def test_long_sentences_are_cut_between_words_and_nothing_is_lost(tmp_path, corpus):
    whole = make(tmp_path, corpus)
    cut = make(tmp_path, corpus, "cut", max_sentence_tokens=8)
    assert [s.tokens for s in cut.sources] == [s.tokens for s in whole.sources]
    starts = Tokenizer.from_dataset(tmp_path / "cut").word_start
    total = 0
    for record in iterate_documents(tmp_path / "cut"):
        assert record.lengths.max() <= 8
        for piece in record.sentences():
            total += 1
            assert starts[piece[0]]
    assert cut.sources[0].notes["cut sentences"] > 0
    long = np.array([1, 9, 9, 2, 9, 9, 9, 9, 9])
    is_start = np.array([True] * 9 + [False])
    assert cut_sentences(long, np.array([9]), 3, is_start).tolist() == [3, 3, 3]
    assert cut_sentences(long, np.array([4, 5]), 4, is_start).tolist() == [4, 4, 1]


# --- the same bytes


@mpi
def test_one_two_and_three_ranks_give_the_same_bytes(tmp_path, corpus):
    results = []
    for ranks in (0, 2, 3):
        out = tmp_path / f"out{ranks}"
        config = write_config(tmp_path / "c.yaml", tmp_path / "vocab.txt", corpus)
        done = run(ranks, "--config", config, "--out", out)
        assert done.returncode == 0, done.stderr
        assert f"{max(1, ranks)} rank" in done.stdout
        results.append(bytes_of(out))
    assert len(results[0]) > 6
    assert results[0] == results[1] == results[2]


@mpi
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_at_any_moment_and_started_again_gives_the_same_bytes(tmp_path, corpus, seed):
    config = write_config(
        tmp_path / "c.yaml", None, corpus, unit_bytes=4000, vocabulary={"size": 400, "unused": 10}
    )
    began = time.monotonic()
    whole = run(2, "--config", config, "--out", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    seconds = time.monotonic() - began
    random = np.random.Generator(np.random.Philox(seed))
    out = tmp_path / "out"
    kills = 0
    for attempt in range(6):
        argv, environment = command(2, "--config", config, "--out", out)
        job = subprocess.Popen(
            argv,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            # In the middle of what a whole run takes here, later from one attempt to the next.
            job.wait(timeout=seconds * float(random.uniform(0.4, 0.7) + 0.1 * attempt))
            job.stdout.close()
            assert job.returncode == 0
            break
        except subprocess.TimeoutExpired:
            kills += 1
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
            job.stdout.close()
            time.sleep(0.05)
    assert kills >= 1
    assert run(2, "--config", config, "--out", out).returncode == 0
    assert bytes_of(out) == bytes_of(tmp_path / "whole")
    assert verify(out) == []


class Interrupted(Exception):
    pass


def test_finished_units_are_not_done_again(tmp_path, corpus, monkeypatch):
    """Stops after every number of units in turn; each unit is worked on once in all."""
    real = module.make_record_unit
    worked: list[int] = []
    limit = 0

    def counted(job, store, texts, tokenizer, unit, checked):
        if len(worked) == limit:
            raise Interrupted
        worked.append(unit.number)
        return real(job, store, texts, tokenizer, unit, checked)

    monkeypatch.setattr(module, "make_record_unit", counted)
    manifest = None
    while manifest is None:
        limit += 1
        try:
            manifest = make(tmp_path, corpus, unit_bytes=8000)
        except Interrupted:
            pass
    assert limit > 4
    assert sorted(worked) == list(range(limit))
    monkeypatch.undo()
    assert make(tmp_path, corpus, "other", unit_bytes=8000) == manifest


def test_a_damaged_unit_is_done_again(tmp_path, corpus, monkeypatch):
    real = module.plan_assembly

    def stop(*_):
        raise Interrupted

    monkeypatch.setattr(module, "plan_assembly", stop)
    with pytest.raises(Interrupted):
        make(tmp_path, corpus)
    folder = tmp_path / "out" / "work" / "records"
    damaged = bytearray((folder / "000000.records").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (folder / "000000.records").write_bytes(damaged)
    with open(folder / "000001.records", "r+b") as file:
        file.truncate(100)
    (folder / "000002.json").unlink()
    (folder / "000003.json").write_text("[" * 100_000)
    monkeypatch.setattr(module, "plan_assembly", real)
    assert make(tmp_path, corpus) == make(tmp_path, corpus, "other")
    assert verify(tmp_path / "out") == []


@pytest.mark.parametrize(
    "name",
    ["work/text/000001.json", "work/text/vocabulary.json", "work/records/000002.json"]
    + ["work/shards/shard-000000.json", "shard-000000.tar", "shard-000000.idx"],
)
def test_of_a_half_done_job_what_is_damaged_is_done_again_and_no_more(
    tmp_path, corpus, monkeypatch, name
):
    def stop(*_):
        raise Interrupted

    vocabulary = {"vocabulary": {"size": 400, "unused": 10}}
    monkeypatch.setattr(module, "finish", stop)
    with pytest.raises(Interrupted):
        make(tmp_path, corpus, **vocabulary)
    monkeypatch.undo()
    path, whole = tmp_path / "out" / name, tmp_path / "out" / "shard-000001.tar"
    data = bytearray(path.read_bytes())
    # In JSON another letter or digit of the result, else any bit.
    at = next((m.end() for m in re.finditer(rb'"pieces"|"documents": ', data)), len(data) // 2)
    at = data.index(b"the", at) if "vocabulary" in name else at
    data[at] ^= 1
    path.write_bytes(data)
    shards = tmp_path / "out" / "work" / "shards"
    shutil.copy(shards / "shard-000002.json", shards / "shard-000003.json")
    written = whole.stat().st_ino
    manifest = make(tmp_path, corpus, **vocabulary)
    assert manifest == make(tmp_path, corpus, "other", **vocabulary)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "other")
    assert verify(tmp_path / "out") == []
    assert whole.stat().st_ino == written


def _cut(data: bytearray) -> None:
    del data[len(data) // 2 :]


def _flip(data: bytearray) -> None:
    data[len(data) // 2] ^= 1


def _zero(data: bytearray) -> None:
    data[:] = bytes(len(data))


@pytest.mark.parametrize("damage", [_cut, _flip, _zero, bytearray.clear])
@pytest.mark.parametrize(
    ("step", "name"),
    [("vocabulary", "text/000001.text"), ("make_record_unit", "text/000001.text")]
    + [("plan_assembly", "records/000001.table"), ("plan_assembly", "records/000001.minhash")]
    + [("write_shards", "records/000001.table"), ("write_shards", "records/000001.records")]
    + [("plan_assembly", "records/000001.json"), ("make_record_unit", "text/000001.json")],
)
def test_what_is_damaged_between_two_steps_of_a_start_is_told(
    tmp_path, corpus, monkeypatch, step, name, damage
):
    """A working file lies for hours: a disk or another program may change it, the tally not."""
    near = {"exact": True, "near": True}
    settings = {"vocabulary": {"size": 400, "unused": 10}, "duplicates": near}
    real, path = getattr(module, step), tmp_path / "out/work" / name

    def first_damage(*arguments):
        if not damaged:
            data = bytearray(path.read_bytes())
            damage(data)
            path.write_bytes(data)
            damaged.append(path)
        return real(*arguments)

    damaged: list[Path] = []
    told = f"out/work/.*{path.name}"
    monkeypatch.setattr(module, step, first_damage)
    with pytest.raises(UserError, match=f"{told}.* is not what was written; run the same"):
        make(tmp_path, corpus, **settings)
    assert make(tmp_path, corpus, **settings) == make(tmp_path, corpus, "other", **settings)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "other")


@pytest.mark.parametrize("name", ["records", "table"])
def test_a_pipe_in_place_of_a_working_file_is_not_waited_for(tmp_path, corpus, monkeypatch, name):
    real, path = module.write_shards, tmp_path / f"out/work/records/000001.{name}"

    def first_replace(*arguments):
        path.unlink()
        os.mkfifo(path)
        return real(*arguments)

    monkeypatch.setattr(module, "write_shards", first_replace)
    with pytest.raises(UserError, match=f"000001.{name}: not a regular file"):
        make(tmp_path, corpus)
    monkeypatch.undo()
    assert make(tmp_path, corpus) == make(tmp_path, corpus, "other")


def test_names_of_files_are_those_of_their_bytes_in_any_locale(tmp_path):
    write_vocabulary(tmp_path / "vocab.txt")
    folder = tmp_path / "texts"
    folder.mkdir()
    for n, name in enumerate(["\u00e4", "\u4e2d\u6587", "z"]):
        (folder / f"{name}.txt").write_text("\n".join(document(n)), encoding="utf-8")
    source = {"name": "s", "kind": "text", "path": str(folder)}
    config = write_config(tmp_path / "c.yaml", tmp_path / "vocab.txt", [source])
    for out, locale in (("utf8", "C.UTF-8"), ("ascii", "C")):
        done = run(0, "--config", config, "--out", tmp_path / out, LC_ALL=locale, PYTHONUTF8="0")
        assert done.returncode == 0, done.stderr
    assert bytes_of(tmp_path / "utf8") == bytes_of(tmp_path / "ascii")


def test_units_and_ranks_do_not_matter_but_the_seed_does(tmp_path, corpus):
    a = make(tmp_path, corpus, "a")
    b = make(tmp_path, corpus, "b", seed=1)
    assert a.dataset_id != b.dataset_id
    assert [s.tokens for s in a.sources] == [s.tokens for s in b.sources]


# --- starting again


def test_a_second_run_uses_what_is_there(tmp_path, corpus, capsys):
    first = make(tmp_path, corpus)
    times = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}
    (tmp_path / "out/work/records").mkdir(parents=True)  # a kill came before it was removed
    assert make(tmp_path, corpus) == first
    out = capsys.readouterr().out
    assert "all is done already" in out and "`python -m data_pipeline verify" in out
    assert times == {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}


def test_a_changed_config_or_source_is_refused_until_fresh(tmp_path, corpus):
    make(tmp_path, corpus)
    with pytest.raises(UserError, match=r"config.max_sentence_tokens was 512, is 99.*--fresh"):
        make(tmp_path, corpus, max_sentence_tokens=99)
    with open(tmp_path / "wiki" / "wiki_03", "a") as file:
        file.write(wikiextractor([200]))
    with pytest.raises(UserError, match="wiki_03 has changed.*--fresh"):
        make(tmp_path, corpus)
    manifest = make(tmp_path, corpus, fresh=True)
    assert manifest.sources[0].documents_out == 61
    assert verify(tmp_path / "out") == []
    (tmp_path / "wiki" / "wiki_04").write_text(wikiextractor([201]))
    with pytest.raises(UserError, match="wiki_04 is new"):
        make(tmp_path, corpus)


def test_foreign_folders_are_refused_and_left_alone(tmp_path, corpus):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    for fresh in (False, True):
        with pytest.raises(UserError, match="out: holds other files"):
            make(tmp_path, corpus, fresh=fresh)
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]
    make(tmp_path, corpus, "a")
    (tmp_path / "a" / "prepare.json").unlink()
    before = bytes_of(tmp_path / "a")
    for fresh in (False, True):
        with pytest.raises(UserError, match="holds another dataset"):
            make(tmp_path, corpus, "a", fresh=fresh)
    assert bytes_of(tmp_path / "a") == before


def test_fresh_makes_the_dataset_again_and_keeps_what_is_not_its_own(tmp_path, corpus):
    first, out = make(tmp_path, corpus), tmp_path / "out"
    mine = ["notes.txt", "heldout-notes.txt", "shard-000000-read.md", "shard-x.tar", ".a.tar.part"]
    for name in mine:
        (out / name).write_text("mine")
    (out / "shard-tools").mkdir()
    left = ["shard-000777.tar", "heldout-1000000.idx", ".shard-000000.tar.9999999.part"]
    left.append(".manifest.json.9999999.part")
    for name in left:
        (out / name).write_text("left")
    assert make(tmp_path, corpus, seed=1, fresh=True) != first
    assert all((out / name).read_text() == "mine" for name in mine)
    assert (out / "shard-tools").is_dir() and not any((out / name).exists() for name in left)
    assert verify(out) == []


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", '{"config": [], "files": {"a": 1}}', '{"config": {}, "files": [[1], 2, "x"]}']
    + ['{"config": {}, "files": null}', "[" * 100_000, '{"config": {}, "files": [["", [], 1, 2]]}'],
)
def test_a_damaged_state_of_the_job_is_one_line(tmp_path, text):
    write_vocabulary(tmp_path / "vocab.txt")
    (tmp_path / "a.txt").write_text(" ".join(document(1)))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "prepare.json").write_text(text)
    with pytest.raises(UserError, match=r"prepare.json: cannot be read; use --fresh"):
        make(tmp_path, [{"name": "s", "kind": "text", "path": str(tmp_path / "a.txt")}])
    assert (tmp_path / "out" / "prepare.json").read_text() == text


def test_a_pipe_among_the_files_of_a_job_is_not_waited_for(tmp_path, corpus, monkeypatch):
    def stop(*_):
        raise Interrupted

    (tmp_path / "out").mkdir()
    os.mkfifo(tmp_path / "out" / "prepare.json")
    with pytest.raises(UserError, match="prepare.json: not a regular file"):
        make(tmp_path, corpus)
    monkeypatch.setattr(module, "plan_assembly", stop)
    with pytest.raises(Interrupted):
        make(tmp_path, corpus, "b")
    monkeypatch.undo()
    records = tmp_path / "b" / "work" / "records"
    for name in ("000000.json", "000001.table"):
        (records / name).unlink()
        os.mkfifo(records / name)
    assert make(tmp_path, corpus, "b") == make(tmp_path, corpus, "c")


def test_a_lost_shard_or_vocabulary_is_noticed(tmp_path, corpus):
    make(tmp_path, corpus)
    vocabulary = tmp_path / "out" / "vocab.txt"
    kept = vocabulary.read_bytes()
    vocabulary.write_bytes(kept[:-10])
    with pytest.raises(UserError, match=r"vocab.txt: missing or another.*--fresh"):
        make(tmp_path, corpus)
    vocabulary.unlink()
    with pytest.raises(UserError, match=r"vocab.txt: missing or another.*--fresh"):
        make(tmp_path, corpus)
    vocabulary.write_bytes(kept)
    (tmp_path / "out" / "sources.json").write_text("{")
    with pytest.raises(UserError, match=r"sources.json: .*data_pipeline sources DIR` writes it"):
        make(tmp_path, corpus)
    (tmp_path / "out" / "sources.json").unlink()  # as of an older data set
    make(tmp_path, corpus)
    (tmp_path / "out" / "shard-000001.tar").unlink()
    with pytest.raises(UserError, match=r"shard-000001.tar: missing.*--fresh"):
        make(tmp_path, corpus)
    for damaged in ("{", '{"format": 1}', '{"format": "bert-shards-1"}'):
        (tmp_path / "out" / "manifest.json").write_text(damaged)
        with pytest.raises(UserError, match=r"manifest.json: .*--fresh"):
            make(tmp_path, corpus)


# --- starting together


@mpi
def test_singletons_in_place_of_a_job_are_refused(tmp_path, corpus):
    config = write_config(tmp_path / "c.yaml", tmp_path / "vocab.txt", corpus)
    for variable in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        done = run(0, "--config", config, **{variable: "4"})
        assert done.returncode == 2
        assert re.search(
            rf"error: {variable}=4 processes were started, but MPI sees 1", done.stderr
        )
        assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_second_job_in_the_same_folder_is_refused(tmp_path, corpus):
    with module.locked(tmp_path / "out"), pytest.raises(UserError, match="another `prepare`"):
        make(tmp_path, corpus)
    make(tmp_path, corpus)


@mpi
def test_an_error_of_one_rank_ends_all_with_one_line(tmp_path, corpus):
    with open(tmp_path / "wiki" / "wiki_02", "a") as file:
        file.write('<doc id="99" url="x" title="T">\nnever ended')
    config = write_config(tmp_path / "c.yaml", tmp_path / "vocab.txt", corpus)
    done = run(3, "--config", config, "--strict")
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert len(errors) == 1 and "wiki_02" in errors[0] and "document 99" in errors[0]
    assert "Traceback" not in done.stderr
    (tmp_path / "file").write_text("")
    done = run(2, "--config", config, "--out", tmp_path / "file" / "out")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert done.returncode == 2 and len(errors) == 1 and "Not a directory" in errors[0]
    done = run(2, "--config", tmp_path / "none.yaml")
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path}/none.yaml: No such file or directory\n"


@mpi
@pytest.mark.parametrize("first", ["c.yaml", "none.yaml"])
def test_the_first_rank_s_config_is_that_of_all(tmp_path, corpus, first):
    """And none waits in MPI for a rank that has left."""
    write_config(tmp_path / "c.yaml", tmp_path / "vocab.txt", corpus)
    argv, variables = command(1, "--config", tmp_path / first)
    other = "none.yaml" if first == "c.yaml" else "c.yaml"
    argv += [":", *argv[1:-1], str(tmp_path / other)]
    done = subprocess.run(argv, env=variables, capture_output=True, text=True, timeout=120)
    if first == "c.yaml":
        assert done.returncode == 0 and (tmp_path / "out/manifest.json").exists()
    else:
        assert done.returncode == 2
        assert done.stderr == f"error: {tmp_path}/none.yaml: No such file or directory\n"


@mpi
@pytest.mark.parametrize(
    ("fails", "rank"),
    [("plan_job", 0), ("make_record_unit", 0), ("make_record_unit", 1), ("plan_assembly", 0)],
)
def test_a_disk_that_does_not_answer_one_rank_is_85_of_all(tmp_path, corpus, fails, rank):
    config = write_config(tmp_path / "c.yaml", tmp_path / "vocab.txt", corpus)
    argv, variables = command(2, "--config", config)
    program = f"""
import errno, os, sys
from data_pipeline import __main__
from data_pipeline.corpus import prepare
make = prepare.{fails}
def fail(*arguments):
    if int(os.environ["PMI_RANK"]) == {rank}:
        raise OSError(errno.EIO, "Input/output error", "/x")
    return make(*arguments)
prepare.{fails} = fail
sys.exit(__main__.main(sys.argv[1:]))
"""
    argv[argv.index("-m") : argv.index("prepare")] = ["-c", program]
    done = subprocess.run(argv, env=variables, capture_output=True, text=True, timeout=120)
    said = done.stderr.splitlines()
    assert done.returncode == 85 and said[-1] == "error: /x: Input/output error"


@mpi
def test_a_folder_that_the_ranks_do_not_share_is_one_line(tmp_path, corpus):
    config = write_config(tmp_path / "c.yaml", tmp_path / "vocab.txt", corpus, out="out")
    argv, variables = command(1, "--config", config)
    program = "import sys; from core import files; from data_pipeline import __main__; "
    program += "files.SHOWN_WITHIN = 1; sys.exit(__main__.main(sys.argv[1:]))"
    argv[argv.index("-m") : argv.index("prepare")] = ["-c", program]
    for node in ("a", "b"):
        (tmp_path / node).mkdir()
    argv = [argv[0], "-wdir", tmp_path / "a", *argv[1:], ":", "-wdir", tmp_path / "b", *argv[1:]]
    done = subprocess.run(argv, env=variables, capture_output=True, text=True, timeout=120)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert done.returncode == 2 and len(errors) == 1
    assert re.search("out: on .* another folder than the one that the first rank", errors[0])
    assert list((tmp_path / "b").iterdir()) == []


def ranks_of(mpiexec):
    """Rank -> pid of the processes below `mpiexec`."""
    children, found = [mpiexec], {}
    for pid in children:
        children += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if word.startswith(b"PMI_RANK="):
                found.setdefault(int(word[9:]), pid)
    return found


def alive(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    return False


@mpi
@pytest.mark.parametrize(
    ("number", "rank"), [(signal.SIGINT, 0), (signal.SIGINT, 1), (signal.SIGHUP, 1)]
)
def test_ctrl_c_or_a_hangup_of_one_rank_ends_all(tmp_path, corpus, number, rank):
    config = write_config(tmp_path / "c.yaml", tmp_path / "vocab.txt", corpus)
    argv, variables = command(2, "--config", config)
    program = "import sys, time; from data_pipeline.corpus import prepare; "
    program += "prepare.make_text_unit = prepare.make_record_unit = lambda *_: time.sleep(600); "
    program += "prepare.main(sys.argv[1:])"  # so that the job cannot end before
    argv[argv.index("-m") :] = ["-c", program, "--config", config]
    with subprocess.Popen(
        argv, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        assert any("2 ranks" in line for line in job.stdout)
        pids = ranks_of(job.pid)
        maps = Path(f"/proc/{pids[0]}/maps").read_text()
        shared = set(re.findall(r"/dev/shm/mpich_shm_\w+", maps))
        os.kill(pids[rank], number)
        try:
            said = job.communicate(timeout=60)[1]
        finally:
            job.kill()
    told = "stopped by Ctrl-C" in said or number == signal.SIGHUP
    assert job.returncode != 0 and told and "Traceback" not in said
    assert shared and not any(map(os.path.exists, shared))
    end = time.monotonic() + 30
    while any(alive(pid) for pid in pids.values()):
        assert time.monotonic() < end
        time.sleep(0.05)


@mpi
def test_ctrl_c_ends_a_rank_that_waits_for_one_that_never_comes():
    argv, variables = command(2)
    program = "import os, sys; from data_pipeline.corpus import prepare; "
    program += "os.environ['PMI_RANK'] == '1' and sys.exit(130); "
    program += "print('waits', flush=True); prepare.join_ranks()"
    argv[argv.index("-m") :] = ["-c", program]
    with subprocess.Popen(argv, env=variables, stdout=subprocess.PIPE, text=True) as job:
        try:
            assert job.stdout.readline() == "waits\n"
            time.sleep(1)  # within MPI
            os.kill(ranks_of(job.pid)[0], signal.SIGINT)
            assert job.wait(timeout=20) != 0
        finally:
            job.kill()


@mpi
@pytest.mark.parametrize("other", [["bash", "-c", "sleep 1; exit 1"], ["/no/such/program"]])
def test_a_rank_that_never_begins_is_waited_for_so_long(other):
    argv, variables = command(1)
    program = "from data_pipeline.corpus import prepare; prepare.MPI_PATIENCE = 3; "
    program += "prepare.join_ranks()"
    argv[argv.index("-m") :] = ["-c", program, ":", "-n", "1", *other]
    done = subprocess.run(argv, env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 85
    assert "error: waited 3 s for the others: a rank has left, or never began\n" in done.stderr


@mpi
@pytest.mark.parametrize(
    ("end", "code", "last"),
    [
        ("os.kill(os.getpid(), signal.SIGINT)", 130, "stopped by Ctrl-C"),
        ("os.environ.update(PMI_SIZE='x')", 2, "error: PMI_SIZE=x: is no number of processes"),
        ("sys.stderr.write('usage'); sys.exit(2)", 2, "usage"),  # as argparse
        ("raise ImportError('none')", 1, "ImportError: none"),
    ],
)
def test_a_rank_that_leaves_before_mpi_has_begun_ends_all(tmp_path, corpus, end, code, last):
    config = write_config(tmp_path / "c.yaml", tmp_path / "vocab.txt", corpus)
    argv, variables = command(2, "--config", config)
    program = f"""
import os, signal, sys
from data_pipeline import __main__
class Finder:
    def find_spec(self, name, *_):
        if name == "data_pipeline.corpus.prepare" and os.environ["PMI_RANK"] == "1":
            {end}
sys.meta_path.insert(0, Finder())
sys.exit(__main__.main())
"""
    argv[argv.index("-m") : argv.index("prepare")] = ["-c", program]
    with subprocess.Popen(argv, env=variables, stderr=subprocess.PIPE, text=True) as job:
        try:
            said = job.communicate(timeout=20)[1]
        finally:
            job.kill()
    assert job.returncode == code and said.splitlines()[-1].endswith(last)


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=mpi)])
def test_threads_that_cannot_be_begun_are_one_line(tmp_path, corpus, ranks):
    config = write_config(tmp_path / "c.yaml", tmp_path / "vocab.txt", corpus)
    argv, variables = command(ranks, "--config", config)
    program = """
import sys
from data_pipeline import __main__
from data_pipeline.corpus import prepare
class PanicException(BaseException): pass  # as of a library in Rust
def plan_job(*_):
    raise PanicException("ThreadPoolBuildError { kind: IOError(Os { code: 11, ...")
prepare.plan_job = plan_job
sys.exit(__main__.main())
"""
    argv[argv.index("-m") : argv.index("prepare")] = ["-c", program]
    done = subprocess.run(argv, env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "error: no more threads can be begun" in done.stderr
    assert "Traceback" not in done.stderr


@mpi
def test_ranks_whose_output_nobody_reads_end_with_141(tmp_path, corpus):
    config = write_config(tmp_path / "c.yaml", tmp_path / "vocab.txt", corpus)
    argv, variables = command(2, "--config", config)
    program = "import os, sys; from data_pipeline import __main__; "
    program += "end, pipe = os.pipe(); os.close(end); os.dup2(pipe, 1); "
    program += "sys.exit(__main__.main(sys.argv[1:]))"
    argv[argv.index("-m") : argv.index("prepare")] = ["-c", program]
    done = subprocess.run(argv, env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 141 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[0] == "nobody reads the output"
    assert run(2, "--config", config).returncode == 0


@mpi
def test_a_rank_that_is_stopped_is_named_and_waited_for(tmp_path, corpus):
    config = write_config(tmp_path / "c.yaml", tmp_path / "vocab.txt", corpus)
    argv, variables = command(2, "--config", config)
    program = "from data_pipeline.corpus import prepare, ranks; import sys; ranks.SILENCE = 0.5"
    argv[argv.index("-m") :] = ["-c", f"{program}; prepare.main(sys.argv[1:])", "--config", config]
    with subprocess.Popen(argv, env=variables, stdout=subprocess.PIPE, text=True) as job:
        assert any("2 ranks" in line for line in job.stdout)
        stopped = ranks_of(job.pid)[1]
        os.kill(stopped, signal.SIGSTOP)
        try:
            assert any("waiting for 1 of 2 ranks (1): no word" in line for line in job.stdout)
            os.kill(stopped, signal.SIGCONT)
            assert any(line.startswith("dataset ") for line in job.stdout)
        finally:
            job.kill()


@mpi
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_last_job_may_fail_when_other_ranks_have_found_none_left(ranks):
    program = """if True:
        import sys, time
        from core.errors import TryAgain, main_guard
        from data_pipeline.corpus.prepare import join_ranks
        from data_pipeline.corpus.ranks import Stopped

        def work(_):
            time.sleep(0.5)
            raise TryAgain("the last one")

        def run():
            ranks = join_ranks()
            try:
                ranks.deal([1], work, print)
                ranks.first(lambda: print("went on"))
            except Stopped as stopped:
                return stopped.code

        sys.exit(main_guard(run))
    """
    argv, variables = command(ranks)
    argv[argv.index("-m") :] = ["-c", program]
    with subprocess.Popen(argv, env=variables, stderr=subprocess.PIPE, text=True) as job:
        try:
            said = job.communicate(timeout=20)[1]
        finally:
            job.kill()
    assert job.returncode == 85 and said == "error: the last one\n"


@pytest.mark.parametrize("value", ["abc", "2x", "²", "9" * 5000])
def test_a_launcher_s_size_that_is_no_number_is_one_line(monkeypatch, value):
    monkeypatch.setenv("PMI_SIZE", value)
    with pytest.raises(UserError, match="^PMI_SIZE=.* is no number of processes") as caught:
        module.join_ranks()
    assert len(str(caught.value)) < 200


def test_the_folder_of_the_command_line_is_any_name(tmp_path, corpus, monkeypatch, capsys):
    config = str(write_config(tmp_path / "c.yaml", tmp_path / "vocab.txt", corpus))
    monkeypatch.chdir(tmp_path)
    for name in ("2024-01-01", "a #1", "line\nend: [", "\udcff \x1b[31m"):
        assert module.main(["--config", config, "--out", name]) == 0
        assert load_manifest(Path(name)).shards
    assert "\x1b" not in capsys.readouterr().out
    with pytest.raises(UserError, match="out: "):
        module.main(["--config", config, "--out", "", "--fresh"])


# --- broken input


def test_broken_input_is_counted_and_the_job_goes_on(tmp_path, corpus, capsys):
    packed = bz2.compress(dump(range(300, 500)).encode(), 1)
    (tmp_path / "d.xml.bz2").write_bytes(packed[: len(packed) * 2 // 3])
    (tmp_path / "books" / "bad.txt").write_bytes(b"Some \xff words of a book that was hurt.")
    sources = [*corpus, {"name": "dump", "kind": "wikipedia", "path": str(tmp_path / "d.xml.bz2")}]
    manifest = make(tmp_path, sources)
    assert [s.notes.get("broken inputs", 0) for s in manifest.sources] == [0, 1, 1]
    assert 0 < manifest.sources[2].documents_out < 200
    printed = capsys.readouterr().out
    assert "bad.txt: bad, byte 5 of it: bad UTF-8" in printed
    assert re.search(r"d.xml.bz2: byte \d+: bzip2 data ends early", printed)
    with pytest.raises(UserError, match=r"(bad.txt|d.xml.bz2): .*\(--strict\)"):
        make(tmp_path, sources, "strict", strict=True)


def test_strict_stops_at_what_a_start_without_it_has_read(tmp_path, corpus, monkeypatch, capsys):
    (tmp_path / "books" / "bad.txt").write_bytes(b"Some \xff words of a book that was hurt.")
    with monkeypatch.context() as patched, pytest.raises(TypeError):
        patched.setattr(module, "write_shards", None)  # killed, once all was read
        make(tmp_path, corpus)
    with pytest.raises(UserError, match=r"bad.txt: .*\(--strict\)"):
        make(tmp_path, corpus, strict=True)
    make(tmp_path, corpus)
    make(tmp_path, corpus, strict=True)
    assert "--strict: nothing was read; --fresh reads" in "".join(capsys.readouterr())


def test_what_is_wrong_with_a_packed_file_is_counted_once(tmp_path, corpus, capsys):
    """However many parts read it."""
    packed = gzip.compress(wikiextractor(range(300, 500)).encode(), mtime=0)
    (tmp_path / "cut.gz").write_bytes(packed + packed[: len(packed) * 2 // 3])
    source = {"name": "cut", "kind": "wikiextractor", "path": str(tmp_path / "cut.gz")}
    manifest = make(tmp_path, [*corpus, source], unit_bytes=10_000)
    assert "cut.gz: byte" in capsys.readouterr().out
    assert manifest.sources[2].notes["broken inputs"] == 1


def test_a_source_that_yields_nothing_or_too_little_is_an_error_that_names_it(tmp_path, corpus):
    (tmp_path / "x.txt").write_text(wikiextractor([901]).replace("doc", "dok"))
    nothing = {"name": "odd", "kind": "wikiextractor", "path": str(tmp_path / "x.txt")}
    with pytest.raises(
        UserError, match="source odd: no document came out.*is kind wikiextractor right"
    ):
        make(tmp_path, [*corpus, nothing])
    (tmp_path / "y.txt").write_text(wikiextractor([902]) + "noise\n" * 20_000)
    little = {"name": "thin", "kind": "wikiextractor", "path": str(tmp_path / "y.txt")}
    with pytest.raises(UserError, match=r"source thin: only .* MB of text came out.*min_yield"):
        make(tmp_path, [*corpus, little], "b")
    assert make(tmp_path, [*corpus, {**little, "min_yield": 0}], "c")
    (tmp_path / "z.txt").write_text(" ")
    with tarfile.open(tmp_path / "z.tar", "w") as tar:
        tar.add(tmp_path / "z.txt", arcname="z.txt")
    with pytest.raises(UserError, match=r"source z: no document .*is kind text right\?$"):
        make(tmp_path, [{"name": "z", "kind": "text", "path": str(tmp_path / "z.tar")}], "d")


def test_signatures_that_find_no_room_say_why(tmp_path, corpus, monkeypatch):
    limits, plain = resource.getrlimit(resource.RLIMIT_FSIZE), store.Writer.file

    def with_little_room(writer, name):
        if name == "minhash":
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        return plain(writer, name)

    monkeypatch.setattr(store.Writer, "file", with_little_room)
    (tmp_path / "s.txt").write_text("\n\n".join(document(n)[0][:60] for n in range(30)))
    source = {"name": "s", "kind": "sentences", "path": str(tmp_path / "s.txt")}
    try:
        with pytest.raises(UserError, match="File too large"):
            make(tmp_path, [source], duplicates={"near": True})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_full_disk_and_missing_permission_are_one_line(tmp_path, corpus, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    def fsync(handle, plain=os.fsync):
        if "vocabulary.json" in os.readlink(f"/proc/self/fd/{handle}"):
            full()
        plain(handle)

    monkeypatch.setattr("core.files.os.fsync", full)
    with pytest.raises(UserError, match="the disk is full"):
        make(tmp_path, corpus)
    monkeypatch.setattr("core.files.os.fsync", fsync)
    with pytest.raises(UserError, match="the disk is full"):
        make(tmp_path, corpus, "trained", vocabulary={"size": 400, "unused": 10})
    assert (tmp_path / "trained/work/text/000000.json").exists()
    monkeypatch.undo()

    def silent(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("data_pipeline.corpus.assembly.read_table", silent)
    with pytest.raises(TryAgain, match="Input/output error"):
        make(tmp_path, corpus)
    monkeypatch.undo()
    make(tmp_path, corpus)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UserError, match="file"):
        make(tmp_path, corpus, "c", out=str(blocked / "sub"))
    with pytest.raises(UserError, match="file"):
        make(tmp_path, corpus, "e", rejects=blocked)
    assert not (tmp_path / "e" / "manifest.json").exists()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(UserError, match="not enough disk"):
        make(tmp_path, corpus, "d")


def stop_before_the_shards(monkeypatch, *arguments, **more):
    """A start of `make` that ends on a full disk when all units are done."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(UserError, match="the disk is full"):
        patch.setattr(module, "plan_assembly", full)
        make(*arguments, **more)


def test_what_a_start_has_written_already_is_not_asked_of_the_disk_again(
    tmp_path, corpus, monkeypatch
):
    stop_before_the_shards(monkeypatch, tmp_path, corpus)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    with pytest.raises(UserError, match="not enough disk"):
        make(tmp_path, corpus, "other")
    make(tmp_path, corpus)


def parquet(tmp_path):
    """A source of 40 row groups."""
    table = pyarrow.table({"text": [sentence(np.random.default_rng(n)) for n in range(400)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    return [{"name": "a", "kind": "parquet", "path": str(tmp_path / "a.parquet")}]


@pytest.mark.parametrize(
    ("number", "refused", "said"),
    [
        (errno.ESTALE, TryAgain, "Stale file handle"),
        (errno.EIO, TryAgain, "Input/output error"),
        (errno.EMFILE, UserError, "Too many open files"),
    ],
)
@pytest.mark.parametrize("place", ["read_metadata", "ParquetFile", "read"])
def test_a_disk_that_does_not_answer_is_no_damaged_parquet(
    tmp_path, corpus, monkeypatch, place, number, refused, said
):
    def fail(*_, **__):
        raise OSError(number, f"Failed to open. Detail: [errno {number}]")

    source = parquet(tmp_path)
    where = pyarrow.parquet if place != "read" else pyarrow.parquet.ParquetFile
    with monkeypatch.context() as patch, pytest.raises(refused) as caught:
        patch.setattr(where, "iter_batches" if place == "read" else place, fail)
        make(tmp_path, source, unit_bytes=2000)
    assert str(caught.value) == f"{source[0]['path']}: {said}"
    assert sum(s.documents for s in make(tmp_path, source, unit_bytes=2000).shards) == 400


def test_units_that_were_cut_otherwise_are_not_taken_for_these(tmp_path, corpus, monkeypatch):
    source = parquet(tmp_path)
    stop_before_the_shards(monkeypatch, tmp_path, source, unit_bytes=2000)
    with monkeypatch.context() as patch, pytest.raises(UserError, match="begun with other input"):
        patch.setattr("data_pipeline.corpus.sources.row_groups", lambda *_: 1)
        make(tmp_path, source, unit_bytes=2000)
    state = json.loads((tmp_path / "out/prepare.json").read_text())
    assert state.pop("units") and len(state) == 5
    (tmp_path / "out/prepare.json").write_text(json.dumps(state))  # as of an older version
    assert sum(s.documents for s in make(tmp_path, source, unit_bytes=2000).shards) == 400


def test_a_document_is_held_out_where_any_are_asked_for(tmp_path, corpus):
    few = make(tmp_path, corpus, heldout_fraction=1e-6)
    assert [shard.documents for shard in few.split("heldout")] == [1]
    more = make(tmp_path, corpus, "more", heldout_fraction=0.1)
    (first,) = (d.id for d in iterate_documents(tmp_path / "out", "heldout"))
    assert first in {d.id for d in iterate_documents(tmp_path / "more", "heldout")}
    assert sum(shard.documents for shard in more.split("heldout")) > 1
    manifest = make(tmp_path, corpus, "none", heldout_fraction=0)
    assert manifest.split("heldout") == ()
    for book in range(1, 8):
        (tmp_path / "books" / f"book{book}.txt").unlink()
    (tmp_path / "books/odd.txt.gz").write_text("Not packed.")
    none = "of 1 documents leave none to train on; .* kind sentences"
    with pytest.raises(UserError, match=f"{none}.* 1 broken inputs, the first .*odd.txt.gz"):
        make(tmp_path, corpus[1:], "one")
    rows = "".join(json.dumps({"id": 7, "text": f"A row of number {n}."}) + "\n" for n in range(9))
    (tmp_path / "rows.jsonl").write_text(rows)
    source = {"name": "rows", "kind": "jsonl", "path": str(tmp_path / "rows.jsonl")}
    with pytest.raises(UserError, match="of 9 documents of one id .id_column. leave none to train"):
        make(tmp_path, [source], "same")


def test_another_fraction_voids_no_finished_unit(tmp_path, corpus, monkeypatch):
    def stop(*_):
        raise Interrupted

    with monkeypatch.context() as patched:
        patched.setattr(module, "write_shards", stop)
        with pytest.raises(Interrupted):
            make(tmp_path, corpus)
    with monkeypatch.context() as patched:
        patched.setattr(module, "make_record_unit", stop)
        manifest = make(tmp_path, corpus, heldout_fraction=0.3)
    whole = make(tmp_path, corpus, "whole", heldout_fraction=0.3)
    assert manifest == whole and bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")
    with pytest.raises(UserError, match=r"heldout_fraction was 0.3, is 0.1; use --fresh"):
        make(tmp_path, corpus)


def test_a_vocabulary_that_the_text_cannot_fill_warns_with_a_figure(tmp_path, corpus, capsys):
    make(tmp_path, corpus, vocabulary={"size": 400, "unused": 10})
    said = capsys.readouterr().out
    size = int(re.search(r"warning: vocabulary.size: 400 pieces .* fills about (\d+)", said)[1])
    assert 210 <= size < 400
    characters = 1000 * len(document(1)[0])
    (tmp_path / "long.txt").write_text(
        "\n".join(f"{document(n)}" for n in range(characters // 400))
    )
    books = {"name": "long", "kind": "text", "path": str(tmp_path / "long.txt")}
    make(tmp_path, [*corpus, books], "b", vocabulary={"size": size, "unused": 10})
    assert "warning" not in capsys.readouterr().out


def test_a_source_that_gives_nothing_is_named_before_a_vocabulary_is_trained(tmp_path):
    (tmp_path / "a.jsonl").write_text("words\n" * 50)
    source = {"name": "mine", "kind": "jsonl", "path": str(tmp_path)}
    with pytest.raises(UserError, match="^source mine: no document.* 50 broken.* like plain text$"):
        make(tmp_path, [source], vocabulary={"size": 400, "unused": 10})


# --- duplicates, held-out, filters, vocabulary


def ids(out):
    return {d.id for split in ("train", "heldout") for d in iterate_documents(out, split)}


def test_exact_duplicates_keep_the_first_copy_over_all_sources(tmp_path, corpus):
    (tmp_path / "books" / "copy.txt").write_text(
        (tmp_path / "books" / "book3.txt").read_text().upper()
    )
    (tmp_path / "wiki" / "wiki_09").write_text(
        wikiextractor([7, 8]).replace('id="7"', 'id="70"').replace('id="8"', 'id="80"')
    )
    (tmp_path / "books" / "article.txt").write_text("\n".join(document(5)))
    manifest = make(tmp_path, corpus)
    found = ids(tmp_path / "out")
    assert not {"70", "80", "copy", "article"} & found
    assert {"7", "8", "5", "book3"} <= found
    assert [s.dropped for s in manifest.sources] == [{"exact duplicate": 2}, {"exact duplicate": 2}]
    kept = make(tmp_path, corpus, "kept", duplicates={"exact": False})
    assert sum(s.documents for s in kept.shards) == 72


def test_a_shard_of_every_second_document_reads_each_once(tmp_path):
    """Not the table of its unit for each, which takes the square of their number."""
    rows = ["repeated words" if n % 2 else f"words {n}" for n in range(4000)]
    lines = "".join(json.dumps({"text": row}) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(lines)
    write_vocabulary(tmp_path / "vocab.txt")
    source = {"name": "s", "kind": "jsonl", "path": str(tmp_path / "a.jsonl"), "min_yield": 0}

    def bytes_read():
        return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])

    before = bytes_read()
    manifest = make(tmp_path, [source], unit_bytes=10**9, shard_bytes=10**9)
    assert manifest.sources[0].documents_out == 2001
    assert bytes_read() - before < 60_000_000  # of whole tables 320 MB


def test_near_duplicates_by_key(tmp_path, corpus):
    text = (tmp_path / "books" / "book3.txt").read_text()
    random = np.random.Generator(np.random.Philox(5))
    (tmp_path / "books" / "edition.txt").write_text(f"{text}\n\n{sentence(random)}")
    (tmp_path / "books" / "half.txt").write_text(text[: len(text) // 2])
    make(tmp_path, corpus)
    assert {"edition", "half"} <= ids(tmp_path / "out")
    manifest = make(tmp_path, corpus, "near", duplicates={"near": True})
    found = ids(tmp_path / "near")
    assert "edition" not in found and {"half", "book3"} <= found
    assert manifest.sources[1].dropped == {"near duplicate": 1}


def test_held_out_documents_stay_held_out_when_the_corpus_grows(tmp_path, corpus):
    make(tmp_path, corpus, "small")
    (tmp_path / "wiki" / "wiki_00").write_text(wikiextractor([*range(500, 600), *range(15)]))
    make(tmp_path, corpus, "large")
    small = {d.id for d in iterate_documents(tmp_path / "small", "heldout")}
    large = {d.id for d in iterate_documents(tmp_path / "large", "heldout")}
    assert small < large
    assert not (ids(tmp_path / "small") - small) & large


def test_rejects_may_lie_in_the_dataset_folder(tmp_path, corpus):
    make(tmp_path, corpus, rejects=tmp_path / "out" / "rejects")
    assert (tmp_path / "out" / "rejects" / "broken.jsonl").exists()


def test_rejects_replace_no_file_but_their_own(tmp_path, corpus):
    (tmp_path / "books" / "tiny.txt").write_text("Only five words in this.")
    corpus[1]["filters"] = {"min_words": 10}
    rejects, mine = tmp_path / "rejects", tmp_path / "mine.jsonl"
    make(tmp_path, corpus, rejects=rejects)
    broken, sample = rejects / "broken.jsonl", rejects / "books" / "too_short.jsonl"
    written = sample.read_bytes()
    sample.write_text('{"id": "1", "text": "of an earlier run"}\n')
    broken.write_text('{"file": "a", "place": "b", "what": "of an earlier run"}\n')
    make(tmp_path, corpus, fresh=True, rejects=rejects)
    assert sample.read_bytes() == written and "earlier" not in broken.read_text()
    mine.write_text('{"text": "mine"}\n')
    for path in (broken, sample):
        path.unlink()
        for to in (path, mine):  # and through a link
            if to == mine:
                path.symlink_to(mine)
            else:
                path.write_text(mine.read_text())
            with pytest.raises(UserError, match=f"^--rejects: {path}: is there, and is no earlier"):
                make(tmp_path, corpus, fresh=True, rejects=rejects)
            assert to.read_text() == '{"text": "mine"}\n'
            path.unlink()
        os.mkfifo(path)
        with pytest.raises(UserError, match=f"^--rejects: {path}: not a regular file"):
            make(tmp_path, corpus, fresh=True, rejects=rejects)
        path.unlink()
    make(tmp_path, corpus, fresh=True, rejects=rejects)
    assert sample.read_bytes() == written
    of_others = '{"file": "a.py", "text": "mine"}\n'
    broken.write_text(of_others)
    with pytest.raises(UserError, match=f"^--rejects: {broken}: is there, and is no earlier"):
        make(tmp_path, corpus, fresh=True, rejects=rejects)
    assert broken.read_text() == of_others


def test_rejects_are_no_sources_and_stay(tmp_path, corpus):
    """Also where the rows of a source have their keys."""
    mine = tmp_path / "mine"
    source = {"kind": "jsonl", "filters": {"min_words": 10}}
    rows = {"broken": {"file": "a", "place": "b", "what": "c"}}
    rows["s/too_short"] = {"id": "1", "text": "Too few."}
    for name, row in rows.items():
        path = mine / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(row) + "\n" + json.dumps({key: "word " * 99 for key in row}) + "\n"
        path.write_text(text)
        sources = [source | {"name": "s", "path": str(path), "text_column": [*row][-1]}]
        with pytest.raises(UserError, match=f"^--rejects: {path}: is a file of the sources"):
            make(tmp_path, [*corpus, *sources], name.replace("/", "-"), rejects=mine)
        assert path.read_text() == text
    for inside in ("work", "work/rejects"):
        with pytest.raises(UserError, match="^--rejects: .*is removed at the end"):
            make(tmp_path, corpus, rejects=tmp_path / "out" / inside)


def test_files_of_others_in_the_folder_of_the_work_stay(tmp_path, corpus):
    work = tmp_path / "out" / "work"
    make(tmp_path, corpus)
    assert not work.exists()
    (work / "thesis").mkdir(parents=True)
    (work / "text").mkdir()
    (work / "records").mkdir()
    mine = {work / "thesis" / "chapter.txt", work / "text" / "chapter.txt", work / "000000.md"}
    for path in mine:
        path.write_text("mine")
    left = ("000000.json", "vocabulary.json", "shard-000000.json", ".000000.text.9999999.part")
    for fresh in (False, True):
        for name in left:
            (work / "text" / name).write_text("left")
        make(tmp_path, corpus, fresh=fresh)
        assert {path for path in work.rglob("*") if path.is_file()} == mine
        assert not (work / "records").exists()


@pytest.mark.parametrize("link", ["work", "work/text", "work/records"])
def test_nothing_is_removed_behind_a_link_in_place_of_the_work(tmp_path, corpus, link):
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    make(tmp_path, corpus)
    for name in ("000000.json", "text/000000.text", "shard-000000.json"):
        (scratch / name).parent.mkdir(parents=True, exist_ok=True)
        (scratch / name).write_text("mine")
    (out / link).parent.mkdir(exist_ok=True)
    (out / link).symlink_to(scratch)
    mine = sorted(scratch.rglob("*"))
    before = make(tmp_path, corpus)
    for begun in (False, True):
        if begun:
            (out / "manifest.json").rename(tmp_path / "manifest.json")
        with pytest.raises(UserError, match=f"{link}: is a link"):
            make(tmp_path, corpus, fresh=not begun)
        assert sorted(scratch.rglob("*")) == mine
    (tmp_path / "manifest.json").rename(out / "manifest.json")
    assert make(tmp_path, corpus) == before and sorted(scratch.rglob("*")) == mine


def test_the_vocabulary_of_the_folder_that_is_made_anew_is_no_input(tmp_path, corpus):
    make(tmp_path, corpus)
    out = tmp_path / "out"
    vocab = (out / "vocab.txt").read_bytes()
    for given in ({"path": str(out)}, {"extend": {"from": str(out / "vocab.txt"), "pieces": 1}}):
        with pytest.raises(UserError, match="lies in `out`"):
            make(tmp_path, corpus, fresh=True, vocabulary=given)
        assert (out / "vocab.txt").read_bytes() == vocab and (out / "manifest.json").exists()


@pytest.mark.parametrize("path", ["shard-000007.tar", "src", "src/*", "../link/src/a.txt"])
def test_a_source_in_the_folder_that_is_made_anew_is_none(tmp_path, corpus, path):
    make(tmp_path, corpus)
    out = tmp_path / "out"
    (out / "src").mkdir()
    (out / "src" / "a.txt").write_text("Words of a book.\n")
    (out / "shard-000007.tar").write_text("Words of a book.\n")
    (tmp_path / "link").symlink_to(out)
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    mine = {"name": "mine", "kind": "text", "path": f"{out}/{path}"}
    with pytest.raises(UserError, match="lies in `out`"):
        make(tmp_path, [*corpus, mine], fresh=True)
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("state", ['{"steps": ["a"]}', '{"files": ["a"], "steps": 1}'])
@pytest.mark.parametrize("fresh", [False, True])
def test_another_programs_state_is_no_dataset(tmp_path, corpus, fresh, state):
    (tmp_path / "out").mkdir()
    mine = {"prepare.json": state, "manifest.json": "{}", "vocab.txt": "mine"}
    for name, text in mine.items():
        (tmp_path / "out" / name).write_text(text)
    with pytest.raises(UserError, match="out: holds another dataset; choose another --out"):
        make(tmp_path, corpus, fresh=fresh)
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == mine


@pytest.mark.parametrize("name", [".", "..", "a/b", ""])
def test_a_source_is_named_by_no_path(tmp_path, corpus, name):
    corpus[0]["name"] = name
    with pytest.raises(UserError, match=r"sources\.0\.name: .*only letters, digits"):
        make(tmp_path, corpus, rejects=tmp_path / "rejects")
    assert not (tmp_path / "rejects").exists()


def test_no_similarity_is_taken_that_the_search_cannot_tell(tmp_path, corpus):
    with pytest.raises(UserError, match=r"duplicates\.jaccard: .*less than or equal to 0\.98"):
        make(tmp_path, corpus, "a", duplicates={"near": True, "jaccard": 0.985})
    make(tmp_path, corpus, duplicates={"near": True, "jaccard": 0.98})


def test_what_is_broken_is_told_before_another_start_would_pass_over_it(
    tmp_path, corpus, monkeypatch
):
    (tmp_path / "books" / "bad.txt").write_bytes("Gr\u00f6\u00dfe".encode("latin-1") * 9)
    manifest, lines = tmp_path / "out" / "manifest.json", []

    def notice(line: str, **_) -> None:
        lines.append((line, manifest.exists()))

    monkeypatch.setattr("data_pipeline.corpus.prepare.notice", notice)
    rejects = tmp_path / "rejects"
    rejects.mkdir()
    (rejects / "broken.jsonl").mkdir()
    with pytest.raises(UserError, match="^--rejects: .*broken.jsonl: Is a directory"):
        make(tmp_path, corpus, rejects=rejects)
    assert not manifest.exists()
    (rejects / "broken.jsonl").rmdir()
    make(tmp_path, corpus, rejects=rejects)
    assert "bad UTF-8" in (rejects / "broken.jsonl").read_text()
    told = [done for line, done in lines if "bad UTF-8" in line]
    assert len(told) >= 2 and not any(told), lines
    assert lines[-1][0].startswith("dataset ") and lines[-1][1]


def test_filters_and_rejects(tmp_path, corpus):
    (tmp_path / "books" / "tiny.txt").write_text("Only five words in this.")
    corpus[1]["filters"] = {"min_words": 10}
    corpus[0]["min_paragraph_words"] = 30
    rejects = tmp_path / "rejects"
    manifest = make(tmp_path, corpus, rejects=rejects)
    assert manifest.sources[1].dropped == {"too short": 1}
    sample = json.loads((rejects / "books" / "too_short.jsonl").read_text())
    assert sample == {"id": "tiny", "text": "Only five words in this."}


def test_a_trained_vocabulary_fits_its_corpus(tmp_path, corpus):
    manifest = make(tmp_path, corpus, vocabulary={"size": 500, "unused": 10, "lowercase": False})
    tokenizer = Tokenizer.from_dataset(tmp_path / "out")
    assert (manifest.lowercase, manifest.vocab_size) == (False, len(tokenizer))
    assert 300 < len(tokenizer) <= 500
    for record in iterate_documents(tmp_path / "out"):
        assert tokenizer.unk_id not in record.ids
    assert not (tmp_path / "out" / "work").exists()


def tokenizer_folder(folder: Path, pieces: list[str], lowercase: bool, fast: bool) -> Path:
    """As Hugging Face's library writes one: up to version 4, or from 5 on."""
    folder.mkdir()
    if not fast:
        (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
        (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lowercase}))
        return folder
    ids = {piece: number for number, piece in enumerate(pieces)}
    plain = {
        "model": {"type": "WordPiece", "continuing_subword_prefix": "##", "vocab": ids},
        "normalizer": {"type": "BertNormalizer", "lowercase": lowercase},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "BertProcessing",
            "cls": ["[CLS]", ids["[CLS]"]],
            "sep": ["[SEP]", ids["[SEP]"]],
        },
    }
    plain["added_tokens"] = [{"id": ids["[MASK]"], "content": "[MASK]"}]
    plain["added_tokens"].append({"id": len(ids), "content": "covid19"})
    (folder / "tokenizer.json").write_text(json.dumps(plain))
    return folder


@pytest.mark.parametrize("fast", [False, True])
def test_a_folder_gives_its_vocabulary_and_casing(tmp_path, corpus, capsys, fast):
    pieces = [*vocabulary(), *(word.capitalize() for word in WORDS)]
    folder = tokenizer_folder(tmp_path / "bert", pieces, False, fast)
    manifest = make(tmp_path, corpus, vocabulary={"path": str(folder)})
    told = capsys.readouterr().out
    assert told.count("tokenizer.json: without the tokens added to it: covid19;") == fast
    tokenizer = Tokenizer.from_dataset(tmp_path / "out")
    assert (tokenizer.pieces, manifest.lowercase, manifest.extends) == (pieces, False, None)
    capitals = {number for number, piece in enumerate(pieces) if piece[0].isupper()}
    met = set().union(*(record.ids.tolist() for record in iterate_documents(tmp_path / "out")))
    assert capitals & met

    def refused(**keys):
        with pytest.raises(UserError) as caught:
            make(tmp_path, corpus, "other", vocabulary={"path": str(folder)} | keys)
        return str(caught.value)

    assert f"lowercase: true, but {folder} was trained with false" in refused(lowercase=True)
    if not fast:  # the pieces of a plain file tell, too
        assert "has upper-case pieces" in refused(path=f"{folder}/vocab.txt", lowercase=True)
        plain = make(tmp_path, corpus, "plain", vocabulary={"path": f"{folder}/vocab.txt"})
        assert plain.vocab_sha256 == manifest.vocab_sha256 and not plain.lowercase
        assert "vocabulary: text keeps its case" in capsys.readouterr().out
        # A stray capital or two make no cased vocabulary.
        stray = tmp_path / "stray.txt"
        stray.write_text("".join(f"{p}\n" for p in [*vocabulary(), "Stray"]), encoding="utf-8")
        assert make(tmp_path, corpus, "stray", vocabulary={"path": str(stray)}).lowercase
        assert "vocabulary: text is lower-cased" in capsys.readouterr().out
    else:
        assert "name the folder" in refused(path=f"{folder}/tokenizer.json")
    assert "holds neither vocab.txt nor tokenizer.json" in refused(path=str(tmp_path / "wiki"))


def test_words_of_the_text_take_the_places_of_unused_pieces(tmp_path, corpus, capsys):
    """Those that were split, by the pieces that they cost; every other piece stays where it is."""
    missing = ["mountain", "language", "history"]
    base = [piece for piece in vocabulary() if piece not in missing]
    folder = tokenizer_folder(tmp_path / "bert", base, True, fast=False)
    make(tmp_path, corpus, "old", vocabulary={"path": str(folder)})
    old = Tokenizer.from_dataset(tmp_path / "old")

    def extended(name: str, pieces: int) -> tuple[Manifest, Tokenizer]:
        extend = {"from": str(folder), "pieces": pieces}
        manifest = make(tmp_path, corpus, name, vocabulary={"extend": extend})
        return manifest, Tokenizer.from_dataset(tmp_path / name)

    manifest, new = extended("new", 2)
    assert manifest.extends == old.sha256 != new.sha256 == manifest.vocab_sha256
    text = " ".join(old.decode(r.ids) for r in iterate_documents(tmp_path / "old", "train"))
    text += " ".join(old.decode(r.ids) for r in iterate_documents(tmp_path / "old", "heldout"))
    cost = {word: text.split().count(word) * (len(old.encode(word)) - 1) for word in missing}
    words = sorted(missing, key=cost.__getitem__, reverse=True)[:2]
    assert [new.pieces[n] for n in old.unused_ids[:3]] == [*words, "[unused2]"]
    rest = set(range(len(base))) - set(old.unused_ids[:2])
    assert len(new) == len(base) and all(new.pieces[n] == base[n] for n in rest)
    assert [len(new.encode(word)) for word in words] == [1, 1]
    fewer = 1 - sum(s.tokens for s in manifest.shards) / sum(
        s.tokens for s in load_manifest(tmp_path / "old").shards
    )
    said = capsys.readouterr().out
    assert f"2 of 99 [unusedN] of {folder}" in said and ", ".join(words) in said
    assert f"{fewer:.1%} fewer" in said
    assert len(extended("all", 99)[1].unused_ids) == 96  # there are no more such words
    with pytest.raises(UserError, match=r"extend.pieces: 100, but .*bert has 99 \[unusedN\]"):
        extended("many", 100)
    write_vocabulary(folder / "vocab.txt")
    with pytest.raises(UserError, match="splits no word of the text"):
        extended("none", 1)


# --- the command


def test_the_command_prints_progress_and_a_closing_table(tmp_path, corpus):
    config = write_config(tmp_path / "c.yaml", tmp_path / "vocab.txt", corpus)
    done = run(0, "--config", config, "--set", "seed=3")
    assert done.returncode == 0, done.stderr
    assert re.search(r"read and encode 100.0 %  .* MB/s  in 0:0\d  68 documents", done.stderr)
    rows = [
        line.split() for line in done.stdout.splitlines() if line.startswith(("wiki ", "books "))
    ]
    manifest = load_manifest(tmp_path / "out")
    for row, source in zip(rows, manifest.sources, strict=True):
        assert row[1:4] == [
            str(source.documents_in),
            str(source.documents_out),
            f"{source.words:,}",
        ]
    assert manifest.settings["seed"] == 3
    helped = run(0, "--help")
    assert "max_sentence_tokens" in helped.stdout and "--rejects" in helped.stdout
    wrong = run(0, "--config", config, "--set", "sources.0.kind=wikepedia")
    assert wrong.returncode == 2 and "sources.0.kind" in wrong.stderr


def peak_megabytes(config: Path) -> int:
    """Of a process that prepares it."""
    script = (
        "import sys\n"
        "from data_pipeline.corpus.prepare import main\n"
        "main(sys.argv[1:])\n"
        # Not getrusage: its peak counts what the parent held when this process was forked.
        "status = open('/proc/self/status').read()\n"
        "print(int(status.split('VmHWM:')[1].split()[0]) // 1024)\n"
    )
    _, environment = command(0)
    done = subprocess.run(
        [sys.executable, "-c", script, "--config", str(config)],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """Peak memory for 8, 16 and 32 MB of articles."""
    write_vocabulary(tmp_path / "vocab.txt")
    text = wikiextractor(range(400))
    wiki = tmp_path / "wiki"
    wiki.mkdir()
    peaks = []
    written = 0
    for size in (8, 16, 32):
        while written < size:
            (wiki / f"wiki_{written:02d}").write_text(
                (text * (1_000_000 // len(text) + 1))[:1_000_000]
            )
            written += 1
        sources = [{"name": "wiki", "kind": "wikiextractor", "path": str(wiki)}]
        config = write_config(
            tmp_path / "c.yaml", tmp_path / "vocab.txt", sources, unit_bytes=2_000_000,
            shard_bytes=4_000_000, duplicates={"exact": False}, out=str(tmp_path / f"out{size}"),
        )  # fmt: skip
        peaks.append(peak_megabytes(config))
    assert peaks[2] < peaks[0] * 1.1 + 5, peaks


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "sentences", "jsonl"])
def test_a_long_line_takes_no_more_memory_than_promised(tmp_path, kind):
    """The 0.3 GB of docs/corpus.md. Lines of sentences, of words that no full stop ends, and of one
    word, each just under max_document_bytes."""
    write_vocabulary(tmp_path / "vocab.txt")
    names = {"text": "{}.txt", "sentences": "{}.txt", "jsonl": "{}.jsonl"}[kind]
    words = [w.strip(".") for n in range(50) for p in document(n) for w in p.split()]
    (tmp_path / "in").mkdir()
    for number, unit in enumerate([" ".join(words[:9]) + ". ", " ".join(words) + " ", "word"]):
        line = unit * (19_900_000 // len(unit))
        line = json.dumps({"text": line}) if kind == "jsonl" else line
        (tmp_path / "in" / names.format(number)).write_text(f"{line}\n")
    source = {"name": "s", "kind": kind, "path": str(tmp_path / "in"), "min_yield": 0}
    config = write_config(
        tmp_path / "c.yaml", tmp_path / "vocab.txt", [source], unit_bytes=10**8,
        shard_bytes=10**8, heldout_fraction=0,
    )  # fmt: skip
    assert peak_megabytes(config) < 300


@pytest.mark.parametrize(
    "kind, broken, warned", [("csv", 2, False), ("csv", 5, True), ("books", 5, True)]
)
def test_a_source_of_another_encoding_is_warned_of(tmp_path, capsys, kind, broken, warned):
    random = np.random.default_rng(3)
    rows = [f"{n},{sentence(random)} caf\u00e9" for n in range(20)]
    data = [row.encode("latin-1" if n < broken else "utf-8") for n, row in enumerate(rows)]
    write_vocabulary(tmp_path / "vocab.txt")
    path = tmp_path / "a"
    path.write_bytes(b"id,text\n" + b"\n".join(data) + b"\n")
    if kind == "books":  # beside as many pictures as make them a small part
        with tarfile.open(path, "w") as tar:
            for n, text in enumerate(data + [b"" for _ in range(60)]):
                member = tarfile.TarInfo(f"{n}.txt" if text else f"{n}.png")
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text))
        path = path.rename(tmp_path / "a.tar")
    make(tmp_path, [{"name": "mine", "kind": kind, "path": str(path), "min_yield": 0}])
    said = f"source mine: {5 * broken} % of its documents have bad UTF-8"
    out = capsys.readouterr().out
    assert (said in out and "save it as UTF-8" in out) == warned


@pytest.mark.parametrize(
    "kind, text, message",
    [
        ("tsv", "id,text\n1,words\n", "a.csv: its columns stand between ',': set kind: csv"),
        ("tsv", ' "text" \n1\n', r'a.csv: no column .text.; there are: "text"'),
        ("csv", "id,text\n", "source mine: .*a.csv holds no rows$"),
        ("csv", "", "source mine: no document .*a.csv: byte 0: an empty file"),
        ("csv", '"body\nof it"\n"hello"\n', r"a.csv: no column 'text'; there are: body\sof it"),
    ],
)
def test_a_table_without_rows_or_of_commas_is_said(tmp_path, kind, text, message):
    write_vocabulary(tmp_path / "vocab.txt")
    (tmp_path / "a.csv").write_text(text)
    source = {"name": "mine", "kind": kind, "path": str(tmp_path / "a.csv")}
    with pytest.raises(UserError, match=message):
        make(tmp_path, [source])


def test_a_start_that_is_refused_unread_leaves_nothing(tmp_path, corpus):
    given = str(tmp_path / "vocab.txt")
    with pytest.raises(UserError, match="extend.pieces: 5000, but .* has .*that many at most"):
        make(tmp_path, corpus, vocabulary={"extend": {"from": given, "pieces": 5000}})
    with pytest.raises(UserError, match="leaves no room for 999 specials .*at least 1194"):
        make(tmp_path, corpus, vocabulary={"size": 500})
    (tmp_path / "a.csv").write_text("id,body\n1,words\n")
    source = {"name": "mine", "kind": "csv", "path": str(tmp_path / "a.csv")}
    with pytest.raises(UserError, match="no column 'text'"):
        make(tmp_path, [source])
    assert not (tmp_path / "out").exists()
    (tmp_path / "out/work").mkdir(parents=True)  # another's
    with pytest.raises(UserError, match="holds other files"):
        make(tmp_path, [source])
    assert (tmp_path / "out/work").exists()


@pytest.mark.parametrize("again", ["", "begun", "done"])
@pytest.mark.parametrize("at", ["start", "text", "records", "shard", "finish"])
def test_a_folder_taken_from_a_job_is_left_to_the_next(tmp_path, corpus, monkeypatch, at, again):
    """Which may be another's by then; the first job ends with a line, and writes nothing there."""
    out, other = tmp_path / "out", {"heldout_fraction": 0.2, "max_sentence_tokens": 60}
    places = {
        "start": (job, "list_files"),
        "text": (store.Writer, "file"),
        "records": (store.Writer, "file"),
        "shard": (assembly.ShardWriter, "write"),
        "finish": (module, "finish"),
    }
    make(tmp_path, corpus, "right", **other)
    holder, name = places[at]
    plain = getattr(holder, name)

    def taken(*given):
        if at in ("start", "shard", "finish", given[1]):
            monkeypatch.undo()
            out.rename(tmp_path / "moved")
            if again == "done":
                make(tmp_path, corpus, **other)
            if again == "begun":
                with monkeypatch.context() as ends, pytest.raises(KeyboardInterrupt):
                    ends.setattr(module, "finish", lambda *_: signal.raise_signal(signal.SIGINT))
                    make(tmp_path, corpus, **other)
        return plain(*given)

    monkeypatch.setattr(holder, name, taken)
    with pytest.raises(UserError, match=f"^{out}: was removed or replaced|^{out}.*No such file"):
        make(tmp_path, corpus, vocabulary={"size": 1300})
    assert (tmp_path / "moved").is_dir() and out.exists() == bool(again)
    if again:
        assert make(tmp_path, corpus, **other)
        assert bytes_of(out) == bytes_of(tmp_path / "right")
        assert not [path.name for path in out.iterdir() if path.name.startswith(".")]
