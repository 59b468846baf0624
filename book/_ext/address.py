"""What needs the book's address: it is written in `_config.yml` once, and taken from there."""

from urllib.parse import urlsplit

NOT_FOUND = (
    "<h1>Page not found</h1>"
    "<p>There is no page at this address.</p>"
    '<p>Start at the <a href="{prefix}index.html">first page</a>, '
    'or <a href="{prefix}search.html">search the book</a>.</p>'
)


def take_over(app, config):
    """The page for wrong addresses links from the host's root; cards on social media want whole addresses."""
    prefix = f"{urlsplit(config.html_baseurl).path.rstrip('/')}/"
    config.notfound_urls_prefix = prefix
    config.notfound_context = {"title": "Page not found", "body": NOT_FOUND.format(prefix=prefix)}
    config.ogp_site_url = config.html_baseurl


def setup(app):
    app.connect("config-inited", take_over, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
