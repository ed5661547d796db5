# Everything needs only Python 3.11+, make and git. `make` alone lists the targets.
PYTHON ?= python3
VENV ?= .venv

BIN := $(abspath $(VENV))/bin
STAMP := $(VENV)/.installed
ENGINES ?= .engines
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# For what the recipes start in turn: pipeline stages call `python`, dvc is found by name.
export PATH := $(BIN):$(PATH)
# Dozens of processes import torch, transformers and peft: 9 s each with bytecode, 23 s where a shell asks for none to be
# written and every process compiles the sources again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help env repro rules test test-all engines hashes smoke lab docs clean

help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z0-9-]+):.*## /  make \1\t/'

env: $(STAMP) ## create or update the environment in .venv

# torch has a file for each platform and accelerator, so it comes first, by its version alone; all others by their hashes.
$(STAMP): pyproject.toml constraints.txt requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11: name a newer one, make PYTHON=python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -c constraints.txt torch
	$(INSTALL) --no-deps --require-hashes -r requirements.txt
	$(INSTALL) --no-deps -e .
	$(BIN)/python -m pip check --disable-pip-version-check
	@touch $@

# DVC runs one stage at a time, so make runs `dvc repro` for each, in the order of DVC's own graph. Each has one thread:
# two on one stage take four fifths of the time of one.
JOBS ?= 2
repro: export OMP_NUM_THREADS ?= 1
repro: env ## every experiment that is not up to date, two stages at a time (JOBS=4: four)
	@mkdir -p .workspaces
	@$(MAKE) -s rules > .workspaces/stages.mk
	@$(MAKE) -s -j $(JOBS) -f .workspaces/stages.mk all

# A line "stage"; is a node, a line "one" -> "other"; an edge.
rules: # of make, for the stages
	@$(BIN)/dvc dag --dot | awk -F '"' 'NF == 5 { print $$4 ".stage: " $$2 ".stage" } \
		NF == 3 { print "all: " $$2 ".stage\n" $$2 ".stage: ; @$(BIN)/dvc --wait-for-lock repro -s " $$2 }'

# In a copy, so that what is published stays what it is. DVC's lock and cache there are its own. Three notebooks, which
# read what the stages before them make; `make test` runs all of them at toy sizes.
smoke: env ## the pipeline on a tiny model, in .workspaces/smoke
	mkdir -p .workspaces/smoke
	git ls-files -z --cached --others --exclude-standard -- . ':!outputs' ':!dvc.lock' \
		| tar --null -T - -cf - | tar -xf - -C .workspaces/smoke
	cd .workspaces/smoke && cp params/smoke/suite.yaml params/suite.yaml \
		&& printf '[core]\n    no_scm = true\n' > .dvc/config.local && $(BIN)/dvc repro exp6 probe limit

# The pinned environment is complete, so nothing in a test may reach for the model hub. Tests run beside each other, file
# by file, on one thread each: tensors are small, and two processes that each spin on two threads wait for each other. The
# tutorial runs as it is published (tests/test_notebooks.py), all other notebooks at toy sizes.
test: export HF_HUB_OFFLINE := 1
test: export OMP_NUM_THREADS := 1
test: export GRADE_PROGRESS := 0
test: env ## lint, unit tests, doctests, notebooks, and the smoke pipeline beside them
	$(BIN)/ruff check .
	find notebooks -maxdepth 1 -name '*.ipynb' -exec $(BIN)/nbstripout --verify {} +
	@mkdir -p .workspaces && $(MAKE) --no-print-directory smoke > .workspaces/smoke.log 2>&1 & smoke=$$!; \
	$(BIN)/python -m pytest tests grade --doctest-modules --doctest-ignore-import-errors notebooks --ignore notebooks/tutorial.ipynb \
		--nbval-lax --nbval-cell-timeout=300 \
		--numprocesses=auto --maxprocesses=4 --dist=loadfile --durations=40; tests=$$?; \
	wait $$smoke; smoke=$$?; cat .workspaces/smoke.log; exit $$((tests || smoke))

test-all: export GRADE_ALL_CASES := 1
test-all: test ## the same with every case of the tables of which make test runs a sample

# vLLM pins another transformers than ours, so it has an environment of its own. Only what it imports is installed: its
# wheel also asks for packages of images and sound.
$(ENGINES)/.installed: tests/engines/requirements.txt
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r $<
	@touch $@

engines: export GRADE_ENGINE := $(abspath $(ENGINES))/bin/python
engines: export HF_HUB_OFFLINE := 1
engines: export OMP_NUM_THREADS := 1
engines: export GRADE_PROGRESS := 0
engines: env $(ENGINES)/.installed ## vLLM in an environment of its own, and the tests that need it
	$(BIN)/python -m pytest tests/engines --durations=10

hashes: env ## write requirements.txt anew, after a change of pyproject.toml or constraints.txt
	$(INSTALL) -c constraints.txt pip-tools
	CUSTOM_COMPILE_COMMAND="make hashes" $(BIN)/pip-compile --quiet --generate-hashes --extra test --constraint constraints.txt \
		--unsafe-package torch --strip-extras --no-annotate --no-emit-options --no-emit-index-url --no-emit-find-links \
		--no-emit-trusted-host --output-file requirements.txt pyproject.toml

# One thread is the fastest at these sizes: two wait for each other more than they compute.
lab: export OMP_NUM_THREADS ?= 1
lab: env ## JupyterLab on the notebooks
	@echo "Notebooks in notebooks/ are saved without outputs; a copy with them is kept in outputs/scratch/lab/."
	$(BIN)/jupyter lab --notebook-dir=. --LabApp.default_url=/lab/tree/notebooks/tutorial.ipynb \
		--FileContentsManager.pre_save_hook=grade.pipeline.notebook.strip_on_save

# Pages and executed notebooks keep their places, so that links are the same on the site and in the repository.
docs: env ## the documentation as a site, .workspaces/site/docs/gallery.html; exit 1 on a dead link
	$(INSTALL) -c constraints.txt -e ".[docs]"
	rm -rf .workspaces/docs && mkdir -p .workspaces/docs
	git ls-files '*.md' CITATION.cff LICENSE params 'outputs/**.png' 'outputs/**.ipynb' 'outputs/**.csv' 'outputs/**.json' \
		| tar -cf - -T - | tar -xf - -C .workspaces/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## remove the environment, caches and the smoke workspace; never results
	rm -rf $(VENV) $(ENGINES) .workspaces/smoke .pytest_cache .ruff_cache .hypothesis .cache *.egg-info
	find grade tests notebooks -name __pycache__ -o -name .ipynb_checkpoints | xargs rm -rf
