"""The house keeps its plan: arrows between rooms, one door a dependency, names of the field."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# An import may only point left.
ROOMS = ("core", "configs", "data_pipeline", "pretrain", "finetune")
DOORS = {
    "webdataset": {"data_pipeline/corpus/shards.py"},
    "mpi4py": {"data_pipeline/corpus/prepare.py"},
    "deepspeed": {"pretrain/deepspeed_door.py"},
    "tensorboard": {"pretrain/metrics.py"},
    "torch.utils.tensorboard": {"pretrain/metrics.py"},
    "matplotlib": {"pretrain/page.py"},
    "transformers": set(),
    "psutil": {"pretrain/machine.py"},
    "yaml": {"configs/load.py"},
    "huggingface_hub": {"core/hub.py"},
    "wandb": {"pretrain/trackers.py"},
    "mlflow": {"pretrain/trackers.py"},
}
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_", "PMI_", "OMPI_")
RANK_READERS = {
    "core/processes.py",
    "pretrain/distributed.py",
    "data_pipeline/corpus/prepare.py",
    "data_pipeline/__main__.py",
}


def sources() -> dict[str, ast.Module]:
    files = [p for room in ROOMS for p in sorted((ROOT / room).rglob("*.py"))]
    assert len(files) > 20
    return {str(p.relative_to(ROOT)): ast.parse(p.read_text(), str(p)) for p in files}


SOURCES = sources()


def imports(tree: ast.Module) -> set[str]:
    """Every module named by an import, at any depth of the file."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the arrows"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return names


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@pytest.mark.parametrize("path", SOURCES)
def test_import_arrows_point_down(path: str) -> None:
    room = ROOMS.index(path.split("/")[0])
    for name in imports(SOURCES[path]):
        top = name.split(".")[0]
        assert top not in ROOMS or ROOMS.index(top) <= room, f"{path} imports {name}"
        assert top not in ("tests", "benchmarks"), f"{path} imports {name}"


def test_the_ground_floor_stands_on_the_standard_library() -> None:
    # Imported only where a name asks for them: fsspec reads cloud stores, huggingface_hub the hub.
    allowed = {*sys.stdlib_module_names, "core", "fsspec", "huggingface_hub"}
    for path, tree in SOURCES.items():
        if path.startswith("core/"):
            for name in imports(tree):
                assert name.split(".")[0] in allowed, f"{path} imports {name}"


def test_online_code_never_imports_the_preparation_job() -> None:
    for path, tree in SOURCES.items():
        if path.startswith("data_pipeline/stream/"):
            allowed = {"manifest", "shards", "tokenizer"}
            for name in imports(tree):
                if name.startswith("data_pipeline.corpus."):
                    assert name.split(".")[2] in allowed, f"{path} imports {name}"


def test_data_code_knows_no_process_group() -> None:
    # What ranks agree on goes over the trainer's control group, never over the accelerator's.
    for path, tree in SOURCES.items():
        if path.startswith("data_pipeline/"):
            assert not any(n.startswith("torch.distributed") for n in imports(tree)), path


def test_objects_are_agreed_on_over_the_control_group() -> None:
    # Over NCCL they would wait for the GPU's work, and a rank that fails for its time limit.
    for path, tree in SOURCES.items():
        for node in ast.walk(tree):
            name = getattr(node, "attr", "")
            sends = name.endswith(("gather_object", "object_list"))
            assert path == "pretrain/distributed.py" or not sends, f"{path}: {name}"


def test_one_rule_says_which_errors_of_a_disk_may_pass() -> None:
    for path, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and path != "core/errors.py":
                text = ast.unparse(node)
                assert not ("UserError" in text and "strerror" in text), f"{path}: {text}"


def test_one_door_a_dependency() -> None:
    for path, tree in SOURCES.items():
        for name in imports(tree):
            for package, doors in DOORS.items():
                if name == package or name.startswith(package + "."):
                    assert path in doors, f"{path} imports {name}"


def test_nobody_imports_an_entry_point() -> None:
    for path, tree in SOURCES.items():
        for name in imports(tree):
            parts = name.split(".")
            if parts[0] in ROOMS:
                assert "run" not in parts[1:] and "__main__" not in parts, f"{path} imports {name}"


def test_no_import_cycles() -> None:
    modules = {module_name(path) for path in SOURCES}
    graph = defaultdict(set)
    for path, tree in SOURCES.items():
        for name in imports(tree):
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules and target != module_name(path):
                graph[module_name(path)].add(target)
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module) :], module))
        if module not in done:
            for target in sorted(graph[module]):
                visit(target, (*trail, module))
            done.add(module)

    for module in sorted(modules):
        visit(module, ())


