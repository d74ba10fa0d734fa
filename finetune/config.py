"""The configuration tree of `finetune/run.py`; keys are listed by --help."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field, field_validator, model_validator

from configs.load import Config, LocalPath

LayerChoice = Literal[
    "embeddings",
    "second_to_last",
    "last",
    "sum_last_four",
    "concat_last_four",
    "weighted_sum",
]
LAYER_CHOICES = get_args(LayerChoice)


class EncoderConfig(Config):
    """Where the weights come from and what of them is trained."""

    path: LocalPath = Field(
        description="a pretraining run or checkpoint, a fine-tuned folder, or a Hugging Face "
        "BERT folder (config.json, model.safetensors, vocab.txt or tokenizer.json)"
    )
    init: Literal["pretrained", "random"] = Field(
        "pretrained", description="random: the shape and vocabulary of `path`, fresh weights"
    )
    lowercase: bool | None = Field(
        None, description="casing of the tokenizer; null: as the folder or its vocabulary says"
    )
    trained: Literal["all", "head"] = Field(
        "all", description="head: the encoder is frozen and only the task's own layer is trained"
    )
    dropout: float | None = Field(
        None,
        ge=0,
        le=0.99,
        description="of hidden states and attention while fine-tuning (the paper: 0.1, appendix "
        "A.3), with trained: head before the task's layer alone; null: as the folder says, which "
        "may have been pretrained without",
    )
    bilstm: int = Field(
        0,
        ge=0,
        le=65536,
        description="width, a direction, of a new BiLSTM between the encoder and the task's layer, "
        "as in section 5.1 of the paper; 0: none",
    )
    new_head: bool = Field(
        False, description="start the task's layers afresh even if the folder holds them"
    )


class GridConfig(Config):
    """Every combination is one job."""

    batch_size: tuple[int, ...] = Field((32,), min_length=1, description="examples a step")
    learning_rate: tuple[float, ...] = Field((3e-5,), min_length=1, description="peak rates")
    epochs: tuple[float, ...] = Field((3,), min_length=1, description="passes over the data")
    seeds: tuple[int, ...] = Field(
        (0,), min_length=1, description="restarts: data order, new layers and dropout"
    )

    @model_validator(mode="after")
    def _positive(self) -> GridConfig:
        for key in ("batch_size", "learning_rate", "epochs"):
            if min(getattr(self, key)) <= 0:
                raise ValueError(f"{key}: every value must be above 0")
        if min(self.seeds) < 0 or max(self.seeds) >= 2**63:
            raise ValueError("seeds: every value must be 0 or more and below 2^63")
        return self


class TrainConfig(Config):
    """One job."""

    warmup: float = Field(0.1, ge=0, le=1, description="fraction of the steps with a rising rate")
    weight_decay: float = Field(0.01, ge=0, description="on matrices, not biases or LayerNorms")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW: decay of the first moment")
    beta2: float = Field(0.999, ge=0, lt=1, description="AdamW: decay of the second moment")
    eps: float = Field(1e-6, gt=0, description="AdamW: added to the root of the second moment")
    clip: float = Field(1.0, ge=0, description="largest global gradient norm; 0: no clipping")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto",
        description="of the products; weights stay fp32. auto: bf16 where a GPU has it, else fp32",
    )
    micro_batch_tokens: int = Field(
        16384, ge=1, description="tokens computed at a time; a larger batch is accumulated"
    )
    evaluations_per_epoch: int = Field(1, ge=1, description="times the dev set is scored an epoch")
    select: Literal["best", "last"] = Field(
        "best", description="which weights of a job count: best on dev, or those of its end"
    )
    save_minutes: float = Field(
        10, ge=0, description="minutes between checkpoints to resume from, at least one an epoch"
    )
    keep_weights: Literal["best", "all", "none"] = Field(
        "best", description="of which jobs of a task the weights stay on disk"
    )
    predict_test: bool = Field(
        True, description="write test-set files, for jobs that are the best of their task so far"
    )
    train_examples: int = Field(
        0,
        ge=0,
        description="train on this many examples (NER: sentences, by whole documents), drawn by a "
        "fixed seed; 0: all",
    )
    dev_examples: int = Field(0, ge=0, description="score this many dev examples; 0: all")
    max_bad_share: float = Field(
        0.01, ge=0, le=1, description="largest share of bad records in a file to go on with"
    )


# Of the test sets of a table, columns, SQuAD's json.
_ANSWERS = re.compile(
    r"test(?:\.(?:csv|jsonl|txt)|_(?:nbest_predictions|null_odds|predictions)\.json)"
)


class TaskConfig(Config):
    """A section that describes a kind of task.

    reader: its `finetune.tasks.Task`, imported when it is run. choosing: keys that choose tasks and
    change none.
    """

    reader: ClassVar[str]
    choosing: ClassVar[frozenset[str]] = frozenset()
    max_seq_len: int

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tasks, each with jobs of its own."""
        raise NotImplementedError

    @property
    def files(self) -> dict[str, str]:
        """Those that are given, by the name of their set: train, dev, test."""
        keys = ((key.removesuffix("_file"), path) for key, path in self if key.endswith("_file"))
        return {name: path for name, path in keys if path}

    @property
    def inputs(self) -> dict[str, str]:
        """What is read of the data, by key."""
        return {f"{name}_file": path for name, path in self.files.items()}

    def submitted(self, task: str, file: str) -> str | None:
        """Where in run_dir/submission a prediction file of the best job goes; None: nowhere."""
        return f"{task}/{file}"

    def is_of(self, task: str, place: str) -> bool:
        """Whether a file of run_dir/submission answers a test set of the task."""
        name = place.removeprefix(f"{task}/")
        return name != place and _ANSWERS.fullmatch(name) is not None


