"""Two real processes: nothing hangs, and both hear of what befalls one."""

import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from core.errors import UserError
from data_pipeline.corpus.shards import read_index
from data_pipeline.stream.dataset import Dataset
from data_pipeline.stream.plan import PhaseSpec, Planner, StreamConfig
from data_pipeline.stream.reader import OpenWindow
from data_pipeline.stream.stream import Stream
from tests import gloo
from tests.data_pipeline.stream.conftest import VOCAB
from tests.datasets import write_dataset

PHASE = PhaseSpec(max_seq_len=64, row_len=256, max_predictions=10, rows_per_step=16)


def _stream(rank: int, world: int, folder: Path, seed: int = 1, **settings: Any) -> Stream:
    data = StreamConfig(
        dir=str(folder), window_tokens=20_000, ledger=str(folder / "ledger"),
        **{"workers": 0, "agree_every": 3, **settings},
    )  # fmt: skip
    return Stream(
        Dataset(data), PHASE, phase_index=0, seed=seed, rank=rank, world=world, micro_batch_rows=4,
        gather=gloo.gather,
    )  # fmt: skip


def _train(stream: Stream, steps: int) -> list[int]:
    """Steps with a reduction each, as a trainer's; the tokens of all ranks a step."""
    seen = []
    for _ in range(steps):
        tokens = torch.zeros(1, dtype=torch.int64)
        for _ in range(stream.micro_steps):
            tokens += next(stream).tokens
        dist.all_reduce(tokens)
        seen.append(int(tokens))
        stream.commit_step()
    return seen


def _message(call: Any) -> str:
    try:
        call()
    except UserError as error:
        return str(error)
    return ""


def _scenarios(rank: int, world: int, folder: Path, damaged: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    # Wildly unequal shards, and a disk that is slow for one of the ranks.
    plain = OpenWindow.check
    if rank == 1:
        OpenWindow.check = lambda *a: time.sleep(0.02) or plain(*a)
    planned: list[tuple[int, int]] = []
    plain_trace = Planner.trace
    Planner.trace = lambda self, *at: planned.append(at) or plain_trace(self, *at)
    stream = _stream(rank, world, folder)
    found["steps"] = _train(stream, 30)
    found["planned"] = planned[:]
    found["state"] = stream.state.to_dict()
    stream.agree()
    stream.close()
    OpenWindow.check = plain

    found["other seed"] = _message(lambda: _stream(rank, world, folder, seed=1 + rank))
    missing = folder if rank == 0 else folder / "nowhere"
    found["missing"] = _message(lambda: _stream(rank, world, missing))
    with pytest.raises(UserError) as caught:
        _stream(rank, world, missing)
    found["quiet"] = caught.value.quiet

    def too_much() -> None:
        s = _stream(rank, world, damaged, on_damage="empty", max_damaged=15, agree_every=1)
        try:
            _train(s, 200)
        finally:
            found["stopped at"] = s.state.steps
            found["saw"] = s.damaged
            s.close()

    found["damage"] = _message(too_much)

    stream = _stream(rank, world, folder, workers=1)
    _train(stream, 2)
    began = time.monotonic()
    if rank == 1:
        os.kill(stream.workers[0][0], signal.SIGKILL)
    try:
        _train(stream, 1000)
    except UserError as error:
        found["worker"] = str(error)
        stream.close()
        dist.destroy_process_group()
    except RuntimeError as error:
        # The peer is gone: gloo says so at once.
        found["worker"] = str(error)
        stream.close()
    found["seconds"] = time.monotonic() - began
    return found


@pytest.fixture(scope="module")
def unequal(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Shards of 1, 1, 1, ... documents of one short sentence up to 30 of 100 long ones; and a copy
    with a broken record in every shard."""
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("unequal") / "set"
    documents = []
    for number in range(40):
        sentences, longest = (1, 3) if number % 4 else (rng.integers(50, 100), 60)
        documents.append(
            [rng.integers(5, VOCAB, rng.integers(1, longest)).tolist() for _ in range(sentences)]
        )
    write_dataset(folder, documents, vocab=VOCAB, documents_per_shard=2)
    damaged = Path(shutil.copytree(folder, folder.parent / "damaged"))
    for path in damaged.glob("shard-*.tar"):
        data = bytearray(path.read_bytes())
        data[int(read_index(path.with_suffix(".idx")).offsets[1]) + 20] ^= 1
        path.write_bytes(data)
    return folder, damaged


def test_two_processes_never_hang(unequal: tuple[Path, Path]) -> None:
    began = time.monotonic()
    one, two = gloo.run(2, _scenarios, *unequal, timeout=100)
    assert one["steps"] == two["steps"] and len(one["steps"]) == 30
    assert one["state"] == two["state"] and one["state"]["epoch"] >= 1
    # Each window by one of the ranks, and each rank some.
    assert len({*one["planned"], *two["planned"]}) == len(one["planned"]) + len(two["planned"])
    assert one["planned"] and two["planned"]
    for found in (one, two):
        assert re.match(r"the ranks disagree on the data plan: digest", found["other seed"])
        assert "nowhere/manifest.json: no such file" in found["missing"]
        assert re.match(r"\d+ damaged documents, data.max_damaged is 15", found["damage"])
    # Both stop at the same step with the same words, though neither saw that much alone.
    assert one["damage"] == two["damage"]
    assert one["stopped at"] == two["stopped at"]
    assert one["saw"] <= 15 and two["saw"] <= 15, (one["saw"], two["saw"])
    assert one["missing"].startswith("rank 1: ") and (one["quiet"], two["quiet"]) == (False, True)
    assert re.search(r"rank 1: data worker 0 died \(SIGKILL\) at shard-0000\d\d", two["worker"])
    assert one["worker"] and "shard" not in one["worker"]
    assert max(one["seconds"], two["seconds"]) < 30
    assert time.monotonic() - began < 100
