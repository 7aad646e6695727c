-- The tables of data/warehouse.duckdb, in the order of schemas/tables.py, which defines them: a test holds names, types, order
-- and NOT NULL equal. What a column means, its unit and its formula are COMMENTs, set from the same definitions when the
-- warehouse is built (duckdb_columns(), or `expert-tier query --list`). A ratio is null where its denominator is 0.
-- Keys are checked when the warehouse is built, not by constraints: null is a value of its own in a key here.

-- One row per canonical trace.
-- Key: trace_id
CREATE TABLE trace (
    trace_id           VARCHAR NOT NULL,
    supersedes         VARCHAR,
    model              VARCHAR,
    engine             VARCHAR,
    domain             VARCHAR,
    capture_method     VARCHAR,
    source_file        VARCHAR NOT NULL,
    source_format      VARCHAR NOT NULL,
    source_bytes       BIGINT  NOT NULL,
    source_sha256      VARCHAR NOT NULL,
    parser_version     BIGINT  NOT NULL,
    schema_version     VARCHAR NOT NULL,
    id_space           VARCHAR,
    weight_kind        VARCHAR,
    rank_known         BOOLEAN NOT NULL,
    pass_boundaries    VARCHAR NOT NULL,
    layer_base         VARCHAR NOT NULL,
    num_experts_source VARCHAR NOT NULL,
    hidden_layers      BIGINT,
    moe_layers         BIGINT  NOT NULL,
    num_experts        BIGINT  NOT NULL,
    pool_experts       BIGINT  NOT NULL,
    pool_bytes         BIGINT,
    expert_bytes_min   BIGINT,
    expert_bytes_max   BIGINT,
    top_k_model        BIGINT,
    top_k_observed     BIGINT  NOT NULL,
    rows               BIGINT  NOT NULL,
    events             BIGINT  NOT NULL,
    steps              BIGINT  NOT NULL,
    requests           BIGINT  NOT NULL,
    selections         BIGINT  NOT NULL,
    accesses           BIGINT  NOT NULL,
    union_ratio        DOUBLE,
    accepted_tokens    BIGINT  NOT NULL,
    prefill_rows       BIGINT  NOT NULL,
    decode_rows        BIGINT  NOT NULL,
    warmup_rows        BIGINT  NOT NULL,
    unknown_phase_rows BIGINT  NOT NULL,
    dropped_rows       BIGINT  NOT NULL,
    unknowns           VARCHAR NOT NULL
);

-- One row per canonical trace and check its dump went through.
-- Key: trace_id, name
CREATE TABLE trace_check (
    trace_id VARCHAR NOT NULL,
    name     VARCHAR NOT NULL,
    outcome  VARCHAR NOT NULL,
    wanted   VARCHAR NOT NULL,
    found    VARCHAR NOT NULL
);

-- One row per trace, scored phase and layer, and one for all layers together.
-- Key: trace_id, phase, layer_id
CREATE TABLE trace_locality (
    trace_id                       VARCHAR NOT NULL,
    phase                          VARCHAR NOT NULL,
    layer_id                       BIGINT,
    tokens                         BIGINT  NOT NULL,
    selections                     BIGINT  NOT NULL,
    reuse_selections               BIGINT  NOT NULL,
    w1_reused_selections           BIGINT  NOT NULL,
    w1_reuse_ratio                 DOUBLE,
    w1_shuffled_reused_selections  BIGINT  NOT NULL,
    w1_shuffled_ratio              DOUBLE,
    chance_numerator               DOUBLE  NOT NULL,
    chance_denominator             DOUBLE  NOT NULL,
    chance_ratio                   DOUBLE,
    uniform_denominator            BIGINT  NOT NULL,
    uniform_ratio                  DOUBLE,
    w8_reused_selections           BIGINT  NOT NULL,
    w8_reuse_ratio                 DOUBLE,
    w8_shuffled_reused_selections  BIGINT  NOT NULL,
    w8_shuffled_ratio              DOUBLE,
    w64_reused_selections          BIGINT  NOT NULL,
    w64_reuse_ratio                DOUBLE,
    w64_shuffled_reused_selections BIGINT  NOT NULL,
    w64_shuffled_ratio             DOUBLE,
    seed                           BIGINT  NOT NULL,
    zipf_alpha                     DOUBLE,
    top8_selections                BIGINT  NOT NULL,
    top8_share                     DOUBLE,
    distinct_experts               BIGINT  NOT NULL,
    pool_experts                   BIGINT  NOT NULL,
    coverage_ratio                 DOUBLE,
    working_set_95_experts         BIGINT  NOT NULL,
    working_set_95_ratio           DOUBLE
);

-- One row per pair of traces of one model shape, set size and layer, and one for all layers together.
-- Key: trace_id, other_trace_id, phase, top_experts, layer_id
CREATE TABLE domain_overlap (
    trace_id              VARCHAR NOT NULL,
    other_trace_id        VARCHAR NOT NULL,
    phase                 VARCHAR NOT NULL,
    top_experts           BIGINT  NOT NULL,
    layer_id              BIGINT,
    shared_experts        BIGINT  NOT NULL,
    joint_experts         BIGINT  NOT NULL,
    jaccard_ratio         DOUBLE,
    chance_shared_experts DOUBLE  NOT NULL
);

