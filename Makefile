# Every target first sets up a virtual environment in .venv, with the versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS := $(VENV)/.docs-installed
MODEL ?=
ID ?=
ARGS ?=

.PHONY: setup check test bench mac-report demo serve show soak docs clean

setup: $(STAMP)

# uv is used where it is on the PATH. It does not read pip's settings, so pip follows where uv finds no packages.
define install
	@if command -v uv >/dev/null && uv pip install --python $(BIN)/python -c constraints.txt -e '.[$(1)]'; then :; \
	else $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[$(1)]'; fi
endef

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing Rootstock and its tools into $(VENV), about 1.6 GB on disk."
	@echo "A first time downloads about 400 MB, most of it torch; on Linux torch brings CUDA's libraries, gigabytes more,"
	@echo "unless the package index has the build for CPUs (uv: UV_TORCH_BACKEND=cpu)."
	$(call install,dev)
	@touch $@

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python bench/show/k1_way_of_a_request.py

# A process per processor, four at most: each of them loads torch and models. ARGS are further arguments for pytest.
test: setup
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal $(ARGS)

demo: setup
	$(BIN)/rootstock demo

serve: setup
	$(BIN)/rootstock serve $(MODEL)

# Workloads in every state of the cache with a plot, then the side-by-sides with others' code (an hour at most).
bench: setup
	$(BIN)/rootstock bench --workload agents,chat,fewshot,burst --out bench/results
	$(BIN)/python bench/plot_rows.py bench/results
	$(BIN)/python bench/side_by_sides.py --out bench/results

# Measures the MLX runtime on this Mac, in 10 to 20 minutes: a new file mlx-report.jsonl, to attach to an issue. Nothing is
# sent. ARGS are the script's: another file's name, --model DIR, or --small, which takes a minute or two without a Mac, too.
mac-report: setup
	$(BIN)/python bench/mac/mlx_report.py $(ARGS)

# `make show ID=A1` runs one acceptance script of bench/show or tests/soak, `make show` all of them. ARGS are its options.
show: setup
	$(BIN)/python bench/show/run.py $(ID) $(ARGS)

# Hours, by hand before a release: the long forms of the property tests, and the scripts of tests/soak.
soak: setup
	ROOTSTOCK_SOAK=1 $(BIN)/python -m pytest -o faulthandler_timeout=0 tests/property
	$(BIN)/python bench/show/run.py soak

# Generates docs/cli.md, and builds the site of docs/ in build/site, without the network.
docs: $(DOCS)
	$(BIN)/python -m rootstock.cli.reference > docs/cli.md.new && mv docs/cli.md.new docs/cli.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

$(DOCS): $(STAMP)
	$(call install,docs)
	@touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
