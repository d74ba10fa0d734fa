"""The FLOP formula equals torch's count; the plan of the recipe equals published arithmetic."""

import gc
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from configs.load import dump, load
from core.errors import UserError
from data_pipeline.stream.dataset import Dataset
from data_pipeline.stream.state import StreamState
from pretrain import attention, deepspeed_door, planner
from pretrain.checkpoint import Checkpoints
from pretrain.config import CheckpointConfig, PretrainConfig
from pretrain.engine import Engine
from pretrain.engine_config import EngineConfig
from pretrain.flops import training_flops
from pretrain.layout import assumed_traffic, planned_traffic
from pretrain.loss import pretraining_loss
from pretrain.measured import measured
from pretrain.memory import (
    activation_bytes,
    attention_scratch_bytes,
    checkpoint_bytes,
    head_bytes,
    memory_bytes,
    parameter_count,
    state_bytes,
)
from pretrain.model import BertForPreTraining, ModelConfig, pack_dense
from pretrain.optim import OptimizerConfig
from pretrain.plan import main as plan_main
from pretrain.run_state import Position, State
from tests import gloo
from tests.datasets import write_dataset
from tests.pretrain import engine_cases
from tests.pretrain.packing import STILL, pack, sequences
from tests.pretrain.test_checkpoint import ALONE, make, write

# Wide enough that buffers which do not grow with the model are lost among those that do.
WIDE = STILL.model_copy(update={"hidden_size": 256, "intermediate_size": 1024})


@pytest.mark.parametrize("next_sentence", [True, False])
def test_formula_equals_torchs_count_of_a_training_step(next_sentence):
    # sdpa on rows that are one sequence each: what torch counts is then exactly the real work.
    config = STILL.model_copy(update={"vocab_multiple": 1, "attention": "sdpa"})
    model = BertForPreTraining(config, generator=torch.Generator().manual_seed(0))
    B, L, M = 3, 24, 11
    ids = torch.ones(B, L, dtype=torch.int64)
    packed = pack_dense(ids, torch.ones_like(ids))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        cls_positions = torch.arange(B if next_sentence else 0) * L
        mlm, nsp = model(*packed, torch.arange(M), cls_positions)
        labels = torch.ones(M, dtype=torch.int64)
        sums = pretraining_loss(mlm, labels, nsp, labels[: len(cls_positions)], M, B)
        sums.loss.backward()
    wanted = training_flops(config, B * L, M, B, next_sentence=next_sentence)
    assert counter.get_total_flops() == wanted + type_flops(B * L)
    assert bool(sums.nsp_sum) == next_sentence


def type_flops(tokens: int) -> int:
    """The gradient of the token types is a lookup's, so no model FLOP, and a product."""
    return 2 * tokens * STILL.type_vocab_size * STILL.hidden_size


class InTheOpen(torch.autograd.Function):
    """The operator of attention over packed rows, with its products where the counter sees them."""

    of_rows = attention._by_sequence._init_fn
    of_gradients = attention._by_sequence_backward._init_fn

    @staticmethod
    def forward(ctx, qkv, cu_seqlens, max_seq_len, dropout_p, causal):
        output, kept = InTheOpen.of_rows(qkv, cu_seqlens, max_seq_len, dropout_p, causal)
        ctx.saved, ctx.dropout_p = (qkv, kept, cu_seqlens), dropout_p
        return output, kept

    @staticmethod
    def backward(ctx, grad, _):
        grad_qkv = InTheOpen.of_gradients(grad, *ctx.saved, ctx.dropout_p)
        return grad_qkv, None, None, None, None


def token_by_token(qkv, cu_seqlens, max_seq_len, dropout_p, causal):
    """The least work under a causal mask: each token's product with itself and those before it."""
    assert causal
    bounds, out = cu_seqlens.tolist(), []
    for start, end in zip(bounds, bounds[1:], strict=False):
        q, k, v = qkv[start:end].permute(1, 2, 0, 3)
        for t in range(end - start):
            p = torch.softmax(q[:, t : t + 1] @ k[:, : t + 1].transpose(1, 2) / 8**0.5, -1)
            out.append((p @ v[:, : t + 1])[:, 0])
    return torch.stack(out), None


