"""Tokenizing 50 MB of JSON lines, beside what the bare tokenizer takes for the same texts.

    python scripts/bench/preprocess.py --tokenizer T [T ...] [--megabytes 50] [--repeats 3]
        [--directory DIR] [--json F]

T: a tokenizer.json or a sentencepiece .model. The texts are made from the corpus in the package;
in a fifth of the paragraphs the letters are exchanged, differently each time, so that a cache of
words does not answer for the tokenizer. In each repeat everything runs once, in turn, in a process
of its own, so that a slow minute of the machine is everybody's:

- bare: texts in memory, ids thrown away, the library's own threads, 1 and 2. `encode_batch` of
  `tokenizers`, `Encode(num_threads=)` of `sentencepiece`.
- megads: all of `megads-preprocess` after its imports, with 1 and 2 workers: starting them, reading
  and parsing the file, tokenizing, and the finished .bin and .idx on the disk.

Prints medians of the seconds on the clock and of the processor, and bare / megads for both: 1 means
that reading and writing cost nothing. Where other programs run, the clock tells more about them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import shutil
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import megads.data

CORPUS = Path(megads.data.__file__).parent / "corpus" / "shakespeare.txt.gz"
BATCH = 1000
VOWELS, CONSONANTS = "aeiou", "bcdfghjklmnpqrstvwxyz"
Times = dict[str, float]


def documents(megabytes: float) -> Iterator[str]:
    """Texts of a few hundred to several thousand characters, so many megabytes in all."""
    rng = random.Random(0)
    paragraphs = gzip.decompress(CORPUS.read_bytes()).decode().replace("\f", "\n\n").split("\n\n")
    left = megabytes * 1e6
    while left > 0:
        chosen = rng.choices(paragraphs, k=rng.randrange(2, 40))
        text = "\n\n".join(p.translate(exchange(rng)) if rng.random() < 0.2 else p for p in chosen)
        left -= len(text) + text.count("\n") + 13
        yield text


def exchange(rng: random.Random) -> dict[int, str]:
    """Vowels for vowels, consonants for consonants."""
    table = {}
    for letters in (VOWELS, CONSONANTS):
        table |= dict(zip(letters, rng.sample(letters, len(letters)), strict=True))
    upper = zip(string.ascii_lowercase, string.ascii_uppercase, strict=True)
    return str.maketrans(table | {up: table[low].upper() for low, up in upper})


def bare(source: Path, tokenizer: Path, threads: int) -> Times:
    """Time for the tokenizer alone; for Hugging Face's the environment sets the threads."""
    with source.open("rb") as file:
        texts = [json.loads(line)["text"] for line in file]
    if tokenizer.suffix == ".json":
        from tokenizers import Tokenizer

        model = Tokenizer.from_file(str(tokenizer))

        def encode(batch: list[str]) -> None:
            model.encode_batch(batch, add_special_tokens=False)

    else:
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))

        def encode(batch: list[str]) -> None:
            model.Encode(batch, num_threads=threads)

    start, processor = time.perf_counter(), time.process_time()
    for first in range(0, len(texts), BATCH):
        encode(texts[first : first + BATCH])
    return {"clock": time.perf_counter() - start, "processor": time.process_time() - processor}


def whole(source: Path, tokenizer: Path, workers: int) -> Times:
    """Time for the command's work; the processor's includes what the workers need to start."""
    from megads.data.preprocess import preprocess  # not above, where each worker would load it too

    processor, start = time.process_time(), time.perf_counter()
    stats = preprocess([source], str(source.with_suffix("")), str(tokenizer), workers=workers)
    assert stats.unknown == 0 and stats.bytes_continued == 0
    usage = time.process_time() - processor + children_seconds()
    return {"clock": time.perf_counter() - start, "processor": usage}


def children_seconds() -> float:
    """Processor time of the processes that this one started and that have ended."""
    import resource

    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measured(kind: str, source: Path, tokenizer: Path, count: int) -> Times:
    """One run in a process of its own."""
    command = ["env", f"RAYON_NUM_THREADS={count}", "TOKENIZERS_PARALLELISM=true"]
    command += [sys.executable, __file__, "--run", kind, str(source), str(tokenizer), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    times: Times = json.loads(done.stdout)
    return times


def compare(source: Path, tokenizer: Path, repeats: int) -> dict[str, dict[str, list[float]]]:
    """All four, in turn, so many times; seconds by name and clock."""
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(repeats):
        for count in (1, 2):
            for kind in ("bare", "megads"):
                for clock, seconds in measured(kind, source, tokenizer, count).items():
                    found.setdefault(f"{kind} {count}", {}).setdefault(clock, []).append(seconds)
    return found


def report(name: str, size: int, found: dict[str, dict[str, list[float]]]) -> None:
    """Medians and ratios of one tokenizer."""
    middle = {
        k: {c: statistics.median(v) for c, v in clocks.items()} for k, clocks in found.items()
    }
    print(f"{name}, {size / 1e6:.1f} MB")
    for kind, clocks in middle.items():
        rate = size / clocks["clock"] / 1e6
        print(
            f"  {kind:9} {clocks['clock']:7.2f} s  {rate:6.2f} MB/s, "
            f"processor {clocks['processor']:7.2f} s"
        )
    for count in (1, 2):
        ratio = {
            c: middle[f"bare {count}"][c] / middle[f"megads {count}"][c] for c in middle["bare 1"]
        }
        print(
            f"  {count}: bare / megads {ratio['clock']:.2f} on the clock, "
            f"{ratio['processor']:.2f} of the processor"
        )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokenizer", type=Path, nargs="+", default=[])
    parser.add_argument("--megabytes", type=float, default=50)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="where the files go while it runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        kind, source, tokenizer, count = options.run
        run = bare if kind == "bare" else whole
        print(json.dumps(run(Path(source), Path(tokenizer), int(count))))
        return
    place = Path(tempfile.mkdtemp(prefix="megads-bench-", dir=options.directory))
    results = {}
    try:
        source = place / "texts.jsonl"
        with source.open("w") as file:
            file.writelines(
                json.dumps({"text": text}) + "\n" for text in documents(options.megabytes)
            )
        size = source.stat().st_size
        for tokenizer in options.tokenizer:
            found = compare(source, tokenizer, options.repeats)
            report(tokenizer.name, size, found)
            results[tokenizer.name] = {"bytes": size, "seconds": found}
    finally:
        shutil.rmtree(place)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
