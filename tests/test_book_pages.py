"""Cheap checks of the book's pages, without building the site."""

import datetime
import pathlib
import re
import tomllib

import matplotlib.pyplot as plt
import nbformat
import pytest
import yaml

ROOT = pathlib.Path(__file__).parent.parent
TOC = yaml.safe_load((ROOT / "_toc.yml").read_text())
FILES = [TOC["root"]] + [chapter["file"] for part in TOC["parts"] for chapter in part["chapters"]]
PROSE = sorted((ROOT / "book").glob("*.md"))
TEXTS = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [*PROSE, *sorted((ROOT / "notebooks").glob("*.ipynb"))]
}


@pytest.mark.parametrize("file", FILES)
def test_toc_names_a_file(file):
    assert any((ROOT / f"{file}{ending}").exists() for ending in (".md", ".ipynb"))


def test_every_page_is_in_the_toc():
    assert {path.relative_to(ROOT).with_suffix("").as_posix() for path in PROSE} <= set(FILES)


@pytest.mark.parametrize("name", TEXTS)
def test_cited_works_are_in_the_bibliography(name):
    known = set(re.findall(r"^@\w+\{([^,\s]+),", (ROOT / "book/references.bib").read_text(), re.M))
    cited = {key.strip() for keys in re.findall(r"\{cite(?::\w+)?\}`([^`]+)`", TEXTS[name]) for key in keys.split(",")}
    assert cited <= known


@pytest.mark.parametrize("name", TEXTS)
def test_terms_are_in_the_glossary(name):
    used = re.findall(r"\{term\}`(?:[^`<]*<)?([^`<>]+)>?`", TEXTS[name])
    assert {term.strip().lower() for term in used} <= set(glossary_terms())


def glossary_terms():
    glossary = TEXTS["book/glossary.md"].split("```{glossary}")[1].split("```")[0]
    return [line.lower() for line in glossary.splitlines() if line and not line.startswith(" ")]


def test_glossary_is_in_order():
    terms = glossary_terms()
    assert terms == sorted(terms) and len(terms) >= 25


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.name)
def test_prose_is_plain(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    assert not re.findall(r"\b(?:e\.g\.|i\.e\.|etc\.|cf\.|viz\.)", text), "Latin abbreviations"
    assert not [line for line in text.splitlines() if re.search(r"[a-z]\. [A-Z]", line)], "two sentences on a line"


def test_citation_file_is_valid():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "version", "date-released"} <= set(citation)
    assert citation["cff-version"] == "1.2.0"
    datetime.date.fromisoformat(citation["date-released"])
    works = [citation, *citation["references"]]
    assert all(
        set(author) in ({"name"}, {"family-names", "given-names"}) for work in works for author in work["authors"]
    )


def test_front_page_names_claims_of_the_ledger():
    chosen = yaml.safe_load(re.search(r"```\{chapters-table\}\n(.*?)```", TEXTS["book/index.md"], re.S)[1])
    ledger = {row["id"]: row["chapter"] for row in yaml.safe_load((ROOT / "book/claims.yml").read_text())}
    assert {claim: chapter for chapter, claim in chosen.items()}.items() <= ledger.items()


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == project["version"]


def test_address_is_set_in_one_place():
    """The citation file may repeat the address of `_config.yml`, and may have no other."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    config = yaml.safe_load((ROOT / "_config.yml").read_text())
    assert citation.get("url") in (None, config["html"].get("baseurl"))


@pytest.fixture
def teaching(monkeypatch):
    """The module that counts for the page for lecturers."""
    monkeypatch.syspath_prepend(str(ROOT / "book/_ext"))
    return pytest.importorskip("teaching")


def directive(page, name):
    return yaml.safe_load(re.search(rf"```\{{{name}\}}\n(.*?)```", TEXTS[page], re.S)[1])


def test_every_chapter_has_a_lecture():
    chapters = [pathlib.Path(file).name for file in FILES if file.startswith("notebooks/")]
    assert list(directive("book/teaching.md", "lectures-table")) == chapters


def test_every_exercise_has_a_grade(teaching):
    rows = teaching.graded(directive("book/teaching.md", "exercises-table"))
    notebooks = [text for name, text in TEXTS.items() if name.startswith("notebooks/")]
    assert len(rows) == sum(text.count("```{exercise}") for text in notebooks)
    assert [row["grade"] for row in rows] == sorted((row["grade"] for row in rows), key=teaching.GRADES.index)


@pytest.mark.parametrize("change", [{"easy": "ex-no-such"}, {"hard": ""}, {"simple": "ex-twin-loss"}])
def test_a_wrong_grade_is_named(teaching, change):
    with pytest.raises(ValueError, match="each exercise needs one grade of easy, medium, hard"):
        teaching.graded({**directive("book/teaching.md", "exercises-table"), **change})


def test_reading_minutes_count_text_and_shown_code(teaching, tmp_path, monkeypatch):
    new = nbformat.v4
    cells = [
        new.new_markdown_cell("word " * 3 * teaching.WORDS + "\n## Exercises\n" + "word " * 999),
        new.new_code_cell("x = 1\n" * 4 * teaching.LINES),
        new.new_code_cell("x = 1\n" * 999, metadata={"tags": ["hide-input"]}),
    ]
    nbformat.write(new.new_notebook(cells=cells), tmp_path / "one.ipynb")
    monkeypatch.setattr(teaching.chapters, "NOTEBOOKS", tmp_path)
    assert teaching.reading_minutes("one") == 10  # 3 and 4 minutes, in steps of five


def own_model_blocks():
    return re.findall(r"```python\n(.*?)```", TEXTS["book/own_model.md"], re.S)


def test_blocks_of_the_own_model_page_run(capsys, monkeypatch, tmp_path):
    """In order and in one namespace, as a reader runs them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRADINV_DATA", str(tmp_path))
    namespace, printed = {}, []
    for block in own_model_blocks():
        exec(compile(block, "own_model.md", "exec"), namespace)
        printed.append(capsys.readouterr().out)
    plt.close("all")
    example, pictures, several, gradient, change, stored, ranks, whole = printed
    assert "walk_back recovered" in example and "match_gradients" in example
    assert "right of" in pictures and (tmp_path / "pictures.png").exists()
    assert several.startswith("tensor([") and several.count(",") == 3
    assert "recovered" in gradient
    assert "through 2 local steps" in change
    assert stored == "['cat', 'dog']\n"
    ra, counted, lost = (int(line.split()[-1]) for line in ranks.splitlines())
    assert ra < 0 < counted == lost
    lost, unknowns = (int(word) for word in whole.split() if word.isdigit())
    assert 0 < lost < unknowns == 3 * 12 * 12


def test_example_of_the_own_model_page_takes_a_batch(capsys):
    block = own_model_blocks()[0]
    assert 'data.load("cifar10", 1)' in block
    exec(block.replace('data.load("cifar10", 1)', 'data.load("cifar10", 2)'), {})
    printed = capsys.readouterr().out
    assert "walk_back ambiguous" in printed and "match_gradients approximate" in printed
