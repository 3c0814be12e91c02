"""The figures of a run's report: where the time went, over time; and each recovery, rank by rank."""

from collections.abc import Iterable, Mapping

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.ticker import MaxNLocator

from course_lib.lab.anatomy import Phase, Recovery
from course_lib.lab.fig05 import ORANGE, PURPLE, SKY
from course_lib.lab.history import Event, History
from course_lib.lab.ledger import KINDS, Ledger, Piece
from course_lib.lab.plots import BLUE, DARK, GREEN, GREY, VERMILION, NotebookFigure, starts

BROWN, GOLD, SLATE, PALE, BLACK = "#8C6D31", "#E3C400", "#7E8AA2", "#E6E6E6", "#222222"
KIND_COLORS = dict(zip(KINDS, (GREEN, SKY, PURPLE, ORANGE, BROWN, SLATE, VERMILION, PALE, BLACK), strict=True))
PHASE_COLORS = {
    "failed starts": BROWN, "detection": VERMILION, "kill": "#8A2D00", "idle": GREY, "launch": DARK,
    "rendezvous": PURPLE, "process start": BLACK, "import": ORANGE, "process group": GOLD, "data": SKY,
    "snapshot load": "#5B3A8C", "evaluation": "#7FB8A4", "first batch": "#B56BA1", "warm-up": GREEN, "first step": BLUE,
}  # fmt: skip
MOST_LANES, MOST_RECOVERIES = 16, 6
_COLUMNS = 1500  # what a picture can tell apart
_WIDTH = 9.0


def ledger_figure(history: History, ledger: Ledger) -> NotebookFigure:
    """The run over its seconds: the whole job, and below it each rank while it had a process."""
    ranks = sorted({worker.rank for worker in history.workers})[:MOST_LANES]
    figure = NotebookFigure(figsize=(_WIDTH, 1.55 + 0.36 * (len(ranks) + 1)), facecolor="white", dpi=110)
    ax = _axes(figure, 0.75, ["job", *(f"rank {rank}" for rank in ranks)])
    zero = history.begin
    _draw_pieces(ax, 0, coarse(ledger.pieces, ledger.wall), zero)
    for row, rank in enumerate(ranks, 1):
        for worker in (worker for worker in history.workers if worker.rank == rank):
            _draw_pieces(ax, row, coarse(ledger.within(worker.born, worker.ended), ledger.wall), zero)
    _mark_generations(ax, history, ledger.wall / 1e6, len(ranks) + 0.45)
    for outage in ledger.outages:
        if outage.died is not None:
            ax.plot((outage.died - zero) / 1e6, -0.4, "X", color=VERMILION, ms=8, mec="white", zorder=5, clip_on=False)
    ax.set_xlim(0, max(ledger.wall / 1e6, 1e-6))
    ax.set_xlabel("seconds since the first process began")
    _legend(
        figure,
        {f"{kind} {percent(share)}": KIND_COLORS[kind] for kind in KINDS if (share := ledger.share(kind)) > 5e-5},
    )
    return figure


def recovery_figure(recovery: Recovery) -> NotebookFigure:
    """One recovery over the seconds since the death: the job's phases, and what each rank's processes did."""
    ranks = list(recovery.ranks)[:MOST_LANES]
    figure = NotebookFigure(figsize=(_WIDTH, 1.8 + 0.36 * (len(ranks) + 1)), facecolor="white", dpi=110)
    ax = _axes(figure, 1.0, ["job", *(f"rank {rank}" for rank in ranks)])
    zero, length = recovery.died, recovery.total / 1e6
    _draw_phases(ax, 0, recovery.phases, zero, length)
    for row, rank in enumerate(ranks, 1):
        _draw_old(ax, row, rank, recovery, length)
        _draw_phases(
            ax, row, [p for p in recovery.ranks[rank] if not p.name.startswith("rendezvous")], zero, length, words=False
        )
    ax.axvline(0, color=VERMILION, lw=1.2)
    ax.set_xlim(-0.09 * length, 1.01 * length)
    ax.set_xlabel("seconds since the death")
    _legend(figure, {f"{p.name} {(p.end - p.begin) / 1e6:.2f} s": _color(p) for p in recovery.phases})
    return figure


def loss_figure(events: list[Event]) -> NotebookFigure:
    """The loss of each start over the optimizer step: what was kept, what a death threw away, where each began."""
    tries = starts(events)
    figure = NotebookFigure(figsize=(_WIDTH, 3.4), facecolor="white", dpi=110)
    ax: Axes = figure.add_axes((0.085, 0.15, 0.9, 0.73))
    ax.spines[["top", "right"]].set_visible(False)
    for number, start in enumerate(tries):
        kept = min((later.began for later in tries[number + 1 :]), default=start.stopped)
        alive = {step: loss for step, loss in start.curve.items() if step < kept}
        gone = {step: loss for step, loss in start.curve.items() if step >= kept - 1}  # with where it parts
        ax.plot(list(gone), list(gone.values()), "--", color=VERMILION, lw=1.6, zorder=2)
        ax.plot(list(alive), list(alive.values()), color=BLUE, lw=1.8, zorder=3)
        if start.began in start.curve and start.began:
            ax.plot(start.began, start.curve[start.began], "D", color=GREEN, ms=7, mec="white", zorder=4)
        if start.crashed and start.curve:
            ax.plot(*list(start.curve.items())[-1], "X", color=VERMILION, ms=9, mec="white", zorder=5)
    ax.set(xlabel="optimizer step", ylabel="loss")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    words = {"kept": BLUE, "crash, and what it threw away": VERMILION, "a start from a snapshot": GREEN}
    _legend(figure, words)
    return figure