-- One row per contract: trace, policy, scope, semantics, capacity and what was scored.
-- Key: trace_id, policy, scope, semantics, access_order, dedup, capacity_experts_total, capacity_bytes,
-- step_begin, step_end, phase, warm_fraction, warm_steps, warm_pass, fit, seed, pinned_fraction, admission,
-- quota_fit, folios_per_expert
CREATE TABLE hit_rate (
    trace_id                      VARCHAR NOT NULL,
    policy                        VARCHAR NOT NULL,
    scope                         VARCHAR NOT NULL,
    semantics                     VARCHAR NOT NULL,
    access_order                  VARCHAR NOT NULL,
    dedup                         VARCHAR NOT NULL,
    capacity_experts_total        BIGINT,
    capacity_bytes                BIGINT,
    step_begin                    BIGINT  NOT NULL,
    step_end                      BIGINT  NOT NULL,
    phase                         VARCHAR NOT NULL,
    warm_fraction                 DOUBLE  NOT NULL,
    warm_steps                    BIGINT  NOT NULL,
    warm_pass                     BOOLEAN NOT NULL,
    fit                           VARCHAR,
    seed                          BIGINT,
    pinned_fraction               DOUBLE,
    admission                     VARCHAR,
    quota_fit                     VARCHAR,
    folios_per_expert             BIGINT,
    scored_steps                  BIGINT  NOT NULL,
    scored_events                 BIGINT  NOT NULL,
    scored_accepted_tokens        BIGINT,
    selections                    BIGINT  NOT NULL,
    accesses                      BIGINT  NOT NULL,
    union_ratio                   DOUBLE,
    hits                          BIGINT  NOT NULL,
    misses                        BIGINT  NOT NULL,
    hit_rate                      DOUBLE,
    hit_rate_low                  DOUBLE,
    hit_rate_high                 DOUBLE,
    block_steps                   BIGINT,
    reference_policy              VARCHAR,
    over_reference                DOUBLE,
    over_reference_low            DOUBLE,
    over_reference_high           DOUBLE,
    compulsory_misses             BIGINT  NOT NULL,
    capacity_misses               BIGINT  NOT NULL,
    demand_bytes                  BIGINT,
    miss_bytes                    BIGINT,
    miss_bytes_per_step           DOUBLE,
    miss_bytes_per_accepted_token DOUBLE,
    preload_bytes                 BIGINT,
    pressure_mean                 DOUBLE,
    pressure_p95                  DOUBLE,
    events_above_capacity         BIGINT,
    shuffled_accesses             BIGINT,
    shuffled_hits                 BIGINT,
    shuffled_hit_rate             DOUBLE,
    lag1_chance_numerator         DOUBLE  NOT NULL,
    lag1_chance_denominator       DOUBLE  NOT NULL,
    lag1_chance_ratio             DOUBLE,
    lag1_uniform_denominator      BIGINT  NOT NULL,
    lag1_uniform_ratio            DOUBLE
);

-- One row per cell of a sweep: hit_rate, named by the content it was computed from.
-- Key: cell_hash
CREATE TABLE sweep (
    cell_hash                     VARCHAR NOT NULL,
    trace_id                      VARCHAR NOT NULL,
    policy                        VARCHAR NOT NULL,
    scope                         VARCHAR NOT NULL,
    semantics                     VARCHAR NOT NULL,
    access_order                  VARCHAR NOT NULL,
    dedup                         VARCHAR NOT NULL,
    capacity_experts_total        BIGINT,
    capacity_bytes                BIGINT,
    step_begin                    BIGINT  NOT NULL,
    step_end                      BIGINT  NOT NULL,
    phase                         VARCHAR NOT NULL,
    warm_fraction                 DOUBLE  NOT NULL,
    warm_steps                    BIGINT  NOT NULL,
    warm_pass                     BOOLEAN NOT NULL,
    fit                           VARCHAR,
    seed                          BIGINT,
    pinned_fraction               DOUBLE,
    admission                     VARCHAR,
    quota_fit                     VARCHAR,
    folios_per_expert             BIGINT,
    scored_steps                  BIGINT  NOT NULL,
    scored_events                 BIGINT  NOT NULL,
    scored_accepted_tokens        BIGINT,
    selections                    BIGINT  NOT NULL,
    accesses                      BIGINT  NOT NULL,
    union_ratio                   DOUBLE,
    hits                          BIGINT  NOT NULL,
    misses                        BIGINT  NOT NULL,
    hit_rate                      DOUBLE,
    hit_rate_low                  DOUBLE,
    hit_rate_high                 DOUBLE,
    block_steps                   BIGINT,
    reference_policy              VARCHAR,
    over_reference                DOUBLE,
    over_reference_low            DOUBLE,
    over_reference_high           DOUBLE,
    compulsory_misses             BIGINT  NOT NULL,
    capacity_misses               BIGINT  NOT NULL,
    demand_bytes                  BIGINT,
    miss_bytes                    BIGINT,
    miss_bytes_per_step           DOUBLE,
    miss_bytes_per_accepted_token DOUBLE,
    preload_bytes                 BIGINT,
    pressure_mean                 DOUBLE,
    pressure_p95                  DOUBLE,
    events_above_capacity         BIGINT,
    shuffled_accesses             BIGINT,
    shuffled_hits                 BIGINT,
    shuffled_hit_rate             DOUBLE,
    lag1_chance_numerator         DOUBLE  NOT NULL,
    lag1_chance_denominator       DOUBLE  NOT NULL,
    lag1_chance_ratio             DOUBLE,
    lag1_uniform_denominator      BIGINT  NOT NULL,
    lag1_uniform_ratio            DOUBLE
);

