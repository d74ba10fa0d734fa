"""What reaches a terminal: text alone, in line."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import io
import os
import resource
import shlex
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from core.console import Console, Progress, clock_text, histogram, notice, printable, show, table
from core.errors import OUTPUT_GONE, UserError, main_guard

ROOT = Path(__file__).resolve().parents[2]
HELP = "from argparse import ArgumentParser; ArgumentParser(description=3000 * 'help ')"
LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))"


@pytest.mark.parametrize("code", [*range(32), 127, 155, 0x202E, 0x2028, 0xD800])
def test_no_control_character_passes(code: int) -> None:
    assert printable(f"a{chr(code)}b") == "a" + chr(code).encode("unicode_escape").decode() + "b"


def test_text_passes_as_it_is() -> None:
    text = "A straight line: [UNK] Ünïcödé 漢字 🙂 \\n"
    assert printable(text) == text


def test_an_error_is_one_line_of_text(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise UserError("bad name \x1b]0;owned\x07\nerror: not so")

    assert main_guard(fail) == 2
    assert capsys.readouterr().err == "error: bad name \\x1b]0;owned\\x07\\nerror: not so\n"


def test_a_name_that_is_too_long_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> bool:
        return Path("a" * 300).exists()

    assert main_guard(fail) == 2
    assert capsys.readouterr().err == f"error: {'a' * 57}...: File name too long\n"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"])
def test_a_signal_is_heard_that_was_blocked_by_who_started_us(name: str) -> None:
    number, heard = getattr(signal, name), []
    before = signal.signal(number, lambda *_: heard.append(name))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        assert main_guard(lambda: signal.raise_signal(number)) == 0  # to this thread
        assert heard == [name]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(number, before)


def test_the_code_of_a_child_is_known_where_who_started_us_hears_of_none() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert main_guard(lambda: subprocess.run(["sh", "-c", "exit 3"]).returncode) == 3
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_slow_reader_loses_nothing_of_an_output_that_was_set_not_to_wait(unbuffered: str) -> None:
    """As by another program at the same terminal; of unbuffered output Python says no error."""
    code = "import sys; from core.errors import main_guard; from core.console import show\n"
    code += "sys.exit(main_guard(lambda: show(200_000 * 'x')))"
    read, write = os.pipe()
    os.set_blocking(write, False)
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=write,
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    ) as process:
        os.close(write)
        with open(read, "rb") as file:
            while process.poll() is None:
                waits = fcntl.ioctl(file, termios.FIONREAD, bytes(4))
                if int.from_bytes(waits, sys.byteorder) >= 60_000:  # it is full
                    break
                time.sleep(0.01)
            assert file.read() == 200_000 * b"x" + b"\n"
    assert process.returncode == 0


def test_a_signal_within_a_print_writes_nothing_twice() -> None:
    code = """
import signal
from core.console import own_stdout
own_stdout()

class Tick(Exception):
    pass

def tick(*_):
    raise Tick

signal.signal(signal.SIGALRM, tick)
for n in range(5000):
    try:
        signal.setitimer(signal.ITIMER_REAL, (n % 60 + 1) * 1e-6)
        print(f"{n:06}", flush=True)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Tick:
        pass
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    lines = done.stdout.split()
    assert len(set(lines)) == len(lines) > 0


@pytest.mark.parametrize(("name", "code"), [("EIO", 85), ("ESTALE", 85), ("ENOSPC", 2)])
def test_what_a_disk_says_of_itself_is_one_line(
    capsys: pytest.CaptureFixture[str], name: str, code: int
) -> None:
    number = getattr(errno, name)

    def fail() -> bool:
        raise OSError(number, os.strerror(number), "/x")

    assert main_guard(fail) == code
    said = capsys.readouterr().err
    assert said.startswith("error: /x: ") and said.count("\n") == 1


@pytest.mark.parametrize("what", ["tensor", "array", "GPU", "bytes"])
def test_memory_that_is_out_is_one_line(capsys: pytest.CaptureFixture[str], what: str) -> None:
    def fail() -> object:
        if what == "GPU":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore.")
        if what == "bytes":
            return bytes(1 << 60)
        return torch.empty(1 << 57) if what == "tensor" else np.empty(1 << 57)

    assert main_guard(fail) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: memory is out: ") and said.count("\n") == 1


def test_no_more_files_to_open_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def fail() -> object:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            return os.pipe()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert main_guard(fail) == 2
    said = capsys.readouterr().err
    assert said == "error: no more files can be opened (ulimit -n)\n"


def test_an_index_that_is_out_of_bounds_is_not_told_as_memory() -> None:
    def fail() -> object:
        return torch.zeros(3).gather(0, torch.tensor([7]))

    with pytest.raises(RuntimeError, match="out of bounds"):
        main_guard(fail)


