"""From a spec to a computing engine: model spec, ops, weights, KV cache, scheduler. Each stage tells what it does."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpi_engine.config import fingerprint
from dpi_engine.config.errors import ConfigError
from dpi_engine.config.experts import ExpertPlacement
from dpi_engine.config.machine import usable_cpus
from dpi_engine.config.model_spec import ModelSpec
from dpi_engine.config.parallel import Ports
from dpi_engine.config.sources import ModelFiles, resolve_model
from dpi_engine.config.tensor_parallel import check_tensor_parallel
from dpi_engine.core.ahead import AheadCore
from dpi_engine.core.coupled import DeviceGroup
from dpi_engine.core.engine import EngineCore
from dpi_engine.core.limits import Policy, SchedulerConfig
from dpi_engine.core.scheduler import Scheduler
from dpi_engine.launch.spec import ChildSpec
from dpi_engine.launch.torch_import import import_torch
from dpi_engine.tokenizer.spec import read_spec
from dpi_engine.wire.exchange.mesh import Mesh
from dpi_engine.wire.messages import WIRE_VERSION

if TYPE_CHECKING:  # torch comes late: its import takes seconds, which the head is told of
    from dpi_engine.launch.tensor_workers import TensorWorkers
    from dpi_engine.models.registry import Model
    from dpi_engine.ops.exchange import ExpertExchange
    from dpi_engine.ops.interface import Ops
    from dpi_engine.ops.tensor_group import TensorGroup
    from dpi_engine.worker.memory import Memory
    from dpi_engine.worker.runner import Model as RunnerModel

log = logging.getLogger(__name__)

Progress = Callable[[str, float | None], None]


@dataclasses.dataclass(slots=True)
class LoadedEngine:
    """A core that can step, and what the handshake and the front ends are told about it."""

    core: EngineCore
    spec: ModelSpec
    max_model_len: int
    num_blocks: int
    block_size: int
    dtype: str
    resolved: dict[str, Any]
    load_s: float
    workers: TensorWorkers | None = None
    devices: DeviceGroup | None = None  # where ranks share experts and exchange between devices


def longest(settings_len: int | None, spec: ModelSpec) -> int:
    """The length limit in tokens. Raises ConfigError when more is asked for than the model was made for."""
    if settings_len is None:
        return spec.max_position_embeddings
    if settings_len > spec.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {settings_len} is more than the {spec.max_position_embeddings} positions of the model"
        )
    return settings_len


@dataclasses.dataclass(slots=True)
class Parts:
    """What a worker's part of the model is made from. `sharers`: ranks of the launch on this worker's device."""

    child: ChildSpec
    files: ModelFiles
    spec: ModelSpec
    max_model_len: int
    ops: Ops
    sharers: int
    progress: Progress

    @classmethod
    def of(
        cls,
        child: ChildSpec,
        dtype: str,
        progress: Progress,
        worker: int = 0,
        began: Callable[[ModelSpec, int], None] | None = None,
    ) -> Parts:
        """Everything but the weights, for worker `worker` of the rank. `began(spec, max_model_len)` is told as soon as
        both are known. Raises ConfigError, OpsUnavailable.
        """
        settings = child.settings
        progress("reading the model's configuration", None)
        cache_dir = Path(child.cache_dir)
        files = resolve_model(child.model_path, cache_dir, weightless=settings.load_format == "dummy")
        spec = read_spec(files)
        max_len = longest(settings.max_model_len, spec)
        check_tensor_parallel(spec, settings.tensor_parallel_size)
        if spec.mla is not None and settings.kv_cache_dtype != "auto":
            raise ConfigError(
                f"--kv-cache-dtype {settings.kv_cache_dtype}: {spec.architecture} caches latents, which are kept in "
                "--dtype: leave it out"
            )
        progress("importing torch", None)
        import_torch()
        import torch

        from dpi_engine.ops import select_ops
        from dpi_engine.ops.interface import PAGE_SIZE
        from dpi_engine.worker.placement import place_worker

        if settings.block_size != PAGE_SIZE:
            raise ConfigError(
                f"--block-size {settings.block_size}: this version's kernels have pages of {PAGE_SIZE} tokens"
            )
        if began is not None:
            began(spec, max_len)
        progress("preparing kernels", None)
        gpus = 0 if settings.device == "cpu" else torch.cuda.device_count()
        size = settings.tensor_parallel_size
        placement = place_worker(settings.device, child.local_rank, child.local_ranks, size, worker, gpus)
        if placement.device.startswith("cuda"):
            place_beside(placement.device, child.index)
        ops = select_ops(
            placement.device, dtype, settings.ops, child.threads, cache_dir, settings.quantization,
            settings.kv_cache_dtype, settings.attention_backend, None if spec.mla is not None else spec.head_dim,
        )  # fmt: skip
        return cls(child, files, spec, max_len, ops, placement.sharers, progress)

    def open_model(self, group: TensorGroup | None = None, exchange: ExpertExchange | None = None) -> Model:
        """Read the weights, only this worker's part of them. Raises ConfigError, OpsUnavailable."""
        from dpi_engine.models.registry import load_model

        settings = self.child.settings
        return load_model(
            self.files,
            self.spec,
            self.ops,
            max_model_len=self.max_model_len,
            cache_dir=Path(self.child.cache_dir),
            load_format=settings.load_format,
            seed=settings.seed,
            progress=self.progress,
            exchange=exchange,
            group=group,
        )


