"""Fine-tuning here against Hugging Face's padded way, same weights, examples, batches, threads.

Training examples/s on sequences as long as MRPC's and SQuAD's (with --glue DIR and --squad FILE:
their own), ours and theirs in turn; ends in one JSON line. Scores: finetune_scores_vs_hf.py.

"Padded" is run_glue.py's and run_qa.py's default: every sequence to max_seq_len (128, 384).
`longest` in the detail pads to the longest of the batch, which those scripts can be asked for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from core.errors import main_guard
from finetune import loading
from finetune.batches import labelled
from finetune.config import EncoderConfig, GlueConfig, SquadConfig, TrainConfig
from finetune.examples import Item, Tokens
from finetune.glue import Glue
from finetune.heads import FineTuned, HeadSpec, initialise_head
from finetune.squad import Squad
from finetune.train import compute_dtype, forward
from pretrain.hugging_face import Pretrained
from pretrain.model import ModelConfig, initialise
from pretrain.model_config import SHARED_KEYS

# Tokens of a training sequence (bert-base-uncased vocabulary) at the quantiles 0, 1/20, ... 1:
# MRPC's train.tsv, and SQuAD 2.0 windows of 384 with stride 128.
QUANTILES = {
    "mrpc": (
        *(19, 32, 36, 39, 41, 44, 45, 47, 50, 51, 53),
        *(55, 57, 59, 61, 62, 64, 67, 70, 74, 103),
    ),
    "squad": (
        *(41, 109, 119, 126, 131, 135, 140, 146, 152, 159, 167),
        *(176, 184, 195, 208, 226, 245, 272, 309, 377, 384),
    ),
}
BATCH = {"mrpc": 32, "squad": 8}
PADDED = {"mrpc": 128, "squad": 384}
CLASSES = {
    "sequence": transformers.BertForSequenceClassification,
    "choice": transformers.BertForMultipleChoice,
    "span": transformers.BertForQuestionAnswering,
    "tokens": transformers.BertForTokenClassification,
}


class Padded:
    """Hugging Face's model on the same items: padded [B, L] inputs and an attention mask."""

    def __init__(
        self, model: FineTuned, pad_id: int, device: torch.device, weights: Path | None = None
    ) -> None:
        """`weights`: a folder for their own loader; `model` then gives the new layer only."""
        self.head, self.pad_id, self.device = model.head, pad_id, device
        if weights is None:
            self.model = self._copy(model, pad_id).to(device)
            return
        head = model.head
        self.model = CLASSES[head.kind].from_pretrained(
            weights, num_labels=head.width, dtype=torch.float32
        )
        getattr(self.model, head.layer).load_state_dict(getattr(model, head.layer).state_dict())
        self.model.to(device)

    @staticmethod
    def _copy(model: FineTuned, pad_id: int) -> Any:
        c, head = model.bert.config, model.head
        shape = {key: getattr(c, key) for key in SHARED_KEYS}
        config = transformers.BertConfig(**shape, num_labels=head.width, pad_token_id=pad_id)
        copy = CLASSES[head.kind](config)
        missing, unexpected = copy.load_state_dict(model.state_dict(), strict=False)
        assert not missing, missing
        assert all("pooler" in name for name in unexpected), unexpected
        return copy

    def inputs(self, items: list[Item], length: int | None) -> dict[str, torch.Tensor]:
        sequences = [s for item in items for s in item.sequences]
        longest = length or max(len(s.ids) for s in sequences)
        ids = np.full((len(sequences), longest), self.pad_id)
        types, mask = np.zeros_like(ids), np.zeros_like(ids)
        for row, s in enumerate(sequences):
            here = slice(0, len(s.ids))
            ids[row, here], types[row, here], mask[row, here] = s.ids, s.types, 1
        arrays = {"input_ids": ids, "token_type_ids": types, "attention_mask": mask}
        tensors = {k: torch.from_numpy(v).to(self.device) for k, v in arrays.items()}
        if self.head.kind == "choice":
            tensors = {k: t.view(len(items), -1, longest) for k, t in tensors.items()}
        return tensors

    def labels(self, items: list[Item], longest: int) -> dict[str, torch.Tensor]:
        values = [item.label for item in items]
        if self.head.kind == "span":
            start, end = torch.tensor(values, device=self.device).unbind(1)
            return {"start_positions": start, "end_positions": end}
        if self.head.kind == "tokens":
            rows = [np.pad(v, (0, longest - len(v)), constant_values=-100) for v in values]
            return {"labels": torch.from_numpy(np.stack(rows)).to(self.device)}
        return {"labels": torch.tensor(values, device=self.device)}

    def loss(self, items: list[Item], length: int | None) -> torch.Tensor:
        inputs = self.inputs(items, length)
        return self.model(**inputs, **self.labels(items, inputs["input_ids"].shape[-1])).loss

    @torch.no_grad()
    def predict(self, items: list[Item]) -> list[np.ndarray]:
        self.model.eval()
        outputs: list[Any] = [None] * len(items)
        by_length = sorted(range(len(items)), key=lambda i: items[i].tokens)
        for at in range(0, len(items), 32):
            places = by_length[at : at + 32]
            part = [items[i] for i in places]
            result = self.model(**self.inputs(part, None))
            if self.head.kind == "span":
                values = torch.stack([result.start_logits, result.end_logits], -1)
            else:
                values = result.logits
            for place, row in zip(places, values.cpu().numpy(), strict=True):
                outputs[place] = row if self.head.pooled else row[: items[place].tokens]
        return outputs


