"""The commands that the documents, the headers of configs and the docstrings of scripts show."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAUNCHERS = ("deepspeed", "torchrun", "mpiexec", "srun", "sbatch", "bash", "python", "make")
OTHERS = (
    r"\. apptainer conda cp curl docker git hf kubectl mkdir mv pip podman pytest rm rsync ruff "
    "scancel scp singularity ssh squeue tensorboard uv wget while"
).split()
# Files that are read whole, and folders whose scripts have docstrings.
WHOLE = ("*.md", "docs/*.md", "configs/**/*.yaml", "slurm/*.sh", "containers/Dockerfile")
ROOMS = ("core", "configs", "containers", "data_pipeline", "pretrain", "finetune", "benchmarks")
START = re.compile(
    rf"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:{'|'.join((*LAUNCHERS, *OTHERS))}) \S.*|\.ci/run"
)
SHORT = {"bert-data": "data_pipeline", "bert-pretrain": "pretrain", "bert-finetune": "finetune"}


def texts() -> dict[str, str]:
    found = {}
    for pattern in WHOLE:
        found |= {str(p.relative_to(ROOT)): p.read_text() for p in sorted(ROOT.glob(pattern))}
    for file in [file for file in found if file.endswith(".sh")]:
        found[file] = "".join(re.findall(r"^#.*\n", found[file], re.M))
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            doc = ast.get_docstring(ast.parse(path.read_text()), clean=False)
            if doc:
                found[str(path.relative_to(ROOT))] = doc
    return found


def commands(text: str) -> list[str]:
    """In backticks, between fences, or on lines of their own that are indented or comments."""
    found = [m[1] for m in re.finditer(r"`([^`\n]+(?:\n[^`\n]+)?)`", text)]
    text = re.sub(r"\s*\\\n#?\s*|\n\s+(?=\[--)", " ", text)
    for block in re.findall(r"^```.*\n([\s\S]*?)^```", text, re.M):
        found += [line.strip() for line in block.splitlines()]
    for line in text.splitlines():
        if re.match(r"    |#  |\s+[a-z_]+ \S", line):
            found.append(line.lstrip("# \t"))
    result = []
    for one in found:
        one = re.sub(r"^(?:[a-z]+\s{2,}|(?:start|nohup|\$)\s+)", "", " ".join(one.split("\n")))
        one = re.sub(r"^command: \[(.*)\]$", lambda m: m[1].replace(",", ""), one)  # of a pod
        one = re.sub(r"^benchmarks/\w+\.py", r"python \g<0>", one)
        one = re.sub(r"^(bert-\w+)(?= \w)", lambda m: f"python -m {SHORT[m[1]]}", one)
        if START.fullmatch(one):
            ends = r"\s{2,}[^-\s]|\s+#|\s\(" + ("" if one.startswith("while ") else "|; ")
            one = re.split(ends, one.strip())[0]
            result.append(re.sub(r"(?<=[^\s.])[.,:]+$", "", one.strip()))
    return result


def variants(file: str, text: str) -> list[str]:
    """Lines of `--set` in a configuration's header, with the command that they are for."""
    room = file.partition("/")[2].partition("_")[0]
    lines = re.sub(r"\s*\\\n#?\s*", " ", text).splitlines()
    found = [re.match(r"#\s+(?:[a-z]+\s{2,})?(--set .*?)(?:\s{2,}[^-\s].*)?$", x) for x in lines]
    return [f"python {room}/run.py --config {file} {m[1]}" for m in found if m]


def programs(text: str) -> list[str]:
    """Blocks of Python, which begin with an import."""
    blocks = re.findall(r"(?:^ {4,}\S.*\n)+", text, re.M)
    return [b for b in map(textwrap.dedent, blocks) if re.match(r"(?:from|import) \w", b)]


TEXTS = texts()
CASES = sorted({(file, one) for file, text in TEXTS.items() for one in commands(text)})
COMMANDS = sorted({one for _, one in CASES} | {v for f, t in TEXTS.items() for v in variants(f, t)})
PROGRAMS = [one for file, text in TEXTS.items() if file.endswith(".md") for one in programs(text)]
