"""Every command that a document shows is run, in a copy of the checkout.

As it stands there but for `PLACES`, what a reader puts in the place of a name, and `SMALL` and
`OPTIONS`, which make a run one of seconds. Each ends with 0, or as `MAY_FIND` says, and without a
traceback. The paths of the documents lead to tiny files, and a command finds what one before it
made (`STAGES`).
`NOT_RUN` names what is not run, and why.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.data_pipeline.corpus import test_fetch
from tests.data_pipeline.corpus.text import (
    WORDS,
    document,
    multistream,
    vocabulary,
    wikiextractor,
    write_vocabulary,
)
from tests.data_pipeline.stream.servers import http_server
from tests.finetune import test_features, test_squad, test_swag, test_train, tiny
from tests.ports import free_port
from tests.shown import COMMANDS, PROGRAMS, ROOT, TEXTS
from tests.slurm.cluster import Cluster, why_not

DUMP = "enwiki-latest-pages-articles-multistream.xml.bz2"
NOT_RUN = {
    r"python -m \w+$|python -m \w+ [a-z]+$|python -m ROOM|python -m \w+ \w+ \|": "a name",
    r"python (pretrain/run|finetune/run|benchmarks/(?!finetune_vs_hf)\w+)\.py$": "a name",
    r"make (demo|test|test-all)$|\.ci/run": "is run by .ci/run, or is it",
    r"pip |python -m venv|\.venv/bin/pip": "installs packages",
    r"docker |apptainer ": "needs Docker or Apptainer",
    r"hf |python -m pretrain import hf:": "needs the hub, or an account of it",
    r"python benchmarks/wikitext\.py": "installs the library that it compares with",
    r"python benchmarks/step_vs_hf\.py --hf-compile": "compiles for minutes on a CPU",
    r"srun --container-image": "needs pyxis",
    r"sbatch |srun |scancel ": "runs below, on a Slurm of its own",
}
# What ends with 3 where the host has something to mend: shared memory, open files, a port in use.
MAY_FIND = r"python -m pretrain doctor "
# Regular expressions and what is put there, one after the other.
PLACES = [
    # An option that may be left out is given; what may be repeated stands once.
    (r" \[((?:--|[A-Z])[^\]]*)\]", r" \1"),
    (r" \.\.\.", ""),
    (r" --set KEY=VALUE", ""),
    # What is installed stays as it is.
    (r"^make (check|format|setup)$", r"make --old-file=.venv/.dev --old-file=.venv/.runtime \1"),
    # Launchers: two processes of this machine.
    (r"^deepspeed --log_level critical$", r"\g<0> pretrain/run.py --config C"),
    (r"^deepspeed (?:--num_gpus|--master_port) N$", "deepspeed pretrain/run.py --config C"),
    (r"^deepspeed --num_gpus 2 ", "deepspeed "),
    (r"--hostfile H\b", "--hostfile hosts"),
    (r"--master_port 29500", "--master_port {port}"),
    (r"^deepspeed ", "deepspeed --num_gpus 2 --master_port {port} "),
    (
        r"--nnodes 4 --node_rank 0 --nproc_per_node 8 --master_addr node1",
        "--nnodes 2 --node_rank {rank} --nproc_per_node 1 --master_addr 127.0.0.1",
    ),
    (r"--nproc_per_node [48]", "--nproc_per_node 2"),
    (r"^torchrun (?!.*master_port)", "torchrun --master_port {port} "),
    (r"mpiexec -n \d+ -ppn 8 -hosts \S+", "mpiexec -n 2 -ppn 2 -hosts localhost"),
    (r"mpiexec -n \d+", "mpiexec -n 2"),
    (r"^(mpiexec.*run\.py)", r"MASTER_ADDR=127.0.0.1 MASTER_PORT={port} \1"),
    (r"\bCOMMAND\b", "python pretrain/run.py --config configs/pretrain_large.yaml --set SMALL"),
    # Numbers, and files of the reader's own.
    (r"(--gpus|--windows) N", r"\1 2"),
    (r"(prepare --config) C\b", r"\1 configs/data_wikibooks.yaml"),
    (r"--config (?:C|FILE)\b", "--config c.yaml"),
    (r"--config THIS", "--config configs/finetune_classify.yaml"),
    (r"(show|verify|sources) DIR", r"\1 data/wikibooks"),
    (r"--grep (?:TEXT|\".*\")", "--grep river"),
    (r"export (RUN|runs/\w+) DIR", r"export \1 data/of-\1"),
    (r"import FOLDER DIR", "import data/raw/bert-base-uncased data/imported"),
    (r"--data DIR", "--data data/text"),
    (r"configs/finetune_(?:glue|squad|swag|ner)\.yaml$", r"\g<0> --set encoder.path=DIR"),
    (r"encoder\.path=(?:DIR|runs/x)", "encoder.path=data/of-runs/large"),
    (r"glue\.dir=FOLDER", "glue.dir=data/glue"),
    (r"ablations FOLDER", "ablations runs/finetune"),
    (r"predict MODEL FILE --out FILE", "predict runs/classify new.csv --out answers.csv"),
    (r" new\.csv --out answers\.csv", " new.csv --out answers-{n}.csv"),
    (r'(GPU_ARGS=")(.*)=192', r"\1--device cpu --tiny \2=1"),
    (r"^python -m tests\.soak", r"TMPDIR=$PWD \g<0>"),
    (r"--html FILE", "--html page.html"),
    (
        r"--tasks-dir DIR --weights DIR --out DIR",
        "--tasks-dir data --weights data/raw/bert-base-uncased --out runs/scores",
    ),
    (r"--out DIR", "--out runs/{n}"),
    (r"report OUT", "report runs/scores"),
    (r"RUN RUN2?\b", "runs/mine runs/large"),
    (r"\bRUN\b|runs/x\b", "runs/mine"),
    (r"/new/runs/large data\.dir=/new/data", "runs/moved data.dir=data/text"),
    (r"table8_\*", "table8_80_*"),
    (r"step-00010000", "step-00000006"),
    (r"--out data/raw", "--out data/raw/fetched --mirror {mirror}"),
    (r"--wiki FOLDER --vocab vocab\.txt", "--wiki data/raw/extracted"),
    (r"DUMP\.xml\.bz2", f"data/raw/{DUMP}"),
]
PHASE = (
    "max_seq_len=32 row_len=64 rows_per_step=null sequences_per_step=8 max_predictions=5 "
    "micro_batch_rows=4 steps=6 rows_multiple=1 tuned_for_sequences=null"
).split()
RUN = (
    "device=cpu data.workers=0 engine.precision=fp32 model.compile=false "
    "checkpoint.every_steps=6 evaluation.every_steps=6 evaluation.rows=4"
)
MODEL = (
    "model.hidden_size=32 model.num_hidden_layers=1 model.num_attention_heads=2 "
    "model.intermediate_size=64"
)


def phases(count: int) -> str:
    return " ".join([RUN, *(f"phases.{n}.{key}" for n in range(count) for key in PHASE)])


# What --set ends with, by the command; the last of a key counts.
SMALL = [
    (r"prepare .*data_text", "vocabulary.size=1300 unit_bytes=20000 shard_bytes=20000"),
    (
        r"prepare .*data_demo",
        f"sources.0.path=data/raw/{DUMP} sources.1.path=data/raw/books1.tar.gz "
        "vocabulary.size=1300",
    ),
    (r"prepare .*vocabulary\.path", "out=data/continued"),
    (r"(?:run\.py|doctor) .*pretrain_(?:large|base|small|mini)", f"{MODEL} {phases(2)}"),
    (r"run\.py .*pretrain_demo", f"{MODEL} {phases(3)}"),
    (r"run\.py .*pretrain_continue", phases(1)),
    (r"pretrain_continue", "data.dir=data/continued"),
    (r"sweep configs", f"{MODEL} {phases(2)} data.dir=data/text"),
    (
        r"audit .*--world 8",
        f"{phases(2)} phases.0.rows_multiple=8 phases.1.rows_multiple=8",
    ),
    (r"run\.py .*pretrain_mini(?!.*data\.dir)", "data.dir=data/text"),
    (r"run_dir=runs/small", "run_dir=runs/cores"),
    (r"run_dir=runs/cooled", "phases.0.steps=8"),
    (r"(?:deepspeed|torchrun|mpiexec) .*c\.yaml(?!.*run_dir)", "run_dir=runs/{n}"),
    (
        r"configs/finetune_",
        "device=cpu grid.batch_size=[8] grid.learning_rate=[1e-3] grid.epochs=[1] grid.seeds=[0]",
    ),
    (r"finetune_glue", "glue.tasks=[SST-2]"),
    (r"finetune_classify(?!.*data/raw/mine)", "run_dir=runs/{n}"),
    (r"ner\.features", "ner.lstm_size=16"),
    (r"finetune_squad", "squad.max_seq_len=96 squad.stride=16"),
    *((f"finetune_{x}", f"{x}.max_seq_len=32") for x in "glue classify swag ner".split()),
]
TAKES_KEYS = r"\b(?:run\.py|prepare|audit|plan|sweep|follow|doctor|bag_of_words\.py)\b.*yaml"
# What other commands end with.
OPTIONS = [
    (r"^tensorboard ", "--inspect"),
    (r"^pytest -m gpu", "-q tests/pretrain/test_gpu_step.py"),
    (r"^make gpu$", "GPU_ARGS='--device cpu --tiny --only env'"),
    (r"tests\.soak", "--tries 1 --kinds signal_rank"),
    (r"parity_table", "--worlds 2"),
    (r"finetune_scores_vs_hf\.py", "--tasks SST-2 --seeds 1 --share 0.02"),
    (r"finetune_vs_hf\.py", "--steps 1 --encoder data/raw/long"),
    (r"benchmarks/gpu\.py", "--device cpu --tiny --only env --out runs/{n}"),
    (r"benchmarks/lamb\.py", "--layers 1 --rounds 1 --turns 1"),
    (r"lamb_loss\.py", "--processes 2 --seeds 0 --config c.yaml"),
    (r"benchmarks/prepare\.py", "--mb 0.1 --repeats 1 --no-scaling --vocab data/raw/vocab.txt"),
    (r"pretrain_vs_hf\.py", "--config c.yaml --evaluations 1 --set phases.0.rows_per_step=4"),
    (r"scale\.py(?!.*--paper)", "--ranks 2"),
    (r"step_vs_hf\.py", "--data data/text --cases tiny_128 --rounds 1"),
    (r"benchmarks/stream\.py", "--seconds 0.2 --windows 1 --phase 128"),
]
# The order in which they run; those of a stage in any order, but for those of one folder.
STAGES = [
    r"--help$|fetch",
    r"data_pipeline prepare",
    r"data_pipeline (?:verify|show|sources|audit)|pretrain (?:plan(?!.*--from)|doctor)",
    r"python pretrain/run\.py --config c\.yaml$|configs/pretrain_(?:base|large|small)\.yaml",
    r"^mkdir ",
    r"^cp ",
    r"pretrain/run\.py|pretrain sweep",
    r"pretrain (?:import|export|status|report|plan)",
    r"finetune/run\.py",
    r"finetune_scores_vs_hf\.py",
    r"python -m finetune|benchmarks/|tests\.|^pytest|^make |^bash slurm/|^CONFIGS=",
    r"^tensorboard|^\. |^from ",
]


def placed(command: str) -> str:
    for pattern, text in PLACES:
        command = re.sub(pattern, text, command)
    return command


def put(command: str) -> str:
    """The command with what a reader puts in its places, and small."""
    command = placed(command)
    if "--help" in command:
        return command
    if re.search(TAKES_KEYS, command):
        keys = [text for pattern, text in SMALL if re.search(pattern, command)]
        if "SMALL" in command:
            command, keys = command.replace("SMALL", " ".join(keys)), []
        if keys:
            command = " ".join([command, *(["--set"] if "--set" not in command else []), *keys])
    return " ".join([command, *(text for one, text in OPTIONS if re.search(one, command))])


def not_run(command: str) -> str | None:
    return next((why for one, why in NOT_RUN.items() if re.match(one, command)), None)


def stage(text: str) -> int | None:
    return next((n for n, one in enumerate(STAGES) if re.search(one, text)), None)


def unready(command: str) -> str | None:
    """Why a command that is not among `NOT_RUN` cannot be run here."""
    text = put(command)
    if stage(text) is None:
        return "no stage of STAGES is its own"
    left = re.findall(r"(?<![\w./$={-])(?!SST|GPU_ARGS)[A-Z]{1,}\d?\b(?![=_])", text)
    return f"PLACES says nothing of {', '.join(left)}" if left else None


RUN_HERE = sorted({put(one) for one in COMMANDS if not not_run(one)} | set(PROGRAMS))


def test_every_command_is_run_or_its_exception_says_why() -> None:
    assert {one: unready(one) for one in COMMANDS if not not_run(one) and unready(one)} == {}


@pytest.mark.parametrize(
    "command", ["kubectl apply -f job.yaml", "python -m pretrain report OTHER", "bash a.sh"]
)
def test_a_command_that_nothing_is_known_of_is_found(command: str) -> None:
    assert not not_run(command) and unready(command)


def test_no_exception_and_no_place_stands_for_nothing() -> None:
    run, idle = [placed(one) for one in COMMANDS if not not_run(one)], []
    idle += [one for one in NOT_RUN if not any(re.match(one, c) for c in COMMANDS)]
    texts = dict.fromkeys(COMMANDS)
    for pattern, text in PLACES:
        changed = {re.sub(pattern, text, one) for one in texts}
        idle += [pattern] * (changed == set(texts))
        texts = dict.fromkeys(changed)
    idle += [one for one, _ in (*SMALL, *OPTIONS) if not any(re.search(one, c) for c in run)]
    idle += [one for n, one in enumerate(STAGES) if n not in map(stage, RUN_HERE)]
    assert idle == []


@dataclass(frozen=True)
class Done:
    code: int
    said: str


def run(command: str, folder: Path, mirror: str, halt: threading.Event | None = None) -> Done:
    """A command as `put` gives it, in the copy of the checkout."""
    known = {"port": free_port(), "n": RUN_HERE.index(command), "mirror": mirror}
    text = re.sub(r"\{(port|n|mirror)\}", lambda m: str(known[m[1]]), command)
    if "{rank}" in text:  # on each of two nodes
        text = f"{text.replace('{rank}', '1')} & {text.replace('{rank}', '0')} && wait $!"
    if command in PROGRAMS:
        text = f"python -c {shlex.quote(command)}"
    return shell(text, folder, halt or threading.Event())


def shell(text: str, folder: Path, halt: threading.Event) -> Done:
    """It and what it started are killed when it ends, after 300 s, or at once with `halt`."""
    variables = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("PMI_", "SLURM_", "MPI_"))},
        "PYTHONPATH": str(folder), "PATH": f"{folder}/bin:{folder}/.venv/bin:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            ["bash", "-c", text], cwd=folder, env=variables, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=said, stderr=said,
        )  # fmt: skip
        end = time.monotonic() + 300
        try:
            while process.poll() is None and time.monotonic() < end and not halt.wait(0.05):
                pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        said.seek(0)
        return Done(code, said.read())


@pytest.mark.parametrize(("last", "code"), [("exit 3", 3), ("wait", -signal.SIGKILL)])
def test_what_a_command_starts_ends_with_it(tmp_path: Path, last: str, code: int) -> None:
    """As of two nodes one fails; or Ctrl-C comes while it runs."""
    halt, pid = threading.Event(), tmp_path / "pid"

    def halt_when_begun() -> None:
        while not pid.exists() and not halt.wait(0.01):
            pass
        halt.set()

    watching = threading.Thread(target=halt_when_begun)
    if code < 0:
        watching.start()
    done = shell(f"sleep 99 & echo $! >new && mv new pid && {last}", tmp_path, halt)
    halt.set()
    assert done == Done(code, "")
    end, at = time.monotonic() + 10, Path("/proc", pid.read_text().strip(), "stat")
    while at.exists() and at.read_text().rpartition(")")[2].split()[0] not in "ZX":
        assert time.monotonic() < end, "sleep is left behind"
        time.sleep(0.01)


CONFIG = """
run_dir: runs/NAME
device: cpu
data: {dir: data/text, workers: 0}
model: {hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 64}
engine: {precision: fp32}
phases:
  - {max_seq_len: 32, row_len: 64, sequences_per_step: 8, max_predictions: 5, micro_batch_rows: 4,
     steps: 6, learning_rate: 1.0e-3, warmup: 0.05, decay: constant, convention: continuous}