-- One row per contract of hit_rate and layer.
-- Key: trace_id, policy, scope, semantics, access_order, dedup, capacity_experts_total, capacity_bytes,
-- step_begin, step_end, phase, warm_fraction, warm_steps, warm_pass, fit, seed, pinned_fraction, admission,
-- quota_fit, folios_per_expert, layer_id
CREATE TABLE hit_rate_layer (
    trace_id               VARCHAR NOT NULL,
    policy                 VARCHAR NOT NULL,
    scope                  VARCHAR NOT NULL,
    semantics              VARCHAR NOT NULL,
    access_order           VARCHAR NOT NULL,
    dedup                  VARCHAR NOT NULL,
    capacity_experts_total BIGINT,
    capacity_bytes         BIGINT,
    step_begin             BIGINT  NOT NULL,
    step_end               BIGINT  NOT NULL,
    phase                  VARCHAR NOT NULL,
    warm_fraction          DOUBLE  NOT NULL,
    warm_steps             BIGINT  NOT NULL,
    warm_pass              BOOLEAN NOT NULL,
    fit                    VARCHAR,
    seed                   BIGINT,
    pinned_fraction        DOUBLE,
    admission              VARCHAR,
    quota_fit              VARCHAR,
    folios_per_expert      BIGINT,
    layer_id               BIGINT  NOT NULL,
    accesses               BIGINT  NOT NULL,
    hits                   BIGINT  NOT NULL,
    misses                 BIGINT  NOT NULL,
    hit_rate               DOUBLE,
    compulsory_misses      BIGINT  NOT NULL,
    capacity_misses        BIGINT  NOT NULL,
    miss_bytes             BIGINT
);

-- One row per point of a curve: the contract of hit_rate at many capacities.
-- Key: trace_id, policy, scope, semantics, access_order, dedup, capacity_experts_total, capacity_bytes,
-- step_begin, step_end, phase, warm_fraction, warm_steps, warm_pass, fit, seed, pinned_fraction, admission,
-- quota_fit, folios_per_expert
CREATE TABLE miss_ratio_curve (
    trace_id               VARCHAR NOT NULL,
    policy                 VARCHAR NOT NULL,
    scope                  VARCHAR NOT NULL,
    semantics              VARCHAR NOT NULL,
    access_order           VARCHAR NOT NULL,
    dedup                  VARCHAR NOT NULL,
    capacity_experts_total BIGINT,
    capacity_bytes         BIGINT,
    step_begin             BIGINT  NOT NULL,
    step_end               BIGINT  NOT NULL,
    phase                  VARCHAR NOT NULL,
    warm_fraction          DOUBLE  NOT NULL,
    warm_steps             BIGINT  NOT NULL,
    warm_pass              BOOLEAN NOT NULL,
    fit                    VARCHAR,
    seed                   BIGINT,
    pinned_fraction        DOUBLE,
    admission              VARCHAR,
    quota_fit              VARCHAR,
    folios_per_expert      BIGINT,
    accesses               BIGINT  NOT NULL,
    misses                 BIGINT  NOT NULL,
    miss_ratio             DOUBLE,
    compulsory_misses      BIGINT  NOT NULL,
    capacity_misses        BIGINT  NOT NULL,
    demand_bytes           BIGINT,
    miss_bytes             BIGINT
);

-- One row per trace and item of the reporting block, answered from hit_rate in scope layer.
-- Key: trace_id, item
CREATE TABLE reporting_block (
    trace_id VARCHAR NOT NULL,
    item     VARCHAR NOT NULL,
    topic    VARCHAR NOT NULL,
    question VARCHAR NOT NULL,
    answer   VARCHAR NOT NULL,
    known    BOOLEAN NOT NULL
);

-- One row per policy, semantics, order and tiny capacity of a synthetic trace: LRU against a table.
-- Key: trace_id, capacity_experts_total, semantics, access_order, policy, dedup, fit, seed, step_begin,
-- step_end, phase, warm_fraction, warm_steps
CREATE TABLE inversion (
    trace_id               VARCHAR NOT NULL,
    capacity_experts_total BIGINT  NOT NULL,
    semantics              VARCHAR NOT NULL,
    access_order           VARCHAR NOT NULL,
    policy                 VARCHAR NOT NULL,
    dedup                  VARCHAR NOT NULL,
    fit                    VARCHAR,
    seed                   BIGINT,
    step_begin             BIGINT  NOT NULL,
    step_end               BIGINT  NOT NULL,
    phase                  VARCHAR NOT NULL,
    warm_fraction          DOUBLE  NOT NULL,
    warm_steps             BIGINT  NOT NULL,
    capture_method         VARCHAR,
    num_experts            BIGINT  NOT NULL,
    moe_layers             BIGINT  NOT NULL,
    top_k_observed         BIGINT  NOT NULL,
    scored_steps           BIGINT  NOT NULL,
    selections             BIGINT  NOT NULL,
    accesses               BIGINT  NOT NULL,
    hits                   BIGINT  NOT NULL,
    misses                 BIGINT  NOT NULL,
    hit_rate               DOUBLE
);

