"""The page and the small pictures: sentences follow the rows, text of dumps stays text, nothing is fetched."""

import html
import re
import struct
from collections.abc import Iterable
from html.parser import HTMLParser

import duckdb
import polars as pl
import pytest

from pipeline.report import POLICY_LABELS, curve_png, locality_png, recall_png, render_report, write_report
from schemas.columns import POLICIES
from schemas.tables import TABLES
from tests.table_rows import ROWS
from tests.test_warehouse import run_row, valid_row, write_result
from warehouse.build import QueryFailed, WarehouseMissing, build_warehouse

TRACE_ID = "tiny-0123456789ab"
VOID_TAGS = {"meta", "br", "path", "use"}
SPACE = "\N{NARROW NO-BREAK SPACE}"


def trace_row(**values: object) -> dict[str, object]:
    known = {
        "trace_id": TRACE_ID, "supersedes": None, "model": "Tiny MoE", "unknowns": "", "moe_layers": 2,
        "pool_experts": 64, "dropped_rows": 0, "rows": 6, "decode_rows": 6,
    }  # fmt: skip
    return valid_row(TABLES["trace"], **{**known, **values})


def rate_row(policy: str, hits: int, **values: object) -> dict[str, object]:
    contract = {
        "trace_id": TRACE_ID, "policy": policy, "scope": "layer", "semantics": "event_atomic", "phase": "decode",
        "access_order": "router", "dedup": "union", "capacity_experts_total": 16, "capacity_bytes": None,
        "step_begin": 0, "step_end": 50, "warm_fraction": 0.6, "warm_steps": 30, "warm_pass": False,
        "fit": "first:0.6" if policy == "static" else None, "seed": None, "accesses": 1000, "selections": 1000,
        "scored_steps": 20, "scored_events": 100, "hits": hits, "misses": 1000 - hits, "events_above_capacity": 0,
        "lag1_chance_numerator": 5.0, "lag1_chance_denominator": 20.0, "lag1_uniform_denominator": 8000,
    }  # fmt: skip
    unknown = (
        "demand_bytes", "miss_bytes", "preload_bytes", "pinned_fraction", "admission", "quota_fit", "folios_per_expert",
        "hit_rate_low", "hit_rate_high", "block_steps", "reference_policy", "over_reference", "over_reference_low",
        "over_reference_high", "shuffled_accesses", "shuffled_hits",
    )  # fmt: skip
    return valid_row(TABLES["hit_rate"], **{**contract, **dict.fromkeys(unknown), **values})


def curve_row(policy: str, hits: int, **values: object) -> dict[str, object]:
    rate = rate_row(policy, hits, **values)
    rate["miss_ratio"] = rate["misses"] / rate["accesses"]
    return {name: rate[name] for name in TABLES["miss_ratio_curve"].column_names}


def locality_row(layer_id: int | None, *, reused: int, shuffled: int) -> dict[str, object]:
    counts = {
        "tokens": 100, "selections": 200, "reuse_selections": 198, "w1_reused_selections": reused,
        "w1_shuffled_reused_selections": shuffled, "w8_reused_selections": 150, "w8_shuffled_reused_selections": 140,
        "w64_reused_selections": 190, "w64_shuffled_reused_selections": 190, "chance_numerator": 0.5,
        "chance_denominator": 2.0, "uniform_denominator": 3200, "top8_selections": 120, "distinct_experts": 48,
        "pool_experts": 64, "working_set_95_experts": 32, "zipf_alpha": 1.25, "seed": 0,
    }  # fmt: skip
    return valid_row(TABLES["trace_locality"], trace_id=TRACE_ID, phase="decode", layer_id=layer_id, **counts)


def recall_row(predictor: str, named: int, *, depth: int = 0, layer_id: int | None = None) -> dict[str, object]:
    is_table = predictor == "conditional"
    counts = {
        "events": 100, "covered_events": 90 if is_table else 100, "accesses": 1000,
        "covered_accesses": 900 if is_table else 1000, "predicted_experts": 900, "predicted_accesses": named,
        "chance_predicted_accesses": 62.5, "shuffled_predicted_accesses": 100, "seed": 0,
        "step_begin": 0, "step_end": 50, "warm_steps": 30,
    }  # fmt: skip
    return valid_row(
        TABLES["lookahead_recall"],
        trace_id=TRACE_ID,
        predictor=predictor,
        fit="first:0.6" if is_table else None,
        lookahead_layers=depth,
        lookahead_steps=0 if is_table else 1,
        width=8 if is_table else None,
        layer_id=layer_id,
        phase="decode",
        **counts,
    )


def overlap_row(first: str, second: str, shared: int) -> dict[str, object]:
    return valid_row(
        TABLES["domain_overlap"],
        trace_id=first,
        other_trace_id=second,
        phase="decode",
        top_experts=8,
        layer_id=None,
        shared_experts=shared,
        joint_experts=40,
    )


def check_row(name: str, outcome: str, found: str) -> dict[str, object]:
    return {"trace_id": TRACE_ID, "name": name, "outcome": outcome, "wanted": "layers differ", "found": found}


def tables(**rows: Iterable[dict[str, object]]) -> dict[str, pl.DataFrame]:
    filled = {"trace": [trace_row()], **rows}
    return {name: table.frame(filled.get(name, [])) for name, table in TABLES.items()}


