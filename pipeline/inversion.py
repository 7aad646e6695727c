"""Why LRU falls under a static table at tiny budgets: a synthetic trace of the study's shape, replayed both ways.

In: a trace, or the parameters of a synthetic router. Out: hit counts per semantics, order and policy, and the sentences
and tables that report and command line show of them. Policies belong to `replayer.simulate`, the page to `report`.

The study (arXiv 2608.12103 v2 §3) prints LRU 0.5 %, gated LFU 12.7 % and a static table 9.8 % at 8 of 896 experts per
layer and 16 experts per token, from traces that are not public. `SyntheticRouter` is a reconstruction, no recording:
its shape is the study's, and its three free parameters were chosen so that it shows the study's lag-1 reuse, static
and LFU figures. Everything else it shows is a consequence, LRU's figures under every replay foremost.

Why the order inside an event matters: let an expert stand at place j of one event and at place i of the next, both
events of k experts in ascending order of ids. Between its two accesses lie k − j + i − 1 others, none twice, so
sequential LRU of B ≤ k experts hits exactly if i + k − j ≤ B. At B = k these are the reused experts that do not move
up (six in ten), at B = k ÷ 2 those that move down by half an event: hardly any, for an expert moves only as far as
others before it come and go. Any order that is the same in every event does this, whatever it goes by. Event-atomic LRU
of B ≤ k holds the last B of the event before and hits about W_1 × B ÷ k, wherever an expert stands now (less in router
order, where the last are those wanted least).

Letters: L layers, T steps, E experts per layer, K experts per token.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from pipeline.ingest import ingest
from pipeline.page import Block, Cell, Grid, Row, amount, listed, percent
from pipeline.results import read_current, write_result
from replayer.simulate import Capacity, Window, prepare, simulate
from replayer.trace import Trace, read_trace
from schemas.columns import ACCESS_ORDERS
from schemas.files import DataFolder
from schemas.tables import TABLES
from schemas.trace import UserMetadata

COMMAND = "expert-tier inversion"
PARTITION = "synthetic"
"""Where the table's rows lie: results/inversion/synthetic."""

POLICIES_COMPARED = ("lru", "lfu_gated", "lfu_always", "static", "belady_bypass")
SEMANTICS_COMPARED = ("sequential", "event_atomic")
WARM_FRACTION = Fraction("0.6")
"""The study's window: warm on the first 60 % of the steps, scored on the rest, the static table fitted on the 60 %."""

ROW_COLUMNS = TABLES["inversion"].column_names

STUDY_POINT = {"num_experts": 896, "top_k_observed": 16, "experts_per_layer": 8}
STUDY_PERCENT = {"lru": "0.5", "static": "9.8", "lfu_gated": "12.7"}
"""Hit rates as printed in arXiv 2608.12103 v2 §3 at `STUDY_POINT`, means over four domains."""

_LABELS = {
    "lru": "LRU",
    "lfu_gated": "LFU, gated",
    "lfu_always": "LFU, always admits",
    "static": "static table",
    "belady_bypass": "Belady, bypass",
}
_SEMANTICS_LABELS = {"sequential": "sequential", "event_atomic": "event-atomic"}
_RIVALS = {"static": "the static table", "lfu_gated": "gated LFU"}
_QUESTION = "Does LRU fall under a static table at tiny budgets?"
_EFFECT_OF_REPLAY = (
    "LRU under a static table at tiny budgets: an effect of replaying access by access in ascending order"
)
_ORDER_WORDS = {1: "above", 0: "level with", -1: "below"}


@dataclass(frozen=True)
class SyntheticRouter:
    """A router whose logits are fixed popularity + slow drift + noise; the top K of E are selected, best first.

    Shape: 92 layers of 896 experts, 16 per token, and the 285 steps of the study's prose trace, one token each.
    The logit of the expert at popularity rank r (ranks are shuffled over the ids of each layer) is
    −popularity_skew × ln r + drift + noise: noise is standard normal afresh for each token, drift an AR(1) process of
    standard deviation `drift` whose memory is e^(−1 ÷ memory_steps) per step.

    Skew, drift and memory are free. They were fitted by hand, at seed 0, to three printed figures: the static table's
    9.8 % (9.9 here), gated LFU's 12.7 % (12.7) and W_1 of 32–36 % (33.7). Not fitted, printed → here: top-8 share
    13–16 → 15 %, coverage 64–69 → 63 %, alpha 1.00–1.04 → 1.07, W_64 80–82 → 84 %, W_8 57–59 → 70 %. With W_8 that high
    LRU gains too much beyond the budget of one event: read nothing from this trace about larger ones.
    """

    layers: int = 92
    steps: int = 285
    num_experts: int = 896
    top_k: int = 16
    popularity_skew: float = 0.61
    drift: float = 1.45
    memory_steps: float = 32.0
    seed: int = 0


