"""What the spawned processes of the optimiser's and engine's tests do. Results are picklable."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

import pretrain.engine
from core.errors import UserError
from data_pipeline.stream.batch import IGNORE_INDEX, Batch
from pretrain import numerics, planner
from pretrain.config import PretrainConfig
from pretrain.engine import Engine
from pretrain.engine_config import EngineConfig
from pretrain.fragments import HostCopies, contents, open_folder, read_weights
from pretrain.model import BertForPreTraining
from pretrain.optim import Lamb, OptimizerConfig, parameter_groups
from tests.pretrain import given_gradients as given
from tests.pretrain import old_layout
from tests.pretrain.lamb_reference import ReferenceLamb
from tests.pretrain.packing import STILL, TINY, pack, sequences

PEAK = 6e-3


def small_rows() -> None:
    """Rows and blocks so short that the tiny tensors of the tests span several of them."""
    Lamb.ROW = 16
    Lamb.BLOCK = {"cpu": 256, "cuda": 256}


def relative_error(ours: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> float:
    """Largest over the tensors of |ours - reference| / |reference| in the Euclidean norm."""
    return max(
        float(np.linalg.norm(ours[name] - w) / np.linalg.norm(w)) for name, w in reference.items()
    )


# ------------------------------------------------------------------------------------- parity


def parity(rank: int, world: int, cases: list[tuple], steps: int = 50) -> dict[tuple, Any]:
    """Error against the reference after `steps` clipped steps, by case."""
    small_rows()
    return {case: _parity(rank, world, case, steps) for case in cases}


def optimizer_suite(rank: int, world: int, cases: list[tuple]) -> dict[str, Any]:
    """All that the tests of the optimiser ask of a world of two, in one start."""
    return {
        "parity": parity(rank, world, cases),
        "collectives": collectives(rank, world),
        "naive": naive(rank, world, [0, 1]),
    }


def _parity(rank: int, world: int, case: tuple, steps: int) -> dict[str, float]:
    stage, precision, micro_steps, section = case
    e = given.engine(
        stage=stage,
        precision=precision,
        micro_steps=micro_steps,
        deepspeed={"zero_optimization": {name: dict(value) if isinstance(value, tuple) else value
                                         for name, value in section}} if section else {},
    )  # fmt: skip
    reference = ReferenceLamb(given.masters(e))
    batches = given.batches(rank, world, micro_steps)
    for k in range(steps):
        rate = PEAK * (1 - k / 60)
        outcome = e.train_step(batches, rate)
        assert not outcome.skipped
        reference.step(given.full_gradient(k), rate)
    trust = e.optimizer.trust_ratios()
    found = given.masters(e)
    return {
        "error": relative_error(found, reference.w),
        "error of weights": relative_error(
            found, {name: w for name, w in reference.w.items() if w.ndim > 1}
        ),
        "clipped": reference.clipped,
        "trust_error": max(abs(trust[n].ratio / r - 1) for n, r in reference.ratios.items()),
        "pieces": _holds(e),
    }


def _holds(e: Engine) -> list[int]:
    """Whether this rank holds a piece of each parameter."""
    held = {x.name for slice_ in e.slices() for x in slice_.pieces if x.numel > 0}
    return [int(name in held) for name, _ in e.module.named_parameters()]


class FlatLamb(torch.optim.Optimizer):
    """LAMB that takes what it is shown for a tensor: right on tensors, wrong on slices."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.0, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] += 1
                t = float(state["step"])
                m, v = state["exp_avg"], state["exp_avg_sq"]
                m.lerp_(p.grad, 0.1)
                v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                u = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-6)
                u += group["weight_decay"] * p
                ratio = p.norm() / u.norm() if group["weight_decay"] else 1.0
                p -= group["lr"] * ratio * u


def naive(rank: int, world: int, stages: list[int]) -> dict[int, float]:
    """The same as `parity` with FlatLamb in the place of Lamb."""
    pretrain.engine.build_optimizer = lambda model, config: FlatLamb(
        parameter_groups(model, config)
    )
    result = {}
    for stage in stages:
        e = given.engine(stage=stage)
        reference = ReferenceLamb(given.masters(e))
        batches = given.batches(rank, world, 1)
        for k in range(50):
            e.train_step(batches, PEAK)
            reference.step(given.full_gradient(k), PEAK)
        result[stage] = relative_error(given.masters(e), reference.w)
    return result


