"""Runs on one page of HTML, from their files alone: curves, health, speed, history, configuration.

One file without a script, its pictures as SVG inside. Several runs are laid over each other, at
equal tokens and at equal hours.
"""

from __future__ import annotations

import csv
import html
import io
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pydantic
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from configs.load import Config, check, dump, leaves, load
from core.console import clock_text, printable
from core.errors import UserError, short
from core.files import check_own, disk_errors, read_sealed, write_atomically
from core.urls import is_url
from data_pipeline.corpus.manifest import Manifest, load_manifest
from pretrain.board import is_matrix
from pretrain.checkpoint import newest_checkpoint
from pretrain.config import PretrainConfig
from pretrain.fill_in import Filled, recorded
from pretrain.metrics import records_from_the_end
from pretrain.model_config import SHAPE_KEYS
from pretrain.run_state import PROBE, PROBES, State
from pretrain.status import Status, count_text, read_config, status
from pretrain.stopwatch import PARTS

_POINTS = 1500  # of a line, at most: more are not seen and make the file large
_RC = {"svg.hashsalt": "page", "svg.fonttype": "none", "font.size": 8, "text.parse_math": False,
       "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False,
       "axes.spines.right": False}  # fmt: skip
_STYLE = """body{font:14px/1.45 system-ui,sans-serif;max-width:960px;margin:2em auto;padding:0 1em;
color:#222}h1{font-size:1.5em}h2{font-size:1.1em;margin-top:2em;border-bottom:1px solid #ddd}
table{border-collapse:collapse}td,th{padding:.15em .9em .15em 0;text-align:left;vertical-align:top}
div,pre{overflow-x:auto}pre{font-size:12px}
svg{width:100%;min-width:600px;height:auto}"""
_BEGIN = (
    '<!DOCTYPE html><html lang="en"><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width">'
)
_MARKERS = "os^Dv"  # of held-out lengths
_RECORDS = Path(__file__).parents[1] / "records"  # of a checkout
# What others report at the end of LARGE's recipe: DeepLearningExamples' final loss of both tasks
# (1.265 +- .023) and MLPerf's target for masked words right.
_LARGE = {"loss": (1.242, 1.288), "right": (0.72, 0.72)}
_LARGE_PHASES = [(128, 65536, 6e-3), (512, 32768, 4e-3)]


@dataclass(frozen=True)
class Run:
    """What a run folder holds of its past. train, heldout: records of metrics.jsonl by step;
    probes: of `finetune follow`. trust: LAMB's last ratios of the weight matrices by (layer, kind).
    filled: by step."""

    folder: Path
    config: PretrainConfig
    status: Status
    train: list[dict[str, float]]
    heldout: list[dict[str, float]]
    probes: list[dict[str, float]]
    trust: dict[tuple[str, str], float]
    filled: dict[int, list[Filled]]
    saved: State | None
    manifest: Manifest | None

    @property
    def name(self) -> str:
        return printable(self.folder.name)

    def column(self, name: str) -> np.ndarray:
        """Of the training records, nan where one has no such number."""
        return np.array([record.get(name, np.nan) for record in self.train], dtype=float)

    @property
    def hours(self) -> np.ndarray:
        """Of training up to each record: evaluations, checkpoints and pauses are not in it."""
        steps = np.diff(self.column("step"), prepend=0)
        return np.cumsum(steps * self.column("throughput/step_seconds")) / 3600

    def at(self, axis: np.ndarray, steps: Sequence[float]) -> np.ndarray:
        """The axis at steps of the run."""
        return np.interp(steps, self.column("step"), axis)


class Job(Config):
    """A finished fine-tuning job, as its result.json has it. main: the name of its chief score;
    paper: that of the paper's BASE and LARGE."""

    model_config = pydantic.ConfigDict(extra="ignore")

    task: str
    main: str
    scores: dict[str, float]
    paper: tuple[float | None, float | None] = (None, None)
    failed: bool = False


def _check_name(file: Path) -> None:
    """UserError where it is no page's, or of another file than an earlier page."""
    if file.suffix.lower() not in (".html", ".htm"):
        raise UserError(
            f"--html: {short(str(file))}: a name that ends in .html or .htm is expected"
        )
    check_own(file, lambda line: line.startswith(_BEGIN.encode()))