checkpoint: {every_steps: 6}
evaluation: {every_steps: 6, rows: 4}
"""

# In the place of ssh, to the one host of `hosts`.
SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
shift
exec sh -c "$*"
"""


def write_text(folder: Path) -> None:
    folder.mkdir(parents=True)
    for n in range(40):
        lines = [f"{p} {' '.join(WORDS)}." for p in document(n)]
        form = ("txt", "md", "rst", "html")[n % 4]
        if form == "html":
            lines = [f"<p>{line}</p>" for line in lines]
        (folder / f"text{n}.{form}").write_text("\n\n".join(lines))


def write_table(path: Path, labels: bool) -> None:
    path.parent.mkdir(exist_ok=True)
    names = ["text", "title", "body", *(["label", "topic"] if labels else [])]
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for n in range(60):
            text = f"{document(n)[0]} {('river', 'music', 'king')[n % 3]}"
            label = ("nature", "art", "rule")[n % 3]
            writer.writerow([text, "a title", text, label, label][: len(names)])


def write_books(path: Path) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for n in range(120, 140):
            data = "\n\n".join(document(n, 20)).encode()
            member = tarfile.TarInfo(f"books/{n}.epub.txt")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def write_tasks(data: Path) -> None:
    test_train.make_files(data / "made")
    (data / "made/glue").rename(data / "glue")
    for name in ("squad", "swag", "conll2003"):
        (data / name).mkdir()
    questions = [test_squad.qa(n, "who sat", "a king", impossible=False) for n in range(6)]
    for name in ("train-v1.1", "train-v2.0", "dev-v1.1", "dev-v2.0"):
        test_squad.file(data / f"squad/{name}.json", [questions])
    for name, label in {"train": ",1", "val": ",2", "test": ""}.items():
        lines = [test_swag.HEADER + ",label" * bool(label)]
        lines += [test_swag.GOOD.format(n=n) + label for n in range(8)]
        (data / f"swag/{name}.csv").write_text("\n".join(lines))
    for name in ("train", "testa", "testb"):
        (data / f"conll2003/eng.{name}").write_text(test_features.TEXT * 3)