def collectives(rank: int, world: int) -> list[list[int]]:
    """Sizes of the all-reduces inside each `Lamb.step` call of three steps at stage 1."""
    small_rows()
    e = given.engine(stage=1, trust_ratios_every=1)
    seen: list[list[int]] = []
    step = e.optimizer.step

    def counted() -> None:
        with _recorded() as sizes:
            step()
        seen.append(list(sizes))

    e.optimizer.step = counted
    batches = given.batches(rank, world, 1)
    for _ in range(3):
        outcome = e.train_step(batches, PEAK)
    with _recorded() as sizes:
        e.optimizer.trust_ratios()
    assert sizes == [] and outcome.trust is not None
    return seen


class _recorded:
    """Numbers of elements of every reduction while inside."""

    NAMES = (
        "all_reduce",
        "reduce",
        "reduce_scatter_tensor",
        "reduce_scatter",
        "all_reduce_coalesced",
    )

    def __init__(self, note: Callable[[int], Any] | None = None) -> None:
        self._sizes: list[int] = []
        self._note = note or self._sizes.append

    def __enter__(self) -> list[int]:
        self._before = {n: getattr(dist, n) for n in self.NAMES}
        for name, function in self._before.items():
            setattr(dist, name, self._wrapped(function, self._note))
        return self._sizes

    def __exit__(self, *_: Any) -> None:
        for name, function in self._before.items():
            setattr(dist, name, function)

    @staticmethod
    def _wrapped(function: Callable[..., Any], note: Callable[[int], Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = args[0] if args else next(iter(kwargs.values()))
            note(tensor.numel() if isinstance(tensor, torch.Tensor) else -1)
            return function(*args, **kwargs)

        return call


# ------------------------------------------------------------------------------- save and load


def run_and_save(
    rank: int, world: int, stage: int, precision: str, folder: str, steps: int, more: int
) -> dict[str, np.ndarray]:
    """`steps` steps, a checkpoint, `more` steps: the weights."""
    small_rows()
    e = given.engine(stage=stage, precision=precision)
    batches = given.batches(rank, world, 1)
    for _ in range(steps):
        e.train_step(batches, PEAK)
    e.snapshot()(Path(folder))
    dist.barrier()
    for _ in range(more):
        e.train_step(batches, PEAK)
    return given.masters(e)


def load_and_run(
    rank: int, world: int, stage: int, precision: str, folder: str, steps: int, more: int
) -> dict[str, np.ndarray]:
    small_rows()
    e = given.engine(stage=stage, precision=precision)
    e.load(contents(Path(folder)))
    batches = given.batches(rank, world, 1, first=steps)
    for _ in range(more):
        e.train_step(batches, PEAK)
    return given.masters(e)


def refusal(rank: int, world: int, folder: str) -> str:
    e = given.engine(stage=1, precision="fp32")
    try:
        e.load(contents(Path(folder)))
    except UserError as error:
        return str(error)
    return ""


def converted(rank: int, world: int, root: str, pairs: list[tuple]) -> dict[tuple, float]:
    """Stage and precision changed at a load, by (from, to): difference after four more steps."""
    result = {}
    for number, (source, target) in enumerate(pairs):
        folder = Path(root) / f"{world}-{number}"
        folder.mkdir(exist_ok=True)
        dist.barrier()
        stayed = run_and_save(rank, world, *source, str(folder), 3, 4)
        moved = load_and_run(rank, world, *target, str(folder), 3, 4)
        result[source, target] = relative_error(moved, stayed)
    return result


class Slow(HostCopies):
    """Copies at the last moment that is allowed; `joined_after` so many batches."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.taken, self.joined_after = 0, []

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.pending = list(pairs)

    def join(self) -> None:
        if self.pending:
            self.joined_after.append(self.taken)
        self.wait()

    def wait(self) -> None:
        super().copy(self.pending)
        self.pending = []

    def counted(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.taken += 1
            yield batch


def bitwise(rank: int, world: int, root: str, cases: list[tuple]) -> dict[tuple, dict[str, bool]]:
    """Stop, load into a fresh engine, go on: equal to never having stopped, by case.

    The real model with dropout, seeded by (rank, step) as the trainer does.
    """
    result = {}
    for number, case in enumerate(cases):
        folder = Path(root) / f"bitwise-{world}-{number}"
        folder.mkdir(exist_ok=True)
        dist.barrier()
        name, stage, precision, clip_before = case
        e = _bert(name, stage, precision, micro_steps=2, clip=clip_before, model=TINY)
        batches = bert_batches(rank, world, 2, 12 // world // 2)
        for step in range(2):
            _seeded_step(e, batches, rank, step)
        live = folder / "live"
        live.mkdir(exist_ok=True)
        e.copies = slow = Slow()
        e.snapshot()(live)
        write = e.snapshot()
        batches = slow.counted(batches)
        stayed = [_seeded_step(e, batches, rank, step) for step in (2, 3)]
        written = write(folder)  # of a moment that has passed
        same_bytes = [(folder / f).read_bytes() == (live / f).read_bytes() for f in written]
        dist.barrier()
        weights = read_weights(folder)

        fresh = _bert(name, stage, precision, micro_steps=2, clip=clip_before, model=TINY, seed=5)
        fresh.load(contents(folder))
        batches = bert_batches(rank, world, 2, 12 // world // 2, first=2)
        masters = given.masters(fresh)
        moved = [_seeded_step(fresh, batches, rank, step) for step in (2, 3)]
        result[case] = {
            "copied": all(same_bytes) and bool(written or (rank > 0 and stage == 0)),
            "awaited by the update alone": slow.joined_after == ([2] if written else []),
            "outcomes": stayed == moved,
            "masters": _same(given.masters(e), given.masters(fresh)),
            "module": _same_tensors(e.module.state_dict(), fresh.module.state_dict()),
            "moments": _same_states(e, fresh),
            "read_weights": _same(masters, {n: weights[n].numpy() for n in masters}),
        }
    return result


def old_folders(rank: int, world: int, folder: str) -> dict[str, float]:
    """Folders of the format bert-engine-1 after three steps, by the mode that wrote them: the
    difference, after four more steps, from the engine that went on."""
    small_rows()
    result = {}
    modes = {
        "BF16_Optimizer": (1, "bf16", 1, "bf16"),
        "bf16 stage 1": (1, "bf16", 2, "bf16"),
        "fp32 stage 2": (2, "fp32", 2, "fp32"),
        "fp32 stage 0": (0, "fp32", 1, "bf16"),
    }
    for name, (stage, precision, *target) in modes.items():
        place = Path(folder) / f"old-{world}-{name.replace(' ', '-')}"
        place.mkdir(exist_ok=True)
        dist.barrier()
        with old_layout.bf16_optimizer() if name == "BF16_Optimizer" else nullcontext():
            e = given.engine(stage=stage, precision=precision)
        batches = given.batches(rank, world, 1)
        for _ in range(3):
            e.train_step(batches, PEAK)
        assert name not in ("BF16_Optimizer", "bf16 stage 1") or (
            (type(e._ds.optimizer).__name__ == "BF16_Optimizer") == (name == "BF16_Optimizer")
        )
        old_layout.write(e, place)
        for _ in range(4):
            e.train_step(batches, PEAK)
        moved = load_and_run(rank, world, *target, str(place), 3, 4)
        result[name] = relative_error(moved, given.masters(e))
    return result


def _same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


def _same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def _same_states(a: Engine, b: Engine) -> bool:
    return all(
        torch.equal(a.optimizer.state[p][key], b.optimizer.state[q][key])
        for ga, gb in zip(a.optimizer.param_groups, b.optimizer.param_groups, strict=True)
        for p, q in zip(ga["params"], gb["params"], strict=True)
        for key in ("step", "exp_avg", "exp_avg_sq")
    )


# ------------------------------------------------------------------------------ the real model


def _bert(
    name: str = "lamb",
    stage: int = 1,
    precision: str = "fp32",
    *,
    micro_steps: int = 1,
    clip: float = 1.0,
    model: Any = STILL,
    seed: int = 0,
) -> Engine:
    bert = BertForPreTraining(model, generator=torch.Generator().manual_seed(seed))
    return Engine(
        bert.to("cuda" if dist.get_backend() == "nccl" else "cpu"),
        OptimizerConfig(name=name),
        EngineConfig(zero_stage=stage, precision=precision, gradient_clipping=clip),
        micro_steps=micro_steps,
        micro_batch_rows=1,
    )


def _seeded_step(e: Engine, batches: Iterator[Batch], rank: int, step: int) -> Any:
    torch.manual_seed(1000 * step + rank)
    return e.train_step(batches, 1e-3).now


def rows_of(step: int) -> list[Any]:
    """The 12 global rows of a step; row i has 1 + 3 * (i % 4) predictions, so ranks differ."""
    return [[s] for s in sequences([20 + i for i in range(12)], STILL.vocab_size, seed=step)]


def bert_batches(
    rank: int, world: int, micro_steps: int, rows: int, first: int = 0
) -> Iterator[Batch]:
    """Row a * W * mb + r * mb + j of the step is slot j of rank r's micro-step a."""
    for step in itertools.count(first):
        every = rows_of(step)
        for micro in range(micro_steps):
            at = (micro * world + rank) * rows
            yield bert_batch(every[at : at + rows], list(range(at, at + rows)))


def bert_batch(rows: list[Any], numbers: list[int]) -> Batch:
    row_len, capacity = 32, 12
    packed = pack(rows, row_len, row_len)
    positions, labels = [], []
    for slot, number in enumerate(numbers):
        for k in range(1 + 3 * (number % 4)):
            positions.append(slot * row_len + 1 + k)
            labels.append((7 * number + k) % STILL.vocab_size)
    filler = capacity * len(rows) - len(positions)
    return Batch(
        *packed[:5],
        masked_lm_positions=torch.tensor(positions + [0] * filler),
        masked_lm_labels=torch.tensor(labels + [IGNORE_INDEX] * filler),
        cls_positions=torch.arange(len(rows)) * row_len,
        next_sentence_labels=torch.tensor([number % 2 for number in numbers]),
        max_seq_len=packed.max_seq_len,
        sequences=len(rows),
        predictions=len(labels),
        tokens=sum(len(ids) for row in rows for ids, _ in row),
        step_sequences=12,
        step_predictions=66,
    )


def global_means(rank: int, world: int, cases: list[tuple]) -> dict[tuple, Any]:
    """Losses, norms and weights of three steps of 12 rows, by (stage, precision, micro-steps)."""
    result = {}
    for stage, precision, micro_steps in cases:
        e = _bert("lamb", stage, precision, micro_steps=1)
        rows = 12 // world // micro_steps
        e.start_phase(micro_steps, rows)
        batches = bert_batches(rank, world, micro_steps, rows)
        outcomes = [e.train_step(batches, 1e-3) for _ in range(3)]
        scores = e.evaluate(itertools.islice(batches, micro_steps))
        numbers = [
            [o.loss, o.mlm_loss, o.nsp_loss, o.mlm_accuracy, o.nsp_accuracy, o.grad_norm]
            for o in outcomes
        ]
        numbers.append([scores.mlm_loss, scores.nsp_loss, scores.mlm_accuracy, 0, 0, 0])
        result[stage, precision, micro_steps] = (numbers, given.masters(e), e.module.training)
    return result


def emptied(rank: int, world: int) -> tuple[list[list[float]], tuple[Any, ...]]:
    """Losses and accuracies of a step, a third of whose rows damage left without a label, as the
    step and an evaluation just before it tell them; and of a step without any (empty, bad, how many
    numbers are nan)."""
    rows = 12 // world
    whole = next(bert_batches(rank, world, 1, rows))

    def batch(left: list[bool]) -> Batch:
        kept = torch.tensor(left)
        labels = whole.masked_lm_labels.where(kept[whole.masked_lm_positions // 32], IGNORE_INDEX)
        return replace(
            whole,
            masked_lm_labels=labels,
            next_sentence_labels=whole.next_sentence_labels.where(kept, IGNORE_INDEX),
            predictions=int((labels != IGNORE_INDEX).sum()),
            sequences=sum(left),
        )

    e = _bert()
    e.start_phase(1, rows)
    some, none = batch([(rank * rows + row) % 3 > 0 for row in range(rows)]), batch([False] * rows)
    told = e.evaluate([some]), e.train_step(iter([some]), 1e-3), e.train_step(iter([none]), 1e-3)
    *found, blank = ([x.mlm_loss, x.nsp_loss, x.mlm_accuracy, x.nsp_accuracy] for x in told)
    return found, (told[2].empty, told[2].bad, np.isnan([*blank, told[2].loss]).sum())


MODES = [(0, "fp32"), (1, "fp32"), (1, "bf16"), (2, "fp32"), (2, "bf16")]


def reductions(rank: int, world: int) -> dict[tuple[int, str, int], int]:
    """Gradient elements reduced in one optimiser step, by (stage, precision, micro-steps)."""
    result = {}
    for (stage, precision), micro_steps in itertools.product(MODES, (1, 3)):
        e = given.engine(stage=stage, precision=precision, micro_steps=micro_steps)
        batches = given.batches(rank, world, micro_steps)
        with _recorded() as sizes:
            e.train_step(batches, PEAK)
        result[stage, precision, micro_steps] = sum(n for n in sizes if n > 100)
    return result


def fine_sums(rank: int, world: int) -> dict[tuple[int, str], tuple[float, float]]:
    """Gradients whose sum over micro-steps and ranks bf16 cannot hold, by mode: errors of the
    norm of the first step and of the weights after ten."""
    small_rows()
    result = {}
    for stage, precision in MODES:
        e = given.engine(stage=stage, precision=precision, micro_steps=3, gradient_clipping=0.0)
        reference = ReferenceLamb(given.masters(e), clip=0.0)
        batches = given.batches(rank, world, 3, parts=3 * world, fine=True)
        norms = []
        for k in range(10):
            norms.append(e.train_step(batches, PEAK).grad_norm)
            reference.step(given.full_gradient(k, parts=3 * world, fine=True), PEAK)
        first = given.full_gradient(0, parts=3 * world, fine=True)
        norm = np.sqrt(sum(np.square(g).sum() for g in first.values()))
        error = relative_error(given.masters(e), reference.w)
        result[stage, precision] = (abs(norms[0] / norm - 1), error)
    return result


class _Counted(TorchDispatchMode):
    """Operators that compute: not those that look at a tensor in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        self.reads += "_local_scalar_dense" in str(func)
        return func(*args, **(kwargs or {}))


def operators(rank: int, world: int, tensors: int) -> dict[str, Any]:
    """Operators of the steps of bf16 at stage 1: of a micro-step in the middle and of the boundary
    (last micro-step and update), beyond the model's own; calls of the accelerator's synchronize;
    numbers of tensors that the host asks for in a step."""
    from deepspeed.accelerator import get_accelerator

    shapes = {f"layer{i}.weight": (8, 8) for i in range(tensors)}
    model = given.Given(shapes=shapes)
    values = {name: np.full(shape, 0.5, np.float32) for name, shape in shapes.items()}
    batch = given.GivenBatch(values)
    alone = given.Given(shapes=shapes).to(torch.bfloat16)
    with _Counted() as bare:
        (alone(batch.values) * world).backward()
    e = given.GivenEngine(
        model,
        OptimizerConfig(name="adamw"),  # one operator for the slice
        EngineConfig(zero_stage=1, precision="bf16"),
        micro_steps=3,
        micro_batch_rows=1,
    )
    waits: list[int] = []
    accelerator = type(get_accelerator())
    before = accelerator.synchronize
    accelerator.synchronize = lambda self, *args: waits.append(1)
    for _ in range(4):
        marks: list[int] = []
        with _Counted() as counted:
            e.train_step(_marked(batch, marks, counted), PEAK)
        marks.append(counted.count)
    accelerator.synchronize = before
    _, middle, boundary = np.diff(marks) - bare.count
    return {
        "wrapper": type(e._ds.optimizer).__name__, "middle": middle, "boundary": boundary,
        "waits": len(waits), "reads": counted.reads,
    }  # fmt: skip


def _marked(
    batch: given.GivenBatch, marks: list[int], counted: _Counted
) -> Iterator[given.GivenBatch]:
    while True:
        marks.append(counted.count)
        yield batch


def timings(rank: int, world: int) -> dict[tuple[int, str, bool], Any]:
    """A step of three micro-steps by (stage, precision, overlap_comm): its seconds by part and in
    all, and the elements that were reduced during each part."""
    result = {}
    for (stage, precision), overlap in itertools.product(MODES, (False, True)):
        if overlap and stage == 0:
            continue
        # Buckets so short that some are full, and reduced, in the midst of backward.
        zero = {"reduce_bucket_size": 500, "overlap_comm": overlap}
        section = {"zero_optimization": zero} if stage else {}
        e = given.engine(stage=stage, precision=precision, micro_steps=3, deepspeed=section)
        batches = given.batches(rank, world, 3)
        e.train_step(batches, PEAK)
        reduced: dict[str, int] = {}
        part, switch, at_end = [""], e._watch.switch, e._ds.allreduce_gradients

        def followed(name: str, part: list = part, switch: Any = switch) -> str:
            part[0] = name
            return switch(name)

        def ends(*args: Any, part: list = part, at_end: Any = at_end, **more: Any) -> None:
            part.append("at the end")
            at_end(*args, **more)
            part.pop()

        def note(elements: int, part: list = part, reduced: dict = reduced) -> None:
            where = part[0] if len(part) == 1 else part[1]
            reduced[where] = reduced.get(where, 0) + elements

        e._watch.switch, e._ds.allreduce_gradients = followed, ends
        started = time.perf_counter()
        with _recorded(note):
            outcome = e.train_step(batches, PEAK)
        result[stage, precision, overlap] = (
            outcome.seconds,
            time.perf_counter() - started,
            reduced,
        )
    return result


# ------------------------------------------------------------------------------------- faults


def not_finite(rank: int, world: int, cases: list[tuple]) -> dict[tuple, Any]:
    """One rank's gradient is NaN in the second of three steps."""
    result = {}
    for stage, precision in cases:
        e = given.engine(stage=stage, precision=precision)
        batches = given.batches(rank, world, 1)
        e.train_step(batches, PEAK)
        before, steps = given.masters(e), _steps(e)
        good = next(batches)
        bad = _spoiled(good) if rank == world - 1 else good
        outcome = e.train_step(iter([bad]), PEAK).now
        same = _same(before, given.masters(e)) and steps == _steps(e)
        after = e.train_step(iter([good]), PEAK)
        moved = not _same(before, given.masters(e))
        result[stage, precision] = (outcome, same, after.bad, moved)
    return result


def _spoiled(batch: given.GivenBatch) -> given.GivenBatch:
    values = {name: value.numpy().copy() for name, value in batch.values.items()}
    values["dense.weight"][3, 3] = np.nan
    return given.GivenBatch(values)


def _steps(e: Engine) -> list[float]:
    return [float(state["step"]) for state in e.optimizer.state.values()]


def loss_scaling(rank: int, world: int, folder: str) -> dict[int | str, Any]:
    """fp16 from a scale that overflows: skipped steps, then exact ones; the scale is saved."""
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda self: True
    small_rows()
    result = {}
    for stage in (1, 2):
        fp16 = {"initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 20}
        e = given.engine(stage=stage, precision="fp16", deepspeed={"fp16": fp16})
        reference = ReferenceLamb(given.masters(e))
        batches = given.batches(rank, world, 1)
        scales, skipped = [], []
        for k in range(50):
            outcome = e.train_step(batches, PEAK)
            scales.append(outcome.loss_scale)
            skipped.append(outcome.skipped)
            if not outcome.skipped:
                reference.step(given.full_gradient(k), PEAK)
        place = Path(folder) / f"fp16-{stage}"
        place.mkdir(exist_ok=True)
        dist.barrier()
        e.snapshot()(place)
        dist.barrier()
        fresh = given.engine(stage=stage, precision="fp16", deepspeed={"fp16": fp16})
        fresh.load(contents(place))
        e.start_phase(1, 1, restart=True)
        again = place / "again"
        again.mkdir(exist_ok=True)
        dist.barrier()
        fresh.snapshot()(again)
        dist.barrier()
        both = [open_folder(contents(where)).meta.loss_scaler for where in (place, again)]
        dist.barrier()
        if rank == 0:  # of a stranger, who has other numbers in it
            about = json.loads((again / "engine.json").read_text())
            about["loss_scaler"] = dict.fromkeys("abcd", 1)
            (again / "engine.json").write_text(json.dumps(about))
        dist.barrier()
        fresh.load(contents(again))
        restored = (fresh.loss_scale, both[0] == both[1] and len(both[0]) == 4, e.loss_scale)
        error = relative_error(given.masters(e), reference.w)
        result[stage] = (scales, skipped, error, restored, _steps(e))
    smallest = {"initial_scale_power": 0, "hysteresis": 1}
    e = given.engine(stage=1, precision="fp16", deepspeed={"fp16": smallest})
    spoiled = _spoiled(next(given.batches(rank, world, 1)))
    outcomes = [e.train_step(iter([spoiled]), PEAK) for _ in range(3)]
    result["smallest"] = [(o.skipped, o.loss_scale) for o in outcomes]
    return result


def details(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Small promises of the engine that need a process group."""
    result: dict[str, Any] = {}
    e = _bert(stage=1)
    import deepspeed.comm.comm as comm

    result["shared_memory_op"] = comm.cdb.shm_comm_op

    torch.manual_seed(1)
    weights = {n: torch.randn_like(w) for n, w in e.module.state_dict().items()}
    e.load_weights(weights)
    low = _bert(stage=2, precision="bf16")
    low.load_weights(weights)
    both = (given.masters(e), given.masters(low))
    result["masters_are_fp32"] = all(
        np.array_equal(w, weights[name].numpy()) for m in both for name, w in m.items()
    )
    rounded = {n: w.bfloat16() for n, w in weights.items()}
    result["module_follows"] = _same_tensors(rounded, low.module.state_dict())
    result["errors"] = []
    missing = {n: w for n, w in weights.items() if n != "bert.pooler.dense.bias"}
    extra = weights | {"bert.pooler.dense.scale": torch.zeros(1)}
    wrong = weights | {"bert.pooler.dense.bias": torch.zeros(3)}
    for bad in (missing, extra, wrong):
        try:
            e.load_weights(bad)
        except UserError as error:
            result["errors"].append(str(error))

    initial = BertForPreTraining(STILL, generator=torch.Generator().manual_seed(0))
    fresh = given.masters(_bert(stage=1, precision="bf16"))
    result["initial_is_fp32"] = all(
        np.array_equal(fresh[n], p.detach().numpy()) for n, p in initial.named_parameters()
    )

    for typo in (
        {"zero_optimization": {"overlap_com": True}},
        {"wall_clock_breakdwn": True},
        {"communication_data_type": "x"},
        {"sequence_parallel_size": 0},
        # The first rank alone writes there.
        *[{"csv_monitor": {"enabled": True, "output_path": "/proc/none"}}] * (world == 1),
    ):
        try:
            given.engine(stage=1, deepspeed=typo)
        except UserError as error:
            result["errors"].append(str(error))
    given.engine(stage=1, deepspeed={"fp16": {"loss_scale_window": 500}})  # is not in use

    place = Path(folder) / f"details-{world}"
    place.mkdir(exist_ok=True)
    dist.barrier()
    e.snapshot()(place)
    dist.barrier()
    result["tensor_bytes"] = [
        sum(t.numel() * t.element_size() for t in load_file(path).values())
        for path in sorted(place.glob("rank-*"))
    ]
    config = PretrainConfig.model_construct(engine=e.config)
    result["planned_bytes"] = (
        planner.checkpoint_bytes(STILL), planner.snapshot_bytes(config, STILL, world)
    )  # fmt: skip
    other = Engine(
        BertForPreTraining(STILL, generator=torch.Generator().manual_seed(3)),
        OptimizerConfig(weight_decay=0.5, beta1=0.8),
        EngineConfig(zero_stage=1, precision="fp32", gradient_clipping=0.25),
        micro_steps=1,
        micro_batch_rows=1,
    )
    other.load(contents(place))
    group = other.optimizer.param_groups[0]
    result["config_stands"] = (
        group["weight_decay"], group["betas"], other._ds.optimizer.clip_grad
    )  # fmt: skip
    result["no_trust"] = e.train_step(bert_batches(rank, world, 1, 12 // world), 1e-3).trust

    result["phase"] = []
    for restarts in (True, False):
        config = OptimizerConfig(restart_bias_correction=restarts)
        e = given.engine(stage=1, optimizer=config)
        batches = given.batches(rank, world, 1)
        for _ in range(3):
            e.train_step(batches, PEAK)
        moments = [s["exp_avg"].clone() for s in e.optimizer.state.values()]
        e.start_phase(3, 1, restart=True)
        kept = [s["exp_avg"] for s in e.optimizer.state.values()]
        same = all(torch.equal(a, b) for a, b in zip(moments, kept, strict=True))
        e.train_step(given.batches(rank, world, 3, first=3), PEAK)
        result["phase"].append((same, _steps(e)))
    return result


def _between_worlds(rank: int, world: int, folder: str) -> dict[tuple, dict[str, np.ndarray]]:
    """World 1 leaves a checkpoint of stage 2; world 2 goes on from it and leaves one of stage 1."""
    result = {}
    for precision in ("fp32", "bf16"):
        mine = Path(folder) / f"{precision}-from-world-{world}"
        mine.mkdir(exist_ok=True)
        dist.barrier()
        if world == 2:
            other = str(Path(folder) / f"{precision}-from-world-1")
            result["moved", precision] = load_and_run(rank, world, 1, precision, other, 5, 10)
        stayed = run_and_save(rank, world, 3 - world, precision, str(mine), 5, 10)
        result["stayed", precision] = stayed
    return result


def engine_suite(
    rank: int,
    world: int,
    folder: str,
    means: list[tuple],
    resumes: list[tuple],
    faults: list[tuple],
    conversions: list[tuple],
) -> dict[str, Any]:
    """All that the tests of the engine ask of a world, in one start."""
    return {
        "means": global_means(rank, world, means),
        "emptied": emptied(rank, world),
        "bitwise": bitwise(rank, world, folder, resumes),
        "old_folders": old_folders(rank, world, folder),
        "converted": converted(rank, world, folder, conversions),
        "reductions": reductions(rank, world),
        "fine_sums": fine_sums(rank, world),
        "operators": {n: operators(rank, world, n) for n in (10, 30)},
        "timings": timings(rank, world),
        "not_finite": not_finite(rank, world, faults),
        "details": details(rank, world, folder),
        "moved": _between_worlds(rank, world, folder),
        "loss_scaling": loss_scaling(rank, world, folder),
    }


def spoken(rank: int, world: int) -> tuple[str, str, list[Any], bool]:
    """What a start, an overflow and a foreign warning of DeepSpeed print: (stdout, stderr), the
    timeouts of the groups that the start made, and whether it loaded the compiler."""
    from deepspeed.utils import logger

    timeouts: list[Any] = []
    new_group = dist.new_group

    def noted(*args: Any, timeout: Any = None, **more: Any) -> Any:
        timeouts.append(timeout)
        return new_group(*args, timeout=timeout, **more)

    dist.new_group = noted
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        e = given.engine(stage=1)
        e.train_step(iter([_spoiled(next(given.batches(rank, world, 1)))]), PEAK)
        logger.warning("OVERFLOW! Skipping step")
        logger.warning("You are using ZeRO with an untested optimizer")
        logger.warning("something else")
    return out.getvalue(), err.getvalue(), timeouts, "torch._inductor.compile_fx" in sys.modules


def deterministic_steps(rank: int, world: int) -> tuple[bool, bool]:
    """Two runs of two steps of the real model with `deterministic`: (equal, the switch was on)."""
    numerics.set_switches(deterministic=True)
    runs = []
    for _ in range(2):
        e = _bert(precision="bf16", model=TINY)
        batches = bert_batches(rank, world, 1, 12)
        runs.append(([_seeded_step(e, batches, rank, k) for k in range(2)], given.masters(e)))
    (outcomes, weights), (again, weights_again) = runs
    same = outcomes == again and _same(weights, weights_again)
    return same, torch.are_deterministic_algorithms_enabled()
