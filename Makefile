# Every target sets up .venv as needed. Start with: make demo, make test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LLAMA := 0.3.36# version of llama-cpp-python for make llama-bench, gguf-check and llama-check
LLAMA_PYTHON := build/llama-cpp# environment of make gguf-check and llama-check
LM_EVAL := 0.4.13# version of lm-eval for make lm-eval-check
TRANSFORMER_LENS := 4.3.0# version of transformer-lens for make transformer-lens-check
TORCH := 2.13.0# version of torch for make constraints
SITE := $(BIN)/python docs/site/build.py --repository "$$(git remote get-url origin 2>/dev/null)"
# Without --no-compile pip compiles every module, of which the tests import half; Python compiles those when they are imported.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

# Compiled modules are kept, whatever the environment says: otherwise every process compiles handgrad, its tests and parts of
# transformers again, which takes seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo adapt coder-demo finetune-demo finetune-demo-peer example-norms-demo test quick run-tests long kernels-check lint style types browser node docs site release-check bench llama-bench gguf-check llama-check lm-eval-check transformer-lens-check \
	images constraints clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.ready
	$(BIN)/handgrad verify
	$(BIN)/handgrad train --steps 1200

adapt: $(VENV)/.ready  # pre-train on Shakespeare, then fine-tune an adapter (2 % of the parameters) on Python's sources
	rm -rf build/adapt && mkdir -p build/adapt
	$(BIN)/handgrad train --tokenizer bytes --steps 1200 --out build/adapt/shakespeare
	$(BIN)/python -c 'import pathlib, os; print("".join(p.read_text() for p in sorted(pathlib.Path(os.__file__).parent.glob("[a-f]*.py"))))' > build/adapt/python.txt
	$(BIN)/handgrad finetune --model build/adapt/shakespeare --data build/adapt/python.txt --out build/adapt/python \
		--rank 2 --lr 5e-3 --steps 600 --batch-examples 12 --eval-batches 30

finetune-demo: $(VENV)/.ready  # SmolLM2 learns from real instructions: losses and answers before and after
	rm -rf build/finetune-demo
	$(BIN)/python -m bench.demo

coder-demo: $(VENV)/.ready  # Qwen2.5-Coder 1.5B learns the style of a code base: losses and answers before and after, and GGUF out
	rm -rf build/coder-demo
	$(BIN)/python -m bench.demo coder-demo

finetune-demo-peer: $(VENV)/.ready-for-tests  # its first steps again, by transformers + peft; needs 16 GB of memory
	@test -d build/finetune-demo/run/adapter || $(MAKE) finetune-demo
	$(BIN)/python -m bench.demo --peer

example-norms-demo: $(VENV)/.ready  # garbage, wrong labels and exchanged answers found by losses and gradients, a fact by influence; on SmolLM2
	rm -rf build/example-norms-demo
	$(BIN)/python -m bench.example_demo

# Some cases of the largest tests, and not the longest tests: make long runs all. Chromium is installed while pip installs, and
# mypy, which uses one core, runs beside the tests.
test: export HANDGRAD_CASES := some
test:
	@$(MAKE) --no-print-directory -j2 style browser node
	@$(MAKE) --no-print-directory -j2 types run-tests

# What a change breaks first, in about a minute: style, types, the ops, the checks of one layer, every gradient of a small model.
quick: export HANDGRAD_CASES := some
quick: style types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --processes 2 tests/ops tests/test_rules.py
	$(BIN)/handgrad verify --only 'E-ln-*'
	$(BIN)/handgrad verify --model nano

# One process per core and one more, because many tests wait for processes; one thread each.
run-tests: $(VENV)/.ready-for-tests
	@$(BIN)/python -c 'from handgrad.text.downloads import fetch; [fetch(x) for x in ("shakespeare", "gpt2-tokenizer")]' || true  # once, before the workers start
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --processes $$($(BIN)/python -c 'import os; print(min(8, os.cpu_count() + 1))')