def make_checkout(folder: Path) -> None:
    """The files of the checkout, and those that its documents take for granted."""
    ours = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(ours, cwd=ROOT, text=True).splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(Path(sys.executable).parents[1])
    raw = folder / "data/raw"
    write_text(raw / "text")
    (raw / DUMP).write_bytes(multistream(range(1, 120), 10))
    write_books(raw / "books1.tar.gz")
    write_vocabulary(raw / "vocab.txt")
    tiny.encoder(raw / "bert-base-uncased", vocabulary(), max_position_embeddings=512)
    many = [*vocabulary(), *(f"piece{n}" for n in range(20_000))]  # as that benchmark draws
    tiny.encoder(raw / "long", many, max_position_embeddings=512)
    (raw / "extracted/AA").mkdir(parents=True)
    (raw / "extracted/AA/wiki_00").write_text(wikiextractor(range(60)))
    for name in ("data/raw/mine.csv", "data/mine/train.csv", "mine.csv"):
        write_table(folder / name, labels=True)
    for name in ("data/raw/new.csv", "new.csv"):
        write_table(folder / name, labels=False)
    write_tasks(folder / "data")
    (folder / "hosts").write_text("localhost slots=2\n")
    (folder / "bin").mkdir()
    (folder / "bin/ssh").write_text(SSH)
    (folder / "bin/ssh").chmod(0o755)
    for file, name in {"c": "mine", "a": "a", "b": "b"}.items():
        (folder / f"{file}.yaml").write_text(CONFIG.replace("NAME", name))


