from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megads.cli import preprocess_progress
from megads.cli.preprocess import main
from megads.cli.preprocess_progress import line
from megads.data import chunks, encoding
from megads.data.indexed import IndexedTokens
from megads.data.preprocess import PreprocessStats, Progress, preprocess
from megads.data.tokenizer import ByteTokenizer
from megads.data.unfinished import UnfinishedTokens
from megads.errors import DataError
from tests.cases import case

LONG = "long " * 2000


def documents(prefix: Path) -> list[list[int]]:
    file = IndexedTokens(prefix)
    return [file.document(d).tolist() for d in range(file.num_documents)]


@pytest.mark.parametrize("workers", [1, 2])
def test_same_bytes_as_megatron_from_the_same_text(workers: int, tmp_path: Path) -> None:
    text, tokenizer = case("text/topics_a.jsonl"), case("tokenizers/hf_bytelevel_bpe")
    expected = json.loads(case("data/topics_a_text_document.expected.json").read_text())
    stats = preprocess([text], str(tmp_path / "x"), str(tokenizer), workers=workers)
    for suffix in ("bin", "idx"):
        written = (tmp_path / f"x.{suffix}").read_bytes()
        assert hashlib.sha256(written).hexdigest() == expected[f"sha256_{suffix}"]
    assert stats == PreprocessStats(26, 0, 11755, 824, "uint16", 512)


@pytest.mark.parametrize("eod", [True, False])
def test_degenerate_records(eod: bool, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    lines = ["", " ", "a", "caf\u00e9\u6f22", "", LONG, "last"]
    body = b"\xef\xbb\xbf" + b"\r\n".join(json.dumps({"text": t}).encode() for t in lines[:4])
    body += b"\r\n\r\n  \n" + b"\n".join(json.dumps({"text": t}).encode() for t in lines[4:])
    source.write_bytes(body)  # byte order mark, CRLF, blank lines, no line end at the end
    stats = preprocess([source], str(tmp_path / "x"), "byte", append_eod=eod)
    wanted = [[*t.encode(), *([256] if eod else [])] for t in lines if t]
    assert documents(tmp_path / "x") == wanted
    assert (stats.documents, stats.empty) == (5, 2)
    assert stats.tokens == sum(map(len, wanted)) == (tmp_path / "x.bin").stat().st_size // 2
    assert stats.longest == len(LONG) + eod


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x"}', r"no key 'text'; the line has \['body'\]"),
        ('{"text": 3}', "'text' must be a string, found int"),
        ('{"text": null}', "found NoneType"),
        ('["text"]', "expected an object"),
        ('{"text": "x"', "not valid JSON"),
        ('{"text": "\xff"}', "not valid JSON"),
    ],
)
def test_bad_records_are_named_and_leave_nothing(line: str, message: str, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "fine"}\n\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(DataError, match=rf"a\.jsonl, line 3: .*{message}"):
        preprocess([source], str(tmp_path / "out" / "x"), "byte")
    assert list((tmp_path / "out").iterdir()) == []


