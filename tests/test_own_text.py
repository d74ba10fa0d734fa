"""The commands of docs/own_text.md, as they stand there, on a tiny text and a tiny table."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.data_pipeline.corpus.text import WORDS, document

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "own_text.md").read_text()
STEPS = PAGE.partition("## From a folder to answers")[2].partition("\n## ")[0]
# Blocks of commands; one that begins with an import is a program.
BLOCKS = re.findall(r"(?:^ {7}\S.*\n)+", STEPS, re.MULTILINE)
COMMANDS = [
    command
    for block in map(textwrap.dedent, BLOCKS)
    for command in ([block] if block.startswith("from ") else block.splitlines())
]
# What is put to a command: a model, a batch and a grid for seconds.
PHASE = (
    "max_seq_len=32 row_len=64 sequences_per_step=8 max_predictions=5 micro_batch_rows=4 steps=6 "
    "rows_multiple=1 tuned_for_sequences=null"
).split()
SMALL = [
    "device=cpu", "data.workers=0", "engine.precision=fp32", "model.compile=false",
    "model.hidden_size=32", "model.num_hidden_layers=1", "model.num_attention_heads=2",
    "model.intermediate_size=64", "checkpoint.every_steps=6", "evaluation.every_steps=6",
    "evaluation.rows=4", *(f"phases.{n}.{key}" for n in (0, 1) for key in PHASE),
]  # fmt: skip
TINY = {
    "data_text.yaml": ["vocabulary.size=1300", "unit_bytes=20000", "shard_bytes=20000"],
    "pretrain_small.yaml": SMALL,
    "pretrain_mini.yaml": SMALL,
    "finetune_classify.yaml": [
        "device=cpu", "classify.max_seq_len=32", "grid.batch_size=[8]", "grid.epochs=[1]",
        "grid.learning_rate=[1e-3]", "grid.seeds=[0]",
    ],
}  # fmt: skip


def typed(command: str) -> list[str]:
    """The words of a command, with what makes it small."""
    if command.startswith("from "):
        return [sys.executable, "-c", command]
    put = {
        "python": sys.executable,
        "a few words": "river",
        "run_dir=runs/small": "run_dir=runs/cores",
    }
    words = [put.get(word, word) for word in shlex.split(command)]
    for config, keys in TINY.items():
        if f"configs/{config}" in words:
            words += keys if "--set" in words else ["--set", *keys]
    return words


def write_text(folder: Path) -> None:
    folder.mkdir(parents=True)
    for n in range(40):
        lines = [f"{p} {' '.join(WORDS)}." for p in document(n)]
        form = ("txt", "md", "rst", "html")[n % 4]
        if form == "html":
            lines = [f"<p>{line}</p>" for line in lines]
        (folder / f"text{n}.{form}").write_text("\n\n".join(lines))


def write_table(path: Path, labels: bool) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"] if labels else ["text"])
        for n in range(60):
            text = f"{document(n)[0]} {('river', 'music', 'king')[n % 3]}"
            writer.writerow([text, ("nature", "art", "rule")[n % 3]] if labels else [text])


def test_the_page_walks_from_a_folder_to_answers() -> None:
    walk = "prepare show plan pretrain/run.py status report export finetune/run.py predict".split()
    shown = " ".join(COMMANDS)
    places = [(shown + " ").index(f"{word} ") for word in walk]
    assert places == sorted(places) and "fill-mask" in shown


@pytest.mark.slow
def test_the_commands_of_the_page_run_one_after_the_other(tmp_path: Path) -> None:
    for name in ("configs", "pretrain", "finetune"):
        (tmp_path / name).symlink_to(ROOT / name)
    write_text(tmp_path / "data" / "raw" / "text")
    write_table(tmp_path / "data" / "raw" / "mine.csv", labels=True)
    write_table(tmp_path / "data" / "raw" / "new.csv", labels=False)
    variables = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("PMI_", "SLURM_", "MPI_"))},
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    said = []
    for command in COMMANDS:
        done = subprocess.run(
            typed(command), cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        said.append(done.stdout)
    assert re.search(r"text +40 +40 ", said[0]) and "token_str" in "".join(said)
    manifest = json.loads((tmp_path / "data/text/manifest.json").read_text())
    assert any(shard["split"] == "heldout" for shard in manifest["shards"])
    with open(tmp_path / "answers.csv", newline="") as file:
        answers = list(csv.DictReader(file))
    assert len(answers) == 60
    assert {row["label"] for row in answers} <= {"nature", "art", "rule"}