# The explain page is tested in a real browser: Debian's Chromium without windows, which needs half the time of the whole one,
# if it is or can be installed, or any installed Chromium. BROWSER=0: none.
browser:
	@if [ "$(BROWSER)" = 0 ]; then \
	  echo "────────────────────────────────────────────────────────────────────────────────────────"; \
	  echo "BROWSER=0: the browser tests of the explain page are SKIPPED."; \
	  echo "────────────────────────────────────────────────────────────────────────────────────────"; exit 0; \
	fi; \
	command -v chromium-headless-shell >/dev/null 2>&1 && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
	  echo "installing Chromium for the tests of the explain page"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium-headless-shell >/dev/null && exit 0; \
	fi; \
	for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null 2>&1 && exit 0; done; \
	if [ "$$CI" = true ]; then echo "CI=true but Chromium is missing: install it (apt-get install chromium), or set BROWSER=0"; exit 1; fi; \
	echo "────────────────────────────────────────────────────────────────────────────────────────"; \
	echo "Chromium is not installed: the browser tests of the explain page are SKIPPED."; \
	echo "────────────────────────────────────────────────────────────────────────────────────────"

# The page's JavaScript, and the engine that computes in the browser, are tested by node. One apt-get at a time.
node: | browser
	@command -v node >/dev/null 2>&1 && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
	  echo "installing node for the tests of the explain page"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq nodejs >/dev/null && exit 0; \
	fi; \
	if [ "$$CI" = true ]; then echo "CI=true but node is missing: install it (apt-get install nodejs)"; exit 1; fi; \
	echo "────────────────────────────────────────────────────────────────────────────────────────"; \
	echo "node is not installed: the tests of the explain page's JavaScript are SKIPPED."; \
	echo "────────────────────────────────────────────────────────────────────────────────────────"

long: export PYTEST_ADDOPTS := -o faulthandler_timeout=0  # longer than the limit of make test
long: $(VENV)/.ready-for-tests  # every test with all its cases, and what takes minutes each: every family in every way, audits of random models and shapes, corrupted files, broken formulas, masks, kills
	HANDGRAD_FAMILIES=all $(MAKE) --no-print-directory run-tests
	HANDGRAD_AUDITS=200 $(BIN)/python -m pytest tests/audit/test_audit.py -k random
	HANDGRAD_CORRUPTIONS=10000 $(BIN)/python -m pytest tests/test_corruption.py
	HANDGRAD_SHAPES=200 $(BIN)/python -m pytest tests/model/test_gpt.py -k random_shapes
	HANDGRAD_SEEDS=3 $(BIN)/python -m pytest tests/ledger/test_ledger.py
	HANDGRAD_MASKS=2000 HANDGRAD_FLIPS=200 $(BIN)/python -m pytest tests/kernels
	HANDGRAD_MASKS=2000 $(MAKE) --no-print-directory kernels-check
	for processes in 1 2; do for command in train finetune; do \
	  $(BIN)/python tests/kills.py --command $$command --processes $$processes --kills 100 --compile || exit 1; done; done
	$(BIN)/python tests/kills.py --kills 100 --errors

kernels-check: $(VENV)/.ready-for-tests  # kernels under address, undefined-behavior and thread sanitizers, and for arm64
	$(BIN)/python tests/kernels/check.py

lint: style types

style: $(VENV)/.ready-for-tests
	$(BIN)/ruff check src tests bench docs/site docs/notebooks docs/images
	$(BIN)/ruff format --check src tests bench docs/site docs/notebooks docs/images

types: $(VENV)/.ready-for-tests
	$(BIN)/mypy

images: $(VENV)/.ready-for-tests browser
	$(BIN)/python docs/images/make.py
	$(BIN)/python docs/images/screenshots.py

docs: $(VENV)/.ready-for-tests  # the documentation as a site that opens from the disk
	$(SITE)
	@echo "open build/site/index.html"

site: build/demo/index.html  # the site that is published: the documentation, and the explain page of models to try
	$(SITE) --demo build/demo
	@echo "open build/site/index.html"

build/demo/index.html: docs/site/demo.py $(shell find src/handgrad/explain_page -type f -not -name '*.pyc') | $(VENV)/.ready-for-tests
	$(BIN)/python docs/site/demo.py build/demo --model build/demo-model