def publish_dumps(folder: Path) -> None:
    for wiki in ("enwiki", "dewikibooks"):
        place, name = folder / wiki / "20260101", test_fetch.NAME.replace("enwiki", wiki)
        place.mkdir(parents=True)
        (place / name).write_bytes(test_fetch.DATA)
        test_fetch.publish(place, name)


def own_folder(text: str) -> str:
    """What two commands of a stage may not write at a time."""
    if followed := re.search(r"finetune follow (\S+)", text):
        return followed[1]
    names = re.findall(r"(?:run_dir=|--config )(\S+)", text)
    return names[-1] if names and "{n}" not in names[-1] else text


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkout")
    make_checkout(folder)
    return folder


@pytest.fixture(scope="module")
def done(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Done]:
    """What each command came to, up to the stages that the selected tests ask for. Two run at a
    time."""
    found: dict[str, Done] = {}
    halt = threading.Event()
    asking = [item for item in request.session.items if "done" in item.fixturenames]
    wanted = [
        item.callspec.params["command"] if hasattr(item, "callspec") else "" for item in asking
    ]
    stages = max(stage(one) if one in RUN_HERE else len(STAGES) - 1 for one in wanted) + 1
    web = tmp_path_factory.mktemp("web")
    publish_dumps(web)
    with http_server(web) as (mirror, _), ThreadPoolExecutor(2) as pool:

        def one_after_the_other(texts: list[str]) -> None:
            for text in texts:
                if not halt.is_set():
                    found[text] = run(text, checkout, mirror, halt)

        try:
            for number in range(stages):
                rows: dict[str, list[str]] = {}
                for text in RUN_HERE:
                    if stage(text) == number:
                        rows.setdefault(own_folder(text), []).append(text)
                list(pool.map(one_after_the_other, rows.values()))
        finally:
            halt.set()  # on Ctrl-C the pool waits for those that run
    return found


