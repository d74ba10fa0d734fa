"""data.weights: how often each document stands in an epoch, counted in the batches themselves."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.errors import UserError
from data_pipeline.corpus import source_map
from data_pipeline.corpus.manifest import SOURCES, load_manifest
from data_pipeline.corpus.shards import iterate_documents
from data_pipeline.stream.audit import AuditConfig, AuditPhase, epoch_account, step_digests
from data_pipeline.stream.batch import IGNORE_INDEX, Batch
from data_pipeline.stream.dataset import Dataset
from data_pipeline.stream.heldout import HeldOut
from data_pipeline.stream.plan import Planner, StreamConfig
from data_pipeline.stream.repeats import Repeats
from data_pipeline.stream.state import StreamState
from data_pipeline.stream.stream import Stream
from tests.data_pipeline.stream.servers import http_server
from tests.datasets import write_dataset

NAMES = ("wikipedia", "own", "news")
WEIGHTS = {"own": 2.5, "news": 0}
PHASE = AuditPhase(max_seq_len=32, row_len=64, max_predictions=5, rows_per_step=6)
DOCUMENTS, SENTENCES, FIRST = 90, 24, 10  # ids below FIRST are special


def source_of(name: str) -> int:
    """A third of each source, in short runs, as units leave them; none of news is held out."""
    split, number = name.split("-")
    return int(number) // 4 % (3 if split == "train" else 2)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences of one token, so nothing is ever cut off; each token id is of one document, which
    a batch therefore tells."""
    folder = tmp_path_factory.mktemp("weights")
    write_dataset(
        folder,
        [[[FIRST + d * SENTENCES + s] for s in range(SENTENCES)] for d in range(DOCUMENTS)],
        heldout=[[[FIRST + i] for i in range(40)] for _ in range(12)],
        vocab=FIRST + DOCUMENTS * SENTENCES,
        documents_per_shard=6,
        sources=NAMES,
        source_of=source_of,
    )
    return folder


def config(folder: Path, workers: int = 0, **data: Any) -> AuditConfig:
    settings = {"dir": str(folder), "window_tokens": 900, "prefetch_batches": 1, **data}
    settings = {"weights": WEIGHTS, "workers": workers, **settings}
    return AuditConfig(seed=5, data=StreamConfig(**settings), phases=(PHASE,))


def planner(tree: AuditConfig) -> Planner:
    return Dataset(tree.data).planner(PHASE, phase_index=0, seed=tree.seed, split="train")


@dataclass(frozen=True)
class Sequence:
    a: tuple[int, ...]
    b: tuple[int, ...]
    is_random: bool
    seen: tuple[int, ...]  # what the model sees


def sequences_of(batch: Batch) -> list[list[Sequence]]:
    """By row."""
    seen = batch.input_ids.numpy().ravel()
    original, labels = seen.copy(), batch.masked_lm_labels.numpy()
    real = labels != IGNORE_INDEX
    original[batch.masked_lm_positions.numpy()[real]] = labels[real]
    types, numbers = batch.token_type_ids.numpy(), batch.sequence_ids.numpy()
    original, seen = original.reshape(types.shape), seen.reshape(types.shape)
    judged = iter(batch.next_sentence_labels.tolist())
    rows = []
    for row in range(len(types)):
        rows.append([])
        for number in range(1, numbers[row].max() + 1):
            here = numbers[row] == number
            text, kind = original[row][here], types[row][here]
            segments = [tuple(text[(kind == k) & (text >= FIRST)].tolist()) for k in (0, 1)]
            random = next(judged, 0) == 1
            rows[-1].append(Sequence(*segments, random, tuple(seen[row][here].tolist())))
    return rows


def read_rows(tree: AuditConfig, world: int, count: int) -> list[list[Sequence]]:
    """The first `count` rows of the plan, from the streams of all ranks."""
    streams = [
        Stream(Dataset(tree.data), PHASE, phase_index=0, seed=tree.seed, rank=rank, world=world,
               micro_batch_rows=1)
        for rank in range(world)
    ]  # fmt: skip
    rows: list[list[Sequence]] = []
    while len(rows) < count:
        for _ in range(streams[0].micro_steps):
            for stream in streams:
                rows += sequences_of(next(stream))
        for stream in streams:
            stream.commit_step()
    for stream in streams:
        stream.close()
    return rows[:count]


