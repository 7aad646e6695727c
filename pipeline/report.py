"""Warehouse → one self-contained HTML page, and the small pictures that Dagster shows beside an asset.

Every sentence that states a finding is computed from the rows beside it: other rows, other sentence. All numbers made
here are simulated or counted; what was measured is in `replay_report`. Nothing is shown that a table does not hold.
Text that came out of a dump reaches the page through Jinja's autoescaping only, and no plot holds any of it.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import polars as pl
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter

from pipeline.decode_report import VIEWS as DECODE_VIEWS
from pipeline.decode_report import decode_blocks
from pipeline.dump_checks import ORDER
from pipeline.experiment_report import experiments
from pipeline.inversion import COMMAND as INVERSION_COMMAND
from pipeline.inversion import inversion_block
from pipeline.lab_report import VIEWS as LAB_VIEWS
from pipeline.lab_report import lab_blocks
from pipeline.lookahead_report import EFFECT_VIEW, WATERFALL_VIEW, benefit_blocks
from pipeline.lookahead_report import VIEWS as LOOKAHEAD_VIEWS
from pipeline.page import (
    Block,
    Cell,
    Grid,
    Picture,
    Row,
    amount,
    described,
    known_text,
    listed,
    percent,
    phase_text,
    plural,
    points,
    sentence_case,
    side_by_side,
    sized,
)
from pipeline.plots import (
    COLOURS,
    PAGE_PLOT_INCHES,
    SMALL_PLOT_INCHES,
    Line,
    LineStyle,
    Plots,
    draw_lines,
    drawing,
    png,
    show_capacities,
    show_depths,
    show_layers,
)
from pipeline.reclaim_report import VIEWS as RECLAIM_VIEWS
from pipeline.reclaim_report import reclaim_blocks
from pipeline.replay_report import native_runs
from replayer.disclosure import belady_gap, best_causal, is_causal
from schemas.columns import COLUMNS
from schemas.files import DataFolder, publish, remove_stale
from schemas.tables import CONTRACT, DECODE_TABLES, EXPERIMENT_TABLES, LAB_TABLES, REPLAY_TABLES, SWEEP_TABLES, TABLES
from warehouse.build import read_tables

TEMPLATE = "report.html.j2"

# What has to agree before two hit rates are compared, apart from what a plot or table puts side by side.
SHARED_CONTRACT = tuple(
    name
    for name in CONTRACT
    if name
    not in (
        "policy",
        "semantics",
        "fit",
        "capacity_experts_total",
        "capacity_bytes",
        "seed",
        "pinned_fraction",
        "folios_per_expert",
    )
)
SEMANTICS_LABELS = {"event_atomic": "event-atomic", "sequential": "sequential"}
POLICY_GROUPS = {
    "Recency, queues and chance": {
        "lru": "LRU",
        "fifo": "FIFO",
        "clock": "CLOCK",
        "sieve": "SIEVE",
        "s3fifo": "S3-FIFO",
        "arc": "ARC",
        "least_stale": "Least-Stale",
        "random": "random victim",
    },
    "Frequency": {
        "lfu_gated": "LFU, gated",
        "lfu_always": "LFU, always admits",
        "lfu_in_cache": "LFU, counts forgotten",
        "lfru": "LFRU",
    },
    "Tables": {"static": "static table", "pinned_lru": "pinned part, LRU beside it"},
    "Models of the kernel's page cache": {"two_list": "two lists", "mglru": "MGLRU"},
    "Knowing the future": {"belady_forced": "Belady, forced", "belady_bypass": "Belady, bypass"},
}
POLICY_LABELS = {policy: label for group in POLICY_GROUPS.values() for policy, label in group.items()}
_LABELS_IN_SENTENCES = {
    "lfu_gated": "gated LFU",
    "lfu_always": "LFU that always admits",
    "lfu_in_cache": "LFU with counts forgotten",
    "pinned_lru": "LRU beside a pinned part",
    "two_list": "the kernel's two lists (model)",
    "mglru": "the kernel's MGLRU (model)",
    "belady_forced": "forced Belady",
    "belady_bypass": "Belady with bypass",
}
PREDICTOR_LABELS = {
    "previous_token": "previous token",
    "conditional": "conditional table",
    "union": "previous token and conditional table",
    "learned": "logistic regression",
    "frequency": "most frequent",
    "recorded": "recorded by the engine",
    "oracle": "oracle",
    "popularity": "random by popularity",
    "random": "random",
}
PLOTTED_PREDICTORS = ("previous_token", "conditional", "oracle")
NULL_PREDICTORS = ("oracle", "popularity", "random")
"""Bounds and nulls: in the table, but no finding."""
UNKNOWN_FACTS = {
    "model": "the model",
    "engine": "the engine",
    "domain": "the domain (kind of text)",
    "capture_method": "how the routes were recorded",
    "hidden_layers": "the number of decoder layers, dense ones included",
    "layer_base": "the layer numbers: the first layer of the dump is taken as 0",
    "num_experts": "the number of experts: the largest id + 1 is taken, a lower bound",
    "top_k_model": "experts per token by the model's configuration",
    "expert_bytes": "expert sizes: capacities are in experts, bytes are left out",
    "id_space": "what an expert id names (logical, physical, local or slot)",
    "weight_kind": "the meaning of the router weights",
    "router_order": "the router's order inside a row: ids arrived sorted, so results that depend on the order of "
    "accesses rest on an assumed one",
    "pass_boundaries": "forward passes: each token position is taken as one step",
    "phase": "the phase (prefill or decode) of all or some rows",
}

POLICY_STYLES: dict[str, LineStyle] = {
    "lru": ("blue", "-", "o"),
    "lfu_gated": ("vermillion", "-", "s"),
    "lfu_always": ("orange", "--", "^"),
    "static": ("green", "-", "D"),
    "belady_forced": ("purple", ":", ""),
    "belady_bypass": ("ink", "--", ""),
}
OTHER_STYLES: tuple[LineStyle, ...] = (
    ("sky", "-", "v"),
    ("green", "--", "^"),
    ("vermillion", ":", "o"),
    ("purple", "-", "s"),
    ("blue", "--", "D"),
)
WIDTH_STYLES: tuple[LineStyle, ...] = (("blue", "-", "o"), ("vermillion", "-", "s"), ("green", "-", "D"))
_OF_TRACES = tuple(
    name
    for name in TABLES
    if name not in (*REPLAY_TABLES, *EXPERIMENT_TABLES, *LAB_TABLES, *DECODE_TABLES, *SWEEP_TABLES, "inversion")
)
_FUTURE = "Knowing the future"
_WHOLE_CURVE = 20
"""A line of more points than this is drawn without its markers."""
_ORDER_WORDS = {1: "above", 0: "level with", -1: "below"}
_WINDOW_NAMES = {1: "W₁", 8: "W₈", 64: "W₆₄"}


def write_report(data_dir: Path) -> Path:
    """Writes `data_dir/report/index.html` from the warehouse and returns its path.

    Raises:
        warehouse.build.WarehouseMissing: nothing was built yet.
        warehouse.build.QueryFailed: the warehouse cannot be opened, or an older version built it.
        OSError: the page cannot be written.
    """
    page = render_report(read_tables(data_dir, views=(*LOOKAHEAD_VIEWS, *RECLAIM_VIEWS, *LAB_VIEWS, *DECODE_VIEWS)))
    file = DataFolder(data_dir).report
    remove_stale(file.parent)
    with publish(file) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return file


def render_report(tables: dict[str, pl.DataFrame]) -> str:
    """The page for these tables, and for the `VIEWS` of the modules it imports, if present.

    The same tables give the same bytes.
    """
    traces = tables["trace"].sort("trace_id").to_dicts()
    trace_ids = {trace["trace_id"] for trace in traces}
    newer = {trace["supersedes"]: trace["trace_id"] for trace in traces if trace["supersedes"] is not None}
    plots = Plots()
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(TEMPLATE).render(
        sections=[
            _section(f"trace-{number}", trace, _rows_of(tables, trace["trace_id"]), newer.get(trace["trace_id"]), plots)
            for number, trace in enumerate(traces, start=1)
        ],
        strangers=sorted({one for name in _OF_TRACES for one in tables[name]["trace_id"]} - trace_ids),
        overlap=_overlap_block(tables["domain_overlap"].to_dicts(), {trace["trace_id"]: trace for trace in traces}),
        inversion=inversion_block(tables["inversion"]) if tables["inversion"].height else None,
        inversion_command=f"{INVERSION_COMMAND} && expert-tier run",
        native=native_runs(tables, plots),
        reclaim=reclaim_blocks(tables),
        labs=lab_blocks(tables),
        decodes=decode_blocks(tables),
        experiments=experiments(tables),
        colours=COLOURS,
    )


def curve_png(curve: pl.DataFrame) -> bytes:
    """480 × 300 pixels of rows of `miss_ratio_curve`: hit rate by capacity under the first contract among them."""
    with drawing(SMALL_PLOT_INCHES) as (figure, axes):
        for shared, rows in _contracts(curve.to_dicts())[:1]:
            semantics, panel = _by_semantics(rows)[0]
            draw_lines(axes, _policy_lines(panel, _policy_styles(rows)))
            _show_capacities(axes, panel, pool_experts=None)
            axes.set_title(f"simulated, scope {shared['scope']}, {SEMANTICS_LABELS.get(semantics, semantics)}")
            axes.set_ylabel("hit rate")
            axes.legend(loc="lower right", ncols=2)
        return png(figure)


def recall_png(recall: pl.DataFrame) -> bytes:
    """480 × 300 pixels of rows of `lookahead_recall`: recall by layers ahead, over all layers."""
    with drawing(SMALL_PLOT_INCHES) as (figure, axes):
        lines = _recall_lines(_totals(recall.to_dicts()))
        if lines:
            draw_lines(axes, lines)
            show_depths(axes)
            axes.set_ylabel("recall")
            axes.legend(loc="best", ncols=2)
        axes.set_title("simulated lookahead recall, all layers")
        return png(figure)


def locality_png(locality: pl.DataFrame) -> bytes:
    """480 × 300 pixels of rows of `trace_locality`: reuse beside its nulls, over all layers."""
    with drawing(SMALL_PLOT_INCHES) as (figure, axes):
        for total in _totals(locality.to_dicts())[:1]:
            _draw_reuse(axes, total)
            axes.legend(loc="upper left")
        axes.set_title("reuse of experts, all layers")
        return png(figure)


@dataclass(frozen=True)
class Section:
    """All that is known and unknown about one trace."""

    anchor: str
    trace_id: str
    title: str
    warnings: list[str]
    unknowns: list[str]
    facts: list[tuple[str, str]]
    checks: Grid | None
    reporting: Grid | None
    blocks: list[Block]
    overview: list[Cell]
    command: str


def _rows_of(tables: dict[str, pl.DataFrame], trace_id: str) -> dict[str, list[Row]]:
    views = [name for name in LOOKAHEAD_VIEWS if name in tables]
    return {name: tables[name].filter(pl.col("trace_id") == trace_id).to_dicts() for name in (*_OF_TRACES, *views)}


def _section(anchor: str, trace: Row, rows: dict[str, list[Row]], newer: str | None, plots: Plots) -> Section:
    hit_rates, locality = rows["hit_rate"], rows["trace_locality"]
    trace_id = trace["trace_id"]
    return Section(
        anchor=anchor,
        trace_id=trace_id,
        title=", ".join(fact for fact in (trace["model"] or trace_id, trace["domain"]) if fact),
        warnings=_warnings(trace, rows["trace_check"], newer),
        unknowns=[UNKNOWN_FACTS.get(name, name) for name in re.split(r"\s*,\s*", trace["unknowns"].strip()) if name],
        facts=_facts(trace, phases=sorted({row["phase"] for row in (*hit_rates, *locality)})),
        checks=_checks_grid(rows["trace_check"]),
        reporting=_reporting_grid(rows["reporting_block"]),
        blocks=[
            *_policy_blocks(trace, rows["miss_ratio_curve"], hit_rates, plots),
            *_locality_blocks(trace, locality, plots),
            *_lookahead_blocks(trace, rows["lookahead_recall"], plots),
            *benefit_blocks(
                rows["lookahead_benefit"],
                plots,
                waterfalls=rows.get(WATERFALL_VIEW, ()),
                effects=rows.get(EFFECT_VIEW),
            ),
        ],
        overview=_overview(trace, hit_rates, locality),
        command=f"expert-tier run --trace {shlex.quote(trace_id)} && expert-tier report",
    )


def _warnings(trace: Row, checks: Sequence[Row], newer: str | None) -> list[str]:
    warnings = [
        f"Check {check['name']}: wanted {check['wanted']}; found {check['found']}."
        for check in checks
        if check["outcome"] == "warn"
    ]
    if trace["dropped_rows"]:
        warnings.append(f"{amount(trace['dropped_rows'])} rows of the dump did not enter the trace.")
    if newer is not None:
        warnings.append(f"A later dump of the same path takes this one's place: trace {newer}.")
    return warnings


def _facts(trace: Row, *, phases: Sequence[str]) -> list[tuple[str, str]]:
    smallest, largest = trace["expert_bytes_min"], trace["expert_bytes_max"]
    phase_rows = {
        "prefill": trace["prefill_rows"],
        "decode": trace["decode_rows"],
        "warm-up (never replayed)": trace["warmup_rows"],
        "of unknown phase": trace["unknown_phase_rows"],
    }
    passes = {"recorded": "passes as recorded", "assumed_per_token": "one per token position, assumed"}
    facts = {
        "Model": trace["model"] or "unknown",
        "Engine": trace["engine"] or "unknown",
        "Domain": trace["domain"] or "unknown",
        "Captured by": trace["capture_method"] or "unknown",
        "Phase scored": ", ".join("every phase" if phase == "all" else phase for phase in phases) or "nothing yet",
        "Raw dump": f"{trace['source_file']} ({trace['source_format']}, {sized(trace['source_bytes'])})",
        "Its SHA-256": trace["source_sha256"],
        "Layers": f"{amount(trace['moe_layers'])} with routed experts, of {known_text(trace['hidden_layers'])}",
        "Experts": f"{amount(trace['num_experts'])} in the largest layer ({trace['num_experts_source']}), "
        f"{amount(trace['pool_experts'])} in all layers",
        "Experts per token": f"{amount(trace['top_k_observed'])} in the dump, {known_text(trace['top_k_model'])} by "
        "the model's configuration",
        "Size of one expert": sized(smallest) if smallest == largest else f"{sized(smallest)} to {sized(largest)}",
        "Size of all experts": sized(trace["pool_bytes"]),
        "Steps": f"{amount(trace['steps'])} ({passes[trace['pass_boundaries']]}), "
        f"{amount(trace['requests'])} {plural('request', trace['requests'])}",
        "Token rows": listed([f"{amount(rows)} {phase}" for phase, rows in phase_rows.items() if rows] or ["0"]),
        "Accesses": f"{amount(trace['accesses'])} in {amount(trace['events'])} events, "
        f"{percent(trace['union_ratio'])} of {amount(trace['selections'])} selections",
        "Accepted tokens": amount(trace["accepted_tokens"]),
    }
    if trace["supersedes"] is not None:
        facts["Takes the place of"] = trace["supersedes"]
    return list(facts.items())


def _checks_grid(checks: Sequence[Row]) -> Grid | None:
    if not checks:
        return None
    names = ("name", "outcome", "wanted", "found")
    order = ("warn", "ok", "not_applicable")
    return Grid(
        caption="Checks of the raw dump, in the order in which they are judged. A failed check refuses a dump, so none "
        "is listed; their reasons: expert-tier inspect --checks.",
        head=[[Cell(text, is_text=True) for text in ("check", "outcome", "wanted", "found")]],
        rows=[
            [Cell(check[name].replace("_", " ") if name == "outcome" else check[name], is_text=True) for name in names]
            for check in sorted(checks, key=lambda check: (order.index(check["outcome"]), _place_of_check(check)))
        ],
    )


def _place_of_check(check: Row) -> tuple[int, str]:
    # Checks of a parser's own stand behind the list.
    return ORDER.get(check["name"], len(ORDER)), check["name"]


def _reporting_grid(block: Sequence[Row]) -> Grid | None:
    if not block:
        return None
    ordered = sorted(block, key=lambda row: row["item"])
    known = sum(row["known"] for row in ordered)
    lines: list[list[Cell]] = []
    for topic, items in groupby(ordered, key=lambda row: row["topic"]):
        lines.append([Cell(sentence_case(topic), is_text=True, span=3)])
        lines += [
            [Cell(row["item"], is_text=True), Cell(row["question"], is_text=True), Cell(row["answer"], is_text=True)]
            for row in items
        ]
    return Grid(
        caption="What a result has to be reported with by arXiv 2608.07911, answered for a cache per layer from the "
        "hit rates above and what dump and user say.",
        head=[[Cell(text, is_text=True) for text in ("item", "question", "answer")]],
        rows=lines,
        summary=f"Reporting block: {known} of {len(ordered)} items answered in full",
    )


def _overview(trace: Row, hit_rates: Sequence[Row], locality: Sequence[Row]) -> list[Cell]:
    """The trace's line in the index: LRU and Belady at the middle capacity of its first contract, and W_1."""
    cells = [
        Cell(trace["model"] or "unknown", is_text=True),
        Cell(trace["domain"] or "unknown", is_text=True),
        Cell(amount(trace["steps"])),
    ]
    rates = [Cell("—")] * 3
    for _, rows in _contracts(hit_rates)[:1]:
        panel = _by_semantics(rows)[0][1]
        capacity = _middle(_capacities(panel))
        chosen = {row["policy"]: row for row in panel if _capacity(row) == capacity}
        some = next(iter(chosen.values()))
        rates = [
            Cell(_capacity_text(some), _share_of_pool(some, trace)),
            *(Cell(percent(chosen.get(policy, {}).get("hit_rate"))) for policy in ("lru", "belady_bypass")),
        ]
    return [
        *cells,
        *rates,
        Cell(percent(next((total["w1_reuse_ratio"] for total in _totals(locality)), None))),
    ]


