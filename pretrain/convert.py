"""`python -m pretrain export` and `import`: a checked Hugging Face folder from either."""

from __future__ import annotations

import argparse

from torch import Tensor

from core import hub
from core.console import show
from core.errors import UserError
from core.processes import ends_are_heard
from core.urls import in_time, is_command, path_here
from data_pipeline.corpus.manifest import Manifest
from data_pipeline.stream.dataset import Dataset
from pretrain import hugging_face, pretrained
from pretrain.card import model_card
from pretrain.config import PretrainConfig
from pretrain.hugging_face import Pretrained, is_other_head, listed
from pretrain.run_state import State

_MARK = "python -m pretrain"
ORIGIN_SECONDS = 30.0  # for what a checkpoint says where it is
# What a repository of the hub may hold of a folder.
_MODEL_FILES = ("*.json", "*.txt", "*.safetensors", "*.bin")


@ends_are_heard()
def export_main(argv: list[str]) -> int:
    """`python -m pretrain export CHECKPOINT DIR`."""
    p = _parser(
        "export",
        "checkpoint -> Hugging Face folder",
        checkpoint="a run folder (its newest good checkpoint) or one of its",
        folder="the folder to write; an earlier one of ours is replaced",
    )
    p.add_argument(
        "--average",
        type=int,
        default=1,
        metavar="N",
        help="the mean of the last N whole checkpoints",
    )
    p.add_argument("--language", metavar="CODE", help="for the card: of the text, such as en")
    p.add_argument("--licence", metavar="ID", help="for the card: of the weights, such as mit")
    p.add_argument(
        "--push", metavar="ORG/NAME", help="then upload it to this repository of the hub "
        "(huggingface_hub, its token; a new repository is private)",
    )  # fmt: skip
    a = p.parse_args(argv)
    if a.average < 1:
        raise UserError(f"--average: {a.average}: at least 1")
    if a.push is not None:
        hub.check(a.push)
    hugging_face.check_replaceable(a.folder, _MARK, a.force)
    source, config, state = pretrained.of_checkpoint(a.checkpoint, average=a.average)
    card = model_card(
        state,
        config,
        source.shape,
        source.path,
        _manifest(config, state),
        average=a.average,
        language=a.language,
        licence=a.licence,
    )
    hugging_face.write(
        a.folder, _own(source), source.shape, source.tokenizer, by=_MARK, card=card, force=a.force
    )
    for note in source.notes:
        show(note)
    show(f"{source.path} (step {state.position.step}) -> {a.folder}")
    if a.push is not None:
        # The run's name and not its path, which is nobody's business there.
        run = source.path.resolve().parents[1].name
        origin = f"step {state.position.step} of {run}"
        show(f"{a.folder} -> {hub.push(a.folder, a.push, origin)}")
    return 0


@ends_are_heard()
def import_main(argv: list[str]) -> int:
    """`python -m pretrain import DIR OUT`."""
    p = _parser(
        "import",
        "any Hugging Face BERT -> a checked folder in this project's form",
        folder="a Hugging Face folder, with or without heads or prefix; hf:ORG/NAME[@REVISION]: "
        "one of the hub",
        out="the folder to write, good for `init_from` and for fine-tuning",
    )
    folder, out, force = vars(p.parse_args(argv)).values()
    hugging_face.check_replaceable(out, _MARK, force)
    name = folder.name
    if hub.is_hub(str(folder)):
        name = str(folder)
        folder, _ = hub.fetch(name, "model", _MODEL_FILES)
    if not force and out.exists() and out.samefile(folder):
        raise UserError(f"{out}: is the folder that is read; give another one, or --force")
    source = hugging_face.read(folder)
    card = f"# {out.name}\n\nMade from {name} by `python -m pretrain import`.\n"
    hugging_face.write(
        out, _own(source), source.shape, source.tokenizer, by=_MARK, card=card, force=force
    )
    if source.left_out:
        show(source.left_out)
    if source.untyped:
        show(f"{source.untyped}; those of {out} do")
    show(f"{folder} ({source.origin}) -> {out}")
    if source.absent_parts:
        show(f"not there: {', '.join(part.rstrip('.') for part in source.absent_parts)}")
    if source.tokenizer is None:
        show(
            "no vocab.txt or tokenizer.json there, so no tokenizer files: fine-tuning wants a "
            "vocab.txt beside them"
        )
    return 0


def _own(source: Pretrained) -> dict[str, Tensor]:
    """Its weights without heads of other tasks, which are said."""
    if source.other_heads:
        show(f"left behind, of another task: {listed(source.other_heads)}")
    return {name: t for name, t in source.weights.items() if not is_other_head(name)}


def _manifest(config: PretrainConfig, state: State) -> Manifest | None:
    """Of the data set of the run, where it is at hand; a checkpoint gets no command run."""
    if is_command(config.data.dir):
        return None
    quick = {"fetch_timeout": 10.0, "fetch_retries": 0}  # not as long as the checkpoint would like
    data = config.data.model_copy(update=quick)
    try:
        manifest = in_time(ORIGIN_SECONDS, lambda: Dataset(data, config.objective).manifest)
    except (UserError, TimeoutError):
        return None
    return manifest if manifest.dataset_id == state.dataset["dataset_id"] else None


def _parser(command: str, description: str, **places: str) -> argparse.ArgumentParser:
    """Of two folders and --force; `places`: the help of the two by name."""
    p = argparse.ArgumentParser(prog=f"{_MARK} {command}", description=description)
    for name, help_text in places.items():
        p.add_argument(name, type=path_here, help=help_text)
    p.add_argument(
        "--force",
        action="store_true",
        help="replace a Hugging Face folder that these commands did not write, too",
    )
    return p
