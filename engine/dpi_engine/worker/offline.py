"""Generation without sockets or front end, by the core that serves: for tests, benchmarks and checks of a device."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from dpi_engine.core.engine import EngineCore
from dpi_engine.core.limits import SchedulerConfig
from dpi_engine.core.scheduler import Scheduler
from dpi_engine.ops.interface import PAGE_SIZE, Ops
from dpi_engine.wire.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    LogprobsLists,
    PrefillStats,
    SamplingParams,
)
from dpi_engine.worker.runner import Model, Runner


class GenerationFailed(RuntimeError):
    """A request ended with an error."""


@dataclass(slots=True)
class Generation:
    """What came out for one prompt."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobsLists] = field(default_factory=list)
    prompt_logprobs: LogprobsLists | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prefill: PrefillStats | None = None
    error: str | None = None

    def take(self, output: EngineCoreOutput) -> None:
        if output.output_index != len(self.token_ids) and output.new_token_ids:
            raise GenerationFailed(f"expected output {len(self.token_ids)}, got {output.output_index}")
        self.token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            self.logprobs.append(output.new_logprobs)
        self.prompt_logprobs = output.new_prompt_logprobs_tensors or self.prompt_logprobs
        self.prefill = output.prefill_stats or self.prefill
        if output.finish_reason is not None:
            self.finish_reason, self.stop_reason, self.error = output.finish_reason, output.stop_reason, output.error


class OfflineEngine:
    """One rank in this process. `core` may be used directly too. Limits are SchedulerConfig's."""

    def __init__(
        self,
        model: Model,
        ops: Ops,
        *,
        num_blocks: int,
        max_model_len: int,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        long_prefill_token_threshold: int = 0,
        enable_prefix_caching: bool = True,
        seed: int = 0,
    ) -> None:
        self.runner = Runner(
            model,
            ops,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=PAGE_SIZE,
            max_model_len=max_model_len,
            vocab_size=int(model.spec.vocab_size),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            long_prefill_token_threshold=long_prefill_token_threshold,
            enable_prefix_caching=enable_prefix_caching,
            seed=seed,
        )
        self.core = EngineCore(Scheduler(config), self.runner)
        self._ids = itertools.count()

    def run(self, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]) -> list[Generation]:
        """Generate for all prompts together. Raises RequestRefused; failed requests carry their `error`."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        found: dict[str, Generation] = {}
        for prompt, sampling in zip(prompts, each, strict=True):
            name = f"offline-{next(self._ids)}"
            self.core.add(EngineCoreRequest(name, prompt, sampling_params=sampling), time.monotonic())
            found[name] = Generation()
        while self.core.has_work():
            for outputs in self.core.step(time.monotonic()).outputs.values():
                for output in outputs:
                    found[output.request_id].take(output)
        return list(found.values())

    def generate(
        self, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[list[int]]:
        """Output tokens of each prompt. Raises GenerationFailed if a request ended with an error."""
        results = self.run(prompts, params)
        for result in results:
            if result.error is not None:
                raise GenerationFailed(result.error)
        return [result.token_ids for result in results]