def write(
    folders: Sequence[str], file: Path, scores: Sequence[str] = (), now: float | None = None
) -> None:
    """The page of these run folders, with the fine-tuning jobs below the folders `scores`.
    UserError where a run is none or has recorded nothing, a result is none, or where FILE is no
    page's name or another file's."""
    _check_name(file)
    now = time.time() if now is None else now
    once: dict[str, Path] = {}
    for folder in map(Path, folders):
        once.setdefault(os.path.realpath(folder), folder)
    runs = [read(folder, now) for folder in once.values()]
    with matplotlib.rc_context(_RC):
        body = _one(runs[0]) if len(runs) == 1 else _several(runs)
        if scores:
            rows = strips(scores)
            picture = _svg(lambda f: _scores(f, rows), 0.8 + 0.32 * len(rows))
            body += _section("Fine-tuning: every job of all seeds", picture)
    title = html.escape(", ".join(run.name for run in runs))
    page = f"{_BEGIN}<title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>{body}</html>\n"
    with disk_errors(file):
        # A folder's name may be no UTF-8.
        write_atomically(file, page.encode("utf-8", "backslashreplace"), durable=False)


def read(folder: Path, now: float) -> Run:
    """UserError where there is no run, or none that has recorded a step."""
    found = status(folder, now)
    metrics = folder / "metrics.jsonl"
    with disk_errors(metrics):
        records = list(records_from_the_end(metrics))[::-1]
    train = [r for r in records if "train/loss" in r]
    if not train:
        raise UserError(f"{metrics}: no step is recorded in it")
    trust: dict[tuple[str, str], float] = {}
    for record in records:
        for name, value in record.items():
            kind, _, layer = name.removeprefix("trust_ratio_").partition("/")
            if name.startswith("trust_ratio_") and is_matrix(kind):
                trust[layer, kind] = value
    checkpoint = newest_checkpoint(folder / "checkpoints")
    config, probed = read_config(folder), list(records_from_the_end(folder / PROBES))[::-1]
    return Run(
        folder,
        config,
        found,
        train,
        [r for r in records if "heldout/mlm_loss" in r],
        [r for r in probed if any(name.startswith(PROBE) for name in r)],
        trust,
        recorded(metrics),
        None if checkpoint is None else checkpoint[1],
        _manifest(config.data.dir),
    )


def _manifest(data_dir: str) -> Manifest | None:
    """Of a data set in a folder of this machine, where it is still there."""
    try:
        return None if is_url(data_dir) else load_manifest(data_dir)
    except UserError:
        return None


def strips(folders: Sequence[str]) -> dict[str, list[Job]]:
    """By task and chief score, of the jobs below the folders."""
    found: dict[str, list[Job]] = {}
    for folder in folders:
        results = sorted(Path(folder).rglob("result.json"))
        if not results:
            raise UserError(f"{folder}: no finished job (result.json) below")
        for path in results:
            job = check(read_sealed(path), Job, str(path))
            if job.main not in job.scores:
                raise UserError(f"{path}: main: {short(job.main)!r} is not among the scores")
            found.setdefault(printable(f"{job.task}, {job.main}"), []).append(job)
    return found


def _one(run: Run) -> str:
    events = [] if run.saved is None else run.saved.history
    parts = [
        _section("", "<pre>" + html.escape("\n".join(run.status.lines())) + "</pre>"),
        _section("", _table(_headline(run))),
        _section("Loss and words right", _svg(lambda f: _losses(f, [run], by_hours=False), 6)),
        *_followed([run], by_hours=False),
        _section("Learning rate and gradient norm", _svg(lambda f: _rates(f, run), 2.6)),
        _section("Seconds of a step, tokens a second", _svg(lambda f: _speed(f, run), 2.6)),
    ]
    if run.trust:
        layers = len({layer for layer, _ in run.trust})
        picture = _svg(lambda f: _trust(f, run), 1.6 + 0.2 * layers)
        parts.append(_section("LAMB's trust ratios, at the last record", picture))
    if run.filled:
        parts.append(_section("Blanks in held-out sentences", _table(_fill_ins(run), head=True)))
    if run.manifest is not None:
        parts.append(_section("Data", _table(run.manifest.card())))
    if events:
        rows = [["step", "event", "code", "what"]]
        phase: dict[str, Any] = {}
        for event in events:
            known = {"event", "step", "code"}
            facts = {k: v for k, v in event.items() if k not in known and v not in ({}, None)}
            if event.get("event") == "phase":
                if facts == phase:
                    continue  # a start repeats it
                phase, facts = facts, facts | {"phase": facts.get("phase", 0) + 1}
            changed = facts.pop("changed", None)
            if isinstance(changed, dict):
                trees = [{k: pair[i] for k, pair in changed.items()} for i in (0, 1)]
                facts |= {k: " -> ".join(pair) for k, *pair in _different(trees)}
            what = ", ".join(f"{k}: {v}" for k, v in facts.items())
            step = f"{event.get('step', 0):,}"
            rows.append([step, *(str(event.get(k, "")) for k in ("event", "code")), what])
        parts.append(_section("Its history, up to the newest checkpoint", _table(rows, head=True)))
    return "".join(parts) + _section("Configuration", f"<pre>{html.escape(dump(run.config))}</pre>")


