"""An audit as a text table, as JSON and as HTML."""

import json
from dataclasses import asdict
from html import escape

import pandas as pd

from gradinv.audit.found import Audit

LONG = 30  # layers; of more, HTML shows first those that decide
FEW = 10  # how many of them at least

HEADINGS = {
    "layers": "Layers: directions of each input, and how many of them its own equations give",
    "skips": "Skips",
    "attacks": "Which attacks apply",
    "changes": "Single changes that would withhold most",
    "not_counted": "Not counted",
}
COLUMNS = {
    "layers": {"name": "layer", "kind": "kind", "x": "unknowns", "rank": "rank", "nullity": "nullity",
               "exposed": "exposed", "ra": "RA-i", "weights": "weights", "z": "output", "virtual": "virtual"},
    "skips": {"name": "around", "kind": "joined by", "layers": "layers", "with_skip": "RA-i with",
              "without_skip": "RA-i without"},
    "attacks": {"name": "attack", "applies": "applies", "why": "why"},
    "changes": {"layer": "layer", "what": "change", "nullity_before": "nullity before",
                "nullity_after": "nullity after", "weights_before": "weights before", "weights_after": "weights after"},
    "not_counted": {"name": "part", "kind": "kind", "why": "why"},
}  # fmt: skip
SENTENCES = {
    "attacks": "{name}: {applies}, {why}",
    "changes": "{layer}: {what}: nullity {nullity_before} to {nullity_after}, "
    "weights {weights_before} to {weights_after}",
    "not_counted": "{name} ({kind}): {why}",
}


def facts(audit: Audit) -> dict:
    """All that an audit says, in plain values."""
    exposed = {layer.name for layer in audit.report.exposed}
    layers = audit.report.table().to_dict("records")
    skips = audit.report.block_table().to_dict("records")
    return {
        "name": audit.name,
        "input_shape": list(audit.input_shape),
        "decisive": audit.decisive.name if audit.decisive and audit.decisive.nullity else None,
        "nullity": audit.decisive.nullity if audit.decisive else None,
        "findings": audit.findings,
        "notes": list(audit.notes),
        "attacks": [asdict(attack) for attack in audit.attacks],
        "changes": [asdict(change) for change in audit.changes],
        "layers": [{**row, "exposed": bool(row["weights"]) and row["name"] in exposed} for row in layers],
        "skips": [{**row, "layers": list(row["layers"])} for row in skips],
        "not_counted": [{"name": x.name, "kind": x.kind, "why": x.why} for x in audit.report.not_counted],
    }


def as_json(audit: Audit) -> str:
    return json.dumps(facts(audit), indent=2)


def as_text(audit: Audit) -> str:
    """Sentences and tables for a terminal."""
    found = facts(audit)
    lines = [_title(found), "", *found["findings"], *(f"Note: {note}" for note in found["notes"])]
    for part, heading in HEADINGS.items():
        if not found[part]:
            continue
        lines += ["", heading]
        if part in SENTENCES:
            cells = [{key: _cell(value) for key, value in row.items()} for row in found[part]]
            lines += ["  " + SENTENCES[part].format(**row) for row in cells]
        else:
            rows = [{head: _cell(row[key]) for key, head in COLUMNS[part].items()} for row in found[part]]
            lines.append(pd.DataFrame(rows).to_string(index=False))
    return "\n".join(lines)


def _title(found: dict) -> str:
    return f"{found['name']} for one picture of {'x'.join(str(size) for size in found['input_shape'])}"


def _cell(value) -> str:
    if value is None:
        return "depends"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(value) if len(value) <= 3 else f"{value[0]} to {value[-1]} ({len(value)})"
    return f"{value:,}" if isinstance(value, int) else value or "the model"


