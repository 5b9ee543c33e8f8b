"""What users of other engines may ask for and this version does not have: refused by name, with what to do instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpi_engine.config.errors import ParallelError

if TYPE_CHECKING:
    from dpi_engine.config.settings import Settings

_NODES = "name each launch's ranks: -dp, -dpl and -dpr, with the head's address in -dpa and port in -dpp"
_LORA = "merge the adapter into the weights and serve the result as a model of its own"
_MOE = "experts are spread in order over all ranks, with --enable-expert-parallel; leave it out"
_MULTIMODAL = "only text is served; leave it out"
_SPECULATIVE = "each step makes one token per sequence; leave it out"
_QUANTIZED = "--quantization int8 or fp8 quantizes any model when it is loaded, and a GGUF file needs no flag"
_TLS = "end TLS in the proxy or gateway before the server"
_KERNELS = "choose kernels with --ops"
_GRAMMAR = "answers follow no grammar or tool format in this version; leave it out"
_TRANSFER = "KV blocks stay in their rank; leave it out"
_HUB = "fetch the model first and name its folder, or name hf://ORG/NAME@REVISION"
_RUNNER = "only text generation is served; leave it out"
_COORDINATION = "the coordinator needs no tuning for dense models; leave it out"

_PLUGIN = "nothing is loaded from outside the package; leave it out"
_METRICS = "/metrics and /ranks are always there; leave it out"
_PER_REQUEST = "give it in each request"
_NOTHING = "it tunes what this engine does not have; leave it out"

# Exact names, or beginnings of names when they end in "*".
_ADVICE: tuple[tuple[str, str], ...] = (
    ("--nnodes -n --node-rank -r --master-addr --master-port", _NODES),
    ("--ray-* --distributed-executor-backend", "each rank is a process that its launch starts; leave it out"),
    ("--enable-lora --lora-* --max-lora* --max-cpu-loras --fully-sharded-loras --default-mm-loras", _LORA),
    ("--enable-moe-shared-loras --enable-mixed-moe-lora-format --enable-tower-connector-lora", _LORA),
    ("--specialize-active-lora", _LORA),
    (
        "--enable-eplb --eplb-* --all2all-backend --expert-placement-strategy --moe-backend --num-redundant-experts",
        _MOE,
    ),
    ("--enable-elastic-ep --elastic-ep-* --enable-ep-weight-filter --enable-dbo --dbo-* --ubatch-size", _MOE),
    ("--enable-return-routed-experts", _MOE),
    ("--enable-fault-tolerance --fault-tolerance-*", "lost ranks are always replaced alone; leave it out"),
    ("--disable-nccl-for-dp-synchronization --prefill-schedule-interval", _COORDINATION),
    ("--dp-supervisor-*", "ranks and front ends report to their supervisor four times a second; leave it out"),
    ("--decode-context-parallel-size -dcp --prefill-context-parallel-size -pcp --dcp-* --cp-*", "leave it out or at 1"),
    ("--swap-space --cpu-offload-* --offload-* --kv-offloading-*", "nothing is moved out of memory; leave it out"),
    ("--kv-cache-dtype-*", "all layers keep their KV cache in --kv-cache-dtype; leave it out"),
    ("--kv-transfer-config --kv-events-config --ec-* --kv-sharing-*", _TRANSFER),
    ("--quantization-config --allow-deprecated-quantization", _QUANTIZED),
    ("--speculative-config -sc --spec-*", _SPECULATIVE),
    ("--mm-* --limit-mm-per-prompt --media-* --allowed-*-media-* --allowed-local-media-path", _MULTIMODAL),
    (
        "--allowed-media-domains --interleave-mm-strings --skip-mm-profiling --enable-mm-* --disable-chunked-mm-input",
        _MULTIMODAL,
    ),
    ("--language-model-only --video-* --mamba-* --enable-mamba-*", _MULTIMODAL),
    ("--compilation-config -cc -O* --optimization-level --cudagraph-* --max-cudagraph-*", _KERNELS),
    ("--attention-config -ac --linear-backend --kernel-config --disable-cascade-attn", _KERNELS),
    ("--disable-custom-all-reduce --enable-flashinfer-autotune --model-impl --numa-bind*", _KERNELS),
    (
        "--enable-chunked-prefill",
        "prompts are always computed in chunks of at most --max-num-batched-tokens; leave it out",
    ),
    ("--async-scheduling --scheduler-* --max-num-scheduled-tokens --stream-interval", "leave it out"),
    ("--max-num-queued-tokens", "limit waiting requests with --max-num-queued-reqs"),
    ("--max-num-active-seqs", "limit sequences with --max-num-seqs"),
    ("--prefix-caching-hash-algo --prefix-cache-*", "prefix caching has one hash; leave it out"),
    (
        "--trust-remote-code --code-revision --hf-overrides --hf-config-path",
        "code that comes with a model is never run",
    ),
    ("--revision --tokenizer-revision --hf-token", _HUB),
    ("--download-dir", "name the folder with --cache-dir"),
    ("--model-loader-extra-config --safetensors-* --ignore-patterns --config-format", "leave it out"),
    (
        "--tokenizer-mode --skip-tokenizer-init",
        "the tokenizer is read from tokenizer.json or the GGUF file; leave it out",
    ),
    ("--generation-config --override-generation-config", "give defaults of sampling in each request"),
    ("--runner --task --convert --pooler-config", _RUNNER),
    ("--reasoning-* --tool-call-parser --tool-parser-plugin --enable-auto-tool-choice", _GRAMMAR),
    ("--structured-outputs-config --guided-decoding-*", _GRAMMAR),
    ("--uvicorn-* --disable-uvicorn-access-log --log-config-file --logging-config", "use --log-level and --log-format"),
    ("--disable-log-requests", "requests are logged only with --enable-log-requests; leave it out"),
    (
        "--disable-log-stats --otlp-* --collect-detailed-traces --show-hidden-*",
        _METRICS,
    ),
    ("--ssl-* --enable-ssl-refresh", _TLS),
    ("--root-path --allowed-origins --allowed-methods --allowed-headers --allow-credentials", _TLS),
    ("--grpc* --uds --fd", "HTTP over TCP is the one protocol; use --host and --port"),
    ("--enable-sleep-mode --sleep-*", "sleeping and waking need no flag; leave it out"),
    ("--device-ids", "choose devices with CUDA_VISIBLE_DEVICES"),
    ("--distributed-timeout-seconds --cpu-distributed-timeout-seconds", "bound the start with --handshake-timeout"),
    ("--long-prefill-token-threshold-adaptive", "give a number with --long-prefill-token-threshold"),
    ("--disable-sliding-window --swa-*", "each layer's window is what the model's config says; leave it out"),
    ("--logits-processors --io-processor-plugin --worker-cls --worker-extension-cls --middleware", _PLUGIN),
    ("--tool-server --model-class-overrides --weight-transfer-config", _PLUGIN),
    (
        "--logprobs-mode --return-sampling-mask --return-tokens-as-token-ids",
        "log probabilities have one form; leave it out",
    ),
    (
        "--enable-prompt-embeds --diffusion-config --engram-config --tokens-only --enable-flash-late-interaction",
        _RUNNER,
    ),
    ("--enable-prompt-tokens-details --enable-force-include-usage", "usage always counts cached tokens; leave it out"),
    ("--max-log-len --enable-log-outputs --enable-log-deltas --log-error-stack", "use --enable-log-requests"),
    ("--enable-logging-iteration-details --aggregate-engine-logging", "use --log-level"),
    ("--kv-cache-metrics* --custom-histogram-buckets --enable-mfu-metrics --enable-server-load-tracking", _METRICS),
    ("--enable-per-request-metrics --per-request-spec-decode-metrics --enable-layerwise-nvtx-tracing", _METRICS),
    ("--profiler-config --enable-trace-replay --jit-monitor-*", "leave it out"),
    ("--response-role --chat-template-content-format --default-chat-template-kwargs", _PER_REQUEST),
    ("--trust-request-mm-kwargs", "there are no multi-modal models in this version; leave it out"),
    # Tuning and features of the other engine that have no counterpart here.
    ("--performance-mode --additional-config --aux-output-config --max-parallel-loading-workers --use-*", _NOTHING),
    (
        "--disable-hybrid-kv-cache-manager --enable-batch-sharded-sampling --enable-cumem-allocator --enable-hc-sp",
        _NOTHING,
    ),
    ("--enable-nccl-comm-suspend --enable-shm-tensor-arena --fail-on-environ-validation --ir-op-priority", _NOTHING),
    ("--gdn-* --kda-* --replayssm-* --sparse-* --prefix-match-unit --pt-load-map-location", _NOTHING),
    ("--renderer-num-workers --watermark* --h11-* --disable-fastapi-docs --enable-offline-docs", _NOTHING),
    ("--disable-access-log-for-endpoints --enable-request-id-headers --enable-tokenizer-info-endpoint", _NOTHING),
    ("--sse-keep-alive-interval --enable-scale-out --fingerprint-* --cohere-* --anthropic-*", _NOTHING),
    ("--tool-strict-level --exclude-tools-when-tool-choice-none", _GRAMMAR),
)


def advice(option: str) -> str | None:
    """Why a flag of vLLM is refused and what to do, or None for one we never heard of."""
    plain = "--" + option[5:] if option.startswith("--no-") else option
    for names, text in _ADVICE:
        for name in names.split():
            if plain == name or (name.endswith("*") and plain.startswith(name[:-1])):
                return f"flag {option} is not in this version: {text}."
    return None


def shares_experts(settings: Settings) -> bool:
    """Ranks are asked to hold a part of the experts each."""
    return settings.enable_expert_parallel and settings.data_parallel_size > 1


def refuse_unbuilt(settings: Settings) -> None:
    """Raise ParallelError for a layout that is declared but not built. One item each: building it deletes the item."""
    unbuilt = (
        (
            settings.data_parallel_backend == "ray",
            "--data-parallel-backend ray (-dpb)",
            "use mp and start one launch per machine, the others than the head with --headless",
        ),
        (
            settings.tensor_parallel_size > 1 and settings.enable_expert_parallel,
            f"--tensor-parallel-size {settings.tensor_parallel_size} (-tp) with --enable-expert-parallel (-ep)",
            "leave one of them out: with -tp alone the workers of a rank share each expert, with -ep alone the ranks "
            "share the experts",
        ),
        (
            settings.pipeline_parallel_size > 1,
            f"--pipeline-parallel-size {settings.pipeline_parallel_size} (-pp)",
            "use 1 and more ranks with --data-parallel-size",
        ),
        (
            shares_experts(settings) and settings.data_parallel_protocol == "vllm",
            "--enable-expert-parallel (-ep) with --data-parallel-protocol vllm",
            "ranks that share experts are all of one kind: leave the protocol out, or the experts on every rank",
        ),
        (
            settings.quantization not in (None, "int8", "fp8"),
            f"--quantization {settings.quantization} (-q)",
            "int8 and fp8 quantize any model when it is loaded; a GGUF file of quantized weights needs no flag",
        ),
        (
            settings.quantization is not None and settings.dtype not in ("auto", "bfloat16"),
            f"--quantization {settings.quantization} (-q) with --dtype {settings.dtype}",
            "activations are bfloat16 between the linears: leave --dtype out",
        ),
        (
            settings.quantization == "fp8" and settings.device == "cpu" and settings.ops != "torch",
            "--quantization fp8 (-q) with --device cpu",
            "it is for GPUs: use int8 on CPUs; --ops torch computes fp8 there too, many times slower",
        ),
        (
            settings.kv_cache_dtype != "auto" and settings.device == "cpu" and settings.ops != "torch",
            f"--kv-cache-dtype {settings.kv_cache_dtype} with --device cpu",
            "it is for GPUs: leave one of them out; --ops torch computes it there too, many times slower",
        ),
        (
            settings.attention_backend != "auto" and (settings.device == "cpu" or settings.ops in ("torch", "cpu")),
            f"--attention-backend {settings.attention_backend} with --device cpu or --ops {settings.ops}",
            "it chooses among kernels for GPUs: leave it out",
        ),
        (
            settings.kv_cache_dtype != "auto" and settings.data_parallel_protocol == "vllm",
            f"--kv-cache-dtype {settings.kv_cache_dtype} with --data-parallel-protocol vllm",
            "ranks of the other side round otherwise and would give different answers: leave it out",
        ),
        (
            settings.quantization is not None and settings.data_parallel_protocol == "vllm",
            f"--quantization {settings.quantization} (-q) with --data-parallel-protocol vllm",
            "the other side has no such form, and ranks would give different answers: leave it out",
        ),
        (
            settings.block_size != 16,
            f"--block-size {settings.block_size}",
            "the kernels work on blocks of 16: leave it out",
        ),
    )
    lines = [f"{what} is not in this version: {instead}." for wanted, what, instead in unbuilt if wanted]
    if lines:
        raise ParallelError("\n".join(lines))