def _several(runs: Sequence[Run]) -> str:
    rows = [["run", "state", "step", "tokens", "hours", "held-out loss", "words right"]]
    for run in runs:
        s, tokens = run.status, run.column("progress/tokens")[-1]
        scores = ["-", "-"]
        if s.heldout_step is not None:
            scores = [f"{s.heldout_mlm_loss:.3f}", f"{s.heldout_mlm_accuracy:.1%}"]
        seen = "?" if np.isnan(tokens) else f"{tokens / 1e6:,.1f} M"
        hours = f"{run.hours[-1]:.2f}"
        rows.append([run.name, s.state, f"{s.step:,}", seen, hours, *scores])
    different = _different([_facts(run) for run in runs])
    named = [["key", *(run.name for run in runs)], *different]
    equal = "steps" if _axis(runs[0], runs, by_hours=False)[1] == "steps" else "tokens"
    return (
        _section("", _table(rows, head=True))
        + _section(
            f"At equal {equal}",
            _svg(lambda f: _losses(f, runs, by_hours=False), 6),
        )
        + "".join(_followed(runs, by_hours=False))
        + _section("At equal hours of training", _svg(lambda f: _losses(f, runs, by_hours=True), 6))
        + "".join(_followed(runs, by_hours=True))
        + _section("Keys that differ", _table(named, head=True) if different else "none")
    )


def _followed(runs: Sequence[Run], by_hours: bool) -> list[str]:
    """The section on scores of fine-tuned checkpoints, where a run was followed."""
    if not any(run.probes for run in runs):
        return []
    picture = _svg(lambda f: _probes(f, runs, by_hours), 2.6)
    return [_section("Fine-tuned checkpoints (finetune follow), medians", picture)]


def _facts(run: Run) -> dict[str, Any]:
    """The configuration without the run's own folder, with its code and data set."""
    tree = run.config.model_dump(mode="json")
    folder = Path(tree.pop("run_dir"))
    if tree["data"]["ledger"] == str(folder / "damaged.jsonl"):
        del tree["data"]["ledger"]
    if run.saved is not None:
        tree["code"] = run.saved.code_version or "not known"
        tree["data set"] = str(run.saved.dataset.get("dataset_id", "?"))
    return tree


def _headline(run: Run) -> list[list[str]]:
    tokens, hours = run.column("progress/tokens")[-1], run.hours[-1]
    world = run.saved.world_size if run.saved is not None else 0
    rows = [["training", clock_text(3600 * hours)]]
    if world:
        rows.append(
            [
                "device hours of these steps",
                f"{hours * world:,.2f} ({count_text(world, 'rank')} at the last checkpoint)",
            ]
        )
    if not np.isnan(tokens):
        rows.append(["real tokens", f"{tokens / 1e6:,.1f} M"])
    if not np.isnan(epoch := run.column("progress/epoch")[-1]):
        rows.append(["epoch of the phase, from 0", f"{epoch:g}"])
    newest = {int(r.get("heldout/max_seq_len", 0)): r for r in run.heldout}
    for length, r in sorted(newest.items()):
        where = f"held-out, up to {length} tokens" if length else "held-out"
        text = f"{r['heldout/mlm_loss']:.3f} nats, {r['heldout/mlm_accuracy']:.1%} of words right"
        rows.append([where, f"{text} (step {r['step']:,})"])
    if run.saved is not None:
        rows.append(["data set", str(run.saved.dataset.get("dataset_id", "?"))])
        rows.append(["code", run.saved.code_version or "not known"])
    return rows