def _policy_blocks(trace: Row, curve: Sequence[Row], hit_rates: Sequence[Row], plots: Plots) -> list[Block]:
    curves = {tuple(shared.items()): rows for shared, rows in _contracts(curve)}
    points = {tuple(shared.items()): rows for shared, rows in _contracts(hit_rates)}
    blocks = []
    for key in [*curves, *(key for key in points if key not in curves)]:
        shared = dict(key)
        scope = {"layer": "one cache per layer", "global": "one cache over all layers"}[shared["scope"]]
        unit = "experts" if shared["has_capacity_in_experts"] else "bytes"
        rows = points.get(key, [])
        blocks.append(
            Block(
                heading=f"Hit rate by capacity in {unit}, {scope}",
                findings=_policy_findings(trace, rows),
                pictures=[_curve_picture(trace, shared, curves[key], plots)] if key in curves else [],
                grids=[
                    *([_hit_rate_grid(trace, shared, rows, is_below_plot=key in curves)] if rows else []),
                    *_null_grids(trace, rows),
                ],
            )
        )
    return blocks


def _contracts(rows: Iterable[Row]) -> list[tuple[Row, list[Row]]]:
    """Rows by what they have to share to be compared; scope layer first. Capacity in bytes is a group of its own."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = (*(row[name] for name in SHARED_CONTRACT), row["capacity_experts_total"] is not None)
        groups.setdefault(key, []).append(row)
    names = (*SHARED_CONTRACT, "has_capacity_in_experts")
    found = [(dict(zip(names, key, strict=True)), rows) for key, rows in groups.items()]
    return sorted(found, key=lambda group: (group[0]["scope"] != "layer", str(list(group[0].values()))))


def _by_semantics(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    order = [*SEMANTICS_LABELS, *sorted({row["semantics"] for row in rows} - set(SEMANTICS_LABELS))]
    panels = [(name, [row for row in rows if row["semantics"] == name]) for name in order]
    return [panel for panel in panels if panel[1]]


def _by_policy(rows: Iterable[Row]) -> list[tuple[str, str | None, list[Row]]]:
    """Rows of one panel by policy and fit, in the order of the labels."""
    order = list(POLICY_LABELS)
    keys = {(row["policy"], row["fit"]) for row in rows}
    ranked = sorted(
        keys,
        key=lambda key: (order.index(key[0]) if key[0] in order else len(order), key[0], key[1] or ""),
    )
    return [
        (policy, fit, sorted((row for row in rows if (row["policy"], row["fit"]) == (policy, fit)), key=_capacity))
        for policy, fit in ranked
    ]


def _capacity(row: Mapping[str, Any]) -> int:
    experts: int | None = row["capacity_experts_total"]
    in_bytes: int = row["capacity_bytes"] or 0
    return in_bytes if experts is None else experts


def _capacities(rows: Iterable[Row]) -> list[int]:
    return sorted({_capacity(row) for row in rows})


def _capacity_text(row: Mapping[str, Any]) -> str:
    experts = row["capacity_experts_total"]
    return sized(row["capacity_bytes"]) if experts is None else f"{amount(experts)} {plural('expert', experts)}"


def _share_of_pool(row: Row, trace: Row) -> str:
    """`25.0 % of all, 32 per layer`, as far as that is known."""
    experts, layers = row["capacity_experts_total"], trace["moe_layers"]
    pool = trace["pool_bytes" if experts is None else "pool_experts"]
    shares = [f"{percent(_capacity(row) / pool)} of all"] if pool else []
    if row["scope"] == "layer" and experts is not None and layers and experts % layers == 0:
        shares.append(f"{amount(experts // layers)} per layer")
    return ", ".join(shares)


def _names(keys: Iterable[tuple[str, str | None]]) -> dict[tuple[str, str | None], str]:
    """A name for each (policy, fit), with the fit where the policy alone would not tell."""
    fits: dict[str, set[str | None]] = {}
    for policy, fit in keys:
        fits.setdefault(policy, set()).add(fit)
    return {
        (policy, fit): _named(policy) + (f" ({_fit_text(fit)})" if fit and len(of_policy) > 1 else "")
        for policy, of_policy in fits.items()
        for fit in of_policy
    }


def _named(policy: str) -> str:
    """A policy inside a sentence, where a comma in a label would look like the end of it."""
    return _LABELS_IN_SENTENCES.get(policy) or POLICY_LABELS.get(policy, policy)


def _fit_text(fit: str) -> str:
    """`fitted on the first 60 % of the steps`; a fit on another trace as it was given."""
    if fit == "same":
        return "fitted on the steps it is scored on"
    share = re.fullmatch(r"first:(0?\.\d+|1)", fit)
    return (
        f"fitted on {fit}" if share is None else f"fitted on the first {100 * float(share.group(1)):g} % of the steps"
    )


def _policy_findings(trace: Row, rows: Sequence[Row]) -> list[str]:
    findings = []
    for semantics, panel in _by_semantics(rows):
        findings += _findings_of_panel(trace, semantics, panel)
    return [*findings, *_findings_across_semantics(rows), *_pressure_findings(rows)]


def _pressure_findings(rows: Sequence[Row]) -> list[str]:
    """Where an event alone accesses more than its cache holds, from the smallest capacity up."""
    findings = []
    for capacity in _capacities(rows):
        row = next(row for row in rows if _capacity(row) == capacity)
        above, events = row["events_above_capacity"], row["scored_events"]
        if above:
            findings.append(
                f"At {_capacity_text(row)} {amount(above)} of {amount(events)} scored events "
                f"({percent(above / events)}) access more experts than their cache holds, so no policy can serve them "
                f"from it; experts accessed ÷ capacity is {row['pressure_mean']:.2f} in the mean, "
                f"{row['pressure_p95']:.2f} at the 95th percentile."
            )
    return findings


def _findings_of_panel(trace: Row, semantics: str, panel: Sequence[Row]) -> list[str]:
    name = SEMANTICS_LABELS.get(semantics, semantics).capitalize()
    by_policy = {(policy, fit): {_capacity(row): row for row in rows} for policy, fit, rows in _by_policy(panel)}
    lru = by_policy.get(("lru", None), {})
    belady = by_policy.get(("belady_bypass", None), {})
    findings = []
    both = sorted(lru.keys() & belady.keys())
    if both:
        capacity = _middle(both)
        share = _share_of_pool(lru[capacity], trace)
        findings.append(
            f"{name}, {_capacity_text(lru[capacity])}{f' ({share})' if share else ''}: "
            + _gap_to_belady(lru[capacity], belady[capacity])
        )
    impossible = [capacity for capacity in both if _compare(lru[capacity], belady[capacity]) > 0]
    if impossible and panel[0]["capacity_experts_total"] is not None:
        where = listed([_capacity_text(lru[capacity]) for capacity in impossible])
        findings.append(
            f"{name}: LRU is above Belady with bypass at {where}. Under one contract and equal sizes that cannot be: "
            "treat these rows as wrong."
        )
    names = _names(by_policy)
    for (policy, fit), of_policy in by_policy.items():
        pairs = [(of_policy[capacity], lru[capacity]) for capacity in sorted(lru.keys() & of_policy.keys())]
        if policy == "static" and pairs:
            findings.append(f"{name}: the {names[policy, fit]} is {_against_lru(pairs)}.{_fit_warning(fit)}")
    return [
        *findings,
        *_best_of_panel(name, by_policy),
        *_beyond_the_interval(name, panel),
        *_over_the_null(name, lru),
        *_gap_of_the_best(name, panel),
    ]


def _beyond_the_interval(name: str, panel: Sequence[Row]) -> list[str]:
    """Which policies differ from their reference by more than chance, at the middle capacity of those compared."""
    compared = [row for row in panel if is_causal(row) and row["over_reference_low"] is not None]
    if not compared:
        return []
    capacity = _middle(_capacities(compared))
    rows = [row for row in compared if _capacity(row) == capacity]
    names = _names((row["policy"], row["fit"]) for row in panel)
    sides: dict[int, list[str]] = {1: [], -1: [], 0: []}
    for row in sorted(rows, key=lambda row: -row["over_reference"]):
        side = _side(row)
        interval = f" ({points(row['over_reference'])}, {_interval(row, 'over_reference', points)} points)"
        sides[side].append(names[row["policy"], row["fit"]] + (interval if side == 1 else ""))
    reference = _named(rows[0]["reference_policy"])
    parts = [
        f"{'more' if side == 1 else 'fewer'} hits than {reference}: {listed(sides[side]) or 'no policy'}"
        for side in (1, -1)
    ]
    parts += [f"not told apart from {reference}: {listed(sides[0])}"] if sides[0] else []
    return [
        f"{name}, {_capacity_text(rows[0])}, beyond the 95 % interval of the difference (Belady and what saw the "
        f"future aside): {'; '.join(parts)}."
    ]


def _over_the_null(name: str, lru: dict[int, Row]) -> list[str]:
    """How much of LRU's hit rate is left with the tokens shuffled, at the middle capacity."""
    known = {capacity: row for capacity, row in lru.items() if row["shuffled_accesses"] and row["accesses"]}
    if not known:
        return []
    row = known[_middle(sorted(known))]
    difference = row["hits"] / row["accesses"] - row["shuffled_hits"] / row["shuffled_accesses"]
    if difference > 0:
        meaning = "the rest comes from the order of the text"
    elif difference < 0:
        meaning = "the order of the text costs it hits"
    else:
        meaning = "the order of the text gives it nothing"
    return [
        f"{name}, {_capacity_text(row)}: with the tokens shuffled LRU hits {percent(row['shuffled_hit_rate'])} of "
        f"{amount(row['shuffled_accesses'])} accesses, in recorded order {percent(row['hit_rate'])}: {meaning}."
    ]