def full_tables() -> dict[str, pl.DataFrame]:
    policies = ("lru", "lfu_gated", "lfu_always", "static", "belady_forced", "belady_bypass")
    both = ("event_atomic", "sequential")
    rates = [
        rate_row(policy, 100 * number + capacity, semantics=semantics, capacity_experts_total=capacity)
        for number, policy in enumerate(policies, start=1)
        for semantics in both
        for capacity in (8, 16, 32)
    ]
    curves = [
        curve_row(
            policy, 10 * number + 10 * capacity, semantics=semantics, capacity_experts_total=capacity, scope=scope
        )
        for number, policy in enumerate(policies, start=1)
        for semantics in both
        for scope in ("layer", "global")
        for capacity in (2, 4, 8, 16, 32, 64)
    ]
    return tables(
        trace=[
            trace_row(unknowns="engine, pass_boundaries", dropped_rows=3),
            trace_row(trace_id="other", domain="math", supersedes="other-old"),
            trace_row(trace_id="other-old"),
        ],
        trace_check=[check_row("layers differ", "ok", "as wanted"), check_row("weights", "warn", "no weights")],
        hit_rate=rates,
        miss_ratio_curve=curves,
        trace_locality=[locality_row(layer, reused=90, shuffled=60) for layer in (3, 5, None)],
        lookahead_recall=[
            *(recall_row("previous_token", 300, layer_id=layer) for layer in (3, 5, None)),
            *(recall_row("conditional", 450, depth=1, layer_id=layer) for layer in (3, 5, None)),
            *(recall_row("conditional", 400, depth=2, layer_id=layer) for layer in (3, 5, None)),
        ],
        domain_overlap=[overlap_row("other", TRACE_ID, 10)],
    )


