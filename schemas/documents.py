"""What `--json` prints, one model per command; tests check every document against these."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from schemas.trace import CheckVerdict, TraceMetadata


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid")


class IngestedTrace(_Document):
    """An element of the list that `expert-tier ingest --json` prints."""

    trace_id: str
    path: str
    rows: int
    selections: int
    accesses: int
    steps: int
    warnings: list[str]


class Inspection(_Document):
    """`expert-tier inspect --json`; with `refuse` there is no metadata, `refusal` says why, and the exit code is 1."""

    dump: str
    verdict: Literal["ok", "warn", "refuse"]
    refusal: str | None
    checks: list[CheckVerdict]
    unknown: list[str]
    metadata: TraceMetadata | None


class DumpCheck(_Document):
    """An element of the list that `expert-tier inspect --checks --json` prints."""

    name: str
    looks_for: str
    wanted: str
    reason: str


class LayerCounts(_Document):
    """An element of `by_layer`."""

    layer_id: int
    accesses: int
    hits: int
    misses: int
    hit_rate: float | None
    compulsory_misses: int
    capacity_misses: int
    miss_bytes: int | None


class PhaseCounts(_Document):
    """An element of `by_phase`."""

    phase: Literal["prefill", "decode", "unknown"]
    accesses: int
    hits: int
    misses: int
    hit_rate: float | None
    compulsory_misses: int
    capacity_misses: int
    miss_bytes: int | None


class StepCounts(_Document):
    """An element of `by_step`: a scored step, numbered over the selection."""

    step: int
    accesses: int
    hits: int


class SimulatedResult(_Document):
    """One element of `results`: a row of the table hit_rate, and what `--by` asks for."""

    trace_id: str
    policy: str
    scope: Literal["layer", "global"]
    semantics: Literal["event_atomic", "sequential", "token_clock"]
    access_order: Literal["router", "ascending", "descending", "random"]
    dedup: Literal["union", "none"]
    capacity_experts_total: int | None
    capacity_bytes: int | None
    step_begin: int
    step_end: int
    phase: Literal["prefill", "decode", "unknown", "all"]
    warm_fraction: float
    warm_steps: int
    warm_pass: bool
    fit: str | None
    seed: int | None
    pinned_fraction: float | None
    admission: str | None
    quota_fit: str | None
    folios_per_expert: int | None
    scored_steps: int
    scored_events: int
    scored_accepted_tokens: int | None
    selections: int
    accesses: int
    union_ratio: float | None
    hits: int
    misses: int
    hit_rate: float | None
    hit_rate_low: float | None
    hit_rate_high: float | None
    block_steps: int | None
    reference_policy: str | None
    over_reference: float | None
    over_reference_low: float | None
    over_reference_high: float | None
    compulsory_misses: int
    capacity_misses: int
    demand_bytes: int | None
    miss_bytes: int | None
    miss_bytes_per_step: float | None
    miss_bytes_per_accepted_token: float | None
    preload_bytes: int | None
    pressure_mean: float | None
    pressure_p95: float | None
    events_above_capacity: int | None
    shuffled_accesses: int | None
    shuffled_hits: int | None
    shuffled_hit_rate: float | None
    lag1_chance_numerator: float
    lag1_chance_denominator: float
    lag1_chance_ratio: float | None
    lag1_uniform_denominator: int
    lag1_uniform_ratio: float | None
    by_layer: list[LayerCounts] | None = None
    by_phase: list[PhaseCounts] | None = None
    by_step: list[StepCounts] | None = None


class _Point(_Document):
    policy: str
    scope: Literal["layer", "global"]
    semantics: Literal["event_atomic", "sequential", "token_clock"]
    capacity_experts_total: int | None
    capacity_bytes: int | None


class BatchResult(_Point):
    """What merging does to one policy at one capacity."""

    stream_misses: list[int]
    merged_misses: int
    per_token_miss_ratio: float | None


class Batch(_Document):
    """`--merge`: accesses of the streams alone beside those of the batch."""

    streams: list[str]
    stream_accesses: list[int]
    merged_accesses: int
    dedup_factor: float | None
    results: list[BatchResult]


class RecoveryResult(_Point):
    """`--switch`: how long one policy at one capacity suffers, and what that costs."""

    switch_step: int
    recovery_steps: int | None
    window_steps: int
    margin: float
    steady_hits: int
    steady_accesses: int
    extra_misses: int | None
    compared_accesses: int | None


class ReportingItem(_Document):
    """An item of the reporting block of arXiv 2608.07911."""

    item: str
    topic: str
    question: str
    answer: str
    known: bool


class Simulation(_Document):
    """`replayer simulate --json`."""

    trace_id: str
    results: list[SimulatedResult]
    cycle_floor_experts: int | None = None
    batch: Batch | None = None
    recovery: list[RecoveryResult] | None = None
    reporting_block: list[ReportingItem] | None = None


class WholeCurve(_Document):
    """Hits of one policy at every capacity."""

    policy: Literal["lru", "static"]
    semantics: Literal["event_atomic", "sequential"] | None
    fit: str | None
    compulsory_misses: list[int]
    capacity_experts_total: list[int]
    hits: list[int]


class Curves(_Document):
    """`replayer curve --json`."""

    trace_id: str
    scope: Literal["layer", "global"]
    phase: Literal["prefill", "decode", "unknown", "all"]
    step_begin: int
    step_end: int
    warm_steps: int
    warm_pass: bool
    access_order: Literal["router", "ascending", "descending", "random"]
    dedup: Literal["union", "none"]
    accesses: int
    cycle_floor_experts: int | None
    curves: list[WholeCurve]


class SweepSummary(_Document):
    """`replayer sweep --json`."""

    cells: int
    skipped: int
    simulated: int
    folder: str


class ReplayedRun(_Document):
    """`replayer replay --json`, and an element of its list under `--repeat`: a row of replay_run, and its proofs.

    `reclaim` is null where the run ended before its measured pass.
    """

    class Proof(_Document):
        """A row of replay_proof; `held` is null if the proof could not be made."""

        run_id: str
        name: str
        spoils: Literal["bytes", "time"]
        expected: str
        found: str
        tolerance: str
        held: bool | None

    class Delivered(_Document):
        """The row of replay_delivery."""

        run_id: str
        delivery: Literal["advice", "blocking", "uring"]
        plan_hash: str
        piece_bytes: int | None
        hint_slots: int | None
        hints: int
        hints_submitted: int
        hints_completed: int
        hints_overwritten: int
        hints_dropped: int
        hints_in_flight: int
        hinted_missing_bytes: int
        hinted_read_bytes: int
        hint_ns: int
        named_accesses: int
        named_hits: int

    class Reclaim(_Document):
        """The row of replay_reclaim of the whole measured pass."""

        run_id: str
        step_id: int | None
        device_bytes: int | None
        group_kswapd_scan_pages: int | None
        group_direct_scan_pages: int | None
        group_scan_pages: int | None
        group_kswapd_steal_pages: int | None
        group_direct_steal_pages: int | None
        group_steal_pages: int | None
        group_scan_per_steal: float | None
        group_refault_bytes: int | None
        group_refault_per_device_byte: float | None
        group_refault_activated_pages: int | None
        group_activated_pages: int | None
        group_minor_faults: int | None
        group_major_faults: int | None
        group_cached_bytes: int | None
        group_unevictable_bytes: int | None
        group_limit_bytes: int | None
        group_locked_share: float | None
        group_memory_some_ns: int | None
        group_memory_full_ns: int | None
        group_io_some_ns: int | None
        group_io_full_ns: int | None
        machine_kswapd_scan_pages: int | None
        machine_direct_scan_pages: int | None
        machine_scan_pages: int | None
        machine_kswapd_steal_pages: int | None
        machine_direct_steal_pages: int | None
        machine_steal_pages: int | None
        machine_scan_per_steal: float | None
        machine_file_scan_pages: int | None
        machine_file_steal_pages: int | None
        machine_file_scan_per_steal: float | None
        machine_refault_bytes: int | None
        machine_refault_per_device_byte: float | None
        machine_refault_activated_pages: int | None
        machine_activated_pages: int | None
        machine_minor_faults: int | None
        machine_major_faults: int | None
        machine_free_bytes: int | None
        machine_available_bytes: int | None
        machine_cached_bytes: int | None
        machine_locked_bytes: int | None
        machine_unevictable_bytes: int | None
        memory_bytes: int | None
        machine_locked_share: float | None
        machine_memory_some_ns: int | None
        machine_memory_full_ns: int | None
        machine_io_some_ns: int | None
        machine_io_full_ns: int | None

    run_id: str
    started_at: str
    condition_hash: str
    trace_id: str
    pool_id: str
    machine_id: str
    replayer_version: str
    status: Literal["complete", "interrupted", "failed", "killed"]
    failure: str | None
    bytes_valid: bool
    bytes_reasons: str
    time_valid: bool
    time_reasons: str
    thrash: bool
    owner: Literal[
        "page_cache", "page_cache_mmap", "restream", "uncached", "arena", "hybrid", "user_cache", "page_cache_admission"
    ]
    policy: (
        Literal[
            "lru",
            "fifo",
            "clock",
            "sieve",
            "s3fifo",
            "arc",
            "lfu_gated",
            "lfu_always",
            "lfu_in_cache",
            "lfru",
            "least_stale",
            "static",
            "pinned_lru",
            "two_list",
            "mglru",
            "random",
            "belady_bypass",
            "belady_forced",
        ]
        | None
    )
    scope: Literal["layer", "global"] | None
    fit: str | None
    admission: str | None
    seed: int | None
    arena_fraction: float | None
    miss_path: Literal["buffered", "direct", "uncached"] | None
    mechanism: Literal["cgroup", "balloon", "boot", "offline", "none"]
    mechanism_detail: str | None
    fadvise: Literal["random", "normal", "sequential", "noreuse", "willneed"]
    destination: Literal["cpu", "cuda", "none"]
    threads: int
    observe: Literal["none", "sample", "every"]
    residency_counter: Literal["cachestat", "mincore"] | None
    files_stay_open: bool | None
    verify: Literal["edges", "all"]
    group_stat: Literal["pass", "step"] | None
    repeat: int
    together_id: str | None
    tenant_number: int | None
    tenants: int | None
    shares_wall: bool | None
    step_begin: int
    step_end: int
    access_order: Literal["router", "ascending", "descending", "random"]
    warm_pass: bool
    capacity_bytes: int | None
    headroom_bytes: int
    own_anonymous_bytes: int | None
    own_kernel_bytes: int | None
    wall_bytes: int | None
    enforced_bytes: int | None
    balloon_bytes: int | None
    offline_bytes: int | None
    outer_group_bytes: int | None
    arena_bytes: int | None
    preload_bytes: int | None
    preload_ns: int | None
    cold_resident_bytes: int | None
    resident_median_bytes: int | None
    resident_max_bytes: int | None
    replayed_steps: int
    events: int
    selections: int
    accesses: int
    union_ratio: float | None
    demand_bytes: int
    reads: int | None
    returned_bytes: int | None
    observed_accesses: int | None
    native_hits: int | None
    native_partial_hits: int | None
    native_misses: int | None
    native_hit_rate: float | None
    arena_hits: int | None
    missing_bytes: int | None
    direct_bytes: int | None
    device_bytes: int | None
    device_bytes_counter: str | None
    warm_device_bytes: int | None
    own_fault_bytes: int | None
    overshoot_bytes: int | None
    raced_pages: int | None
    neighbor_bytes: int | None
    nominal_miss_bytes: int | None
    amplification_nominal: float | None
    resident_miss_bytes: int | None
    amplification_resident: float | None
    interval_ns: int | None
    overlap_ns: int | None
    wall_ns: int | None
    check_ns: int | None
    step_median_ns: int | None
    stall_ns: int | None
    stall_median_ns: int | None
    stall_p99_ns: int | None
    observe_ns: int | None
    verify_ns: int | None
    decide_ns: int | None
    cpu_ns: int | None
    consumed_digest: str | None
    checked_bytes: int | None
    reclaim: Reclaim | None
    delivered: Delivered | None
    proofs: list[Proof]


class DecodedRun(_Document):
    """`replayer decode --json`: tokens and times of the measured decode, and the run that served its experts.

    prefill_ns and decode_ns are the passes over the prompt and over the tokens after the first, the *_wait_ns their
    parts that waited for experts. warm_token_sha256 is null where the first decode was measured.
    """

    class Layer(_Document):
        """One MoE layer in one phase; compute_ns is attention, router and experts, without the wait."""

        phase: Literal["prefill", "decode"]
        layer_id: int
        events: int
        accesses: int
        wait_ns: int
        compute_ns: int
        lookahead_ns: int

    model: str
    family: str
    computed_by: str
    dtype: str
    prompt_tokens: int
    token_ids: list[int]
    text: str
    token_sha256: str
    warm_token_sha256: str | None
    degenerate: bool
    warm_up_ns: int | None
    prefill_ns: int
    prefill_wait_ns: int
    decode_ns: int
    decode_wait_ns: int
    layers: list[Layer]
    out: str | None
    run: ReplayedRun


class TokenIdentity(_Document):
    """`replayer decode --experiment token-identity --json`.

    A pair is void where its tokens differ, one token repeats, or bytes of a run are not valid. time_ratio: decode time
    of `against` ÷ that of `owner`, null where the pair is void or a time is not valid.
    """

    class Arm(_Document):
        """One decode of a pair."""

        run_id: str
        owner: str
        token_sha256: str
        tokens: int
        degenerate: bool
        bytes_valid: bool
        time_valid: bool
        warm_up_ns: int | None
        prefill_ns: int
        decode_ns: int
        decode_wait_ns: int
        device_bytes: int | None

    class Pair(_Document):
        """`order`: the owners as they ran; `arms`: owner, then against."""

        prompt: int
        pair: int
        order: list[str]
        arms: list["TokenIdentity.Arm"]
        void: str | None
        time_ratio: float | None

    class Prompt(_Document):
        """Over the pairs of one prompt."""

        prompt: int
        pairs: int
        identical_pairs: int
        timed_pairs: int
        time_ratio_median: float | None
        time_ratio_low: float | None
        time_ratio_high: float | None

    experiment: Literal["token-identity"]
    model: str
    owner: str
    against: str
    seed: int
    tokens: int
    prompts: list[str]
    pairs: list[Pair]
    by_prompt: list[Prompt]


class _Pool(_Document):
    """`filesystem` and the four after it are of the first unsuitable storage, or of the first; `devices` are of all."""

    pool_id: str
    folder: str
    layout: Literal["per_expert", "per_layer", "stacked", "mapped"]
    content: str | None
    alignment_bytes: int
    moe_layers: int
    pool_experts: int
    pool_bytes: int
    files: int
    file_bytes: int
    filesystem: str
    device: str | None
    storage_kind: str
    suitable_storage: bool
    storage_reason: str
    devices: list[str | None]
    unsuitable_storage_when_built: str | None


class BuiltPool(_Pool):
    """`replayer pool build --json`; `kept_bytes` were there from an earlier build."""

    kept_bytes: int
    written_bytes: int


class MappedPool(_Pool):
    """`replayer pool map --json`: the routed experts of a checkpoint, and what looked like some and was left out."""

    class LeftOut(_Document):
        """Tensors left out for one reason."""

        reason: str
        tensors: int
        bytes: int

    checkpoint: str
    scheme: str
    parts: list[str]
    moe_layer_ids: list[int]
    experts_per_layer: list[int]
    expert_bytes_min: int
    expert_bytes_max: int
    left_out: list[LeftOut]


class VerifiedPool(_Pool):
    """`replayer pool verify --json`; of a mapped pool no content is checked."""

    class Check(_Document):
        """What one check wanted of the files, and found."""

        name: str
        wanted: str
        found: str
        held: bool

    content_checked: Literal["none", "sampled", "all"]
    seed: int
    holds: bool
    checks: list[Check]


class LookaheadScore(_Document):
    """`expert-tier lookahead --json`: the row of table lookahead_recall over all layers; `out` is the plan's file."""

    trace_id: str
    predictor: Literal[
        "previous_token", "frequency", "conditional", "union", "learned", "recorded", "oracle", "random", "popularity"
    ]
    fit: str | None
    lookahead_layers: int | None
    lookahead_steps: int | None
    width: int | None
    phase: str
    step_begin: int
    step_end: int
    warm_steps: int
    events: int
    covered_events: int
    hint_coverage: float | None
    accesses: int
    covered_accesses: int
    predicted_experts: int
    predicted_accesses: int
    recall_all: float | None
    recall_covered: float | None
    precision: float | None
    chance_predicted_accesses: float
    chance_recall_all: float | None
    shuffled_predicted_accesses: int
    shuffled_recall_all: float | None
    seed: int
    out: str | None


