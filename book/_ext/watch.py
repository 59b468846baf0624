"""A film strip of a chapter that can be watched: its frames as a table, from which `watch.js` makes a player.

    ```{watch} fig-label
    :key: KEY
    :of: what the film shows
    ```

The figure is the film strip of `plots.film`, further up on the page. KEY is JSON text that the notebook stored with
`glue`: places (of the frames in the strip, the first of which is the private picture), steps, cost and psnr (one a
frame, without the first), of (the number of steps), cuts (steps at which the step size is cut) and curve (pairs of
step and cost). Without JavaScript and on paper the strip and the table remain.
"""

import ast
import html
import json
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import directives
from notebook_figure import glued
from sphinx.util.docutils import SphinxDirective

TEXT = "application/papermill.record/text/plain"


def table(film: dict, figure: str, of: str) -> str:
    """The frames in numbers, folded away, with what the player needs."""
    rows = "".join(
        f"<tr><td>{step}</td><td>{cost:.3g}</td><td>{psnr:.1f}</td></tr>"
        for step, cost, psnr in zip(film["steps"], film["cost"], film["psnr"], strict=True)
    )
    return (
        f'<details class="film" data-figure="{html.escape(figure)}" data-of="{html.escape(of)}" '
        f'data-film="{html.escape(json.dumps(film))}"><summary>The frames in numbers</summary>'
        f"<table><caption>Each frame of {html.escape(of)}</caption><thead><tr>"
        '<th scope="col">step</th><th scope="col">cost</th><th scope="col">PSNR (dB)</th>'
        f"</tr></thead><tbody>{rows}</tbody></table></details>"
    )


class Watch(SphinxDirective):
    required_arguments = 1
    option_spec = {  # noqa: RUF012
        "key": directives.unchanged_required,
        "of": directives.unchanged_required,
    }

    def run(self):
        try:
            text = glued(Path(self.env.doc2path(self.env.docname)), self.options["key"], TEXT)
        except LookupError as error:
            raise self.error(str(error)) from error
        film = json.loads(ast.literal_eval(text))
        return [nodes.raw("", table(film, self.arguments[0], self.options["of"]), format="html")]


def setup(app):
    app.add_directive("watch", Watch)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