def _fill_ins(run: Run) -> list[list[str]]:
    """Guesses at the first evaluation, midway and at the last."""
    steps = list(run.filled)
    chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]})
    rows = [["sentence", "word", *(f"step {step:,}" for step in chosen)]]
    then = [{(x.sentence, x.word): x.listed(2) for x in run.filled[step]} for step in chosen]
    for last in run.filled[chosen[-1]]:
        blank = last.sentence, last.word
        rows.append([*blank, *(found.get(blank, "-") for found in then)])
    return rows


def _axis(run: Run, runs: Sequence[Run], by_hours: bool) -> tuple[np.ndarray, str]:
    """Where the training records stand, and what that counts."""
    if by_hours:
        return run.hours, "hours of training"
    if all(np.isfinite(r.column("progress/tokens")).all() for r in runs):
        return run.column("progress/tokens") / 1e6, "million real tokens"
    return run.column("step"), "steps"


def _losses(figure: Figure, runs: Sequence[Run], by_hours: bool) -> None:
    above, below = figure.subplots(2, 1, sharex=True)
    lengths = sorted({length for run in runs for length in _lengths(run)})
    for i, run in enumerate(runs):
        axis, label = _axis(run, runs, by_hours)
        below.set_xlabel(label)
        colour = f"C{i}"
        name = run.name if len(runs) > 1 else "training"
        _line(above, axis, run.column("train/mlm_loss"), color=colour, label=name, lw=0.8)
        _line(below, axis, run.column("train/mlm_accuracy"), color=colour, lw=0.8)
        for number, length in enumerate(lengths):
            some = [r for r in run.heldout if r.get("heldout/max_seq_len", 0) == length]
            at = run.at(axis, [r["step"] for r in some])
            mark = _MARKERS[number % len(_MARKERS)]
            style: dict[str, Any] = {"color": colour, "marker": mark, "ms": 3, "lw": 0.8}
            style |= {"ls": "none"} if len(runs) > 1 else {"color": f"C{number + 1}"}
            label = f"held-out, {length:.0f}" if len(runs) == 1 else None
            above.plot(at, [r["heldout/mlm_loss"] for r in some], label=label, **style)
            below.plot(at, [r["heldout/mlm_accuracy"] for r in some], **style)
    if len(runs) > 1:
        for number, length in enumerate(lengths):
            grey = {"color": "grey", "marker": _MARKERS[number % len(_MARKERS)], "ms": 3}
            above.plot([], [], ls="none", label=f"held-out, {length:.0f}", **grey)
    if len(runs) == 1:
        _mark(runs[0], axis, (above, below))
        newest = run.heldout[-1] if run.heldout else {}
        for axes, name in ((above, "frequencies_loss"), (below, "commonest_accuracy")):
            if (level := newest.get(f"heldout/{name}")) is not None:
                axes.axhline(level, color="grey", ls="--", lw=0.8, label="token frequencies")
        _reference(runs[0], axis, above, below)
    above.set_ylabel("masked LM, nats")
    below.set_ylabel("masked words right")
    above.legend(frameon=False, fontsize=7)


def _reference(run: Run, axis: np.ndarray, above: Axes, below: Axes) -> None:
    """What others reached at LARGE's recipe, or the recorded curve of the same preset."""
    if is_published_recipe(run.config):
        above.axhspan(*_LARGE["loss"], color="green", alpha=0.3, lw=1,
                      label="published, at the end: with the loss of next sentence")  # fmt: skip
        below.axhspan(*_LARGE["right"], color="green", alpha=0.3, lw=1)
        return
    last = run.column("step")[-1]
    points = [p for p in recorded_curve(run.config) if p["step"] <= last]
    for number, length in enumerate(_lengths(run)):
        some = [p for p in points if p["length"] == length]
        at = run.at(axis, [p["step"] for p in some])
        style: dict[str, Any] = {"color": f"C{number + 1}", "alpha": 0.3, "lw": 4}
        label = f"this preset's record, on its own text, {length:.0f}" if some else None
        above.plot(at, [p["mlm_loss"] for p in some], label=label, **style)
        below.plot(at, [p["mlm_accuracy"] for p in some], **style)