@pytest.mark.parametrize("causal", [False, True])
def test_formula_equals_torchs_count_over_packed_rows(monkeypatch, causal):
    monkeypatch.setattr(attention, "_by_sequence", token_by_token if causal else InTheOpen.apply)
    changes = {"vocab_multiple": 1, "attention": "per_sequence", "is_decoder": causal}
    config = STILL.model_copy(update=changes)
    model = BertForPreTraining(config, generator=torch.Generator().manual_seed(0))
    lengths, M, padding = [7, 17, 5, 11], 6, 8
    a, b, c, d = sequences(lengths, config.vocab_size, seed=0)
    packed = pack([[a, b], [c, d]], row_len=24, max_seq_len=24)
    with FlopCounterMode(display=False) as counter:
        mlm, nsp = model(*packed, torch.arange(M), torch.tensor([0, 7, 24, 29]))
        labels = torch.ones(M, dtype=torch.int64)
        pretraining_loss(mlm, labels, nsp, labels[:4], M, 4).loss.backward()
    real = training_flops(config, sum(lengths), M, 4, sum(n * n for n in lengths))
    # The padding of the second row goes through the layers as a sequence; it is no model FLOP.
    wasted = training_flops(config, padding, 0, 0, padding**2)
    assert counter.get_total_flops() == real + wasted + type_flops(2 * 24)


def test_squares_default_to_equal_lengths():
    args = (STILL, 100, 15, 4)
    assert training_flops(*args) == training_flops(*args, 4 * 25**2)
    assert training_flops(*args, 3 * 20**2 + 40**2) > training_flops(*args)
    assert training_flops(STILL, 0, 0, 0) == 0


def test_large_agrees_with_the_published_figures():
    large = ModelConfig(
        vocab_size=30522,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
    )
    # shared arithmetic of NVIDIA's runs: 240.6 G a sequence of 128, 1,020.5 G of 512
    assert training_flops(large, 128, 20, 1) == pytest.approx(240.6e9, rel=2e-3)
    assert training_flops(large, 512, 80, 1) == pytest.approx(1020.5e9, rel=2e-3)
    model_rows = parameter_count(large.model_copy(update={"vocab_multiple": 1}))
    assert model_rows == 336_226_108  # Hugging Face's BertForPreTraining of this shape


def write_config(tmp_path, data_dir: str) -> str:
    path = tmp_path / "large.yaml"
    path.write_text(
        f"""
run_dir: {tmp_path}/run
data: {{dir: {data_dir}}}
model:
  {{hidden_size: 1024, num_hidden_layers: 24, num_attention_heads: 16, intermediate_size: 4096}}
phases:
  - {{max_seq_len: 128, row_len: 512, sequences_per_step: 65536, max_predictions: 20,
     micro_batch_rows: 32, steps: 7038, learning_rate: 6.0e-3, warmup: 0.2843}}
  - {{max_seq_len: 512, row_len: 2048, sequences_per_step: 32768, max_predictions: 80,
     micro_batch_rows: 8, steps: 1563, learning_rate: 4.0e-3, warmup: 0.128}}
"""
    )
    return str(path)