def _side(row: Row) -> int:
    """1 if the whole interval of the difference to the reference lies above 0, −1 if below, else 0."""
    low, high = row["over_reference_low"], row["over_reference_high"]
    if low is None or high is None:
        return 0
    return int(low > 0) - int(high < 0)


def _interval(row: Row, column: str, text: Callable[[float], str]) -> str:
    return f"{text(row[f'{column}_low'])} to {text(row[f'{column}_high'])}"


def _gap_of_the_best(name: str, panel: Sequence[Row]) -> list[str]:
    """How far the best policy that does not know the future is from Belady at the middle capacity, and why."""
    belady = {(row["policy"], _capacity(row)): row for row in panel if row["policy"] in POLICY_GROUPS[_FUTURE]}
    capacities = sorted(
        capacity
        for capacity in _capacities(panel)
        if all((policy, capacity) in belady for policy in POLICY_GROUPS[_FUTURE])
    )
    best = best_causal([row for row in panel if capacities and _capacity(row) == _middle(capacities)])
    if best is None:
        return []
    bypass, forced = (belady[policy, _capacity(best)]["misses"] for policy in ("belady_bypass", "belady_forced"))
    gap = belady_gap(best["misses"], bypass, forced)
    if gap.saved_misses <= 0 or gap.admission_misses is None or gap.victim_misses is None:
        return []
    label = _named(best["policy"])
    sentence = (
        f"{name}, {_capacity_text(best)}: of the {amount(gap.misses_best_causal)} misses of the best policy that does "
        f"not know the future ({label}), Belady with bypass saves {amount(gap.saved_misses)} ({percent(gap.gap)}). "
    )
    if gap.victim_misses < 0:
        sentence += (
            f"Belady that has to admit misses {amount(-gap.victim_misses)} more than {label}: here what not to admit "
            "matters more than which expert to evict."
        )
    else:
        sentence += (
            f"{amount(gap.admission_misses)} of these ({percent(gap.admission_share)}) come from not having to admit, "
            f"{amount(gap.victim_misses)} ({percent(gap.victim_share)}) from better victims."
        )
    return [sentence]


