"""The whole trainer on real gloo processes: exact resume, world size, phases, clear refusals."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from configs.load import check, load
from core import hub
from core.errors import UserError
from core.files import sha256
from data_pipeline.corpus.manifest import load_manifest
from data_pipeline.stream.plan import Planner
from pretrain import checkpoint, convert, distributed, doctor, preflight, pretrained, report
from pretrain import run as entry_point
from pretrain.__main__ import main as command_line
from pretrain.card import model_card
from pretrain.checkpoint import Checkpoints
from pretrain.config import PhaseConfig, PretrainConfig
from pretrain.engine import Engine
from pretrain.fill_in import recorded
from pretrain.fragments import read_weights
from pretrain.model import BertForPreTraining
from pretrain.monitor import Monitor
from pretrain.plan import main as plan_main
from pretrain.run_state import sequences_per_step
from pretrain.stopwatch import PARTS
from pretrain.train import Trainer
from tests import gloo
from tests.damage import flipped
from tests.data_pipeline.stream.servers import http_server
from tests.datasets import write_dataset
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 200

SETTINGS = """
seed: 3
device: cpu
threads: 1
model:
  hidden_size: 32
  num_hidden_layers: 2
  num_attention_heads: 2
  intermediate_size: 64
  max_position_embeddings: 64
engine: {precision: fp32}
data: {workers: 0}
phases:
  - {max_seq_len: 32, row_len: 128, rows_per_step: 4, sequences_per_step: 16, max_predictions: 5,
      micro_batch_rows: 1, steps: 6, learning_rate: 1.0e-2, warmup: 0.3}
  - {max_seq_len: 64, row_len: 128, rows_per_step: 2, sequences_per_step: 4, max_predictions: 10,
      micro_batch_rows: 1, steps: 4, learning_rate: 5.0e-3, warmup: 0.5, decay: wsd, cooldown: 0.5}
checkpoint: {every_steps: 100, keep_last: 5}
evaluation: {every_steps: 5, rows: 4}
logging: {every_steps: 1}
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)

    def documents(count: int) -> list[list[list[int]]]:
        return [
            [
                rng.integers(5, VOCAB, rng.integers(3, 20)).tolist()
                for _ in range(rng.integers(4, 20))
            ]
            for _ in range(count)
        ]

    write_dataset(folder, documents(60), heldout=documents(10), vocab=VOCAB, documents_per_shard=20)
    (folder / "run.yaml").write_text(SETTINGS)
    return folder


def configure(data: Path, run: Path, *overrides: str) -> PretrainConfig:
    wanted = [f"data.dir={data}", f"run_dir={run}", *overrides]
    return load(data / "run.yaml", PretrainConfig, wanted)


def train(data: Path, run: Path, *overrides: str, stop: int | None = None) -> int:
    world = distributed.start("cpu")
    config = configure(data, run, *overrides)
    with preflight.run_folder(config, world):
        preflight.check(config, world)
        trainer = Trainer(config, world)
        with contextlib.closing(trainer.stop):  # a process may train here more than once
            return trainer.run(stop_at_step=stop)


def test_damage_is_written_down_in_the_runs_own_folder(data: Path, tmp_path: Path) -> None:
    assert configure(data, tmp_path / "r").data.ledger == str(tmp_path / "r/damaged.jsonl")
    elsewhere = configure(data, tmp_path / "r", f"data.ledger={tmp_path}/x").data.ledger
    assert elsewhere == f"{tmp_path}/x"


def losses(run: Path) -> dict[int, float]:
    lines = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    return {x["step"]: x["train/loss"] for x in lines if "train/loss" in x}


def weights(run: Path) -> dict[str, torch.Tensor]:
    return read_weights(checkpoint.resolve(run) / "engine")


Compared = namedtuple("Compared", "codes equal losses names held_out_plans unread moved")


def interrupted_and_not(rank: int, size: int, data: Path, out: Path) -> Compared:
    plans, plain = [], Planner.trace
    Planner.trace = lambda self, *at: plans.append(self.settings["split"]) or plain(self, *at)
    queued, unread = [], []
    step, record = Engine.train_step, Monitor.step
    Engine.train_step = lambda *arguments: queued.append(1) or step(*arguments)
    Monitor.step = lambda self, position, *more, **times: (
        unread.append((position.step, len(queued) - position.step))
        or record(self, position, *more, **times)
    )
    codes = [train(data, out / "straight")]
    Engine.train_step, Monitor.step = step, record
    held_out_plans = plans.count("heldout")
    for stop in (3, 6, 8, None):  # inside phase 1, at the switch, inside phase 2
        codes.append(train(data, out / "stopped", stop=stop))
    moved = out / "elsewhere"  # all that another cluster gets: the data and one checkpoint
    if rank == 0:
        shutil.copytree(data, moved / "data")
        kept = Path("checkpoints/step-00000008")
        shutil.copytree(out / "stopped" / kept, moved / "run" / kept)
    torch.distributed.barrier()
    codes.append(train(moved / "data", moved / "run"))
    straight, stopped = weights(out / "straight"), weights(out / "stopped")
    there = weights(moved / "run")
    equal = all(torch.equal(straight[n], stopped[n]) for n in straight)
    return Compared(
        codes,
        equal and straight.keys() == stopped.keys(),
        (losses(out / "straight"), losses(out / "stopped")),
        sorted(p.name for p in (out / "stopped/checkpoints").iterdir()),
        held_out_plans,
        unread,
        all(torch.equal(straight[n], there[n]) for n in straight),
    )


@pytest.fixture(scope="module")
def two_ranks(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Compared]]:
    out = tmp_path_factory.mktemp("two")
    return out, gloo.run(2, interrupted_and_not, data, out)


def test_stop_and_resume_gives_bitwise_the_weights_of_never_stopping(two_ranks: Any) -> None:
    _, results = two_ranks
    for result in results:
        assert result.codes == [0] * 6
        assert result.equal and result.moved
        straight, stopped = result.losses
        assert straight == stopped
        assert sorted(straight) == list(range(1, 11))
    assert results[0].names == [
        "latest", "step-00000003", "step-00000006", "step-00000008", "step-00000010"
    ]  # fmt: skip


def other_task(rank: int, size: int, data: Path, out: Path, keys: list[str]) -> list[bool]:
    """Whether a run that was stopped twice has the weights of one that was not, by name."""
    train(data, out / "straight", *keys)
    for stop in (3, 8, None):
        train(data, out / "stopped", *keys, stop=stop)
    other = ["data.next_sentence=original", "objective=masked"]
    with pytest.raises(UserError, match="holds a model with .*; use another run_dir"):
        train(data, out / "stopped", *keys, *other)
    straight, stopped = weights(out / "straight"), weights(out / "stopped")
    return [torch.equal(straight[name], stopped[name]) for name in straight]


