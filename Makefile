# The only door: `make up`, then ask. README.md says what each target does.
PYTHON := .venv/bin/python
export RUNTIME GPU

.PHONY: help install install-dev install-to-run bootstrap up down serve logs smoke test image-test check bench eval models gc

help:
	@echo 'make up       install, make the demo remote if there is no .env, start, ask one question (RUNTIME=docker, GPU=1)'
	@echo 'make down     stop            make logs    follow the logs'
	@echo 'make serve    the same in the foreground'
	@echo 'make smoke    eight acceptance steps against the running stack, or one it starts itself'
	@echo 'make test     pytest          make check   ruff and mypy'
	@echo 'make image-test  both containers, built and asked without a Docker engine (root, buildah, debootstrap)'
	@echo 'make bench    memgw beside a shell loop and the floor (QUICK=1, PEERS=1, STRICT=1, SIZES=…, ONLY=…, OUT=…, BENCH_DIR=…)'
	@echo 'make eval     how well answers are found, beside qmd itself and grep (STRICT=1, OUT=…)'
	@echo 'make models   fetch the models ahead of time; MODEL=minilm: a small one that needs no model hub'
	@echo 'make gc       housekeeping now: what is not needed any more goes, and what that freed is printed'
	@echo 'make install  only .venv, Node if there is none >= 22, and the pinned qmd'

install:
	@bash bin/install.sh

install-dev:
	@bash bin/install.sh --dev

install-to-run:
	@bash bin/install.sh --to-run

bootstrap:
	@bash bin/bootstrap.sh

up: install-to-run bootstrap
	@$(PYTHON) bin/stack.py up

serve: install-to-run bootstrap
	@exec $(PYTHON) bin/stack.py serve

down:
	@if [ -x $(PYTHON) ]; then $(PYTHON) bin/stack.py down; else echo 'memgw: was not running'; fi

logs:
	@exec $(PYTHON) bin/stack.py logs

smoke: install-to-run bootstrap
	@bash bin/smoke-test.sh

models: install bootstrap
	@$(PYTHON) bin/models.py $(MODEL)

gc: install bootstrap
	@$(PYTHON) bin/housekeeping.py

test: install-dev
	@$(PYTHON) bin/minilm.py .cache/minilm-l6-v2-q8_0.gguf
	$(PYTHON) -m pytest -n 3 --dist worksteal --cov --cov-report=term

image-test: install-dev
	@$(PYTHON) bin/image_test.py

check: install-dev
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m mypy

bench: install-dev
	@$(PYTHON) -m tests.bench

eval: install-dev
	@$(PYTHON) -m tests.eval