def _best_of_panel(name: str, by_policy: dict[tuple[str, str | None], dict[int, Row]]) -> list[str]:
    """Which policy that does not know the future hits most, from the smallest capacity up."""
    causal = {key: rows for key, rows in by_policy.items() if all(is_causal(row) for row in rows.values())}
    if len(causal) < 2:
        return []
    names = _names(by_policy)
    capacities = sorted(set().union(*causal.values()))
    places = []
    for capacity in capacities:
        rows = {key: of_policy[capacity] for key, of_policy in causal.items() if capacity in of_policy}
        best = [key for key, row in rows.items() if all(_compare(row, other) >= 0 for other in rows.values())]
        places.append((listed([names[key] for key in best]), rows[best[0]]))
    runs = [
        f"{best} at {listed([_capacity_text(row) for _, row in run])}"
        for best, run in groupby(places, key=lambda place: place[0])
    ]
    return [f"{name}, most hits of the policies that do not know the future: {'; '.join(runs)}."]


def _gap_to_belady(lru: Row, belady: Row) -> str:
    fewer = lru["misses"] - belady["misses"]
    sentence = (
        f"LRU misses {amount(lru['misses'])} of {amount(lru['accesses'])} accesses ({_percent_of_misses(lru)}); "
        f"Belady with bypass, which knows the future, misses {amount(belady['misses'])} "
        f"({_percent_of_misses(belady)}), "
    )
    if fewer > 0:
        sentence += f"{amount(fewer)} fewer: {percent(fewer / lru['misses'])} of LRU's misses."
    elif fewer == 0:
        sentence += "just as many."
    else:
        sentence += f"{amount(-fewer)} more."
    if lru["miss_bytes"] is not None and belady["miss_bytes"] is not None and lru["scored_steps"]:
        per_step = [sized(row["miss_bytes"] / row["scored_steps"]) for row in (lru, belady)]
        sentence += f" Per step, {per_step[0]} of misses against {per_step[1]}."
    return sentence