-- One row per trace, predictor, distance, width and target layer, and one for all layers together.
-- Key: trace_id, predictor, fit, lookahead_layers, lookahead_steps, width, layer_id, phase
CREATE TABLE lookahead_recall (
    trace_id                    VARCHAR NOT NULL,
    predictor                   VARCHAR NOT NULL,
    fit                         VARCHAR,
    lookahead_layers            BIGINT,
    lookahead_steps             BIGINT,
    width                       BIGINT,
    layer_id                    BIGINT,
    phase                       VARCHAR NOT NULL,
    step_begin                  BIGINT  NOT NULL,
    step_end                    BIGINT  NOT NULL,
    warm_steps                  BIGINT  NOT NULL,
    events                      BIGINT  NOT NULL,
    covered_events              BIGINT  NOT NULL,
    hint_coverage               DOUBLE,
    accesses                    BIGINT  NOT NULL,
    covered_accesses            BIGINT  NOT NULL,
    predicted_experts           BIGINT  NOT NULL,
    predicted_accesses          BIGINT  NOT NULL,
    recall_all                  DOUBLE,
    recall_covered              DOUBLE,
    precision                   DOUBLE,
    chance_predicted_accesses   DOUBLE  NOT NULL,
    chance_recall_all           DOUBLE,
    shuffled_predicted_accesses BIGINT  NOT NULL,
    shuffled_recall_all         DOUBLE,
    seed                        BIGINT  NOT NULL
);

-- One row per total of lookahead_recall and capacity: its recall on what an LRU of that size missed.
-- Key: trace_id, predictor, fit, lookahead_layers, lookahead_steps, width, phase, policy, scope, semantics, access_order, capacity_experts_total
CREATE TABLE lookahead_recall_missed (
    trace_id                VARCHAR NOT NULL,
    predictor               VARCHAR NOT NULL,
    fit                     VARCHAR,
    lookahead_layers        BIGINT,
    lookahead_steps         BIGINT,
    width                   BIGINT,
    phase                   VARCHAR NOT NULL,
    policy                  VARCHAR NOT NULL,
    scope                   VARCHAR NOT NULL,
    semantics               VARCHAR NOT NULL,
    access_order            VARCHAR NOT NULL,
    capacity_experts_total  BIGINT  NOT NULL,
    step_begin              BIGINT  NOT NULL,
    step_end                BIGINT  NOT NULL,
    warm_steps              BIGINT  NOT NULL,
    accesses                BIGINT  NOT NULL,
    misses                  BIGINT  NOT NULL,
    predicted_misses        BIGINT  NOT NULL,
    recall_missed           DOUBLE,
    chance_predicted_misses DOUBLE  NOT NULL,
    chance_recall_missed    DOUBLE
);

-- One row per plan, capacity of an LRU over all layers (event-atomic) and link: what it would have saved.
-- Key: trace_id, predictor, fit, lookahead_layers, lookahead_steps, width, phase, capacity_experts_total, bandwidth_bytes_per_s, latency_ns, queue_depth, compute_ns
CREATE TABLE lookahead_benefit (
    trace_id                             VARCHAR NOT NULL,
    predictor                            VARCHAR NOT NULL,
    fit                                  VARCHAR,
    lookahead_layers                     BIGINT,
    lookahead_steps                      BIGINT,
    width                                BIGINT,
    phase                                VARCHAR NOT NULL,
    capacity_experts_total               BIGINT  NOT NULL,
    bandwidth_bytes_per_s                BIGINT,
    latency_ns                           BIGINT  NOT NULL,
    queue_depth                          BIGINT,
    compute_ns                           BIGINT  NOT NULL,
    step_begin                           BIGINT  NOT NULL,
    step_end                             BIGINT  NOT NULL,
    warm_steps                           BIGINT  NOT NULL,
    events                               BIGINT  NOT NULL,
    covered_events                       BIGINT  NOT NULL,
    hint_coverage                        DOUBLE,
    selections                           BIGINT  NOT NULL,
    accesses                             BIGINT  NOT NULL,
    predicted_experts                    BIGINT  NOT NULL,
    predicted_accesses                   BIGINT  NOT NULL,
    recall_all                           DOUBLE,
    precision                            DOUBLE,
    misses                               BIGINT  NOT NULL,
    predicted_misses                     BIGINT  NOT NULL,
    recall_missed                        DOUBLE,
    simulated_misses_with                BIGINT  NOT NULL,
    simulated_removed_misses             BIGINT  NOT NULL,
    prefetch_coverage                    DOUBLE,
    simulated_removed_late               BIGINT  NOT NULL,
    simulated_displaced                  BIGINT  NOT NULL,
    simulated_submitted                  BIGINT  NOT NULL,
    simulated_completed                  BIGINT  NOT NULL,
    simulated_used                       BIGINT  NOT NULL,
    prefetch_accuracy                    DOUBLE,
    simulated_used_late                  BIGINT  NOT NULL,
    late_share                           DOUBLE,
    simulated_wasted                     BIGINT  NOT NULL,
    miss_bytes                           BIGINT,
    simulated_removed_bytes              BIGINT,
    simulated_displaced_bytes            BIGINT,
    simulated_wasted_bytes               BIGINT,
    simulated_device_bytes               BIGINT,
    simulated_device_bytes_per_miss_byte DOUBLE,
    simulated_time_without_ns            BIGINT  NOT NULL,
    simulated_time_with_ns               BIGINT  NOT NULL,
    simulated_time_per_time_without      DOUBLE,
    simulated_overlap_ns                 BIGINT  NOT NULL
);