def test_half_a_surrogate_pair_becomes_a_replacement_character(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d\\ude42 \\uD83D."}\n')
    preprocess([tmp_path / "a.jsonl"], str(tmp_path / "x"), "byte", append_eod=False)
    assert documents(tmp_path / "x") == [list("\U0001f642 \ufffd.".encode())]


def test_text_files(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_bytes(b"first\r\npage\fsecond\f\f")
    with gzip.open(tmp_path / "two.txt.gz", "wb") as file:
        file.write(b"whole")
    inputs = [tmp_path / "one.txt", tmp_path / "two.txt.gz"]
    stats = preprocess(inputs, str(tmp_path / "x"), "byte")
    wanted = [b"first\r\npage", b"second", b"whole"]
    assert documents(tmp_path / "x") == [[*text, 256] for text in wanted]
    assert stats.empty == 2
    preprocess(inputs, str(tmp_path / "y"), "byte", split_on="\r\n", append_eod=False)
    assert documents(tmp_path / "y") == [[*b"first"], [*b"page\fsecond\f\f"], [*b"whole"]]
    (tmp_path / "bad.txt").write_bytes(b"abc\xff")
    with pytest.raises(DataError, match=r"bad\.txt: not UTF-8 text at byte 3"):
        preprocess([tmp_path / "bad.txt"], str(tmp_path / "z"), "byte")


def test_workers_write_the_same_bytes(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        for i in range(700):
            file.write(json.dumps({"content": f"{i} " * (i % 23)}) + "\n")
    results = []
    for workers in (1, 2):
        stats = preprocess(
            [tmp_path / "a.jsonl.gz"],
            str(tmp_path / f"w{workers}"),
            "byte",
            json_key="content",
            workers=workers,
        )
        results.append(
            (stats, *[(tmp_path / f"w{workers}.{s}").read_bytes() for s in ("bin", "idx")])
        )
    assert results[0] == results[1]
    assert results[0][0].empty == len(range(0, 700, 23))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("hello")
    arguments = ["--input", str(tmp_path / "a.txt"), "--output", str(tmp_path / "x")]
    assert main([*arguments, "--no-append-eod"]) == 0
    assert documents(tmp_path / "x") == [[*b"hello"]]
    out = capsys.readouterr().out
    assert "documents  1 (and 0 empty" in out
    assert "tokens     5 " in out
    assert "257, stored as uint16" in out
    assert main(["--input", str(tmp_path / "none.txt"), "--output", str(tmp_path / "y")]) == 2
    assert "none.txt: no such file" in capsys.readouterr().err


def test_a_tokenizer_without_an_end_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text("not read")
    arguments = ([tmp_path / "a.jsonl"], str(tmp_path / "x"), str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"tokenizer\.json has no end-of-document token"):
        preprocess(*arguments)
    (tmp_path / "a.jsonl").write_text('{"text": "b"}')
    assert preprocess(*arguments, append_eod=False).tokens == 1


JOB = """
import sys
from megads.data.preprocess import preprocess

def step(progress):
    print(progress.documents, flush=True)
    sys.stdin.readline()

if __name__ == "__main__":
    source, output, workers = sys.argv[1:]
    preprocess([source], output, "byte", workers=int(workers), commit_every=0, on_progress=step)
"""


def write_numbers(path: Path, count: int) -> None:
    """Documents of different lengths, a MiB in about 500 of them."""
    lines = (json.dumps({"text": f"{i} " * (i % 800)}) + "\n" for i in range(count))
    data = "".join(lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def test_a_full_disk_is_told_and_continued(tmp_path: Path) -> None:
    """The real command, of which no file may grow beyond 2 MB at first."""
    write_numbers(tmp_path / "a.jsonl", 3000)
    preprocess([tmp_path / "a.jsonl"], str(tmp_path / "whole"), "byte")
    command = [sys.executable, "-m", "megads.cli.preprocess", "--input", "a.jsonl", "--output", "x"]

    def run(limit: int) -> subprocess.CompletedProcess[str]:
        sizes = (limit, resource.RLIM_INFINITY)
        return subprocess.run(
            command,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, sizes),
        )

    full = run(2_000_000)
    assert full.returncode == 1 and "cannot write x: File too large" in full.stderr
    assert "Traceback" not in full.stderr and not (tmp_path / "x.bin").exists()
    assert run(resource.RLIM_INFINITY).returncode == 0
    for end in ("bin", "idx"):
        assert (tmp_path / f"x.{end}").read_bytes() == (tmp_path / f"whole.{end}").read_bytes()


@pytest.mark.parametrize(("suffix", "workers"), [("", 2), (".gz", 1)])
def test_a_killed_run_is_continued(suffix: str, workers: int, tmp_path: Path) -> None:
    source = tmp_path / f"a.jsonl{suffix}"
    write_numbers(source, 3000)
    whole: list[Progress] = []
    expected = preprocess([source], str(tmp_path / "whole"), "byte", on_progress=whole.append)
    steps = random.randrange(1, len(whole) - 1)
    (tmp_path / "job.py").write_text(JOB)
    command = [sys.executable, str(tmp_path / "job.py"), str(source), str(tmp_path / "x")]
    with subprocess.Popen(
        [*command, str(workers)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdin is not None and job.stdout is not None
        for _ in range(steps):  # the job waits after each chunk
            assert job.stdout.readline()
            job.stdin.write("\n")
            job.stdin.flush()
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        job.send_signal(signal.SIGKILL)
        job.wait()
    assert len(children) >= workers if workers > 1 else not children
    assert not (tmp_path / "x.bin").exists()
    again: list[Progress] = []
    stats = preprocess([source], str(tmp_path / "x"), "byte", workers=2, on_progress=again.append)
    assert stats == expected
    assert 0 < stats.bytes_continued < stats.input_bytes == expected.input_bytes
    assert len(whole) - steps - 1 <= len(again) <= len(whole) - steps
    for end in ("bin", "idx"):
        assert (tmp_path / f"x.{end}").read_bytes() == (tmp_path / f"whole.{end}").read_bytes()
    assert not (tmp_path / "x.partial").exists()
    for _ in range(100):  # nobody is left of the killed run
        if not any(Path(f"/proc/{child}").exists() for child in children):
            break
        time.sleep(0.1)
    else:
        pytest.fail(f"still there: {children}")


def interrupted(source: Path, prefix: Path, steps: int = 2) -> None:
    """A run that Ctrl-C ends after so many chunks."""
    seen: list[Progress] = []

    def stop(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) == steps:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preprocess([source], str(prefix), "byte", on_progress=stop)
    assert (Path(f"{prefix}.partial") / "state.json").exists()


def test_only_the_same_job_is_continued(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    write_numbers(source, 1500)
    fresh = preprocess([source], str(tmp_path / "fresh"), "byte")
    state = tmp_path / "x.partial" / "state.json"

    def other_options() -> dict[str, bool]:
        return {"append_eod": False}

    def touched() -> None:
        os.utime(source, ns=(1, 1))

    def torn() -> None:
        state.write_bytes(state.read_bytes()[:20])

    def short() -> None:
        os.truncate(state.with_name("tokens.bin"), 1000)

    def foreign() -> None:
        state.write_text(json.dumps({"job": "another"}))

    def tail() -> None:
        with state.with_name("tokens.bin").open("ab") as file:
            file.write(b"behind the mark")

    for change in (lambda: None, tail, other_options, touched, torn, short, foreign):
        interrupted(source, tmp_path / "x")
        options: dict[str, Any] = change() or {}
        stats = preprocess([source], str(tmp_path / "x"), "byte", **options)
        assert (stats.bytes_continued > 0) == (change.__name__ in ("<lambda>", "tail")), change
        assert stats.documents == fresh.documents
        if not options:
            for end in ("bin", "idx"):
                made = (tmp_path / f"x.{end}").read_bytes()
                assert made == (tmp_path / f"fresh.{end}").read_bytes()


def test_what_is_there_stays_until_the_new_is_complete(tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_text("old")
    preprocess([tmp_path / "old.txt"], str(tmp_path / "x"), "byte")
    write_numbers(tmp_path / "a.jsonl", 1500)
    interrupted(tmp_path / "a.jsonl", tmp_path / "x")
    assert documents(tmp_path / "x") == [[*b"old", 256]]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("megads.data.unfinished.fcntl.flock", flock)
    (tmp_path / "a.txt").write_text("a")
    assert preprocess([tmp_path / "a.txt"], str(tmp_path / "x"), "byte").tokens == 2


def test_a_lock_that_stays_until_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS keeps an open file that is removed under another name in its folder."""
    (tmp_path / "a.txt").write_text("a")
    job = UnfinishedTokens(str(tmp_path / "x"), np.dtype("<u2"), "job", 5)
    unlink, kept = Path.unlink, job.folder / ".nfs1"

    def silly(self: Path, missing_ok: bool = False) -> None:
        if self.name == "lock":
            kept.touch()
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", silly)
    job.discard()
    monkeypatch.undo()
    kept.unlink()
    assert preprocess([tmp_path / "a.txt"], str(tmp_path / "x"), "byte").tokens == 2


def test_tokens_that_cannot_be_put_in_place_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "x.bin/in the way").mkdir(parents=True)
    with pytest.raises(OSError):
        preprocess([tmp_path / "a.txt"], str(tmp_path / "x"), "byte")
    assert (tmp_path / "x.partial/tokens.bin").stat().st_size == 2 * len("some text\0")
    shutil.rmtree(tmp_path / "x.bin")
    stats = preprocess([tmp_path / "a.txt"], str(tmp_path / "x"), "byte")
    assert stats.bytes_continued > 0 and documents(tmp_path / "x") == [[*b"some text", 256]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "x.bin", "x.idx"]


def test_an_input_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    opened = Path.open

    def forbidden(self: Path, *arguments: Any, **words: Any) -> Any:
        if self.name == "a.jsonl":
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(self, *arguments, **words)

    monkeypatch.setattr(Path, "open", forbidden)
    with pytest.raises(DataError, match=r"a\.jsonl: cannot be read: Permission denied"):
        preprocess([tmp_path / "a.jsonl"], str(tmp_path / "x"), "byte")


def test_two_runs_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    job = UnfinishedTokens(str(tmp_path / "x"), np.dtype("<u2"), "job", 5)
    with pytest.raises(DataError, match=r"x\.partial: another process is writing"):
        preprocess([tmp_path / "a.txt"], str(tmp_path / "x"), "byte")
    job.discard()
    assert preprocess([tmp_path / "a.txt"], str(tmp_path / "x"), "byte").tokens == 2


def plain_index(prefix: Path) -> tuple[int, bytes]:
    """Number type and tokens of a file, read without the code that is tested."""
    code = struct.unpack_from("<9sQB", (prefix.with_suffix(".idx")).read_bytes())[2]
    return code, prefix.with_suffix(".bin").read_bytes()


def word_tokenizer(path: Path, words: int, unknown: str = "w0") -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({f"w{i}": i for i in range(words)}, unk_token=unknown)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.save(str(path))


@pytest.mark.parametrize("size", [65499, 65500, 65501, 65535, 65536, 65537, 100_000])
def test_the_number_type_holds_the_last_id(size: int, tmp_path: Path) -> None:
    word_tokenizer(tmp_path / "tokenizer.json", size)
    (tmp_path / "a.txt").write_text(f"w1 w{size - 1} w0")
    stats = preprocess(
        [tmp_path / "a.txt"],
        str(tmp_path / "x"),
        str(tmp_path / "tokenizer.json"),
        append_eod=False,
    )
    # Codes of the format: 8 is uint16, 4 is int32; Megatron changes at 65,500 ids.
    code, data = plain_index(tmp_path / "x")
    assert code == (8 if size < 65500 else 4)
    item = "H" if code == 8 else "i"
    assert struct.unpack(f"<3{item}", data) == (1, size - 1, 0)
    assert stats.vocab_size == size and stats.dtype == ("uint16" if code == 8 else "int32")


def test_an_id_that_the_tokenizer_denies_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("abc")
    monkeypatch.setattr(ByteTokenizer, "vocab_size", 99)  # c is 99
    with pytest.raises(DataError, match=r"a\.txt.*tokenizer byte gave the id 99, .*has 99 ids"):
        preprocess([tmp_path / "a.txt"], str(tmp_path / "x"), "byte", append_eod=False)
    monkeypatch.setattr(ByteTokenizer, "vocab_size", 100)
    assert preprocess([tmp_path / "a.txt"], str(tmp_path / "x"), "byte", append_eod=False).tokens


def test_a_document_longer_than_the_format_can_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("short\f" + "x" * 20)
    monkeypatch.setattr(encoding, "MAX_SEQUENCE", 20)
    with pytest.raises(DataError, match=r"a\.txt.*document of 21 tokens; .*at most 20"):
        preprocess([tmp_path / "a.txt"], str(tmp_path / "x"), "byte")
    assert preprocess([tmp_path / "a.txt"], str(tmp_path / "x"), "byte", append_eod=False).longest


def test_a_line_longer_than_several_chunks(tmp_path: Path) -> None:
    lines = ["first", "y" * 3_500_000, "last"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in lines))
    for workers in (1, 2):
        preprocess([tmp_path / "a.jsonl"], str(tmp_path / "x"), "byte", workers=workers)
        assert documents(tmp_path / "x") == [[*t.encode(), 256] for t in lines]


def test_unknown_ids_are_counted(tmp_path: Path) -> None:
    word_tokenizer(tmp_path / "tokenizer.json", 9, unknown="w5")
    (tmp_path / "a.txt").write_text("w1 strange w2\fodd ones w5")
    arguments = ([tmp_path / "a.txt"], str(tmp_path / "x"), str(tmp_path / "tokenizer.json"))
    stats = preprocess(*arguments, append_eod=False)
    assert documents(tmp_path / "x") == [[1, 5, 2], [5, 5, 5]]
    assert (stats.tokens, stats.unknown) == (6, 4)


@pytest.mark.parametrize("fallback", [True, False])
def test_byte_fallback_leaves_nothing_unknown(fallback: bool, tmp_path: Path) -> None:
    spm = pytest.importorskip("sentencepiece")
    (tmp_path / "t.txt").write_text("\n".join(f"the cat number {i} sat" for i in range(300)))
    spm.SentencePieceTrainer.Train(
        input=str(tmp_path / "t.txt"),
        model_prefix=str(tmp_path / "m"),
        vocab_size=300 if fallback else 60,
        model_type="bpe",
        byte_fallback=fallback,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    text = "caf\u00e9 \u6f22\U0001f600\n\t"
    (tmp_path / "a.txt").write_text(text)
    stats = preprocess([tmp_path / "a.txt"], str(tmp_path / "x"), str(tmp_path / "m.model"))
    direct = spm.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    assert documents(tmp_path / "x") == [[*direct.encode(text), direct.eos_id()]]
    assert (stats.unknown == 0) == fallback


def test_one_end_per_document_where_the_tokenizer_adds_its_own(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {f"w{i}": i for i in range(99)} | {"<unk>": 99}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<bos>", "<|endoftext|>"])
    backend.add_tokens(["<tool>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A <|endoftext|>", special_tokens=[("<bos>", 100), ("<|endoftext|>", 101)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    assert backend.encode("w1").ids == [100, 1, 101]  # what must not happen here
    (tmp_path / "a.txt").write_text("w1 <tool> w98\fw2")
    arguments = ([tmp_path / "a.txt"], str(tmp_path / "x"), str(tmp_path / "tokenizer.json"))
    stats = preprocess(*arguments)
    assert documents(tmp_path / "x") == [[1, 102, 98, 101], [2, 101]]
    assert stats.vocab_size == 103
    preprocess(*arguments, append_eod=False)
    assert documents(tmp_path / "x") == [[1, 102, 98], [2]]


def test_progress(tmp_path: Path) -> None:
    write_numbers(tmp_path / "a.jsonl", 1500)
    seen: list[Progress] = []
    stats = preprocess([tmp_path / "a.jsonl"], str(tmp_path / "x"), "byte", on_progress=seen.append)
    assert [p.documents for p in seen] == sorted({p.documents for p in seen})
    assert seen[-1].documents == stats.documents + stats.empty == 1500
    assert seen[-1].fraction == 1 and seen[-1].seconds_left == 0
    assert stats.input_bytes == (tmp_path / "a.jsonl").stat().st_size
    size = chunks.CHUNK_BYTES / stats.input_bytes
    assert [p.fraction for p in seen[:-1]] == [pytest.approx(i * size) for i in range(1, len(seen))]
    for p in seen[:-1]:
        elapsed = p.fraction * stats.input_bytes / p.bytes_per_second  # type: ignore[operator]
        assert p.seconds_left == pytest.approx(elapsed * (1 - p.fraction) / p.fraction)  # type: ignore[operator]
    shown = line(Progress(1200, 240.4, 3.14e6, 0.4, 3671.2))
    assert shown == "1200 documents, 240/s, 3.1 MB/s, 40%, 1:01:11 left"
    assert line(Progress(1, 2, 3, None, None)) == "1 documents, 2/s, 0.0 MB/s"


def test_progress_without_a_terminal_is_a_line_at_times(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 4.0, 11.0, 11.0, 15.0])
    monkeypatch.setattr(preprocess_progress.time, "monotonic", lambda: next(clock))
    with preprocess_progress.ProgressDisplay() as display:
        for documents in (4, 11, 15):
            display(Progress(documents, 1, 1, None, None))
    captured = capsys.readouterr()
    assert captured.err == "11 documents, 1/s, 0.0 MB/s\n" and captured.out == ""


def test_the_other_uses_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    for name in ("merge", "inspect", "verify", "train-tokenizer", "audit"):
        assert f"megads-preprocess {name} " in shown
        with pytest.raises(SystemExit) as stopped:
            main([name, "--help"])
        assert stopped.value.code == 0
        assert name in capsys.readouterr().out