# The colours are those of the page, so that it is readable in light and in dark.
STYLE = """<style>
.audit .wide { overflow-x: auto; margin: 0 0 1rem; }
.audit table { border-collapse: collapse; font-size: .85rem; width: 100%; margin: 0; }
.audit caption { caption-side: top; text-align: left; font-weight: 600; color: inherit; padding: .25rem 0; }
.audit :is(th, td) { padding: .2rem .5rem; text-align: left; vertical-align: top; font-weight: 400;
  border-bottom: 1px solid color-mix(in srgb, currentcolor 25%, transparent); }
.audit thead th { font-weight: 600; }
.audit .number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.audit tr.decisive > * { font-weight: 700; }
.audit td:not(.number):last-child { min-width: 12rem; }
</style>"""
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
:root[data-theme="light"] {{ color-scheme: light; }}
:root[data-theme="dark"] {{ color-scheme: dark; }}
body {{ font: 1rem/1.5 system-ui, sans-serif; max-width: 70rem; margin: auto; padding: 1rem;
  background: Canvas; color: CanvasText; overflow-wrap: anywhere; }}
table {{ overflow-wrap: normal; }}
</style>
</head>
<body>
<main>
<h1>{title}</h1>
{body}
</main>
</body>
</html>"""


def as_html(audit: Audit) -> str:
    """A page of its own, without scripts, that loads nothing."""
    return PAGE.format(title=escape(_title(facts(audit))), body=fragment(audit))


def fragment(audit: Audit) -> str:
    """The same for a place in another page."""
    found = facts(audit)
    lines = [STYLE, '<div class="audit">', *(f"<p>{escape(line)}</p>" for line in found["findings"])]
    lines += [f"<p><strong>Note:</strong> {escape(note)}</p>" for note in found["notes"]]
    for part in ("attacks", "changes", "layers", "skips", "not_counted"):
        rows = found[part]
        if not rows:
            continue
        if part == "layers" and len(rows) > LONG:
            first = _first(rows)
            caption = f"{HEADINGS[part]} ({len(first)} of {len(rows)}, those that leave most open)"
            lines += [_table(found, part, first, caption), "<details>", f"<summary>All {len(rows)} layers</summary>"]
            lines += [_table(found, part, rows, f"All {len(rows)} layers"), "</details>"]
        elif len(rows) > FEW and part != "layers":
            lines += ["<details>", f"<summary>{HEADINGS[part]} ({len(rows)})</summary>"]
            lines += [_table(found, part, rows, HEADINGS[part]), "</details>"]
        else:
            lines.append(_table(found, part, rows, HEADINGS[part]))
    return "\n".join([*lines, "</div>"])


def _first(rows: list[dict]) -> list[dict]:
    """The ten layers that matter most, in running order: exposed ones first, those that leave most open first."""
    order = sorted(rows, key=lambda row: (not row["exposed"], -row["nullity"], -row["ra"]))
    chosen = [row["name"] for row in order[:FEW]]
    return [row for row in rows if row["name"] in chosen]


def _table(found: dict, part: str, rows: list[dict], caption: str) -> str:
    """A table in a box of its own that scrolls sideways and can be reached with the keyboard."""
    columns = COLUMNS[part]
    number = {key for key in columns if any(type(row[key]) is int for row in rows)}
    label = escape(f"{found['name']}: {caption}")
    lines = [f'<div class="wide" role="group" tabindex="0" aria-label="{label}">', "<table>"]
    lines.append(f"<caption>{escape(caption)}</caption>")
    heads = (f'<th scope="col"{_kind(key, number)}>{head}</th>' for key, head in columns.items())
    lines.append(f"<thead><tr>{''.join(heads)}</tr></thead><tbody>")
    for row in rows:
        decides = part == "layers" and found["nullity"] and row["name"] == found["decisive"]
        mark = ' class="decisive"' if decides else ""
        first, *rest = columns
        cells = (f"<td{_kind(key, number)}>{escape(_cell(row[key]))}</td>" for key in rest)
        lines.append(f'<tr{mark}><th scope="row">{escape(_cell(row[first]))}</th>{"".join(cells)}</tr>')
    return "\n".join([*lines, "</tbody></table></div>"])


def _kind(key: str, number: set[str]) -> str:
    return ' class="number"' if key in number else ""


FORMATS = {"table": as_text, "json": as_json, "html": as_html}