-- One row per native replay that was started, whatever came of it.
-- Key: run_id
CREATE TABLE replay_run (
    run_id                 VARCHAR NOT NULL,
    started_at             VARCHAR NOT NULL,
    condition_hash         VARCHAR NOT NULL,
    trace_id               VARCHAR NOT NULL,
    pool_id                VARCHAR NOT NULL,
    machine_id             VARCHAR NOT NULL,
    replayer_version       VARCHAR NOT NULL,
    status                 VARCHAR NOT NULL,
    failure                VARCHAR,
    bytes_valid            BOOLEAN NOT NULL,
    bytes_reasons          VARCHAR NOT NULL,
    time_valid             BOOLEAN NOT NULL,
    time_reasons           VARCHAR NOT NULL,
    thrash                 BOOLEAN NOT NULL,
    owner                  VARCHAR NOT NULL,
    policy                 VARCHAR,
    scope                  VARCHAR,
    fit                    VARCHAR,
    admission              VARCHAR,
    seed                   BIGINT,
    arena_fraction         DOUBLE,
    miss_path              VARCHAR,
    mechanism              VARCHAR NOT NULL,
    mechanism_detail       VARCHAR,
    fadvise                VARCHAR NOT NULL,
    destination            VARCHAR NOT NULL,
    threads                BIGINT  NOT NULL,
    observe                VARCHAR NOT NULL,
    residency_counter      VARCHAR,
    files_stay_open        BOOLEAN,
    verify                 VARCHAR NOT NULL,
    group_stat             VARCHAR,
    repeat                 BIGINT  NOT NULL,
    together_id            VARCHAR,
    tenant_number          BIGINT,
    tenants                BIGINT,
    shares_wall            BOOLEAN,
    step_begin             BIGINT  NOT NULL,
    step_end               BIGINT  NOT NULL,
    access_order           VARCHAR NOT NULL,
    warm_pass              BOOLEAN NOT NULL,
    capacity_bytes         BIGINT,
    headroom_bytes         BIGINT  NOT NULL,
    own_anonymous_bytes    BIGINT,
    own_kernel_bytes       BIGINT,
    wall_bytes             BIGINT,
    enforced_bytes         BIGINT,
    balloon_bytes          BIGINT,
    offline_bytes          BIGINT,
    outer_group_bytes      BIGINT,
    arena_bytes            BIGINT,
    preload_bytes          BIGINT,
    preload_ns             BIGINT,
    cold_resident_bytes    BIGINT,
    resident_median_bytes  BIGINT,
    resident_max_bytes     BIGINT,
    replayed_steps         BIGINT  NOT NULL,
    events                 BIGINT  NOT NULL,
    selections             BIGINT  NOT NULL,
    accesses               BIGINT  NOT NULL,
    union_ratio            DOUBLE,
    demand_bytes           BIGINT  NOT NULL,
    reads                  BIGINT,
    returned_bytes         BIGINT,
    observed_accesses      BIGINT,
    native_hits            BIGINT,
    native_partial_hits    BIGINT,
    native_misses          BIGINT,
    native_hit_rate        DOUBLE,
    arena_hits             BIGINT,
    missing_bytes          BIGINT,
    direct_bytes           BIGINT,
    device_bytes           BIGINT,
    device_bytes_counter   VARCHAR,
    warm_device_bytes      BIGINT,
    own_fault_bytes        BIGINT,
    overshoot_bytes        BIGINT,
    raced_pages            BIGINT,
    neighbor_bytes         BIGINT,
    nominal_miss_bytes     BIGINT,
    amplification_nominal  DOUBLE,
    resident_miss_bytes    BIGINT,
    amplification_resident DOUBLE,
    interval_ns            BIGINT,
    overlap_ns             BIGINT,
    wall_ns                BIGINT,
    check_ns               BIGINT,
    step_median_ns         BIGINT,
    stall_ns               BIGINT,
    stall_median_ns        BIGINT,
    stall_p99_ns           BIGINT,
    observe_ns             BIGINT,
    verify_ns              BIGINT,
    decide_ns              BIGINT,
    cpu_ns                 BIGINT,
    consumed_digest        VARCHAR,
    checked_bytes          BIGINT
);

-- One row per native replay and measured step that ended.
-- Key: run_id, step_id
CREATE TABLE replay_step (
    run_id              VARCHAR  NOT NULL,
    step_id             UINTEGER NOT NULL,
    events              BIGINT   NOT NULL,
    accesses            BIGINT   NOT NULL,
    demand_bytes        BIGINT   NOT NULL,
    observed_accesses   BIGINT   NOT NULL,
    native_hits         BIGINT   NOT NULL,
    native_partial_hits BIGINT   NOT NULL,
    native_misses       BIGINT   NOT NULL,
    native_hit_rate     DOUBLE,
    missing_bytes       BIGINT,
    device_bytes        BIGINT,
    resident_bytes      BIGINT   NOT NULL,
    simulated_hits      BIGINT,
    simulated_misses    BIGINT,
    wall_ns             BIGINT   NOT NULL,
    check_ns            BIGINT   NOT NULL,
    stall_ns            BIGINT   NOT NULL,
    stall_median_ns     BIGINT   NOT NULL,
    stall_p99_ns        BIGINT   NOT NULL
);

