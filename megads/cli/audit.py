"""`megads-preprocess audit`: did a run read every sample as planned?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megads.cli.command import command_parser, guarded
from megads.data.audit import AuditReport, audit

SHOWN = 20
"""Problems that are printed; the others are counted."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 when all is well, 1 naming the steps where it is not, 2 without a run."""
    options = _parser().parse_args(arguments)
    return guarded("megads-preprocess audit", lambda: _tell(audit(options.run)))


def _tell(report: AuditReport) -> int:
    print(_table(report))
    if not report.problems:
        print("every sample was read as planned: none repeated in its epoch, none lost")
        return 0
    for problem in report.problems[:SHOWN]:
        print(f"megads-preprocess audit: {problem}", file=sys.stderr)
    if len(report.problems) > SHOWN:
        print(f"... and {len(report.problems) - SHOWN} more problems", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "megads-preprocess audit",
        "Compute again, from the plan in a run's data-ledger.jsonl, which samples each step read, "
        "and check that none was repeated in its epoch or lost; what was left out on purpose is "
        "listed. Needs no data. Exit status 1 if anything is wrong.",
        "example:\n  megads-preprocess audit runs/mine\n",
    )
    parser.add_argument("run", type=Path, help="run.dir of a run of megads-train")
    return parser


def _table(report: AuditReport) -> str:
    width = max([6, *(len(source.name) for source in report.sources)])
    lines = [
        f"steps {report.first_step} to {report.last_step}, {report.samples} samples consumed; "
        f"{report.starts} start{'s' * (report.starts != 1)}, {report.rolled_back} rolled back "
        f"step{'s' * (report.rolled_back != 1)}",
        f"{'source':{width}} {'size':>12} {'read':>12} {'skipped':>9} {'epochs':>8} "
        f"{'share':>8} {'target':>8}",
    ]
    lines += [
        f"{source.name:{width}} {source.size:>12} {source.read:>12} {source.skipped:>9} "
        f"{source.epochs:>8.2f} {source.share:>8.2%} {source.target:>8.2%}"
        for source in report.sources
    ]
    lines += [f"rewound {rewind}" for rewind in report.rewinds]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