def place_beside(device: str, rank: int) -> None:
    """Say which GPU the rank computes on, and run on the cores beside it."""
    import torch

    from dpi_engine.worker.numa import bus_of, pin_to_device
    from dpi_engine.worker.placement import ignored_variables, visible_device

    place, hip = torch.device(device), torch.version.hip is not None
    log.info("rank %d computes on %s", rank, visible_device(place.index or 0, os.environ, hip))
    if others := ignored_variables(os.environ, hip):
        log.warning("%s: of another kind of device, without effect here", ", ".join(others))
    if torch.cuda.is_available():
        pin_to_device(bus_of(torch.cuda.get_device_properties(place)))


def load(child: ChildSpec, dtype: str, progress: Progress, mesh: Mesh | None = None) -> LoadedEngine:
    """Everything up to the first step. `dtype` is what the head settled, or `auto`. `mesh`: links to the ranks that
    share the experts; this rank then holds its part of them. The other workers of the rank are started.

    Raises ConfigError, OpsUnavailable, NotEnoughCacheMemory and WorkerLost; all name the cause and the remedy.
    """
    with contextlib.ExitStack() as failed:
        engine = _load(child, dtype, progress, mesh, failed)
        failed.pop_all()
    return engine


def _load(
    child: ChildSpec, dtype: str, progress: Progress, mesh: Mesh | None, failed: contextlib.ExitStack
) -> LoadedEngine:
    """`failed`: what to do when it ends in an error."""
    settings = child.settings
    began = time.monotonic()
    workers: TensorWorkers | None = None

    def start_workers(spec: ModelSpec, max_len: int) -> None:
        nonlocal workers
        if settings.tensor_parallel_size == 1:
            return
        from dpi_engine.launch.tensor_workers import TensorWorkers

        workers = TensorWorkers(child, dtype, max_len)
        failed.callback(workers.close)

    parts = Parts.of(child, dtype, progress, began=start_workers)
    files, spec, max_len, ops = parts.files, parts.spec, parts.max_model_len, parts.ops
    from dpi_engine.ops.interface import PAGE_SIZE
    from dpi_engine.wire.exchange.device_experts import DeviceExperts
    from dpi_engine.wire.exchange.device_links import DeviceLinks
    from dpi_engine.wire.exchange.experts import MeshExperts
    from dpi_engine.worker.ahead_runner import AheadRunner
    from dpi_engine.worker.linked_devices import LinkedDevices
    from dpi_engine.worker.memory import device_memory, plan_blocks
    from dpi_engine.worker.placement import check_own_device
    from dpi_engine.worker.profile import step_bytes
    from dpi_engine.worker.runner import Runner
    from dpi_engine.worker.sharded_model import ShardedModel
    from dpi_engine.worker.weight_size import check_weights_fit

    exchange: MeshExperts | DeviceExperts | None = None
    links: DeviceLinks | None = None
    placed: ExpertPlacement | None = None
    if mesh is not None and spec.moe is not None:
        placed = ExpertPlacement(spec.moe.num_experts, mesh.size, mesh.rank)
    if ops.device.type == "cuda":
        if mesh is not None:
            check_own_device(str(ops.device), parts.sharers, child.local_ranks)
        check_weights_fit(
            spec, ops.dtype, settings.tensor_parallel_size, device_memory(ops.device).total,
            settings.gpu_memory_utilization, parts.sharers, None if placed is None else len(placed.local),
            ops.quantization is not None,
        )  # fmt: skip
    if mesh is not None and spec.moe is not None and placed is not None:
        if ops.device.type == "cuda":
            store = (str(child.exchange[0]), Ports.of(settings).store)
            links = DeviceLinks(mesh, ops.device, "nccl", store)
            exchange = DeviceExperts(links, placed)
        else:
            exchange = MeshExperts(mesh, placed)
            # A peer's tokens of one step, in the widest type, with their choices.
            mesh.max_payload = 64 + settings.max_num_batched_tokens * (4 * spec.hidden_size + 8 * spec.moe.top_k)
    warming = contextlib.nullcontext if exchange is None else exchange.alone

    def open_model() -> RunnerModel:
        if workers is None:
            return parts.open_model(exchange=exchange)
        if not first:  # at the first time they load without being told
            workers.begin("load")
        first.clear()
        model = parts.open_model(workers.group(ops.device))
        memories[:] = workers.memories(workers.wait("load", progress=progress))
        return ShardedModel(model, workers.plans, workers.ask)

    first = [True]
    memories: list[Memory] = []
    processes = settings.tensor_parallel_size * child.local_ranks
    if workers is not None and child.local_rank == 0 and ops.device.type == "cpu" and processes > usable_cpus():
        log.warning(
            "%d workers of this launch share %d cores and wait for each other in every layer: fewer would be faster",
            processes, usable_cpus(),
        )  # fmt: skip
    model = open_model()
    # Its own process, whole layers, tokens drawn on the device: then a step can be launched before the last one ends.
    ahead = ops.draws and workers is None and (mesh is None or links is not None)
    step = 0
    if workers is None and ops.device.type == "cuda":  # workers share a step, and cannot compute one alone
        progress("measuring the largest step", None)
        with warming():
            step = step_bytes(model, ops, tokens=settings.max_num_batched_tokens, sequences=settings.max_num_seqs)
    progress("allocating the KV cache", None)
    # Workers on a CPU take their memory from one place; those on GPUs have one each, and the fullest decides.
    on_cpu = ops.device.type == "cpu"
    own = dataclasses.replace(device_memory(ops.device), step=step)
    budget = min(
        (
            plan_blocks(
                bytes_per_block=model.cache_bytes_per_block() * (settings.tensor_parallel_size if on_cpu else 1),
                max_model_len=max_len,
                device=ops.device,
                memory=memory,
                sharers=parts.sharers,
                num_gpu_blocks_override=settings.num_gpu_blocks_override,
                kv_cache_memory=settings.kv_cache_memory,
                utilization=settings.gpu_memory_utilization,
            )
            for memory in [own, *([] if on_cpu else memories)]
        ),
        key=lambda budget: budget.num_blocks,
    )
    runner = (AheadRunner if ahead else Runner)(
        model,
        ops,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=max_len,
        num_blocks=budget.num_blocks,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        reload=open_model,
        on_sleep=None if workers is None else functools.partial(workers.ask, "sleep"),
        meeting=exchange if isinstance(exchange, DeviceExperts) else None,
    )
    progress("warming up", None)
    with warming():
        warm_s = runner.warm_up()
    if isinstance(runner, AheadRunner) and not settings.enforce_eager:
        runner.record(progress)
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=budget.num_blocks,
            block_size=PAGE_SIZE,
            max_model_len=max_len,
            vocab_size=spec.vocab_size,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            policy=Policy(settings.scheduling_policy),
            long_prefill_token_threshold=settings.long_prefill_token_threshold,
            enable_prefix_caching=settings.enable_prefix_caching,
            max_logprobs=settings.max_logprobs,
            seed=settings.seed,
            cache_namespace=files.digest,
        )
    )
    seconds = time.monotonic() - began
    log.info(
        "loaded in %.2f s (warm-up %.2f s): %s, %s%s on %s, %s ops, %s%d threads; KV cache %d blocks, %d tokens (%s)",
        seconds,
        warm_s,
        spec.architecture,
        str(ops.dtype).removeprefix("torch."),
        "" if ops.quantization is None else f" with {ops.quantization} linears",
        ops.device,
        ops.name,
        "" if workers is None else f"{workers.size} workers of ",
        child.threads,
        budget.num_blocks,
        budget.tokens,
        budget.source,
    )
    dtype_name = str(ops.weight_dtype).removeprefix("torch.")
    resolved = fingerprint.resolved(
        settings,
        spec,
        weights_digest=files.digest,
        dtype=dtype_name,
        max_model_len=max_len,
        wire_version=WIRE_VERSION,
    )
    return LoadedEngine(
        core=(
            # A step of all ranks is waited for: whether a lost rank voids it must be known before the next is planned.
            AheadCore(scheduler, runner)
            if isinstance(runner, AheadRunner) and links is None
            else EngineCore(scheduler, runner)
        ),
        spec=spec,
        max_model_len=max_len,
        num_blocks=budget.num_blocks,
        block_size=PAGE_SIZE,
        dtype=dtype_name,
        resolved=resolved,
        load_s=seconds,
        workers=workers,
        devices=None if links is None else LinkedDevices(links, runner),
    )