TEXT = "python -m data_pipeline prepare --config configs/data_text.yaml"


def test_own_text_walks_from_a_folder_to_answers() -> None:
    steps = TEXTS["docs/own_text.md"].partition("## From a folder to answers")[2]
    shown = " ".join(re.findall(r"^ {7}(\S.*)", steps.partition("\n## ")[0], re.M))
    walk = "prepare show plan pretrain/run.py status report export finetune/run.py predict".split()
    places = [(shown + " ").index(f"{word} ") for word in walk]
    assert places == sorted(places) and "fill-mask" in shown


@pytest.mark.slow
def test_the_walk_through_own_text_brings_answers(done: dict[str, Done], checkout: Path) -> None:
    assert re.search(r"text +40 +40 ", done[put(TEXT)].said)
    assert all("token_str" in done[one].said for one in PROGRAMS)
    manifest = json.loads((checkout / "data/text/manifest.json").read_text())
    assert any(shard["split"] == "heldout" for shard in manifest["shards"])
    with open(checkout / "answers.csv", newline="") as file:
        answers = list(csv.DictReader(file))
    assert len(answers) == 60 and {row["label"] for row in answers} <= {"nature", "art", "rule"}


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN_HERE)
def test_a_command_that_is_shown_runs(done: dict[str, Done], command: str) -> None:
    code, said = done[command].code, done[command].said
    if re.match(MAY_FIND, command) and re.search(r"^\d+ to mend$", said, re.M):
        assert code == 3 and "training would refuse to start" not in said, said
    else:
        assert code == 0, f"{command}\n{said[-3000:]}"
    assert "Traceback" not in said, f"{command}\n{said[-3000:]}"