-- One row per native replay and measured step that ended, and one (step_id null) for the whole pass.
-- Key: run_id, step_id
CREATE TABLE replay_reclaim (
    run_id                          VARCHAR  NOT NULL,
    step_id                         UINTEGER,
    device_bytes                    BIGINT,
    group_kswapd_scan_pages         BIGINT,
    group_direct_scan_pages         BIGINT,
    group_scan_pages                BIGINT,
    group_kswapd_steal_pages        BIGINT,
    group_direct_steal_pages        BIGINT,
    group_steal_pages               BIGINT,
    group_scan_per_steal            DOUBLE,
    group_refault_bytes             BIGINT,
    group_refault_per_device_byte   DOUBLE,
    group_refault_activated_pages   BIGINT,
    group_activated_pages           BIGINT,
    group_minor_faults              BIGINT,
    group_major_faults              BIGINT,
    group_cached_bytes              BIGINT,
    group_unevictable_bytes         BIGINT,
    group_limit_bytes               BIGINT,
    group_locked_share              DOUBLE,
    group_memory_some_ns            BIGINT,
    group_memory_full_ns            BIGINT,
    group_io_some_ns                BIGINT,
    group_io_full_ns                BIGINT,
    machine_kswapd_scan_pages       BIGINT,
    machine_direct_scan_pages       BIGINT,
    machine_scan_pages              BIGINT,
    machine_kswapd_steal_pages      BIGINT,
    machine_direct_steal_pages      BIGINT,
    machine_steal_pages             BIGINT,
    machine_scan_per_steal          DOUBLE,
    machine_file_scan_pages         BIGINT,
    machine_file_steal_pages        BIGINT,
    machine_file_scan_per_steal     DOUBLE,
    machine_refault_bytes           BIGINT,
    machine_refault_per_device_byte DOUBLE,
    machine_refault_activated_pages BIGINT,
    machine_activated_pages         BIGINT,
    machine_minor_faults            BIGINT,
    machine_major_faults            BIGINT,
    machine_free_bytes              BIGINT,
    machine_available_bytes         BIGINT,
    machine_cached_bytes            BIGINT,
    machine_locked_bytes            BIGINT,
    machine_unevictable_bytes       BIGINT,
    memory_bytes                    BIGINT,
    machine_locked_share            DOUBLE,
    machine_memory_some_ns          BIGINT,
    machine_memory_full_ns          BIGINT,
    machine_io_some_ns              BIGINT,
    machine_io_full_ns              BIGINT
);

-- One row per native replay and memory node of the machine, as it was when the measured pass ended.
-- Key: run_id, node_id
CREATE TABLE replay_node (
    run_id                VARCHAR NOT NULL,
    node_id               BIGINT  NOT NULL,
    has_processors        BOOLEAN NOT NULL,
    is_counted            BOOLEAN NOT NULL,
    node_bytes            BIGINT,
    node_free_bytes       BIGINT,
    node_file_bytes       BIGINT,
    node_locked_bytes     BIGINT,
    group_node_file_bytes BIGINT
);

-- One row per native replay that delivered a lookahead plan, of its measured pass.
-- Key: run_id
CREATE TABLE replay_delivery (
    run_id               VARCHAR NOT NULL,
    delivery             VARCHAR NOT NULL,
    plan_hash            VARCHAR NOT NULL,
    piece_bytes          BIGINT,
    hint_slots           BIGINT,
    hints                BIGINT  NOT NULL,
    hints_submitted      BIGINT  NOT NULL,
    hints_completed      BIGINT  NOT NULL,
    hints_overwritten    BIGINT  NOT NULL,
    hints_dropped        BIGINT  NOT NULL,
    hints_in_flight      BIGINT  NOT NULL,
    hinted_missing_bytes BIGINT  NOT NULL,
    hinted_read_bytes    BIGINT  NOT NULL,
    hint_ns              BIGINT  NOT NULL,
    named_accesses       BIGINT  NOT NULL,
    named_hits           BIGINT  NOT NULL
);

-- One row per native replay and layer, over its measured steps that ended.
-- Key: run_id, layer_id
CREATE TABLE replay_layer (
    run_id              VARCHAR NOT NULL,
    layer_id            BIGINT  NOT NULL,
    events              BIGINT  NOT NULL,
    accesses            BIGINT  NOT NULL,
    demand_bytes        BIGINT  NOT NULL,
    observed_accesses   BIGINT  NOT NULL,
    native_hits         BIGINT  NOT NULL,
    native_partial_hits BIGINT  NOT NULL,
    native_misses       BIGINT  NOT NULL,
    native_hit_rate     DOUBLE,
    missing_bytes       BIGINT,
    simulated_hits      BIGINT,
    simulated_misses    BIGINT,
    stall_ns            BIGINT  NOT NULL,
    stall_median_ns     BIGINT  NOT NULL,
    stall_p99_ns        BIGINT  NOT NULL
);

