# `make demo` trains a language model on a long document around a ring; `make test` checks everything.
# Both need Python >= 3.10 and pip, and make their own .venv. Variables:
#   PYTHON  the interpreter that .venv is made from (if it has a CUDA torch, that torch is used as it is)
#   TORCH   a requirement for another torch, for example TORCH='torch==2.11.0'
#   ARGS    further arguments of the demo, the tests or the linter
#   SECONDS, SEED  how long `make fuzz` draws random calls, and with which seed it begins
#   RANKS   on how many ranks at most, as processes on GPUs; without it ranks are threads on a CPU
SHELL := /bin/sh
PYTHON ?= python3
TORCH ?=
ARGS ?=
SECONDS ?= 60
SEED ?=
RANKS ?=
PY := .venv/bin/python
READY := .venv/ready.json

.PHONY: demo test test-gpu fuzz mutants models lint format clean

demo: $(READY)
	$(PY) examples/finetune_long_document.py $(ARGS)

# Without a GPU it leaves out the tests marked gpu and takes several processes (tests/conftest.py says how many; ARGS='-n 0' for one); with
# GPUs one process has them all. The many processes that tests start share compiled modules. `make lint` is among the tests.
test: $(READY)
	@$(PY) -c 'import sys, torch, xdist; sys.exit(torch.cuda.is_available())' 2>/dev/null && set -- -m "not gpu" -n auto --dist loadfile --no-loadscope-reorder; \
	unset PYTHONDONTWRITEBYTECODE; $(PY) -m pytest "$$@" $(ARGS)

test-gpu: $(READY)
	$(PY) -m pytest -m gpu $(ARGS)

fuzz: $(READY)
	$(PY) -m tests.fuzz --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(if $(RANKS),--gpu-ranks $(RANKS))

# mistakes of one line in a copy of the repository, each of which a test must notice; writes docs/lab/mutants.md
mutants: $(READY)
	$(PY) launch/repo/mutants.py $(ARGS)

# the language models of transformers on shards against one process; writes docs/lab/models.md
models: $(READY)
	$(PY) launch/repo/model_sweep.py $(ARGS)

lint: $(READY)
	$(PY) -m ruff check $(ARGS)
	$(PY) -m ruff format --check
	$(PY) -m pyrefly check --python-interpreter-path $(PY)

format: $(READY)
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

$(READY): pyproject.toml launch/repo/environment.py launch/repo/requirements.lock
	@TORCH="$(TORCH)" $(PYTHON) launch/repo/environment.py

clean:
	rm -rf .venv .venv.lock .pytest_cache .ruff_cache .hypothesis build dist runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