def coarse(pieces: Iterable[Piece], wall: int, columns: int = _COLUMNS) -> list[Piece]:
    """Neighbours that a picture could not tell apart become one, of the kind that most of their time is of."""
    least = wall / columns
    found: list[Piece] = []
    times: dict[str, int] = {}
    begin: int | None = None
    for piece in pieces:
        begin = piece.begin if begin is None else begin
        times[piece.kind] = times.get(piece.kind, 0) + piece.end - piece.begin
        if piece.end - begin >= least:
            found.append(Piece(begin, piece.end, max(times, key=lambda kind: times[kind])))
            begin, times = None, {}
    if begin is not None and found:
        found[-1] = Piece(found[-1].begin, begin + sum(times.values()), found[-1].kind)
    return found


def _mark_generations(ax: Axes, history: History, wall: float, bottom: float) -> None:
    """A line where each begins, and its number where there is room."""
    free = -1.0
    for attempt in history.attempts:
        if attempt.generation is not None:
            x = (attempt.born - history.begin) / 1e6
            ax.plot([x, x], [-0.62, bottom], color=DARK, lw=0.8, ls=":")
            if x >= free:
                words = f"{'generation ' if free < 0 else ''}{attempt.generation}"
                ax.text(x, -0.66, f" {words}", color=DARK, size=9, va="bottom")
                free = x + 0.0095 * wall * (len(words) + 1)


def percent(share: float) -> str:
    """A share in %, with as many digits as a small one needs."""
    return f"{share:.1%}" if share >= 0.001 or share == 0 else f"{share:.2%}"


def _axes(figure: NotebookFigure, top: float, rows: list[str]) -> Axes:
    """An axes with a row for each name, `top` inches below the figure's edge."""
    height = figure.get_figheight()
    ax: Axes = figure.add_axes((0.085, 0.5 / height, 0.9, 1 - (top + 0.5) / height))
    ax.set_yticks(range(len(rows)), rows)
    ax.set_ylim(len(rows) - 0.45, -0.62)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(left=False)
    return ax


def _draw_pieces(ax: Axes, row: int, pieces: list[Piece], zero: int) -> None:
    height = 0.72 if row == 0 else 0.5
    for kind in dict.fromkeys(piece.kind for piece in pieces):
        spans = [((p.begin - zero) / 1e6, (p.end - p.begin) / 1e6) for p in pieces if p.kind == kind]
        ax.broken_barh(spans, (row - height / 2, height), facecolors=KIND_COLORS[kind], lw=0)


def _color(phase: Phase) -> str:
    return PHASE_COLORS[phase.name.split(" + ")[0]]


def _draw_phases(ax: Axes, row: int, phases: Iterable[Phase], zero: int, length: float, words: bool = True) -> None:
    for phase in phases:
        begin, width = (phase.begin - zero) / 1e6, (phase.end - phase.begin) / 1e6
        ax.barh(row, width, left=begin, height=0.72 if words else 0.5, color=_color(phase), ec="white", lw=0.6)
        if words and width > 0.0125 * length * len(phase.name):
            ink = "white" if sum(to_rgb(_color(phase))) < 1.5 else "black"
            ax.text(begin + width / 2, row, phase.name, ha="center", va="center", size=9, color=ink, weight="bold")


def _draw_old(ax: Axes, row: int, rank: int, recovery: Recovery, length: float) -> None:
    """The lives of the processes that were this rank: a cross where one died, else a bar to where it left by itself."""
    for attempt in recovery.before:
        for worker in (worker for worker in attempt.workers if worker.rank == rank):
            left = worker.moments("left")
            died = recovery.died if attempt.begun is not None else attempt.death
            begin = max((worker.born - recovery.died) / 1e6, -0.09 * length)
            end = max(begin, ((left or [died])[-1] - recovery.died) / 1e6)
            ax.barh(row, end - begin, left=begin, height=0.5, color=PALE)
            if not left:
                ax.plot(end, row, "X", color=VERMILION, ms=9, mec="white", zorder=5)


def _legend(figure: NotebookFigure, entries: Mapping[str, str]) -> None:
    """Coloured squares and their words, in lines at the top of the figure."""
    x, y = 0.085, 0.12
    for words, color in entries.items():
        width = (0.078 * len(words) + 0.35) / _WIDTH
        if x + width > 1.0:
            x, y = 0.085, y + 0.22
        at = 1 - y / figure.get_figheight()
        figure.text(x, at, "■", color=color, size=11, va="center")
        figure.text(x + 0.16 / _WIDTH, at, words, color="black", size=9, va="center")
        x += width