def text_of(page: str) -> str:
    """The page's words, without tags, in one line."""
    body = re.sub(r"<(style|svg).*?</\1>", " ", page[page.index("<body>") :], flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", body))).replace(" .", ".")


def words(**rows: Iterable[dict[str, object]]) -> str:
    return text_of(render_report(tables(**rows))).replace(SPACE, " ")


class Outline(HTMLParser):
    """Collects what a page refers to and checks that its tags nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.named_by: list[str] = []
        self.tags: set[str] = set()
        self.external: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name == "aria-labelledby":
                self.named_by += value.split()
            if name in ("href", "xlink:href"):
                self.links.append(value)
            if name in ("src", "srcset", "data", "action"):
                self.external.append(value)
        if tag not in VOID_TAGS:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID_TAGS:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID_TAGS:
            assert self.open.pop() == tag


def outline_of(page: str) -> Outline:
    outline = Outline()
    outline.feed(page)
    outline.close()
    assert outline.open == []
    return outline


def test_the_page_stands_alone_and_its_references_hold():
    page = render_report(full_tables())
    outline = outline_of(page)
    assert {"figure", "svg", "table", "caption", "figcaption"} <= outline.tags
    assert not {"script", "link", "iframe", "img", "object", "form"} & outline.tags
    assert outline.external == []
    assert len(set(outline.ids)) == len(outline.ids)
    assert {link.removeprefix("#") for link in outline.links} <= set(outline.ids)
    assert all(link.startswith("#") for link in outline.links)
    assert set(outline.named_by) <= set(outline.ids)
    assert set(re.findall(r"url\((?!#plot)", page)) == set()
    assert set(re.findall(r"https?://[\w./]+", page)) == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "@import" not in page
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert "@media print" in page
    assert "prefers-color-scheme: dark" in page


def test_the_same_tables_give_the_same_bytes():
    assert render_report(full_tables()) == render_report(full_tables())


def test_plots_take_their_colours_from_the_page_and_say_what_they_show():
    page = render_report(full_tables())
    plots = re.findall(r'<svg class="plot".*?</svg>', page, flags=re.DOTALL)
    assert len(plots) == 2 * 2 + 2 + 2
    for plot in plots:
        assert set(re.findall(r"#[0-9a-f]{6}\b", plot)) <= {"#ffffff", "#000000"}
        assert re.search(r"<title id=\"plot\d+-title\">.+?</title><desc id=\"plot\d+-desc\">.+?</desc>", plot)
        assert "<text" in plot
    assert "LRU: from 3.0 % to 65.0 % at full capacity." in plots[0]


def test_every_figure_says_that_it_is_simulated_from_what_and_how_to_make_it_again():
    page = render_report(full_tables())
    captions = re.findall(r"<figcaption>.*?</figcaption>", page, flags=re.DOTALL)
    assert len(captions) == 4
    for caption in captions:
        shown = html.unescape(re.sub(r"<[^>]+>", "", caption))
        assert TRACE_ID in shown
        assert shown.startswith(("Simulated, not measured", "Counted from"))
        assert f"expert-tier run --trace {TRACE_ID} && expert-tier report" in shown
    assert (
        "Scope layer; router order; each expert once per event; steps 0 to 49; the first 30 (60.0 %) warm the cache "
        "unscored; scored: phase decode, 1,000 accesses; static table fitted on the first 60 % of the steps. "
        "Semantics: event-atomic and sequential."
    ) in text_of(page).replace(SPACE, " ")


HOSTILE = "<script>alert('x')</script>{{ 7*7 }} $\\frac$ \"'&"


def test_text_of_a_dump_stays_text():
    texts = ("model", "engine", "domain", "capture_method", "source_file", "unknowns", "source_sha256")
    filled = full_tables()
    filled["trace"] = TABLES["trace"].frame(
        [trace_row(**dict.fromkeys(texts, HOSTILE)), trace_row(trace_id=HOSTILE, supersedes=TRACE_ID, model=None)]
    )
    filled["trace_check"] = TABLES["trace_check"].frame([check_row(HOSTILE, "warn", HOSTILE)])
    filled["domain_overlap"] = TABLES["domain_overlap"].frame([overlap_row(HOSTILE, TRACE_ID, 10)])
    for name in ("hit_rate", "miss_ratio_curve", "lookahead_recall"):
        filled[name] = filled[name].with_columns(fit=pl.when(pl.col("fit").is_not_null()).then(pl.lit(HOSTILE)))
    page = render_report(filled)
    assert "<script" not in page
    assert "alert('x')" not in page
    assert "script" not in outline_of(page).tags
    assert f"fitted on {HOSTILE}" in text_of(page)
    assert "{{ 7*7 }}" in page
    assert not any("alert" in plot for plot in re.findall(r'<svg class="plot".*?</svg>', page, flags=re.DOTALL))


def test_what_is_unknown_and_warned_of_comes_before_the_numbers():
    page = text_of(render_report(full_tables()))
    order = [
        page.index("Check weights: wanted layers differ; found no weights."),
        page.index("3 rows of the dump did not enter the trace."),
        page.index("Neither the dump nor its user says the engine forward passes: each token position"),
        page.index("Hit rate by capacity"),
    ]
    assert order == sorted(order)
    assert "A later dump of the same path takes this one's place: trace other." in page


def test_several_traces_get_an_index_and_one_does_not():
    assert "<nav" in render_report(full_tables())
    assert "<nav" not in render_report(tables())


def test_lru_and_belady_are_told_from_their_counts():
    rows = [rate_row("lru", 400), rate_row("belady_bypass", 700)]
    assert (
        "Event-atomic, 16 experts (25.0 % of all, 8 per layer): LRU misses 600 of 1,000 accesses (60.0 %); Belady with "
        "bypass, which knows the future, misses 300 (30.0 %), 300 fewer: 50.0 % of LRU's misses."
    ) in words(hit_rate=rows)
    with_bytes = [row | {"demand_bytes": 10**9, "miss_bytes": 10**6 * row["misses"]} for row in rows]
    assert "LRU's misses. Per step, 30.00 MB of misses against 15.00 MB." in words(hit_rate=with_bytes)
    same = words(hit_rate=[rate_row("lru", 400), rate_row("belady_bypass", 400)])
    assert "misses 600 (60.0 %), just as many." in same
    assert "that cannot be" not in same


def test_an_lru_above_belady_is_called_wrong():
    shown = words(hit_rate=[rate_row("lru", 701), rate_row("belady_bypass", 700)])
    assert "misses 300 (30.0 %), 1 more." in shown
    assert "LRU is above Belady with bypass at 16 experts. Under one contract and equal sizes that cannot be" in shown


@pytest.mark.parametrize(
    ("lru", "static", "sentence"),
    [
        (400, 200, "the static table is below LRU at 16 experts (20.0 against 40.0 %)."),
        (200, 400, "the static table is above LRU at 16 experts (40.0 against 20.0 %)."),
        (300, 300, "the static table is level with LRU at 16 experts (30.0 against 30.0 %)."),
    ],
)
def test_the_sentence_on_the_static_table_flips_with_the_rows(lru, static, sentence):
    shown = words(hit_rate=[rate_row("lru", lru), rate_row("static", static)])
    assert f"Event-atomic: {sentence}" in shown


def test_the_static_table_is_placed_at_every_capacity():
    rows = [
        rate_row("lru", hits, capacity_experts_total=capacity) for capacity, hits in ((8, 100), (16, 400), (32, 600))
    ]
    rows += [
        rate_row("static", hits, capacity_experts_total=capacity) for capacity, hits in ((8, 300), (16, 350), (32, 500))
    ]
    shown = words(hit_rate=rows)
    assert (
        "the static table is above LRU at 8 experts (30.0 against 10.0 %), below LRU at 16 experts (35.0 against "
        "40.0 %) and 32 experts (50.0 against 60.0 %)."
    ) in shown
    assert "do not know the future: static table at 8 experts; LRU at 16 experts and 32 experts." in shown


def test_a_table_fitted_on_what_it_is_scored_on_says_so_and_never_wins():
    rows = [rate_row("lru", 300), rate_row("static", 500, fit="same"), rate_row("static", 200)]
    page = render_report(tables(hit_rate=rows))
    shown = text_of(page).replace(SPACE, " ")
    assert "static table (fitted on the steps it is scored on) is above LRU" in shown
    assert "Fitted on the steps it is scored on, it has seen the future." in shown
    assert "static table (fitted on the first 60 % of the steps) is below LRU" in shown
    assert "do not know the future: LRU at 16 experts." in shown
    assert [html.unescape(cell) for cell in re.findall(r'class="number best">([^<]+)', page)] == [f"30.0{SPACE}%"]


def test_rates_that_differ_in_the_third_decimal_are_shown_apart():
    rows = [rate_row("lru", 30_000), rate_row("static", 30_010)]
    big = [row | {"accesses": 10**6, "selections": 10**6, "misses": 10**6 - row["hits"]} for row in rows]
    big = [row | {"hit_rate": row["hits"] / 10**6} for row in big]
    assert "above LRU at 16 experts (3.001 against 3.000 %)" in words(hit_rate=big)


def test_semantics_that_turn_the_order_of_policies_are_named():
    rows = [
        rate_row("lru", 425), rate_row("static", 334),
        rate_row("lru", 304, semantics="sequential"), rate_row("static", 334, semantics="sequential"),
    ]  # fmt: skip
    shown = words(hit_rate=rows)
    assert "LRU at 16 experts hits 42.5 against 30.4 %, event-atomic against sequential." in shown
    assert "static table at 16 experts is below LRU event-atomic and above LRU sequential." in shown
    rows[2] = rate_row("lru", 350, semantics="sequential")
    shown = words(hit_rate=rows)
    assert "The way of counting decides" not in shown
    assert "Either way the same policies are above LRU" in shown


def test_contracts_are_never_mixed():
    rows = [rate_row("lru", 400), rate_row("static", 500, phase="prefill"), rate_row("static", 450, warm_steps=0)]
    page = render_report(tables(hit_rate=rows))
    assert "the static table is" not in text_of(page)
    assert page.count("Hit rate by capacity in experts, one cache per layer") == 3


def test_capacities_in_bytes_are_a_contract_of_their_own():
    in_bytes = {"capacity_experts_total": None, "capacity_bytes": 4 * 10**9}
    rows = [rate_row("lru", 400), rate_row("lru", 300, **in_bytes), rate_row("static", 200, **in_bytes)]
    trace = trace_row(pool_bytes=16 * 10**9, expert_bytes_min=1, expert_bytes_max=2)
    curve = [curve_row("lru", 300, **in_bytes), curve_row("belady_bypass", 400, **in_bytes)]
    shown = words(trace=[trace], hit_rate=rows, miss_ratio_curve=curve)
    assert "static table is below LRU at 4.00 GB (20.0 against 30.0 %)" in shown
    assert "4.00 GB 25.0 % of all" in shown
    assert "a reference, not a bound: experts differ in size" in shown


def test_a_policy_or_predictor_without_a_label_is_shown_under_its_own_name():
    rows = [rate_row("lru", 400), rate_row("oracle", 500)]
    page = render_report(tables(hit_rate=rows, miss_ratio_curve=[curve_row("lru", 400), curve_row("oracle", 500)]))
    assert "do not know the future: oracle at 16 experts" in text_of(page)
    assert "Others oracle 50.0" in text_of(page)
    recall = recall_row("gate", 500, depth=1) | {"width": None, "fit": None}
    assert "Gate: names 500 of 1,000 accesses" in words(lookahead_recall=[recall])


def test_the_sentence_on_reuse_flips_with_the_rows():
    def shown(reused: int, shuffled: int) -> str:
        return words(trace_locality=[locality_row(None, reused=reused, shuffled=shuffled)])

    assert (
        "50.0 % of 198 selections repeat an expert that the token before used in the same layer (W₁). Popularity alone "
        "would give 25.0 %, a uniform router 6.2 %. More than with the same tokens shuffled (25.3 %)"
    ) in shown(99, 50)
    assert "Fewer than with the same tokens shuffled (50.0 %): neighbouring tokens share fewer" in shown(50, 99)
    assert "As many as with the same tokens shuffled (50.0 %): the order of tokens holds no reuse" in shown(99, 99)
    assert (
        "carry 60.0 % of the selections; 50.0 % of the experts carry 95 % of them; 75.0 % of the experts occur"
        in shown(99, 50)
    )


def test_the_sentence_on_lookahead_flips_with_the_rows():
    def shown(near: int, far: int) -> str:
        rows = [recall_row("previous_token", 400), recall_row("conditional", near, depth=1)]
        return words(lookahead_recall=[*rows, recall_row("conditional", far, depth=3)])

    falling = shown(500, 300)
    assert (
        "Previous token: names 400 of 1,000 accesses 1 step ahead (40.0 %; as many experts at random: 6.2 %)."
        in falling
    )
    assert (
        "Conditional table, 8 wide: names 500 of 1,000 accesses 1 layer ahead (50.0 %; as many experts at random: "
        "6.2 %), above the previous token's 40.0 %; 3 layers ahead it falls from 55.6 % to 33.3 % over the events "
        "with a prediction, of which there are 90.0 %."
    ) in falling
    assert "below the previous token's 40.0 %; 3 layers ahead it rises from 33.3 % to 38.9 %" in shown(300, 350)
    assert "level with the previous token's 40.0 %; 3 layers ahead it stays at 44.4 %" in shown(400, 400)


def test_predictors_of_no_distance_say_so_and_nulls_stand_in_the_table_alone():
    undated = {"lookahead_layers": None, "lookahead_steps": None}
    rows = [
        recall_row("previous_token", 400),
        recall_row("conditional", 500, depth=1),
        recall_row("frequency", 450) | undated | {"width": 8},
        recall_row("frequency", 600) | undated | {"width": 16},
        recall_row("recorded", 300) | undated,
        recall_row("oracle", 1000, depth=1),
        recall_row("random", 60) | undated | {"width": 8},
    ]
    page = words(lookahead_recall=rows)
    assert "Most frequent, 8 wide: names 450 of 1,000 accesses at any time (45.0 %;" in page
    assert "Most frequent, 16 wide: names" not in page
    assert "Recorded by the engine: names 300 of 1,000 accesses at a time unknown" in page
    assert "Oracle: names" not in page
    assert "Random, 8 wide: names" not in page
    assert all(name in page for name in ("oracle 1 layer ahead and 1 step ahead", "random, 8 wide at any time"))


def test_the_closest_and_the_farthest_domains_follow_the_rows():
    traces = [trace_row(trace_id=name, domain=f"domain {name}") for name in ("a", "b", "c")]

    def shown(first: int, second: int) -> str:
        return words(trace=traces, domain_overlap=[overlap_row("a", "b", first), overlap_row("b", "c", second)])

    assert (
        "closest are a (domain a) and b (domain b) (Jaccard 0.500), farthest b (domain b) and c (domain c) (0.100)."
    ) in shown(20, 4)
    assert "closest are b (domain b) and c (domain c) (Jaccard 0.500), farthest a (domain a)" in shown(4, 20)
    assert "a and b share 20 of 40 experts (Jaccard 0.500)" in words(domain_overlap=[overlap_row("a", "b", 20)])


def test_empty_ratios_are_dashes_and_not_zeros():
    nothing = rate_row("lru", 0) | {"accesses": 0, "hits": 0, "misses": 0, "hit_rate": None, "selections": 0}
    curve = curve_row("lru", 0) | {"accesses": 0, "misses": 0, "miss_ratio": None}
    recall = recall_row("conditional", 0, depth=1) | {"accesses": 0, "recall_all": None, "chance_recall_all": None}
    page = render_report(tables(hit_rate=[nothing], miss_ratio_curve=[curve], lookahead_recall=[recall]))
    assert '<td class="number best">—<small>0</small></td>' in page
    assert "nan" not in text_of(page).lower().split()


def test_what_the_numbers_are_not_is_always_said():
    for page in (render_report(tables()), render_report(tables(trace=[]))):
        shown = text_of(page)
        assert "none was measured on a machine" in shown
        assert "They are not measured bytes." in shown
        assert "There is no native replay in this report yet" in shown
        assert "There is none yet, so nothing on this page was measured; make one with replayer pool build" in shown
    measured = words(replay_run=[native("one")])
    assert "Outside the section on native replays they are not measured bytes." in measured
    assert "A native replay reads a synthetic pool and computes nothing" in measured
    assert "There is no native replay" not in measured
    assert "none was measured" not in measured


def native(run_id: str, **values: object) -> dict[str, object]:
    known = {
        "trace_id": TRACE_ID, "condition_hash": "hash", "machine_id": "machine-1", "pool_id": "pool-1",
        "mechanism_detail": "cgroup v1", "fadvise": "random", "warm_pass": True, "step_begin": 0, "step_end": 200,
        "capacity_bytes": 4 * 10**6, "enforced_bytes": 4 * 10**6, "resident_median_bytes": 39 * 10**5,
        "demand_bytes": 10**8, "device_bytes": 55 * 10**6, "nominal_miss_bytes": 40 * 10**6,
        "resident_miss_bytes": 50 * 10**6, "stall_median_ns": 2 * 10**6, "stall_p99_ns": 9 * 10**6,
    }  # fmt: skip
    return run_row(run_id, **{**known, **values})


def proofs(run_id: str, *held: bool | None) -> list[dict[str, object]]:
    table = TABLES["replay_proof"]
    return [valid_row(table, run_id=run_id, name=str(number), held=one) for number, one in enumerate(held)]


@pytest.mark.parametrize(
    ("device", "verdict"),
    [
        ((55,), "50.00 MB (simulated): 10.0 % more than simulated."),
        ((45,), "50.00 MB (simulated): 10.0 % less than simulated."),
        ((50,), "50.00 MB (simulated), just as much."),
        ((55, 56), "100.00 MB (simulated): 11.0 % more than simulated."),
        ((45, 40), "100.00 MB (simulated): 15.0 % less than simulated."),
        ((45, 56), "100.00 MB (simulated): no difference beyond the spread of its runs."),
        ((50, 56), "100.00 MB (simulated): no difference beyond the spread of its runs."),
    ],
)
def test_the_sentence_on_a_native_condition_flips_with_its_runs(device, verdict):
    runs = [native(f"run {number}", device_bytes=bytes_ * 10**6) for number, bytes_ in enumerate(device)]
    shown = words(replay_run=runs)
    together = "" if len(device) == 1 else f"in {len(device)} runs together "
    assert (
        f"page_cache at 4.00 MB, cgroup v1, steps 0 to 199: the device delivered {sum(device)}.00 MB of "
        f"{100 * len(device)}.00 MB demanded {together}(measured); an LRU of the measured residency misses {verdict}"
    ) in shown


def test_native_runs_without_a_limit_a_counterpart_or_a_counter_say_so():
    unlimited = {
        "mechanism": "none", "mechanism_detail": None, "capacity_bytes": None, "enforced_bytes": None,
        "nominal_miss_bytes": None, "device_bytes": 0, "resident_miss_bytes": 0,
    }  # fmt: skip
    shown = words(replay_run=[native("one", **unlimited)])
    assert "page_cache at no limit, no memory limit, steps 0 to 199: the device delivered 0 B of 100.00 MB" in shown
    assert "misses 0 B (simulated), just as much." in shown
    direct = native("one", owner="restream", device_bytes=10**8, resident_miss_bytes=None)
    assert "the device delivered 100.00 MB of 100.00 MB demanded (measured)." in words(replay_run=[direct])
    uncounted = native("one", device_bytes=None)
    assert "the kernel counts no device bytes of a process here." in words(replay_run=[uncounted])


def test_repeated_runs_are_shown_as_median_and_range_and_ratios_as_sums():
    runs = [native(str(number), device_bytes=size * 10**6) for number, size in enumerate((51, 60, 54))]
    shown = words(replay_run=runs)
    assert "54.00 MB 51.00 MB to 60.00 MB" in shown
    assert "1.375 165.00 MB / 120.00 MB 1.100 165.00 MB / 150.00 MB" in shown
    assert "50.0 % 60 / 120 3 of 3 2.000 ms 9.000 ms" in shown


def test_times_that_are_not_valid_are_left_out():
    shown = words(replay_run=[native("one", time_valid=False)])
    assert "0 of 1 — —" in shown
    assert "9.000 ms" not in shown


def test_quarantined_runs_are_counted_with_their_reasons_and_enter_nothing_else():
    bad = native("bad", bytes_valid=False, bytes_reasons=f"no swap: found 3 {HOSTILE}", device_bytes=99 * 10**6)
    both = tables(
        replay_run=[native("good"), bad], replay_proof=proofs("good", True, True) + proofs("bad", True, False, None)
    )
    page = render_report(both)
    shown = text_of(page).replace(SPACE, " ")
    assert "2 native runs, 1 of them quarantined. 4 of 5 proofs held." not in shown
    assert "2 native runs, 1 of them quarantined. 3 of 4 proofs held." in shown
    assert f"bad (page_cache, 4.00 MB, trace {TRACE_ID}): no swap: found 3 <script>" in shown
    assert "<script" not in page
    assert "99.00 MB" not in shown
    clean = words(replay_run=[native("good")], replay_proof=proofs("good", True))
    assert "1 native run, 0 of them quarantined. 1 of 1 proofs held." in clean
    assert "Quarantined:" not in clean
    many = words(replay_run=[native(str(number), bytes_valid=False) for number in range(23)])
    assert "and 3 more, in the view quarantined_runs" in many
    assert "Trace tiny" not in many


def test_measured_points_lie_over_the_simulated_line_of_the_same_passes_only():
    runs = [
        native("one"),
        native("two", capacity_bytes=8 * 10**6, resident_median_bytes=78 * 10**5, device_bytes=2 * 10**7),
        native("three", step_end=50),
        native("bad", bytes_valid=False, device_bytes=10**8),
    ]  # fmt: skip
    page = render_report(tables(replay_run=runs))
    plots = re.findall(r'<svg class="plot".*?</svg>', page, flags=re.DOTALL)
    assert len(plots) == 2
    assert "page_cache, measured: from 55.0 % to 20.0 % at the most memory." in "".join(plots)
    assert "page_cache, measured: from 55.0 % to 55.0 % at the most memory." in "".join(plots)
    caption = text_of(page).replace(SPACE, " ")
    assert (
        f"Trace {TRACE_ID}, steps 0 to 49, after a warm pass; steps 0 to 199, after a warm pass. Points are" in caption
    )
    assert "--mechanism cgroup --capacity 8000000 --device cpu --steps 0:200 --data data && expert-tier run" in caption
    outline_of(page)


def test_machines_and_pools_of_valid_runs_get_a_line_each():
    rows = {"machine": [ROWS["machine"], {**ROWS["machine"], "machine_id": "unused"}], "pool": [ROWS["pool"]]}
    shown = words(replay_run=[native("one")], **rows)
    assert (
        "machine-1: aarch64, 2 processors (unnamed), 17.18 GB of memory in pages of 65,536 bytes, kernel 6.18.0 "
        "(none), MGLRU absent, DAMON absent, pool on ext4 on nvme0n1"
    ) in shown
    assert (
        "pool-1: 16 experts of 2 layers, 1.60 kB in 2 files, per-layer, aligned to 4,096 bytes, synthetic_v1" in shown
    )
    assert "unused" not in shown


def test_without_traces_the_page_says_what_to_do():
    shown = text_of(render_report(tables(trace=[])))
    assert "There is no trace yet. Put a router dump into data/dumps/" in shown


def test_results_of_a_trace_without_a_row_are_named():
    shown = text_of(render_report(tables(hit_rate=[rate_row("lru", 400, trace_id="stray")])))
    assert "Results without a row in the table trace, left out below stray : run expert-tier run" in shown


def test_the_report_is_written_from_the_warehouse_and_leaves_nothing_behind(tmp_path):
    for name, frame in full_tables().items():
        write_result(tmp_path, name, "some", frame.to_dicts())
    build_warehouse(tmp_path)
    file = write_report(tmp_path)
    assert file == tmp_path / "report" / "index.html"
    assert file.read_text(encoding="utf-8") == render_report(full_tables())
    assert [path.name for path in file.parent.iterdir()] == ["index.html"]
    with duckdb.connect(str(tmp_path / "warehouse.duckdb")) as connection:
        connection.execute("ALTER TABLE hit_rate DROP COLUMN hits")
    before = file.read_bytes()
    with pytest.raises(QueryFailed, match="table hit_rate is missing or has other columns"):
        write_report(tmp_path)
    assert file.read_bytes() == before


def test_without_a_warehouse_the_report_says_what_to_run(tmp_path):
    with pytest.raises(WarehouseMissing, match="expert-tier run"):
        write_report(tmp_path)


def test_small_pictures_are_png_of_480_by_300_and_follow_the_rows():
    filled = full_tables()
    for draw, name in (
        (curve_png, "miss_ratio_curve"),
        (recall_png, "lookahead_recall"),
        (locality_png, "trace_locality"),
    ):
        of_trace = filled[name]
        picture = draw(of_trace)
        assert picture[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">II", picture[16:24]) == (480, 300)
        assert picture == draw(of_trace)
        assert picture != draw(of_trace.clear())
        assert struct.unpack(">II", draw(of_trace.clear())[16:24]) == (480, 300)


# Many policies, intervals, nulls


def compared(policy: str, hits: int, over: tuple[float, float, float] | None, **values: object) -> dict[str, object]:
    """A row with its difference to LRU and the interval of that difference."""
    mean, low, high = over or (None, None, None)
    known = {"hit_rate_low": hits / 1000 - 0.02, "hit_rate_high": hits / 1000 + 0.02, "block_steps": 5}
    difference = {"over_reference": mean, "over_reference_low": low, "over_reference_high": high}
    return rate_row(policy, hits, reference_policy=None if over is None else "lru", **known, **difference, **values)


def test_policies_that_differ_from_lru_beyond_the_interval_are_named_and_flip_with_the_rows():
    rows = [
        compared("lru", 400, None),
        compared("sieve", 430, (0.03, 0.01, 0.05)),
        compared("arc", 410, (0.01, -0.01, 0.03)),
        compared("lfu_gated", 300, (-0.1, -0.12, -0.08)),
        compared("static", 600, (0.2, 0.19, 0.21), fit="same"),
        compared("belady_bypass", 700, (0.3, 0.29, 0.31)),
    ]
    shown = words(hit_rate=rows)
    assert (
        "Event-atomic, 16 experts, beyond the 95 % interval of the difference (Belady and what saw the future aside): "
        "more hits than LRU: SIEVE (+3.0, +1.0 to +5.0 points); fewer hits than LRU: gated LFU; not told apart from "
        "LRU: ARC."
    ) in shown
    assert "▲ 43.0 % 41.0–45.0 · 430" in shown
    assert "▼ 30.0 % 28.0–32.0 · 300" in shown
    rows[1], rows[2] = compared("sieve", 370, (-0.03, -0.05, -0.01)), compared("arc", 420, (0.02, 0.01, 0.03))
    shown = words(hit_rate=rows)
    assert "more hits than LRU: ARC (+2.0, +1.0 to +3.0 points); fewer hits than LRU: SIEVE and gated LFU." in shown
    rows = [rows[0], compared("arc", 410, (0.01, -0.01, 0.03))]
    shown = words(hit_rate=rows)
    assert "more hits than LRU: no policy; fewer hits than LRU: no policy; not told apart from LRU: ARC." in shown
    assert "▲" not in shown
    assert "beyond the 95 % interval" not in words(hit_rate=[rate_row("lru", 400), rate_row("arc", 410)])


def test_a_turn_within_the_intervals_is_no_decision_of_the_way_of_counting():
    def shown(low: float) -> str:
        rows = [
            compared("lru", 400, None), compared("arc", 410, (0.01, low, 0.03)),
            compared("lru", 400, None, semantics="sequential"),
            compared("arc", 390, (-0.01, -0.03, 0.01), semantics="sequential"),
        ]  # fmt: skip
        return words(hit_rate=rows)

    assert "ARC at 16 experts is above LRU event-atomic and below LRU sequential." in shown(0.005)
    assert "at each capacity of the table, but for differences that lie within their intervals." in shown(-0.01)


def test_the_gap_to_belady_is_split_into_admission_and_victims():
    def shown(best: int, forced: int, bypass: int, **static: object) -> str:
        rows = [rate_row("lru", 400), rate_row("arc", best), rate_row("static", 650, **static)]
        return words(
            hit_rate=[
                *(rows if static else rows[:2]),
                rate_row("belady_forced", forced),
                rate_row("belady_bypass", bypass),
            ]
        )

    assert (
        "Event-atomic, 16 experts: of the 500 misses of the best policy that does not know the future (ARC), Belady "
        "with bypass saves 200 (40.0 %). 50 of these (25.0 %) come from not having to admit, 150 (75.0 %) from better "
        "victims."
    ) in shown(500, 650, 700)
    assert "150 of these (75.0 %) come from not having to admit, 50 (25.0 %) from" in shown(500, 550, 700)
    assert "Belady that has to admit misses 20 more than ARC: here what not to admit matters more" in shown(
        500, 480, 700
    )
    assert "misses of the best policy that does not know the future (LRU), Belady" in shown(390, 650, 700)
    # Fitted on what it is scored on, a table is no policy that does not know the future.
    assert "not know the future (ARC), Belady" in shown(500, 650, 700, fit="same")
    assert "not know the future (static table), Belady" in shown(500, 660, 700, fit="first:0.6")
    assert "saves" not in shown(500, 500, 500)


def test_events_that_no_cache_of_the_size_can_hold_are_counted_where_there_are_any():
    rows = [
        rate_row("lru", 400, capacity_experts_total=8, events_above_capacity=25, pressure_mean=0.9, pressure_p95=1.5),
        rate_row("lru", 500, capacity_experts_total=16, events_above_capacity=0),
    ]
    shown = words(hit_rate=rows)
    assert (
        "At 8 experts 25 of 100 scored events (25.0 %) access more experts than their cache holds, so no policy can "
        "serve them from it; experts accessed ÷ capacity is 0.90 in the mean, 1.50 at the 95th percentile."
    ) in shown
    assert "At 16 experts" not in shown
    unknown = rate_row("lru", 400, events_above_capacity=None, pressure_mean=None, pressure_p95=None)
    assert "scored events (" not in words(hit_rate=[unknown])


def test_what_is_left_of_lru_without_order_follows_the_rows():
    def shown(shuffled: int) -> str:
        return words(hit_rate=[rate_row("lru", 400, shuffled_accesses=1000, shuffled_hits=shuffled)])

    sentence = "with the tokens shuffled LRU hits {} % of 1,000 accesses, in recorded order 40.0 %: {}."
    assert sentence.format("15.0", "the rest comes from the order of the text") in shown(150)
    assert sentence.format("45.0", "the order of the text costs it hits") in shown(450)
    assert sentence.format("40.0", "the order of the text gives it nothing") in shown(400)
    assert "15.0 % +25.0 · 150" in shown(150)
    assert "45.0 % −5.0 · 450" in shown(450)
    assert (
        "names an expert of its layer's event before with chance 25.0 % (5.0 ÷ 20.0), and 12.5 % (1,000 ÷ 8,000) under"
        in shown(150)
    )
    assert "Null control" not in words(hit_rate=[rate_row("lru", 400)])


def test_policies_stand_under_their_kind_in_a_body_of_rows_of_its_own():
    names = ["belady_bypass", "static", "mglru", "lfu_gated", "lru", "sieve"]
    page = render_report(tables(hit_rate=[rate_row(name, 400) for name in names]))
    kinds = [html.unescape(found) for found in re.findall(r'scope="rowgroup">([^<]+)<', page)]
    assert kinds == [
        "Recency, queues and chance", "Frequency", "Tables", "Models of the kernel's page cache", "Knowing the future",
    ]  # fmt: skip
    assert re.search(r"LRU</th>.*SIEVE</th>.*</tbody>\s*<tbody>.*LFU, gated</th>", page, flags=re.DOTALL)
    outline_of(page)


def test_every_policy_has_a_label_and_a_kind():
    assert set(POLICY_LABELS) == set(POLICIES)


def test_a_whole_curve_is_a_line_without_markers_and_ticks_stand_where_all_lines_have_points():
    whole = [curve_row("lru", 5 * number, capacity_experts_total=number) for number in range(1, 65)]
    few = [curve_row("lfu_gated", 8 * number, capacity_experts_total=number) for number in (1, 8, 64)]
    page = render_report(tables(miss_ratio_curve=[*whole, *few]))
    legend = re.search(r'<ul class="legend">.*?</ul>', page, flags=re.DOTALL)
    assert legend is not None
    lru, gated = legend.group().split("</li>")[:2]
    assert (lru.count("<path"), gated.count("<path")) == (1, 2)
    (plot,) = re.findall(r'<svg class="plot".*?</svg>', page, flags=re.DOTALL)
    assert re.findall(r">(\d+)</text>", plot) == ["1", "8", "64"]


def test_the_reporting_block_stands_folded_below_its_trace():
    table = TABLES["reporting_block"]
    rows = [
        {
            "trace_id": TRACE_ID,
            "item": "A1",
            "topic": "execution",
            "question": "unit?",
            "answer": HOSTILE,
            "known": True,
        },
        {
            "trace_id": TRACE_ID,
            "item": "D1",
            "topic": "oracle",
            "question": "bytes?",
            "answer": "unknown",
            "known": False,
        },
    ]
    page = render_report(tables(reporting_block=rows))
    assert "<details>\n<summary>Reporting block: 1 of 2 items answered in full</summary>" in page
    assert "Execution A1 unit?" in text_of(page)
    assert "Oracle D1 bytes? unknown" in text_of(page)
    assert "<script" not in page
    assert set(rows[0]) == set(table.column_names)
    assert "<details>" not in render_report(tables())


def inversion_rows(**lru_hits: int) -> list[dict[str, object]]:
    """Rows at 8 of 896 experts per layer in ascending order, LRU's hits by semantics; the table hits 100 of 1,000."""
    shape = {
        "trace_id": "synthetic", "capacity_experts_total": 16, "access_order": "ascending", "num_experts": 896,
        "moe_layers": 2, "top_k_observed": 16, "accesses": 1000, "scored_steps": 20, "dedup": "union", "seed": None,
    }  # fmt: skip
    return [
        valid_row(TABLES["inversion"], **shape, semantics=semantics, policy=policy, hits=hits, misses=1000 - hits)
        for semantics in ("sequential", "event_atomic")
        for policy, hits in (("lru", lru_hits[semantics]), ("static", 100), ("lfu_gated", 120))
    ]


def test_the_inversion_is_headed_by_what_its_rows_say_and_marked_as_a_reconstruction():
    title = "LRU under a static table at tiny budgets: an effect of replaying access by access in ascending order"
    page = render_report(tables(inversion=inversion_rows(sequential=1, event_atomic=170)))
    shown = text_of(page)
    assert title in shown
    assert "this is a reconstruction on synthetic routes of the same shape, drawn, not recorded" in shown
    assert "Make it again: expert-tier inversion && expert-tier run" in shown
    # Its trace is none of the user's.
    assert "Results without a row" not in shown
    for sequential, event_atomic in ((1, 2), (170, 170), (170, 1)):
        other = words(inversion=inversion_rows(sequential=sequential, event_atomic=event_atomic))
        assert title not in other
        assert "Does LRU fall under a static table at tiny budgets?" in other
    assert "tiny budgets" not in words()
