"""The same budget beside Hugging Face: real runs of a few steps, one of them in two pieces."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from benchmarks import pretrain_vs_hf
from tests.datasets import given_to_benchmark

CONFIG = """
device: cpu
data: {workers: 0}
model: {hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32,
        max_position_embeddings: 32, hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0}
engine: {precision: fp32}
optimizer: {name: adamw}
phases:
  - {max_seq_len: 16, row_len: 64, rows_per_step: 2, sequences_per_step: 8, max_predictions: 3,
     micro_batch_rows: 2, steps: 4, learning_rate: 1.0e-3}
  - {max_seq_len: 32, row_len: 64, rows_per_step: 2, sequences_per_step: 4, max_predictions: 5,
     micro_batch_rows: 2, steps: 6, learning_rate: 1.0e-3}
checkpoint: {every_steps: 5, keep_every: 5}
evaluation: {rows: 4}
"""


@pytest.mark.slow
def test_both_sides_meet_one_evaluation_and_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out, judged = tmp_path / "out", []
    command = [*given_to_benchmark(tmp_path, CONFIG), "--evaluations", "4"]
    plain = pretrain_vs_hf.Judge.__call__

    def interrupted(self, weights):
        judged.append(0)
        if len(judged) == 2:
            raise pretrain_vs_hf.Stop
        return plain(self, weights)

    monkeypatch.setattr(pretrain_vs_hf.Judge, "__call__", interrupted)
    heard = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    pretrain_vs_hf.main([*command, "--sides", "hf"])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == heard
    assert "stopped: the same command goes on" in capfd.readouterr().out
    pretrain_vs_hf.main(command)
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    curves = json.loads((out / "curves.json").read_text())
    assert [p["step"] for p in curves["ours"]] == [5, 10]
    assert len(curves["hf"]) == 3  # the evaluation that was interrupted is lost
    for points in curves.values():
        wrong = [p for p in points if not 0 < p["mlm_loss"] < 2 * result["unigram"]]
        assert not wrong, result["unigram"]
        for key in ("tokens", "seconds"):
            assert sorted(p[key] for p in points) == [p[key] for p in points]
    positions = (4 + 6) * 2 * 64
    assert 0.5 * positions < curves["ours"][-1]["tokens"] <= positions
    assert curves["hf"][-1]["tokens"] >= positions
    assert result["ratio"]["tokens_per_second"] > 0
    assert {p.name for p in out.glob("*.svg")} == {"over_seconds.svg", "over_tokens.svg"}
