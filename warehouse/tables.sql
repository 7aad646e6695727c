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
-- step_begin, step_end, phase, warm_fraction, warm_steps, warm_pass, fit, seed
CREATE TABLE hit_rate (
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
    scored_steps           BIGINT  NOT NULL,
    selections             BIGINT  NOT NULL,
    accesses               BIGINT  NOT NULL,
    union_ratio            DOUBLE,
    hits                   BIGINT  NOT NULL,
    misses                 BIGINT  NOT NULL,
    hit_rate               DOUBLE,
    compulsory_misses      BIGINT  NOT NULL,
    demand_bytes           BIGINT,
    miss_bytes             BIGINT,
    preload_bytes          BIGINT
);

-- One row per point of a curve: the contract of hit_rate at many capacities.
-- Key: trace_id, policy, scope, semantics, access_order, dedup, capacity_experts_total, capacity_bytes,
-- step_begin, step_end, phase, warm_fraction, warm_steps, warm_pass, fit, seed
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
    accesses               BIGINT  NOT NULL,
    misses                 BIGINT  NOT NULL,
    miss_ratio             DOUBLE,
    demand_bytes           BIGINT,
    miss_bytes             BIGINT
);

-- One row per trace, predictor, distance, width and target layer, and one for all layers together.
-- Key: trace_id, predictor, fit, lookahead_layers, lookahead_steps, width, layer_id, phase
CREATE TABLE lookahead_recall (
    trace_id                  VARCHAR NOT NULL,
    predictor                 VARCHAR NOT NULL,
    fit                       VARCHAR,
    lookahead_layers          BIGINT  NOT NULL,
    lookahead_steps           BIGINT  NOT NULL,
    width                     BIGINT,
    layer_id                  BIGINT,
    phase                     VARCHAR NOT NULL,
    step_begin                BIGINT  NOT NULL,
    step_end                  BIGINT  NOT NULL,
    warm_steps                BIGINT  NOT NULL,
    events                    BIGINT  NOT NULL,
    covered_events            BIGINT  NOT NULL,
    hint_coverage             DOUBLE,
    accesses                  BIGINT  NOT NULL,
    covered_accesses          BIGINT  NOT NULL,
    predicted_experts         BIGINT  NOT NULL,
    predicted_accesses        BIGINT  NOT NULL,
    recall_all                DOUBLE,
    recall_covered            DOUBLE,
    precision                 DOUBLE,
    chance_predicted_accesses DOUBLE  NOT NULL,
    chance_recall_all         DOUBLE
);
