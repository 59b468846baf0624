"""A site that loads nothing from elsewhere: it ships MathJax, and leaves out the loader of thebe."""

import importlib.util
import shutil
from pathlib import Path

from docutils import nodes

MATHJAX = "mathjax/tex-chtml.js"
PARTS = ("tex-chtml.js", "output/chtml/fonts/woff-v2", "input/tex/extensions")


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
    app.config.mathjax_path = MATHJAX
    app.connect("builder-inited", share_html_handlers, priority=1)
    app.connect("doctree-resolved", drop_thebe_nodes, priority=900)
    app.connect("html-page-context", drop_thebe, priority=900)
    app.connect("build-finished", copy_mathjax)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