class TextConfig(Config):
    """How texts are read of a table."""

    text: tuple[str, ...] = Field(
        ("text",),
        min_length=1,
        max_length=2,
        description="the column of the text, or of each of two",
    )
    quotes: bool | None = Field(
        None,
        description="csv, tsv: fields may stand in quotation marks; false: the marks are text; "
        "null: they may, but a tsv where such a field holds a line end or a tab is refused",
    )
    max_seq_len: int = Field(128, ge=8, description="tokens; longer texts lose their ends")

    @field_validator("text", mode="before")
    @classmethod
    def _one_column(cls, text: Any) -> Any:
        return (text,) if isinstance(text, str) else text


class SpanConfig(Config):
    """How contexts are cut into windows, and answers chosen in them."""

    version: Literal["1.1", "2.0"] = Field("1.1", description="2.0 has questions without answer")
    max_seq_len: int = Field(384, ge=32, description="tokens of a window with its question")
    stride: int = Field(128, ge=1, description="tokens between the starts of two windows")
    max_question_tokens: int = Field(64, ge=4, description="longer questions lose their end")
    max_answer_tokens: int = Field(30, ge=1, description="longest answer that is predicted")
    n_best: int = Field(20, ge=1, description="answers kept for the n-best file")

    @field_validator("version", mode="before")
    @classmethod
    def _number(cls, version: Any) -> Any:
        return str(version) if isinstance(version, float) else version

    @model_validator(mode="after")
    def _nothing_between_windows(self) -> SpanConfig:
        room = self.max_seq_len - self.max_question_tokens - 3
        if room < self.stride:
            raise ValueError(
                f"stride: {self.stride} is more than the {room} context tokens a window holds; "
                "text between windows would be lost"
            )
        return self


class TagConfig(Config):
    """How sentences of words are read and put into windows."""

    tokens: str = Field("tokens", description="column of the words; jsonl: a list of them")
    tags: str = Field(
        "tags", description="column of the tags (IOB1 or IOB2); jsonl: a list of them"
    )
    columns: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="names of the columns of a CoNLL file; null: the word is first, the tag last",
    )
    max_seq_len: int = Field(256, ge=16, description="tokens of a window")
    context: Literal["document", "sentence"] = Field(
        "document", description="document: windows are filled with neighbouring sentences"
    )

    @model_validator(mode="after")
    def _named(self) -> TagConfig:
        if self.columns is not None and self.tokens not in self.columns:
            raise ValueError(f"tokens: {self.tokens!r} is not one of columns")
        return self


