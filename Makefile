# Everything is set up in .venv by the targets themselves. Try: make demo, make test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo adapt test long lint bench images clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.ready
	$(BIN)/handgrad verify
	$(BIN)/handgrad train --steps 1200

adapt: $(VENV)/.ready  # Shakespeare, then Python's own sources through an adapter with 2 % of the parameters
	rm -rf build/adapt && mkdir -p build/adapt
	$(BIN)/handgrad train --tokenizer bytes --steps 1200 --out build/adapt/shakespeare
	$(BIN)/python -c 'import pathlib, os; print("".join(p.read_text() for p in sorted(pathlib.Path(os.__file__).parent.glob("[a-f]*.py"))))' > build/adapt/python.txt
	$(BIN)/handgrad finetune --model build/adapt/shakespeare --data build/adapt/python.txt --out build/adapt/python \
		--rank 2 --lr 5e-3 --steps 600 --batch-examples 12 --eval-batches 30

test: lint
	$(BIN)/python -m pytest

long: $(VENV)/.ready-for-tests  # proofs that take minutes each
	HANDGRAD_KILLS=30 $(BIN)/python -m pytest tests/test_train.py -k killed

lint: $(VENV)/.ready-for-tests
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench
	$(BIN)/mypy

images: $(VENV)/.ready-for-tests
	$(BIN)/python docs/images/make.py

bench: $(VENV)/.ready-for-tests
	$(BIN)/handgrad bench

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "handgrad needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "setting up $(VENV) (once; torch is large)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	@touch $@

$(VENV)/.ready-for-tests: $(VENV)/.ready
	$(PIP) --editable '.[test]'
	@touch $@