class RunSummary(_Document):
    """`expert-tier run --json`."""

    traces: list[str]
    tables: dict[str, int]
    warehouse: str
    report: str


class Captured(RunSummary):
    """`expert-tier capture --json`: the traces of the prompts, in order, and what `run` made of them."""

    captured: list["IngestedTrace"]


class Demonstration(RunSummary):
    """`expert-tier demo --json`; `replay_skipped` says why there is no native run, null if there is one."""

    replays: list[ReplayedRun]
    replay_skipped: str | None


class Relation(_Document):
    """An element of the list that `expert-tier query --list --format json` prints."""

    name: str
    kind: Literal["table", "view"]
    comment: str | None
    rows: int | None


class Probe(_Document):
    """`replayer probe --json`: `machine` is a row of that table; `bandwidth` is null if it was not asked for."""

    class Capability(_Document):
        """`available` null means unknown; `remedy` says what would enable it, null if nothing."""

        group: str
        name: str
        available: bool | None
        found: str
        remedy: str | None

    class Bandwidth(_Document):
        """`device_bytes` is what the kernel fetched from a device, null if it does not count it."""

        read_bytes: int
        device_bytes: int | None
        elapsed_ns: int
        reads: int
        threads: int
        method: str

    folder: str
    machine: dict[str, str | int | bool | None]
    capabilities: list[Capability]
    bandwidth: Bandwidth | None