def _against_lru(pairs: Sequence[tuple[Row, Row]]) -> str:
    """`below LRU at 8 experts (20.0 against 40.0 %), above LRU at …`, from the smallest capacity up."""
    parts = []
    for order, run in groupby(pairs, key=lambda pair: _compare(*pair)):
        places = [f"{_capacity_text(row)} ({side_by_side(row['hit_rate'], lru['hit_rate'])})" for row, lru in run]
        parts.append(f"{_ORDER_WORDS[order]} LRU at {listed(places)}")
    return ", ".join(parts)


def _fit_warning(fit: str | None) -> str:
    return " Fitted on the steps it is scored on, it has seen the future." if fit == "same" else ""


def _findings_across_semantics(rows: Sequence[Row]) -> list[str]:
    panels = dict(_by_semantics(rows))
    if not {"event_atomic", "sequential"} <= panels.keys():
        return []
    atomic, sequential = (
        {(row["policy"], row["fit"], _capacity(row)): row for row in panels[name]}
        for name in ("event_atomic", "sequential")
    )
    lru_capacities = sorted(
        capacity for policy, fit, capacity in atomic.keys() & sequential.keys() if (policy, fit) == ("lru", None)
    )
    names = _names((policy, fit) for policy, fit, _ in atomic)
    turned, compared, near = [], 0, 0
    for policy, fit, capacity in sorted(atomic.keys() & sequential.keys(), key=lambda key: (key[2], str(key))):
        if policy == "lru" or policy in POLICY_GROUPS[_FUTURE] or capacity not in lru_capacities:
            continue
        compared += 1
        key, lru_key = (policy, fit, capacity), ("lru", None, capacity)
        before, after = (_compare(side[key], side[lru_key]) for side in (atomic, sequential))
        told_apart = [_side(side[key]) for side in (atomic, sequential) if side[key]["over_reference_low"] is not None]
        if before == after:
            continue
        if told_apart and not any(told_apart):
            near += 1
            continue
        turned.append(
            f"{names[policy, fit]} at {_capacity_text(atomic[key])} is {_ORDER_WORDS[before]} LRU "
            f"event-atomic and {_ORDER_WORDS[after]} LRU sequential"
        )
    findings = []
    if lru_capacities:
        capacity = lru_capacities[0]
        counted = [side["lru", None, capacity] for side in (atomic, sequential)]
        differs = "differs" if _compare(*counted) else "is the same"
        findings.append(
            f"Counted both ways the hit rate {differs}: LRU at {_capacity_text(counted[0])} hits "
            f"{side_by_side(*(row['hit_rate'] for row in counted))}, event-atomic against sequential."
        )
    if turned:
        findings.append(f"The way of counting decides between policies: {'; '.join(turned)}.")
    elif compared and near:
        findings.append(
            "Either way the same policies are above LRU at each capacity of the table, but for differences that lie "
            "within their intervals."
        )
    elif compared:
        findings.append("Either way the same policies are above LRU at each capacity of the table.")
    return findings


def _compare(row: Row, other: Row) -> int:
    """1 if the hit rate of `row` is above that of `other`, 0 if they are equal, else −1; exact, from the counts."""
    mine, theirs = row["hits"] * other["accesses"], other["hits"] * row["accesses"]
    return int(mine > theirs) - int(mine < theirs)


def _hit_rate_grid(trace: Row, shared: Row, rows: Sequence[Row], *, is_below_plot: bool) -> Grid:
    columns = [
        (semantics, capacity, [row for row in panel if _capacity(row) == capacity])
        for semantics, panel in _by_semantics(rows)
        for capacity in _capacities(panel)
    ]

    def cells(policy: str, fit: str | None) -> Iterator[Cell]:
        for _, _, column in columns:
            causal = [row for row in column if is_causal(row)]
            row = next((row for row in column if (row["policy"], row["fit"]) == (policy, fit)), None)
            is_best = row in causal and all(_compare(row or {}, other) >= 0 for other in causal)
            yield Cell("—") if row is None else _rate_cell(row, is_best=is_best)

    contract = "Contract as below the plot." if is_below_plot else _contract_text(shared, rows)
    has_interval = any(row["hit_rate_low"] is not None for row in rows)
    below = "its 95 % interval (blocks of steps resampled) and the hits" if has_interval else "the hits"
    arrows = (
        " ▲ and ▼: above and below LRU beyond the interval of the difference, which is narrower than the two "
        "intervals make it look."
        if any(_side(row) for row in rows)
        else ""
    )
    return Grid(
        caption=f"Simulated hit rate, and below it {below}. Bold: most hits without knowing the future.{arrows} "
        f"{contract}",
        head=_capacity_head(trace, rows),
        rows=_grouped_rows(rows, cells, width=len(columns)),
    )


def _rate_cell(row: Row, *, is_best: bool) -> Cell:
    arrow = {1: "▲ ", -1: "▼ ", 0: ""}[_side(row)]
    interval = "" if row["hit_rate_low"] is None else f"{_share_interval(row)} · "
    return Cell(arrow + percent(row["hit_rate"]), interval + amount(row["hits"]), is_best=is_best)


def _share_interval(row: Row) -> str:
    return f"{100 * row['hit_rate_low']:.1f}–{100 * row['hit_rate_high']:.1f}"


def _capacity_head(trace: Row, rows: Sequence[Row]) -> list[list[Cell]]:
    """Two lines: the semantics, and below each its capacities."""
    panels = _by_semantics(rows)
    firsts = [
        next(row for row in panel if _capacity(row) == capacity)
        for _, panel in panels
        for capacity in _capacities(panel)
    ]
    return [
        [
            Cell(""),
            *(
                Cell(
                    SEMANTICS_LABELS.get(semantics, semantics),
                    f"of {_accesses_text(panel)}",
                    span=len(_capacities(panel)),
                )
                for semantics, panel in panels
            ),
        ],
        [
            Cell("policy", is_text=True),
            *(Cell(_capacity_text(row), _share_of_pool(row, trace)) for row in firsts),
        ],
    ]


def _grouped_rows(
    rows: Sequence[Row], cells: Callable[[str, str | None], Iterable[Cell]], *, width: int
) -> list[list[Cell]]:
    """A line per policy and fit, under the name of its kind where there are several kinds."""
    kinds = {policy: kind for kind, policies in POLICY_GROUPS.items() for policy in policies}
    runs = [
        (kind, list(run))
        for kind, run in groupby(_by_policy(rows), key=lambda of_policy: kinds.get(of_policy[0], "Others"))
    ]
    lines: list[list[Cell]] = []
    for kind, run in runs:
        if len(runs) > 1:
            lines.append([Cell(kind, is_text=True, span=width + 1)])
        lines += [
            [
                Cell(POLICY_LABELS.get(policy, policy), "" if fit is None else _fit_text(fit), is_text=True),
                *cells(policy, fit),
            ]
            for policy, fit, _ in run
        ]
    return lines


def _null_grids(trace: Row, rows: Sequence[Row]) -> list[Grid]:
    """What is left of the hit rates where only popularity is, folded; nothing where no null was run."""
    if all(row["shuffled_accesses"] is None for row in rows):
        return []
    columns = [
        [row for row in panel if _capacity(row) == capacity]
        for _, panel in _by_semantics(rows)
        for capacity in _capacities(panel)
    ]

    def cells(policy: str, fit: str | None) -> Iterator[Cell]:
        for column in columns:
            row = next((row for row in column if (row["policy"], row["fit"]) == (policy, fit)), None)
            if row is None or row["shuffled_hit_rate"] is None or row["hit_rate"] is None:
                yield Cell("—")
                continue
            over = points(row["hit_rate"] - row["shuffled_hit_rate"])
            yield Cell(percent(row["shuffled_hit_rate"]), f"{over} · {amount(row['shuffled_hits'])}")

    # All rows score the same events, so the chances are the same.
    some = rows[0]
    said = (
        f"{percent(some['lag1_chance_ratio'])} ({some['lag1_chance_numerator']:,.1f} ÷ "
        f"{some['lag1_chance_denominator']:,.1f}), and {percent(some['lag1_uniform_ratio'])} "
        f"({amount(some['accesses'])} ÷ {amount(some['lag1_uniform_denominator'])}) under a uniform router"
    )
    shuffled = {row["shuffled_accesses"] for row in rows if row["shuffled_accesses"] is not None}
    return [
        Grid(
            caption="Hit rate with the tokens in random order: what popularity alone gives. Below it by how many "
            "percentage points the recorded order is above that, and the hits, of "
            f"{listed([amount(number) for number in sorted(shuffled)])} accesses. By popularity alone an access names "
            f"an expert of its layer's event before with chance {said}.",
            head=_capacity_head(trace, rows),
            rows=_grouped_rows(rows, cells, width=len(columns)),
            summary="Null control: the same policies with the tokens shuffled",
        )
    ]


