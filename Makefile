# Each target sets up what it needs in .venv, and at once when that is there already.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(wildcard pipeline/*.c pipeline/*.h)
NAME ?= kernels
ARGS ?=

.PHONY: demo test lint bench docs clean

# Editable, so that a changed Python file needs no reinstall; a changed C file or pyproject does.
$(VENV)/.ready: pyproject.toml setup.py $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

demo: $(VENV)/.ready
	$(BIN)/kvstore demo $(ARGS)

# By two processes, since many tests wait for a disk or for another process; `ARGS="-n 0"` runs one after the other.
# Hundreds of tests start a process: one that may keep no bytecode compiles all of the package each time.
test: lint
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

# Type-checks what a user installs: the wheel, unpacked, where `kvstore.index` and its siblings resolve.
lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build  # what setuptools left there of modules that have moved would be installed, too
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	$(BIN)/python -m pip install --quiet --no-deps --target build/installed build/wheel/*.whl
	cd build/installed && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p kvstore
	cd build/installed && ../../$(BIN)/python -c "import kvstore, kvstore.index, kvstore.prefetch, kvstore.pipeline"

bench: $(VENV)/.ready
	$(BIN)/python -m bench.$(NAME) $(ARGS)

docs: $(VENV)/.ready
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist *.egg-info pipeline/*.so
