"""One definition per column name: dtype, meaning, unit, formula or counter.

The same quantity in the same unit has the same name in every table; a different quantity has a different name. Units
stand at the end of a name (`_bytes`, `_ns`). Missing is null, and a ratio whose denominator is 0 is null. What a
table is made of (grain, key, order) lives in `tables`; what a canonical trace is made of lives in `trace`.
"""

from dataclasses import dataclass

import polars as pl


@dataclass(frozen=True)
class Column:
    """A column as every table that has it means it.

    `ratio` names the (numerator, denominator) columns a derived ratio must stand beside; it is a share, from 0 to 1,
    unless `may_exceed_one`. `values` closes the set of allowed strings. `unit` is null where the column is no quantity.
    """

    name: str
    dtype: pl.DataType | type[pl.DataType]
    description: str
    unit: str | None = None
    ratio: tuple[str, str] | None = None
    may_exceed_one: bool = False
    values: tuple[str, ...] | None = None
    minimum: int | float | None = None


PHASES = ("prefill", "decode", "warmup", "unknown")
PASS_KINDS = ("normal", "spec_accept", "spec_rejected", "spec_fallback")
SCOPES = ("layer", "global")
SEMANTICS = ("event_atomic", "sequential", "token_clock")
ACCESS_ORDERS = ("router", "ascending", "descending", "random")
DEDUPS = ("union", "none")
POLICIES = (
    "lru", "fifo", "clock", "sieve", "s3fifo", "arc", "lfu_gated", "lfu_always", "lfu_in_cache", "lfru", "least_stale",
    "static", "pinned_lru", "two_list", "mglru", "random", "belady_bypass", "belady_forced",
)  # fmt: skip
SCORED_PHASES = ("prefill", "decode", "unknown", "all")
CHECK_OUTCOMES = ("ok", "warn", "not_applicable")
PREDICTORS = (
    "previous_token", "frequency", "conditional", "union", "learned", "recorded", "oracle", "random", "popularity",
)  # fmt: skip
SIMULATED_DELIVERIES = ("read", "willneed")
OWNERS = (
    "page_cache", "page_cache_mmap", "restream", "uncached", "arena", "hybrid", "user_cache", "page_cache_admission",
)  # fmt: skip
READ_PATHS = ("buffered", "direct", "uncached")
MECHANISMS = ("cgroup", "balloon", "boot", "offline", "none")
DESTINATIONS = ("cpu", "cuda", "none")
FADVICES = ("random", "normal", "sequential", "noreuse", "willneed")
DELIVERIES = ("none", "advice", "blocking", "uring")
OBSERVATIONS = ("none", "sample", "every")
VERIFICATIONS = ("edges", "all")
GROUP_STATS = ("pass", "step")
RUN_STATUSES = ("complete", "interrupted", "failed", "killed")
POOL_LAYOUTS = ("per_expert", "per_layer", "stacked", "mapped")
SPOILS = ("bytes", "time")
TOPICS = ("execution", "workload", "regime", "oracle")
RUN_ORDERS = ("random", "pairs")
SIZINGS = ("as_written", "fit_machine", "as_published")
PLACES = ("guest", "host")
MGLRU_SETTINGS = ("on", "off")
ACCELERATORS = ("kvm", "tcg")


def _count(name: str, description: str, unit: str | None = None) -> Column:
    return Column(name, pl.Int64, description, unit=unit, minimum=0)


def _ratio(name: str, numerator: str, denominator: str, description: str, *, may_exceed_one: bool = False) -> Column:
    return Column(
        name,
        pl.Float64,
        f"{description} = {numerator} ÷ {denominator}; null if 0 ÷ 0",
        ratio=(numerator, denominator),
        may_exceed_one=may_exceed_one,
    )