def _accesses_text(rows: Sequence[Row]) -> str:
    return listed([amount(accesses) for accesses in sorted({row["accesses"] for row in rows})]) + " accesses"


def _contract_text(shared: Row, rows: Sequence[Row]) -> str:
    """What was replayed and what was scored, in one or two sentences."""
    begin, end, warm = shared["step_begin"], shared["step_end"], shared["warm_steps"]
    dedup = "each expert once per event" if shared["dedup"] == "union" else "every selection an access"
    seeds = sorted({row["seed"] for row in rows if row["seed"] is not None})
    seed = f", seed {listed([str(one) for one in seeds])}" if seeds else ""
    parts = [
        f"Scope {shared['scope']}",
        f"{shared['access_order']} order{seed}",
        dedup,
        f"steps {amount(begin)} to {amount(end - 1)}",
        f"the first {amount(warm)} ({percent(shared['warm_fraction'])}) warm the cache unscored"
        if warm
        else "cold start, no step left out",
        f"scored: {phase_text(shared['phase'])}, {_accesses_text(rows)}",
    ]
    if shared["warm_pass"]:
        parts.append("replayed once before, unscored")
    if shared["admission"] is not None:
        parts.append(f"admitted by {shared['admission']}")
    if shared["quota_fit"] is not None:
        parts.append(f"shares of the layers fitted on {shared['quota_fit']}")
    fits = sorted({row["fit"] for row in rows if row["fit"] is not None})
    if fits:
        parts.append(f"static table {listed([_fit_text(fit) for fit in fits])}")
    return "; ".join(parts) + "."


def _curve_picture(trace: Row, shared: Row, rows: Sequence[Row], plots: Plots) -> Picture:
    panels = _by_semantics(rows)
    styles = _policy_styles(rows)
    drawn = []
    for semantics, panel in panels:
        label = SEMANTICS_LABELS.get(semantics, semantics)
        lines = _policy_lines(panel, styles)
        with drawing(PAGE_PLOT_INCHES) as (figure, axes):
            draw_lines(axes, lines)
            _show_capacities(axes, panel, pool_experts=trace["pool_experts"])
            axes.set_title(label)
            axes.set_ylabel("hit rate")
            drawn.append(
                plots.svg(figure, f"Simulated hit rate by capacity, {label}", described(lines, "at full capacity"))
            )
    caption = (
        f"Simulated, not measured, from trace {trace['trace_id']}. {_contract_text(shared, rows)} "
        f"Semantics: {listed([SEMANTICS_LABELS.get(name, name) for name, _ in panels])}. "
        "The two Belady lines know the future: no policy to run, but how far one could go"
        + (" (a reference, not a bound: experts differ in size)." if _sizes_differ(trace, shared) else ".")
    )
    return Picture(drawn, _policy_lines(rows, styles), caption)


def _sizes_differ(trace: Row, shared: Row) -> bool:
    differ: bool = trace["expert_bytes_min"] != trace["expert_bytes_max"]
    return differ and not shared["has_capacity_in_experts"]


def _policy_styles(rows: Sequence[Row]) -> dict[tuple[str, str | None], LineStyle]:
    """A style for each (policy, fit): the policy's own for its first fit, spare ones for the others."""
    spare = iter(OTHER_STYLES * 4)
    styles: dict[tuple[str, str | None], LineStyle] = {}
    for policy, fit, _ in _by_policy(rows):
        is_first = policy not in {styled for styled, _ in styles}
        styles[policy, fit] = POLICY_STYLES[policy] if is_first and policy in POLICY_STYLES else next(spare)
    return styles


def _policy_lines(rows: Sequence[Row], styles: dict[tuple[str, str | None], LineStyle]) -> list[Line]:
    """A line per policy and fit, of hit rates by capacity: 1 − miss ratio, from the counts."""
    lines = []
    for policy, fit, of_policy in _by_policy(rows):
        scored = [row for row in of_policy if row["accesses"]]
        colour, dashes, marker = styles[policy, fit]
        lines.append(
            Line(
                label=POLICY_LABELS.get(policy, policy),
                style=(colour, dashes, "" if len(_capacities(scored)) > _WHOLE_CURVE else marker),
                x=[_capacity(row) for row in scored],
                y=[(row["accesses"] - row["misses"]) / row["accesses"] for row in scored],
                detail="" if fit is None else _fit_text(fit),
            )
        )
    return lines


def _locality_blocks(trace: Row, rows: Sequence[Row], plots: Plots) -> list[Block]:
    blocks = []
    for total in _totals(rows):
        layers = sorted(
            (row for row in rows if row["layer_id"] is not None and row["phase"] == total["phase"]),
            key=lambda row: row["layer_id"],
        )
        blocks.append(
            Block(
                heading=f"Locality, {phase_text(total['phase'])}",
                findings=_locality_findings(total),
                pictures=[_locality_picture(trace, total, layers, plots)],
                grids=[_reuse_grid(total), _skew_grid(total)],
            )
        )
    return blocks


def _locality_findings(total: Row) -> list[str]:
    findings = []
    if total["w1_reuse_ratio"] is not None:
        reused, shuffled = total["w1_reused_selections"], total["w1_shuffled_reused_selections"]
        findings.append(
            f"{percent(total['w1_reuse_ratio'])} of {amount(total['reuse_selections'])} selections repeat an expert "
            f"that the token before used in the same layer (W₁). Popularity alone would give "
            f"{percent(total['chance_ratio'])}, a uniform router {percent(total['uniform_ratio'])}."
        )
        if reused > shuffled:
            verdict = "More than with the same tokens shuffled"
            meaning = (
                "from one token to the next, order holds reuse beyond popularity; longer windows stand beside their "
                "shuffled twins below"
            )
        elif reused < shuffled:
            verdict = "Fewer than with the same tokens shuffled"
            meaning = "neighbouring tokens share fewer experts than tokens at random, which speaks against recency"
        else:
            verdict = "As many as with the same tokens shuffled"
            meaning = "the order of tokens holds no reuse beyond popularity"
        findings.append(f"{verdict} ({percent(total['w1_shuffled_ratio'])}): {meaning}.")
    findings.append(
        f"The eight most selected experts of each layer carry {percent(total['top8_share'])} of the selections; "
        f"{percent(total['working_set_95_ratio'])} of the experts carry 95 % of them; "
        f"{percent(total['coverage_ratio'])} of the experts occur at all."
    )
    return findings


def _locality_picture(trace: Row, total: Row, layers: Sequence[Row], plots: Plots) -> Picture:
    with drawing(PAGE_PLOT_INCHES) as (figure, axes):
        bars = _draw_reuse(axes, total)
        axes.set_title("reuse within the last 1, 8, 64 tokens")
        drawn = [plots.svg(figure, "Reuse of experts, all layers", described(bars, "over 64 tokens"))]
    if len(layers) > 1:
        lines = [
            Line(label, style, [row["layer_id"] for row in scored], [row[name] for row in scored])
            for label, style, name in (
                ("recorded order", ("blue", "-", ""), "w1_reuse_ratio"),
                ("tokens shuffled", ("orange", "--", ""), "w1_shuffled_ratio"),
                ("by popularity", ("ink", ":", ""), "chance_ratio"),
            )
            for scored in [[row for row in layers if row[name] is not None]]
        ]
        with drawing(PAGE_PLOT_INCHES) as (figure, axes):
            draw_lines(axes, lines)
            show_layers(axes)
            axes.set_title("reuse of the token before, by layer")
            drawn.append(
                plots.svg(figure, "Reuse of the token before, by layer", described(lines, "in the last layer"))
            )
    legend = [
        Line("recorded order", ("blue", "-", ""), [], []),
        Line("tokens shuffled", ("orange", "--", ""), [], []),
        Line("by popularity", ("ink", ":", ""), [], []),
    ]
    caption = (
        f"Counted from trace {trace['trace_id']}, {phase_text(total['phase'])}, {amount(total['tokens'])} tokens × "
        f"layers. Shuffled with seed {total['seed']}, all layers alike."
    )
    return Picture(drawn, legend, caption)


