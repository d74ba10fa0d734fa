"""Every command that a document, a config's header or a script's docstring shows can be typed.

Not run: its program, files of ours and keys are looked up, and the arguments of `python -m ROOM`
are given to the command's own parser, with a number in the place of N, H and the like.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import re
import shlex
import tomllib

import pytest

from configs.load import load
from tests.shown import CASES, LAUNCHERS, ROOT, commands, variants

NUMBERS = {"N": "1", "H": "1", "SECONDS": "1"}  # what stands for one where it is asked for
# The trees that a command's --config and --set speak of.
TREES = {
    "pretrain/run.py": "pretrain.config:PretrainConfig",
    "pretrain": "pretrain.config:PretrainConfig",
    "data_pipeline audit": "pretrain.config:PretrainConfig",
    "data_pipeline prepare": "data_pipeline.corpus.job:PrepareConfig",
    "finetune/run.py": "finetune.config:FinetuneConfig",
    "benchmarks/bag_of_words.py": "finetune.config:FinetuneConfig",
    "finetune follow": "finetune.config:FinetuneConfig",
}


def source_of(target: str) -> str:
    return (ROOT / target).read_text()


def problem(command: str) -> str | None:
    words = [w for w in shlex.split(command) if w != "..."]
    makefile = source_of("Makefile")
    if "make" in words[:1]:
        missing = [
            w for w in words[1:] if "=" not in w and not re.search(rf"^{w}:", makefile, re.M)
        ]
        return f"no target {missing}" if missing else None
    script = next((w for w in words if re.fullmatch(r"(?:\S*/)?[\w/]+\.(py|sh)", w)), None)
    flags = (ROOT / "configs/load.py").read_text()
    if "-m" in words and words[words.index("-m") + 1].split(".")[0] in (
        "data_pipeline", "pretrain", "finetune"
    ):  # fmt: skip
        room = words[words.index("-m") + 1]
        rest = words[words.index("-m") + 2 :]
        table = importlib.import_module(f"{room}.__main__").COMMANDS
        if not rest:
            return None  # all of its commands
        if rest[0] not in table:
            return f"no command {rest[0]} of {room}"
        flags += source_of(table[rest[0]][0].partition(":")[0].replace(".", "/") + ".py")
        name = f"{room} {rest[0]}"
    elif script is not None:
        if not (ROOT / script).is_file():
            return f"no file {script}"
        rest, name = words[words.index(script) + 1 :], script
        flags += source_of(script)
        exported = [w for w in words if w.startswith("--export=ALL,")]
        for pair in exported[0].split(",")[1:] if exported else []:
            if pair.partition("=")[0] not in source_of(script):
                return f"{script} knows no {pair}"
    else:
        return None
    for word in rest:
        flag = word.partition("=")[0]
        written = flag if name.endswith(".sh") else f'"{flag}"'
        if word.startswith("--") and written not in flags and flag != "--help":
            return f"{name} has no {flag}"
    return bad_keys(name, rest) or refused(words)


class Accepted(Exception):
    pass


def refused(words: list[str]) -> str | None:
    """What the parser of `python -m ROOM COMMAND` has against the arguments."""
    if "-m" not in words:
        return None
    room, command, *rest = words[words.index("-m") + 1 :]
    table = importlib.import_module(f"{room}.__main__").COMMANDS
    module, _, function = table[command][0].partition(":")
    if not rest or "|" in rest:
        return None  # its name, or a list of names
    rest = [NUMBERS.get(word, word) for word in (word.strip("[]") for word in rest)]
    parse, told = argparse.ArgumentParser.parse_args, io.StringIO()

    def stop(self: argparse.ArgumentParser, args: list[str]) -> None:
        parse(self, args)
        raise Accepted

    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stderr(told):
        patched.setattr(argparse.ArgumentParser, "parse_args", stop)
        try:
            getattr(importlib.import_module(module), function)(rest)
        except Accepted:
            return None
        except SystemExit as end:
            return told.getvalue().strip() if end.code else None
    return f"{module} parses nothing"


def bad_keys(name: str, words: list[str]) -> str | None:
    """What is wrong with the file and the keys that --config and --set give."""
    if "--config" not in words:
        return None
    file = words[words.index("--config") + 1]
    if "/" not in file:
        return None  # a letter that stands for a file
    if not (ROOT / file).is_file():
        return f"no file {file}"
    tree = TREES.get(name) or TREES.get(name.split()[0])
    module, _, kind = (tree or "").partition(":")
    keys = words[words.index("--set") + 1 :] if "--set" in words else []
    keys = [w for w in keys if re.fullmatch(r"[\w.]+=\S*", w)]
    load(ROOT / file, getattr(importlib.import_module(module), kind), keys)
    return None


def test_the_documents_show_commands() -> None:
    assert len(CASES) > 60
    shown = " ".join(one for _, one in CASES)
    assert all(f"{launcher} " in shown for launcher in LAUNCHERS)


@pytest.mark.parametrize(("file", "command"), CASES)
def test_a_command_that_is_shown_can_be_typed(file: str, command: str) -> None:
    assert problem(command) is None, f"{file}: {command}: {problem(command)}"


def test_the_short_names_are_the_rooms_commands(capsys: pytest.CaptureFixture[str]) -> None:
    names = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert len(names) == 3
    for target in names.values():
        module, _, function = target.partition(":")
        assert getattr(importlib.import_module(module), function)(["--help"]) == 0
        assert f"python -m {module.partition('.')[0]} COMMAND" in capsys.readouterr().out


def test_the_tests_that_documents_name_are_there() -> None:
    files = {str(path): path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    named = [
        (path.name, *found)
        for path in documents
        for found in re.findall(r"((?:\w+/)*\btest_\w+\.py)(?:::(\w+))?", path.read_text())
    ]
    assert len(named) > 100
    wrong = [
        f"{document}: {file}::{test}"
        for document, file, test in named
        if not any(
            path.endswith(f"/{file}") and (not test or f"def {test}(" in text)
            for path, text in files.items()
        )
    ]
    assert not set(wrong) - {"CONTRIBUTING.md: tests/finetune/test_mine.py::"}


@pytest.mark.parametrize(
    "command",
    ["make dmeo", "python -m pretrain rport RUN", "python benchmarks/none.py",
     "python -m pretrain plan --gpu 8", "python pretrain/run.py --config configs/none.yaml",
     "sbatch --export=ALL,CONFGI=x slurm/pretrain_large.sh", "python -m pretrain plan --gpus many",
     "python -m pretrain report --html p.html", "python -m data_pipeline show --document 1"],
)  # fmt: skip
def test_what_is_not_there_is_found(command: str) -> None:
    assert problem(command) is not None


@pytest.mark.parametrize(
    "form",
    ["    {}", "#   {}", "\n`{}`,", "```\n{}\n```", "```bash\nls\n{}\n```\n", "    $ {}",
     "    nohup {}", "    .venv/bin/{}", "    {} \\\n      --html p.html"],
)  # fmt: skip
def test_no_way_to_show_a_command_is_overlooked(form: str) -> None:
    for wrong in ("python -m pretrain rport RUN", "python benchmarks/none.py --all"):
        (found,) = commands(form.format(wrong))
        assert problem(found) is not None
    for wrong in ("benchmarks/none.py --all", "bert-pretrain rport RUN"):
        (found,) = commands(f"`{wrong}`")
        assert problem(found) is not None
    header = "#   features  --set a.b=1 \\\n#      'c=[2]'\n#   --set d=3   what for\n"
    assert variants("configs/finetune_x.yaml", header) == [
        f"python finetune/run.py --config configs/finetune_x.yaml --set {keys}"
        for keys in ("a.b=1 'c=[2]'", "d=3")
    ]
