"""A batch lies in one buffer: one message, one pinned block, one copy to the device."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from data_pipeline.stream import batch as batch_module
from data_pipeline.stream.batch import TENSORS, Batch
from data_pipeline.stream.dataset import Dataset
from data_pipeline.stream.plan import PhaseSpec, StreamConfig
from data_pipeline.stream.stream import Stream

PHASE = PhaseSpec(max_seq_len=64, row_len=256, max_predictions=10, rows_per_step=8)


def stream(toy: Path, workers: int, **more: Any) -> Stream:
    data = StreamConfig(dir=str(toy), workers=workers)
    settings = {"phase_index": 0, "seed": 1, "rank": 0, "world": 1, "micro_batch_rows": 8}
    return Stream(Dataset(data), PHASE, **settings, **more)


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("workers", [0, 1])
def test_one_buffer_holds_all_tensors_and_one_copy_moves_them(toy: Path, workers: int) -> None:
    s = stream(toy, workers)
    batch = next(s)
    s.close()
    buffer = batch.buffer()
    assert buffer is not None and buffer.dtype == torch.uint8
    spans = []
    for name in TENSORS:
        tensor = getattr(batch, name)
        assert tensor.untyped_storage().data_ptr() == buffer.data_ptr()
        at = tensor.data_ptr() - buffer.data_ptr()
        assert at % 128 == 0 and tensor.is_contiguous()
        spans.append((at, at + tensor.nbytes))
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    assert spans[-1][1] <= buffer.numel()
    with Operators() as seen:
        moved = batch.to("meta", non_blocking=True)
    assert seen.calls["_to_copy"] == 1
    for name in TENSORS:
        mine, theirs = getattr(batch, name), getattr(moved, name)
        assert theirs.device.type == "meta"
        assert (theirs.shape, theirs.dtype) == (mine.shape, mine.dtype)
    # Views of the copy, not of what it was copied from.
    copy = batch.over(buffer.clone(), *batch.split()[:2])
    assert copy.digest() == batch.digest()
    buffer.zero_()
    assert copy.digest() != batch.digest()


def test_a_changed_batch_is_not_moved_as_it_was(toy: Path) -> None:
    s = stream(toy, 0)
    batch = next(s)
    s.close()
    changed = replace(batch, input_ids=batch.input_ids + 1)
    assert changed.buffer() is None
    assert torch.equal(changed.to("cpu").input_ids, batch.input_ids + 1)
    assert changed.to("meta").cu_seqlens.device.type == "meta"
    shapes, counts, buffer = changed.split()
    again = Batch.over(torch.from_numpy(buffer), shapes, counts)
    assert again.digest() == changed.digest() != batch.digest()


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_pinned_in_the_thread_of_the_stream(
    toy: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU there is no memory to pin: whoever asks for it gets plain memory, noted."""
    import threading

    pinned: dict[int, tuple[str, int]] = {}
    plain = batch_module.new_buffer

    def new_buffer(size: int, pin_memory: bool = False) -> torch.Tensor:
        buffer = plain(size)
        if pin_memory:
            pinned[buffer.data_ptr()] = (threading.current_thread().name, size)
        return buffer

    expected = stream(toy, 0)
    for module in ("batch", "prefetch"):
        monkeypatch.setattr(f"data_pipeline.stream.{module}.new_buffer", new_buffer)
    s = stream(toy, workers, pin_memory=True)
    batches = [next(s) for _ in range(3)]
    for batch in batches:
        buffer = batch.buffer()
        assert pinned[buffer.data_ptr()] == ("stream", buffer.numel())
        assert batch.digest() == next(expected).digest()
    s.close()
    expected.close()
