"""Checkpoint <-> Hugging Face folder: a bijection of names, nothing passed over in silence.

Our parameter names are Hugging Face's. The differences: the vocabulary here is padded for the
hardware (cut on export, restored on import), and the decoder tied to the word embeddings is
stored once.
"""

from __future__ import annotations

import argparse
import json
import pickle
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from configs.load import check
from core.errors import UserError
from core.files import disk_errors, read_json, replace_folder
from data_pipeline.corpus.shards import Manifest, load_manifest
from data_pipeline.corpus.tokenizer import Tokenizer
from pretrain.checkpoint import State, load_model_state
from pretrain.config import PretrainConfig
from pretrain.model import SHARED_KEYS, BertForPreTraining, ModelConfig

_EMBEDDINGS = "bert.embeddings.word_embeddings.weight"
_OUTPUT_BIAS = "cls.predictions.bias"
_PADDED = (_EMBEDDINGS, _OUTPUT_BIAS)

# Parts that a checkpoint may lack as a whole, and layers of other tasks that it may carry.
_PARTS = ("bert.pooler.", "cls.predictions.", "cls.seq_relationship.")
_TASK_HEADS = ("classifier.", "qa_outputs.")

# What BERT's mathematics asks of keys beside SHARED_KEYS: allowed values, the first the default.
_FIXED = {
    "model_type": ("bert", None),
    "hidden_act": ("gelu",),
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
_WRITTEN = {
    "config.json",
    "model.safetensors",
    "vocab.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "README.md",
}


# ------------------------------------------------------------------------------------------ export


def export_hugging_face(
    state_dict: Mapping[str, Tensor],
    config: ModelConfig,
    vocab_path: str | Path | None,
    lowercase: bool,
    out_dir: str | Path,
    card: str,
) -> Path:
    """Write a folder that transformers' BertForPreTraining and BertTokenizer load as it stands.

    `state_dict`: fp32, named as the model's, with or without the heads; vocabulary padding is cut.
    `vocab_path`: a vocab.txt of `config.vocab_size` lines, or None to write no tokenizer.
    `card`: the text of README.md. The folder appears whole or not at all; an earlier export
    there is replaced. Raises UserError for tensors that are not this model's, or a folder that
    holds anything else.
    """
    out = Path(out_dir)
    tokenizer = Tokenizer.from_file(vocab_path, lowercase) if vocab_path is not None else None
    if tokenizer is not None and len(tokenizer) != config.vocab_size:
        raise UserError(
            f"{vocab_path}: {len(tokenizer)} pieces, but the model has {config.vocab_size}"
        )
    _check_names_and_shapes(state_dict, config, "the checkpoint", config.padded_vocab_size)
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is not a folder")
    if out.exists():
        strange = sorted(p.name for p in out.iterdir() if p.name not in _WRITTEN)
        if strange:
            raise UserError(f"{out}: is not an earlier export (it holds {strange[0]})")
    tensors = {
        name: (t[: config.vocab_size] if name in _PADDED else t).detach().contiguous().clone()
        for name, t in state_dict.items()
    }
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        save_file(tensors, str(temporary / "model.safetensors"), metadata={"format": "pt"})
        _write_json(temporary / "config.json", _config_json(config, tokenizer, tensors))
        (temporary / "README.md").write_text(card, encoding="utf-8")
        if tokenizer is not None:
            shutil.copyfile(vocab_path, temporary / "vocab.txt")
            _write_json(
                temporary / "tokenizer_config.json", _tokenizer_json(tokenizer, config, lowercase)
            )
            _write_json(temporary / "special_tokens_map.json", _special_tokens(tokenizer))
        (temporary / "model.safetensors").chmod(0o644)
        temporary.chmod(0o755)
        replace_folder(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def _config_json(
    config: ModelConfig, tokenizer: Tokenizer | None, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    heads = any(name.startswith("cls.") for name in tensors)
    return {
        "architectures": ["BertForPreTraining" if heads else "BertModel"],
        "model_type": "bert",
        **{key: getattr(config, key) for key in SHARED_KEYS},
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "pad_token_id": tokenizer.pad_id if tokenizer is not None else 0,
        "torch_dtype": "float32",
        "use_cache": True,
    }


def _special_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    names = ("pad", "unk", "cls", "sep", "mask")
    return {f"{n}_token": tokenizer.pieces[getattr(tokenizer, f"{n}_id")] for n in names}


def _tokenizer_json(tokenizer: Tokenizer, config: ModelConfig, lowercase: bool) -> dict[str, Any]:
    return {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": lowercase,
        "tokenize_chinese_chars": True,
        "strip_accents": None,
        "model_max_length": config.max_position_embeddings,
        **_special_tokens(tokenizer),
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------ import


def import_hugging_face(
    folder: str | Path, *, vocab_multiple: int = 128
) -> tuple[dict[str, Tensor], ModelConfig]:
    """Weights (fp32, our names, vocabulary padded with zeros) and shape of a Hugging Face BERT.

    With or without heads, with or without the `bert.` prefix, from model.safetensors (also in
    parts) or pytorch_model.bin, of which only tensors are ever read. Layers of other tasks
    (`classifier.`, `qa_outputs.`) come along under their names; a head that is not there is left
    out. Raises UserError on a key that is unknown or missing, a shape that does not fit, tied
    tensors that differ, or mathematics that is not BERT's.
    """
    folder = Path(folder)
    config = read_config(folder).model_copy(update={"vocab_multiple": vocab_multiple})
    state = _canonical(_read_tensors(folder), folder)
    _check_names_and_shapes(state, config, str(folder), config.vocab_size)
    for name in _PADDED:
        if name in state:
            state[name] = _padded(state[name], config.padded_vocab_size)
    return state, config


def initial_weights(path: str, model: BertForPreTraining) -> tuple[dict[str, Tensor], str]:
    """(weights by name, where they come from) for `init_from`: a checkpoint or run folder of ours,
    or a Hugging Face folder. Heads that it does not have keep `model`'s own values, and layers of
    other tasks are left behind; both are said. The vocabulary is padded as `model`'s.
    """
    folder, config = Path(path), model.config
    if (folder / "config.json").exists():
        weights, _ = import_hugging_face(folder, vocab_multiple=config.vocab_multiple)
        origin = "a Hugging Face folder"
    else:
        weights, _, state, folder = load_model_state(folder)
        for name in _PADDED:
            weights[name] = _padded(weights[name][: config.vocab_size], config.padded_vocab_size)
        origin = f"{folder}, step {state.position.step}"
    left = [n for n in weights if n.startswith(_TASK_HEADS)]
    own = model.state_dict()
    new = [n for n in own if n not in weights and n.startswith(_PARTS)]
    if left:
        origin += f"; left behind, of another task: {', '.join(sorted(left))}"
    if new:
        origin += f"; new, because it has none: {', '.join(sorted(new))}"
    kept = {name: tensor for name, tensor in weights.items() if name not in left}
    return {**{name: own[name] for name in new}, **kept}, origin


def _padded(tensor: Tensor, rows: int) -> Tensor:
    extra = max(0, rows - len(tensor))
    return torch.cat([tensor, tensor.new_zeros(extra, *tensor.shape[1:])]) if extra else tensor


def read_config(folder: str | Path) -> ModelConfig:
    """The shape in a Hugging Face config.json; UserError where it is not BERT's mathematics."""
    path = Path(folder) / "config.json"
    plain = read_json(path)
    for key, allowed in _FIXED.items():
        if plain.get(key, allowed[0]) not in allowed:
            raise UserError(f"{path}: {key}: {plain[key]!r} is not BERT's, which is {allowed[0]!r}")
    # A key that is absent has Hugging Face's default, which is BERT-BASE's as ours is.
    shape = {key: plain[key] for key in SHARED_KEYS if key in plain}
    if shape.setdefault("vocab_size", 30522) == 0:
        raise UserError(f"{path}: vocab_size: 0 is no vocabulary")
    return check(shape, ModelConfig, str(path))


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    whole, parts = folder / "model.safetensors", folder / "model.safetensors.index.json"
    pickled = folder / "pytorch_model.bin"
    path = whole
    try:
        if whole.exists():
            return load_file(whole)
        if parts.exists():
            path = parts
            names = json.loads(parts.read_text(encoding="utf-8"))["weight_map"].values()
            state: dict[str, Tensor] = {}
            for name in sorted(set(names)):
                if Path(name).name != name:
                    raise UserError(f"{parts}: {name!r} is not a file of this folder")
                path = folder / name
                state |= load_file(path)
            return state
        if pickled.exists():
            path = pickled
            found = torch.load(pickled, map_location="cpu", weights_only=True)
            if not isinstance(found, Mapping) or not all(isinstance(n, str) for n in found):
                raise UserError(f"{path}: is not a table of tensors by name")
            return found
    except pickle.UnpicklingError:
        raise UserError(f"{path}: holds more than tensors, which is not executed") from None
    except (AttributeError, TypeError):
        raise UserError(f"{path}: weight_map is not file names by tensor name") from None
    except (
        OSError, EOFError, RuntimeError, ValueError, KeyError, safetensors.SafetensorError
    ) as error:  # fmt: skip
        why = (str(error).splitlines() or ["it is empty"])[0]
        raise UserError(f"{path}: cannot be read: {why}") from None
    raise UserError(f"{folder}: holds neither {whole.name} nor {pickled.name}")


def _canonical(found: Mapping[str, Any], folder: Path) -> dict[str, Tensor]:
    """Our names: the prefix added, old LayerNorm names renewed, what is stored twice checked."""
    prefixed = any(name.startswith("bert.") for name in found)
    state: dict[str, Tensor] = {}
    for name, tensor in found.items():
        if not isinstance(tensor, Tensor):
            raise UserError(f"{folder}: {name} is not a tensor")
        new = name.replace("LayerNorm.gamma", "LayerNorm.weight")
        new = new.replace("LayerNorm.beta", "LayerNorm.bias")
        if not prefixed and new.startswith(("embeddings.", "encoder.", "pooler.")):
            new = "bert." + new
        if new in state:
            raise UserError(f"{folder}: {name} is there twice under different names")
        state[new] = tensor.float() if tensor.is_floating_point() else tensor

    # Buffers of older versions of the library: derived, so checked and left out.
    positions = state.pop("bert.embeddings.position_ids", None)
    if positions is not None and not torch.equal(
        positions.flatten(), torch.arange(positions.numel(), dtype=positions.dtype)
    ):
        raise UserError(f"{folder}: bert.embeddings.position_ids do not count from 0")
    _untie(state, "cls.predictions.decoder.weight", _EMBEDDINGS, folder)
    _untie(state, "cls.predictions.decoder.bias", _OUTPUT_BIAS, folder)
    return state


def _untie(state: dict[str, Tensor], copy: str, name: str, folder: Path) -> None:
    tensor = state.pop(copy, None)
    if tensor is not None and not torch.equal(state.setdefault(name, tensor), tensor):
        raise UserError(f"{folder}: {copy} differs from {name}, to which BERT ties it")


def _check_names_and_shapes(
    state: Mapping[str, Tensor], config: ModelConfig, where: str, vocabulary: int
) -> None:
    with torch.device("meta"):
        model = BertForPreTraining(config, generator=None)
    wanted = {name: list(t.shape) for name, t in model.state_dict().items()}
    for name in _PADDED:
        wanted[name][0] = vocabulary
    absent = {part for part in _PARTS if not any(name.startswith(part) for name in state)}
    missing = [name for name in wanted if name not in state and not name.startswith(tuple(absent))]
    unknown = [name for name in state if name not in wanted and not name.startswith(_TASK_HEADS)]
    for problem, names in (("missing", missing), ("unknown", unknown)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(f"{where}: {problem} key {sorted(names)[0]}{more}")
    for name, shape in wanted.items():
        if name not in state:
            continue
        if list(state[name].shape) != shape:
            raise UserError(f"{where}: {name} is {list(state[name].shape)}, config says {shape}")
        if not state[name].is_floating_point() or not state[name].isfinite().all():
            raise UserError(f"{where}: {name} holds values that are not finite real numbers")


# -------------------------------------------------------------------------------------- model card


def model_card(state: State, config: PretrainConfig, shape: ModelConfig, checkpoint: Path) -> str:
    """README.md of an export, from the run's own record alone."""
    try:
        manifest: Manifest | None = load_manifest(config.data.dir)
    except UserError:
        manifest = None
    if manifest is not None and manifest.dataset_id != state.dataset["dataset_id"]:
        manifest = None
    parameters = _parameter_count(shape)
    lines = [
        "---",
        "library_name: transformers",
        "tags: [bert, fill-mask]",
        "---",
        "",
        f"# {checkpoint.parent.parent.name}",
        "",
        f"A BERT with {shape.num_hidden_layers} layers, {shape.hidden_size} wide, "
        f"{shape.num_attention_heads} heads, {parameters / 1e6:.1f} M parameters, pretrained by "
        "masked language modelling and next-sentence prediction; "
        f"{'lower-cased' if state.dataset['lowercase'] else 'cased'} vocabulary of "
        f"{shape.vocab_size:,} pieces.",
        "",
        "## Training",
        "",
        f"- optimiser steps: {state.position.step:,} of {config.total_steps:,} "
        f"({state.position.skipped:,} skipped)",
    ]
    for i, phase in enumerate(config.phases):
        lines.append(
            f"- phase {i + 1}: {phase.steps:,} steps of about {phase.sequences_per_step:,} "
            f"sequences of up to {phase.max_seq_len} tokens, peak rate {phase.learning_rate:g}"
        )
    lines += [
        f"- optimiser: {config.optimizer.name}, seed {config.seed}",
        f"- code: {state.code_version or 'unknown version'}",
        "",
        "## Losses and accuracies",
        "",
        *_results(checkpoint.parent.parent, state.position.step),
        "",
        "## Data",
        "",
        f"Dataset `{state.dataset['dataset_id']}`.",
    ]
    if manifest is None:
        lines.append("Its manifest was not at hand at the export: sources and licences unknown.")
    else:
        lines += ["", "| source | documents | words | licence | origin |", "|---|---|---|---|---|"]
        for s in manifest.sources:
            cells = (s.name, f"{s.documents_out:,}", f"{s.words:,}", s.licence, s.provenance)
            lines.append(
                "| " + " | ".join(c.replace("|", "/") or "not stated" for c in cells) + " |"
            )
    return "\n".join(lines) + "\n"


def _results(run: Path, step: int) -> list[str]:
    """The last losses and accuracies of the run's metrics.jsonl up to `step`."""
    path = run / "metrics.jsonl"
    last: dict[str, tuple[int, float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            point = json.loads(line)
        except ValueError:
            continue  # the line that a killed run was writing
        for tag, value in point.items():
            if ("loss" in tag or "accuracy" in tag) and point["step"] <= step:
                last[tag] = (point["step"], value)
    if not last:
        return ["No metrics.jsonl was at hand at the export."]
    rows = [f"| {tag} | {at:,} | {value:.4g} |" for tag, (at, value) in sorted(last.items())]
    return ["| figure (losses in nats) | at step | value |", "|---|---|---|", *rows]


def _parameter_count(shape: ModelConfig) -> int:
    with torch.device("meta"):
        model = BertForPreTraining(shape, generator=None)
    padding = (shape.padded_vocab_size - shape.vocab_size) * (shape.hidden_size + 1)
    return sum(p.numel() for p in model.parameters()) - padding


# ---------------------------------------------------------------------------------------- commands


def export_main(argv: list[str]) -> int:
    """`python -m pretrain export CHECKPOINT DIR`."""
    p = argparse.ArgumentParser(
        prog="python -m pretrain export", description="checkpoint -> Hugging Face folder"
    )
    p.add_argument("checkpoint", help="a run folder (its newest good checkpoint) or one of its")
    p.add_argument("folder", help="the folder to write; an earlier export there is replaced")
    arguments = p.parse_args(argv)
    return _export(Path(arguments.checkpoint), Path(arguments.folder))


def import_main(argv: list[str]) -> int:
    """`python -m pretrain import DIR OUT`."""
    p = argparse.ArgumentParser(
        prog="python -m pretrain import",
        description="any Hugging Face BERT -> a checked folder in this project's form",
    )
    p.add_argument("folder", help="a Hugging Face folder, with or without heads or prefix")
    p.add_argument("out", help="the folder to write, good for `init_from` and for fine-tuning")
    arguments = p.parse_args(argv)
    return _import(Path(arguments.folder), Path(arguments.out))


def _export(checkpoint: Path, out: Path) -> int:
    weights, config, state, folder = load_model_state(checkpoint)
    vocab = folder / "vocab.txt"
    lowercase = bool(state.dataset["lowercase"])
    shape = config.model.with_vocab_size(len(Tokenizer.from_file(vocab, lowercase)))
    card = model_card(state, config, shape, folder)
    export_hugging_face(weights, shape, vocab, lowercase, out, card)
    print(f"{folder} (step {state.position.step}) -> {out}")
    return 0


def _import(folder: Path, out: Path) -> int:
    weights, shape = import_hugging_face(folder)
    vocab = folder / "vocab.txt"
    heads = [n for n in weights if n.startswith(_TASK_HEADS)]
    absent = [part for part in _PARTS if not any(name.startswith(part) for name in weights)]
    card = f"# {out.name}\n\nMade from {folder.name} by `python -m pretrain import`.\n"
    export_hugging_face(
        {name: t for name, t in weights.items() if name not in heads},
        shape,
        vocab if vocab.exists() else None,
        _declared_lowercase(folder),
        out,
        card,
    )
    print(f"{folder} -> {out}")
    if heads:
        print(f"left out, of another task: {', '.join(sorted(heads))}")
    if absent:
        print(f"not there: {', '.join(part.rstrip('.') for part in absent)}")
    if not vocab.exists():
        print("no vocab.txt there, so no tokenizer files")
    return 0


def _declared_lowercase(folder: Path) -> bool:
    path = folder / "tokenizer_config.json"
    return bool(read_json(path).get("do_lower_case", True)) if path.exists() else True