def test_plan_of_the_recipe(tmp_path, capsys):
    path = write_config(tmp_path, f"{tmp_path}/none")
    assert plan_main(["--config", path, "--gpus", "16", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["eflop"] == pytest.approx(163, rel=0.01)
    assert plan["hours"] == pytest.approx(163e18 / (16 * 989e12 * 0.4) / 3600, rel=0.01)
    assert plan["checkpoint_bytes"] == plan["parameters"] * 12
    assert plan_main(["--config", path, "--gpus", "16"]) == 0
    assert "163 EFLOP" in capsys.readouterr().out


def plan_of(capsys, *arguments: str) -> dict:
    assert plan_main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_published_runs_are_reproduced_from_their_rates(tmp_path, capsys):
    # NVIDIA DeepLearningExamples, LARGE, phase 1 at 128: 580 sequences a second and A100, and
    # 27.9 hours on 8 of them; 138,294 sequences a second on 256.
    path = write_config(tmp_path, f"{tmp_path}/none")
    mfu = 580 * 240.6e9 / 312e12
    on = ("--config", path, "--device", "a100", "--mfu", f"{mfu:.6g}", "--gpus")
    assert plan_of(capsys, *on, "8")["phases"][0]["hours"] == pytest.approx(27.9, rel=0.02)
    hours = 65536 * 7038 / 138_294 / 3600
    assert plan_of(capsys, *on, "256")["phases"][0]["hours"] == pytest.approx(hours, rel=0.08)


def test_evaluations_are_in_the_hours(tmp_path, capsys):
    # As many rows as a step of the first phase has, forward alone, at each step.
    often = ["evaluation.rows=16384", "evaluation.every_steps=1", "phases.1.row_len=512"]

    def first(*keys: str) -> float:
        on = ("--config", write_config(tmp_path, f"{tmp_path}/none"), "--set")
        return plan_of(capsys, *on, *often, *keys)["phases"][0]["hours"]

    none = first("evaluation.every_steps=0")
    assert first("evaluation.every_length=false") == pytest.approx(none * 4 / 3, rel=0.01)
    assert first() == pytest.approx(none * 5 / 3, rel=0.01)


def test_hours_become_steps_that_take_no_longer(tmp_path, capsys):
    path = write_config(tmp_path, f"{tmp_path}/none")
    on = ("--config", path, "--device", "rtx-4090", "--gpus", "1")
    plan = plan_of(capsys, *on, "--hours", "24")
    step = max(p["hours"] / p["steps"] for p in plan["phases"])
    assert 24 - 2 * step < plan["hours"] <= 24
    first, second = (p["steps"] for p in plan["phases"])
    assert first / second == pytest.approx(7038 / 1563, rel=0.05)
    # What is printed to be pasted is that plan.
    assert plan_main([*on, "--hours", "24"]) == 0
    page = capsys.readouterr().out
    line = next(x.strip() for x in page.splitlines() if x.startswith("    --set"))
    assert line == plan["set"] == f"--set phases.0.steps={first} phases.1.steps={second}"
    assert plan_of(capsys, *on, *line.split())["hours"] == plan["hours"]
    # What is left of a run that goes on: of the phases behind its step, and a part of its own.
    config = load(path, PretrainConfig)
    whole = planner.plan(config, Dataset(config.data), planner.assume(config))
    half = config.phases[0].steps // 2
    one, two = (p.hours for p in whole.phases)
    for at, left in ((0, one + two), (half, one / 2 + two), (2 * half, two), (9999, 0)):
        assert whole.hours_from(at) == pytest.approx(left)
    with pytest.raises(UserError, match=r"--hours 0.001: less than a step of phase 1; all .* days"):
        plan_main([*on, "--hours", "0.001"])


def test_the_rates_are_those_of_the_start_that_wrote_the_newest_checkpoint(tmp_path, capsys):
    """Of a first start on 8 ranks, a second on 2 from step 4, a third of 4 without one."""
    run = tmp_path / "run"
    path = write_config(tmp_path, f"{tmp_path}/none")
    config = load(path, PretrainConfig)
    folder = run / "checkpoints/step-00000006"
    folder.mkdir(parents=True)
    (run / "config.yaml").write_text(dump(config))
    history = {"event": "start", "step": 0}, {"event": "resume", "step": 4}
    written = State(Position(step=6), None, config.model_dump(mode="json"), {}, 2, history)
    (folder / "state.json").write_text(written.to_json())
    lines = [
        {"step": step, "time": 1.0, "rate/phase": 1, "throughput/tflops_per_device": rate}
        for step, rate in ((2, 8.0), (4, 8.0), (5, 2.0), (6, 2.0), (7, 4.0), (8, 4.0), (9, 4.0))
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    first = "preflight: {} process(es) on 1 host(s), 9 GB free, all-reduce {} GB/s"
    for ranks, speed, tflops in ((4, 7, 2.0), (2, 7, 4.0), (2, "1.2.3", 4.0)):
        (run / "preflight.txt").write_text(first.format(ranks, speed))
        found = measured(run)
        assert (found.world, found.tflops[128]) == (2, tflops)
        assert found.all_reduce_gb_per_second == (7 if ranks == 2 and speed == 7 else None)
    # What no run measures is passed over.
    (run / "preflight.txt").unlink()
    for world in -1, 0, 10**400:
        odd = json.loads((folder / "state.json").read_text()) | {"world_size": world}
        (folder / "state.json").write_text(json.dumps(odd))
        assert plan_main(["--from", str(run)]) == 0 and measured(run).world is None
    (run / "checkpoints/step-00000006/state.json").unlink()
    names = "bytes", "write_seconds", "stall_seconds"
    for rate in (-1.0, 1e-320, 1e-300, 1e300):
        odd = [lines[-1], *[lines[-1] | {"throughput/tflops_per_device": rate}] * 3]
        written = {f"checkpoint/{name}": 9.0 for name in names}
        odd += [{"step": 10, "time": 1.0} | written | {f"checkpoint/{x}": rate} for x in names]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in odd))
        assert plan_main(["--from", str(run)]) == 0 and measured(run).tflops[128] == 4.0
    odd_name = run.rename(tmp_path / "run\x1b[31m")
    assert plan_main(["--from", str(odd_name), "--set", "phases.0.micro_batch_rows=1"]) == 0
    out, err = capsys.readouterr()
    assert "rates of" in err and "\x1b" not in out + err
    one = tmp_path / "one.yaml"
    one.write_text(dump(config.model_copy(update={"phases": config.phases[:1]})))
    assert plan_main(["--config", str(one), "--from", str(odd_name)]) == 0
    assert "are of another: phases.1 {" in capsys.readouterr().err
    # A rate counts a step's FLOPs as for equal lengths; so does the time of a step at that rate.
    [layout, _] = planner.lay_out(config, 2, [assumed_traffic(config, i, 1.0) for i in (0, 1)])
    uneven = replace(layout, traffic=replace(layout.traffic, squares=2 * layout.traffic.squares))
    model = config.model.with_vocab_size(200)
    at = planner.assume(config, run=found)
    seconds = [planner.step_terms(config, model, x, at)[0].device for x in (layout, uneven)]
    assert seconds[0] == seconds[1]
    at = planner.assume(config)
    seconds = [planner.step_terms(config, model, x, at)[0].device for x in (layout, uneven)]
    assert seconds[0] < seconds[1]


@pytest.mark.parametrize("file", ["heldout-000000.tar", "heldout-000000.idx"])
def test_a_held_out_shard_that_is_not_there_is_refused(tmp_path, file):
    documents = [[list(range(5, 40))] * 9] * 9
    write_dataset(tmp_path / "data", documents, heldout=documents, vocab=200)
    (tmp_path / "data" / file).unlink()
    with pytest.raises(UserError, match=f"{file}: "):
        plan_main(["--config", write_config(tmp_path, tmp_path / "data"), "--gpus", "1"])


def test_of_a_run_under_way_what_is_left_is_judged(tmp_path, capsys):
    documents = [[list(range(5, 40))] * 9] * 9
    write_dataset(tmp_path / "data", documents, heldout=documents, vocab=200)
    run = tmp_path / "run"
    path = write_config(tmp_path, tmp_path / "data")
    odd = "--set", "phases.0.rows_per_step=3", "phases.1.rows_per_step=4"
    on = ("--config", path, "--gpus", "2", *odd)
    with pytest.raises(UserError, match=r"phases.0: 3 rows a step do not divide by 2 ranks"):
        plan_main([*on])
    config = load(path, PretrainConfig, odd[1:])

    def stands(phase: int, rows: int | None) -> None:
        manifest = Dataset(config.data).manifest
        stream = StreamState.start(manifest, {}, seed=1, phase=phase) if rows else None
        stream = stream and replace(stream, rows_per_step=rows)
        plain = config.model_dump(mode="json")
        written = State(Position(step=6, phase=phase), stream, plain, {}, 2)
        keeper = Checkpoints(run, ALONE, CheckpointConfig(asynchronous=False))
        keeper.save(written, b"[PAD]\n", lambda: write)

    stands(0, 6)  # a phase that has begun has its checkpoint's rows
    assert [p["rows_per_step"] for p in plan_of(capsys, *on)["phases"]] == [6, 4]
    stands(1, None)  # one that is over may have any
    plan = plan_of(capsys, *on)
    assert [p["rows_per_step"] for p in plan["phases"]] == [3, 4]
    assert [x["gpus"] for x in plan["scaling"] if not x["refused"]] == [1, 2, 4]
    stands(1, 5)
    with pytest.raises(UserError, match=r"phases.1: 5 rows .* by 2 ranks; 1 or 5 ranks would do$"):
        plan_main([*on])
    stands(2, None)
    with pytest.raises(UserError, match=r"phase: 2 \(from 0\), but the config has 2 phase"):
        plan_main([*on])


@pytest.mark.parametrize("flag", ["--mfu", "--mean-fill"])
def test_a_share_is_no_more_than_1(flag, tmp_path):
    with pytest.raises(UserError, match=f"^{flag}: 1.2 is above 1"):
        plan_main(["--config", write_config(tmp_path, "none"), flag, "1.2"])


def test_batch_or_network_ends_the_scaling(tmp_path, capsys):
    path = write_config(tmp_path, f"{tmp_path}/none")
    plan = plan_of(capsys, "--config", path, "--up-to", "4096")
    lines = plan["scaling"]
    assert [x["gpus"] for x in lines] == [2**i for i in range(13)]
    for fewer, more in zip(lines, lines[1:], strict=False):
        assert fewer["hours"] > more["hours"] and fewer["gpu_hours"] < more["gpu_hours"]
        assert fewer["busy"] >= more["busy"]
    assert lines[3]["hours"] == plan["hours"] and lines[0]["network"] == 0
    assert "well up to 1024 device(s)" in plan["scaling_end"]
    assert "the batch ends it: 4,096 tokens at once" in plan["scaling_end"]
    slow = plan_of(capsys, "--config", path, "--network-gb-per-second", "0.5")["scaling_end"]
    assert re.search(r"well up to \d+ device\(s\) .* the network ends it", slow)
    # Rows that do not divide are the batch's end, too.
    few = ["phases.0.rows_per_step=16416", "phases.1.rows_per_step=8288"]
    plan = plan_of(capsys, "--config", path, "--gpus", "2", "--set", *few)
    assert "its rows do not divide by 64" in plan["scaling_end"]
    assert [bool(x["refused"]) for x in plan["scaling"]] == 6 * [False] + 4 * [True]


def test_a_small_model_on_cpus_has_figures_that_say_something(tmp_path, capsys):
    plan = ["--config", "configs/pretrain_demo.yaml", "--set", f"data.dir={tmp_path}/none"]
    found = plan_of(capsys, *plan, "threads=2")
    assert (found["device"], found["gpus"], found["peak_tflops"]) == ("cpu", 1, 0.16)
    assert all(p["stall_share"] < 0.01 for p in found["phases"])
    assert plan_main([*plan, "--gpus", "2"]) == 0
    page = capsys.readouterr().out
    assert not re.search(r" 0(\.0+)? (h|min|s|ms|E|M)\b|TFLOP/s for|989|bf16", page)
    assert re.search(r"in all [\d.]+ min, [\d.]+ min of device time, [\d.]+ TFLOP", page)
    # Training's own lines and folders' names apart, 80 columns.
    mine = [x for x in page.splitlines() if not x.startswith("phase ") and str(tmp_path) not in x]
    assert max(map(len, mine)) <= 80


def test_checkpoints_hold_the_recipe_up_for_less_than_a_hundredth(tmp_path, capsys):
    def phases(*overrides: str) -> list[dict]:
        path = write_config(tmp_path, f"{tmp_path}/none")
        sets = ["--set", "checkpoint.every_steps=200", *overrides] if overrides else []
        assert plan_main(["--config", path, "--json", *sets]) == 0
        return json.loads(capsys.readouterr().out)["phases"]

    for phase in phases("checkpoint.keep_last=3"):
        # 336 M parameters: an eighth of 12 bytes each, at 2 GB/s
        assert phase["stall_seconds"] == pytest.approx(336.3e6 * 1.5 / 2e9, rel=0.01)
        assert phase["stall_share"] < 0.01
    waits = phases("checkpoint.asynchronous=false")[0]
    assert waits["stall_seconds"] == pytest.approx(336.3e6 * (1.5 / 2e9 + 12 / 1e9), rel=0.01)
    often = phases("checkpoint.every_steps=1", "phases.0.sequences_per_step=64")[0]
    wait = 336.3e6 * 12 / 1e9 - often["step_seconds"]
    assert often["stall_seconds"] == pytest.approx(wait + 336.3e6 * 1.5 / 2e9, rel=0.01)


def test_memory_falls_with_checkpointing_and_with_more_devices(tmp_path):
    def memory(world: int, *overrides: str) -> float:
        config = load(write_config(tmp_path, f"{tmp_path}/none"), PretrainConfig, overrides)
        model = config.model.with_vocab_size(30522)
        return memory_bytes(
            config, model, config.phases[0], rows=32, sequences_a_row=4.3, world=world
        )

    assert memory(1) - memory(8) == pytest.approx(16 * 336.3e6 * 7 / 8, rel=0.01)
    stages = [memory(8, f"engine.zero_stage={stage}") for stage in (0, 1, 2)]
    assert stages[1] - stages[2] == pytest.approx(4 * 336.3e6, rel=0.01)
    assert stages[0] == memory(1, "engine.zero_stage=0") > stages[1]
    assert memory(8, "model.activation_checkpointing=true") < 0.6 * memory(8)


def test_activations_are_what_autograd_keeps():
    base = ModelConfig(
        vocab_size=30522, hidden_size=1024, num_attention_heads=16, intermediate_size=4096,
        attention="varlen", hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    B, L = 4, 512

    def kept(layers: int) -> int:
        config = base.model_copy(update={"num_hidden_layers": layers})
        with torch.device("meta"):
            model = BertForPreTraining(config, generator=None).to(torch.bfloat16)
            ids = torch.ones(B, L, dtype=torch.int64)
            own = {p.untyped_storage()._cdata for p in model.parameters()}
            found = {}

            def note(x: torch.Tensor) -> torch.Tensor:
                storage = x.untyped_storage()
                found[storage._cdata] = storage
                return x

            with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
                packed = pack_dense(ids, torch.ones_like(ids))
                alive = model(*packed, torch.arange(11), torch.arange(B) * L)
        assert alive[0].requires_grad
        return sum(storage.nbytes() for key, storage in found.items() if key not in own)

    masks = 2 * B * L * base.hidden_size
    layer = activation_bytes(base, B * L) - masks
    assert kept(2) - kept(1) == pytest.approx(layer, rel=0.04)


def test_the_head_keeps_what_is_planned_of_each_prediction():
    config = ModelConfig(vocab_size=3000, num_hidden_layers=1, is_decoder=True, attention="varlen")

    def kept(predictions: int) -> int:
        with torch.device("meta"):
            model = BertForPreTraining(config, generator=None).to(torch.bfloat16)
            hidden = torch.empty(4096, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
            own = {p.untyped_storage()._cdata for p in (*model.parameters(), hidden)}
            found = {}

            def note(x: torch.Tensor) -> torch.Tensor:
                found[x.untyped_storage()._cdata] = x.untyped_storage()
                return x

            with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
                places = torch.arange(predictions), torch.arange(0)
                embeddings = model.bert.embeddings.word_embeddings.weight
                logits, _ = model.cls(hidden, *places, embeddings, model.bert.pooler)
        inside = sum(storage.nbytes() for key, storage in found.items() if key not in own)
        return inside + logits.untyped_storage().nbytes()

    assert kept(4000) - kept(1000) == pytest.approx(head_bytes(config, 3000), rel=0.01)


def test_left_to_right_pays_for_logits_everywhere(tmp_path, capsys):
    path = write_config(tmp_path, f"{tmp_path}/none")

    def plan(*sets: str) -> dict:
        assert plan_main(["--config", path, "--json", "--set", *sets]) == 0
        return json.loads(capsys.readouterr().out)["phases"][0]

    texts = plan("data.next_sentence=none")
    ahead = plan("data.next_sentence=none", "objective=left_to_right")
    large = load(path, PretrainConfig, ()).model.with_vocab_size(30522)
    # 32 rows of 4 x 127 predictions in place of at most 32 x 85
    more = head_bytes(large, 32 * 508) - head_bytes(large, 32 * 80)
    assert ahead["memory_bytes"] - texts["memory_bytes"] == pytest.approx(more, rel=0.02)
    each = (training_flops(large, 0, n, 0) for n in (127, 19))
    attention_saved = 6 * 24 * 1024 * (128**2 - 128)
    step = 65536 * 7038 * (next(each) - next(each) - attention_saved)
    assert ahead["flops"] - texts["flops"] == pytest.approx(step, rel=1e-3)


def floats_alive() -> int:
    """Bytes of all storages of floats in this process."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.is_floating_point():
            for x in (thing, thing.grad if thing.is_leaf else None):
                if x is not None:
                    storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return sum(storages.values())


# Stages and buckets of a rank: smaller than the model, so that two are alive, and as planned.
HELD = (
    EngineConfig(
        precision="bf16", deepspeed={"zero_optimization": {"reduce_bucket_size": 400_000}}
    ),
    EngineConfig(precision="bf16"),
    EngineConfig(precision="bf16", zero_stage=2),
    EngineConfig(precision="fp32"),
)


def states_held(
    rank: int, size: int, configs: tuple[EngineConfig, ...]
) -> list[tuple[int, int, int]]:
    """Of each engine: bytes of a rank at most, as counted where gradients are reduced; bytes of
    gradients and of weights that a step gives to the ranks, as counted where they are sent."""
    zero = deepspeed_door.deepspeed().runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer
    reduce, most = zero.reduce_ipg_grads, []
    for config in configs:
        before, counted = floats_alive(), []

        def counting(*args, before: int = before, counted: list[int] = counted, **more) -> None:
            reduce(*args, **more)
            counted.append(floats_alive() - before)

        zero.reduce_ipg_grads = counting
        model = BertForPreTraining(WIDE, generator=torch.Generator().manual_seed(0))
        engine = Engine(model, OptimizerConfig(), config, micro_steps=2, micro_batch_rows=1)
        with CountsSent() as sent:
            engine.train_step(engine_cases.bert_batches(rank, size, 2, 1), 1e-3)
        engine.close()
        del model, engine
        most.append((max(counted), sent.reduced, sent.gathered))
    return most


class CountsSent(TorchDispatchMode):
    """Bytes that go through collectives: all-reduced, and those that an all-gather makes."""

    reduced = gathered = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if name.startswith("c10d::allreduce"):
            self.reduced += sum(t.nbytes for t in args[0])
        elif name.startswith("c10d::_allgather_base"):
            self.gathered += args[0].nbytes
        elif name.startswith("c10d::allgather"):
            self.gathered += sum(t.nbytes for part in args[0] for t in part)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("world", "configs"), [(1, HELD[:1]), (2, HELD)])
def test_states_are_what_the_engine_holds_at_most(tmp_path, world, configs):
    config = load(write_config(tmp_path, f"{tmp_path}/none"), PretrainConfig)
    for found in gloo.run(world, states_held, configs):
        for engine, (held, reduced, gathered) in zip(configs, found, strict=True):
            c = config.model_copy(update={"engine": engine})
            planned = state_bytes(c, WIDE, world, engine.precision)
            # Sums go while the slice's copy is made, at a pace of its own.
            assert 0.9 * planned < held < 1.03 * planned
            sent, *_ = planner.network(c, WIDE, world, 2, 0.1, planner.assume(c, world))
            # In a ring a rank sends 2 (n-1)/n of what is reduced and (n-1)/n of what is gathered.
            share = (world - 1) / world
            assert share * (2 * reduced + gathered) == pytest.approx(sent, rel=0.01)


def test_the_kernels_scratch_is_padded_runs():
    large = ModelConfig(hidden_size=1024, num_attention_heads=16)
    # 65,536 tokens in 32 rows of 5 sequences and a tail: 192 runs, each padded by up to 128
    # tokens of 4 KB
    assert attention_scratch_bytes(large, 65_536, 192) == (65_536 + 128 * 192) * 4096


def test_lengths_come_from_the_data_set_where_there_is_one(tmp_path):
    rng = np.random.default_rng(0)
    documents = [
        [rng.integers(5, 90, int(n)).tolist() for n in rng.integers(3, 20, 12)] for _ in range(60)
    ]
    write_dataset(tmp_path / "data", documents)
    config = load(
        write_config(tmp_path, f"{tmp_path}/data"),
        PretrainConfig,
        ["phases.0.sequences_per_step=64"],
    )
    step = planned_traffic(config, Dataset(config.data), 0)
    assert step.sequences == pytest.approx(64, rel=0.35)  # whole rows, a multiple of 8 of them
    assert 20 < step.tokens / step.sequences < 128
    assert step.squares >= step.tokens**2 / step.sequences
    assert step.predictions / step.tokens == pytest.approx(0.15, rel=0.15)


def test_rows_and_what_only_a_data_set_can_say(tmp_path, capsys):
    path = write_config(tmp_path, f"{tmp_path}/none")
    assert plan_main(["--config", path, "--gpus", "8"]) == 0
    page = capsys.readouterr().out
    assert max(len(x) for x in page.splitlines() if str(tmp_path) not in x) <= 80
    assert (
        "phase 1: 7,038 steps of 16,384 rows x 512 tokens, about 65,536.0 sequences of up to 128; "
        "8 process(es) x 64 micro-step(s) x 32 row(s) (assumed lengths) phase 2: "
    ) in " ".join(page.split())
    assert plan_main(["--config", path, "--gpus", "24"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert page.count("do not divide by 24 ranks, 16 or 32 ranks would do") == 2
    assert plan_main(["--config", path, "--gpus", "16"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert page.count("whether 16 ranks divide the rows only the data set says") == 2
    # Given rows need no data set, and memory is that of the most rows that may be taken.
    with pytest.raises(UserError, match=r"phases\.1: 96 rows a step do not divide by 5 ranks"):
        plan_main(["--config", path, "--gpus", "5", "--set", "phases.1.rows_per_step=96"])
    fewer = ["--set", "phases.0.rows_per_step=160"]
    assert plan_main(["--config", path, "--gpus", "5", "--json", *fewer]) == 0
    given, derived = json.loads(capsys.readouterr().out)["phases"]
    assert (given["micro_batch_rows"], given["micro_steps"]) == (32, 1)
    assert derived["memory_bytes"] == pytest.approx(given["memory_bytes"], rel=0.1)
    assert derived["rows_per_step"] % 5 and derived["micro_steps"] is None


def test_the_disk_is_refused_as_training_refuses_it(tmp_path, capsys):
    write_dataset(tmp_path / "data", [[list(range(5, 40))] * 9] * 9, vocab=200)
    sets = (
        "checkpoint.keep_last=1000000000", "checkpoint.every_steps=1", f"run_dir={tmp_path}/a/b",
        "evaluation.every_steps=0",
        "phases.0.rows_per_step=8", "phases.1.rows_per_step=8",
    )  # fmt: skip
    path = write_config(tmp_path, f"{tmp_path}/data")

    def plan(path: str, *more: str) -> int:
        return plan_main(["--config", path, "--gpus", "1", "--set", *sets, *more])

    def refusal(act: Callable[[], object]) -> str:
        with pytest.raises(UserError, match="not enough disk") as caught:
            act()
        return re.sub(r"has [\d.]+ \w+ free", "has F free", str(caught.value))

    said = refusal(lambda: plan(path))
    assert not (tmp_path / "a").exists()
    config = load(path, PretrainConfig, sets)
    checkpoints = Checkpoints(Path(config.run_dir), ALONE, config.checkpoint)
    size = checkpoint_bytes(config.model.with_vocab_size(200))
    assert said == refusal(lambda: checkpoints.check_disk(size, 0, config.total_steps))
    assert plan(path, "checkpoint.keep_last=1") == 0
    assert "disk:" not in capsys.readouterr().out
    # A run that goes on is warned, with what it has written counted as it is.
    make(tmp_path / "a/b", [200, 400])
    keeps = "checkpoint.keep_every=200", "phases.0.steps=100000000"
    config = load(path, PretrainConfig, [*sets, *keeps])
    warned: list[str] = []
    checkpoints = Checkpoints(Path(config.run_dir), ALONE, config.checkpoint, warned.append)
    checkpoints.check_disk(size, 400, config.total_steps)
    assert plan(path, *keeps) == 0
    free = r"has [\d.]+ \w+"
    shown = capsys.readouterr().out.splitlines()[-1]
    assert re.sub(free, "", shown) == re.sub(free, "", warned[0])
    assert warned[0].startswith("warning: not enough disk: ")

    # Beforehand, on any machine: its disk is shown and nothing is refused.
    capsys.readouterr()
    assert plan(write_config(tmp_path, f"{tmp_path}/none")) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"disk: needs [\d.]+ \wB at run_dir, [\d.]+ \wB free on this machine", line)


def test_a_wrong_figure_is_one_line(tmp_path):
    path = write_config(tmp_path, f"{tmp_path}/none")
    with pytest.raises(UserError, match="--gpus: 0 is not above 0"):
        plan_main(["--config", path, "--gpus", "0"])
