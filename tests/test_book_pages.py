"""Cheap checks of the book's pages, without building the site."""

import ast
import datetime
import fnmatch
import json
import pathlib
import re
import tomllib

import cards
import cite
import claims_table
import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pandas as pd
import pytest
import rules
import teaching
import tidy
import yaml
from bs4 import BeautifulSoup
from docutils import nodes

from gradinv import chapters, claims

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


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.name)
def test_code_fits_beside_the_contents(path):
    blocks = re.findall(r"^ *```(?:python|bash)\n(.*?)^ *```", path.read_text(), re.S | re.M)
    assert [line for block in blocks for line in block.splitlines() if len(line) > 76] == []


def test_citation_file_is_valid():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "version", "date-released"} <= set(citation)
    assert citation["cff-version"] == "1.2.0"
    datetime.date.fromisoformat(citation["date-released"])
    works = [citation, *citation["references"]]
    assert all(
        set(author) in ({"name"}, {"family-names", "given-names"}) for work in works for author in work["authors"]
    )


def test_citation_file_follows_its_schema():
    cffconvert = pytest.importorskip("cffconvert")
    cffconvert.Citation((ROOT / "CITATION.cff").read_text()).validate()


def test_names_of_groups_have_no_comma():
    """RIS would read a surname and a given name."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert not [author for author in citation["authors"] if "," in author.get("name", "")]


def read_bibtex(text):
    """A BibTeX entry in the words of CSL-JSON, by a parser of BibTeX."""
    (key, entry), *others = pytest.importorskip("pybtex.database").parse_string(text, "bibtex").entries.items()
    assert not others
    plain = {field: unescaped(value) for field, value in entry.fields.items()}
    for field in {"title", "booktitle"} & plain.keys():
        assert plain[field][0] + plain[field][-1] == "{}"
        plain[field] = plain[field][1:-1]
    version, _, note = plain["note"].removeprefix("Version ").partition(". ")
    people = [unescaped(re.sub(r"^\{(.*)\}$", r"\1", str(person))) for person in entry.persons["author"]]
    kind = {"incollection": "chapter", "book": "book"}[entry.type]
    return facts(
        key, kind, plain["title"], plain.get("booktitle"), people, plain["year"], version, note, plain.get("url")
    )


def unescaped(tex):
    return re.sub(r"\\([#$%&_{}])", r"\1", tex)


def read_ris(text):
    """A RIS record in the same words, by the grammar of its lines."""
    lines = [re.fullmatch(r"([A-Z][A-Z0-9])  - (.*)", line).groups() for line in text.split("\n")]
    assert lines[0][0] == "TY" and lines[-1] == ("ER", "")
    found = dict(lines)
    assert [tag for tag, _ in lines if tag != "AU"] == [tag for tag in found if tag != "AU"], "a field twice"
    assert found["DA"].split("/")[0] == found["PY"]
    kind = {"CHAP": "chapter", "BOOK": "book"}[found["TY"]]
    people = [value for tag, value in lines if tag == "AU"]
    rest = (found["PY"], found["ET"], found.get("N1"), found.get("UR"))
    return facts(found["ID"], kind, found["TI"], found.get("T2"), people, *rest)


def read_csl(text):
    (work,) = json.loads(text)
    assert {"id", "type", "title", "author", "issued", "version"} <= set(work)
    assert datetime.date(*work["issued"]["date-parts"][0])
    people = [author.get("literal") or f"{author['family']}, {author['given']}" for author in work["author"]]
    rest = (str(work["issued"]["date-parts"][0][0]), work["version"], work.get("note"), work.get("URL"))
    return facts(work["id"], work["type"], work["title"], work.get("container-title"), people, *rest)


def facts(key, kind, title, book, people, year, version, note, url):
    return {
        **{"key": key, "kind": kind, "title": title, "book": book or None, "people": people, "year": year},
        **{"version": version, "note": note or None, "url": url},
    }


READERS = {"bib": read_bibtex, "ris": read_ris, "json": read_csl}


@pytest.mark.parametrize("address", ["", "https://example.org/a_book/"])
@pytest.mark.parametrize("name", [None, *chapters.names()])
def test_citations_agree(name, address):
    """Every format says what `CITATION.cff`, the chapter and its largest run say."""
    book = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    runs = [run for run in claims.results() if run["chapter"] == name]
    page = f"{address}notebooks/{name}.html" if name else address
    expected = facts(
        f"gradinv:{name}" if name else "gradinv",
        "chapter" if name else "book",
        chapters.title(name) if name else book["title"],
        book["title"] if name else None,
        [author.get("name") or f"{author['family-names']}, {author['given-names']}" for author in book["authors"]],
        book["date-released"][:4],
        book["version"],
        f"Outputs of {runs[-1]['date']}, commit {runs[-1]['commit']}, {runs[-1]['scale']} scale" if runs else None,
        page if address else None,
    )
    work = cite.item(ROOT, address, name)
    assert {ending: READERS[ending](write(work)) for ending, (_, write, _) in cite.FORMATS.items()} == dict.fromkeys(
        READERS, expected
    )
    words = cite.in_words(work)
    assert all(part in words for part in [*expected["people"], *map(str, filter(None, list(expected.values())[6:]))])


def test_special_characters_survive_every_format():
    work = {
        **cite.item(ROOT, "", chapters.names()[0]),
        "title": 'A 50% "cut" & {more}_or #less, $5 — für\nalle',
        "author": [{"family": "Dröge_1", "given": "H. & S."}, {"literal": "R&D and more"}],
    }
    found = {ending: READERS[ending](write(work)) for ending, (_, write, _) in cite.FORMATS.items()}
    found = {ending: {**entry, "title": " ".join(entry["title"].split())} for ending, entry in found.items()}
    assert found["bib"] == found["ris"] == found["json"]
    assert cite.tex("a~b^c\\") == r"a\textasciitilde{}b\textasciicircum{}c\textbackslash{}"


def test_every_chapter_is_on_the_page_how_to_cite():
    assert re.findall(r"```\{cite-chapter\} (\w+)", TEXTS["book/how_to_cite.md"]) == chapters.names()


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (
            "largest_difference < 1.5 and cosine > 0.999",
            "*largest difference* is below 1.5 and *cosine* is above 0.999",
        ),
        ("max_error <= 1e-9 or mse == 2.5e-30", "*largest error* is at most 10⁻⁹ or *MSE* is equal to 2.5 × 10⁻³⁰"),
        ("a < 1 and b < 2 and c < 3", "*a* is below 1, *b* is below 2 and *c* is below 3"),
        ("abs(a - b) < 2 + 0.2 * sd", "*a* is within 2 + 0.2 × *standard deviation* of *b*"),
        ("abs(slope + 1) <= 0.2", "*slope* is within 0.2 of −1"),
        ("abs(x) < 1 and y != -3", "*x* is within 1 of 0 and *y* is other than −3"),
        ("abs(gap / 1e-5 - 1) < 0.001", "*gap* / 10⁻⁵ is within 0.001 of 1"),
        ("a - (b - c) < 2 * (x + 1) ** 2", "*a* − (*b* − *c*) is below 2 × ((*x* + 1) to the power of 2)"),
        ("max(a, b) > abs(c)", "the largest of *a* and *b* is above the size of *c*"),
        ("a > 1 and (b > 1 or not c > 1)", "*a* is above 1 and (*b* is above 1 or not (*c* is above 1))"),
        ("0 < x < at_1e_2", "0 is below *x* and *x* is below *at 0.01*"),
    ],
)
def test_rules_in_words(rule, words):
    assert rules.rule(rule).replace("\u00a0", " ") == words


def test_rules_use_the_words_of_their_claim(monkeypatch):
    named = {"*": {"grey": "PSNR of grey"}, "a.*": {"grey": "grey", "falls": "whether it falls"}, "a.c": {"d": "drop"}}
    monkeypatch.setattr(rules, "named", lambda: named)
    rule = "falls == 1 and d_low > grey"
    assert rules.rule(rule, "a.b") == "*it falls* and *d lower end* is above *grey*"
    assert rules.rule(rule, "a.c") == "*it falls* and *lower end of the interval of the drop* is above *grey*"
    assert rules.rule("falls == 0 or grey > 1", "b") == "*falls* is equal to 0 or *PSNR of grey* is above 1"
    assert rules.rule("falls == 0", "a.c") == "not: *it falls*"
    assert rules.values({"falls": 0, "d": 2.0}, "a.c") == {"*it falls*": "no", "*drop*": "2"}


@pytest.mark.parametrize("claim", claims.ledger().values(), ids=lambda claim: claim.id)
def test_every_rule_has_words(claim):
    known = rules.words(claim.id)
    for rule in {*claim.passes_when.values(), claim.partly_when} - {None}:
        words, tree = rules.rule(rule, claim.id), list(ast.walk(ast.parse(rule)))
        assert all(rules.name(name, claim.id) in words for name in rules.judged([rule]))
        yes_or_no = {name for name in rules.judged([rule]) if known.get(name, "").startswith(rules.YES_OR_NO)}
        facts = {
            id(part.comparators[0]) for part in tree if isinstance(part, ast.Compare) and name_of(part) in yes_or_no
        }
        constants = [part for part in tree if isinstance(part, ast.Constant) and id(part) not in facts]
        assert all(number in words for number in {rules.number(part.value) for part in constants} - {"0"})
        for name in rules.judged([rule]):
            assert name in known or not re.search(r"[\d_]", name) or re.sub(r"_(low|high)$", "", name) in known, name


def name_of(comparison):
    return comparison.left.id if isinstance(comparison.left, ast.Name) else None


def test_words_are_for_values_of_the_ledger():
    """Each pattern meets a claim, each name is measured or judged there, and no two values of a claim read alike."""
    recorded = {claim.id: rules.judged([*claim.passes_when.values()]) for claim in claims.ledger().values()}
    for run in claims.results():
        for claim in run["claims"]:
            recorded[claim["id"]] |= set(claim["values"])
    for pattern, names in rules.named().items():
        met = [claim for claim in recorded if fnmatch.fnmatchcase(claim, pattern)]
        assert met, pattern
        assert set(names) <= set().union(*(recorded[claim] for claim in met)), pattern
    for claim, names in recorded.items():
        assert len({rules.name(name, claim) for name in names}) == len(names), claim


def test_measured_values_in_words():
    measured = {"mse_ratio": 0.93901, "mse_ratio_low": 0.69458, "mse_ratio_high": 1.25091, "count": 12345, "ok": True}
    assert rules.values(measured) == {"*MSE ratio*": "0.939 (0.6946 to 1.251)", "*count*": "12,345", "*ok*": "yes"}
    assert rules.values({"a": 1.0, "a_low": 0.5, "a_high": 2.0}, apart=["a_low"]) == {
        "*a*": "1",
        "*a lower end*": "0.5",
        "*a upper end*": "2",
    }
    odd = rules.values({"x": float("nan"), "y": float("-inf"), "z": float("inf")})
    assert list(odd.values()) == ["not defined", "unbounded below", "unbounded above"]


def test_values_of_all_scales_stand_side_by_side():
    results = {"smoke": {"values": {"a": 1.0, "b": 2, "c": 3}}, "laptop": {"values": {"a": 1.5, "b": 2}}}
    found = claims_table.beside(results, "", {"a", "b", "c"}, set())
    assert list(found) == [
        "*a*: smoke\u00a01, laptop\u00a01.5",
        "*b*: 2",
        "*c*: smoke\u00a03, laptop\u00a0not measured",
    ]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.00005000001, "5\u00a0×\u00a010⁻⁵"),
        (9.99999e-05, "10⁻⁴"),
        (-2.345678e30, "−2.346\u00a0×\u00a010³⁰"),
        (4.47925, "4.47925"),
        (-4608, "−4,608"),
        (False, "no"),
    ],
)
def test_numbers_of_rules_and_values(value, words):
    assert rules.number(value) == words


def test_texts_of_the_ledger_use_the_signs_of_print():
    assert rules.prose("16.92 +- 2.10 dB, 224 x 224, K x, 2.5e-30") == (
        "16.92 ± 2.10 dB, 224\u00a0×\u00a0224, K x, 2.5\u00a0×\u00a010⁻³⁰"
    )


@pytest.mark.parametrize("chapter", chapters.names())
def test_every_claim_leads_to_its_cell(chapter):
    """To the cell that records it, or to the shown one above it in the same section."""
    cells = json.loads((ROOT / f"notebooks/{chapter}.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells]
    found = claims_table.places(chapter)
    assert set(found) == {claim.id for claim in claims.ledger().values() if claim.chapter == chapter}
    for claim_id, place in found.items():
        assert cells[place.cell]["cell_type"] == "code"
        assert "remove-cell" not in cells[place.cell]["metadata"].get("tags", [])
        recorded = next(i for i in range(place.cell, len(cells)) if "claims.record(" in sources[i])
        assert claim_id in sources[recorded] or claim_id.rpartition(".")[0].rpartition(".")[0] in sources[recorded]
        between = [i for i in range(place.cell + 1, recorded) if cells[i]["cell_type"] == "markdown"]
        assert not any(re.search(r"^#", sources[i], re.M) for i in between)
        above = [sources[i] for i in range(place.cell) if cells[i]["cell_type"] == "markdown"]
        assert re.findall(r"^#+ (.*)", "\n".join(above), re.M)[-1] == place.heading


def test_a_claim_that_no_cell_records_is_named():
    with pytest.raises(LookupError, match=r"no cell records a\.claim"):
        claims_table.first("a.claim", [(0, re.compile("another"), None)])


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


def directive(page, name):
    return yaml.safe_load(re.search(rf"```\{{{name}\}}\n(.*?)```", TEXTS[page], re.S)[1])


def test_every_chapter_has_a_lecture():
    chapters = [pathlib.Path(file).name for file in FILES if file.startswith("notebooks/")]
    assert list(directive("book/teaching.md", "lectures-table")) == chapters


def test_every_exercise_has_a_grade():
    rows = teaching.graded()
    notebooks = [text for name, text in TEXTS.items() if name.startswith("notebooks/")]
    assert len(rows) == sum(text.count("```{exercise}") for text in notebooks)
    assert [row["grade"] for row in rows] == sorted((row["grade"] for row in rows), key=teaching.GRADES.index)


def test_every_chapter_has_one_exercise_of_each_grade():
    grades = {}
    for row in teaching.graded():
        grades.setdefault(row["chapter"], []).append(row["grade"])
    assert {chapter: tuple(each) for chapter, each in grades.items()} == dict.fromkeys(grades, teaching.GRADES)


@pytest.mark.parametrize("start", ["", "**Simple.** ", "Easy. "])
def test_an_exercise_without_a_grade_is_named(tmp_path, monkeypatch, start):
    exercise = "```{{exercise}} A title\n:label: {}\n{}What is it?\n```\n"
    text = exercise.format("ex-good", "**Hard.** ") + exercise.format("ex-odd", start)
    new = nbformat.v4
    nbformat.write(new.new_notebook(cells=[new.new_markdown_cell(text)]), tmp_path / "one.ipynb")
    monkeypatch.setattr(teaching.chapters, "NOTEBOOKS", tmp_path)
    monkeypatch.setattr(teaching.chapters, "names", lambda: ["one"])
    with pytest.raises(ValueError, match=r"begins with its grade.* see ex-odd$"):
        teaching.graded()


def test_reading_minutes_count_text_and_shown_code(tmp_path, monkeypatch):
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


def tidied(frame):
    with pd.option_context("display.max_colwidth", None):  # as `plots.use_style` has it
        return BeautifulSoup(tidy.data_frame(frame._repr_html_()), "html.parser").table


def test_numbers_of_rows_are_dropped_and_names_of_rows_are_not():
    frame = pd.DataFrame({"network": ["a", "b"], "error": [1e-5, float("nan")]})
    table = tidied(frame)
    assert [[cell.get_text() for cell in row(["th", "td"])] for row in table("tr")] == [
        ["network", "error"],
        ["a", "0.00001"],
        ["b", "–"],
    ]
    assert [cell.get_text() for cell in table(class_="number")] == ["error", "0.00001", "–"]
    assert tidied(frame.set_index("network")).tbody.th.get_text() == "a"


def test_head_of_a_table_is_one_line_where_it_can_be():
    frame = pd.DataFrame({"k": [1, 2], "l": [3, 4], "m": [5, 6]}).set_index(["k", "l"])
    assert [cell.get_text() for cell in tidied(frame).thead("th")] == ["k", "l", "m"]
    assert [cell.get_text() for cell in tidied(frame.rename_axis(columns="of")).thead("th")] == ["k", "l", "m"]
    counted = pd.DataFrame([[1, 2]], columns=pd.Index([1, 5], name="steps"), index=pd.Index([0.1], name="rate"))
    assert [cell.get_text() for cell in tidied(counted).thead("th")] == ["rate", "steps 1", "steps 5"]


@pytest.mark.parametrize(
    ("column", "read"),
    [
        (np.array([11.09, 17.38], dtype="float32"), ["11.09", "17.38"]),  # pandas prints 11.090000 and 17.379999
        ([8.0, -192.0], ["8", "−192"]),
        ([1.0, 0.5], ["1.0", "0.5"]),
        ([1e-5, 2.5e-20], ["10⁻⁵", "2.5\u00a0×\u00a010⁻²⁰"]),
        ([1234, -2359296], ["1234", "−2,359,296"]),
        ([True, False], ["yes", "no"]),
        (["0.1000000", "-0.5"], ["0.1000000", "−0.5"]),  # a chapter's own digits stay
    ],
)
def test_numbers_of_a_table_are_set_for_people(column, read):
    frame = pd.DataFrame({"x": column}, index=["a", "b"])
    assert [cell.get_text() for cell in tidied(frame)("td")] == read


def test_a_cell_of_a_card_says_what_it_is():
    frame = pd.DataFrame({"loss": [0.5], "PSNR": [20]}, index=pd.Index(["a"], name="network"))
    table = BeautifulSoup(cards.card(tidy.data_frame(frame._repr_html_())), "html.parser").table
    assert "cards" in table["class"]
    assert [cell["data-label"] for cell in table.tbody(["th", "td"])] == ["", "loss", "PSNR"]
    for number in (18, 0.5, "10⁻⁶"):  # a number alone does not say what the card is of
        numbered = frame.rename({"a": number}).rename_axis("depth")
        table = BeautifulSoup(cards.card(tidy.data_frame(numbered._repr_html_())), "html.parser").table
        assert table.tbody.th["data-label"] == "depth"
    narrow = tidy.data_frame(frame[["loss"]]._repr_html_())
    assert cards.card(narrow) == narrow


def test_every_row_has_all_of_its_names():
    index = pd.MultiIndex.from_product([["a", "b"], ["x", "y"]])
    table = tidied(pd.DataFrame({"n": [1, 2, 3, 4]}, index=index))
    assert [[cell.get_text() for cell in row("th")] for row in table.tbody("tr")] == [
        ["a", "x"],
        ["a", "y"],
        ["b", "x"],
        ["b", "y"],
    ]


def test_an_index_of_numbers_has_no_padding():
    frame = pd.DataFrame({"x": [1, 2]}, index=[0.1, 1e-4])
    assert [cell.get_text() for cell in tidied(frame).tbody("th")] == ["0.1", "0.0001"]


def test_verdicts_of_a_chapter_read_as_on_the_claims_page():
    """With the words of the claim, and of the values only those that the rule or its weaker form uses."""
    claim = claims.ledger()["geiping.tab1.zhu_untrained.ours"]
    row = {"claim": claim.says, "paper": "18 +- 3", "here": "mean = 17.96, sd = 2.408, grey = 13.87, pictures = 6"}
    rule = claim.passes_when["laptop"]
    with pd.option_context("display.max_colwidth", None):
        table = tidied(pd.DataFrame([{**row, "passes when": rule, "verdict": "reproduced"}]))
    cells = table.tbody(["th", "td"])
    assert [p.get_text() for p in cells[2]("p")] == ["mean PSNR in dB: 17.96", "PSNR of a grey picture in dB: 13.87"]
    assert [cell.get_text() for cell in cells[:2] + cells[3:]] == [
        claim.says,
        "18 ± 3",
        rules.rule(rule, claim.id).replace("*", ""),
        "✓\u00a0reproduced",
    ]


def test_first_values_are_shown_where_there_is_no_rule():
    values = "a = 2e-12, b = nan, c = True, d = 4, m = 5, n = 6, g = 7"
    says = claims.ledger()["geiping.tab1.visual_vs_psnr"].says
    row = {"claim": says, "paper": "exact", "here": values, "passes when": ""}
    table = tidied(pd.DataFrame([{**row, "verdict": "out of reach at this scale"}]))
    _, _, here, rule, _ = table.tbody(["th", "td"])
    assert [p.get_text() for p in here("p")] == [
        "a: 2\u00a0×\u00a010⁻¹²",
        "b: not defined",
        "c: yes",
        "d: 4",
        "m: 5",
        "n: 6",
    ]
    assert rule.get_text() == "no rule at this scale"
    with pytest.raises(LookupError, match=r"no claim of the ledger says 'It held\.'; rerun the chapter"):
        tidied(pd.DataFrame([{**row, "claim": "It held.", "verdict": "partly"}]))


@pytest.mark.parametrize(
    ("written", "read"),
    [("1e-16", "10⁻¹⁶"), ("-2.5e+07", "−2.5\u00a0×\u00a010⁷"), ("-0.9", "−0.9"), ("98%", "98%"), ("re-run", "re-run")],
)
def test_numbers_in_a_sentence(written, read):
    assert tidy.number(written) == read


def test_a_formula_takes_its_own_stop_along():
    formula = nodes.math("", "r")
    paragraph = nodes.paragraph("", "", nodes.strong("", "held"), nodes.Text("."), formula, nodes.Text("."))
    tidy.keep_together(formula)
    assert paragraph.astext() == "held.r."
    assert paragraph.children[2].astext() == "r."