def test_objectives_that_contradict_other_keys_are_refused(data: Path, tmp_path: Path) -> None:
    ahead = ["objective=left_to_right", "data.next_sentence=none"]
    config = configure(data, tmp_path, *ahead)
    assert config.model.is_decoder and not configure(data, tmp_path).model.is_decoder
    assert check(config.model_dump(mode="json"), PretrainConfig, "again") == config
    for keys, said in {
        ("objective=left_to_right",): "left_to_right takes data.next_sentence: none, not original",
        (*ahead, "model.is_decoder=false"): "is_decoder: follows from objective, .* left_to_right",
        ("model.is_decoder=true",): "is_decoder: follows from objective, which is masked",
        ("model.type_vocab_size=1",): "type_vocab_size: 1, .* data.next_sentence: original",
    }.items():
        with pytest.raises(UserError, match=said) as caught:
            configure(data, tmp_path, *keys)
        assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [["data.whole_word_mask=true"], ["objective=left_to_right"]])
def test_other_tasks_resume_bitwise_and_leave_next_sentence_alone(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: list[str]
) -> None:
    keys = ["data.next_sentence=none", *keys]
    for result in gloo.run(2, other_task, data, tmp_path, keys):
        assert all(result) and len(result) > 40
    shape = configure(data, tmp_path / "straight", *keys).model.with_vocab_size(VOCAB)
    start = BertForPreTraining(shape, generator=torch.Generator().manual_seed(3)).state_dict()
    for name, weight in weights(tmp_path / "straight").items():
        untrained = "pooler" in name or "seq_relationship" in name
        assert torch.equal(weight, start[name]) == untrained, name
    lines = (tmp_path / "straight/metrics.jsonl").read_text()
    assert '"heldout/mlm_loss"' in lines and "nsp" not in lines
    assert report.main([str(tmp_path / "straight"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nsp_loss"] is None
    assert report.main([str(tmp_path / "straight")]) == 0
    assert "no task" in capsys.readouterr().out
    assert command_line(["export", str(tmp_path / "straight"), str(tmp_path / "export")]) == 0
    assert "next-sentence" not in (tmp_path / "export/README.md").read_text()


def test_each_phase_has_its_rates_and_both_are_recorded(two_ranks: Any) -> None:
    out, results = two_ranks
    lines = [json.loads(x) for x in (out / "straight/metrics.jsonl").read_text().splitlines()]
    rates = {x["step"]: x["rate/learning_rate"] for x in lines if "rate/learning_rate" in x}
    assert max(rates[s] for s in range(1, 7)) > max(rates[s] for s in range(7, 11)) > 0
    assert rates[7] < rates[8]  # warm-up starts again
    assert {x["rate/phase"] for x in lines if "rate/phase" in x} == {1, 2}
    evaluated = [(x["step"], x["heldout/max_seq_len"]) for x in lines if "heldout/mlm_loss" in x]
    # The phase's own length last.
    assert evaluated == [(5, 64), (5, 32), (6, 64), (6, 32), (10, 32), (10, 64)]
    assert {r.held_out_plans for r in results} == {2}  # of each length once, as are the batches
    history = checkpoint.read_state(checkpoint.resolve(out / "stopped")).history
    events = [h["event"] for h in history]
    assert events == [
        "start", "phase", "resume", "phase", "resume", "phase", "resume", "phase"
    ]  # fmt: skip


def test_the_board_shows_losses_speed_and_health_by_the_runs_name(two_ranks: Any) -> None:
    out, _ = two_ranks
    found = EventAccumulator(str(out / "straight")).Reload()
    lines = [json.loads(x) for x in (out / "straight/metrics.jsonl").read_text().splitlines()]
    folds = {tag.split("/")[0] for tag in found.Tags()["scalars"]}
    assert folds == {"1_loss", "2_speed", "3_health", "heldout_32", "heldout_64"}
    steps = [x for x in lines if "train/loss" in x]
    shown = {e.step: e.value for e in found.Scalars("1_loss/masked_lm")}
    assert shown == pytest.approx({x["step"]: x["train/mlm_loss"] for x in steps})
    tokens = [x["progress/tokens"] for x in steps]
    assert tokens == sorted(tokens) and len(set(tokens)) == 10
    assert set(found.summary_metadata) >= {"_hparams_/experiment", "_hparams_/session_start_info"}
    texts = {tag for tag in found.Tags()["tensors"] if tag.startswith("run/")}
    assert texts == {f"run/{name}/text_summary" for name in ("config", "data", "starts")}
    (begun,) = found.Tensors("run/starts/text_summary")
    assert begun.tensor_proto.string_val[0].startswith(b"2 process(es) by ")


def test_a_step_is_read_when_the_next_is_queued_or_decides_something(two_ranks: Any) -> None:
    _, results = two_ranks
    decides = {5, 6, 10}  # an evaluation, the end of a phase, both
    for result in results:
        assert result.unread == [(step, int(step not in decides)) for step in range(1, 11)]


def test_every_record_says_where_the_step_went(two_ranks: Any) -> None:
    out, _ = two_ranks
    lines = [json.loads(x) for x in (out / "straight/metrics.jsonl").read_text().splitlines()]
    steps = [x for x in lines if "train/loss" in x]
    assert len(steps) == 10
    for x in steps:
        parts = {part: x[f"time/{part}"] for part in (*PARTS, "other")}
        assert min(parts.values()) > 0
        assert sum(parts.values()) == pytest.approx(x["throughput/step_seconds"], rel=1e-9)
        outside = (parts["data"] + parts["other"]) / x["throughput/step_seconds"]
        assert x["throughput/overhead_share"] == pytest.approx(outside, rel=1e-9)
        # This process holds more than the model's weights and less than the machine.
        assert 0.05 < x["memory/process_gb"] < 1000


def test_a_score_on_another_data_set_is_not_called_one_on_unseen_text(
    two_ranks: Any,
    data: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_another(path: Path, passed_over: list[str]) -> Any:
        weights, config, state, folder = checkpoint.load_model_state(path)
        dataset = state.dataset | {"dataset_id": "0" * 64}
        return weights, config, dataclasses.replace(state, dataset=dataset), folder

    monkeypatch.setattr(report, "load_model_state", of_another)
    run = str(two_ranks[0] / "straight")
    with pytest.raises(UserError, match="was trained on, 000000000000: what it holds out may"):
        report.main([run, "--score"])
    assert report.main([run, "--score", "--data", str(data)]) == 0
    heading = capsys.readouterr().out.splitlines()[0]
    assert f"what {data} holds out, another data set" in heading and "never saw" not in heading


def test_the_report_measures_what_the_run_measured(
    two_ranks: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # One process here, two ranks there: the held-out rows do not depend on who reads them.
    out, _ = two_ranks

    damaged = "damaged checkpoint passed over: step-00000099"

    def on_a_gpu(path: Path, passed_over: list[str]) -> Any:
        passed_over.append(damaged)
        weights, config, *rest = checkpoint.load_model_state(path)
        model = config.model.model_copy(update={"attention": "varlen"})  # takes no fp32
        return weights, config.model_copy(update={"model": model}), *rest

    monkeypatch.setattr(report, "load_model_state", on_a_gpu)
    lines = [json.loads(x) for x in (out / "straight/metrics.jsonl").read_text().splitlines()]
    last = [x for x in lines if "heldout/mlm_loss" in x][-1]
    assert report.main([str(out / "straight"), "--json"]) == 0
    kept = json.loads(capsys.readouterr().out)
    assert report.main([str(out / "straight"), "--json", "--score"]) == 0
    scored, told = capsys.readouterr()
    found = json.loads(scored)
    assert told.startswith(damaged) and "scoring at length 32 on the CPU: batch 1 of " in told
    for length, scores in kept["by_length"].items():
        assert found["by_length"][length].pop("by_source") == scores.pop("by_source") == {}
        assert found["by_length"][length] == pytest.approx(scores, rel=1e-5)
        assert length == "32" or scores.items() <= kept.items()
    for name in ("mlm_loss", "nsp_loss", "mlm_accuracy", "nsp_accuracy"):
        assert kept[name] == last[f"heldout/{name}"]
    # The tokens are drawn evenly: frequencies tell nothing.
    assert 0 <= found["commonest"] < 0.1
    assert found["entropy"] == pytest.approx(np.log(VOCAB), rel=0.05)
    assert list(found["by_length"]) == ["32", "64"]
    assert report.main([str(out / "straight")]) == 0
    page = capsys.readouterr().out
    assert "configs/finetune_classify.yaml" in page and "data_wikibooks" not in page
    assert found["by_length"]["64"].items() <= found.items()
    assert found["by_length"]["32"]["mlm_loss"] != found["mlm_loss"]
    state = checkpoint.read_state(checkpoint.resolve(out / "straight"))
    batch = found["sequences_per_step"]
    assert batch == pytest.approx(state.stream.sequences / 4, rel=0.2) and batch != 4
    pages = []
    for more in ([], ["--score"]):
        assert report.main([str(out / "straight"), *more]) == 0
        pages.append(capsys.readouterr().out)
    page = pages[0]
    assert f", {batch}" in page.split("sequences a step of training: about ")[1].splitlines()[0]
    assert "words right" in page and f"encoder.path={out}/straight glue" in page
    wide = [line for line in page.splitlines() if len(line) > 80 and str(out) not in line]
    assert not wide
    # The same tables and sentences; only the place is the checkpoint.
    assert page.splitlines()[1:] == pages[1].splitlines()[1:]
    with pytest.raises(UserError, match="a checkpoint, which has no records; --score"):
        report.main([str(checkpoint.resolve(out / "straight"))])


def test_sentences_are_filled_in_at_each_evaluation_and_after_a_resume(two_ranks: Any) -> None:
    out, _ = two_ranks
    found = recorded(out / "straight/metrics.jsonl")
    assert list(found) == [5, 6, 10]
    sentences = [[(x.sentence, x.word) for x in filled] for filled in found.values()]
    assert len(sentences[0]) == 5 and all(one == sentences[0] for one in sentences)
    assert found[5] != found[10]
    assert recorded(out / "stopped/metrics.jsonl") == found
    board = EventAccumulator(str(out / "straight")).Reload()
    shown = board.Tensors("samples/fill_in/text_summary")
    assert [e.step for e in shown] == [5, 6, 10]
    assert sentences[0][0][0] in shown[0].tensor_proto.string_val[0].decode()


def test_a_plan_from_a_run_has_the_rates_that_it_measured(
    two_ranks: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = two_ranks[0] / "straight"
    lines = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    assert plan_main(["--from", str(run), "--json", "--set", "device=auto"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["gpus"] == plan["run"]["world"] == 2 and plan["device"] == "cpu"
    for phase, planned in enumerate(plan["phases"], 1):
        steps = [x for x in lines if x.get("rate/phase") == phase]
        tokens = float(np.median([x["throughput/tokens_per_second"] for x in steps]))
        assert planned["tokens_per_second"] == pytest.approx(tokens, rel=0.1)
        assert 0.3 < planned["mean_fill"] < 1  # the data set's
    written = [x for x in lines if "checkpoint/bytes" in x][-1]
    rate = written["checkpoint/bytes"] / written["checkpoint/write_seconds"] / 1e9
    assert plan["write_gb_per_second"] == pytest.approx(rate)
    files = checkpoint.resolve(run).rglob("*.safetensors")
    assert plan["checkpoint_bytes"] == pytest.approx(sum(p.stat().st_size for p in files), rel=0.05)
    assert plan_main(["--from", str(run), "--hours", "0.01", "--gpus", "1"]) == 0
    page = capsys.readouterr().out
    assert f"at the rates of {run}" in page and "--set phases.0.steps=" in page
    assert plan_main(["--from", str(run)]) == 0
    assert "warning: the rates" not in capsys.readouterr().err
    shallow = ["--set", "model.num_hidden_layers=1", "phases.0.micro_batch_rows=1"]
    assert plan_main(["--from", str(run), *shallow]) == 0
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "the rates of" in x]
    assert "model.num_hidden_layers" in line and "vocab_size" not in line
    with pytest.raises(UserError, match="no step is recorded in its metrics.jsonl"):
        (run / "none").mkdir()
        shutil.copy(run / "config.yaml", run / "none")
        damaged = '{"step": 1, "time": 1.0, "rate/phase": NaN, "throughput/tflops_per_device": 1}'
        (run / "none/metrics.jsonl").write_text(f"{damaged}\n")
        plan_main(["--from", str(run / "none")])


def test_a_checkpoint_does_not_get_its_command_run(
    two_ranks: Any, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, folder = two_ranks[0], tmp_path / "stranger"
    shutil.copytree(checkpoint.resolve(out / "straight"), folder)
    state = json.loads((folder / "state.json").read_text())
    state["config"]["data"]["dir"] = f"pipe:touch {tmp_path}/executed #"
    written = folder / "state.json"

    def write() -> None:
        written.write_text(json.dumps(state))
        marker = json.loads((folder / "COMPLETE.json").read_text())
        marker["files"]["state.json"] = [written.stat().st_size, sha256(written)]
        (folder / "COMPLETE.json").write_text(json.dumps(marker))

    write()
    with pytest.raises(UserError, match="its data set is a command .* by --data"):
        report.main([str(folder), "--score"])
    assert command_line(["export", str(folder), str(tmp_path / "export")]) == 0
    assert "sources and licences unknown" in (tmp_path / "export/README.md").read_text()
    assert not (tmp_path / "executed").exists()
    capsys.readouterr()
    assert report.main([str(folder), "--score", "--json", f"--data={data}"]) == 0
    assert report.main([str(out / "straight"), "--score", "--json"]) == 0
    theirs, ours = capsys.readouterr().out.splitlines()
    assert theirs == ours
    state["position"]["phase"] = 7
    write()
    with pytest.raises(UserError, match=f"^{written}: position.phase: 7 .* has 2 phase"):
        report.main([str(folder), "--score", f"--data={data}"])
    state["position"]["phase"] = 1
    state["config"]["model"]["intermediate_size"] = 96
    write()
    with pytest.raises(UserError, match=f"^{folder}: .* is .*, config says "):
        report.main([str(folder), "--score", f"--data={data}"])


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """A checkpoint's weights, changed, as the format bert-engine-1 holds them."""
    engine, held = folder / "engine", read_weights(folder / "engine")
    change(held)
    trained = {name: t for name, t in held.items() if t.dtype == torch.float32}
    zeros = [torch.zeros_like(t) for t in trained.values()]
    states = {n: {"step": 1.0, "exp_avg": t, "exp_avg_sq": t} for n, t in enumerate(zeros)}
    shutil.rmtree(engine)
    engine.mkdir()
    model = {
        "module": held, "optimizer": {"fp32": trained, "state": {"state": states}},
        "param_shapes": [{name: t.shape for name, t in trained.items()}],
        "engine": {"steps": 1}, "loss_scaler": {},
    }  # fmt: skip
    torch.save(model, engine / "mp_rank_00_model_states.pt")
    meta = {"format": "bert-engine-1", "world_size": 1, "zero_stage": 0, "precision": "fp32"}
    (engine / "engine.json").write_text(json.dumps(meta))
    seal(folder)


def seal(folder: Path) -> None:
    written = [p for p in folder.rglob("*") if p.is_file() and p.name != "COMPLETE.json"]
    files = {str(p.relative_to(folder)): [p.stat().st_size, sha256(p)] for p in written}
    (folder / "COMPLETE.json").write_text(json.dumps({"files": files}))


def test_an_export_waits_for_no_origin_that_is_slow(
    two_ranks: Any, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, origin = tmp_path / "stranger", tmp_path / "origin"
    shutil.copytree(checkpoint.resolve(two_ranks[0] / "straight"), folder)
    shutil.copytree(data, origin)
    with (origin / "manifest.json").open("ab") as file:
        file.write(b" " * (2 << 20))
    state = json.loads((folder / "state.json").read_text())
    with http_server(origin) as (url, behaviour):
        state["config"]["data"]["dir"] = url
        (folder / "state.json").write_text(json.dumps(state))
        seal(folder)
        for seconds, there in ((30.0, True), (0.2, False)):
            behaviour.fault, behaviour.stall = "slow", 1.0
            monkeypatch.setattr(convert, "ORIGIN_SECONDS", seconds)
            out = tmp_path / str(seconds)
            assert command_line(["export", str(folder), str(out)]) == 0
            assert ("was not at hand" in (out / "README.md").read_text()) != there


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda w: w.update({"classifier.weight": torch.ones(2, dtype=torch.int16)}), "unknown"),
        (lambda w: [w.pop(name) for name in list(w) if "pooler" in name], "missing"),
    ],
)
def test_a_checkpoint_with_other_parts_is_exported_and_scored_in_one_line(
    two_ranks: Any,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, torch.Tensor]], Any],
    problem: str,
) -> None:
    folder, out = tmp_path / "stranger", tmp_path / "export"
    shutil.copytree(checkpoint.resolve(two_ranks[0] / "straight"), folder)
    rewritten(folder, change)
    assert command_line(["export", str(folder), str(out)]) == 0
    left = "left behind, of another task: classifier\n"
    assert (left in capsys.readouterr().out) == (problem == "unknown")
    assert not pretrained.read(out).other_heads
    with pytest.raises(UserError, match=f"^{folder}: {problem} key (classifier|bert.pooler)"):
        report.main([str(folder), "--score", f"--data={data}"])


def alone(rank: int, size: int, data: Path, out: Path) -> dict[str, Any]:
    drop = ["model.hidden_dropout_prob=0", "model.attention_probs_dropout_prob=0"]
    train(data, out / "one", *drop)
    train(data, out / "wide", *drop, "phases.0.micro_batch_rows=3", "phases.1.micro_batch_rows=3")
    return {"one": losses(out / "one"), "wide": losses(out / "wide")}


def without_dropout(rank: int, size: int, data: Path, out: Path) -> tuple[dict[int, float], str]:
    try:
        said = f"exit code {train(data, out, 'phases.1.rows_per_step=5')}"
    except UserError as error:
        said = str(error)
    train(
        data, out, "model.hidden_dropout_prob=0", "model.attention_probs_dropout_prob=0",
        "engine.zero_stage=0",
    )  # fmt: skip
    return losses(out), said


def extended_and_not(rank: int, size: int, data: Path, out: Path) -> tuple[list, list, bool]:
    steady = ("phases.1.decay=constant", "phases.1.warmup=0", f"seed={2**63 - 1}")
    codes, reached = [train(data, out / "straight", *steady, "phases.1.steps=7")], []
    # A stop that lies behind trains nothing, at the last step it is the end; fewer steps are done.
    for steps, stop in ((4, None), (7, 9), (7, 13), (4, None)):
        codes.append(train(data, out / "extended", *steady, f"phases.1.steps={steps}", stop=stop))
        newest = checkpoint.resolve(out / "extended")
        mark = out / "extended/FINISHED"
        reached.append(
            (checkpoint.read_state(newest).position.step, mark.exists() and mark.read_text())
        )
    straight, extended = weights(out / "straight"), weights(out / "extended")
    return codes, reached, all(torch.equal(straight[name], extended[name]) for name in straight)


@pytest.mark.parametrize("step", ["0", "-5", "x"])
def test_steps_to_stop_at_are_counted_from_1(
    step: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["run.py", "--config", "none.yaml", "--stop-at-step", step])
    with pytest.raises(SystemExit, match="2"):
        entry_point.read_command_line()
    assert "--stop-at-step: " in capsys.readouterr().err


def test_a_finished_run_goes_on_bitwise_when_more_steps_are_asked_for(
    data: Path, tmp_path: Path
) -> None:
    reached = [(10, "10\n"), (10, False), (13, "13\n"), (13, "10\n")]
    assert gloo.run(1, extended_and_not, data, tmp_path) == [([0] * 5, reached, True)]


def shown_cooldown() -> tuple[list[str], dict[str, Any]]:
    """docs/running.md: the keys of a cooldown inside the phase, and the phase of its own."""
    text = (ROOT / "docs/running.md").read_text()
    keys = next(x for x in text.splitlines() if "--set run_dir=runs/cooled" in x)
    phase = text.partition("    phases:\n")[2].partition("\n\n")[0]
    _, own = yaml.safe_load(phase)
    return keys.split("--set run_dir=runs/cooled ")[1].split(), own


def cooled_and_not(rank: int, size: int, data: Path, out: Path) -> list[bool]:
    """Whether a branch from a checkpoint has the weights of a run that never was longer: the
    cooldown at the end of its phase, and as a phase of its own."""
    inside, own = shown_cooldown()
    first = load(data / "run.yaml", PretrainConfig, ["run_dir=x", "data.dir=x"]).phases[0]
    first = first.model_copy(update={"warmup": 0.0, "convention": "continuous"})
    long = first.model_copy(update={"decay": "constant", "steps": 20})
    half = long.model_copy(update={"steps": 4})
    after = half.model_copy(update={"steps": 2} | {k: own[k] for k in ("decay", "cooldown")})

    def keys(*phases: PhaseConfig) -> list[str]:
        return [f"phases={json.dumps([phase.model_dump() for phase in phases])}"]

    train(data, out / "long", *keys(long), stop=4)
    equal = []
    for name, more in {
        # 10,000 + 2,500 steps there, 4 + 1 here
        "inside": [*keys(long), *inside, "phases.0.steps=5"],
        "own": keys(half, after),
    }.items():
        shutil.copytree(out / "long/checkpoints", out / f"{name}/checkpoints")
        train(data, out / name, *more)
        train(data, out / f"{name} at once", *more)
        cooled, straight = weights(out / name), weights(out / f"{name} at once")
        equal.append(all(torch.equal(cooled[n], straight[n]) for n in straight))
    # Bias correction goes on: its count is that of all updates.
    engine = json.loads((checkpoint.resolve(out / "own") / "engine/engine.json").read_text())
    return [*equal, set(engine["updates"].values()) == {6.0}]


def test_a_cooldown_from_a_checkpoint_is_the_run_that_was_never_longer(
    data: Path, tmp_path: Path
) -> None:
    _, own = shown_cooldown()
    assert check(own, PhaseConfig, "docs/running.md").warmup == 0
    assert gloo.run(1, cooled_and_not, data, tmp_path) == [[True] * 3]


def test_ranks_stages_and_micro_batches_do_not_change_the_run(data: Path, tmp_path: Path) -> None:
    one = gloo.run(1, alone, data, tmp_path)[0]
    two, said = gloo.run(2, without_dropout, data, tmp_path / "two")[0]
    # A phase that does not divide ends the run before the first step of the first phase ...
    assert said == (
        "phases.1: 5 rows a step do not divide by 2 ranks; 1 rank would do, or "
        "phases.1.rows_per_step: 4"
    )
    assert list(two) == list(range(1, 11))
    # ... and so it does the plan, in the same line.
    path = tmp_path / "run.yaml"
    path.write_text(SETTINGS.replace("data: {", f"run_dir: r\ndata: {{dir: {data}, "))
    with pytest.raises(UserError) as caught:
        plan_main(["--config", str(path), "--gpus", "2", "--set", "phases.1.rows_per_step=5"])
    assert str(caught.value) == said
    assert list(one["one"]) == list(range(1, 11))
    for step, loss in one["one"].items():
        assert one["wide"][step] == pytest.approx(loss, rel=1e-5)
        assert two[step] == pytest.approx(loss, rel=1e-5)


def bare(out: Path) -> Path:
    """A data set of which nothing is held out."""
    sentences = [list(range(5, 40))] * 9
    write_dataset(out / "bare", [sentences] * 9, vocab=VOCAB)
    return out / "bare"


def without_a_row(out: Path) -> Path:
    """A data set whose held-out document is too short for a row."""
    write_dataset(out / "rowless", [[list(range(5, 40))] * 9] * 9, heldout=[[]], vocab=VOCAB)
    return out / "rowless"


def refusals(rank: int, size: int, data: Path, out: Path) -> dict[str, str]:
    def said(name: str, *overrides: str) -> str:
        try:
            train(data, out / "r", f"run_dir={out / name}", *overrides)
        except UserError as error:
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, name  # as before
            return str(error)
        return "nothing"

    for_ever = "checkpoint.every_steps=1", "phases.1.steps=1000000000"
    result = {
        "empty folder": said("a", f"data.dir={out}"),
        "vocabulary": said("b", "model.vocab_size=30522"),
        "positions": said("d", "phases.0.max_seq_len=128"),
        "disk": said("e", "checkpoint.keep_last=1000000000", *for_ever),
        "disk for all steps": said("e", "checkpoint.keep_every=1", *for_ever),
        "nothing held out": said("e", f"data.dir={bare(out)}"),
        "no held-out row": said("i", f"data.dir={without_a_row(out)}"),
        "no init": said("f", f"init_from={out / 'nowhere'}"),
    }
    (out / "k/rollbacks.json").mkdir(parents=True)
    result["rollbacks"] = said("k")
    assert not (out / "i").exists()  # before a step was done
    train(data, out / "g", "phases.0.sequences_per_step=2", stop=2)
    assert command_line(["export", str(out / "g"), str(out / "export")]) == 0
    pieces = (out / "export/vocab.txt").read_text().split("\n")
    pieces[20], pieces[21] = pieces[21], pieces[20]
    (out / "export/vocab.txt").write_text("\n".join(pieces))
    result["pieces"] = said("h", f"init_from={out / 'export'}")
    result["heads"] = said("h", f"init_from={out / 'g'}", "model.num_attention_heads=4")
    result["shape"] = said("g", "model.hidden_size=64")
    result["seed"] = said("g", "seed=4")
    for name, key in (("shape", "model.hidden_size=64"), ("seed", "seed=4"), ("well", "seed=3")):
        found = doctor.examine(configure(data, out / "g", key), distributed.start("cpu"), 300, None)
        result[f"doctor, {name}"] = next(line.mend for line in found if line.name == "data")
    shutil.copytree(out / "g", out / "over")
    train(data, out / "over", "phases.0.sequences_per_step=2", stop=6)  # its first phase is over
    over = configure(data, out / "over", "seed=4")
    found = doctor.examine(over, distributed.start("cpu"), 300, None)
    result["doctor, over"] = next(line.mend for line in found if line.name == "data")
    result["over"] = said("over", "seed=4")
    begun, aside = out / "g", out / "aside"
    for name, stands in (
        ("rollbacks.json", "a pipe"), ("metrics.jsonl", "a pipe"), ("lock", "a pipe"),
        ("lock", "a link"), ("FINISHED", "a folder"), ("metrics.jsonl", "a dangling link"),
        ("config.yaml", "a link to a folder"), ("", "a dangling link"), ("", "a pipe"),
    ):  # fmt: skip
        mine = begun / name
        if mine.exists():
            mine.rename(aside)
        if stands == "a pipe":
            os.mkfifo(mine)
        elif stands == "a folder":
            mine.mkdir()
        else:
            to = {"a link": aside, "a link to a folder": out}.get(stands, out / "nowhere")
            mine.symlink_to(to)
        found = doctor.examine(configure(data, begun), distributed.start("cpu"), 300, None)
        result[f"doctor, {name}, {stands}"] = next(x.mend for x in found if x.name == "run folder")
        # Of these two a start would go on.
        if name != "config.yaml" and (name, stands) != ("metrics.jsonl", "a dangling link"):
            result[f"{name}, {stands}"] = said("g")
        mine.rmdir() if stands == "a folder" else mine.unlink()
        if aside.exists():
            aside.rename(mine)
    shutil.copytree(out / "g", out / "broken")
    for half in out.glob("broken/checkpoints/step-*/COMPLETE.json"):
        half.unlink()
    shutil.copytree(out / "g", out / "strange")
    (out / "strange/config.yaml").unlink()
    (out / "strange/config.yaml").mkdir()
    (out / "weightless").mkdir()
    for name in ("config.json", "vocab.txt"):
        shutil.copy(out / "export" / name, out / "weightless")
    given = f"init_from={out / 'weightless'}", "data.accept_changed=[vocab_sha256]"
    for name, line, sets in (
        ("broken", "data", ()), ("strange", "run folder", ()), ("k", "run folder", ()),
        ("l", "init_from", given),
    ):  # fmt: skip
        of_run = configure(data, out / name, *sets)
        found = doctor.examine(of_run, distributed.start("cpu"), 300, None)
        result[f"doctor, {name}"] = next(x.mend for x in found if x.name == line)
        result[name] = said(name, *sets)
    newest = checkpoint.resolve(out / "g")
    text = newest.joinpath("state.json").read_text()
    newest.joinpath("state.json").write_text(text.replace('"phase": 0', '"phase": 7', 1))
    marker = json.loads(newest.joinpath("COMPLETE.json").read_text())
    marker["files"]["state.json"][1] = sha256(newest / "state.json")
    newest.joinpath("COMPLETE.json").write_text(json.dumps(marker))
    result["phase"] = said("g")
    newest.joinpath("state.json").write_text(text)
    marker["files"]["state.json"][1] = sha256(newest / "state.json")
    newest.joinpath("COMPLETE.json").write_text(json.dumps(marker))
    other = out / "other"
    rng = np.random.default_rng(1)
    write_dataset(
        other, [[rng.integers(5, VOCAB, 9).tolist() for _ in range(9)] for _ in range(40)],
        heldout=[[[7, 8, 9]] * 9], vocab=VOCAB,
    )  # fmt: skip
    result["dataset"] = said("g", f"data.dir={other}")
    with preflight.run_folder(configure(data, out / "g"), distributed.start("cpu")):
        result["folder in use"] = said("g")
    return result


def test_mistakes_are_refused_in_one_line_that_names_them(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = gloo.run(1, refusals, data, tmp_path)[0]
    shown = capfd.readouterr().out
    takes = re.search(r"phase 1: 6 steps .*, about ([0-9.]+) sequences", shown)[1]
    assert f"warning: phases.0.sequences_per_step: 2, but a step takes about {takes}: " in shown
    assert f"warning: phases.0.learning_rate 0.01 is far from that of {float(takes):.0f} " in shown
    assert (said["doctor, well"], said["doctor, over"], said["over"]) == ("", "", "nothing")
    assert said["doctor, metrics.jsonl, a dangling link"] == ""
    assert said["doctor, config.yaml, a link to a folder"] == ""
    for name, parts in {
        "empty folder": ["manifest.json", "no such file", "prepare"],
        "vocabulary": ["model.vocab_size: 30522", "200"],
        "positions": ["phases.0.max_seq_len: 128", "model.max_position_embeddings: 64"],
        "disk": ["not enough disk", "checkpoint.keep_last"],
        "disk for all steps": ["not enough disk", "checkpoint.keep_every: 1"],
        "nothing held out": ["manifest.json", "split 'heldout' holds no documents"],
        "no held-out row": ["rank 0: held-out data: no row can be made"],
        "no init": ["nowhere", "no such folder"],
        "rollbacks": ["k/rollbacks.json: Is a directory"],
        "pieces": ["init_from", "another vocabulary", "piece 20", "data.accept_changed"],
        "heads": ["init_from", "num_attention_heads 2", "says 4", "model.num_attention_heads: 2"],
        "shape": ["model.hidden_size: 32", "64", "run_dir"],
        "doctor, shape": ["model.hidden_size: 32", "64", "run_dir"],
        "doctor, seed": ["seed is 3", "4 now"],
        **{
            f"{who}{name}, {stands}": [f"g{'/' * bool(name)}{name}: ", told]
            for who in ("doctor, ", "")
            for name, stands, told in (
                ("rollbacks.json", "a pipe", "not a regular file"),
                ("metrics.jsonl", "a pipe", "not a regular file"),
                ("lock", "a pipe", ""),
                ("lock", "a link", "Too many levels of symbolic links"),
                ("FINISHED", "a folder", "Is a directory"),
                ("", "a dangling link", "a link to "),
                ("", "a pipe", "no folder"),
            )
        },
        **{
            f"{who}{name}": [part]
            for who in ("doctor, ", "")
            for name, part in (
                ("broken", "no checkpoint of this run is whole"),
                ("strange", "strange/config.yaml: Is a directory"),
                ("k", "k/rollbacks.json: Is a directory"),
                ("l", "weightless: holds neither model.safetensors nor"),
            )
        },
        "seed": ["seed is 3", "4 now"],
        "phase": ["state.json: position.phase: 7", "2 phase(s)"],
        "dataset": ["dataset_id", "data.accept_changed"],
        "folder in use": ["run_dir", "in use"],
    }.items():
        assert "\n" not in said[name]
        for part in parts:
            assert part in said[name], f"{name}: {said[name]}"


def seen_by_one(rank: int, size: int, data: Path, out: Path) -> list[str]:
    """What is said where the second rank reads other files than the first."""

    def said(run: Path, *overrides: str) -> str:
        with pytest.raises(UserError) as caught:
            train(data, run, *overrides)
        return str(caught.value)

    for seed in range(size):  # a model of each, at one relative path
        train(data, out / "r", f"run_dir={out / str(seed)}", f"seed={seed}", stop=1)
    os.chdir(out / str(rank))
    answers = [said(out / "begun", "init_from=checkpoints/step-00000001")]

    def and_damages(self: Checkpoints, *before: int) -> Path | None:
        found = newest(self, *before)
        if rank:
            path = found / f"engine/rank-{rank:05d}.safetensors"
            path.write_bytes(flipped(path.read_bytes(), path.stat().st_size - 8))
        return found

    newest, Checkpoints.newest = Checkpoints.newest, and_damages
    return [*answers, said(out / "0", "seed=0")]


def test_ranks_that_see_other_weights_are_told(data: Path, tmp_path: Path) -> None:
    for begun, resumed in gloo.run(2, seen_by_one, data, tmp_path):
        assert re.match(r"the ranks disagree on init_from \(.*step-00000001, .*: rank 0: ", begun)
        assert re.fullmatch(r".*rank-00001.safetensors: its bytes, as \S+ sees them, .*", resumed)


def test_a_run_is_exported_and_read_alike(
    two_ranks, data: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    run, out = two_ranks[0] / "straight", tmp_path / "export"
    pushed = []
    monkeypatch.setattr(hub, "push", lambda *given: pushed.append(given) or "there")
    assert command_line(["export", str(run), str(out), "--push", "me/x"]) == 0
    assert pushed == [(out, "me/x", "step 10 of straight")]
    assert capsys.readouterr().out.endswith(f"(step 10) -> {out}\n{out} -> there\n")
    ours, theirs = pretrained.read(run), pretrained.read(out)
    assert ours.shape.model_dump() == theirs.shape.model_dump()
    assert ours.tokenizer.pieces == theirs.tokenizer.pieces and len(ours.tokenizer) == VOCAB
    assert ours.weights.keys() == theirs.weights.keys() == weights(run).keys()
    for name, tensor in weights(run).items():
        assert torch.equal(tensor[: len(ours.weights[name])], ours.weights[name]), name
        assert torch.equal(theirs.weights[name], ours.weights[name]), name
    card, state = (out / "README.md").read_text(), checkpoint.read_state(checkpoint.resolve(run))
    assert "- optimiser steps: 10 of 10" in card
    for number, batch in enumerate(sequences_per_step(state, configure(data, run)), 1):
        assert f"- phase {number}: {[6, 4][number - 1]} steps of about {batch} sequences" in card


def test_an_average_is_the_plain_mean_of_the_last_checkpoints(
    two_ranks: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = two_ranks[0] / "stopped", tmp_path / "export"
    assert command_line(["export", str(run), str(out), "--average", "3"]) == 0
    assert "mean of the last 3 whole checkpoints" in capsys.readouterr().out
    folders = [run / f"checkpoints/step-{step:08d}" for step in (6, 8, 10)]
    each = [read_weights(folder / "engine") for folder in folders]
    found = pretrained.read(out).weights
    for name, tensor in found.items():
        mean = sum(w[name].double() for w in each) / 3
        assert torch.equal(tensor, mean.float()[: len(tensor)]), name
    card = (out / "README.md").read_text()
    assert "mean of the last 3 whole checkpoints" in card and "model-index" not in card
    one = pretrained.of_checkpoint(run / "checkpoints/step-00000008", average=2)[0].weights
    assert torch.equal(one["cls.predictions.bias"], ((each[0]["cls.predictions.bias"].double()
        + each[1]["cls.predictions.bias"].double()) / 2).float()[:VOCAB])  # fmt: skip
    copies = tmp_path / "copies"
    shutil.copytree(run, copies)
    place = copies / "checkpoints"
    shutil.copytree(place / "step-00000008", place / "step-00000008.bak")
    shutil.copytree(place / "step-00000008", place / "best")
    (place / "the-best").symlink_to("step-00000008")
    for name in ("step-00000008.bak", "best", "the-best"):
        same = pretrained.of_checkpoint(place / name, average=2)[0].weights
        assert all(torch.equal(w, one[n]) for n, w in same.items()), name
    assert command_line(["export", str(run), str(out), "--average", "5"]) == 2
    assert "4 whole checkpoint(s) up to step-00000010, not 5\n" in capsys.readouterr().err
    for key, value in (("vocab_sha256", "0" * 64), ("model.layer_norm_eps", 1e-6)):
        other = tmp_path / key
        shutil.copytree(run, other)
        state = other / "checkpoints/step-00000008/state.json"
        plain = json.loads(state.read_text())
        holder = plain["config"]["model"] if "." in key else plain["dataset"]
        holder[key.rpartition(".")[2]] = value
        state.write_text(json.dumps(plain))
        marker = json.loads(state.with_name("COMPLETE.json").read_text())
        marker["files"]["state.json"] = [state.stat().st_size, sha256(state)]
        state.with_name("COMPLETE.json").write_text(json.dumps(marker))
        assert command_line(["export", str(other), f"{out}-3", "--average", "2"]) == 2
        told = f"{state.parent}: was trained with {key} "
        assert told in (said := capsys.readouterr().err) and "no mean of the two" in said
        assert command_line(["export", str(other), f"{out}-3"]) == 0
        shutil.rmtree(f"{out}-3")
    damaged = tmp_path / "damaged"
    shutil.copytree(run, damaged)
    (damaged / "checkpoints/step-00000008/state.json").write_text("{}")
    assert command_line(["export", str(damaged), f"{out}-2", "--average", "2"]) == 0
    assert f"passed over: {damaged}/checkpoints/step-00000008" in capsys.readouterr().out
    bias = pretrained.read(f"{out}-2").weights["cls.predictions.bias"]
    mean = sum(each[n]["cls.predictions.bias"].double() for n in (0, 2)) / 2
    assert torch.equal(bias, mean.float()[:VOCAB])


def test_the_card_has_what_the_hub_reads(
    two_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = two_ranks[0] / "straight", tmp_path / "export"
    named = ["--language", "en", "--licence", "mit"]
    assert command_line(["export", str(run), str(out), *named]) == 0
    data = ModelCard.load(out / "README.md").data
    assert (data.language, data.license, data.pipeline_tag) == (["en"], "mit", "fill-mask")
    lines = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    last = {x["heldout/max_seq_len"]: x for x in lines if "heldout/mlm_loss" in x}
    measured = {(r.metric_name, r.metric_value) for r in data.eval_results}
    assert measured == {
        (f"{name}, sequences of up to {length}", round(last[length][f"heldout/{tag}"], 4))
        for length in (32, 64)
        for tag, name in (("mlm_loss", "loss, nats"), ("mlm_accuracy", "tokens right"))
    }
    between = two_ranks[0] / "stopped/checkpoints/step-00000008"  # the evaluation was at step 6
    assert command_line(["export", str(between), str(tmp_path / "between")]) == 0
    assert "model-index" not in (tmp_path / "between/README.md").read_text()
    written, config, state = pretrained.of_checkpoint(run)
    odd = dataclasses.replace(
        state, code_version="x\n# y\x1b", dataset=state.dataset | {"dataset_id": "z\n# y"}
    )
    text = model_card(odd, config, written.shape, written.path, None)
    assert "- code: x\\n# y\\x1b\n" in text and "Dataset `z\\n# y`." in text
    manifest = load_manifest(config.data.dir)
    strange = {"name": "a\n# b", "licence": "\u202eCC\x1b[31m", "provenance": "\x1b]0;c\x07\n# d"}
    sources = tuple(dataclasses.replace(source, **strange) for source in manifest.sources)
    manifest = dataclasses.replace(manifest, sources=sources)
    weights = config.data.model_copy(update={"weights": {"e\x1b\n# f": 2.0}})
    config = config.model_copy(update={"data": weights})
    text = model_card(state, config, written.shape, written.path, manifest)
    lines = text.split("\n")
    assert not any("\x1b" in line or "\u202e" in line for line in lines)
    assert [line for line in lines if line.startswith("# ")] == [f"# {run.name}"]
    assert "\\x1b]0;c\\x07\\n# d |" in text and "an epoch: e\\x1b\\n# f 2; of" in text
    monkeypatch.chdir(between.parent)
    assert command_line(["export", between.name, str(tmp_path / "short")]) == 0
    assert f"\n# {between.parents[1].name}\n" in (tmp_path / "short/README.md").read_text()


# ------------------------------------------------------------------------------------- launchers


def command(launcher: str, data: Path, run: Path, *overrides: str) -> list[str]:
    bin_ = Path(sys.executable).parent
    port = str(free_port())
    start = {
        "python": [sys.executable],
        "deepspeed": [
            str(bin_ / "deepspeed"), "--log_level", "error", "--num_gpus", "2",
            "--master_port", port,
        ],
        "torchrun": [str(bin_ / "torchrun"), "--nproc_per_node", "2", "--master_port", port],
        "mpiexec": [str(bin_ / "mpiexec"), "-n", "2", sys.executable],
    }[launcher]  # fmt: skip
    sets = [f"data.dir={data}", f"run_dir={run}", *overrides]
    return [
        *start,
        str(ROOT / "pretrain/run.py"),
        "--config",
        str(data / "run.yaml"),
        "--set",
        *sets,
    ]


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    port = {"MASTER_PORT": str(free_port())}
    return os.environ | port | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PATH": path}


def test_the_entry_point_explains_itself_and_mistakes(data: Path) -> None:
    # A signal in these moments finds no handler yet, so they are short: no torch.
    entry = (
        "import runpy, sys\ntry:\n    runpy.run_path(sys.argv.pop(1), run_name='__main__')\n"
        "finally:\n    assert 'torch' not in sys.modules"
    )

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", entry, str(ROOT / "pretrain/run.py"), *arguments],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    printed = run("--config", str(data / "run.yaml"), "--set", "run_dir=x", "--print-config")
    assert (printed.returncode, printed.stderr) == (0, "") and "run_dir: x" in printed.stdout

    help_ = run("--help")
    for part in (
        "phases.N.learning_rate  (number",
        "default",
        "engine.zero_stage",
        "--print-config",
    ):
        assert part in help_.stdout
    typo = run("--config", str(data / "run.yaml"), "--set", "run_dir=x", "phases.0.stpes=3")
    assert (typo.returncode, typo.stdout) == (2, "")
    assert typo.stderr.count("\n") == 1 and "did you mean phases.0.steps?" in typo.stderr


@pytest.mark.parametrize(
    ("script", "module"),
    [
        ("pretrain/run.py", "configs.load"),
        ("pretrain/run.py", "pretrain.config"),
        ("finetune/run.py", "configs.load"),
        ("finetune/run.py", "finetune.config"),
    ],
)
def test_ctrl_c_during_the_imports_is_one_line(script: str, module: str) -> None:
    entry = f"""
import os, runpy, signal, sys
class Stop:
    def find_spec(name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Stop)
runpy.run_path({str(ROOT / script)!r}, run_name="__main__")
"""
    ended = subprocess.run([sys.executable, "-c", entry], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (130, "stopped by Ctrl-C\n")


def signalled_as_it_meets(rank: int, size: int, data: Path, run: Path) -> Any:
    meet = distributed.meet

    def signalled(world: distributed.World) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        meet(world)

    distributed.meet = signalled
    return ended(data, run)


def signalled_as_it_ends(rank: int, size: int, data: Path, run: Path) -> Any:
    train_on = Trainer.run

    def signalled(trainer: Trainer, stop_at_step: int | None) -> int:
        code = train_on(trainer, stop_at_step)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return code

    Trainer.run = signalled
    return ended(data, run)


def ended(data: Path, run: Path) -> Any:
    distributed.finish = lambda code: None
    sys.argv = ["run.py", "--config", f"{data}/run.yaml", "--set"]
    sys.argv += [f"data.dir={data}", f"run_dir={run}"]
    try:
        entry_point.main()
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize("moment", [signalled_as_it_ends, signalled_as_it_meets])
def test_a_signal_to_a_rank_that_has_finished_is_no_death_of_it(
    data: Path, two_ranks: Any, tmp_path: Path, moment: Callable[..., Any]
) -> None:
    shutil.copytree(two_ranks[0] / "straight", tmp_path / "run")
    assert gloo.run(2, moment, data, tmp_path / "run", timeout=60) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["python", "deepspeed", "torchrun", "mpiexec"])
def test_every_launcher_runs_the_same_job(data: Path, tmp_path: Path, launcher: str) -> None:
    done = subprocess.run(
        command(launcher, data, tmp_path / "run"), env=environment(),
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "attention: per_sequence (cpu, fp32)" in done.stdout
    assert "2/2 (64)  10/10" in done.stdout
    assert checkpoint.read_state(checkpoint.resolve(tmp_path / "run")).position.step == 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        "model.layerz=3",
        "data.dir=/nowhere",
        "phases.1.rows_per_step=3",
        "init_from={} model.hidden_size=64",
    ],
)
def test_a_mistake_is_one_line_of_two_ranks_under_deepspeed(
    data: Path, two_ranks: Any, tmp_path: Path, keys: str
) -> None:
    overrides = keys.format(two_ranks[0] / "straight").split()
    words = command("deepspeed", data, tmp_path / "run", *overrides)
    words[words.index("error")] = "critical"
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr.count("error: ")) == (2, 1), done.stderr
    late = "SIGTERM: stopped in the start\n"  # of the other rank, which launch.py ends
    assert len(done.stderr.replace(late, "", 1).splitlines()) == 1, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("size", [1, 2])
def test_a_signal_in_the_start_asks_for_another_and_leaves_nothing(
    data: Path, tmp_path: Path, number: signal.Signals, size: int
) -> None:
    """Of two ranks the other one never comes."""
    run = tmp_path / "run"
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"} if size > 1 else {}
    ranks |= {"MASTER_PORT": str(free_port())} if size > 1 else {}
    process = subprocess.Popen(
        command("python", data, run), env=environment() | ranks, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    caught, threads = 0, 0
    while not caught >> (number - 1) & 1 or (size > 1 and threads < 4):
        assert time.monotonic() < deadline and process.poll() is None
        status = Path(f"/proc/{process.pid}/status").read_text()
        caught = int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16)
        threads = int(re.search(r"Threads:\s*(\d+)", status)[1])
        time.sleep(0.02)
    process.send_signal(number)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 85 and f"{number.name}: stopped in the start" in said
    assert not run.exists() and "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 85), (signal.SIGHUP, 85), (signal.SIGINT, 130)],
)
def test_a_signal_writes_a_checkpoint_and_the_next_start_goes_on(
    data: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """Also where it ends whoever reads the output, as a terminal's does `tee`."""
    run, long = tmp_path / "run", "phases.0.steps=100000"
    process = subprocess.Popen(
        command("python", data, run, long), env=environment(), stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # under nohup, too
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() or len(losses(run)) < 3:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    if number == signal.SIGHUP:
        process.stdout.close()
    process.send_signal(number)
    output = "SIGHUP" if number == signal.SIGHUP else process.communicate(timeout=60)[0]
    assert process.wait(60) == code, output
    assert number.name in output
    reached = checkpoint.read_state(checkpoint.resolve(run)).position.step
    assert reached >= 3
    shutil.copytree(run, tmp_path / "copy")
    again = subprocess.run(
        [*command("python", data, run, long), "--stop-at-step", str(reached + 2)],
        env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert again.returncode == 0 and f"(step {reached:,})" in again.stdout
    # What has not changed is not said again.
    assert number == signal.SIGHUP or "ahead: phase 2" in output
    assert "ahead: " not in again.stdout
    assert checkpoint.read_state(checkpoint.resolve(run)).position.step == reached + 2