INPUTS = {"router": str(SyntheticRouter())}
"""What the stored rows were made from."""


def synthetic_routes(router: SyntheticRouter) -> npt.NDArray[np.int16]:
    """Expert ids (L, T, K) in router order, the same for the same parameters."""
    generator = np.random.default_rng(router.seed)
    popularity = (-router.popularity_skew * np.log(np.arange(1, router.num_experts + 1))).astype(np.float32)
    memory = np.float32(np.exp(-1 / router.memory_steps))
    fresh = np.float32(np.sqrt(1 - memory**2))
    shape = (router.steps, router.num_experts)
    routes = np.empty((router.layers, router.steps, router.top_k), dtype=np.int16)
    for layer in range(router.layers):
        drift = generator.standard_normal(shape, dtype=np.float32)  # (T, E)
        for step in range(1, router.steps):
            drift[step] = memory * drift[step - 1] + fresh * drift[step]
        logits = generator.standard_normal(shape, dtype=np.float32)
        logits += np.float32(router.drift) * drift + popularity[generator.permutation(router.num_experts)]
        best = np.argpartition(logits, -router.top_k)[:, -router.top_k :]  # (T, K)
        descending = np.argsort(-np.take_along_axis(logits, best, axis=1), kind="stable")
        routes[layer] = np.take_along_axis(best, descending, axis=1)
    return routes


def synthetic_trace(router: SyntheticRouter | None = None) -> Trace:
    """The router's trace, ingested like any dump: the same parser, checks and metadata."""
    router = router or SyntheticRouter()
    user = UserMetadata(
        model="synthetic router",
        domain="synthetic",
        capture_method=f"drawn, not recorded: {router}",
        num_experts=router.num_experts,
        top_k_model=router.top_k,
        moe_layer_ids=list(range(router.layers)),
        id_space="logical",
        weight_kind="absent",
        phase="decode",
    )
    with tempfile.TemporaryDirectory(prefix="expert-tier-") as folder:
        dump = Path(folder) / "synthetic.npz"
        np.savez(dump, experts=synthetic_routes(router))
        return read_trace(ingest(dump, DataFolder(Path(folder)), user).path)