# Build wheel and source archive, install the wheel into a new environment, and check the gradients there.
release-check: $(VENV)/.ready-for-tests
	rm -rf build/release && mkdir -p build/release
	$(BIN)/python -m build --outdir build/release
	$(PYTHON) -m venv build/release/venv
	build/release/venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt build/release/*.whl
	cd build/release && venv/bin/handgrad verify && venv/bin/handgrad verify --model nano && venv/bin/handgrad verify --model nano-llama

bench: $(VENV)/.ready-for-tests
	$(BIN)/handgrad bench

# A peer of bench generate: llama.cpp's own benchmark, from the source archive of llama-cpp-python. Takes ten minutes and a
# C++ compiler; cmake and ninja go into build/llama, and only the program into the environment.
llama-bench: $(VENV)/.ready
	rm -rf build/llama && mkdir -p build/llama
	$(PYTHON) -m venv build/llama/tools
	build/llama/tools/bin/python -m pip install --quiet --disable-pip-version-check cmake ninja
	build/llama/tools/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
		--dest build/llama llama-cpp-python==$(LLAMA)
	tar -xzf build/llama/llama_cpp_python-$(LLAMA).tar.gz --strip-components 1 -C build/llama
	build/llama/tools/bin/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/build/llama/tools/bin/ninja \
		-S build/llama/vendor/llama.cpp -B build/llama/made -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
		-DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF
	build/llama/tools/bin/cmake --build build/llama/made --target llama-bench
	cp build/llama/made/bin/llama-bench $(BIN)/

# llama.cpp, in a separate environment, opens files of handgrad convert --gguf; it must compute what we do. Building it takes ten
# minutes and a C++ compiler, the comparison five. With OpenBLAS (apt-get install libopenblas-dev) it computes packed weights
# without rounding to 8 bits what they multiply.
gguf-check: $(VENV)/.ready-for-tests $(LLAMA_PYTHON)/.ready
	$(BIN)/python tests/gguf_check.py --program $(LLAMA_PYTHON)/bin/python

llama-check: $(VENV)/.ready-for-tests $(LLAMA_PYTHON)/.ready  # perplexities and continuations of real models are llama.cpp's; needs 12 GB of disk
	$(BIN)/python tests/llama_cpp_check.py --program $(LLAMA_PYTHON)/bin/python

$(LLAMA_PYTHON)/.ready: Makefile
	$(PYTHON) -m venv $(LLAMA_PYTHON)
	CMAKE_ARGS="-DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF \
		$$(pkg-config --exists openblas 2>/dev/null && echo -DGGML_BLAS=ON -DGGML_BLAS_VENDOR=OpenBLAS)" \
		$(LLAMA_PYTHON)/bin/python -m pip install --quiet --disable-pip-version-check --no-cache-dir llama-cpp-python==$(LLAMA)
	@touch $@

# lm-eval, in a separate environment, scores a task over HTTP; the scores must be those of transformers.
lm-eval-check: $(VENV)/.ready-for-tests build/lm-eval/.ready
	$(BIN)/python tests/lm_eval_check.py --program build/lm-eval/bin/lm_eval --model smollm2

build/lm-eval/.ready: Makefile
	$(PYTHON) -m venv build/lm-eval
	build/lm-eval/bin/python -m pip install --quiet --disable-pip-version-check 'lm-eval[api]==$(LM_EVAL)' 'transformers>=5,<6'
	@touch $@

# TransformerLens, in a separate environment, must compute the same activations, gradients, patches and paths.
transformer-lens-check: $(VENV)/.ready-for-tests build/transformer-lens/.ready
	$(BIN)/python tests/transformer_lens_check.py --program build/transformer-lens/bin/python

build/transformer-lens/.ready: Makefile
	$(PYTHON) -m venv build/transformer-lens
	build/transformer-lens/bin/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH) 'transformer-lens==$(TRANSFORMER_LENS)' 'transformers>=5,<6'
	@touch $@

# The newest releases that pyproject.toml allows, except torch, whose version is raised here by hand: `pip install torch` without a
# version may fetch gigabytes of CUDA packages. Run the tests afterwards.
constraints:
	rm -rf build/constraints
	$(PYTHON) -m venv build/constraints
	build/constraints/bin/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH) --editable '.[test,tensorboard,parquet]'
	build/constraints/bin/python -m pip freeze --exclude-editable > build/constraints/installed.txt
	(echo '# The versions that are tested; written by: make constraints' && sed 's/+cpu$$//' build/constraints/installed.txt) > constraints.txt

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "handgrad needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "setting up $(VENV) (once; torch is large)"
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable .
	@touch $@

$(VENV)/.ready-for-tests: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[test]'
	@touch $(VENV)/.ready $@