class ExperimentOutcome(_Document):
    """`replayer replay --experiment … --json`: a row of table `experiment`, with the rows of the tables beside it.

    `started_runs` are the attempts of this call; `by_run` has every run of the experiment, earlier calls' too.
    """

    class StartedRun(_Document):
        """A row of table `experiment_run`, with what came of the run."""

        run_id: str
        experiment_id: str
        trace_id: str
        condition: str
        tenant: str | None
        repetition: int
        attempt: int
        position: int
        status: Literal["complete", "interrupted", "failed", "killed"]
        bytes_valid: bool
        time_valid: bool

    class MeasuredMetric(_Document):
        """A row of table `experiment_condition`."""

        experiment_id: str
        condition: str
        tenant: str | None
        metric: str
        runs: int
        valid_runs: int
        counted_runs: int
        median_value: float | None
        lowest_value: float | None
        highest_value: float | None
        relative_spread: float | None

    class Effect(_Document):
        """A row of table `experiment_effect`."""

        experiment_id: str
        condition: str
        tenant: str | None
        metric: str
        baseline: str
        pairs: int
        effect: float | None
        effect_low: float | None
        effect_high: float | None
        self_low: float | None
        self_high: float | None
        outside_spread: bool | None
        inverse_capacity_deviation: float | None
        inverse_residency_deviation: float | None
        monotone: bool | None

    experiment_id: str
    experiment: str
    asks: str
    run_order: Literal["random", "pairs"]
    sizes: Literal["as_written", "fit_machine", "as_published"]
    order_seed: int
    conditions: int
    repetitions: int
    machine_id: str
    definition: str
    runs: int
    valid_runs: int
    finished: bool
    digests_agree: bool | None
    relative_wall_difference: float | None
    finding: str
    started_runs: int
    by_run: list[StartedRun]
    by_condition: list[MeasuredMetric]
    effects: list[Effect]