_DEFINITIONS = [
    # identity and provenance of a trace
    Column("trace_id", pl.String, "slug of the dump's name + first 12 hex digits of its identity, or as given"),
    Column("other_trace_id", pl.String, "the second trace of a pair; greater than trace_id, so a pair stands once"),
    Column("supersedes", pl.String, "trace_id of an earlier trace of a dump of the same path; null if there is none"),
    Column("model", pl.String, "model whose router was recorded; null if neither dump nor user says"),
    Column("engine", pl.String, "engine that ran the model; null if unknown"),
    Column("domain", pl.String, "kind of text that was processed; null if unknown"),
    Column("capture_method", pl.String, "how the routes were recorded; null if unknown"),
    Column("source_file", pl.String, "file name of the raw dump"),
    Column("source_format", pl.String, "layout of the raw dump, decided by content"),
    _count("source_bytes", "size of the raw dump as stored", "byte"),
    Column("source_sha256", pl.String, "SHA-256 of the raw dump's bytes, hexadecimal"),
    Column("parser_version", pl.Int64, "version of the parser that wrote the trace; raised when output changes"),
    Column("schema_version", pl.String, "version of the canonical trace contract"),
    Column("id_space", pl.String, "what an expert id of the dump names: logical, physical, local or slot"),
    Column("weight_kind", pl.String, "meaning of router_weights; null if unknown; 'absent' if there are none"),
    Column("rank_known", pl.Boolean, "whether expert_ids stand in router order (false: they arrived sorted)"),
    Column(
        "pass_boundaries",
        pl.String,
        "whether the dump records forward passes or one per token is assumed",
        values=("recorded", "assumed_per_token"),
    ),
    Column("layer_base", pl.String, "how layer_id was decided: recorded, declared, or assumed from 0"),
    Column(
        "num_experts_source",
        pl.String,
        "declared (dump or user) or observed (largest id + 1: a lower bound)",
        values=("declared", "observed"),
    ),
    _count("hidden_layers", "decoder layers of the model, dense ones included; null if unknown"),
    _count("moe_layers", "layers with routed experts that the trace holds"),
    _count("num_experts", "routed experts of the layer with the most"),
    _count("pool_experts", "routed experts summed over the layers in question: all of them is the footprint's bound"),
    _count("pool_bytes", "bytes of all routed experts; null if sizes are unknown", "byte"),
    _count("expert_bytes_min", "stored size of the smallest expert; null if sizes are unknown", "byte"),
    _count("expert_bytes_max", "stored size of the largest expert; null if sizes are unknown", "byte"),
    _count("top_k_model", "experts per token and layer by the model's configuration; null if unknown"),
    _count("top_k_observed", "experts per token and layer in the dump"),
    _count("rows", "rows of the canonical trace: token positions × layers × passes"),
    _count("events", "events in question; an event is what a cache must serve at once (one step, pass, layer)"),
    _count("steps", "engine iterations, warm-up ones included"),
    _count("requests", "sequences: distinct values of request_id"),
    _count("selections", "Σ over rows of k in question"),
    _count(
        "accepted_tokens",
        "Σ over decode (or unknown-phase) steps and requests: 2 if spec_accept, else 1; "
        "prefill accepts its one first token",
    ),
    _count("prefill_rows", "rows of phase prefill"),
    _count("decode_rows", "rows of phase decode"),
    _count("warmup_rows", "rows of phase warmup: a leading block of identical rows, never replayed"),
    _count("unknown_phase_rows", "rows whose phase neither dump nor user says"),
    _count("dropped_rows", "rows of the dump that did not enter the trace; the reasons are in the trace's metadata"),
    Column("unknowns", pl.String, "comma-separated facts that neither dump nor user says"),
    # checks
    Column("name", pl.String, "name of the check or proof"),
    Column("outcome", pl.String, "a failed check refuses the dump, so it has no row", values=CHECK_OUTCOMES),
    Column("wanted", pl.String, "what a sound dump shows"),
    Column("found", pl.String, "what this dump, or this run, shows"),
    # contract of a simulated result
    Column("cell_hash", pl.String, "first 16 hex digits of a SHA-256 over trace, contract and simulator version"),
    Column("policy", pl.String, "eviction policy", values=POLICIES),
    Column("scope", pl.String, "layer: one cache per layer; global: one cache over all", values=SCOPES),
    Column(
        "semantics",
        pl.String,
        "event_atomic: an event is classified as a whole before anything is admitted; sequential: access by access; "
        "token_clock: as sequential, with a recency that ticks once a step (LRU alone)",
        values=SEMANTICS,
    ),
    Column("access_order", pl.String, "order of accesses inside an event", values=ACCESS_ORDERS),
    Column(
        "dedup", pl.String, "union: an event accesses each of its experts once; none: once per selection", values=DEDUPS
    ),
    _count("capacity_experts_total", "capacity in experts over all layers; null where capacity was given in bytes"),
    _count(
        "capacity_bytes",
        "capacity in bytes of expert data over all layers; null where expert sizes are unknown, "
        "or unequal under a capacity in experts and scope global",
        "byte",
    ),
    _count("step_begin", "first replayed step, counted without warm-up steps", "step"),
    _count("step_end", "first step after the replayed ones, counted without warm-up steps", "step"),
    Column("phase", pl.String, "phase that was scored", values=SCORED_PHASES),
    Column("warm_fraction", pl.Float64, "share of the selected steps that were replayed but not scored", minimum=0),
    _count("warm_steps", "leading selected steps that were not scored, fitted on or warmed up in", "step"),
    _count("scored_steps", "steps with at least one scored event", "step"),
    Column("warm_pass", pl.Boolean, "whether the selection was replayed once unscored before the scored pass"),
    Column("fit", pl.String, "what a static table or a predictor was fitted on; null if nothing was fitted"),
    Column("seed", pl.Int64, "seed of whatever was random; null if nothing was"),
    Column("pinned_fraction", pl.Float64, "share of each capacity that pinned_lru pins; null for others", minimum=0),
    Column("admission", pl.String, "which table decides what may enter the cache; null if everything may"),
    Column("quota_fit", pl.String, "what the layers' shares of the capacity were fitted on; null for equal shares"),
    _count("folios_per_expert", "folios an expert is made of in two_list and mglru; null for others"),
    # simulated counts
    _count("accesses", "Σ over scored events of |union of the event's experts|; Σ of selections under dedup none"),
    _count("hits", "scored accesses found resident by the simulator"),
    _count("misses", "scored accesses not found resident by the simulator"),
    _ratio("hit_rate", "hits", "accesses", "simulated hit rate"),
    _ratio("miss_ratio", "misses", "accesses", "simulated miss ratio"),
    _count("compulsory_misses", "scored misses on an expert not accessed before in the replay"),
    _count("capacity_misses", "all other scored misses: the expert had been there, or had been refused"),
    _ratio(
        "union_ratio", "accesses", "selections", "accesses per selection: below 1 where an event's tokens share experts"
    ),
    _count("demand_bytes", "bytes of all scored accesses, hit or miss; null if sizes are unknown", "byte"),
    _count("miss_bytes", "part of demand_bytes the simulator did not find resident; null if sizes are unknown", "byte"),
    _count(
        "preload_bytes",
        "bytes a static table or a pinned part holds before the first access, never counted as misses; null "
        "for other policies or unknown sizes",
        "byte",
    ),
    _count("scored_events", "events that are scored"),
    _count("scored_accepted_tokens", "accepted_tokens of the scored steps and phase; null where not known"),
    _ratio(
        "miss_bytes_per_step", "miss_bytes", "scored_steps", "bytes missed per engine iteration", may_exceed_one=True
    ),
    _ratio(
        "miss_bytes_per_accepted_token",
        "miss_bytes",
        "scored_accepted_tokens",
        "bytes missed per output token",
        may_exceed_one=True,
    ),
    Column(
        "pressure_mean",
        pl.Float64,
        "mean over scored events of r = experts the event accesses ÷ capacity of its cache; null for capacities in "
        "bytes or of 0",
        minimum=0,
    ),
    Column("pressure_p95", pl.Float64, "95th percentile of r: the ⌈0.95 n⌉-th smallest of n events", minimum=0),
    _count("events_above_capacity", "scored events with r above 1: no cache of this size can hold them"),
    Column("hit_rate_low", pl.Float64, "lower end of the 95 % interval of hit_rate, by block bootstrap over steps"),
    Column("hit_rate_high", pl.Float64, "upper end of that interval"),
    _count(
        "block_steps", "consecutive steps that a block of the bootstrap holds; null if there is no interval", "step"
    ),
    Column(
        "reference_policy", pl.String, "policy of the same contract that this one is compared with", values=POLICIES
    ),
    Column("over_reference", pl.Float64, "hit_rate − that of reference_policy; null if that was not simulated"),
    Column("over_reference_low", pl.Float64, "lower end of its 95 % interval, by the same blocks for both policies"),
    Column("over_reference_high", pl.Float64, "upper end of that interval"),
    _count("shuffled_accesses", "accesses of the same replay with its tokens shuffled over the steps; null if not run"),
    _count("shuffled_hits", "hits of the same policy on those: what is left where only popularity is"),
    _ratio("shuffled_hit_rate", "shuffled_hits", "shuffled_accesses", "null control: hit rate without order"),
    Column(
        "lag1_chance_numerator",
        pl.Float64,
        "Σ p² over the scored layers' experts, p = share of a layer's scored events (rows under dedup none) that "
        "access the expert",
        minimum=0,
    ),
    Column("lag1_chance_denominator", pl.Float64, "Σ p over the same", minimum=0),
    _ratio(
        "lag1_chance_ratio",
        "lag1_chance_numerator",
        "lag1_chance_denominator",
        "chance that an access names an expert of the layer's event before, by popularity alone",
    ),
    _count("lag1_uniform_denominator", "scored events (rows under dedup none) × experts of their layer, summed"),
    _ratio(
        "lag1_uniform_ratio", "accesses", "lag1_uniform_denominator", "the same chance under a uniform router, k ÷ E"
    ),
    # locality
    Column("layer_id", pl.Int64, "the model's own layer number; null stands for all layers together", minimum=0),
    _count("tokens", "rows of the scored phase in the layer (summed over layers in the total)"),
    _count(
        "reuse_selections",
        "selections that have an earlier token in the same layer: all but the first token's; "
        "the denominator of every W_w",
    ),
    _count("w1_reused_selections", "of reuse_selections, those whose expert the same layer used at the token before"),
    _count(
        "w8_reused_selections", "of reuse_selections, those whose expert the same layer used in the 8 tokens before"
    ),
    _count(
        "w64_reused_selections", "of reuse_selections, those whose expert the same layer used in the 64 tokens before"
    ),
    _ratio("w1_reuse_ratio", "w1_reused_selections", "reuse_selections", "lag-1 reuse W_1"),
    _ratio("w8_reuse_ratio", "w8_reused_selections", "reuse_selections", "W_8"),
    _ratio("w64_reuse_ratio", "w64_reused_selections", "reuse_selections", "W_64"),
    _count(
        "w1_shuffled_reused_selections",
        "w1_reused_selections after shuffling the tokens, one permutation for all layers",
    ),
    _count("w8_shuffled_reused_selections", "w8_reused_selections after the same shuffle"),
    _count("w64_shuffled_reused_selections", "w64_reused_selections after the same shuffle"),
    _ratio("w1_shuffled_ratio", "w1_shuffled_reused_selections", "reuse_selections", "W_1 of the shuffled tokens"),
    _ratio("w8_shuffled_ratio", "w8_shuffled_reused_selections", "reuse_selections", "W_8 of the shuffled tokens"),
    _ratio("w64_shuffled_ratio", "w64_shuffled_reused_selections", "reuse_selections", "W_64 of the shuffled tokens"),
    Column("chance_numerator", pl.Float64, "Σ p² over experts, p = count ÷ tokens of the layer", minimum=0),
    Column("chance_denominator", pl.Float64, "Σ p over experts: k where each token selects k", minimum=0),
    _ratio("chance_ratio", "chance_numerator", "chance_denominator", "popularity-weighted chance of W_1"),
    _ratio("uniform_ratio", "selections", "uniform_denominator", "chance of W_1 under a uniform router, k ÷ E"),
    _count("uniform_denominator", "tokens × experts of the layer, summed over the layers in question"),
    Column(
        "zipf_alpha",
        pl.Float64,
        "−slope of ln(count) on ln(rank), least squares over nonzero counts (the total "
        "pools all (layer, expert) counts); null with fewer than two",
    ),
    _count("top8_selections", "selections of each layer's eight most selected experts"),
    _ratio("top8_share", "top8_selections", "selections", "share of the top eight experts"),
    _count("distinct_experts", "distinct (layer, expert) that occur"),
    _ratio("coverage_ratio", "distinct_experts", "pool_experts", "share of the pool that occurs at all"),
    _count("working_set_95_experts", "fewest experts that carry 95 % of a layer's selections (summed in the total)"),
    _ratio("working_set_95_ratio", "working_set_95_experts", "pool_experts", "95 % working set"),
    # overlap of domains
    _count("top_experts", "size of the set of most selected experts per layer that two traces are compared by"),
    _count("shared_experts", "experts in both sets, summed over the layers in question"),
    _count("joint_experts", "experts in either set, summed over the layers in question"),
    Column(
        "chance_shared_experts",
        pl.Float64,
        "shared_experts expected of two random sets of the same sizes, Σ over layers of |first| × |second| ÷ E",
        minimum=0,
    ),
    _ratio("jaccard_ratio", "shared_experts", "joint_experts", "Jaccard overlap"),
    # lookahead
    Column(
        "predictor",
        pl.String,
        "previous_token: the experts of the same layer's previous event; frequency: the layer's most accessed; "
        "conditional: the experts most often seen d layers on, given this layer's; union: previous_token's and "
        "conditional's; learned: a logistic regression on this layer's; recorded: what the dump says was predicted; "
        "oracle: what the event accesses; random, popularity: nulls, drawn uniformly or in proportion to accesses",
        values=PREDICTORS,
    ),
    _count(
        "lookahead_layers",
        "layers between the event a prediction is made at and its target; null where it is made from no event, or at "
        "one unknown",
        "layer",
    ),
    _count(
        "lookahead_steps",
        "steps between the event a prediction is made at and its target; null as lookahead_layers",
        "step",
    ),
    _count(
        "width",
        "most experts a prediction names (union: its conditional part); null where the predictor names a set of its "
        "own size",
    ),
    _count("covered_events", "of events, those for which the predictor made a prediction, even an empty one"),
    _ratio("hint_coverage", "covered_events", "events", "share of events with a prediction"),
    _count("covered_accesses", "accesses of covered events"),
    _count("predicted_experts", "experts named, summed over covered events"),
    _count("predicted_accesses", "accesses that had been named: |predicted ∩ accessed|"),
    _ratio(
        "recall_all", "predicted_accesses", "accesses", "lookahead recall, an event without prediction counts as missed"
    ),
    _ratio("recall_covered", "predicted_accesses", "covered_accesses", "lookahead recall over covered events"),
    _ratio("precision", "predicted_accesses", "predicted_experts", "lookahead precision"),
    Column(
        "chance_predicted_accesses",
        pl.Float64,
        "expected predicted_accesses of as many experts named uniformly at random",
        minimum=0,
    ),
    _ratio(
        "chance_recall_all",
        "chance_predicted_accesses",
        "accesses",
        "recall_all of a uniformly random plan of the same widths",
    ),
    _count(
        "shuffled_predicted_accesses",
        "predicted_accesses with the predictions permuted among the covered, scored events of each layer",
    ),
    _ratio(
        "shuffled_recall_all",
        "shuffled_predicted_accesses",
        "accesses",
        "recall_all of the same predictions at other times",
    ),
    _count("predicted_misses", "misses that had been named, whether or not there was time to fetch them"),
    _ratio(
        "recall_missed", "predicted_misses", "misses", "lookahead recall on what the cache missed, which alone can pay"
    ),
    Column(
        "chance_predicted_misses",
        pl.Float64,
        "expected predicted_misses of as many experts named uniformly at random",
        minimum=0,
    ),
    _ratio("chance_recall_missed", "chance_predicted_misses", "misses", "recall_missed of such a random plan"),
    # what lookahead would have saved
    _count("bandwidth_bytes_per_s", "assumed: what the link carries; null is unbounded", "byte/s"),
    _count("latency_ns", "assumed: of each read, beside its transfer", "ns"),
    _count("queue_depth", "assumed: most reads under way at once; null is unbounded"),
    _count("compute_ns", "assumed: of each event, once its experts are there", "ns"),
    _count("simulated_misses_with", "accesses read on demand with the plan: misses − removed + displaced"),
    _count(
        "simulated_removed_misses",
        "misses that were not read on demand with the plan, in time or late; a predicted miss may remain, since a "
        "prediction is issued once, for what is not resident then, and what it brought or found may be evicted before "
        "its event",
    ),
    _count("simulated_removed_late", "of those, waited for while their prefetch was under way"),
    _count("simulated_displaced", "accesses resident without the plan and read on demand with it"),
    _count("simulated_submitted", "prefetches that left on the link"),
    _count("simulated_completed", "prefetches that arrived"),
    _count("simulated_used", "of those, accessed before they were evicted"),
    _count("simulated_used_late", "of those, waited for"),
    _count("simulated_wasted", "prefetches that arrived and were evicted before they were accessed"),
    _ratio("prefetch_coverage", "simulated_removed_misses", "misses", "share of the misses that prefetching removed"),
    _ratio(
        "prefetch_accuracy",
        "simulated_used",
        "simulated_completed",
        "share of prefetches that were accessed in the cache",
    ),
    _ratio("late_share", "simulated_used_late", "simulated_used", "share of used prefetches that were waited for"),
    _count("simulated_removed_bytes", "bytes of removed misses; null if sizes are unknown", "byte"),
    _count("simulated_displaced_bytes", "bytes of displaced accesses; null if sizes are unknown", "byte"),
    _count("simulated_wasted_bytes", "bytes of wasted prefetches; null if sizes are unknown", "byte"),
    _count(
        "simulated_device_bytes",
        "bytes read with the plan, on demand and ahead; without it miss_bytes are; null if sizes are unknown",
        "byte",
    ),
    _ratio(
        "simulated_device_bytes_per_miss_byte",
        "simulated_device_bytes",
        "miss_bytes",
        "bytes read with the plan against without",
        may_exceed_one=True,
    ),
    _count("simulated_time_without_ns", "compute and waiting for reads without the plan, over the scored events", "ns"),
    _count("simulated_time_with_ns", "the same with the plan", "ns"),
    _ratio(
        "simulated_time_per_time_without",
        "simulated_time_with_ns",
        "simulated_time_without_ns",
        "time with the plan against without",
        may_exceed_one=True,
    ),
    _count(
        "simulated_overlap_ns",
        "most that hiding could save: Σ over events of the smaller of waiting without the plan and compute",
        "ns",
    ),
    # one native run
    Column("run_id", pl.String, "one replay that was started; every run has its own, nothing is replaced"),
    Column("started_at", pl.String, "when the run began, UTC, ISO 8601"),
    Column(
        "condition_hash",
        pl.String,
        "first 12 hex digits of SHA-256 over everything that was asked for: runs that share it repeat one condition",
    ),
    Column("pool_id", pl.String, "names a pool by what it is: layout, content, sizes and places of all experts"),
    Column("machine_id", pl.String, "names the state of a machine with the device that holds the pool"),
    Column("replayer_version", pl.String, "version of the package that measured"),
    Column(
        "status",
        pl.String,
        "complete: both passes ended; interrupted: by the user; failed: a read or the set-up failed; killed: the "
        "measuring process was killed, by the kernel for want of memory or by somebody",
        values=RUN_STATUSES,
    ),
    Column("failure", pl.String, "why a run is not complete, with step and file; null if it is"),
    Column(
        "bytes_valid", pl.Boolean, "whether every proof about capacity, content and counting held: `valid` means this"
    ),
    Column("bytes_reasons", pl.String, "why bytes_valid is false, in words; empty if it is true"),
    Column("time_valid", pl.Boolean, "whether times may be believed, too: false wherever bytes_valid is false"),
    Column("time_reasons", pl.String, "why time_valid is false, in words; empty if it is true"),
    Column("thrash", pl.Boolean, "whether the capacity is smaller than the reads in flight, by request"),
    Column("owner", pl.String, "who holds experts in memory", values=OWNERS),
    Column(
        "miss_path",
        pl.String,
        "how an expert is read that the owner does not hold or admit: through the page cache, past it (O_DIRECT), or "
        "dropped from it again (RWF_DONTCACHE); null where the page cache alone owns",
        values=READ_PATHS,
    ),
    Column("arena_fraction", pl.Float64, "share of the capacity that locked memory holds; null without", minimum=0),
    _count("arena_bytes", "locked memory for experts, read back (VmLck); null without", "byte"),
    _count("preload_ns", "time in which locked memory was filled, before either pass; null without", "ns"),
    _count("arena_hits", "accesses served from locked memory"),
    _count("direct_bytes", "bytes that reads past the page cache asked for, widened to the device's alignment", "byte"),
    Column("together_id", pl.String, "names the replays that ran together; null of one that ran alone"),
    Column(
        "tenant_number",
        pl.Int64,
        "which of the replays that ran together, from 0; null of one that ran alone",
        minimum=0,
    ),
    _count("tenants", "replays that ran together, this one included; null of one that ran alone"),
    Column(
        "shares_wall",
        pl.Boolean,
        "whether one limit was around all of them, the sum of their capacities; null of one that ran alone",
    ),
    _count("overlap_ns", "time in which all of them were in their measured pass; null of one that ran alone", "ns"),
    _count(
        "decide_ns", "time in which the policy of a user-space cache decided: inside wall_ns, outside any stall", "ns"
    ),
    Column("delivery", pl.String, "how hints of a lookahead plan were brought into the page cache", values=DELIVERIES),
    Column(
        "plan_hash",
        pl.String,
        "first 12 hex digits of SHA-256 over the hints that the plan has for the replayed events",
    ),
    _count("piece_bytes", "largest piece that was asked for at once; null where whole extents were", "byte"),
    _count("hint_slots", "places of the queue that hints wait in; null for one slot, which a newer hint overwrites"),
    _count("hints", "hints of the plan for the replayed events: one per event for which it names an expert"),
    _count("hints_submitted", "hints handed over, each after the event it was issued after"),
    _count("hints_completed", "hints delivered before the pass ended"),
    _count("hints_overwritten", "hints that a newer one replaced in the slot before the worker came"),
    _count("hints_dropped", "hints that found the queue full"),
    _count("hints_in_flight", "hints that waited, or were being delivered, when the pass ended"),
    _count(
        "hinted_missing_bytes",
        "pages missing of the experts of delivered hints, each seen right before it was asked for",
        "byte",
    ),
    Column(
        "hinted_read_bytes",
        pl.Int64,
        "of those, pages in the page cache right after they were asked for, under way or read; reads of demand threads "
        "meanwhile count, and evictions count against",
        unit="byte",
    ),
    _count("hint_ns", "time the worker took to deliver hints, own looks at residency included", "ns"),
    _count(
        "named_accesses", "observed accesses whose expert a hint for their event named, whatever became of the hint"
    ),
    _count("named_hits", "of those, with all pages resident, or under way, right before their read"),
    Column("mechanism", pl.String, "what limits the memory", values=MECHANISMS),
    Column("mechanism_detail", pl.String, "how exactly: version of the cgroup, what stood for the machine"),
    Column(
        "fadvise",
        pl.String,
        "advice on the pool's files: random turns readahead off, willneed does so too and announces each read",
        values=FADVICES,
    ),
    Column(
        "destination",
        pl.String,
        "where reads go: torch tensor, pinned with a copy to the GPU, or plain memory",
        values=DESTINATIONS,
    ),
    _count("threads", "demand threads"),
    Column("observe", pl.String, "which accesses had their residency asked for before the read", values=OBSERVATIONS),
    Column("residency_counter", pl.String, "system call that residency was asked of", values=("cachestat", "mincore")),
    Column(
        "files_stay_open",
        pl.Boolean,
        "whether the pool's files stayed open through the run; false where there are more than may be open (ulimit "
        "-Hn), so that each access opened and closed its own, within its time",
    ),
    Column("verify", pl.String, "content checked of each access: first and last page, or all", values=VERIFICATIONS),
    Column(
        "group_stat",
        pl.String,
        "when memory.stat of the run's group was read: around each pass, or after each step too, which brings the "
        "statistics up to date that the kernel balances its lists by, so it is another condition; null without a group",
        values=GROUP_STATS,
    ),
    Column("repeat", pl.Int64, "which repetition within one call, from 0", minimum=0),
    _count("headroom_bytes", "memory allowed beyond capacity and own memory", "byte"),
    _count(
        "own_anonymous_bytes",
        "the reader's own memory before the first read: interpreter, buffers, compiled code (RssAnon of "
        "/proc/self/status, or what the group counts where that is more)",
        "byte",
    ),
    _count(
        "own_kernel_bytes", "kernel memory of the reader's group before the first read; null without a group", "byte"
    ),
    _count(
        "wall_bytes",
        "capacity + own memory + headroom, or own memory + what a small machine leaves: what the reader may use; null "
        "without a mechanism",
        "byte",
    ),
    _count("enforced_bytes", "what the mechanism, read back, leaves for expert data and headroom", "byte"),
    _count("balloon_bytes", "size of the locked region; null without a balloon", "byte"),
    _count("offline_bytes", "memory taken offline for the run; null without", "byte"),
    _count("outer_group_bytes", "limit of the cgroup that stood for the machine; null if it was the machine", "byte"),
    _count(
        "resident_median_bytes", "the pool's bytes in the page cache, median over the ends of measured steps", "byte"
    ),
    _count("resident_max_bytes", "the same, maximum", "byte"),
    _count("resident_bytes", "the pool's bytes in the page cache at the end of the step", "byte"),
    _count(
        "cold_resident_bytes", "the pool's bytes in the page cache when the first pass began: 0 in a sound run", "byte"
    ),
    _count("replayed_steps", "steps of the selection", "step"),
    _count("reads", "accesses whose every extent was read in full"),
    _count("returned_bytes", "bytes of experts that the reads returned", "byte"),
    _count("observed_accesses", "accesses whose residency was asked for before the read"),
    _count("native_hits", "observed accesses with every page resident, or served from locked memory"),
    _count("native_partial_hits", "observed accesses with some pages resident"),
    _count("native_misses", "observed accesses with no page resident"),
    _ratio("native_hit_rate", "native_hits", "observed_accesses", "measured hit rate"),
    _count("missing_bytes", "pages of observed accesses that were not resident before the read", "byte"),
    Column("item", pl.String, "letter and number of an item of the reporting block of arXiv 2608.07911, A1 to D4"),
    Column("topic", pl.String, "part of the reporting block that an item belongs to", values=TOPICS),
    Column("question", pl.String, "what an item of the reporting block asks"),
    Column("answer", pl.String, "what metadata and rows of hit_rate say to it; `unknown` where neither does"),
    Column("known", pl.Boolean, "whether nothing in the answer is unknown"),
    Column("access", pl.Int64, "place of the access in the measured pass, in the order walked, from 0", minimum=0),
    Column("expert_id", pl.Int64, "the routed expert within its layer, from 0", minimum=0),
    _count("expert_bytes", "stored size of the accessed expert", "byte"),
    _count(
        "device_bytes",
        "bytes the demand threads had read from the pool's device (counter: device_bytes_counter); null if not counted",
        "byte",
    ),
    Column("device_bytes_counter", pl.String, "the counter behind device_bytes; null if there is none"),
    _count("warm_device_bytes", "the same in the warm-up pass; null if there was none", "byte"),
    _count(
        "own_fault_bytes",
        "bytes the process read otherwise: its own code, faulted in again; not in device_bytes",
        "byte",
    ),
    Column(
        "overshoot_bytes",
        pl.Int64,
        "device_bytes − missing_bytes where readahead is on; null where it is off",
        unit="byte",
    ),
    Column("raced_pages", pl.Int64, "pages read beyond those seen missing, with readahead off: evicted in between"),
    _count("neighbor_bytes", "bytes the pool's device delivered to others meanwhile; null if not counted", "byte"),
    _count(
        "nominal_miss_bytes",
        "bytes a simulated LRU (global, event-atomic, same passes) of capacity_bytes misses",
        "byte",
    ),
    _count("resident_miss_bytes", "the same of a capacity of resident_median_bytes", "byte"),
    _ratio(
        "amplification_nominal",
        "device_bytes",
        "nominal_miss_bytes",
        "measured device bytes per byte that a simulated LRU of capacity_bytes misses",
        may_exceed_one=True,
    ),
    _ratio(
        "amplification_resident",
        "device_bytes",
        "resident_miss_bytes",
        "measured device bytes per byte that a simulated LRU of resident_median_bytes misses",
        may_exceed_one=True,
    ),
    _count(
        "interval_ns",
        "the measured pass by the clock of the thread that started it, checks between steps included",
        "ns",
    ),
    _count("wall_ns", "Σ over steps (or of the step) from its first read to the end of its last event", "ns"),
    _count("check_ns", "time between steps in which residency and counters were noted", "ns"),
    _count("step_median_ns", "median of wall_ns over steps", "ns"),
    _count("stall_ns", "Σ over events of the stall: from its first read's begin to its last read's end", "ns"),
    _count("stall_median_ns", "median stall of an event", "ns"),
    _count("stall_p99_ns", "99th percentile of the stalls: the ⌈0.99 n⌉-th of n", "ns"),
    _count(
        "observe_ns", "Σ over threads of asking for residency before reads: outside each read, inside the stall", "ns"
    ),
    _count("verify_ns", "Σ over threads of checking content: outside each read, inside the stall", "ns"),
    _count("cpu_ns", "CPU time of the process over the measured pass, system time included", "ns"),
    Column(
        "consumed_digest", pl.String, "16 hex digits over (event, layer, expert, first and last 64 bytes) of all reads"
    ),
    _count("checked_bytes", "bytes compared with what the pool must hold", "byte"),
    _count(
        "simulated_hits", "accesses a simulated LRU of resident_median_bytes (global, event-atomic, same passes) hits"
    ),
    _count("simulated_misses", "accesses it misses"),
    # reclaim: growth over the step, or over the measured pass; a counter that went back is null
    _count(
        "group_kswapd_scan_pages",
        "pages of the run's group that kswapd looked at to reclaim them (pgscan_kswapd of memory.stat, v2 since 5.19); "
        "null under cgroup v1, which counts none. Reclaim at the group's own limit is never kswapd's",
        "page",
    ),
    _count(
        "group_direct_scan_pages",
        "pages of the group that processes in want of memory looked at, at the group's limit or the machine's "
        "(pgscan_direct of memory.stat); null as above",
        "page",
    ),
    _count(
        "group_scan_pages",
        "pages of the group that anybody looked at to reclaim them, reclaim that was asked for included (pgscan of "
        "memory.stat, or its parts); null under v1. A page looked at twice counts twice; under MGLRU, what is found "
        "young while generations age is not counted",
        "page",
    ),
    _count("group_kswapd_steal_pages", "of group_kswapd_scan_pages, those reclaimed (pgsteal_kswapd)", "page"),
    _count("group_direct_steal_pages", "of group_direct_scan_pages, those reclaimed (pgsteal_direct)", "page"),
    _count("group_steal_pages", "of group_scan_pages, those reclaimed (pgsteal of memory.stat, or its parts)", "page"),
    _ratio(
        "group_scan_per_steal",
        "group_scan_pages",
        "group_steal_pages",
        "pages looked at per page reclaimed, in the group; the study found more than 2 wherever reclaim amplified",
        may_exceed_one=True,
    ),
    _count(
        "group_refault_bytes",
        "file pages of the group read again after they were reclaimed (workingset_refault_file of memory.stat × page "
        "size); misses pages whose eviction the kernel has forgotten, and those dropped by advice",
        "byte",
    ),
    _ratio(
        "group_refault_per_device_byte",
        "group_refault_bytes",
        "device_bytes",
        "refault share: bytes read again per byte the demand threads read; above 1 where other files are refaulted too",
        may_exceed_one=True,
    ),
    _count(
        "group_refault_activated_pages",
        "refaults that came back within the active list's length and entered it at once (workingset_activate_file); "
        "null under cgroup v1 of recent kernels",
        "page",
    ),
    _count(
        "group_activated_pages",
        "pages of the group moved to the active list (pgactivate of memory.stat, v2 only); MGLRU, which has no such "
        "list, counts them differently by version",
        "page",
    ),
    _count("group_minor_faults", "page faults of the group served from memory (pgfault − pgmajfault of memory.stat)"),
    _count(
        "group_major_faults",
        "page faults of the group that waited for a device (pgmajfault): misses of mapped pools and own code, never of "
        "pread",
    ),
    _count(
        "group_cached_bytes",
        "page cache charged to the group, every file's and shared memory included (file or total_cache of "
        "memory.stat); at the end of the step, of a pass at its begin",
        "byte",
    ),
    _count(
        "group_unevictable_bytes",
        "memory of the group that cannot be reclaimed, locked above all (unevictable of memory.stat); taken as above",
        "byte",
    ),
    _count("group_limit_bytes", "limit of the run's group, read back; null without a group; taken as above", "byte"),
    _ratio(
        "group_locked_share",
        "group_unevictable_bytes",
        "group_limit_bytes",
        "share of the group's limit that is locked: the study's locked share where a group stands for the machine",
    ),
    _count(
        "group_memory_some_ns",
        "time in which some process of the group waited for memory (memory.pressure, v2); null under v1",
        "ns",
    ),
    _count("group_memory_full_ns", "time in which all of its running processes did", "ns"),
    _count("group_io_some_ns", "time in which some process of the group waited for a device (io.pressure, v2)", "ns"),
    _count("group_io_full_ns", "time in which all of its running processes did", "ns"),
    _count(
        "machine_kswapd_scan_pages",
        "pages that kswapd looked at to reclaim them (pgscan_kswapd of /proc/vmstat): the whole machine, everybody's",
        "page",
    ),
    _count(
        "machine_direct_scan_pages",
        "pages that processes looked at when the machine was short of memory (pgscan_direct of /proc/vmstat); shows "
        "nothing of reclaim at a group's limit",
        "page",
    ),
    _count(
        "machine_scan_pages",
        "pages looked at to reclaim memory of the machine (pgscan_kswapd + direct + khugepaged + proactive of "
        "/proc/vmstat); shows nothing of reclaim at a group's limit",
        "page",
    ),
    _count("machine_kswapd_steal_pages", "of machine_kswapd_scan_pages, those reclaimed (pgsteal_kswapd)", "page"),
    _count("machine_direct_steal_pages", "of machine_direct_scan_pages, those reclaimed (pgsteal_direct)", "page"),
    _count("machine_steal_pages", "of machine_scan_pages, those reclaimed", "page"),
    _ratio(
        "machine_scan_per_steal",
        "machine_scan_pages",
        "machine_steal_pages",
        "pages looked at per page reclaimed for want of memory of the machine",
        may_exceed_one=True,
    ),
    _count(
        "machine_file_scan_pages",
        "file pages that any reclaim looked at, inside groups as well, whosever they are (pgscan_file of /proc/vmstat, "
        "Linux 5.8): what a cgroup v1 shows nowhere else",
        "page",
    ),
    _count("machine_file_steal_pages", "of those, reclaimed (pgsteal_file of /proc/vmstat)", "page"),
    _ratio(
        "machine_file_scan_per_steal",
        "machine_file_scan_pages",
        "machine_file_steal_pages",
        "file pages looked at per file page reclaimed, by everybody and in every group",
        may_exceed_one=True,
    ),
    _count(
        "machine_refault_bytes",
        "file pages read again after they were reclaimed (workingset_refault_file of /proc/vmstat × page size): "
        "everybody's, inside groups as well",
        "byte",
    ),
    _ratio(
        "machine_refault_per_device_byte",
        "machine_refault_bytes",
        "device_bytes",
        "bytes that anybody read again per byte the demand threads read",
        may_exceed_one=True,
    ),
    _count("machine_refault_activated_pages", "refaults that entered the active list at once, everybody's", "page"),
    _count(
        "machine_activated_pages", "pages moved to the active list, everybody's (pgactivate of /proc/vmstat)", "page"
    ),
    _count("machine_minor_faults", "page faults served from memory, everybody's (pgfault − pgmajfault)"),
    _count("machine_major_faults", "page faults that waited for a device, everybody's (pgmajfault of /proc/vmstat)"),
    _count("machine_free_bytes", "MemFree of /proc/meminfo; at the end of the step, of a pass at its begin", "byte"),
    _count("machine_available_bytes", "MemAvailable, the kernel's estimate; taken as above", "byte"),
    _count("machine_cached_bytes", "Cached: page cache of all files, shared memory included; taken as above", "byte"),
    _count("machine_locked_bytes", "Mlocked; lags by a few pages per processor; taken as above", "byte"),
    _count("machine_unevictable_bytes", "Unevictable: locked and other memory that stays; taken as above", "byte"),
    _ratio(
        "machine_locked_share",
        "machine_locked_bytes",
        "memory_bytes",
        "share of the machine's memory that is locked: where the study saw MGLRU amplify it was 81 %",
    ),
    _count(
        "machine_memory_some_ns",
        "time in which some process of the machine waited for memory (/proc/pressure/memory); null without PSI",
        "ns",
    ),
    _count("machine_memory_full_ns", "time in which all running processes did", "ns"),
    _count("machine_io_some_ns", "time in which some process waited for a device (/proc/pressure/io)", "ns"),
    _count("machine_io_full_ns", "time in which all running processes did", "ns"),
    # memory nodes, when the measured pass ended
    Column("node_id", pl.Int64, "memory node, as the kernel numbers it", minimum=0),
    Column("has_processors", pl.Boolean, "whether processors belong to the node; an accelerator's memory has none"),
    Column("is_counted", pl.Boolean, "whether the replay counted the node's memory and took memory from it"),
    _count("node_bytes", "MemTotal of the node", "byte"),
    _count("node_free_bytes", "MemFree of the node", "byte"),
    _count(
        "node_file_bytes",
        "FilePages of the node: page cache of every file; which of it is the pool's, no counter says",
        "byte",
    ),
    _count("node_locked_bytes", "Mlocked of the node", "byte"),
    _count(
        "group_node_file_bytes",
        "page cache on the node that is charged to the run's group (file of memory.numa_stat), the pool's and other "
        "files'; null without a group",
        "byte",
    ),
    # experiments
    Column(
        "experiment_id",
        pl.String,
        "the experiment's name + first 12 hex digits of SHA-256 over what its conditions ask for, traces, pools, seed, "
        "machine and version; not over the number of repetitions, so that more of them continue it",
    ),
    Column("experiment", pl.String, "name of the experiment, as its file has it"),
    Column("asks", pl.String, "the question an experiment is to answer"),
    Column(
        "run_order",
        pl.String,
        "random: each block holds every condition once, shuffled; pairs: two conditions after one another, first, "
        "second and drawn in turn",
        values=RUN_ORDERS,
    ),
    Column(
        "sizes",
        pl.String,
        "whether sizes are as the file has them, made smaller to fit the machine, or the study's",
        values=SIZINGS,
    ),
    Column("order_seed", pl.Int64, "seed of the order in which conditions were run", minimum=0),
    _count("conditions", "conditions of the experiment"),
    _count("repetitions", "repetitions asked for of each condition"),
    Column("definition", pl.String, "JSON of what each condition asks for, sizes in bytes, traces and pools by id"),
    Column("finished", pl.Boolean, "whether every condition has all repetitions, complete and valid in bytes"),
    Column(
        "digests_agree",
        pl.Boolean,
        "whether all counted runs of the same steps of one trace and pool consumed the same content; null if none did",
    ),
    Column(
        "relative_wall_difference",
        pl.Float64,
        "largest (highest − lowest) ÷ highest wall_bytes among conditions that were to have equal walls; null if none",
        minimum=0,
    ),
    Column("finding", pl.String, "the paragraph: effects, their spread, and whether they are outside it"),
    Column("condition", pl.String, "label of the condition within the experiment"),
    Column("tenant", pl.String, "which of the replays that a condition starts together; null if it starts one alone"),
    Column("repetition", pl.Int64, "which repetition of its condition, from 0", minimum=0),
    Column(
        "attempt",
        pl.Int64,
        "which attempt at this repetition, from 0: a run that does not count is repeated",
        minimum=0,
    ),
    Column("position", pl.Int64, "place among the attempts of the experiment, in the order they were begun", minimum=0),
    Column("metric", pl.String, "a column of replay_run, or made of some of them; its unit ends its name"),
    _count("runs", "runs that were started, whatever came of them"),
    _count("valid_runs", "runs of these that are valid in bytes"),
    _count("counted_runs", "repetitions that count and have the metric: times only where time_valid"),
    Column("median_value", pl.Float64, "lower median of the metric over counted runs, in the metric's unit"),
    Column("lowest_value", pl.Float64, "the same, least"),
    Column("highest_value", pl.Float64, "the same, greatest"),
    Column("relative_spread", pl.Float64, "(highest − lowest) ÷ median; null of a median of 0", minimum=0),
    Column("baseline", pl.String, "what a condition is compared with; several stand for the sum of their metrics"),
    _count("pairs", "repetitions that condition and baseline both have with a ratio of the metric"),
    Column(
        "effect", pl.Float64, "lower median over pairs of condition ÷ baseline; null where there is no ratio", minimum=0
    ),
    Column("effect_low", pl.Float64, "the same, least", minimum=0),
    Column("effect_high", pl.Float64, "the same, greatest", minimum=0),
    Column(
        "self_low",
        pl.Float64,
        "least ratio of two repetitions of one condition, of the condition's and the baseline's; null without two each",
        minimum=0,
    ),
    Column("self_high", pl.Float64, "the same, greatest", minimum=0),
    Column(
        "outside_spread",
        pl.Boolean,
        "whether the effect is below self_low or above self_high; if not there is none; null if that cannot be told",
    ),
    Column(
        "inverse_capacity_deviation",
        pl.Float64,
        "median ÷ (the largest capacity's median × largest capacity ÷ this capacity) − 1; null but for a response",
    ),
    Column(
        "inverse_residency_deviation",
        pl.Float64,
        "the same with the measured bytes of experts held in the place of the capacity",
    ),
    Column(
        "monotone",
        pl.Boolean,
        "whether the metric's medians never fall as the capacity does, over all capacities; null but for a response",
    ),
    # labs
    Column(
        "lab_id",
        pl.String,
        "the lab's name + first 12 hex digits of SHA-256 over what its conditions ask for, trace, pool, seed and "
        "version; not over the number of repetitions, so that more of them continue it",
    ),
    Column("lab", pl.String, "name of the lab, as its file has it"),
    Column("place", pl.String, "whether the run was made in a guest or on the host itself", values=PLACES),
    Column(
        "mglru_setting",
        pl.String,
        "what the multi-generational LRU was switched to before the run; null: left as the kernel had it",
        values=MGLRU_SETTINGS,
    ),
    Column("boot_id", pl.String, "names one boot of a guest; runs that share it ran in one kernel; null on the host"),
    Column("boot_position", pl.Int64, "place of the run among those of its boot, from 0", minimum=0),
    _count("boot_runs", "runs that were to share the boot, this one included"),
    _count("boot_starts", "starts until the guest's kernel was up: emulation loses some"),
    _count("guest_memory_bytes", "memory that the guest was given", "byte"),
    _count("boot_limit_bytes", "mem= of the guest's kernel, which sees no more; null without", "byte"),
    Column("accelerator", pl.String, "kvm: the guest had real processors; tcg: emulated ones", values=ACCELERATORS),
    Column("qemu_version", pl.String, "what QEMU says of itself"),
    Column("kernel_package", pl.String, "package and version that the guest's kernel is from"),
    _count("compiled_files", "files that numba wrote in the guest: 0 where all was compiled before"),
    # proofs
    Column(
        "spoils", pl.String, "what a proof that fails makes worthless: bytes (then time as well) or time", values=SPOILS
    ),
    Column("expected", pl.String, "what a sound run shows"),
    Column("tolerance", pl.String, "how far found may be from expected; empty if not at all"),
    Column("held", pl.Boolean, "whether the proof held; null if it could not be made, then found says why"),
    # pools
    Column("layout", pl.String, "how experts lie in files; mapped: as a checkpoint has them", values=POOL_LAYOUTS),
    Column("content", pl.String, "what the bytes are: synthetic_v… or null for a checkpoint"),
    _count("alignment_bytes", "every slice of an expert starts at a multiple of this", "byte"),
    _count("files", "files of the pool"),
    _count("file_bytes", "bytes of all files, headers and padding included", "byte"),
    # machines
    Column("architecture", pl.String, "machine architecture as the kernel names it"),
    Column("cpu_model", pl.String, "processor as the kernel names it; null if it does not"),
    _count("cpus", "processors this process may use"),
    _count("memory_bytes", "MemTotal of /proc/meminfo: what the kernel manages", "byte"),
    _count("page_bytes", "size of a page", "byte"),
    Column("kernel_release", pl.String, "release of the kernel"),
    _count("swap_bytes", "SwapTotal of /proc/meminfo", "byte"),
    Column("mglru", pl.String, "multi-generational LRU: absent from the kernel, off, or on, with its state"),
    Column("thp", pl.String, "transparent huge pages: what is chosen; null if the kernel has none"),
    _count("min_free_bytes", "vm.min_free_kbytes in bytes", "byte"),
    Column("swappiness", pl.Int64, "vm.swappiness", minimum=0),
    Column("damon", pl.String, "kernel threads that page out idle memory: absent, off, or on with their action"),
    Column("virtualization", pl.String, "hypervisor or emulator as far as it shows; none if it does not"),
    _count("numa_nodes", "NUMA nodes"),
    Column("filesystem", pl.String, "file system that holds the pool"),
    Column("mount_options", pl.String, "its mount options"),
    Column("block_device", pl.String, "block device behind it; null if there is none"),
    Column("block_device_model", pl.String, "its model; null if unknown"),
    _count("read_ahead_bytes", "its readahead", "byte"),
    Column("io_scheduler", pl.String, "its I/O scheduler"),
    Column("rotational", pl.Boolean, "whether it calls itself rotational; virtual disks often lie"),
    _count("max_io_bytes", "largest request it takes", "byte"),
    _count("logical_block_bytes", "its logical block", "byte"),
    # a decode whose experts come through the tier
    Column("model_folder", pl.String, "name of the folder of the checkpoint that was decoded"),
    Column("computed_by", pl.String, "library whose code computed what is no expert"),
    Column("compute_dtype", pl.String, "type of number that was computed in"),
    Column("prompt_name", pl.String, "file name of the prompt"),
    Column("prompt_sha256", pl.String, "SHA-256 of the prompt's token ids as little-endian uint32"),
    _count("prompt_tokens", "tokens of the prompt"),
    _count("decoded_tokens", "greedy tokens after the prompt, the first of which comes of the prompt's passes"),
    Column("token_sha256", pl.String, "SHA-256 of the decoded token ids as little-endian uint32"),
    Column("warm_token_sha256", pl.String, "the same of the warm-up decode; null without"),
    Column("degenerate", pl.Boolean, "whether one token stands in a row through half of what was decoded or more"),
    _count("warm_up_ns", "passes of the warm-up decode; null without", "ns"),
    _count("first_token_ns", "time to the first token: the passes over the prompt", "ns"),
    _count("first_token_wait_ns", "the part of it that waited for experts", "ns"),
    _count("decode_ns", "passes over the tokens after the first", "ns"),
    _count("decode_wait_ns", "the part of it that waited for experts", "ns"),
    _count(
        "decode_rest_ns", "the rest of it: computing, and naming the next layer's experts where that was asked", "ns"
    ),
    _count("decode_passes", "passes of decode_ns: decoded tokens less the first"),
    _ratio("decode_ns_per_token", "decode_ns", "decode_passes", "time of a token after the first", may_exceed_one=True),
    Column("decode_phase", pl.String, "passes over the prompt, or over the tokens after", values=("prefill", "decode")),
    _count("layer_wait_ns", "time that events of the layer waited for experts", "ns"),
    _count("layer_compute_ns", "time of attention, router and experts of the layer, without the wait", "ns"),
    _count("layer_lookahead_ns", "time in which the next layer's experts were named; 0 where that was not asked", "ns"),
    Column("decode_pair_id", pl.String, "names a pair of decodes by its two runs"),
    Column("pairs_id", pl.String, "names the experiment that a pair belongs to"),
    _count("pair", "which pair of its prompt, from 0"),
    Column("against", pl.String, "the owner that `owner` is paired with", values=OWNERS),
    Column("first_owner", pl.String, "the one of the two that decoded first", values=OWNERS),
    Column("owner_run_id", pl.String, "run of `owner` in decode_run"),
    Column("against_run_id", pl.String, "run of `against` in decode_run"),
    Column("owner_token_sha256", pl.String, "token_sha256 of the run of `owner`"),
    Column("against_token_sha256", pl.String, "token_sha256 of the run of `against`"),
    Column("identical", pl.Boolean, "whether the two decoded the same tokens"),
    Column("void_reason", pl.String, "why the pair says nothing about time; null where it does"),
    Column("owner_time_valid", pl.Boolean, "time_valid of the run of `owner`"),
    Column("against_time_valid", pl.Boolean, "time_valid of the run of `against`"),
    _count("owner_decode_ns", "decode_ns of the run of `owner`", "ns"),
    _count("against_decode_ns", "decode_ns of the run of `against`", "ns"),
    # canonical trace (fixed-size lists depend on k and are described in `trace`)
    Column("event_id", pl.UInt32, "dense, in recorded order: one per (step, pass, layer)"),
    Column("row_in_event", pl.UInt16, "0.. within the event"),
    Column("step_id", pl.UInt32, "engine iteration (forward pass over the running requests), 0-based, dense"),
    Column("request_id", pl.UInt32, "sequence; one stream = 0"),
    Column("token_position", pl.UInt32, "place in the sequence as the dump numbers it; null if it does not say"),
    Column("pass_kind", pl.String, "what a pass was for under speculation", values=PASS_KINDS),
]

COLUMNS: dict[str, Column] = {column.name: column for column in _DEFINITIONS}
if len(COLUMNS) != len(_DEFINITIONS):
    raise RuntimeError("a column name is defined twice")
