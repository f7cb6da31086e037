"""The instrument of notebook 02: sliders and an editable list of budgets, with figures that follow.

    from workbench.views.subject import live
    from workbench.views.widgets import BudgetInstrument
    if live():
        display(BudgetInstrument().box)

The figure is a plotly `FigureWidget` whose traces are updated in place, which is the quickest way to redraw; it is
made only when a person looks on, so it never reaches a saved notebook. Numbers come from `workbench.outcomes`.
"""

import html
from collections.abc import Callable
from typing import Any

import ipywidgets as ipw
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench import outcomes
from workbench.advisor import AUTO, Constraints, Study, advise, open_study
from workbench.budgets import Configuration, generate_budgets, parse_budgets
from workbench.costs import CostModel, choose_profile
from workbench.errors import WorkbenchError
from workbench.models import model_facts
from workbench.presets import PRESETS
from workbench.sources import load_workload
from workbench.views import theme
from workbench.workload import ItemsPerCall, RequestPerCall, Workload, group

_SPACINGS = {"doubling": "doubling", "equal steps": "equal", "vLLM's own": "auto"}


class BudgetInstrument:
    """A workload, a configuration, and what vLLM makes of both.

    Args:
        workload: a preset's name, or whatever else `load_workload` takes.

    Attributes:
        box: the widget to display.
        study: the workload that is shown, ready to be planned.
        tried: the outcome that is shown; None while the input makes none.
    """

    def __init__(self, workload: str = "mixed", model: str = "ernie45_vl", costs: CostModel | None = None) -> None:
        self.facts = model_facts(model)
        self.costs = costs or CostModel(choose_profile(model))
        self.study: Study
        self.tried: outcomes.Outcome | None = None
        self._loaded: dict[str, Workload] = {}
        self._auto: outcomes.Outcome
        self._quiet = False
        self._make_controls(workload)
        self.figure: go.Figure = _figure()
        self._open()
        # Only now a widget: changes that reach a browser before plotly is loaded there are lost.
        self.figure = go.FigureWidget(self.figure)
        self.box = ipw.VBox(
            [
                ipw.HBox([self.preset, self.file, self.per_call]),
                ipw.HBox([self.spacing, self.graphs, self.largest, self.max_items]),
                ipw.HBox([self.budgets, self.advise]),
                self.message,
                self.figure,
                self.config,
            ]
        )

    # --- controls

    def _make_controls(self, workload: str) -> None:
        wide = ipw.Layout(width="34em")
        presets = [name for name, preset in PRESETS.items() if self.facts.key in preset.models]
        preset = workload if workload in presets else presets[0]
        self.preset = ipw.Dropdown(options=presets, value=preset, description="workload")
        given = "" if workload in presets else workload
        self.file = ipw.Text(given, placeholder="or a file, a folder of images, {(224, 224, 1): 1.0}", layout=wide)
        self.file.continuous_update = False
        self.per_call = ipw.IntSlider(value=0, min=0, max=64, description="items a call")
        self.spacing = ipw.Dropdown(options=_SPACINGS, value="doubling", description="spacing")
        self.graphs = ipw.IntSlider(value=6, min=1, max=16, description="graphs")
        self.largest = ipw.IntSlider(value=4096, min=64, max=int(self.costs.replay.budgets[-1]), step=64,
                                     description="largest")  # fmt: skip
        self.max_items = ipw.IntSlider(value=4, min=0, max=64, description="max items")
        self.budgets = ipw.Text(description="budgets", layout=wide, continuous_update=False)
        self.advise = ipw.Button(description="Advise", button_style="primary", tooltip="Search for the best budgets")
        self.message = ipw.HTML()
        self.config = ipw.Textarea(description="to copy", layout=ipw.Layout(width="60em", height="7em"))
        for control in (self.preset, self.file, self.per_call):
            control.observe(self._guarded(self._open), "value")
        for control in (self.spacing, self.graphs, self.largest):
            control.observe(self._guarded(self._space), "value")
        for control in (self.budgets, self.max_items):
            control.observe(self._guarded(self._draw), "value")
        self.advise.on_click(self._guarded(self._advise))

    def _guarded(self, action: Callable[[], None]) -> Callable[[Any], None]:
        """An event handler that shows a person's mistake as a sentence, and ignores changes made by the code here."""

        def handle(_event: Any) -> None:
            if self._quiet:
                return
            try:
                action()
            except WorkbenchError as error:
                self.tried = None
                self.message.value = f"<b>{html.escape(str(error))}</b>"

        return handle

    def _set(self, **values: Any) -> None:
        """Set controls without drawing for each."""
        self._quiet = True
        try:
            for name, value in values.items():
                getattr(self, name).value = value
        finally:
            self._quiet = False

    # --- what they do

    def _open(self) -> None:
        """Load the workload and form its calls."""
        name = self.file.value.strip() or self.preset.value
        if name not in self._loaded:
            self._loaded[name] = load_workload(name, self.facts)
        policy = ItemsPerCall(self.per_call.value) if self.per_call.value else RequestPerCall()
        self.study = open_study(group(self._loaded[name], policy), self.costs)
        self._auto = outcomes.outcome(self.study, Configuration(), AUTO)
        largest = max(self.largest.min, self.study.space.largest_item)
        if self.largest.value < largest:
            self._set(largest=largest)
        self._space()

    def _space(self) -> None:
        """Fill the list of budgets from the sliders."""
        low, top, count = self.largest.min, self.largest.value, self.graphs.value
        if self.spacing.value == "auto":
            self._set(budgets="", max_items=0)
        elif self.spacing.value == "equal":
            self._set(budgets=_text({max(low, round(top * (n + 1) / count)) for n in range(count)}))
        else:
            self._set(budgets=_text({*generate_budgets(low, top)[-count:-1], top}))
        self._draw()

    def _advise(self) -> None:
        """Take the advisor's answer."""
        constraints = Constraints(max_graphs=self.graphs.value)
        answer = advise(self.study.workload, self.costs, self.study.limits, constraints=constraints).answer
        self._set(budgets=_text(answer.budgets), max_items=answer.max_items)
        self._draw()

    def _draw(self) -> None:
        """Plan, price and redraw."""
        configuration = Configuration(parse_budgets(self.budgets.value), self.max_items.value)
        self.tried = outcomes.outcome(self.study, configuration, "this")
        _update(self.figure, self.tried, self._auto)
        self.message.value = _sentence(self.tried, self._auto)
        self.config.value = _to_copy(configuration)


