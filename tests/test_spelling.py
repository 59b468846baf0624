"""Spelling of everything that readers read: pages, notebooks with their captions and alt texts, claims, docstrings.

A word passes if the dictionary of pyspellchecker has it or `words.txt` does, which holds the trade's words, names
and British spellings. Code, mathematics, addresses and words with capitals or digits inside are not looked at.
"""

import ast
import functools
import json
import pathlib
import re

import pytest
import yaml

ROOT = pathlib.Path(__file__).parent.parent
WORDS = (pathlib.Path(__file__).parent / "words.txt").read_text(encoding="utf-8").split()
REMOVED = [  # patterns, each with what stays of it
    (r"(?ms)^ *(`{3,}|~{3,}) *(?:\w[^\n]*|\{(?:math|bibliography|[\w-]+-tables?)\}[^\n]*)?\n.*?^ *\1 *$", ""),
    (r"(?m)^ *(?:`{3,}|:{3,})(?:\{[\w:-]+\})?", ""),  # of other directives the content stays
    (r"(?m)^ *:(?!alt|caption)[\w-]+:.*$|^ *:(?:alt|caption):|^\([\w.-]+\)=$", ""),
    (r"(?s)\$\$.+?\$\$|\$[^$]+\$", ""),
    (r"\{[\w:]+\}`([^`<>]+)<[^`<>]*>`|\{term\}`([^`]+)`", r"\1\2"),  # of roles the text stays
    (r"(?:\{[\w:+-]+\})?(`+)(?!`)[^`]+?\1", ""),
    (r"<[^<>\n]*>|\]\([^)]*\)|\{[^{}\n]*\}|\S+://\S+|\S*[\w)]/[\w(]\S*", ""),
]
WORD = re.compile(r"(?<![\w@.\\-])[A-Z]?[a-zà-ÿ]{2,}(?:['’][a-z]+)?(?![\w(=]|\.\w)")
AMERICAN = re.compile(
    r"(?:behavi|col|fav|fl?av|hon|lab|neighb)or(?:s|ed|ing|ite|ites|less)?|gray(?:s|ish|scale)?|(?:de|of|pre)fense(?:s|less)?"
    r"|centers?|(?:label|model|cancel|travel|signal)(?:ed|ing)|learned|artifacts?"
    r"|(?!.*(?:prize|seize|size|capsize))[a-z]{3,}(?:iz|yz)(?:e[ds]?|ing|ations?|able|ers?)"
)
QUOTED = {"optimizer", "optimization"}  # the name of an argument, and the title of a book


def prose(markdown: str) -> str:
    for pattern, rest in REMOVED:
        markdown = re.sub(pattern, f" {rest} ", markdown)
    return markdown


def texts():
    """Pairs of a file's name and a text in it."""
    named = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")]
    for path in [*sorted((ROOT / "book").glob("*.md")), *named]:
        yield path.name, path.read_text(encoding="utf-8")
    for path in [*sorted((ROOT / "notebooks").glob("*.ipynb")), ROOT / "book/template/my_chapter.ipynb"]:
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "markdown":
                yield path.name, "".join(cell["source"])
            for kind in cell["metadata"].get("mystnb", {}).values():
                yield from ((path.name, kind[key]) for key in ("caption", "alt") if key in kind)
    for row in yaml.safe_load((ROOT / "book/claims.yml").read_text(encoding="utf-8")):
        yield "claims.yml", row["says"]
    for names in yaml.safe_load((ROOT / "book/value_names.yml").read_text(encoding="utf-8")).values():
        yield from (("value_names.yml", words) for words in names.values())
    for path in sorted((ROOT / "gradinv").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield path.name, ast.get_docstring(node) or ""


@functools.cache
def found() -> dict[str, set[str]]:
    """Every word of the prose, and the files it is in."""
    words = {}
    for name, text in texts():
        for word in WORD.findall(prose(text)):
            words.setdefault(word, set()).add(name)
    return words


@functools.cache
def dictionary():
    return pytest.importorskip("spellchecker").SpellChecker()


def plain(word: str) -> str:
    return re.sub(r"['’]s?$", "", word.replace("’", "'").lower())


def unknown(words) -> list[str]:
    listed = {word.lower() for word in WORDS}
    return sorted(word for word in words if plain(word) not in listed and not dictionary().known([plain(word)]))


def american(words) -> list[str]:
    return sorted(word for word in words if AMERICAN.fullmatch(plain(word)) and plain(word) not in QUOTED)


def test_words_are_spelt_right():
    assert {word: sorted(found()[word]) for word in unknown(found())} == {}


def test_spelling_is_british():
    assert {word: sorted(found()[word]) for word in american(found())} == {}


def test_no_word_is_doubled():
    doubled = re.compile(r"\b([a-z]+)[ \n]\1\b(?!-)")  # what was left out leaves more room
    twice = [(name, match[0]) for name, text in texts() for match in doubled.finditer(prose(text))]
    assert [pair for pair in twice if pair[1].split()[0] not in {"that", "had"}] == []


def test_word_list_is_in_order_and_used():
    assert sorted(WORDS, key=str.lower) == WORDS and len(set(WORDS)) == len(WORDS)
    used = {plain(word) for word in found()}
    assert [word for word in WORDS if word.lower() not in used] == []
    assert [word for word in WORDS if dictionary().known([word.lower()])] == [], "the dictionary has these"


@pytest.mark.parametrize("wrong", ["gradeint", "recieve", "seperate", "optimsier", "reconstuction", "neighbuor"])
def test_a_slip_is_caught(wrong):
    text = f"The {wrong} of `{wrong}x` and $qzx$ in {{cite:p}}`qzxkey`.\n\n```python\nqzxcode\n```\n"
    assert unknown(WORD.findall(prose(text))) == [wrong]


def test_american_spellings_are_caught():
    words = ["color", "optimize", "normalization", "gray", "center", "labeled", "analyzes", "defense"]
    assert american([*words, "size", "prizes", "colour", "optimise", "seized", "labelled"]) == sorted(words)