-- One row per native replay and accounting identity it was held against.
-- Key: run_id, name
CREATE TABLE replay_proof (
    run_id    VARCHAR NOT NULL,
    name      VARCHAR NOT NULL,
    spoils    VARCHAR NOT NULL,
    expected  VARCHAR NOT NULL,
    found     VARCHAR NOT NULL,
    tolerance VARCHAR NOT NULL,
    held      BOOLEAN
);

-- One row per pool that was replayed against.
-- Key: pool_id
CREATE TABLE pool (
    pool_id          VARCHAR NOT NULL,
    layout           VARCHAR NOT NULL,
    content          VARCHAR,
    alignment_bytes  BIGINT  NOT NULL,
    moe_layers       BIGINT  NOT NULL,
    pool_experts     BIGINT  NOT NULL,
    pool_bytes       BIGINT  NOT NULL,
    expert_bytes_min BIGINT  NOT NULL,
    expert_bytes_max BIGINT  NOT NULL,
    files            BIGINT  NOT NULL,
    file_bytes       BIGINT  NOT NULL
);

-- One row per state of a machine, with the device that held the pool, that a run was measured in.
-- Key: machine_id
CREATE TABLE machine (
    machine_id          VARCHAR NOT NULL,
    architecture        VARCHAR NOT NULL,
    cpu_model           VARCHAR,
    cpus                BIGINT  NOT NULL,
    memory_bytes        BIGINT  NOT NULL,
    page_bytes          BIGINT  NOT NULL,
    kernel_release      VARCHAR NOT NULL,
    swap_bytes          BIGINT  NOT NULL,
    mglru               VARCHAR NOT NULL,
    thp                 VARCHAR,
    min_free_bytes      BIGINT,
    swappiness          BIGINT,
    damon               VARCHAR NOT NULL,
    virtualization      VARCHAR NOT NULL,
    numa_nodes          BIGINT,
    filesystem          VARCHAR,
    mount_options       VARCHAR,
    block_device        VARCHAR,
    block_device_model  VARCHAR,
    read_ahead_bytes    BIGINT,
    io_scheduler        VARCHAR,
    rotational          BOOLEAN,
    max_io_bytes        BIGINT,
    logical_block_bytes BIGINT
);

-- One row per experiment: what was asked for, and what its runs show so far.
-- Key: experiment_id
CREATE TABLE experiment (
    experiment_id            VARCHAR NOT NULL,
    experiment               VARCHAR NOT NULL,
    asks                     VARCHAR NOT NULL,
    run_order                VARCHAR NOT NULL,
    sizes                    VARCHAR NOT NULL,
    order_seed               BIGINT  NOT NULL,
    conditions               BIGINT  NOT NULL,
    repetitions              BIGINT  NOT NULL,
    machine_id               VARCHAR NOT NULL,
    definition               VARCHAR NOT NULL,
    runs                     BIGINT  NOT NULL,
    valid_runs               BIGINT  NOT NULL,
    finished                 BOOLEAN NOT NULL,
    digests_agree            BOOLEAN,
    relative_wall_difference DOUBLE,
    finding                  VARCHAR NOT NULL
);

-- One row per native replay that an experiment started.
-- Key: run_id
CREATE TABLE experiment_run (
    run_id        VARCHAR NOT NULL,
    experiment_id VARCHAR NOT NULL,
    trace_id      VARCHAR NOT NULL,
    condition     VARCHAR NOT NULL,
    tenant        VARCHAR,
    repetition    BIGINT  NOT NULL,
    attempt       BIGINT  NOT NULL,
    position      BIGINT  NOT NULL
);

-- One row per experiment, condition, tenant and metric.
-- Key: experiment_id, condition, tenant, metric
CREATE TABLE experiment_condition (
    experiment_id   VARCHAR NOT NULL,
    condition       VARCHAR NOT NULL,
    tenant          VARCHAR,
    metric          VARCHAR NOT NULL,
    runs            BIGINT  NOT NULL,
    valid_runs      BIGINT  NOT NULL,
    counted_runs    BIGINT  NOT NULL,
    median_value    DOUBLE,
    lowest_value    DOUBLE,
    highest_value   DOUBLE,
    relative_spread DOUBLE
);

-- One row per experiment, condition that is no baseline, tenant and metric.
-- Key: experiment_id, condition, tenant, metric
CREATE TABLE experiment_effect (
    experiment_id               VARCHAR NOT NULL,
    condition                   VARCHAR NOT NULL,
    tenant                      VARCHAR,
    metric                      VARCHAR NOT NULL,
    baseline                    VARCHAR NOT NULL,
    pairs                       BIGINT  NOT NULL,
    effect                      DOUBLE,
    effect_low                  DOUBLE,
    effect_high                 DOUBLE,
    self_low                    DOUBLE,
    self_high                   DOUBLE,
    outside_spread              BOOLEAN,
    inverse_capacity_deviation  DOUBLE,
    inverse_residency_deviation DOUBLE,
    monotone                    BOOLEAN
);