def is_published_recipe(config: PretrainConfig) -> bool:
    """Whether it is LARGE's, whose final figures are published, whatever its text and steps."""
    shape, task = config.model, (config.objective, config.data.next_sentence)
    size = (shape.hidden_size, shape.num_hidden_layers, shape.num_attention_heads)
    phases = [(p.max_seq_len, p.sequences_per_step, p.learning_rate) for p in config.phases]
    return (size, task, phases) == (
        (1024, 24, 16),
        ("masked", "original"),
        _LARGE_PHASES,
    ) and config.optimizer.name == "lamb"


def _lengths(run: Run) -> list[float]:
    return sorted({r.get("heldout/max_seq_len", 0) for r in run.heldout})


def recorded_curve(config: PretrainConfig) -> list[dict[str, float]]:
    """Held-out points (step, length, mlm_loss, mlm_accuracy) of the newest record of a preset with
    this model and these phases, whatever their steps; none where there is no such record. A record
    whose curve names no preset (its run changed keys) is of none."""
    for file in sorted(_RECORDS.glob("*/curve.csv"), reverse=True):
        with file.open(newline="") as opened:
            rows = list(csv.DictReader(opened))
        if "preset" not in rows[0]:
            continue
        preset = load(_RECORDS.parent / rows[0]["preset"], PretrainConfig)
        if _recipe(preset) == _recipe(config):
            return [{k: float(v) for k, v in row.items() if k != "preset"} for row in rows]
    return []


def _recipe(config: PretrainConfig) -> list[Any]:
    phases = [(p.max_seq_len, p.sequences_per_step, p.learning_rate) for p in config.phases]
    keys = (
        config.objective,
        config.optimizer.name,
        *(getattr(config.model, k) for k in SHAPE_KEYS),
    )
    return [*keys, *phases]


def _probes(figure: Figure, runs: Sequence[Run], by_hours: bool) -> None:
    """A line a run and measure: colours are runs, or of one run measures."""
    axes = figure.subplots()
    named = (name for run in runs for record in run.probes for name in record)
    names = [*dict.fromkeys(name for name in named if name.startswith(PROBE))]
    for i, run in enumerate(runs):
        axis, label = _axis(run, runs, by_hours)
        for number, name in enumerate(names):
            some = [r for r in run.probes if name in r]
            measure = printable(name.removeprefix(PROBE))
            axes.plot(
                run.at(axis, [r["step"] for r in some]),
                [r[name] for r in some],
                color=f"C{i if len(runs) > 1 else number}",
                marker=_MARKERS[number % len(_MARKERS)],
                ms=3,
                lw=0.8,
                label=f"{run.name}, {measure}" if len(runs) > 1 else measure,
            )
    axes.set_xlabel(label)
    axes.set_ylabel("dev score, 0 to 100")
    axes.legend(frameon=False, fontsize=7)


def _scores(figure: Figure, rows: dict[str, list[Job]]) -> None:
    axes = figure.subplots()
    marked = False
    for y, jobs in enumerate(rows.values()):
        for failed, mark in ((False, "o"), (True, "x")):
            values = [job.scores[job.main] for job in jobs if job.failed is failed]
            axes.plot(values, [y] * len(values), mark, color="C3" if failed else "C0", alpha=0.6)
        axes.plot(np.median([job.scores[job.main] for job in jobs]), y, "|", color="k", ms=14)
        papers = {job.paper for job in jobs} - {(None, None)}  # none in a job of an older version
        for name, value in zip("BL", *papers, strict=True) if len(papers) == 1 else ():
            if value is not None:
                marked = True
                axes.plot(value, y, "|", color="C2", ms=14)
                axes.annotate(name, (value, y), (3, 4), textcoords="offset points", color="C2")
    axes.set_yticks(range(len(rows)), [f"{name} ({len(jobs)})" for name, jobs in rows.items()])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    told = "dev score, 0 to 100; | the median; x a constant guess or diverged"
    if marked:
        told += "; B, L: the paper's BASE and LARGE (GLUE: on test)"
    axes.set_xlabel(told)