def test_files_of_a_room_stand_in_the_order_that_contributing_shows() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    table = page.partition("Inside three rooms")[2].split("\n\n")[1]
    rooms = re.split(r"^ {4}(?=\w)", table, flags=re.MULTILINE)[1:]
    assert len(rooms) == 3
    for room in rooms:
        name, files = room.split(maxsplit=1)
        folder = "data_pipeline/stream" if name == "stream" else name
        groups = enumerate(re.findall(r"\w+", group) for group in files.split("·"))
        place = {f"{folder}/{file}.py": n for n, group in groups for file in group}
        trees = {path: tree for path, tree in SOURCES.items() if str(Path(path).parent) == folder}
        assert place.keys() == {path for path in trees if "__" not in path}
        for path in place:
            for imported in imports(trees[path]):
                other = imported.replace(".", "/") + ".py"
                assert other == path or place.get(other, -1) < place[path], f"{path}: {other}"


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined(tree: ast.Module) -> set[str]:
    """Private names that a file gives to functions, classes, variables and attributes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return set(filter(private, found))


def used(tree: ast.Module) -> set[str]:
    """Private names of other files: imported, looked up in something, or named to `setattr`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Call):
            found |= {a.value for a in node.args if isinstance(a, ast.Constant)} & PRIVATE
    return set(filter(private, filter(lambda name: isinstance(name, str), found)))


PRIVATE = set().union(*map(defined, SOURCES.values()))
# Tests that look inside the product, by what they look at. No line is added here.
INSIDE = {
    "pretrain/engine_cases.py": {"_ds", "_watch"},
    "pretrain/given_gradients.py": {"_ds"},
    "pretrain/old_layout.py": {"_ds", "_named"},
    "pretrain/test_attention.py": {"_by_sequence"},
    "pretrain/test_planner.py": {"_by_sequence", "_by_sequence_backward"},
}


def test_tests_and_benchmarks_use_no_private_name_of_ours() -> None:
    for path in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]:
        tree = ast.parse(path.read_text(), str(path))
        name = str(path.relative_to(ROOT)).removeprefix("tests/")
        assert used(tree) & PRIVATE - defined(tree) <= INSIDE.get(name, set()), name


def test_no_standard_library_name_is_shadowed() -> None:
    # `deepspeed pretrain/run.py` puts pretrain/ on sys.path, before the library.
    for path in SOURCES:
        assert Path(path).stem not in sys.stdlib_module_names, path
    for room in ROOMS:
        assert room not in sys.stdlib_module_names


@pytest.mark.parametrize("script", ["pretrain/run.py", "finetune/run.py"])
def test_a_script_runs_the_modules_beside_it(tmp_path: Path, script: str) -> None:
    for room in ROOMS:
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "configs/load.py").open("a") as file:
        file.write('print("of this checkout")')
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    said = subprocess.run(
        [sys.executable, str(tmp_path / script), "--help"], env=env, cwd="/",
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    assert said.startswith("of this checkout")


def test_a_benchmark_runs_the_modules_of_its_checkout() -> None:
    ours = re.compile(rf"^(?:from|import) (?:{'|'.join((*ROOMS, 'tests', 'benchmarks'))})\b", re.M)
    for path in (ROOT / "benchmarks").glob("*.py"):
        text = path.read_text()
        if "__main__" in text and (first := ours.search(text)):
            assert "sys.path.insert(0, str(" in text[: first.start()], path


def test_only_the_doors_read_rank_variables() -> None:
    for path, tree in SOURCES.items():
        if path in RANK_READERS:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not node.value.startswith(RANK_VARIABLES), f"{path}:{node.lineno}"


def test_no_global_random_generator() -> None:
    banned = {"random", "numpy.random.seed", "numpy.random.rand"}
    for path, tree in SOURCES.items():
        assert not imports(tree) & banned, path
        text = ast.unparse(tree)
        for call in ("np.random.seed(", "np.random.rand", "np.random.shuffle(", "random.shuffle("):
            assert call not in text, f"{path}: {call}"


def test_every_module_says_what_it_is() -> None:
    for path, tree in SOURCES.items():
        if not path.endswith("__init__.py"):
            assert ast.get_docstring(tree), path


def test_a_fork_of_a_process_with_threads_fails_no_test() -> None:
    # Python 3.12's words (Modules/posixmodule.c) whenever a DataLoader forks beside gloo's threads.
    words = "This process (pid=1) is multi-threaded, use of fork() may lead to deadlocks in the"
    warnings.warn(f"{words} child.", DeprecationWarning, stacklevel=1)


def test_data_and_weights_stay_out_of_the_repository() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in listed:
        assert not name.endswith((".tar", ".safetensors", ".pt", ".bin", ".parquet", ".bz2")), name
        assert (ROOT / name).stat().st_size < 1_000_000, name
