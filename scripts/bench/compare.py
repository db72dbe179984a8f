"""Compare megads-train with other software, side by side on this machine's CPU.

    python scripts/bench/compare.py --peers DIR --out compare.json
    python scripts/bench/compare.py --peers DIR --rows pp2 --dtypes bf16 --repeats 3 --tuned-peers
    python scripts/bench/compare.py --peers DIR --only megads --only 1f1b-6,2

DIR holds the peers' scripts, set up as their README says (their virtual environment is DIR/venv or
--peers-venv). Every contender of a row trains the same model on the same number of tokens with the
same optimizer settings; contenders alternate, and each run waits until other programs are quiet.
Only steps during which they stayed quiet count; a run without enough of them is repeated.

By default each contender is started as its users start it: megads-train sets up the C allocator of
its workers, the peers run as in their README. With --tuned-peers all of them get the same allocator
variables. bf16 means what each offers under that name: bf16 parameters with fp32 master weights
(megads, DeepSpeed, Megatron core) or autocast (the rest).
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import proc
from contenders import MEGADS, Peer, Row, Size, environment, megads_command, peer_command, rows
from runs import CLEAN_CORES, CORES, Run, run_megads, run_peer
from summary import summarize, table
from tokens import write_random_tokens

MIN_CLEAN_STEPS = 2
FOLDERS = re.compile(r"(?<![\w.])/(?:[^/\s\],\"]+/)+")
"""The folders of an absolute path."""


def parse_arguments() -> argparse.Namespace:
    """The command line; sizes are options so that a tiny model can try the whole driver."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path, required=True, help="folder of the peers' scripts")
    parser.add_argument("--peers-venv", type=Path, help="default: PEERS/venv")
    parser.add_argument(
        "--megads-train", type=Path, default=Path(sys.executable).parent / "megads-train"
    )
    parser.add_argument("--rows", default=",".join(rows(Size())))
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--only", action="append", metavar="CONTENDER", help="default: all")
    parser.add_argument("--compiled", action="store_true", help="run the compiled peers as well")
    parser.add_argument("--tuned-peers", action="store_true", help="allocator variables for all")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tries", type=int, default=3, help="of a repeat, until it is clean")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a run")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--max-wait", type=float, default=120, help="seconds to wait for quiet")
    parser.add_argument("--timeout", type=float, default=420, help="seconds for one run")
    parser.add_argument("--out", type=Path, help="JSON with every run; rewritten after each")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="to megads")
    for name, value in asdict(Size()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    args.peers_venv = (args.peers_venv or args.peers / "venv").absolute()
    unknown = set(args.rows.split(",")) - rows(Size()).keys()
    if unknown:
        parser.error(f"no row {', '.join(sorted(unknown))}; rows: {', '.join(rows(Size()))}")
    for path in (args.peers / "common.py", args.peers_venv / "bin" / "python", args.megads_train):
        if not path.exists():
            parser.error(f"{path} does not exist")
    return args


def measure(
    args: argparse.Namespace, row: Row, peer: Peer | None, dtype: str, repeat: int, tokens: Path
) -> Run:
    """Wait for a quiet machine, then run one contender once; `peer` None is megads."""
    size = Size(args.layers, args.hidden, args.heads, args.seq, args.vocab)
    steps = args.warmup + args.steps
    quiet = proc.wait_until_quiet(1.5 * CLEAN_CORES, args.max_wait)
    with tempfile.TemporaryDirectory(prefix="megads-bench-") as name:
        cwd = Path(name)
        if peer is None:
            executable = args.megads_train.absolute()
            command = megads_command(
                executable,
                row,
                size,
                dtype=dtype,
                steps=steps,
                tokens=tokens,
                run_dir=cwd / "run",
                overrides=args.set,
            )
            run = Run(
                row.name, dtype, MEGADS, repeat, row.world, command, eager=True, wait_foreign=quiet
            )
            env = environment(executable.parent, allocator=args.tuned_peers)
            run_megads(run, env, cwd, cwd / "run", args.timeout, row.global_batch * size.seq)
        else:
            bin_dir, report = args.peers_venv / "bin", cwd / "report.json"
            command = peer_command(
                peer,
                row,
                size,
                peers_dir=args.peers.absolute(),
                bin_dir=bin_dir,
                dtype=dtype,
                steps=steps,
                warmup=args.warmup,
                report=report,
            )
            run = Run(
                row.name,
                dtype,
                peer.name,
                repeat,
                row.world,
                command,
                eager=peer.eager,
                wait_foreign=quiet,
            )
            env = environment(bin_dir, allocator=args.tuned_peers)
            if row.world > 1:
                env["OMP_NUM_THREADS"] = "1"
            run_peer(run, env, cwd, report, args.timeout)
    run.check(steps, size.vocab)
    return run


def main() -> int:
    """Run everything asked for, print the table, write the JSON; 1 if a contender has no result."""
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    all_rows = rows(Size(args.layers, args.hidden, args.heads, args.seq, args.vocab))
    cases = [
        (all_rows[name], dtype) for name in args.rows.split(",") for dtype in args.dtypes.split(",")
    ]
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="megads-bench-data-") as name:
        tokens = Path(name) / "random"
        write_random_tokens(tokens, vocab=args.vocab, count=4096 * args.seq)
        for repeat in range(args.repeats):
            for row, dtype in cases:
                for peer in _contenders(args, row, repeat):
                    runs += _repeat(args, row, peer, dtype, repeat, tokens)
                    _write(args, runs)
    lines = summarize(runs, args.warmup)
    print(table(lines))
    asked = {(run.row, run.dtype, run.contender) for run in runs}
    return 0 if len(asked) == len(lines) else 1


