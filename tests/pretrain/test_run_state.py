"""The state of a run is one object: saved and restored it is the same."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from configs.load import load
from core.errors import UserError
from data_pipeline.corpus.manifest import Manifest
from data_pipeline.stream.state import StreamState
from pretrain.config import PretrainConfig
from pretrain.run_state import RunState, State, changes_since, check_resumable

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = Manifest(30522, "", True, (), ())
STREAM = StreamState("d", "v", 1, "h", {"row_len": 8}, seed=3, phase=0, rows_per_step=4)


def config(folder: Path, *overrides: str) -> PretrainConfig:
    settings = [f"run_dir={folder}", "engine.max_skipped_steps=2", *overrides]
    return load(ROOT / "configs/pretrain_demo.yaml", PretrainConfig, settings)


def step(state: RunState, bad: bool = False) -> None:
    before = replace(STREAM, row=4 * state.position.step)
    after = replace(before, row=before.row + 4)
    state.after_step(after, skipped=bad)
    state.rollbacks.note(bad, before, after)


def saved(state: RunState) -> State:
    return State.from_json(state.to_save(MANIFEST, 2).to_json(), "state.json")


def test_a_path_that_is_no_utf_8_is_read_again(tmp_path: Path) -> None:
    state = RunState(config(tmp_path, f"data.dir={os.fsdecode(b'/caf' + bytes([0xE9]))}"))
    state.note("start", world_size=2)
    state.note("init_from", path="/caf\udce9")
    found = saved(state)
    assert found.config["data"]["dir"] == "/caf\udce9" == found.history[1]["path"]
    assert found == state.to_save(MANIFEST, 2)


def test_a_state_saved_and_restored_is_the_same(tmp_path: Path) -> None:
    state = RunState(config(tmp_path))
    state.note("start", world_size=2)
    step(state)
    good = saved(state)
    for _ in range(2):
        step(state, bad=True)
    assert state.rollbacks.due and state.position.skipped == 2
    state.rollbacks.take(state.position.step, good.position.step)
    state.place_at(good)
    state.note("rollback")
    # The place is the checkpoint's, what has happened is kept.
    assert (state.position, state.stream) == (good.position, good.stream)
    assert [event["event"] for event in state.history] == ["start", "rollback"]
    assert [r.back_to for r in state.rollbacks.done] == [1]
    assert state.rollbacks.past(STREAM).row == STREAM.row
    assert state.rollbacks.past(replace(STREAM, row=4)).row == 12

    other = RunState(config(tmp_path))
    other.place_at(saved(state))
    other.history, other.rollbacks.done = list(saved(state).history), saved(state).rollbacks
    assert other.to_save(MANIFEST, 2) == state.to_save(MANIFEST, 2)


def test_another_task_than_the_checkpoints_is_refused(tmp_path: Path) -> None:
    texts, ahead = "data.next_sentence=none", "objective=left_to_right"
    old = saved(RunState(config(tmp_path)))
    del old.config["model"]["is_decoder"], old.config["objective"]  # of an older version
    for keys, said in {
        (): None,
        (texts,): "data.next_sentence: original, the config says none",
        (texts, ahead): "data.next_sentence: original, the config says none",
    }.items():
        with pytest.raises(UserError, match=said) if said else nullcontext():
            check_resumable(old, tmp_path, config(tmp_path, *keys), MANIFEST)
    masked = saved(RunState(config(tmp_path, texts)))
    with pytest.raises(UserError, match="model.is_decoder: False, the config says True"):
        check_resumable(masked, tmp_path, config(tmp_path, texts, ahead), MANIFEST)


def test_a_run_killed_after_a_rollback_still_knows_of_it(tmp_path: Path) -> None:
    state = RunState(config(tmp_path))
    step(state)
    good = saved(state)
    step(state, bad=True)
    step(state, bad=True)
    state.rollbacks.take(state.position.step, good.position.step)
    state.rollbacks.write()
    other = RunState(config(tmp_path))
    assert other.rollbacks.read(good.rollbacks) == state.rollbacks.done != ()
    state.rollbacks.forget()
    assert other.rollbacks.read(good.rollbacks) == ()


def test_changed_keys_and_a_batch_without_its_rate_are_said(tmp_path: Path) -> None:
    old = saved(RunState(config(tmp_path)))
    changes, lines = changes_since(old, config(tmp_path, "phases.1.sequences_per_step=32"))
    assert changes == {"phases.1.sequences_per_step": [8, 32]}
    assert lines[0] == "  changed since: phases.1.sequences_per_step: 8 -> 32"
    assert lines[1].startswith("warning: phases.1: ") and len(lines) == 2
    assert changes_since(old, config(tmp_path)) == ({}, [])


def test_other_steps_of_a_phase_that_is_over_are_refused(tmp_path: Path) -> None:
    state, more = RunState(config(tmp_path)), config(tmp_path, "phases.0.steps=99999")
    step(state)
    check_resumable(saved(state), tmp_path, more, MANIFEST)
    state.next_phase()
    check_resumable(saved(state), tmp_path, config(tmp_path, "phases.1.steps=99999"), MANIFEST)
    with pytest.raises(UserError, match="phases.0.steps: .* is over .* says 99999"):
        check_resumable(saved(state), tmp_path, more, MANIFEST)


def test_tokens_of_phases_that_an_older_version_trained_are_not_known(tmp_path: Path) -> None:
    state = RunState(config(tmp_path))
    step(state)
    for phase, tokens in ((0, 0), (1, None)):
        plain = json.loads(saved(state).to_json())
        del plain["position"]["tokens"]
        old = State.from_json(json.dumps(plain), "state.json")
        assert (old.position.phase, old.position.tokens) == (phase, tokens)
        assert old.position.next_phase(7).tokens == (None if phase else 7)
        state.next_phase()
