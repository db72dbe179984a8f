# Everything here needs python3 (3.11 or newer) and make; the rest goes into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEVELOPING := $(VENV)/.developing

.PHONY: setup demo test slurm-test check clean

setup: $(DEVELOPING)

$(INSTALLED): EXTRAS :=
$(DEVELOPING): EXTRAS := [dev]
$(INSTALLED) $(DEVELOPING): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "megads needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Try PYTHON=python3.12 make"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.$(EXTRAS)'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/megads-train model=gpt-tiny parallel=tp2pp2 launch.backend=gloo run.dir=runs/demo
	$(BIN)/megads-generate runs/demo

test: setup
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

slurm-test: setup
	PYTHON=$(BIN)/python scripts/slurm/test.sh $(SLURM_RECIPE)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