def _text(budgets: "set[int] | tuple[int, ...]") -> str:
    return ", ".join(map(str, sorted(budgets)))


def _to_copy(configuration: Configuration) -> str:
    import msgspec

    config = msgspec.json.encode(configuration.compilation_config()).decode()
    return f"--compilation-config '{config}'"


def _sentence(tried: outcomes.Outcome, auto: outcomes.Outcome) -> str:
    """What is shown, in a line."""
    one = tried.candidate
    if one.refused or one.prediction is None:
        return f"<b>{html.escape(one.refused or 'not priced')}</b>"
    waste = "no replay" if one.waste is None else f"padding waste {one.waste:.1%}"
    line = f"mean {one.prediction.mean_us / 1e3:.3f} ms, P99 {one.prediction.p99_us / 1e3:.3f} ms; {waste}"
    if auto.candidate.prediction is not None:
        ratio = auto.candidate.prediction.mean_us / one.prediction.mean_us
        line += f"; {ratio:.2f} times as fast as {AUTO}"
    if one.capture_bytes is not None and one.capture_seconds is not None:
        line += f"; captures {one.capture_bytes / outcomes.MIB:,.0f} MiB, {one.capture_seconds:.2f} s"
    return line + f"; {int(tried.plan.fallback.sum()):,} eager fallbacks"


# The figure -----------------------------------------------------------------------------------------------------------

_TOKENS, _PADDING, _FILL, _AUTO_CALLS, _CALLS, _MEMORY = range(6)  # positions of its traces


def _figure() -> go.Figure:
    """Four panels without data; the order of their traces is that of the names above."""
    titles = ("million tokens by graph", "replays by fill", "calls at or below, ms", "capture memory by graph, MiB")
    figure = make_subplots(rows=2, cols=2, subplot_titles=titles, vertical_spacing=0.16)
    figure.add_bar(name="tokens", marker_color=theme.BLUE, row=1, col=1)
    figure.add_bar(name="padding", marker_color=theme.VERMILION, row=1, col=1)
    figure.add_bar(name="fill", marker_color=theme.BLUE, showlegend=False, row=1, col=2)
    step = {"shape": "hv", "width": 2}
    figure.add_scatter(name=AUTO, mode="lines", line=step | {"color": theme.MUTED}, row=2, col=1)
    figure.add_scatter(name="this", mode="lines", line=step | {"color": theme.GREEN}, row=2, col=1)
    figure.add_bar(name="memory", marker_color=theme.PURPLE, showlegend=False, row=2, col=2)
    figure.update_layout(barmode="stack", height=560, bargap=0.1, legend={"y": 1.06})
    figure.update_xaxes(type="category", row=1, col=1)
    figure.update_xaxes(type="category", row=2, col=2)
    figure.update_xaxes(tickformat=".0%", range=[0, 1], row=1, col=2)
    figure.update_yaxes(tickformat=".0%", row=1, col=2)
    figure.update_yaxes(tickformat=".0%", range=[0, 1.02], row=2, col=1)
    return figure


def _update(figure: go.Figure, tried: outcomes.Outcome, auto: outcomes.Outcome) -> None:
    """Put an outcome into the figure, in one message to the browser."""
    graphs, fill, bill = outcomes.per_budget(tried), outcomes.fill_histogram(tried), outcomes.bill(tried)
    times = outcomes.latency([auto, tried])
    with figure.batch_update():
        for position, column in ((_TOKENS, "tokens"), (_PADDING, "padding tokens")):
            figure.data[position].x = graphs["graph"].tolist()
            figure.data[position].y = (graphs[column] / 1e6).tolist()
        figure.data[_FILL].x = ((fill["from"] + fill["to"]) / 2).tolist()
        figure.data[_FILL].y = fill["share"].tolist()
        for position, name in ((_AUTO_CALLS, AUTO), (_CALLS, "this")):
            mine = times[times["configuration"] == name]
            figure.data[position].x = mine["to ms"].tolist()
            figure.data[position].y = mine["share"].cumsum().tolist()
        figure.data[_MEMORY].x = bill["graph"].tolist()
        figure.data[_MEMORY].y = bill["memory MiB"].tolist()
