import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.errors import UserError
from data_pipeline.stream import audit, objective, pairs, rows, stream
from data_pipeline.stream.audit import AuditConfig, epoch_account, main
from data_pipeline.stream.objective import LeftToRight
from tests.datasets import write_dataset

ROOT = Path(__file__).resolve().parents[3]
YAML = """
run_dir: runs/x
seed: 5
data: {{dir: {dir}, window_tokens: 60000, workers: 0}}
model: {{hidden_size: 64, anything: [1, 2]}}
phases:
  - {{max_seq_len: 64, row_len: 256, max_predictions: 10, rows_per_step: 24,
      micro_batch_rows: 3, steps: 9, learning_rate: 1.0e-3, warmup: 0.1}}
  - {{max_seq_len: 128, rows_per_step: 24, micro_batch_rows: 3, steps: 9}}
"""


@pytest.fixture
def config(toy: Path, tmp_path: Path) -> Path:
    path = tmp_path / "pretrain.yaml"
    path.write_text(YAML.format(dir=toy))
    return path


def lines(capsys: pytest.CaptureFixture[str], *argv: object) -> list[str]:
    assert main([str(a) for a in argv]) == 0
    return capsys.readouterr().out.splitlines()


def test_step_lines_do_not_depend_on_world_and_workers(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--config", config, "--steps", 4, "--phase", 1)
    alone = lines(capsys, *common)
    assert [line.split()[:2] for line in alone] == [["step", str(s)] for s in range(4)]
    assert all(len(line.split()[2]) == 64 for line in alone)
    assert lines(capsys, *common, "--world", 4, "--workers", 1) == alone
    assert lines(capsys, *common, "--world", 3, "--micro-batch-rows", 2) == alone
    both = lines(capsys, "--config", config, "--steps", 1)
    assert both[1] == "phase 1 " + alone[0] and both[0].startswith("phase 0 step 0 ")
    assert lines(capsys, *common, "--set", "seed=6") != alone


def test_an_epoch_is_proved(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = "\n".join(lines(capsys, "--config", config, "--epoch", 2))
    assert out.count("All promises kept.") == 2
    for part in ("Epoch 2 of phase 0", "exactly once: sentences as A or true B", "B is random",
                 "fill", "[MASK] / unchanged / random", "same sequence twice",
                 "sequences a step"):  # fmt: skip
        assert part in out


def account(
    toy: Path, objective: str = "masked", rows_per_step: int = 24, **data: Any
) -> audit.Account:
    settings = {"dir": str(toy), "window_tokens": 60_000, **data}
    phase = {"max_seq_len": 64, "row_len": 256, "max_predictions": 10}
    phase["rows_per_step"] = rows_per_step
    return epoch_account(AuditConfig(data=settings, phases=[phase], objective=objective), 0, 0)


def test_the_account_of_an_epoch_adds_up(toy: Path) -> None:
    from data_pipeline.corpus.manifest import load_manifest

    shards = load_manifest(toy).split("train")
    found = account(toy)
    assert not found.broken()
    assert found.documents == sum(s.documents for s in shards)
    assert found.sentences == sum(s.sentences for s in shards)
    assert found.source_tokens == sum(s.tokens for s in shards)
    assert found.candidates == found.tokens - 3 * found.sequences
    assert found.lengths.sum() == found.sequences and found.fills.sum() == found.rows
    assert found.compared > 50
    whole = account(toy, whole_word_mask=True)
    assert not whole.broken() and whole.predictions == found.predictions
    other = account(toy, mask={"mask": 0.5, "same": 0.2, "random": 0.3})
    assert not other.broken() and other.replaced[0] < 0.7 * found.replaced[0]
    balanced = account(toy, next_sentence="balanced")
    share = balanced.random / balanced.sequences
    assert abs(share - 0.5) < 4 * np.sqrt(0.25 / balanced.sequences) < 0.05
    assert found.random / found.sequences > share + 0.02
    texts = account(toy, next_sentence="none")
    assert not texts.broken() and "Next sentence" not in texts.page()
    assert texts.tokens == texts.source_tokens + 2 * texts.sequences
    assert texts.candidates == texts.source_tokens == found.source_tokens
    assert texts.compared > 50 and texts.duplicates == 0 and texts.fill > 0.98
    ahead = account(toy, "left_to_right", next_sentence="none")
    assert not ahead.broken() and "nothing is masked" in ahead.page()
    assert ahead.predictions == ahead.tokens - ahead.sequences and not ahead.replaced.any()


def test_an_epoch_of_less_than_a_step_has_an_account(toy: Path) -> None:
    found = account(toy, rows_per_step=100_000)
    assert found.per_step == [] and not found.broken() and "All promises kept." in found.page()
    assert found.sequences == account(toy).sequences


def test_broken_promises_are_told(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The audit would notice: a lost sentence, wrong tokens, other shares, a lost prediction."""
    plain_pairs = pairs.plan_pairs

    def forgetful(*args: Any, **more: Any) -> pairs.Pairs:
        made = plain_pairs(*args, **more)
        made.a_begin[::7] += made.a_begin[::7] < made.a_end[::7] - 1
        return made

    with monkeypatch.context() as m:
        m.setattr("data_pipeline.stream.plan.plan_pairs", forgetful)
        assert any("not used exactly once" in t for t in account(toy).broken())
    plain_texts = pairs.plan_texts

    def shifted(*args: Any, **more: Any) -> pairs.Pairs:
        made = plain_texts(*args, **more)
        made.a_offset[::7] += made.a_length[::7] > 60
        return made

    with monkeypatch.context() as m:
        m.setattr("data_pipeline.stream.plan.plan_texts", shifted)
        trouble = account(toy, next_sentence="none").broken()
        assert any("tokens not used exactly once" in t for t in trouble)
    plain_masks = objective.replacements
    with monkeypatch.context() as m:
        m.setattr(objective, "replacements", lambda labels, *a: np.where(
            np.arange(len(labels)) % 3, plain_masks(labels, *a), labels))  # fmt: skip
        assert any("unchanged at" in t for t in account(toy).broken())
    plain_raw = rows.unmasked_ids
    with monkeypatch.context() as m:
        m.setattr(rows, "unmasked_ids", lambda *a: np.roll(plain_raw(*a), 1))
        trouble = " ".join(account(toy).broken())
        assert "do not hold the planned sentences" in trouble
        assert "special tokens chosen" in trouble
    with monkeypatch.context() as m:
        plain_choose = objective.choose
        m.setattr(objective, "choose", lambda *a: tuple(x[:-1] for x in plain_choose(*a)))
        assert any("predictions, planned" in t for t in account(toy).broken())
    plain_apply = LeftToRight.apply

    def late(self: LeftToRight, ids: np.ndarray, *more: Any) -> tuple[np.ndarray, np.ndarray]:
        places, labels = plain_apply(self, ids, *more)
        return places, np.roll(labels, 1)

    with monkeypatch.context() as m:
        m.setattr(LeftToRight, "apply", late)
        trouble = account(toy, "left_to_right", next_sentence="none").broken()
        assert any("not the sequence's next token" in t for t in trouble)
    copy = Path(shutil.copytree(toy, tmp_path / "copy"))
    data = bytearray((copy / "shard-000001.tar").read_bytes())
    data[520] ^= 1
    (copy / "shard-000001.tar").write_bytes(data)
    with pytest.raises(UserError, match="shard-000001.tar record 0"):
        account(copy)


def test_exit_codes_and_messages(config: Path, toy: Path) -> None:
    def run(*argv: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "data_pipeline", "audit", *map(str, argv)],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip

    wrong = run("--config", config, "--steps", 1, "--world", 5)
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1
    assert "phases.0: 24 rows a step do not divide by 5 ranks" in wrong.stderr
    with pytest.raises(UserError, match="--phase 7: .* has 2 phases"):
        main(["--config", str(config), "--steps", "1", "--phase", "7"])
    slip = config.with_name("slip.yaml")
    slip.write_text(config.read_text().replace("rows_per_step", "rows_per_setp"))
    with pytest.raises(UserError, match=r"phases.0.rows_per_setp: unknown key; did you mean"):
        main(["--config", str(slip), "--steps", "1"])
    with pytest.raises(UserError, match=r"data.wrokers: unknown key .*did you mean data.workers"):
        main(["--config", str(config), "--steps", "1", "--set", "data.wrokers=1"])
    for option, value in (
        ("--steps", -1), ("--epoch", -1), ("--world", 0), ("--micro-batch-rows", 0)
    ):  # fmt: skip
        what = [] if option in ("--steps", "--epoch") else ["--steps", "1"]
        with pytest.raises(UserError, match=f"{option} {value}: at least"):
            main(["--config", str(config), *what, option, str(value)])
    with pytest.raises(UserError, match="data.workers: .* given -1"):
        main(["--config", str(config), "--steps", "1", "--workers", "-1"])


def test_a_data_set_without_a_token_is_one_line(config: Path, tmp_path: Path) -> None:
    write_dataset(tmp_path / "empty", [[]] * 5, heldout=[[[7] * 40]] * 5)
    said = "^shards shard-000000: no sentence to train on$"
    for what in (("--steps", "1"), ("--epoch", "0")):
        with pytest.raises(UserError, match=said):
            main(["--config", str(config), *what, "--set", f"data.dir={tmp_path / 'empty'}"])


def test_streams_are_closed_after_digests(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    plain = stream.Stream.close
    monkeypatch.setattr(stream.Stream, "close", lambda self: closed.append(1) or plain(self))
    tree = AuditConfig(
        data={"dir": str(toy), "workers": 0},
        phases=[{"max_seq_len": 64, "rows_per_step": 6}],
    )
    digests = audit.step_digests(tree, 0, 3, 2, 5)
    next(digests)
    digests.close()
    assert len(closed) == 3