def _reuse_grid(total: Row) -> Grid:
    nulls = {1: ("chance_ratio", "uniform_ratio")}
    return Grid(
        caption="Selections whose expert the same layer used within the last w tokens.",
        head=[[Cell("window", is_text=True)]
              + [Cell(text) for text in ("recorded order", "tokens shuffled", "by popularity", "uniform router")]],
        rows=[
            [Cell(_WINDOW_NAMES[window], is_text=True)]
            + [_ratio_cell(total, f"w{window}_{name}_ratio") for name in ("reuse", "shuffled")]
            + [_ratio_cell(total, name) for name in nulls.get(window, ())]
            + [Cell("—")] * (0 if window in nulls else 2)
            for window in _WINDOW_NAMES
        ],
    )  # fmt: skip


def _skew_grid(total: Row) -> Grid:
    alpha = total["zipf_alpha"]
    return Grid(
        caption="Skew and footprint.",
        head=[[Cell(text) for text in ("Zipf α", "top-8 share", "95 % working set", "coverage")]],
        rows=[
            [
                Cell("—" if alpha is None else f"{alpha:.2f}"),
                *(_ratio_cell(total, name) for name in ("top8_share", "working_set_95_ratio", "coverage_ratio")),
            ]
        ],
    )


def _lookahead_blocks(trace: Row, rows: Sequence[Row], plots: Plots) -> list[Block]:
    blocks = []
    for phase in sorted({row["phase"] for row in _totals(rows)}):
        of_phase = [row for row in rows if row["phase"] == phase]
        totals = sorted(_totals(of_phase), key=_prediction_key)
        blocks.append(
            Block(
                heading=f"Lookahead, {phase_text(phase)}",
                findings=_lookahead_findings(totals),
                pictures=[_recall_picture(trace, of_phase, totals, plots)],
                grids=[_recall_grid(totals)],
            )
        )
    return blocks


def _prediction_key(row: Row) -> tuple[Any, ...]:
    known = list(PREDICTOR_LABELS)
    rank = known.index(row["predictor"]) if row["predictor"] in known else len(known)
    distance = row["lookahead_layers"] or 0, row["lookahead_steps"] or 0
    return rank, row["predictor"], row["fit"] or "", row["width"] or 0, *distance


def _predictions(totals: Sequence[Row]) -> list[list[Row]]:
    """Totals by predictor, fit and width, each list from the smallest distance up."""
    ordered = sorted(totals, key=_prediction_key)
    return [list(run) for _, run in groupby(ordered, key=lambda row: _prediction_key(row)[:4])]


def _predictor_name(row: Row) -> str:
    """The predictor and how many experts it may name: what a plot's lines are told apart by."""
    predictor: str = row["predictor"]
    width = "" if row["width"] is None else f", {row['width']} wide"
    return PREDICTOR_LABELS.get(predictor, predictor) + width


def _distance(row: Row) -> str:
    if row["lookahead_layers"] is None:
        return "at a time unknown" if row["predictor"] == "recorded" else "at any time"
    parts = [
        f"{row[column]} {plural(noun, row[column])} ahead"
        for column, noun in (("lookahead_layers", "layer"), ("lookahead_steps", "step"))
        if row[column]
    ]
    return " and ".join(parts) or "at the event itself"


def _lookahead_findings(totals: Sequence[Row]) -> list[str]:
    findings = []
    scored = [row for row in totals if row["accesses"]]
    previous = next((row for row in scored if row["predictor"] == "previous_token"), None)
    told: set[str] = set()
    for run in _predictions(scored):
        first, last = run[0], run[-1]
        # Of the others the narrowest says enough; the table has all.
        if first["predictor"] in NULL_PREDICTORS or (
            first["predictor"] != "conditional" and first["predictor"] in told
        ):
            continue
        told.add(first["predictor"])
        sentence = (
            f"{sentence_case(_predictor_name(first))}: names {amount(first['predicted_accesses'])} of "
            f"{amount(first['accesses'])} accesses {_distance(first)} ({percent(first['recall_all'])}; as many "
            f"experts at random: {percent(first['chance_recall_all'])})"
        )
        if previous is not None and first is not previous:
            order = (first["recall_all"] > previous["recall_all"]) - (first["recall_all"] < previous["recall_all"])
            sentence += f", {_ORDER_WORDS[order]} the previous token's {percent(previous['recall_all'])}"
        if len(run) > 1:
            change = (last["recall_covered"] or 0) - (first["recall_covered"] or 0)
            word = "falls" if change < 0 else "rises"
            course = f"{word} from {percent(first['recall_covered'])} to" if change else "stays at"
            sentence += (
                f"; {_distance(last)} it {course} {percent(last['recall_covered'])} over the events with a "
                f"prediction, of which there are {percent(last['hint_coverage'])}"
            )
        elif first["hint_coverage"] is not None and first["hint_coverage"] < 1:
            sentence += (
                f". It makes a prediction for {percent(first['hint_coverage'])} of the events; over those, recall is "
                f"{percent(first['recall_covered'])}"
            )
        findings.append(sentence + ".")
    return findings


def _recall_lines(totals: Sequence[Row]) -> list[Line]:
    """Recall by layers ahead: a predictor and width each, with its chance; one of no distance or any lies level."""
    depths = [row["lookahead_layers"] for row in totals if row["lookahead_layers"]] or [0, 1]
    lines = []
    styles = iter(WIDTH_STYLES + OTHER_STYLES * 4)
    known = set(PREDICTOR_LABELS) - set(PLOTTED_PREDICTORS)
    for run in _predictions([row for row in totals if row["accesses"] and row["predictor"] not in known]):
        first = run[0]
        label = _predictor_name(first)
        detail = "" if first["fit"] is None else _fit_text(first["fit"])
        if first["predictor"] == "oracle" or not any(row["lookahead_layers"] for row in run):
            recall = first["recall_all"]
            style = ("ink", ":" if first["predictor"] == "oracle" else "--", "")
            lines.append(Line(label, style, [min(depths), max(depths)], [recall, recall], detail))
            continue
        style = next(styles)
        x = [row["lookahead_layers"] for row in run]
        lines.append(Line(label, style, x, [row["recall_all"] for row in run], detail))
        by_chance = [row["chance_recall_all"] for row in run]
        width = "" if first["width"] is None else f", {first['width']} wide"
        lines.append(Line(f"chance{width}", (style[0], ":", ""), x, by_chance))
    return lines


def _recall_picture(trace: Row, rows: Sequence[Row], totals: Sequence[Row], plots: Plots) -> Picture:
    lines = _recall_lines(totals)
    with drawing(PAGE_PLOT_INCHES) as (figure, axes):
        draw_lines(axes, lines)
        show_depths(axes)
        axes.set_ylabel("recall over all events")
        axes.set_title("all layers")
        drawn = [plots.svg(figure, "Lookahead recall by layers ahead", described(lines, "at the largest distance"))]
    drawn_above = {line.label for line in lines}
    nearest = [run[0] for run in _predictions(totals) if _predictor_name(run[0]) in drawn_above]
    nearest = [row for row in nearest if row["predictor"] != "oracle"]
    by_layer = [line for line in (_recall_of_layers(row, rows, lines) for row in nearest) if len(line.x) > 1]
    if by_layer:
        with drawing(PAGE_PLOT_INCHES) as (figure, axes):
            draw_lines(axes, by_layer)
            show_layers(axes)
            axes.set_title("by target layer, at the nearest distance")
            drawn.append(plots.svg(figure, "Lookahead recall by layer", described(by_layer, "in the last layer")))
    caption = (
        f"Simulated, not measured, from trace {trace['trace_id']}. {_scored_steps(totals)}. "
        "Recall: accesses named beforehand ÷ all accesses, events without a prediction counting as missed. The "
        "previous token's prediction looks one step back in the same layer, so it does not depend on the distance."
    )
    return Picture(drawn, lines, caption)