class LabOutcome(_Document):
    """`replayer lab run --json`: a row of table `lab`, with what its runs show.

    `started_runs` and `started_boots` are this call's, `failures` what its guests came to grief by; `by_run` has every
    run of the lab, earlier calls' too.
    """

    class Spread(_Document):
        """Over the runs of a condition that count: the lower median, the least and the greatest."""

        median: float
        lowest: float
        highest: float

    class MeasuredCondition(_Document):
        """What the runs of a condition show; null where none counts."""

        condition: str
        counted_runs: int
        device_bytes: "LabOutcome.Spread | None"
        resident_median_bytes: "LabOutcome.Spread | None"
        amplification_nominal: "LabOutcome.Spread | None"
        amplification_resident: "LabOutcome.Spread | None"

    class LabRun(_Document):
        """A row of table `lab_run`, with what came of the run."""

        run_id: str
        lab_id: str
        trace_id: str
        condition: str
        repetition: int | None
        attempt: int
        position: int
        place: Literal["guest", "host"]
        mglru_setting: Literal["on", "off"] | None
        boot_id: str | None
        boot_position: int | None
        boot_runs: int | None
        boot_starts: int | None
        guest_memory_bytes: int | None
        boot_limit_bytes: int | None
        accelerator: Literal["kvm", "tcg"] | None
        qemu_version: str | None
        kernel_package: str | None
        compiled_files: int | None
        status: Literal["complete", "interrupted", "failed", "killed"]
        bytes_valid: bool

    lab_id: str
    lab: str
    asks: str
    order_seed: int
    conditions: int
    repetitions: int
    definition: str
    runs: int
    valid_runs: int
    finished: bool
    started_runs: int
    started_boots: int
    accelerator: Literal["kvm", "tcg"]
    qemu_version: str
    kernel_release: str
    failures: list[str]
    by_condition: list[MeasuredCondition]
    by_run: list[LabRun]