# On Slurm: places of a site, and the part of a line that is shown alone.
ON_SLURM = [
    (r"^sbatch --nodes=N$", "sbatch slurm/pretrain_large.sh"),
    (r"^sbatch --array=0-N$", "sbatch slurm/finetune_glue.sh"),
    (r"^srun --gpus-per-task=1$", r"\g<0> python pretrain/run.py --config C"),
    (r"^srun", "srun --ntasks=2 --overcommit --time=10"),
    (r"--config C$", "--config c.yaml --set run_dir=runs/{n}"),
    (r"encoder\.path=(?:DIR|runs/large)", "encoder.path=runs/large{settings}"),
    (r"/scratch/", "data/scratch/"),
]
# What makes a job fit the cluster, and its SETTINGS.
JOBS = {
    "pretrain_large.sh": (
        "--nodes=2 --ntasks-per-node=1 --gpus-per-node=1",
        "run.py pretrain_large",
    ),
    "prepare_data.sh": ("-N2 --ntasks-per-node=2 --mem-per-cpu=100M", ""),
    "finetune_glue.sh": ("--array=0-1 --gpus=0", "configs/finetune_glue"),
    "pretrain_sweep.sh": ("--array=0-1 --gpus=0", ""),
}


def on_slurm(command: str) -> str:
    for pattern, text in ON_SLURM:
        command = re.sub(pattern, text, command)
    return command