def one_dev(section: Any) -> None:
    """ValueError unless the section has a dev file or a share of the training file."""
    if (section.dev_file is None) == (section.dev_share == 0):
        raise ValueError("dev_file: give either dev_file or dev_share")


Metric = Literal["accuracy", "f1_macro", "f1_micro", "matthews", "pearson", "spearman"]
METRICS: dict[str, tuple[Metric, ...]] = {
    "single": ("accuracy", "f1_macro", "f1_micro", "matthews"),
    "multi": ("f1_micro", "f1_macro", "accuracy"),
    "score": ("pearson", "spearman"),
}


# What a sweep and its report write beside the folders of tasks.
_OF_RUN_DIR = {"config.yaml", "lock", "report.csv", "report.lock", "report.md", "submission"}


class ClassifyConfig(TextConfig, TaskConfig):
    """A table of your own: csv, tsv, jsonl or parquet."""

    reader = "finetune.classify:Classify"

    name: str = Field(
        "classify", pattern=r"^\w[\w.-]*$", description="of the task, in folders and report"
    )
    train_file: LocalPath = Field(description="table with a header line; jsonl: one object a line")
    dev_file: LocalPath | None = Field(
        None, description="table of the same columns; null: see dev_share"
    )
    dev_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="without a dev file: this share of the training file is dev, of each class",
    )
    test_file: LocalPath | None = Field(
        None, description="predicted; scored if it has the label column"
    )
    label: str = Field(
        "label",
        min_length=1,
        description="the column of the label; labels are found in train_file",
    )
    kind: Literal["single", "multi", "score"] = Field(
        "single", description="single: one label a row; multi: any number of them; score: a number"
    )
    separator: str = Field(
        ",", min_length=1, description="multi: what stands between labels that are one text"
    )
    metric: Metric | None = Field(
        None,
        description="which measure on dev chooses; null: accuracy (single), f1_micro (multi), "
        "pearson (score)",
    )

    @model_validator(mode="after")
    def _checks(self) -> ClassifyConfig:
        one_dev(self)
        if self.name in _OF_RUN_DIR:
            raise ValueError(f"name: {self.name} stands in run_dir already")
        if self.metric not in (None, *METRICS[self.kind]):
            raise ValueError(f"metric: kind {self.kind} has {', '.join(METRICS[self.kind])}")
        return self

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Measures of the kind, the one that chooses first."""
        return tuple(dict.fromkeys([self.metric or METRICS[self.kind][0], *METRICS[self.kind]]))

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)


GlueName = Literal["CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI", "QNLI", "RTE", "WNLI"]


class GlueConfig(TaskConfig):
    """GLUE in the official layout: DIR/CoLA/train.tsv and so on."""

    reader = "finetune.glue:Glue"
    choosing = frozenset({"tasks"})

    dir: LocalPath = Field(description="folder with one folder a task")
    tasks: tuple[GlueName, ...] = Field(
        ("CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI", "QNLI", "RTE"),
        min_length=1,
        description="MNLI also predicts AX",
    )
    max_seq_len: int = Field(128, ge=8, description="tokens; longer pairs lose their ends")

    @property
    def names(self) -> tuple[str, ...]:
        return self.tasks

    @property
    def inputs(self) -> dict[str, str]:
        return {"dir": self.dir}

    def submitted(self, task: str, file: str) -> str | None:
        return None if file.startswith("dev") else file  # the leaderboard takes one folder

    def is_of(self, task: str, place: str) -> bool:
        name = place.removesuffix(".tsv")
        return name == task or (task == "MNLI" and name in ("MNLI-m", "MNLI-mm", "AX"))


class SquadConfig(SpanConfig, TaskConfig):
    """SQuAD 1.1 or 2.0 in the official json, or jsonl of id, question, context and answers."""

    reader = "finetune.squad:Squad"

    train_file: LocalPath = Field(
        description="official json, or jsonl: id, question, context, answers"
    )
    dev_file: LocalPath | None = Field(None, description="the same; null: see dev_share")
    dev_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="without a dev file: this share of the articles (jsonl: contexts) is dev",
    )
    test_file: LocalPath | None = Field(None, description="the same, answers not needed")

    @model_validator(mode="after")
    def _dev(self) -> SquadConfig:
        one_dev(self)
        return self

    @property
    def names(self) -> tuple[str, ...]:
        return (f"SQuAD-{self.version}",)


class SwagConfig(TaskConfig):
    """SWAG in the official csv."""

    reader = "finetune.swag:Swag"

    train_file: LocalPath = Field(description="train.csv")
    dev_file: LocalPath = Field(description="val.csv")
    test_file: LocalPath | None = Field(None, description="test.csv, without the label column")
    max_seq_len: int = Field(128, ge=8, description="tokens of one choice")

    @property
    def names(self) -> tuple[str, ...]:
        return ("SWAG",)


class NerConfig(TagConfig, TaskConfig):
    """CoNLL-2003: a token a line, an empty line between sentences; or jsonl, a sentence a line."""

    train_file: LocalPath = Field(description="CoNLL columns, or jsonl")
    dev_file: LocalPath = Field(description="the same")
    test_file: LocalPath | None = Field(None, description="the same")
    features: LayerChoice | None = Field(
        None,
        description="null: fine-tune; else the feature-based approach: this layer of the frozen "
        "encoder under a BiLSTM",
    )
    lstm_size: int = Field(
        768, ge=1, le=65536, description="features: width of the BiLSTM, a direction"
    )
    lstm_layers: int = Field(2, ge=1, le=1000, description="features: layers of the BiLSTM")
    lstm_dropout: float = Field(0.1, ge=0, lt=1, description="features: dropout on its inputs")
    cache_dir: LocalPath | None = Field(
        None, description="features: folder of computed features; null: run_dir/features"
    )

    @model_validator(mode="after")
    def _tagged(self) -> NerConfig:
        if self.columns is not None and self.tags not in self.columns:
            raise ValueError(f"tags: {self.tags!r} is not one of columns")
        return self

    @property
    def reader(self) -> str:
        return "finetune.features:FeatureNer" if self.features else "finetune.ner:Ner"

    @property
    def names(self) -> tuple[str, ...]:
        return (f"NER-{self.features}" if self.features else "NER",)


class FinetuneConfig(Config):
    """Exactly one of the sections that describe a task is given."""

    run_dir: LocalPath = Field(description="results, one folder a job")
    encoder: EncoderConfig
    classify: ClassifyConfig | None = None
    glue: GlueConfig | None = None
    squad: SquadConfig | None = None
    swag: SwagConfig | None = None
    ner: NerConfig | None = None
    grid: GridConfig = GridConfig()
    train: TrainConfig = TrainConfig()
    workers: int = Field(
        0,
        ge=0,
        le=1024,
        description="jobs at a time on this machine; 0: one a GPU, or one on a CPU",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: GPUs if any")
    threads: int = Field(0, ge=0, le=1024, description="CPU threads a job; 0: the cores shared out")

    @model_validator(mode="after")
    def _one_task(self) -> FinetuneConfig:
        given = [kind for kind in SECTIONS if getattr(self, kind) is not None]
        if len(given) != 1:
            found = ", ".join(given) or "none"
            raise ValueError(f"give exactly one of {', '.join(SECTIONS)} (given: {found})")
        if self.ner is not None and self.ner.features:
            if self.encoder.bilstm:
                raise ValueError(
                    "encoder.bilstm: ner.features has a BiLSTM already (ner.lstm_size)"
                )
            if self.encoder.dropout is not None:
                raise ValueError(
                    "encoder.dropout: ner.features trains no encoder; its own is ner.lstm_dropout"
                )
        return self

    @property
    def task(self) -> TaskConfig:
        """The section that is given."""
        return next(found for kind in SECTIONS if (found := getattr(self, kind)) is not None)

    @property
    def of_a_job(self) -> dict[str, Any]:
        """What the result of a job depends on, its point of the grid aside."""
        chosen = {kind: self.task.choosing for kind in SECTIONS if getattr(self, kind)}
        return self.model_dump(include={"encoder", "train", *SECTIONS}, exclude=chosen)


SECTIONS = tuple(
    name
    for name, field in FinetuneConfig.model_fields.items()
    if any(isinstance(t, type) and issubclass(t, TaskConfig) for t in get_args(field.annotation))
)