def _mark(run: Run, axis: np.ndarray, both: Sequence[Axes]) -> None:
    """Phases in turns of grey, starts again as dotted lines, rollbacks as red ones."""
    ends = np.cumsum([0, *(phase.steps for phase in run.config.phases)])
    last = run.column("step")[-1]
    for at in range(1, len(ends) - 1, 2):
        if ends[at] < last:
            begin, end = run.at(axis, [ends[at], min(ends[at + 1], last)])
            for axes in both:
                label = "every other phase" if at == 1 else None
                axes.axvspan(begin, end, color="grey", alpha=0.12, lw=0, label=label)
    told = set()
    for event in run.saved.history if run.saved is not None else ():
        if event.get("event") in ("resume", "rollback"):
            red = event["event"] == "rollback"
            label = None if red in told else "back to here (a rollback)" if red else "started again"
            told.add(red)
            for axes in both:
                at = run.at(axis, [float(event.get("step", 0))])[0]
                axes.axvline(at, color="red" if red else "black", ls=":", lw=0.7, label=label)


def _rates(figure: Figure, run: Run) -> None:
    axis, label = _axis(run, [run], by_hours=False)
    left, right = figure.subplots(1, 2)
    _line(left, axis, run.column("rate/learning_rate"))
    _line(right, axis, run.column("train/grad_norm"), lw=0.8)
    right.set_yscale("log")
    for ticks in (right.yaxis.set_major_formatter, right.yaxis.set_minor_formatter):
        ticks(LogFormatter())  # the scale's own writes mathematics
    left.set_ylabel("learning rate")
    right.set_ylabel("gradient norm")
    for axes in (left, right):
        axes.set_xlabel(label)


def _speed(figure: Figure, run: Run) -> None:
    axis, label = _axis(run, [run], by_hours=False)
    left, right = figure.subplots(1, 2)
    names = [*PARTS, "other"]
    thin = _thin(len(axis))
    columns = [np.nan_to_num(run.column(f"time/{name}"))[thin] for name in names]
    left.stackplot(axis[thin], *columns, labels=names, lw=0)
    left.legend(frameon=False, fontsize=6, ncols=3, loc="upper left")
    left.set_ylabel("seconds")
    _line(right, axis, run.column("throughput/tokens_per_second"), lw=0.8)
    right.set_ylim(bottom=0)
    right.set_ylabel("tokens a second")
    for axes in (left, right):
        axes.set_xlabel(label)


def _trust(figure: Figure, run: Run) -> None:
    layers, kinds = ([*dict.fromkeys(key[i] for key in run.trust)] for i in (0, 1))
    values = np.full((len(layers), len(kinds)), np.nan)
    for (layer, kind), ratio in run.trust.items():
        values[layers.index(layer), kinds.index(kind)] = max(ratio, 1e-12)
    axes = figure.subplots()
    axes.grid(False)
    drawn = axes.imshow(np.log10(values), aspect="auto", cmap="viridis")
    axes.set_yticks(range(len(layers)), layers)
    axes.set_xticks(range(len(kinds)), kinds, rotation=30, ha="right")
    figure.colorbar(drawn, label="log10")


def _thin(count: int) -> slice:
    return slice(None, None, max(1, -(-count // _POINTS)))


def _line(axes: Axes, x: np.ndarray, y: np.ndarray, **style: Any) -> None:
    thin = _thin(len(x))
    axes.plot(x[thin], y[thin], **style)


def _svg(draw: Callable[[Figure], None], height: float) -> str:
    """A picture 9 inches wide."""
    figure = Figure(figsize=(9, height), layout="constrained")
    draw(figure)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _section(title: str, body: str) -> str:
    return (f"<h2>{html.escape(title)}</h2>" if title else "") + f"<div>{body}</div>"


def _table(rows: Sequence[Sequence[str]], *, head: bool = False) -> str:
    lines = []
    for i, row in enumerate(rows):
        tag = "th" if head and i == 0 else "td"
        cells = "".join(f"<{tag}>{html.escape(printable(cell))}</{tag}>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _different(trees: Sequence[dict[str, Any]]) -> list[list[str]]:
    """[key, its value in each tree] of the leaves that differ; "-" where a tree has none."""
    flat = [leaves(tree) for tree in trees]
    keys = sorted(set().union(*flat))
    rows = [[key, *(str(tree.get(key, "-")) for tree in flat)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]