def _scored_steps(totals: Sequence[Row]) -> str:
    windows = sorted({(row["step_begin"], row["step_end"], row["warm_steps"], row["phase"]) for row in totals})
    return "; ".join(
        f"Steps {amount(begin)} to {amount(end - 1)}, the first {amount(warm)} not scored, {phase_text(phase)}"
        for begin, end, warm, phase in windows
    )


def _recall_of_layers(total: Row, rows: Sequence[Row], lines: Sequence[Line]) -> Line:
    key = _prediction_key(total)
    layers = sorted(
        (row for row in rows if row["layer_id"] is not None and row["accesses"] and _prediction_key(row) == key),
        key=lambda row: row["layer_id"],
    )
    label = _predictor_name(total)
    style = next((line.style for line in lines if line.label == label), OTHER_STYLES[0])
    return Line(
        label,
        (style[0], style[1], ""),
        [row["layer_id"] for row in layers],
        [row["recall_all"] for row in layers],
    )


def _recall_grid(totals: Sequence[Row]) -> Grid:
    ratios = ("recall_all", "recall_covered", "precision", "hint_coverage", "chance_recall_all", "shuffled_recall_all")
    heads = (
        "recall, all events", "recall, covered events", "precision", "coverage", "recall by chance", "recall, shuffled",
    )  # fmt: skip
    return Grid(
        caption=(
            "Lookahead over all layers. Precision: named and accessed ÷ named. Coverage: events with a prediction. "
            "Shuffled: the same predictions at other times."
        ),
        head=[[Cell("predictor", is_text=True), Cell("distance", is_text=True)] + [Cell(text) for text in heads]],
        rows=[
            [
                Cell(_predictor_name(row), "" if row["fit"] is None else _fit_text(row["fit"]), is_text=True),
                Cell(_distance(row), is_text=True),
            ]
            + [_ratio_cell(row, name) for name in ratios]
            for row in totals
        ],
    )


def _overlap_block(rows: Sequence[Row], traces: dict[str, Row]) -> Block | None:
    totals = sorted(
        _totals(rows), key=lambda row: (row["top_experts"], row["phase"], row["trace_id"], row["other_trace_id"])
    )
    if not totals:
        return None

    def name(trace_id: str) -> str:
        domain = traces.get(trace_id, {}).get("domain")
        return f"{trace_id} ({domain})" if domain else trace_id

    findings = []
    for (size, phase), run in groupby(totals, key=lambda row: (row["top_experts"], row["phase"])):
        pairs = sorted((row for row in run if row["jaccard_ratio"] is not None), key=lambda row: row["jaccard_ratio"])
        if len(pairs) > 1:
            least, most = pairs[0], pairs[-1]
            findings.append(
                f"Top {size} of each layer, {phase_text(phase)}: closest are {name(most['trace_id'])} and "
                f"{name(most['other_trace_id'])} (Jaccard {most['jaccard_ratio']:.3f}), farthest "
                f"{name(least['trace_id'])} and {name(least['other_trace_id'])} ({least['jaccard_ratio']:.3f})."
            )
        elif pairs:
            only = pairs[0]
            findings.append(
                f"Top {size} of each layer, {phase_text(phase)}: {name(only['trace_id'])} and "
                f"{name(only['other_trace_id'])} share {amount(only['shared_experts'])} of "
                f"{amount(only['joint_experts'])} experts (Jaccard {only['jaccard_ratio']:.3f}); two random sets would "
                f"share {only['chance_shared_experts']:,.1f}."
            )
    grid = Grid(
        caption="Overlap of the most selected experts of each layer, all layers together: in both sets ÷ in either.",
        head=[
            [
                Cell("traces", is_text=True),
                Cell("phase", is_text=True),
                Cell("top"),
                Cell("Jaccard"),
                Cell("shared"),
                Cell("by chance"),
            ]
        ],
        rows=[
            [
                Cell(f"{name(row['trace_id'])} and {name(row['other_trace_id'])}", is_text=True),
                Cell(row["phase"], is_text=True),
                Cell(amount(row["top_experts"])),
                Cell(
                    "—" if row["jaccard_ratio"] is None else f"{row['jaccard_ratio']:.3f}",
                    f"{amount(row['shared_experts'])} / {amount(row['joint_experts'])}",
                ),
                Cell(amount(row["shared_experts"])),
                Cell(f"{row['chance_shared_experts']:,.1f}"),
            ]
            for row in totals
        ],
    )
    return Block("Do domains want the same experts?", findings, [], [grid])


def _totals(rows: Iterable[Row]) -> list[Row]:
    """Rows for all layers together."""
    return [row for row in rows if row["layer_id"] is None]


def _ratio_cell(row: Row | None, name: str, *, is_best: bool = False) -> Cell:
    """A ratio above its numerator and denominator; the columns say which these are."""
    ratio = COLUMNS[name].ratio
    if row is None or ratio is None:
        return Cell("—")
    return Cell(percent(row[name]), f"{amount(row[ratio[0]])} / {amount(row[ratio[1]])}", is_best=is_best)


def _percent_of_misses(row: Row) -> str:
    return percent(row["misses"] / row["accesses"] if row["accesses"] else None)


def _middle(values: Sequence[int]) -> int:
    return values[(len(values) - 1) // 2]


def _show_capacities(axes: Axes, rows: Sequence[Row], *, pool_experts: int | None) -> None:
    in_experts = rows[0]["capacity_experts_total"] is not None

    def named(capacity: float) -> str:
        if not in_experts:
            return sized(capacity)
        share = f"\n{100 * capacity / pool_experts:.0f} %" if pool_experts else ""
        return f"{capacity:,.0f}{share}"

    share = ", % of all" if in_experts and pool_experts else ""
    label = f"capacity: experts over all layers{share}" if in_experts else "capacity over all layers"
    # Whole curves stand beside policies simulated at some capacities: their places make the better ticks.
    shared = set.intersection(*({_capacity(row) for row in of_policy} for _, _, of_policy in _by_policy(rows)))
    show_capacities(axes, sorted(shared) if len(shared) > 1 else _capacities(rows), name=named, label=label)


def _draw_reuse(axes: Axes, total: Row) -> list[Line]:
    """Bars of W_1, W_8, W_64 in recorded order and shuffled, and the chance of W_1; gives the bars back as lines."""
    windows = list(_WINDOW_NAMES)
    bars = []
    for offset, label, name, colour, hatch in (
        (-0.2, "recorded order", "reuse", "blue", ""),
        (0.2, "tokens shuffled", "shuffled", "orange", "///"),
    ):
        heights = [total[f"w{window}_{name}_ratio"] or 0.0 for window in windows]
        axes.bar(
            [place + offset for place in range(len(windows))], heights, width=0.36, label=label, hatch=hatch,
            color=COLOURS[colour][0], edgecolor=COLOURS["grid"][0],
        )  # fmt: skip
        bars.append(Line(label, (colour, "-", ""), [float(window) for window in windows], heights))
    if total["chance_ratio"] is not None:
        axes.plot(
            [-0.42, 0.42], [total["chance_ratio"]] * 2, color=COLOURS["ink"][0], linestyle=":", label="by popularity",
            zorder=4,
        )  # fmt: skip
    axes.xaxis.set_major_locator(FixedLocator(range(len(windows))))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda place, _: _WINDOW_NAMES[windows[int(place)]]))
    axes.set_ylabel("share of selections")
    return bars