-- One row per lab: replays in guests and on the host that were asked for, and how far they are.
-- Key: lab_id
CREATE TABLE lab (
    lab_id      VARCHAR NOT NULL,
    lab         VARCHAR NOT NULL,
    asks        VARCHAR NOT NULL,
    order_seed  BIGINT  NOT NULL,
    conditions  BIGINT  NOT NULL,
    repetitions BIGINT  NOT NULL,
    definition  VARCHAR NOT NULL,
    runs        BIGINT  NOT NULL,
    valid_runs  BIGINT  NOT NULL,
    finished    BOOLEAN NOT NULL
);

-- One row per native replay that a lab made; repetition is null where it was made to find mem= by.
-- Key: run_id
CREATE TABLE lab_run (
    run_id             VARCHAR NOT NULL,
    lab_id             VARCHAR NOT NULL,
    trace_id           VARCHAR NOT NULL,
    condition          VARCHAR NOT NULL,
    repetition         BIGINT,
    attempt            BIGINT  NOT NULL,
    position           BIGINT  NOT NULL,
    place              VARCHAR NOT NULL,
    mglru_setting      VARCHAR,
    boot_id            VARCHAR,
    boot_position      BIGINT,
    boot_runs          BIGINT,
    boot_starts        BIGINT,
    guest_memory_bytes BIGINT,
    boot_limit_bytes   BIGINT,
    accelerator        VARCHAR,
    qemu_version       VARCHAR,
    kernel_package     VARCHAR,
    compiled_files     BIGINT
);

-- One row per decode that was measured, its experts served through the tier.
-- Key: run_id
CREATE TABLE decode_run (
    run_id              VARCHAR NOT NULL,
    started_at          VARCHAR NOT NULL,
    condition_hash      VARCHAR NOT NULL,
    pool_id             VARCHAR NOT NULL,
    machine_id          VARCHAR NOT NULL,
    replayer_version    VARCHAR NOT NULL,
    model               VARCHAR NOT NULL,
    model_folder        VARCHAR NOT NULL,
    computed_by         VARCHAR NOT NULL,
    compute_dtype       VARCHAR NOT NULL,
    prompt_name         VARCHAR NOT NULL,
    prompt_sha256       VARCHAR NOT NULL,
    prompt_tokens       BIGINT  NOT NULL,
    decoded_tokens      BIGINT  NOT NULL,
    bytes_valid         BOOLEAN NOT NULL,
    bytes_reasons       VARCHAR NOT NULL,
    time_valid          BOOLEAN NOT NULL,
    time_reasons        VARCHAR NOT NULL,
    degenerate          BOOLEAN NOT NULL,
    owner               VARCHAR NOT NULL,
    policy              VARCHAR,
    mechanism           VARCHAR NOT NULL,
    threads             BIGINT  NOT NULL,
    warm_pass           BOOLEAN NOT NULL,
    capacity_bytes      BIGINT,
    wall_bytes          BIGINT,
    accesses            BIGINT  NOT NULL,
    demand_bytes        BIGINT  NOT NULL,
    device_bytes        BIGINT,
    token_sha256        VARCHAR NOT NULL,
    warm_token_sha256   VARCHAR,
    warm_up_ns          BIGINT,
    first_token_ns      BIGINT  NOT NULL,
    first_token_wait_ns BIGINT  NOT NULL,
    decode_ns           BIGINT  NOT NULL,
    decode_wait_ns      BIGINT  NOT NULL,
    decode_rest_ns      BIGINT  NOT NULL,
    decode_passes       BIGINT  NOT NULL,
    decode_ns_per_token DOUBLE
);

-- One row per decode, MoE layer and phase.
-- Key: run_id, decode_phase, layer_id
CREATE TABLE decode_layer (
    run_id             VARCHAR NOT NULL,
    decode_phase       VARCHAR NOT NULL,
    layer_id           BIGINT  NOT NULL,
    events             BIGINT  NOT NULL,
    accesses           BIGINT  NOT NULL,
    layer_wait_ns      BIGINT  NOT NULL,
    layer_compute_ns   BIGINT  NOT NULL,
    layer_lookahead_ns BIGINT  NOT NULL
);

-- One row per pair of decodes of one prompt by two owners.
-- Key: decode_pair_id
CREATE TABLE decode_pair (
    decode_pair_id       VARCHAR NOT NULL,
    pairs_id             VARCHAR NOT NULL,
    model                VARCHAR NOT NULL,
    model_folder         VARCHAR NOT NULL,
    prompt_name          VARCHAR NOT NULL,
    prompt_sha256        VARCHAR NOT NULL,
    decoded_tokens       BIGINT  NOT NULL,
    pair                 BIGINT  NOT NULL,
    order_seed           BIGINT  NOT NULL,
    owner                VARCHAR NOT NULL,
    against              VARCHAR NOT NULL,
    first_owner          VARCHAR NOT NULL,
    owner_run_id         VARCHAR NOT NULL,
    against_run_id       VARCHAR NOT NULL,
    owner_token_sha256   VARCHAR NOT NULL,
    against_token_sha256 VARCHAR NOT NULL,
    identical            BOOLEAN NOT NULL,
    void_reason          VARCHAR,
    owner_time_valid     BOOLEAN NOT NULL,
    against_time_valid   BOOLEAN NOT NULL,
    owner_decode_ns      BIGINT  NOT NULL,
    against_decode_ns    BIGINT  NOT NULL
);
