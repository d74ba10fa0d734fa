"""What a few played ranks open, ask and look at; the table on paper."""

from __future__ import annotations

import json

import pytest

from benchmarks import scale
from tests.benchmarks.test_small_data import result


@pytest.mark.slow
def test_what_grows_with_the_ranks() -> None:
    two, four = (found for found in result("scale", "--ranks", "2,4")["detail"].values())
    assert "not_reached" not in two and "not_reached" not in four
    assert (two["files"]["files"], four["files"]["files"]) == (6, 8)  # one a rank, and four
    # A full mesh of each of the two gloo groups would be two connections more a rank.
    assert four["descriptors"]["middle"] <= two["descriptors"]["middle"] + 2
    for found, ranks in ((two, 2), (four, 4)):
        parts = found["parts"]
        assert sum(part["commands"] for part in parts.values()) == 1  # git, once a host
        # Of the checkpoint rank 0 opens all files: once for their checksums, once for their
        # contents. Each rank opens its own, the first, whose buffers it wants, and state.json.
        assert parts["resume"]["files_opened"] <= 5 * ranks + 6
        # Two looks of rank 0 at all ranks in the second between two heartbeats of each.
        assert found["looks_a_second"] <= 2.5


def test_on_paper_every_step_has_one_longest_term(capsys: pytest.CaptureFixture[str]) -> None:
    scale.main(["--paper"])
    lines = json.loads(capsys.readouterr().out.splitlines()[-1])["detail"]
    assert [line["gpus"] for line in lines] == 2 * [1, 8, 64, 256, 512, 1024, 2048, 4096]
    for line in lines:
        assert line["rows"] == line["gpus"] * line["micro_steps"] * line["micro_batch_rows"]
        terms = [line[t] for t in ("device", "batch", "network", "loop", "votes", "planning")]
        assert line["step"] == pytest.approx(sum(terms)) and line[line["longest"]] == max(terms)