def times_of_documents(rows: list[list[Sequence]]) -> list[int]:
    """The plain statement: a document stands n times in an epoch when each of its sentences is read
    n times as A or true B."""
    read = Counter[int]()
    for row in rows:
        for one in row:
            read.update(one.a + (() if one.is_random else one.b))
    found = []
    for document in range(DOCUMENTS):
        begin = FIRST + document * SENTENCES
        times = {read[token] for token in range(begin, begin + SENTENCES)}
        assert len(times) == 1
        found.append(times.pop())
    return found


def document_of(tokens: tuple[int, ...]) -> int:
    (only,) = {(token - FIRST) // SENTENCES for token in tokens}
    return only


@pytest.mark.parametrize("way", ["original", "balanced", "none"])
def test_an_epoch_holds_each_document_as_often_as_its_weight_says(text: Path, way: str) -> None:
    tree = config(text, next_sentence=way)
    plans = planner(tree)
    windows = plans.windows
    assert windows == 3
    rows = [sum(plans.plan(epoch, w).rows for w in range(windows)) for epoch in range(2)]
    alone = read_rows(tree, 1, sum(rows))
    epochs = alone[: rows[0]], alone[rows[0] :]
    twice = []
    for epoch in epochs:
        times = times_of_documents(epoch)
        own = {name: [] for name in NAMES}
        for document, n in enumerate(times):
            own[NAMES[source_of(f"train-{document}")]].append(n)
        assert set(own["wikipedia"]) == {1} and set(own["news"]) == {0}
        assert set(own["own"]) == {2, 3}
        assert abs(sum(own["own"]) - 2.5 * len(own["own"])) < windows
        twice.append(tuple(own["own"]))
        every = [one for row in epoch for one in row]
        assert all(document_of(one.a) != document_of(one.b) for one in every if one.is_random)
        # Partners are drawn as the text is: by the copy.
        partners = Counter(
            NAMES[source_of(f"train-{document_of(one.b)}")] for one in every if one.is_random
        )
        assert partners["news"] == 0 and (way == "none" or partners["own"] > partners["wikipedia"])
        # A repeat has masks, cuts and partners of its own.
        assert len({one.seen for one in every}) == len(every)
    assert twice[0] != twice[1]
    for world, workers in ((1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (3, 2)):
        dealt = tree.model_copy(update={"data": tree.data.model_copy(update={"workers": workers})})
        assert read_rows(dealt, world, rows[0] + 7) == alone[: rows[0] + 7]


def test_partners_follow_the_weights(text: Path) -> None:
    """A B is equally likely to be of any copy of another document."""
    plans = planner(config(text, window_tokens=10**6, weights={"own": 4, "news": 0.5}))
    uses, copies = np.zeros(3), np.zeros(3)
    for epoch in range(20):
        trace = plans.trace(epoch, 0)
        source = trace.plan.document_source
        b = trace.documents(trace.pairs.b_document[trace.pairs.is_random])
        uses += np.bincount(source[b], minlength=3)
        copies += np.bincount(source[trace.copy_of], minlength=3)
    expected = uses.sum() * copies / copies.sum()
    assert (np.abs(uses - expected) < 4 * np.sqrt(expected)).all() and copies.min() > 0


def test_the_only_document_is_its_own_partner(text: Path) -> None:
    """Where a window has copies of one document alone."""
    plans = planner(config(text, weights={"wikipedia": 0, "own": 0, "news": 0.001}))
    trace = plans.trace(0, 0)
    assert len(trace.copy_of) == 1 and trace.plan.rows == 1  # a window is never empty
    assert trace.plan.document_source[trace.plan.a_document].tolist() == [2] * trace.plan.sequences
    assert all(2 in [s for s, _ in plans.repeats.sources.shards[x.name]] for x in plans.shards)


def test_a_share_is_exact_and_new_each_epoch(text: Path) -> None:
    weights = {"own": 1.5}
    dataset = Dataset(config(text, weights=weights).data)
    repeats = dataset.planner(PHASE, phase_index=0, seed=1, split="train").repeats
    sources = np.repeat([1, 0], [40, 9])
    drawn = [repeats.draw(key, sources) for key in range(400)]
    assert all(np.bincount(d[:40]).tolist() == [0, 20, 20] and (d[40:] == 1).all() for d in drawn)
    assert len({d.tobytes() for d in drawn}) == 400
    often = np.mean(drawn, axis=0)[:40] - 1.5
    assert np.abs(often).max() < 4.5 * 0.5 / np.sqrt(400)
    odd = [repeats.draw(key, sources[:39]).sum() for key in range(400)]
    assert set(odd) == {58, 59} and abs(np.mean(odd) - 58.5) < 4.5 * 0.5 / np.sqrt(400)


def test_without_another_weight_than_1_all_is_as_without_weights(text: Path) -> None:
    plain, ones = (planner(config(text, weights=w)) for w in ({}, {"own": 1, "news": 1.0}))
    assert plain.settings == ones.settings and "weights" not in plain.settings
    assert plain.plan(2, 1).digest() == ones.plan(2, 1).digest()
    assert planner(config(text)).plan(2, 1).digest() != plain.plan(2, 1).digest()


def test_a_resume_at_any_row_and_world_goes_on_bit_by_bit(text: Path) -> None:
    tree = config(text)
    whole = list(step_digests(tree, 0, 1, 6, 14))
    stream = Stream(
        Dataset(tree.data), PHASE, phase_index=0, seed=5, rank=0, world=1, micro_batch_rows=6
    )
    for step in range(1, 14):
        next(stream)
        stream.commit_step()
        if step in (1, 6, 13):
            saved = StreamState.from_dict(json.loads(json.dumps(stream.state.to_dict())))
            world = 1 + step % 3
            assert list(step_digests(tree, 0, world, 2, 14 - step, saved)) == whole[step:]
    assert stream.state.epoch > 0
    changed = config(text, weights={"own": 2, "wikipedia": 3}).data

    def resumed(data: StreamConfig) -> Stream:
        return Stream(Dataset(data), PHASE, phase_index=0, seed=5, rank=0, world=1,
                      micro_batch_rows=6, state=stream.state)  # fmt: skip

    with pytest.raises(UserError, match=r"weights.own is 2.5 in the checkpoint and 2.0 now") as e:
        resumed(changed)
    names = ["weights.news", "weights.own", "weights.wikipedia"]
    assert f"data.accept_changed: [{', '.join(names)}]" in str(e.value)
    other = resumed(changed.model_copy(update={"accept_changed": tuple(names)}))
    assert (other.state.epoch, other.state.row) == (stream.state.epoch + 1, 0)
    assert "weights.own 2.5 -> 2.0" in other.state.history[1].replace(":", "")
    with pytest.raises(UserError, match="weights is {.*} in the checkpoint and None now"):
        resumed(config(text, weights={}).data)
    for one in (stream, other):
        one.close()


@pytest.mark.parametrize("way", ["original", "none"])
def test_the_audit_proves_an_epoch_with_weights(
    text: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = config(text, next_sentence=way)
    found = epoch_account(tree, 0, 1)
    times = {name: n for name, (_, _, n) in found.sources.items()}
    assert not found.broken() and found.documents == sum(times.values())
    assert found.source_tokens == SENTENCES * found.documents and found.same_document == 0
    assert times["wikipedia"] == 32 and times["news"] == 0 and abs(times["own"] - 75) < 3
    assert "own, weight 2.5" in found.page() and "each repeat counted" in found.page()
    plain = Repeats.draw

    def once_too_often(self: Repeats, key: int, sources: np.ndarray) -> np.ndarray:
        drawn = plain(self, key, sources)
        drawn[np.flatnonzero(sources == 0)[0]] += 1
        return drawn

    monkeypatch.setattr(Repeats, "draw", once_too_often)
    assert any("not as often as their weight" in t for t in epoch_account(tree, 0, 1).broken())


def test_held_out_rows_know_no_weights_and_name_their_sources(text: Path) -> None:
    def batches(weights: dict[str, float]) -> list[Any]:
        dataset = Dataset(config(text, weights=weights).data)
        return list(HeldOut(dataset, PHASE, seed=1, rank=0, world=1, micro_batch_rows=8, rows=99))

    one, two = batches({}), batches(WEIGHTS)
    assert [b.digest() for b in one] == [b.digest() for b in two]
    assert {s for b in one for s in b.prediction_sources.tolist()} == {-1, 0, 1}


def test_a_damaged_document_is_named_once_however_often_it_stands(
    text: Path, tmp_path: Path
) -> None:
    folder = copy_of(text, tmp_path)
    record = 7
    assert source_of(f"train-{record}") == 1
    index = Dataset(config(text).data).index(load_manifest(text).shards[record // 6])
    tar = bytearray((folder / "shard-000001.tar").read_bytes())
    tar[int(index.offsets[record % 6]) + 60] ^= 1
    (folder / "shard-000001.tar").write_bytes(tar)
    tree = config(folder, on_damage="empty", ledger=str(tmp_path / "damaged.jsonl"))
    plans = planner(tree)
    rows = sum(plans.plan(0, w).rows for w in range(plans.windows))
    read_rows(tree, 1, rows)
    (line,) = (tmp_path / "damaged.jsonl").read_text().splitlines()
    assert json.loads(line)["shard"] == "shard-000001" and json.loads(line)["record"] == record % 6


def copy_of(text: Path, folder: Path) -> Path:
    for path in text.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_the_map_of_sources_is_made_anew_from_the_records(text: Path, tmp_path: Path) -> None:
    folder = copy_of(text, tmp_path)
    (folder / SOURCES).unlink()
    with pytest.raises(UserError, match=r"sources.json: no such file; `python -m data_pipeline so"):
        planner(config(folder))
    assert planner(config(folder, weights={})).windows  # asked for by weights alone
    assert source_map.main([str(folder)]) == 0
    assert (folder / SOURCES).read_bytes() == (text / SOURCES).read_bytes()
    manifest = load_manifest(folder)
    runs = json.loads((folder / SOURCES).read_text())["shards"]
    for split in ("train", "heldout"):
        stated = [
            source for s in manifest.split(split) for source, n in runs[s.name] for _ in range(n)
        ]
        assert stated == [d.source for d in iterate_documents(folder, split)]


def test_far_away_data_have_weights_too(text: Path, tmp_path: Path) -> None:
    near = planner(config(text)).plan(1, 2).digest()
    with http_server(text) as (url, behaviour):
        far = config(text, dir=url, cache_dir=str(tmp_path / "cache"))
        assert planner(far).plan(1, 2).digest() == near
        assert behaviour.counts[SOURCES] == 1
        behaviour.faults[SOURCES] = ["wrong"]
        planner(config(url, cache_dir=str(tmp_path / "cache")))
        assert behaviour.counts[SOURCES] == 3


def test_mistakes_are_one_line_each(text: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="^data.weights.wiki: no such source; there are wikipedia, "
    ):
        planner(config(text, weights={"wiki": 2}))
    with pytest.raises(UserError, match="^data.weights: every source has weight 0"):
        planner(config(text, weights=dict.fromkeys(NAMES, 0)))
    folder = copy_of(text, tmp_path)
    good = json.loads((text / SOURCES).read_text())
    first = good["shards"]["shard-000000"]
    assert first[0][1] == 4 and first[1][1] == 2

    def told(shards: dict[str, Any], **more: str) -> str:
        (folder / SOURCES).write_text(json.dumps({**good, "shards": shards, **more}))
        with pytest.raises(UserError) as error:
            rows = sum(planner(config(folder)).plan(0, w).rows for w in range(3))
            read_rows(config(folder), 1, rows)
        assert str(error.value).count("\n") == 0 and "python -m data_pipeline sources" in str(error)
        return str(error.value)

    assert "documents are not the manifest's" in told({**good["shards"], "shard-000000": [[0, 6]]})
    assert "is of data set other" in told(good["shards"], dataset_id="other")
    assert "sources.json: " in told({**good["shards"], "shard-000000": "x"})
    # Sums that are right: the records themselves tell.
    swapped = {**good["shards"], "shard-000000": [[1, 2], [0, 4]]}
    assert "shard-000000.tar record" in told(swapped) and "another source" in told(swapped)


def test_shards_without_a_document_that_counts_are_in_no_window(tmp_path: Path) -> None:
    documents = [[[FIRST + d] * 9] for d in range(40)]
    write_dataset(tmp_path, documents, documents_per_shard=5, sources=NAMES[:2],
                  source_of=lambda name: int(name.split("-")[1]) >= 35)  # fmt: skip
    plans = planner(config(tmp_path, weights={"wikipedia": 0, "own": 3}, window_tokens=45))
    assert [s.name for s in plans.shards] == ["shard-000007"]
    assert set(plans.plan(0, 0).a_document.tolist()) == set(range(5))
    # The same documents in the same order: what stands twice is drawn for the epoch.
    plans = planner(config(tmp_path, weights={"wikipedia": 0, "own": 1.5}))
    drawn = {plans.trace(epoch, 0).copy_of.tobytes() for epoch in range(20)}
    assert len(drawn) > 5


def test_a_window_holds_no_more_tokens_than_asked_where_most_shards_are_left_out(
    tmp_path: Path,
) -> None:
    documents = [[[FIRST + d] * 9] for d in range(40)]
    write_dataset(tmp_path, documents, documents_per_shard=5, sources=NAMES[:2],
                  source_of=lambda name: int(int(name.split("-")[1]) >= 20))  # fmt: skip
    tree = config(tmp_path, weights={"wikipedia": 0, "own": 4}, window_tokens=180)
    plans = planner(tree)
    held = [int(plans.trace(0, w).sentence_lengths.sum()) for w in range(plans.windows)]
    assert held == [180] * 4
