"""A run's report as one HTML page that needs nothing else: the pictures are in it."""

from base64 import b64encode
from html import escape

from course_lib.lab.account import Report, headline
from course_lib.lab.anatomy import medians
from course_lib.lab.ledger import KINDS
from course_lib.lab.plots import NotebookFigure
from course_lib.lab.report_figures import (
    KIND_COLORS,
    MOST_RECOVERIES,
    ledger_figure,
    loss_figure,
    percent,
    recovery_figure,
)

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --soft: #5a5a5a; --line: #d8d8d8; --paper: #fbfbfa; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e6; --soft: #a8a8a4; --line: #44443f; --paper: #1c1d1b; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2.2rem 0 0.6rem; }
p, figcaption { color: var(--soft); max-width: 46rem; margin: 0.4rem 0; }
.head { font-size: 1.15rem; color: var(--ink); }
figure { margin: 0.8rem 0; overflow-x: auto; }
img { background: white; border: 1px solid var(--line); border-radius: 6px; max-width: 100%; box-sizing: border-box;
  padding: 8px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } .wide { overflow-x: auto; }
th, td { padding: 0.15rem 0.9rem 0.15rem 0; text-align: right; border-bottom: 1px solid var(--line); font-weight: 400; }
th:first-child, td:first-child { text-align: left; } thead th, .sum td { font-weight: 600; }
i { display: inline-block; width: 0.75em; height: 0.75em; margin-right: 0.5em; border: 1px solid var(--line); }
"""
_MEANING = {
    "productive": "steps of the final history",
    "evaluating": "the epochs' evaluations",
    "stalled": "training waits for a snapshot",
    "replayed": "lost to a death, and done again",
    "lost": "lost to a death, and not done again",
    "starting": "from the start of the processes to the first step",
    "recovering": "from a death to the first new step's beginning",
    "idle": "nothing of the job runs",
    "unattributed": "the events do not tell",
}


def page(report: Report) -> str:
    """The whole page."""
    name = escape(report.name)
    body = [f"<h1>{name}</h1>", f'<p class="head">{escape(report.state)}: {escape(headline(report))}</p>']
    body += ["<h2>Where the time went</h2>", _picture(ledger_figure(report.history, report.ledger), "the job over time,"
             " and each rank while it had a process; a cross is a death"), _ledger_table(report)]  # fmt: skip
    body += [f"<p>{escape(note)}.</p>" for note in report.notes()]
    if report.recoveries:
        body += ["<h2>What each recovery was made of</h2>", _recovery_table(report)]
    for number, recovery in enumerate(report.recoveries[:MOST_RECOVERIES], 1):
        caption = f"recovery {number}: {recovery.total / 1e6:.2f} s from the death to the first new step; grey are the "
        body.append(_picture(recovery_figure(recovery), caption + "processes that came to their end"))
    if (more := len(report.recoveries) - MOST_RECOVERIES) > 0:
        body.append(f"<p>{more} more recoveries are not drawn.</p>")
    if any(attempt.steps for attempt in report.history.attempts):
        body += ["<h2>The loss</h2>", _picture(loss_figure(report.events), "the loss over the optimizer step")]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{name}</title>'
    head += f"<style>{_STYLE}</style>"
    return "\n".join(["<!DOCTYPE html>", f'<html lang="en"><head>{head}</head><body>', *body, "</body></html>", ""])


def _picture(figure: NotebookFigure, caption: str) -> str:
    data = b64encode(figure._repr_png_()).decode()
    words = escape(caption[0].upper() + caption[1:])
    return f'<figure><img src="data:image/png;base64,{data}" alt="{words}"><figcaption>{words}.</figcaption></figure>'


def _table(head: list[str], rows: list[list[str]], total: list[str]) -> str:
    """A table of cells that are HTML already."""
    lines = ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
    heads = "".join(f"<th>{cell}</th>" for cell in head)
    last = '<tr class="sum">' + "".join(f"<td>{cell}</td>" for cell in total) + "</tr>"
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead>{"".join(lines)}{last}</table></div>'


def _ledger_table(report: Report) -> str:
    totals, steps = report.ledger.totals(), report.ledger.steps
    rows = []
    for kind in KINDS:
        name = f'<i style="background:{KIND_COLORS[kind]}"></i>{kind}: <small>{_MEANING[kind]}</small>'
        share = percent(report.ledger.share(kind))
        rows.append([name, f"{totals[kind] / 1e6:.6f}", share, str(steps[kind]) if steps[kind] else ""])
    wall = ["wall time", f"{sum(totals.values()) / 1e6:.6f}", "100.0%", str(sum(steps.values()))]
    return _table(["", "seconds", "share", "steps"], rows, wall)


def _recovery_table(report: Report) -> str:
    shown = report.recoveries[:MOST_RECOVERIES]
    rows = []
    for name, seconds in medians(list(report.recoveries)).items():
        cells = [sum(p.end - p.begin for p in recovery.phases if p.name == name) / 1e6 for recovery in shown]
        rows.append([name, *(f"{cell:.3f}" if cell else "" for cell in cells), f"{seconds:.3f}"])
    heads = ["seconds of recovery", *map(str, range(1, len(shown) + 1)), "median"]
    total = ["death to first new step done", *(f"{recovery.total / 1e6:.3f}" for recovery in shown)]
    table = [heads, *rows, [*total, f"{report.median_recovery:.3f}"]]
    if len(report.recoveries) == 1:
        table = [row[:-1] for row in table]
    return _table(table[0], table[1:-1], table[-1])
