"""The one list of metrics: name, type, labels, help. Code and docs/reference/metrics.md are both made from it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

ENGINE_LABELS = ("model_name", "engine")

LATENCY_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
NEXT_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N_BUCKETS = (1, 2, 5, 10, 20)
HTTP_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Kind(StrEnum):
    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    `name` is as scraped (a counter ends in `_total`). `buckets` () on a histogram: the 1-2-5 series up to the model's
    length limit. `sums`: a gauge that is added up over API server processes, where others show the newest value.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ENGINE_LABELS
    buckets: tuple[float, ...] = ()
    sums: bool = False


G, C, H = Kind.GAUGE, Kind.COUNTER, Kind.HISTOGRAM

METRICS: tuple[Metric, ...] = (
    Metric("vllm:num_requests_running", G, "Requests that the rank computes in its steps."),
    Metric("vllm:num_requests_waiting", G, "Requests in the rank's queue."),
    Metric("vllm:kv_cache_usage_perc", G, "Share of the rank's KV cache blocks in use, 0 to 1."),
    Metric(
        "vllm:engine_sleep_state",
        G,
        "1 for the state the rank is in: awake, weights_offloaded or discard_all.",
        (*ENGINE_LABELS, "sleep_state"),
    ),
    Metric(
        "vllm:cache_config_info",
        G,
        "Always 1; the labels say how the rank's KV cache is laid out.",
        (*ENGINE_LABELS, "block_size", "num_gpu_blocks", "cache_dtype"),
    ),
    Metric("vllm:num_preemptions_total", C, "Requests put back into the queue because KV cache blocks ran out."),
    Metric("vllm:prefix_cache_queries_total", C, "Prompt tokens looked up in the prefix cache."),
    Metric("vllm:prefix_cache_hits_total", C, "Prompt tokens found in the prefix cache."),
    Metric("vllm:prompt_tokens_total", C, "Prompt tokens of requests that gave a first token."),
    Metric("vllm:prompt_tokens_cached_total", C, "Those of them that came out of the prefix cache."),
    Metric("vllm:generation_tokens_total", C, "Tokens generated."),
    Metric(
        "vllm:request_success_total",
        C,
        "Requests ended, by reason: stop, length, abort, error or repetition.",
        (*ENGINE_LABELS, "finished_reason"),
    ),
    Metric("vllm:request_prompt_tokens", H, "Prompt tokens per request."),
    Metric("vllm:request_generation_tokens", H, "Generated tokens per request."),
    Metric("vllm:request_max_num_generation_tokens", H, "Most tokens that any choice of a request generated."),
    Metric("vllm:request_params_n", H, "Choices asked for (n).", buckets=N_BUCKETS),
    Metric("vllm:request_params_max_tokens", H, "Tokens that a request may generate."),
    Metric("vllm:iteration_tokens_total", H, "Tokens computed per engine step.", buckets=STEP_TOKEN_BUCKETS),
    Metric(
        "vllm:time_to_first_token_seconds",
        H,
        "From arrival to the first token, queue included.",
        buckets=FIRST_TOKEN_BUCKETS,
    ),
    Metric("vllm:inter_token_latency_seconds", H, "Between two tokens of a request.", buckets=NEXT_TOKEN_BUCKETS),
    Metric(
        "vllm:request_time_per_output_token_seconds",
        H,
        "Mean time per token after the first, per request.",
        buckets=NEXT_TOKEN_BUCKETS,
    ),
    Metric("vllm:e2e_request_latency_seconds", H, "From arrival to the last token.", buckets=LATENCY_BUCKETS),
    Metric("vllm:request_queue_time_seconds", H, "From the queue to the first step.", buckets=LATENCY_BUCKETS),
    Metric("vllm:request_prefill_time_seconds", H, "From the first step to the first token.", buckets=LATENCY_BUCKETS),
    Metric("vllm:request_decode_time_seconds", H, "From the first token to the last.", buckets=LATENCY_BUCKETS),
    Metric("vllm:request_inference_time_seconds", H, "From the first step to the last token.", buckets=LATENCY_BUCKETS),
    Metric(
        "http_requests_total",
        C,
        "HTTP requests by route, method and class of status (2xx, 4xx, 499 for a client that left).",
        ("handler", "method", "status"),
    ),
    Metric(
        "http_request_duration_seconds",
        H,
        "From the request's head to the end of the answer, streams included.",
        ("handler", "method"),
        HTTP_BUCKETS,
    ),
    Metric(
        "dpi_http_requests_in_flight",
        G,
        "Requests for completions that are being answered.",
        ("model_name",),
        sums=True,
    ),
    Metric("dpi_rank_state", G, "1 for the state the rank is in, 0 for the others.", (*ENGINE_LABELS, "state")),
    Metric("dpi_rank_epoch", G, "How often the rank joined: its epoch."),
    Metric("dpi_rank_waiting_tokens", G, "Prompt tokens in the rank's queue that are yet to be computed."),
    Metric("dpi_requests_replayed_total", C, "Requests of the rank that went on at another one after it was lost."),
    Metric(
        "dpi_wire_malformed_frames_total",
        C,
        "Messages dropped because they could not be read, by socket and reason.",
        ("socket", "reason"),
    ),
)


POD_METRICS: tuple[Metric, ...] = (
    Metric("dpi_pod_ready", G, "1 while this pod may get traffic (/readyz).", ()),
    Metric("dpi_process_restarts_total", C, "Restarts of the pod's processes.", ("process",)),
    Metric("dpi_handshake_refusals_total", C, "Messages of ranks that the head refused, by reason.", ("reason",)),
    Metric(
        "dpi_rank_head_connected",
        G,
        "1 while the group's head keeps the rank's lease too; of pods whose front ends have ranks of their own.",
    ),
    Metric("dpi_engine_steps_total", C, "Steps that the rank computed since its process started."),
    Metric("dpi_engine_step_age_seconds", G, "How long the step in progress has taken; 0 between steps."),
    Metric("dpi_lockstep_group", G, "Epoch of the group that the rank steps in; 0 while the group is broken."),
    Metric("dpi_lockstep_waves_total", C, "Waves with work that the rank took part in."),
    Metric("dpi_lockstep_syncs_total", C, "Looks at whether any rank has work."),
    Metric("dpi_lockstep_dummy_steps_total", C, "Steps that the rank took part in without work of its own."),
    Metric("dpi_lockstep_group_breaks_total", C, "Groups that ended under the rank: a rank or a link was lost."),
    Metric("dpi_lockstep_groups_formed_total", C, "Groups that the rank was linked in, the first one included."),
    Metric(
        "dpi_lockstep_exchange_seconds_total",
        C,
        "Time in exchanges with the other ranks, the wait for the slowest included.",
    ),
)
"""Only on the management port; `dpi_lockstep_*` only where ranks share experts."""


def token_buckets(max_model_len: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, ... up to the model's length limit."""
    result: list[float] = []
    power = 1
    while True:
        for digit in (1, 2, 5):
            value = digit * power
            if value > max(max_model_len, 1):
                return tuple(result)
            result.append(float(value))
        power *= 10


def reference_page() -> str:
    """docs/reference/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Served at `/metrics`, without a key. Names that begin with `vllm:` and their labels are those that dashboards",
        "for vLLM query; the others are ours. `engine` is the global rank, `model_name` the first served name. With",
        "several API server processes counters and histograms are summed over them and gauges are the newest value,",
        "unless said. Tokens and loads of the processes that did not answer the scrape are up to a second old.",
        "",
        "Generated from `dpi_engine/server/metrics_table.py` by `python -m dpi_engine.server.metrics_table`.",
        "",
        "| name | type | labels | meaning |",
        "|---|---|---|---|",
    ]
    for metric in (*METRICS, *POD_METRICS):
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        note = " Summed over API server processes." if metric.sums else ""
        if metric in POD_METRICS:
            shared = " where ranks share experts" if metric.name.startswith("dpi_lockstep_") else ""
            note = f" Management port only{shared}."
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help}{note} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(reference_page(), end="")
