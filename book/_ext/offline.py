"""A site that loads nothing from elsewhere and nothing it does not need.

It ships MathJax, and leaves out the loader of thebe. `trim` takes out what the theme loads in vain, and packs pictures.
"""

import importlib.util
import re
import shutil
from pathlib import Path

from docutils import nodes
from fontTools.subset import Options, Subsetter
from fontTools.ttLib import TTFont
from PIL import Image

# Parts of MathJax, without its menu: that is the largest of them, and makes every formula a stop of the Tab key.
LOADED = ["core", "input/tex", "output/chtml", "a11y/assistive-mml"]
PARTS = ("startup.js", *(f"{part}.js" for part in LOADED), "output/chtml/fonts", "input/tex/extensions")

ICON, CODE = re.compile(r"fa-[a-z0-9-]+"), re.compile(r"\\(f[0-9a-f]{3})\b")


def copy_mathjax(app, error):
    """Copy the parts of MathJax that TeX to HTML needs, 2 MB of 24."""
    if error or app.builder.format != "html":
        return
    # the package's name has hyphens, so it cannot be imported
    package = Path(importlib.util.find_spec("sphinx-mathjax-offline").origin).parent
    for part in PARTS:
        source, target = package / "static/mathjax" / part, Path(app.outdir) / "_static/mathjax" / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy2(source, target)


def trim(app, error):
    """Take out what the theme loads in vain, and pack pictures.

    Its style draws icons from a font, so they need no script of 1.5 MB; of that font and style the used icons are
    enough, and the index of the search is for the page that searches.
    """
    if error or app.builder.format != "html":
        return
    out = Path(app.outdir)
    pack_pictures(out / "_images")
    icons, search = r"fontawesome\.js", r"(?:searchtools|language_data|searchindex)\.js"
    used = set()
    for page in out.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        vain = icons if page.name == "search.html" else f"(?:{icons}|{search})"
        text = re.sub(rf'\s*<script (?:defer )?src="[^"]*{vain}(?:\?[^"]*)?"></script>', "", text)
        text = re.sub(r'(_images/[^"/]+)\.png"', r'\1.webp"', text)
        page.write_text(text, encoding="utf-8")
        used |= set(ICON.findall(text))
    static = out / "_static"
    (static / "scripts/fontawesome.js").unlink(missing_ok=True)
    for script in static.glob("**/*.js"):
        if "mathjax" not in script.parts:
            used |= set(ICON.findall(script.read_text(encoding="utf-8")))
    trim_icons(static, used)


def pack_pictures(folder: Path):
    """Every picture as WebP, pixel by pixel the same and a third smaller than PNG."""
    for path in folder.glob("*.png"):
        with Image.open(path) as picture:
            picture.convert("RGBA" if "A" in picture.mode else "RGB").save(path.with_suffix(".webp"), lossless=True)
        path.unlink()


def trim_icons(static: Path, used: set[str]):
    """Keep the used icons in the theme's style, and their shapes in its font."""
    style = static / "styles/pydata-sphinx-theme.css"
    text = style.read_text(encoding="utf-8")
    rule = re.compile(r'((?:\.fa-[\w-]+:before,?)+)\{content:"[^"]*"\}')

    def kept(match):
        return match[0] if used & set(ICON.findall(match[1])) else ""

    text = rule.sub(kept, text)
    text = re.sub(r"src:url\(([^()]*fa-solid-900)\.woff2\)[^;}]*", r'src:url(\1.woff) format("woff")', text)
    style.write_text(text, encoding="utf-8")
    fonts = static / "vendor/fontawesome/webfonts"
    source, small = fonts / "fa-solid-900.ttf", fonts / "fa-solid-900.woff"
    if source.exists():
        styles = "".join(map(read, static.glob("**/*.css")))
        shapes = re.findall("[\ue000-\uf8ff]", styles) + [chr(int(code, 16)) for code in re.findall(CODE, styles)]
        font = TTFont(source)
        subsetter = Subsetter(Options(drop_tables=["FFTM"]))
        subsetter.populate(text="".join(shapes))
        subsetter.subset(font)
        font.flavor = "woff"
        font.save(small)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def drop_thebe(app, pagename, templatename, context, doctree):
    """Leave out the scripts of thebe, which Jupyter Book adds to run code on a remote server."""

    def wanted(file):
        return "thebe" not in f"{getattr(file, 'filename', file)} {getattr(file, 'attributes', {})}".lower()

    for key in ("script_files", "css_files"):
        context[key] = [file for file in context.get(key, []) if wanted(file)]


def drop_thebe_nodes(app, doctree, docname):
    for node in list(doctree.findall(nodes.raw)):
        if "thebe-config" in node.astext() or node.astext().startswith("<script>kernelName"):
            node.parent.remove(node)


def share_html_handlers(app):
    """Let `singlehtml` use the handlers of `html`.

    sphinx-proof and sphinx-exercise register handlers for that builder by name, after which Sphinx ignores
    the `html` handlers of every other extension for it.
    """
    handlers = app.registry.translation_handlers
    if "singlehtml" in handlers:
        handlers["singlehtml"] = {**handlers.get("html", {}), **handlers["singlehtml"]}


def setup(app):
    app.config.mathjax_path = "mathjax/startup.js"
    app.config.mathjax3_config = {"loader": {"load": LOADED}}
    app.connect("builder-inited", share_html_handlers, priority=1)
    app.connect("doctree-resolved", drop_thebe_nodes, priority=900)
    app.connect("html-page-context", drop_thebe, priority=900)
    app.connect("build-finished", copy_mathjax)
    app.connect("build-finished", trim)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