def adamw(model: torch.nn.Module, train: TrainConfig, rate: float) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    plain = [p for n, p in named if "bias" in n or "LayerNorm" in n]
    decayed = [p for n, p in named if not ("bias" in n or "LayerNorm" in n)]
    groups = [
        {"params": decayed, "weight_decay": train.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    betas = (train.beta1, train.beta2)
    return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=train.eps, fused=True)


def synthetic(name: str, count: int, vocabulary: int = 30522) -> list[Item]:
    """Random tokens of a vocabulary of that size with the lengths of the task's sequences."""
    rng = np.random.Generator(np.random.Philox(key=[1, len(name)]))
    marks = np.linspace(0, 1, len(QUANTILES[name]))
    low, high = min(1000, vocabulary // 2), min(20000, vocabulary)
    items = []
    for u in rng.random(count):
        n = int(np.interp(u, marks, QUANTILES[name]))
        types = (np.arange(n) >= n // 2).astype(np.int64)
        label: Any = int(rng.integers(2)) if name == "mrpc" else (n // 2, n // 2 + 2)
        items.append(Item((Tokens(rng.integers(low, high, n), types),), label))
    return items


def real(name: str, arguments: argparse.Namespace, source: Pretrained) -> list[Item]:
    if name == "mrpc":
        config = GlueConfig(dir=arguments.glue)
        return Glue("MRPC", config, TrainConfig(predict_test=False), source.tokenizer).sets["train"]
    config = SquadConfig(version="2.0", train_file=arguments.squad, dev_share=0.1)
    return Squad("SQuAD-2.0", config, TrainConfig(), source.tokenizer).sets["train"]


def speed(arguments: argparse.Namespace) -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpu = device.type == "cuda"
    source = None
    if arguments.encoder:
        source = loading.read(EncoderConfig(path=arguments.encoder), 384)
        shape = source.shape
    elif gpu:
        shape = ModelConfig(vocab_size=30522, vocab_multiple=1)
    else:
        shape = ModelConfig(
            vocab_size=30522,
            vocab_multiple=1,
            hidden_size=384,
            num_hidden_layers=6,
            intermediate_size=1536,
        )
    ratios, detail = {}, {"device": torch.cuda.get_device_name() if gpu else "cpu"}
    detail |= {"threads": torch.get_num_threads(), "layers": shape.num_hidden_layers}
    detail |= {"hidden": shape.hidden_size, "torch": torch.__version__}
    print("task    ours/s  padded/s  longest/s  ratio  (real training examples)")
    for name in ("mrpc", "squad"):
        given = arguments.glue if name == "mrpc" else arguments.squad
        size = BATCH[name] * (4 if gpu else 1)
        items = real(name, arguments, source) if given else synthetic(name, 4096, shape.vocab_size)
        order = np.random.Generator(np.random.Philox(key=[7, 7])).permutation(len(items))
        batches = [
            [items[i] for i in order[k * size : (k + 1) * size]] for k in range(arguments.steps + 1)
        ]
        seconds = measure(name, batches, shape, device)
        rates = {way: size / statistics.median(times) for way, times in seconds.items()}
        ratios[name] = round(rates["ours"] / rates["padded"], 3)
        tokens = sum(item.tokens for batch in batches for item in batch)
        detail[name] = {way: round(rate, 2) for way, rate in rates.items()} | {
            "batch": size,
            "mean_tokens": round(tokens / (size * len(batches)), 1),
            "padded_to": PADDED[name],
            "data": "real" if given else "synthetic lengths",
            "ratio_longest": round(rates["ours"] / rates["longest"], 3),
        }
        print(
            f"{name:<7} {rates['ours']:6.1f}  {rates['padded']:8.1f}  {rates['longest']:9.1f}  "
            f"{ratios[name]:5.2f}",
            flush=True,
        )
    print(json.dumps({"benchmark": "finetune_vs_hf", "ratio": ratios, "detail": detail}))
    return 0


def measure(
    name: str, batches: list[list[Item]], shape: ModelConfig, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of every optimiser step but the first, three ways in turn on each batch."""
    train = TrainConfig()
    head = HeadSpec("sequence", 2) if name == "mrpc" else HeadSpec("span", 2)
    generator = torch.Generator().manual_seed(0)
    ours = FineTuned(shape, head)
    initialise(ours.bert, shape, generator)
    initialise_head(ours, shape, generator)
    theirs = Padded(ours, 0, device)
    ours.to(device)
    ours.prepare(compute_dtype(train, device), device, PADDED[name])
    ours.train()
    theirs.model.train()
    optimizers = [adamw(m, train, 3e-5) for m in (ours, theirs.model)]
    bf16 = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    def step_ours(items: list[Item]) -> None:
        batch = ours.collate(items, device)
        (ours.loss_sum(forward(ours, batch), batch) / labelled(items)).backward()
        finish(ours, optimizers[0])

    def step_theirs(items: list[Item], length: int | None) -> None:
        with bf16:
            loss = theirs.loss(items, length)
        loss.backward()
        finish(theirs.model, optimizers[1])

    def finish(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()

    ways = {
        "ours": step_ours,
        "padded": lambda items: step_theirs(items, PADDED[name]),
        "longest": lambda items: step_theirs(items, None),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number, items in enumerate(batches):
        for way, step in ways.items():
            started = time.perf_counter()
            step(items)
            if number:
                seconds[way].append(time.perf_counter() - started)
    return seconds


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--steps", type=int, default=5, help="measured optimiser steps of each way")
    p.add_argument("--encoder", help="folder of real weights; needed for --glue and --squad")
    p.add_argument("--glue", help="folder that holds MRPC/train.tsv")
    p.add_argument("--squad", help="an official SQuAD 2.0 json")
    arguments = p.parse_args(argv)
    if (arguments.glue or arguments.squad) and not arguments.encoder:
        p.error("--glue and --squad need --encoder for its vocabulary")
    if arguments.steps < 1:
        p.error("--steps: 1 or more")
    return speed(arguments)


if __name__ == "__main__":
    sys.exit(main_guard(lambda: main(sys.argv[1:])))
