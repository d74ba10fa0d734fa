"""`python -m pretrain export` and `import`: a checked Hugging Face folder from either."""

from __future__ import annotations

import argparse
from pathlib import Path

from core.console import show
from core.errors import UserError
from core.urls import is_command
from data_pipeline.corpus.manifest import Manifest
from data_pipeline.stream.dataset import Dataset
from pretrain import hugging_face, pretrained
from pretrain.card import model_card
from pretrain.config import PretrainConfig
from pretrain.hugging_face import is_other_head, listed
from pretrain.run_state import State

_MARK = "python -m pretrain"


def export_main(argv: list[str]) -> int:
    """`python -m pretrain export CHECKPOINT DIR`."""
    checkpoint, out, force = _arguments(
        argv,
        "export",
        "checkpoint -> Hugging Face folder",
        checkpoint="a run folder (its newest good checkpoint) or one of its",
        folder="the folder to write; an earlier one of ours is replaced",
    )
    hugging_face.check_replaceable(out, _MARK, force)
    source, config, state = pretrained.of_checkpoint(checkpoint)
    card = model_card(state, config, source.shape, source.path, _manifest(config, state))
    hugging_face.write(
        out, source.weights, source.shape, source.tokenizer, by=_MARK, card=card, force=force
    )
    for note in source.notes:
        show(note)
    show(f"{source.path} (step {state.position.step}) -> {out}")
    return 0


def import_main(argv: list[str]) -> int:
    """`python -m pretrain import DIR OUT`."""
    folder, out, force = _arguments(
        argv,
        "import",
        "any Hugging Face BERT -> a checked folder in this project's form",
        folder="a Hugging Face folder, with or without heads or prefix",
        out="the folder to write, good for `init_from` and for fine-tuning",
    )
    hugging_face.check_replaceable(out, _MARK, force)
    if not force and out.exists() and out.samefile(folder):
        raise UserError(f"{out}: is the folder that is read; give another one, or --force")
    source = hugging_face.read(folder)
    weights = {name: t for name, t in source.weights.items() if not is_other_head(name)}
    card = f"# {out.name}\n\nMade from {folder.name} by `python -m pretrain import`.\n"
    hugging_face.write(
        out, weights, source.shape, source.tokenizer, by=_MARK, card=card, force=force
    )
    show(f"{folder} ({source.origin}) -> {out}")
    if source.other_heads:
        show(f"left behind, of another task: {listed(source.other_heads)}")
    if source.absent_parts:
        show(f"not there: {', '.join(part.rstrip('.') for part in source.absent_parts)}")
    if source.tokenizer is None:
        show(
            "no vocab.txt or tokenizer.json there, so no tokenizer files: fine-tuning wants a "
            "vocab.txt beside them"
        )
    return 0


def _manifest(config: PretrainConfig, state: State) -> Manifest | None:
    """Of the data set of the run, where it is at hand; a checkpoint gets no command run."""
    if is_command(config.data.dir):
        return None
    quick = {"fetch_timeout": 10.0, "fetch_retries": 0}  # not as long as the checkpoint would like
    try:
        data = config.data.model_copy(update=quick)
        manifest = Dataset(data, config.objective).manifest
    except UserError:
        return None
    return manifest if manifest.dataset_id == state.dataset["dataset_id"] else None


def _arguments(
    argv: list[str], command: str, description: str, **places: str
) -> tuple[Path, Path, bool]:
    """(from, to, --force); `places`: the help of the two by name."""
    p = argparse.ArgumentParser(prog=f"{_MARK} {command}", description=description)
    for name, help_text in places.items():
        p.add_argument(name, type=Path, help=help_text)
    p.add_argument(
        "--force",
        action="store_true",
        help="replace a Hugging Face folder that these commands did not write, too",
    )
    *both, force = vars(p.parse_args(argv)).values()
    return *both, force
