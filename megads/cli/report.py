"""`megads-report`: one HTML page about runs, to read in a browser or to send to someone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megads.cli.command import command_parser, guarded, new_file
from megads.extras import load_extra
from megads.report.page import build_page
from megads.report.runs import read_runs

_EXAMPLES = """\
examples:
  megads-report runs/mine
  megads-report runs/lr-1e-3 runs/lr-3e-4 --output compared.html

A run may still be going. To see the pipeline timeline of some of its steps, train with
logging.profile_steps=[50]; phases and times of ranks are in metrics.jsonl anyway.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 when the page is written, 2 without a run or plotly, 1 otherwise."""
    options = _parser().parse_args(arguments)

    def work() -> int:
        library = load_extra("plotly.offline", "the report").get_plotlyjs()
        page = build_page(read_runs(options.run), library)
        options.output.write_text(page, encoding="utf-8")
        print(f"wrote {options.output}")
        return 0

    return guarded("megads-report", work)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "megads-report",
        "Write one self-contained HTML page about runs: loss, validation, learning rate, gradient "
        "norm, throughput, memory by kind, phases of a step, the pipeline timeline of profiled "
        "steps beside the simulated one, and what the configurations differ in.",
        _EXAMPLES,
    )
    parser.add_argument(
        "run", type=Path, nargs="+", help="run.dir of a run of megads-train; several are overlaid"
    )
    parser.add_argument(
        "--output",
        type=new_file,
        default=Path("report.html"),
        help="the page to write (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
