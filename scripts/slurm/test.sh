#!/usr/bin/env bash
# The tests of tests/slurm on a SLURM of two nodes that is started for them on this machine.
#
#   scripts/slurm/test.sh [RECIPE]
#
# RECIPE is a directory with start_slurm.sh and stop_slurm.sh, which take a directory for the
# cluster's files and make the commands of SLURM find it by what they write there as env.sh. Without
# one, without the rights it needs, or where SLURM cannot be installed, the tests are skipped.
set -euo pipefail
cd "$(dirname "$0")/../.."
recipe=${1:-../shared/slurm}
python=${PYTHON:-.venv/bin/python}

skip() {
    echo "SLURM tests SKIPPED: $1"
    exit 0
}

[[ -x $recipe/start_slurm.sh ]] || skip "$recipe has no start_slurm.sh"
[[ $(id -u) == 0 ]] || skip "starting SLURM's daemons needs root"
cluster=$(mktemp -d)
trap '"$recipe/stop_slurm.sh" "$cluster" || true; rm -rf "$cluster"' EXIT
if ! "$recipe/start_slurm.sh" "$cluster"; then
    command -v slurmctld >/dev/null && { echo "SLURM is installed but does not start" >&2; exit 1; }
    skip "SLURM cannot be installed here"
fi
source "$cluster/env.sh"
MEGADS_SLURM_TEST=1 "$python" -m pytest tests/slurm