class Comparison(_Document):
    """`expert-tier compare --json`; unknown is null, and so is a side that has no such column."""

    class Side(_Document):
        """A quantity of one result: a ratio with its parts, a median with its range."""

        value: int | float | str | bool | None
        valid: bool
        numerator: int | float | None
        denominator: int | float | None
        lowest: int | float | None
        highest: int | float | None

    class Compared(_Document):
        """One of the two results; repetitions is null of a single run and of a simulation."""

        relation: str
        name: str
        evidence: Literal["measured", "decoded", "simulated"]
        repetitions: int | None
        quarantined: bool
        failed_proofs: list[str]
        times_valid: bool

    class Difference(_Document):
        """A contract column that differs; counted: whether it makes the results differ in its kind."""

        kind: str
        column: str
        a: int | float | str | bool | None
        b: int | float | str | bool | None
        counted: bool
        note: str

    class Quantity(_Document):
        """A column of either result that is no contract."""

        column: str
        unit: str | None
        a: "Comparison.Side | None"
        b: "Comparison.Side | None"

    results: list[Compared]
    differences: list[Difference]
    comparable: bool
    verdict: str
    quantities: list[Quantity]


class WrittenBundle(_Document):
    """`expert-tier bundle --json` of results as one file; the manifest is the member `manifest.json`."""

    out: str
    bytes: int
    sha256: str
    manifest: dict[str, object]


class WrittenLab(_Document):
    """`expert-tier bundle LAB_ID --json`: rows of each table."""

    out: str
    lab_id: str
    rows: dict[str, int]


class Verification(_Document):
    """`expert-tier verify --json`: every check of a bundle, and what came of it."""

    class Check(_Document):
        """held is null where the check is not possible here; found says why."""

        check: str
        subject: str
        held: bool | None
        found: str

    bundle: str
    made_by: str
    expert_tier_version: str
    held: int
    failed: int
    not_possible: int
    checks: list[Check]
