"""The audit of a network, made when the site is built: `{audit} torchvision.models:resnet18 3x224x224`.

The network is built without its weights, so that it takes a second or two.
"""

import torch
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from gradinv.audit import audit, formats, input_shape, load


class AuditDirective(SphinxDirective):
    required_arguments = 2

    def run(self):
        place, size = self.arguments
        try:
            with torch.device("meta"):
                model = load(place)
            found = audit(model, input_shape(size), place.rpartition(":")[2])
        except ValueError as error:
            raise self.error(str(error)) from error
        return [nodes.raw("", formats.fragment(found), format="html")]


def setup(app):
    app.add_directive("audit", AuditDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