SLURM = {on_slurm(one) for one in COMMANDS if re.match(r"sbatch |srun (?!--con)|scancel ", one)}


@pytest.fixture(scope="module")
def cluster(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm")) as running:
        running.environment |= {
            "PATH": f"{checkout}/.venv/bin:{os.environ['PATH']}", "PYTHONPATH": str(checkout)
        }  # fmt: skip
        yield running


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.skipif(why_not() is not None, reason=f"no Slurm cluster here: {why_not()}")
@pytest.mark.parametrize("command", sorted(SLURM))
def test_a_command_of_slurm_runs(
    done: dict[str, Done],
    cluster: Cluster,
    checkout: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    assert done
    monkeypatch.chdir(checkout)
    *words, last = shlex.split(command.replace("{n}", f"slurm-{sorted(SLURM).index(command)}"))
    if words[0] == "srun":
        ran = subprocess.run(
            [*words, last], env=cluster.environment, capture_output=True, text=True, timeout=300
        )
        assert ran.returncode == 0 and "Traceback" not in ran.stderr, ran.stdout + ran.stderr
        return
    if words[0] == "scancel":
        log = tmp_path / "log"
        job = cluster.sbatch("--overcommit", f"--output={log}", "--wrap=echo begun; exec sleep 600")
        cluster.until_running(job, log=log)
        cluster.run(*words, job)
        assert cluster.wait(job) in ("CANCELLED", "FAILED")
        return
    flags, kind = JOBS[Path(last).name]
    keys = [text for one, text in SMALL if kind and re.search(one, kind)]
    settings = " ".join([*keys, f"run_dir={tmp_path}/run"] if kind else [])
    monkeypatch.setitem(cluster.environment, "SETTINGS", settings)
    job = cluster.sbatch(
        *(word.replace("{settings}", f" {settings}") for word in words[1:]), *flags.split(),
        "--cpus-per-task=1", "--overcommit", "--time=10", f"--output={tmp_path}/%a.log", last,
    )  # fmt: skip
    tasks = [f"{job}_0", f"{job}_1"] if "--array" in flags else [job]
    states = [cluster.wait(task, 300) for task in tasks]
    log = "\n".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))
    assert set(states) == {"COMPLETED"} and "Traceback" not in log, log
