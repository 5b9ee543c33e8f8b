"""Messages between front ends, engines and the coordinator.

Field order and names are those of the vLLM 0.32 wire, so that either side may be a vLLM process. Array-like structs
may be shorter (defaults) or longer (extras ignored) on the wire; the `dpi` dialect appends fields at the end of them
and keys to the maps. No field is ever unpickled and no name received is ever looked up as an attribute.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

WIRE_VERSION = 3
"""Version of the `dpi` dialect; peers with another version are refused at HELLO. Raised with every change of a
message's form, which tests/wire/wire_forms.py holds to."""

DEAD_SENTINEL = b"ENGINE_CORE_DEAD"
"""Raw frame an engine sends to every front end when it dies."""


class Dialect(enum.StrEnum):
    """Which bytes a head speaks to its ranks (`--data-parallel-protocol`)."""

    DPI = "dpi"
    VLLM = "vllm"


class RequestType(bytes, enum.Enum):
    """First frame of a message to an engine."""

    ADD = b"\x00"
    ABORT = b"\x01"
    START_DP_WAVE = b"\x02"
    UTILITY = b"\x03"


class OutputKind(enum.IntEnum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class FinishReason(enum.IntEnum):
    """Why a request ended; `name.lower()` is the word that clients see."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4


class EventType(enum.IntEnum):
    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class SamplingParams(msgspec.Struct, omit_defaults=True, kw_only=True):
    """How one request's tokens are chosen. A map on the wire, defaults left out.

    `logprobs`: number of alternatives per token, 0 for the sampled token alone, None for none.
    `top_k` 0 and -1 mean no limit. Stop *strings* (`stop`) and `include_stop_str_in_output` are the front end's work.
    `eos_token_id` is the tokenizer's; `all_stop_token_ids` is the set the core stops at (unless `ignore_eos`, for eos).
    `bad_words_token_ids` are the sequences that `bad_words` encode to.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: OutputKind = OutputKind.CUMULATIVE
    skip_clone: bool = False
    bad_words: list[str] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    eos_token_id: int | None = msgspec.field(default=None, name="_eos_token_id")
    all_stop_token_ids: list[int] | None = msgspec.field(default=None, name="_all_stop_token_ids")
    bad_words_token_ids: list[list[int]] | None = msgspec.field(default=None, name="_bad_words_token_ids")


class EngineCoreRequest(msgspec.Struct, array_like=True, kw_only=False):
    """ADD. The first 22 fields are vLLM's; those after them belong to the `dpi` dialect."""

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: list[Any] | None = None
    sampling_params: SamplingParams | None = None
    pooling_params: Any = None
    arrival_time: float = 0.0
    lora_request: Any = None
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    prompt_embeds: Any = None
    prompt_is_token_ids: list[bool] | None = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: dict[str, str] | None = None
    resumable: bool = False
    external_req_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    abort_immediately: bool = False
    session_id: str | None = None
    kv_hints: Any = None
    # -- dpi dialect --
    output_token_ids: list[int] = []
    epoch: int = 0  # epoch of the rank this was sent to; another one is stale and refused


VLLM_REQUEST_FIELDS = 22


class LogprobsLists(msgspec.Struct, array_like=True):
    """Log probabilities of k+1 tokens at each of t positions: the sampled token first, then the top k.

    token_ids [t][k+1] int, logprobs [t][k+1] float (natural log), ranks [t] int (1 is the most likely).
    """

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    ranks: list[int]


class PrefillStats(msgspec.Struct):
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_local_cached_tokens: int = 0
    num_external_cached_tokens: int = 0
    num_cache_creation_tokens: int = 0


class EngineCoreEvent(msgspec.Struct):
    type: EventType
    timestamp: float


class EngineCoreOutput(msgspec.Struct, array_like=True):
    """New tokens of one request; 18 fields as vLLM, then ours."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobsLists | None = None
    new_prompt_logprobs_tensors: LogprobsLists | None = None
    pooling_output: Any = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: list[EngineCoreEvent] | None = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    trace_headers: dict[str, str] | None = None
    prefill_stats: PrefillStats | None = None
    routed_experts: Any = None
    num_nans_in_logits: int = 0
    mm_cache_miss_hashes: Any = None
    new_sampling_mask: Any = None
    spec_decode_metrics: Any = None
    prompt_token_id_logprobs: Any = None
    # -- dpi dialect --
    output_index: int = (
        0  # index of new_token_ids[0] among the request's output tokens; the front end delivers each once
    )
    error: str | None = None  # message for finish_reason ERROR


class UtilityOutput(msgspec.Struct, array_like=True):
    call_id: int
    failure_message: str | None = None
    result: Any = None  # [type_info, value]; type_info is None


class PrefixCacheStats(msgspec.Struct):
    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    hits_by_source: dict[str, int] = {}


class SchedulerStats(msgspec.Struct):
    """Map of 18; prefix cache numbers are deltas since the last report."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    num_kv_fetch_reqs_by_stage: dict[str, int] = {}
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_usage: float = 0.0
    iteration_details: Any = None
    prefix_cache_stats: PrefixCacheStats = msgspec.field(default_factory=PrefixCacheStats)
    connector_prefix_cache_stats: Any = None
    kv_cache_eviction_events: list[Any] = []
    spec_decoding_stats: Any = None
    kv_connector_stats: Any = None
    ec_connector_stats: Any = None
    waiting_lora_adapters: dict[str, int] = {}
    running_lora_adapters: dict[str, int] = {}
    cudagraph_stats: Any = None
    perf_stats: Any = None


class LoadRecord(msgspec.Struct, array_like=True):
    """A rank's load in the `dpi` dialect: absolute numbers under a sequence number, in place of the 18-key map."""

    rank: int
    epoch: int
    seq: int
    waiting: int
    running: int
    kv_usage: float
    waiting_tokens: int = 0  # prompt tokens not yet computed
    preemptions: int = 0  # total since start
    prefix_queries: int = 0  # total tokens since start
    prefix_hits: int = 0  # total tokens since start
    sleep_level: int = 0  # 0 awake, 1 without KV cache, 2 without weights
    # ranks in lockstep: epoch of the group of ranks (0: none, or not in lockstep), wave, and what the rank does in it
    group: int = 0
    wave: int = 0
    pace: int = 0  # a Pace


class Pace(enum.IntEnum):
    """What a rank in lockstep does: `HELD` is rest that a wake-up does not end, since the group is paused."""

    REST = 0
    ENGAGED = 1
    HELD = 2


class EngineCoreOutputs(msgspec.Struct, array_like=True):
    """One message per front end and step; 9 fields as vLLM, then ours."""

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None
    finished_requests: list[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None
    weight_version: str | None = None
    # -- dpi dialect --
    epoch: int = 0
    load: LoadRecord | None = None
    step_tokens: int = 0  # tokens that the step computed; in one message of each step only


VLLM_OUTPUT_FIELDS = 18
VLLM_OUTPUTS_FIELDS = 9


class ReadyResponse(msgspec.Struct, kw_only=True):
    """First message of an engine on each input socket: what the front end must know of it. Makes the ROUTER's route."""

    max_model_len: int
    num_gpu_blocks: int
    block_size: int
    dp_stats_address: str | None = None
    dtype: str = "auto"
    vllm_version: str = ""
    world_size: int = 1
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    data_parallel_rank: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    instance_id: str = ""
    supports_lora: bool = False
    max_loras: int = 0
    epoch: int = 0  # dpi dialect only: the epoch under which this rank sends


class RankState(enum.StrEnum):
    """Where a rank stands; only READY gets new work."""

    NEW = "NEW"
    HELLO = "HELLO"
    LOADING = "LOADING"
    READY = "READY"
    SUSPECT = "SUSPECT"
    LOST = "LOST"


class RankInfo(msgspec.Struct, kw_only=True):
    """One rank as `/ranks`, `dpi ranks` and the operator see it. Ages are seconds at the time of the answer."""

    rank: int
    state: RankState = RankState.NEW
    stage: str = ""  # what a loading rank is doing, or why a lost one was lost
    epoch: int = 0
    boot_id: str = ""
    local: bool = True
    pod: str = ""
    fingerprint: str = ""
    fields: dict[str, Any] = {}
    waiting: int = 0
    running: int = 0
    kv_usage: float = 0.0
    steps: int = 0
    step_age_s: float | None = None  # None: no step yet, or idle
    last_seen_s: float | None = None  # age of the last beat
    pid: int | None = None
    workers: list[int] = []  # processes that share its layers, this pod's ranks only, where there are several
    restarts: int = 0
    error: str = ""
