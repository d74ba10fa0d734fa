"""What a process hears before its work begins."""

import signal
import subprocess
import sys

import pytest

BEGIN = """
import ctypes, sys, time
from core import processes
from core.errors import main_guard

processes.PATIENCE = 0.3

def wait():
    print("ready", flush=True)
    time.sleep(60)

def wait_in_a_library():
    lock = ctypes.create_string_buffer(64)
    library = ctypes.CDLL(None)
    library.pthread_mutex_lock(lock)
    print("ready", flush=True)
    library.pthread_mutex_lock(lock)  # which no signal interrupts

def swallow():
    try:
        wait()
    except BaseException:
        time.sleep(60)

processes.hear_in_the_start()
"""


def end_of(code: str, number: signal.Signals, *more: signal.Signals) -> tuple[int, str]:
    """Exit code and stderr of a process that gets the signals once it waits."""
    with subprocess.Popen(
        [sys.executable, "-c", BEGIN + code], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "ready\n"
        for each in (number, *more):
            process.send_signal(each)
        return process.wait(30), process.stderr.read()


@pytest.mark.parametrize("where", ["wait", "wait_in_a_library", "swallow"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGHUP"])
def test_a_signal_in_the_start_is_told_wherever_python_is(name: str, where: str) -> None:
    code, said = end_of(f"sys.exit(main_guard({where}))", getattr(signal, name))
    assert (code, said.count("\n")) == (85, 1) and f"{name}: stopped in the start" in said


def test_what_is_ignored_stays_so_and_of_several_the_first_counts() -> None:
    short = "time.sleep = lambda _, sleep=time.sleep: sleep(1)\nsys.exit(main_guard(wait))"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited, as under nohup
    try:
        assert end_of(short, signal.SIGHUP) == (0, "")
    finally:
        signal.signal(signal.SIGHUP, before)
    ends = "code = main_guard(wait)\nprocesses.hear_no_more()\nsys.exit(code)"
    code, said = end_of(ends, signal.SIGUSR1, signal.SIGTERM)
    assert code == 85 and said.count("\n") == 1


def test_once_it_has_started_a_signal_is_what_it_was() -> None:
    code, said = end_of("processes.started()\nsys.exit(main_guard(wait))", signal.SIGTERM)
    assert (code, said) == (-signal.SIGTERM, "")
    code, _ = end_of("processes.hear(lambda: sys.exit(7))\nwait()", signal.SIGTERM)
    assert code == 7


def test_a_signal_that_python_lets_go_is_heard_once_the_start_is_over() -> None:
    """As from a callback of the import system's, where an exception is ignored."""
    program = """
class Last:
    def __del__(self):
        wait()

def start():
    last = Last()
    del last
    processes.started()

processes.PATIENCE = 30
sys.exit(main_guard(start))
"""
    code, said = end_of(program, signal.SIGTERM)
    assert (code, said.strip()) == (85, "SIGTERM: stopped in the start")


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [(signal.SIGUSR1, 85, "SIGUSR1: stopped in the start"), (signal.SIGINT, 130, "stopped by")],
)
def test_a_signal_of_which_python_makes_another_error_is_itself(
    number: signal.Signals, code: int, line: str
) -> None:
    program = """
class Field:
    def __set_name__(self, *_):
        wait()

def start():
    type("Owner", (), {"field": Field()})

processes.PATIENCE = 30
sys.exit(main_guard(start))
"""
    found, said = end_of(program, number)
    assert found == code and said.startswith(line) and said.count("\n") == 1


@pytest.mark.parametrize("script", ["pretrain/run.py", "finetune/run.py"])
@pytest.mark.parametrize("met", ["configs.load", "torch"])
def test_so_it_is_while_a_run_imports(script: str, met: str) -> None:
    program = f"""
import builtins, os, runpy, signal, sys

class Field:
    def __set_name__(self, *_):
        os.kill(os.getpid(), signal.SIGTERM)
        sum(range(1000))

def meet(name, *how, real=builtins.__import__):
    if name == {met!r}:
        builtins.__import__ = real
        type("Owner", (), {{"field": Field()}})
    return real(name, *how)

builtins.__import__ = meet
config = "configs/" + ("pretrain_demo" if {script[0]!r} == "p" else "finetune_glue") + ".yaml"
sys.argv = [{script!r}, "--config", config]
runpy.run_path({script!r}, run_name="__main__")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (85, "SIGTERM: stopped in the start\n")


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_in_the_teardown_changes_no_code(first: signal.Signals) -> None:
    program = """
processes.PATIENCE = 30

class Last:
    def __del__(self, say=print, wait=time.sleep):
        say("last", flush=True)
        wait(1)

last = Last()
code = main_guard(wait)
processes.hear_no_more()
sys.exit(code)
"""
    with subprocess.Popen(
        [sys.executable, "-c", BEGIN + program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True,
    ) as process:  # fmt: skip
        for number, line in ((first, "ready\n"), (signal.SIGTERM, "last\n")):
            assert process.stdout.readline() == line
            process.send_signal(number)
        assert process.wait(30) == (130 if first == signal.SIGINT else 85)


def test_ctrl_c_is_no_reason_to_start_again() -> None:
    code, said = end_of("sys.exit(main_guard(wait))", signal.SIGINT)
    assert (code, said) == (130, "stopped by Ctrl-C\n")
