# kvloom: `make demo` and `make test` are all that a newcomer needs.
VENV := .venv
BIN := $(VENV)/bin
JSON ?=
REPEATS ?=

.PHONY: setup demo check test fast engine soak clean

setup:            ## make .venv with the project, an engine and the developer's tools
	@bash .ci/setup.sh

demo: setup       ## the main job on a real prefill/decode pair: a table a case; REPEATS=1 is quicker
	@$(BIN)/kvloom demo $(if $(JSON),--json $(JSON)) $(if $(REPEATS),--repeats $(REPEATS))

check: setup      ## the static part: format, lint, types, import contracts, dependencies
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/deptry .

test: setup       ## every test, on the fake engines and on the real pair
	@# Two cores: those without engines run side by side.
	@$(BIN)/pytest tests/unit -m "not engine" >unit.log 2>&1 & unit=$$!; \
	$(BIN)/pytest tests/e2e; e2e=$$?; wait $$unit; unit=$$?; cat unit.log; rm -f unit.log; \
	[ $$e2e -eq 0 ] && [ $$unit -eq 0 ]
	@$(BIN)/pytest -m engine

fast: setup       ## the tests that need no engine
	@$(BIN)/pytest -m "not engine"

engine: setup     ## the tests on the real pair
	@$(BIN)/pytest -m engine

soak: setup       ## 320 turns over 40 conversations on a decode engine far too small
	@KVLOOM_SOAK_TURNS=320 $(BIN)/pytest tests/engine/test_soak.py

clean:            ## remove what setup made
	rm -rf $(VENV)