def _contenders(args: argparse.Namespace, row: Row, repeat: int) -> list[Peer | None]:
    """Who runs in this row, in an order that turns from repeat to repeat; None is megads."""
    chosen: list[Peer | None] = [
        peer
        for peer in (None, *row.peers)
        if (peer is None or peer.eager or args.compiled)
        and (not args.only or (peer.name if peer else MEGADS) in args.only)
    ]
    turn = repeat % max(1, len(chosen))
    return chosen[turn:] + chosen[:turn]


def _repeat(
    args: argparse.Namespace, row: Row, peer: Peer | None, dtype: str, repeat: int, tokens: Path
) -> list[Run]:
    """Run one contender until a run is clean, at most --tries times, or until it fails."""
    runs: list[Run] = []
    for _ in range(args.tries):
        run = measure(args, row, peer, dtype, repeat, tokens)
        runs.append(run)
        clean = run.clean_steps(args.warmup)
        timed = " ".join(f"{seconds:.3f}" for seconds in run.step_s[args.warmup :])
        print(
            f"{time.strftime('%H:%M:%S')} {repeat} {row.name} {dtype} {run.contender}: "
            f"{run.problem or timed} ({len(clean)} clean; foreign "
            f"{max(run.foreign[args.warmup :], default=0.0):.2f}; {run.wall_s:.0f} s)",
            flush=True,
        )
        if run.problem or len(clean) >= min(MIN_CLEAN_STEPS, args.steps):
            break
    return runs


def _write(args: argparse.Namespace, runs: list[Run]) -> None:
    if args.out:
        settings = {key: str(value) for key, value in vars(args).items()} | {"cores": CORES}
        lines = [asdict(line) for line in summarize(runs, args.warmup)]
        content = {"settings": settings, "summary": lines, "runs": [asdict(run) for run in runs]}
        # Of this machine's paths only the names say something elsewhere.
        args.out.write_text(FOLDERS.sub("", json.dumps(content, indent=1)))


if __name__ == "__main__":
    raise SystemExit(main())
