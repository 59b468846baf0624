"""A figure that a notebook stored with `glue`, shown on another page with alt text and a caption.

    ```{notebook-figure} ../notebooks/NAME.ipynb::KEY
    :alt: what the picture shows
    :name: fig-label

    The caption.
    ```

myst-nb's own `{glue:figure}` reaches only figures of the same page.
"""

import base64
import json
import os
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

PNG = "application/papermill.record/image/png"


def glued(notebook: Path, key: str, kind: str) -> str:
    """What a notebook stored under a key, as it stands in the file. Raises LookupError where there is none."""
    for cell in json.loads(notebook.read_text())["cells"]:
        for output in cell.get("outputs", []):
            if output.get("metadata", {}).get("scrapbook", {}).get("name") == key and kind in output["data"]:
                return "".join(output["data"][kind])
    raise LookupError(f"{notebook} has stored no {kind.rpartition('record/')[2]} named {key!r}")


def glued_png(notebook: Path, key: str) -> bytes:
    return base64.b64decode(glued(notebook, key, PNG))


class NotebookFigure(SphinxDirective):
    required_arguments = 1
    has_content = True
    option_spec = {  # noqa: RUF012
        "alt": directives.unchanged_required,
        "name": directives.unchanged,
    }

    def run(self):
        relative, key = self.arguments[0].split("::")
        page = Path(self.env.doc2path(self.env.docname)).parent
        notebook = (page / relative).resolve()
        self.env.note_dependency(str(notebook))
        try:
            picture = glued_png(notebook, key)
        except (LookupError, OSError) as error:
            raise self.error(str(error)) from error
        path = Path(self.env.mystnb_config.output_folder) / f"{notebook.stem}-{key}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture)
        caption = nodes.Element()
        self.state.nested_parse(StringList(self.content), self.content_offset, caption)
        figure = nodes.figure(
            "",
            nodes.image(uri=os.path.relpath(path, page), alt=self.options["alt"]),
            nodes.caption("", "", *caption[0].children),
            align="center",
        )
        self.set_source_info(figure)
        self.add_name(figure)
        return [figure]


def setup(app):
    app.add_directive("notebook-figure", NotebookFigure)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