def test_what_this_user_may_not_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`Path.exists` and its like say so by an error, before Python 3.14."""
    stat, closed = os.stat, str(tmp_path / "closed")

    def refuse(path: str, **more: object) -> os.stat_result:
        if str(path).startswith(closed):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **more)

    monkeypatch.setattr(os, "stat", refuse)
    for command, file in (
        (["pretrain", "report"], "/state.json"),
        (["finetune", "ablations"], ""),
        (["data_pipeline", "verify"], ""),
    ):
        main = importlib.import_module(f"{command[0]}.__main__").main
        assert main([command[1], closed]) == 2
        assert capsys.readouterr().err == f"error: {closed}{file}: Permission denied\n"


def test_a_folder_that_was_removed_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """MKL, which torch loads, would end the process there with words of its own."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main_guard(lambda: print("x")) == 2
    said = "error: the current folder was removed: go to one that is there\n"
    assert capsys.readouterr() == ("", said)


def test_no_room_for_temporary_files_is_one_line() -> None:
    """Where /tmp and its like are full; torch asks for one as it is imported."""
    script = (
        "import resource, sys, tempfile; from core.errors import main_guard\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "sys.exit(main_guard(tempfile.gettempdir))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: No usable temporary directory found in ['/")
    assert done.stderr.endswith("]: make room in one of them, or set TMPDIR\n")


def test_a_console_writes_text_alone(capsys: pytest.CaptureFixture[str]) -> None:
    bad, text = "a\x1b[2J\nb", "a\\x1b[2J\\nb"
    console = Console(active=True)
    console.say(bad)
    console.progress(bad, [bad], last=True)
    show(bad)
    assert capsys.readouterr().out == f"{text}\n{text}  {text}\na\\x1b[2J\nb\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("act", "code", "said"),
    [
        ("print('x' * 100_000)", OUTPUT_GONE, ""),
        (  # while a folder is at work
            "from core import console, files\n with files.disk_errors('out'): console.notice('x')",
            OUTPUT_GONE,
            "",
        ),
        ("print('x')", OUTPUT_GONE, ""),  # which stays in the buffer until the end
        ("pipe = os.pipe(); os.close(pipe[0]); os.write(pipe[1], b'x')", 1, "BrokenPipeError"),
    ],
)
def test_no_success_when_nobody_reads_the_output(act: str, code: int, said: str, unbuffered: str):
    script = f"import os, sys; from core.errors import main_guard\ndef run():\n {act}\n"
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(
        [sys.executable, "-c", script + "sys.stdin.read(); sys.exit(main_guard(run))"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
    ) as process:  # fmt: skip
        if said == "":
            process.stdout.close()
        process.stdin.close()
        errors = process.stderr.read().decode()
    assert process.returncode == code
    assert said in errors and (said or not errors)


@pytest.mark.parametrize("act", ["print", "show", "notice", "Console(True).say"])
def test_a_character_that_the_output_has_not_is_escaped(act: str) -> None:
    script = (
        "import sys\nfrom core.console import Console, notice, show\n"
        "from core.errors import main_guard\n"
        f"sys.exit(main_guard(lambda: {act}('caf\xe9 \u6771 \U0001f642')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, cwd=ROOT, check=False,
        env=os.environ | {"PYTHONIOENCODING": "latin-1"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == b"caf\xe9 \\u6771 \\U0001f642\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("act", "to", "code", "said"),
    [
        ("print('x')", ">/dev/full", 2, "error: the output cannot be written: No space left on"),
        ("show('x')", ">/dev/full", 2, "error: the output cannot be written: No space left on"),
        # Where there is room for some of it.
        (
            f"{LIMIT}; sys.stdout.write(3000 * 'x')",
            ">out",
            2,
            "error: the output cannot be written: File too",
        ),
        (f"{LIMIT}; [print(99 * 'x') for _ in range(999)]", ">out", 2, "error: the output cannot"),
        (f"{LIMIT}; print(600 * 'x'); print(600 * 'x')", ">out", 2, "error: the output cannot"),
        ("sys.stdout.write('x'); raise UserError('no')", ">/dev/full", 2, "error: no"),
        ("sys.stdout.write('x'); sys.exit(0)", ">/dev/full", 2, "error: the output cannot"),
        (f"{HELP}.parse_args(['--help'])", ">/dev/full", 2, "error: the output cannot"),
        (f"{HELP}.parse_args(['--help'])", "> >(exec true)", OUTPUT_GONE, ""),
        # An error of a file of our own stays what it is, with a full stdout as with a good one.
        ("open('none/file')", ">/dev/full", 1, "Traceback"),
        ("notice('x')", ">/dev/full", 0, ""),
        ("Console(True).say('x'); return 85", ">/dev/full", 85, ""),
        ("Console(True).say('x'); return 85", "> >(exec true)", 85, ""),
        ("raise UserError('no')", "2>/dev/full", 2, ""),
        ("notice('x', sys.stderr)", "2> >(exec true)", 0, ""),
        # A file that took the place of stdout would have the next line in it.
        ("file = open('data', 'w'); print('x', flush=True)", ">&-", 0, ""),
        ("file = open('data', 'w'); notice('x', sys.stderr)", "<&- >&- 2>&-", 0, ""),
    ],
)
def test_output_that_cannot_be_written(
    tmp_path: Path, act: str, to: str, code: int, said: str, unbuffered: str
) -> None:
    """What was asked for is an error in one line; a notice is lost, and ends nothing."""
    script = (
        "import sys, time\nfrom core.console import Console, notice, show\n"
        f"from core.errors import UserError, main_guard\ndef run(): {act}\n"
        "time.sleep(0.1)\nsys.exit(main_guard(run))"
    )
    line = shlex.join([sys.executable, "-c", script])
    done = subprocess.run(
        ["bash", "-c", f"{line} {to}"], stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert (done.stderr.count("\n") == bool(said)) == (code != 1)
    assert done.stderr.startswith(said)
    assert not (tmp_path / "data").exists() or not (tmp_path / "data").read_bytes()


@pytest.mark.parametrize("room", ["pretrain", "finetune"])
@pytest.mark.parametrize("to", [">&-", "<&- >&-", "<&- >&- 2>&-"])
def test_a_run_whose_output_is_closed_is_none_the_worse(room: str, to: str) -> None:
    config = {"pretrain": "pretrain_demo.yaml", "finetune": "finetune_glue.yaml"}[room]
    arguments = [f"{room}/run.py", "--config", f"configs/{config}", "--print-config"]
    line = shlex.join([sys.executable, *arguments])
    done = subprocess.run(["bash", "-c", f"{line} {to}"], stderr=subprocess.PIPE, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, b"")


def test_columns_are_in_line() -> None:
    lines = table([("name", "number", "rest"), ("a", "12,345,678", "x y"), ("long name", "1", "-")])
    assert lines == [
        "name           number  rest",
        "a          12,345,678  x y",
        "long name           1  -",
    ]


def test_bars_are_in_proportion_to_the_most() -> None:
    lines = histogram([("few", 25), ("most", 100), ("none", 0)], 8)
    assert [line.count("#") for line in lines] == [2, 8, 0]
    assert [line.split()[:4] for line in lines][0] == ["few", "25", "20.0", "%"]
    assert histogram([]) == []


def test_progress_counts_from_what_was_done_before() -> None:
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        progress = Progress("reading", 4_000_000, 1_000_000)
        progress.add(1_000_000, {"documents": 1200})
        progress.add(1_000_000, {"documents": 34, "broken inputs": 0})
        progress.close()
    line = shown.getvalue()
    assert line.startswith("reading 75.0 %  3.0/4.0 MB  ") and line.count("\n") == 1
    assert " left  " in line and line.endswith("  1,234 documents\n") and "broken" not in line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [80, 200])
def test_a_line_that_stays_is_broken_between_words_as_wide_as_the_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = " ".join(f"word-{n} /a/path-{n}" for n in range(30))
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        Console(True, stream, dated=True).say(text)
    shown = terminal.getvalue().splitlines()
    assert file.getvalue().count("\n") == 1 and terminal.getvalue().split()[2:] == text.split()
    assert all(columns - 20 < len(line) <= columns for line in shown[:-1])
    assert len(shown[-1]) <= columns and all(line.startswith("    ") for line in shown[1:])

    terminal = Terminal()
    notice(f"{text}\n\nend", terminal)
    *shown, blank, end = terminal.getvalue().splitlines()
    assert " ".join(shown).split() == text.split() and (blank, end) == ("", "end")
    assert all(columns - 20 < len(line) <= columns for line in shown[:-1])


def test_a_line_of_progress_in_a_file_is_not_as_long_as_there_is_to_say() -> None:
    more = [f"more {n}" for n in range(30)]
    file = io.StringIO()
    Console(True, file, dated=True).progress("step 1", more)
    line = file.getvalue()
    assert 110 < len(line) <= 120 and line[20:].startswith("step 1  more 0  more 1")


def test_a_time_that_is_not_known() -> None:
    assert clock_text(float("inf")) == clock_text(float("nan")) == "?"


@pytest.mark.parametrize("room", ["data_pipeline", "pretrain", "finetune"])
def test_every_room_lists_its_commands(room: str) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", room, *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    helped, wrong, none = run("--help"), run("reprot"), run()
    assert (helped.returncode, wrong.returncode, none.returncode) == (0, 2, 2)
    assert helped.stdout == wrong.stdout == none.stdout
    assert helped.stdout.startswith(f"usage: python -m {room} COMMAND")
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", room]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: the output cannot be written")