def inversion_rows(
    trace: Trace,
    *,
    experts_per_layer: Sequence[int] | None = None,
    steps: tuple[int | None, int | None] = (None, None),
    seed: int = 0,
) -> pl.DataFrame:
    """Table `inversion`: a row per capacity, semantics, order and policy, one cache per layer.

    `experts_per_layer` defaults to half an event and a whole one (k ÷ 2 and k). Router order is left out where the dump
    did not keep it.

    Raises:
        replayer.simulate.UnusableRequest: the steps do not exist, or nothing is scored.
    """
    capacities = experts_per_layer or sorted({max(1, trace.top_k // 2), trace.top_k})
    window = Window(steps, warm_fraction=WARM_FRACTION)
    facts = {
        "capture_method": trace.metadata.capture_method,
        "num_experts": max(trace.metadata.experts_per_layer),
        "moe_layers": len(trace.metadata.moe_layer_ids),
        "top_k_observed": trace.top_k,
    }
    rows: list[dict[str, Any]] = []
    for order in ACCESS_ORDERS:
        if order == "router" and not trace.metadata.rank_known:
            continue
        rows += simulate(
            prepare(trace, window, order=order, seed=seed),
            names=POLICIES_COMPARED,
            scope="layer",
            semantics=SEMANTICS_COMPARED,
            capacities=[Capacity(experts=number) for number in capacities],
            fit=f"first:{float(WARM_FRACTION)}",
        )
    return (
        TABLES["inversion"]
        .frame({name: {**facts, **row}[name] for name in ROW_COLUMNS} for row in rows)
        .sort("capacity_experts_total", maintain_order=True)
    )


def stored_inversion(data: DataFolder) -> pl.DataFrame | None:
    """The rows of the default router that this version made and kept in `data`; null where there are none."""
    return read_current(data, TABLES["inversion"], PARTITION, INPUTS)


def kept_inversion(data: DataFolder) -> pl.DataFrame:
    """The same, made and kept where there are none yet.

    Raises:
        OSError: they cannot be written.
    """
    rows = stored_inversion(data)
    if rows is None:
        rows = inversion_rows(synthetic_trace())
        write_result(data, TABLES["inversion"], PARTITION, rows, INPUTS)
    return rows


@dataclass(frozen=True)
class _Point:
    """The rows of one capacity."""

    num_experts: int
    top_k: int
    experts_per_layer: int
    rows: dict[tuple[str, str, str], Row]

    @property
    def orders(self) -> list[str]:
        return list(dict.fromkeys(order for _, order, _ in self.rows))

    def row(self, semantics: str, order: str, policy: str) -> Row:
        return self.rows[semantics, order, policy]

    def against(self, semantics: str, order: str, policy: str) -> int:
        """1 if LRU hits more than `policy`, 0 if as often, else −1."""
        mine, theirs = (int(self.row(semantics, order, name)["hits"]) for name in ("lru", policy))
        return (mine > theirs) - (mine < theirs)

    @property
    def one_token_events(self) -> bool:
        """Whether every event of a scored step holds just the k experts of one token, and no layer rests."""
        some = next(iter(self.rows.values()))
        return bool(some["accesses"] == some["scored_steps"] * some["moe_layers"] * self.top_k)


def _points(rows: pl.DataFrame) -> list[_Point]:
    points = []
    ordered = rows.sort("capacity_experts_total", maintain_order=True).to_dicts()
    for total, of_point in groupby(ordered, key=lambda row: row["capacity_experts_total"]):
        found = {(row["semantics"], row["access_order"], row["policy"]): row for row in of_point}
        some = next(iter(found.values()))
        points.append(_Point(some["num_experts"], some["top_k_observed"], total // some["moe_layers"], found))
    return points


def inversion_sentences(rows: pl.DataFrame) -> list[str]:
    """What the rows of one trace say, smallest capacity first; other rows, other sentences."""
    sentences: list[str] = []
    for point in _points(rows):
        sentences += [*_inversion(point), *_by_order(point), *_rivals_move(point), *_lag1(point), *_study(point)]
    return sentences


def _replay_decides(point: _Point) -> bool:
    """Whether LRU is under the static table in ascending order if replayed access by access, and only then."""
    sequential, atomic = (point.against(one, "ascending", "static") < 0 for one in SEMANTICS_COMPARED)
    return sequential and not atomic


def _inversion(point: _Point) -> list[str]:
    """LRU against its rivals in ascending order, both ways, and whether the semantics decide."""
    place = f"At {point.experts_per_layer} of {amount(point.num_experts)} experts per layer"
    sequential, atomic = (_standing(point, semantics, "ascending") for semantics in SEMANTICS_COMPARED)
    below_before, below_after = (point.against(one, "ascending", "static") < 0 for one in SEMANTICS_COMPARED)
    verdict = {
        (True, False): "That LRU falls under the static table is an effect of the replay: it vanishes where an event "
        "is looked up as a whole.",
        (True, True): "LRU falls under the static table either way: here it is no effect of the replay alone.",
        (False, False): "LRU does not fall under the static table either way.",
        (False, True): "LRU falls under the static table only where an event is looked up as a whole.",
    }[below_before, below_after]
    return [
        f"{place}, replayed access by access in ascending order of ids, {sequential}. "
        f"Event-atomic, in the same order, {atomic}. {verdict}"
    ]


def _standing(point: _Point, semantics: str, order: str) -> str:
    """`LRU hits 0.0 %, below the static table (9.8 %) and below gated LFU (12.7 %)`."""
    rivals = [
        f"{_ORDER_WORDS[point.against(semantics, order, policy)]} {name} "
        f"({percent(point.row(semantics, order, policy)['hit_rate'])})"
        for policy, name in _RIVALS.items()
    ]
    return f"LRU hits {percent(point.row(semantics, order, 'lru')['hit_rate'])}, {listed(rivals)}"


def _by_order(point: _Point) -> list[str]:
    """LRU's hit rate in every order, and in which orders it stands where against each rival, event-atomic."""
    if len(point.orders) < 2:
        return []
    parts = []
    for semantics in SEMANTICS_COMPARED:
        rates = [f"{order} {percent(point.row(semantics, order, 'lru')['hit_rate'])}" for order in point.orders]
        parts.append(f"{_SEMANTICS_LABELS[semantics]}: {listed(rates)}")
    standings = []
    for policy, name in _RIVALS.items():
        places = sorted(point.orders, key=lambda order: -point.against("event_atomic", order, policy))
        runs = [
            (_ORDER_WORDS[standing], list(run))
            for standing, run in groupby(places, key=lambda order: point.against("event_atomic", order, policy))
        ]
        where = [f"{word} {name} in {f'{listed(run)} order' if len(runs) > 1 else 'every order'}" for word, run in runs]
        standings.append(listed(where))
    return [
        f"LRU of {point.experts_per_layer} by order, {'; '.join(parts)}. "
        f"Event-atomic it is {'; it is '.join(standings)}."
    ]


def _rivals_move(point: _Point) -> list[str]:
    """How far semantics and order move the policies that LRU is compared with."""
    spreads = []
    for policy, name in _RIVALS.items():
        rates = [row["hit_rate"] for (_, _, of_row), row in point.rows.items() if of_row == policy]
        spreads.append(f"{name} by {100 * (max(rates) - min(rates)):.2f}")
    return [f"Semantics and order together move {listed(spreads)} percentage points."]


def _lag1(point: _Point) -> list[str]:
    """With one token per event and B = k, event-atomic LRU is the lag-1 reuse; what sequential replay keeps of it."""
    if point.experts_per_layer != point.top_k or not point.one_token_events:
        return []
    hits = {point.row("event_atomic", order, "lru")["hits"] for order in point.orders}
    some = point.row("event_atomic", "ascending", "lru")
    if len(hits) > 1:
        return [
            f"Event-atomic LRU of k = {point.top_k} experts holds the event before, whatever the order, yet its hits "
            "differ between orders: treat these rows as wrong."
        ]
    kept = point.row("sequential", "ascending", "lru")["hits"] / some["hits"] if some["hits"] else None
    return [
        f"Event-atomic LRU of k = {point.top_k} experts holds just the event before: its {percent(some['hit_rate'])} "
        f"are the lag-1 reuse W₁ of the scored steps. Access by access in ascending order {percent(kept)} of it are "
        "left."
    ]


def _study(point: _Point) -> list[str]:
    here = {
        "num_experts": point.num_experts, "top_k_observed": point.top_k, "experts_per_layer": point.experts_per_layer
    }  # fmt: skip
    if here != STUDY_POINT:
        return []
    rates = {name: point.row("sequential", "ascending", name)["hit_rate"] for name in STUDY_PERCENT}
    ranked = sorted(STUDY_PERCENT, key=lambda name: rates[name])
    order = "in the same order" if ranked == list(STUDY_PERCENT) else "in another order"
    printed = listed([f"{_LABELS[name]} {value} %" for name, value in STUDY_PERCENT.items()])
    found = listed([f"{_LABELS[name]} {percent(rates[name])}" for name in STUDY_PERCENT])
    return [
        f"The study prints {printed} at this point (arXiv 2608.12103 v2 §3); sequential and ascending this trace shows "
        f"{found}, {order}."
    ]


def inversion_block(rows: pl.DataFrame) -> Block:
    """The page's part: the sentences, and a table per capacity."""
    points = _points(rows)
    return Block(
        heading=_EFFECT_OF_REPLAY if points and _replay_decides(points[0]) else _QUESTION,
        findings=inversion_sentences(rows),
        pictures=[],
        grids=[_grid(point) for point in points],
    )


def inversion_text(rows: pl.DataFrame) -> list[str]:
    """The same for a terminal, line by line."""
    lines = []
    for point in _points(rows):
        lines += ["", f"{_contract(point)}", "", f"{'hit rate, %':<20}" + "".join(f"{o:>12}" for o in point.orders)]
        for semantics in SEMANTICS_COMPARED:
            lines.append(_SEMANTICS_LABELS[semantics])
            for policy in _policies(point):
                rates = [point.row(semantics, order, policy)["hit_rate"] for order in point.orders]
                lines.append(f"  {_LABELS[policy]:<18}" + "".join(f"{100 * rate:>12.2f}" for rate in rates))
    return [*lines[1:], "", *inversion_sentences(rows)]


def _policies(point: _Point) -> list[str]:
    present = {policy for _, _, policy in point.rows}
    return [policy for policy in _LABELS if policy in present]


def _contract(point: _Point) -> str:
    some = next(iter(point.rows.values()))
    return (
        f"Trace {some['trace_id']}: {point.experts_per_layer} of {amount(point.num_experts)} experts in each of "
        f"{some['moe_layers']} layers, {point.top_k} per token; steps {amount(some['step_begin'])} to "
        f"{amount(some['step_end'] - 1)}, the first {amount(some['warm_steps'])} warm and fit, "
        f"{amount(some['accesses'])} accesses scored. Captured by: {some['capture_method'] or 'unknown'}."
    )


def _grid(point: _Point) -> Grid:
    columns = [(semantics, order) for semantics in SEMANTICS_COMPARED for order in point.orders]
    causal = [policy for policy in _policies(point) if policy != "belady_bypass"]

    def cell(semantics: str, order: str, policy: str) -> Cell:
        row = point.row(semantics, order, policy)
        most = max(point.row(semantics, order, one)["hits"] for one in causal)
        return Cell(percent(row["hit_rate"]), amount(row["hits"]), is_best=policy in causal and row["hits"] == most)

    return Grid(
        caption=f"Simulated hit rate, and below it the hits. Bold: most hits without knowing the future. "
        f"{_contract(point)}",
        head=[
            [Cell(""), *(Cell(_SEMANTICS_LABELS[one], span=len(point.orders)) for one in SEMANTICS_COMPARED)],
            [Cell("policy", is_text=True), *(Cell(order) for _, order in columns)],
        ],
        rows=[
            [Cell(_LABELS[policy], is_text=True), *(cell(*column, policy) for column in columns)]
            for policy in _policies(point)
        ],
    )
