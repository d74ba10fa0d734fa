"""A batch against rows built plainly from the documents, token by token."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_pipeline.corpus.shards import iterate_documents
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.stream.batch import IGNORE_INDEX, RUNS_MULTIPLE, TENSORS, Batch
from data_pipeline.stream.dataset import Dataset
from data_pipeline.stream.heldout import HeldOut
from data_pipeline.stream.objective import ObjectiveName
from data_pipeline.stream.plan import PhaseSpec, Planner, Shape, StreamConfig
from data_pipeline.stream.rows import build_batch
from data_pipeline.stream.windows import RowRange, WindowIterator

PHASES = {
    "packed": PhaseSpec(max_seq_len=64, row_len=256, max_predictions=10),
    "one a row": PhaseSpec(max_seq_len=64, packing=False, max_predictions=10),
}


def batches(
    toy: Path,
    phase: PhaseSpec,
    rows: int = 8,
    objective: ObjectiveName = "masked",
    **settings: object,
) -> Iterator[tuple[Batch, RowRange]]:
    data = StreamConfig(dir=str(toy), window_tokens=60_000, **settings)
    dataset = Dataset(data, objective)
    planner = dataset.planner(phase, phase_index=0, seed=1, split="train")
    windows = WindowIterator(planner, dataset.open_store(), (0, 1, 0), stop=True)
    plan = windows.first_plan()
    for first in range(0, min(plan.rows, 20 * rows), rows):
        (some,) = windows.ranges(first, min(first + rows, plan.rows))
        batch = build_batch(
            [some], rows, planner.shape, dataset.vocabulary,
            objective=dataset.objective, step_sequences=5, step_predictions=7,
        )  # fmt: skip
        yield batch, some


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("packed", {}),
        ("packed", {"whole_word_mask": True}),
        ("one a row", {}),
        ("packed", {"next_sentence": "none", "whole_word_mask": True}),
        ("one a row", {"next_sentence": "none"}),
    ],
)
def test_batches_equal_rows_built_plainly(toy: Path, name: str, data: dict[str, Any]) -> None:
    phase, paired = PHASES[name], "next_sentence" not in data
    tokenizer = Tokenizer.from_dataset(toy)
    documents = list(iterate_documents(toy))
    shape = Shape.of(phase, StreamConfig(**data))
    row_len = shape.row_len
    for batch, some in batches(toy, phase, **data):
        plan = some.plan
        original = batch.input_ids.clone().flatten()
        real = batch.masked_lm_labels != IGNORE_INDEX
        positions, labels = batch.masked_lm_positions[real], batch.masked_lm_labels[real]
        original[positions] = labels
        ids, types, places, numbers, bounds, heads, next_labels = [], [], [], [], [0], [], []
        counts = []
        for row in range(some.first, some.last):
            start = len(ids)
            for n, i in enumerate(range(plan.row_starts[row], plan.row_starts[row + 1]), 1):
                segments = []
                for document, at, length in (
                    (plan.a_document[i], plan.a_offset[i], plan.a_length[i]),
                    (plan.b_document[i], plan.b_offset[i], plan.b_length[i]),
                ):
                    ordinal = plan.first_ordinal[plan.document_shard[document]]
                    ordinal += plan.document_record[document]
                    segments.append(documents[ordinal].ids[at : at + length].tolist())
                a, b = segments
                heads.append(len(ids))
                next_labels.append(int(plan.is_random[i]))
                assert bool(b) == paired
                tokens = [tokenizer.cls_id, *a, tokenizer.sep_id]
                types += [0] * len(tokens) + [1] * (len(b) + 1) * paired
                tokens += [*b, tokenizer.sep_id] if paired else []
                ids += tokens
                places += range(len(tokens))
                numbers += [n] * len(tokens)
                counts.append(min(phase.max_predictions, max(1, round(0.15 * len(tokens)))))
                bounds.append(len(ids))
            while len(ids) < start + row_len:
                run = min(start + row_len - len(ids), shape.max_seq_len)
                ids += [tokenizer.pad_id] * run
                types += [0] * run
                places += [0] * run
                numbers += [0] * run
                bounds.append(len(ids))
        missing = batch.input_ids.shape[0] - (some.last - some.first)
        for _ in range(missing):
            for begin in range(0, row_len, shape.max_seq_len):
                bounds.append(len(ids) + min(begin + shape.max_seq_len, row_len))
            for list_, value in ((ids, tokenizer.pad_id), (types, 0), (places, 0), (numbers, 0)):
                list_ += [value] * row_len
        assert original.tolist() == ids
        assert batch.token_type_ids.flatten().tolist() == types
        assert batch.position_ids.flatten().tolist() == places
        assert batch.sequence_ids.flatten().tolist() == numbers
        real_cls = batch.next_sentence_labels != IGNORE_INDEX
        assert batch.cls_positions[real_cls].tolist() == heads * paired
        assert batch.next_sentence_labels[real_cls].tolist() == next_labels * paired
        assert batch.next_sentences == len(heads) * paired
        got = batch.cu_seqlens
        assert torch.unique(got).tolist() == bounds
        assert (got[1:] >= got[:-1]).all() and got[-1] == len(ids)
        assert (got[1:] - got[:-1]).max() <= batch.max_seq_len
        # Masks: the planned number in each sequence, ascending, never a special token.
        assert (positions[1:] > positions[:-1]).all()
        owner = np.searchsorted(np.array(heads), positions.numpy(), side="right") - 1
        assert np.bincount(owner, minlength=len(heads)).tolist() == counts
        special = [tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id, tokenizer.mask_id]
        assert not set(labels.tolist()) & set(special)
        untouched = torch.ones_like(original, dtype=torch.bool)
        untouched[positions] = False
        assert torch.equal(batch.input_ids.flatten()[untouched], original[untouched])
        assert batch.sequences == len(heads) and batch.predictions == len(labels)
        assert batch.tokens == sum(n > 0 for n in numbers)


@pytest.mark.parametrize("name", PHASES)
def test_left_to_right_every_token_has_the_next_one_of_its_sequence(toy: Path, name: str) -> None:
    batch, hidden = (
        next(batches(toy, PHASES[name], objective=way, next_sentence="none", whole_word_mask=True))[
            0
        ]
        for way in ("left_to_right", "masked")
    )
    ids, known = hidden.input_ids.clone().flatten(), slice(hidden.predictions)
    ids[hidden.masked_lm_positions[known]] = hidden.masked_lm_labels[known]
    assert torch.equal(batch.input_ids.flatten(), ids)
    numbers, places, labels = batch.sequence_ids, [], []
    for row in range(len(numbers)):
        for i in range(numbers.shape[1] - 1):
            if 0 < numbers[row, i] == numbers[row, i + 1]:
                places.append(row * numbers.shape[1] + i)
                labels.append(int(ids[places[-1] + 1]))
    real = batch.masked_lm_labels != IGNORE_INDEX
    assert batch.masked_lm_positions[real].tolist() == places
    assert batch.masked_lm_labels[real].tolist() == labels
    assert batch.predictions == len(places) == batch.tokens - batch.sequences


def test_shapes_are_static_but_for_the_runs(toy: Path) -> None:
    for phase in PHASES.values():
        static = [name for name in TENSORS if name != "cu_seqlens"]
        seen, runs = set(), set()
        for batch, _ in batches(toy, phase):
            seen.add(tuple((getattr(batch, n).shape, getattr(batch, n).dtype) for n in static))
            # All real boundaries, then as few of the filler as a multiple allows.
            real = int((batch.cu_seqlens < batch.input_ids.numel()).sum()) + 1
            assert 0 <= len(batch.cu_seqlens) - real < RUNS_MULTIPLE
            runs.add(len(batch.cu_seqlens))
        assert len(seen) == 1
        assert not any(n % RUNS_MULTIPLE for n in runs)
        batch, _ = next(batches(toy, phase))
        int32 = {n for n in TENSORS if getattr(batch, n).dtype == torch.int32}
        assert int32 == {"sequence_ids", "cu_seqlens"}
        shape = Shape.of(phase, StreamConfig())
        assert batch.input_ids.shape == (8, shape.row_len)
        assert batch.masked_lm_positions.shape == (8 * shape.predictions,)
        assert batch.cls_positions.shape == (8 * shape.sequences,)


def test_a_row_holds_as_many_predictions_as_its_shape_says() -> None:
    """The bound over all ways to fill a row, by dynamic programming over sequence lengths."""
    for phase in (*PHASES.values(), PhaseSpec(max_seq_len=32, row_len=128, max_predictions=4)):
        data = StreamConfig(next_sentence="none")
        for objective in ("masked", "left_to_right"):
            shape = Shape.of(phase, data, objective)
            lengths = np.arange(5, shape.max_seq_len + 1)
            worth = data.objective(objective).counts(lengths, lengths - 2, phase.max_predictions)
            best = np.zeros(shape.row_len + 1)
            for _ in range(shape.sequences):
                step = best.copy()
                for length, value in zip(lengths.tolist(), worth.tolist(), strict=True):
                    step[length:] = np.maximum(step[length:], best[:-length] + value)
                best = step
            assert best.max() <= shape.predictions
        assert best.max() == shape.predictions  # left to right it is exact


def test_damaged_documents_leave_an_empty_slot_and_touch_nothing_else(toy: Path) -> None:
    data = StreamConfig(dir=str(toy))
    dataset = Dataset(data)
    planner = dataset.planner(PHASES["packed"], phase_index=0, seed=1, split="train")
    plan = planner.plan(0, 0)

    def made(damaged: np.ndarray) -> Batch:
        windows = WindowIterator(planner, dataset.open_store(), (0, 0, 0), stop=True)
        (some,) = windows.ranges(0, 6)
        some.window.damaged[:] = damaged
        return build_batch(
            [some], 6, planner.shape, dataset.vocabulary,
            objective=dataset.objective, step_sequences=9, step_predictions=9,
        )  # fmt: skip

    whole = made(np.zeros(len(plan.document_shard), bool))
    lost = np.zeros(len(plan.document_shard), bool)
    some = slice(plan.row_starts[0], plan.row_starts[6])
    lost[plan.a_document[some][3]] = True
    holed = made(lost)
    gone = lost[plan.a_document[some]] | lost[plan.b_document[some]]
    assert 0 < gone.sum() < len(gone)
    heads = whole.cls_positions[whole.next_sentence_labels != IGNORE_INDEX].numpy()
    length = (plan.a_length[some].astype(int) + plan.b_length[some]) + 3
    hole = np.zeros(whole.input_ids.numel(), bool)
    for at, n in zip(heads[gone], length[gone], strict=True):
        hole[at : at + n] = True
    for name in ("input_ids", "token_type_ids", "position_ids", "sequence_ids"):
        before, after = (getattr(b, name).flatten().numpy() for b in (whole, holed))
        assert (after[hole] == 0).all()  # [PAD] is 0 in the toy vocabulary
        assert (after[~hole] == before[~hole]).all()
    kept = ~hole[whole.masked_lm_positions[: whole.predictions].numpy()]
    assert (
        holed.masked_lm_positions[: holed.predictions].tolist()
        == whole.masked_lm_positions[: whole.predictions].numpy()[kept].tolist()
    )
    assert holed.sequences == whole.sequences - gone.sum()
    assert holed.cls_positions[: holed.sequences].tolist() == heads[~gone].tolist()
    assert torch.equal(holed.cu_seqlens, whole.cu_seqlens)
    everything = made(np.ones(len(plan.document_shard), bool))
    assert everything.sequences == everything.predictions == everything.tokens == 0
    assert (everything.masked_lm_labels == IGNORE_INDEX).all()


def test_digests_see_every_tensor(toy: Path) -> None:
    batch, _ = next(batches(toy, PHASES["packed"]))
    seen, rows = {batch.digest()}, {tuple(batch.row_digests())}
    for name in TENSORS:
        saved = getattr(batch, name)
        changed = saved.clone()
        changed.view(-1)[1] += 1
        setattr(batch, name, changed)
        seen.add(batch.digest())
        rows.add(tuple(batch.row_digests()))
        setattr(batch, name, saved)
    assert len(seen) == len(rows) == len(TENSORS) + 1


def test_held_out_batches_are_planned_and_made_once(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, plain = [], Planner.trace
    monkeypatch.setattr(Planner, "trace", lambda self, *at: planned.append(at) or plain(self, *at))
    dataset, phase = Dataset(StreamConfig(dir=str(toy))), PHASES["packed"]
    held_out = HeldOut(dataset, phase, seed=1, rank=1, world=2, micro_batch_rows=4, rows=30)
    assert planned == []
    first = list(held_out)
    for _ in range(3):
        assert all(a is b for a, b in zip(held_out, first, strict=True))
    assert planned == [(0, 0)]
    tokens = sum(batch.input_ids.numel() for batch in first)
    assert 24 < sum(len(batch.split()[2]) for batch in first) / tokens < 33


def test_held_out_rows_are_the_same_at_any_world(toy: Path) -> None:
    dataset, phase = Dataset(StreamConfig(dir=str(toy))), PHASES["packed"]

    def rows_of(world: int, micro: int, rows: int) -> list[bytes]:
        ranks = [
            list(
                HeldOut(
                    dataset,
                    phase,
                    seed=1,
                    rank=rank,
                    world=world,
                    micro_batch_rows=micro,
                    rows=rows,
                )
            )
            for rank in range(world)
        ]
        assert len({len(batches_) for batches_ in ranks}) == 1
        digests = [
            digest
            for step in zip(*ranks, strict=True)
            for batch in step
            for digest in batch.row_digests()
        ]
        for batch in (b for r in ranks for b in r):
            runs = batch.cu_seqlens.diff()
            assert runs.min() >= 0 and runs.max() <= batch.max_seq_len
            assert batch.cu_seqlens[-1] == batch.input_ids.numel()
        assert sum(b.sequences for r in ranks for b in r) == ranks[0][0].step_sequences
        assert sum(b.predictions for r in ranks for b in r) == ranks[0][0].step_predictions
        return digests[:rows]

    alone = rows_of(1, 4, 30)
    assert len(set(alone)) == 30
    for world, micro in ((2, 4), (3, 1), (4, 2), (1, 7), (16, 1)):
        assert rows_of(world, micro, 30) == alone
    assert len(rows_of(1, 4, 10**6)) > 30
