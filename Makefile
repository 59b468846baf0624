# Two commands: `make book` reruns every chapter small and builds the site, `make test` runs the tests.
PYTHON ?= python3
BIN := .venv/bin
SCALE ?= laptop

.PHONY: book test site pdf rerun lint clean

book: .venv/installed
	$(BIN)/python -m gradinv run --scale smoke
	$(MAKE) --no-print-directory site
	$(BIN)/python -m gradinv claims --results _build/runs/results

test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -n auto --dist loadfile

site: .venv/installed
	$(BIN)/jupyter-book build . --path-output . -W -n --keep-going --quiet
	@echo "The book is at $(CURDIR)/_build/html/index.html"

pdf: site
	$(BIN)/jupyter-book build . --path-output . --builder singlehtml -W -n --keep-going --quiet
	$(BIN)/python book/pdf.py

rerun: .venv/installed
	$(BIN)/python -m gradinv run $(CHAPTER) --scale $(SCALE) --write

lint: .venv/installed
	$(BIN)/ruff check .

clean:
	rm -rf _build .venv .pytest_cache .ruff_cache *.egg-info

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[book,test]'
	touch $@
