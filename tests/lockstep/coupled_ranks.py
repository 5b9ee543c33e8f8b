"""Ranks that share the experts of a tiny random mixture, each with its loop in a thread, and a head to group them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from mesh_harness import KEY, PATIENCE

from dpi_engine.config.experts import ExpertPlacement
from dpi_engine.config.model_spec import ModelSpec
from dpi_engine.core.coupled import CoupledCore
from dpi_engine.core.engine import EngineCore
from dpi_engine.core.limits import SchedulerConfig
from dpi_engine.core.lockstep import Lockstep
from dpi_engine.core.outputs import StepOutputs
from dpi_engine.core.scheduler import Scheduler
from dpi_engine.core.utility import Utilities, UtilityError
from dpi_engine.models.registry import load_model
from dpi_engine.ops.torch_ref import TorchOps
from dpi_engine.wire.exchange.experts import MeshExperts
from dpi_engine.wire.exchange.mesh import Mesh
from dpi_engine.wire.group import GroupBook, GroupTable
from dpi_engine.wire.inbox import Inbox, InboxItem, LinkEvent
from dpi_engine.wire.messages import EngineCoreRequest, SamplingParams
from dpi_engine.worker.runner import Runner

VOCAB, EXPERTS = 97, 6

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": VOCAB, "hidden_size": 32,
    "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "float32",
    "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


def until(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < end, f"did not happen: {what}"
        time.sleep(0.005)
    return value


def make_core(exchange: MeshExperts | None) -> EngineCore:
    ops = TorchOps(torch.device("cpu"), torch.float32)

    def model() -> Any:
        return load_model(None, ModelSpec.from_config(CONFIG), ops, load_format="dummy", exchange=exchange)

    limits = {"max_num_seqs": 8, "max_model_len": 1000, "max_num_batched_tokens": 64}
    runner = Runner(model(), ops, num_blocks=200, reload=model, **limits)
    config = SchedulerConfig(num_blocks=200, block_size=16, vocab_size=VOCAB, **limits)
    return EngineCore(Scheduler(config), runner)


def request(name: str, prompt: list[int], tokens: int) -> EngineCoreRequest:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return EngineCoreRequest(name, prompt, sampling_params=params)


class Rank(threading.Thread):
    """One rank's loop, as launch/engine_process.py has it, without a wire to a front end."""

    def __init__(self, index: int, size: int, interval: int, on_left: Callable[[], None]) -> None:
        super().__init__(name=f"rank-{index}", daemon=True)
        self.index = index
        self.mesh = Mesh(index, size, "127.0.0.1", 0)
        self.core = make_core(MeshExperts(self.mesh, ExpertPlacement(EXPERTS, size, index)))
        self.lockstep = Lockstep(index, size, interval)
        self.coupled = CoupledCore(self.core, self.mesh, self.lockstep, on_left)
        self.utilities = Utilities(self.core, time.monotonic, "/nonexistent")
        self.texts: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.answers: dict[str, Any] = {}
        self.reports: list[Any] = []
        self.error: BaseException | None = None
        self._inbox = Inbox()
        self._calls: deque[Callable[[], None]] = deque()
        self.stopped = False

    def do(self, call: Callable[[], None]) -> None:
        """Run in the rank's thread, between two turns."""
        self._calls.append(call)
        self._inbox.put(InboxItem(LinkEvent.REJOINED, None, -1))

    def add(self, name: str, prompt: list[int], tokens: int, wave: int = 0) -> None:
        def add() -> None:
            self.core.add(request(name, prompt, tokens), time.monotonic())
            self.lockstep.request(wave)

        self.texts[name] = []
        self.do(add)

    def utility(self, method: str, *args: Any) -> None:
        """The answer goes to `answers` under the method's name, as (value, failure)."""
        self.answers.pop(method, None)

        def answer(value: Any, failure: str | None, outputs: StepOutputs) -> None:
            self._take(outputs)
            self.answers[method] = (value, failure)

        def call() -> None:
            try:
                begun = self.coupled.call(self.utilities, method, list(args), answer)
            except UtilityError as error:
                self.answers[method] = (None, str(error))
            else:
                assert begun is not None
                self._take(begun)

        self.do(call)

    def text(self, name: str) -> list[int]:
        until(lambda: name in self.ended or self.error, f"{name} ends on rank {self.index}")
        assert self.error is None, self.error
        return self.texts[name]

    def run(self) -> None:
        fd = self._inbox.watch()
        try:
            self.coupled.joined(time.monotonic())
            while not self.stopped:
                self._inbox.drain()
                while self._calls:
                    self._calls.popleft()()
                now = time.monotonic()
                if self.coupled.idle():
                    self.coupled.rest(now, 0.2, fd)
                else:
                    self._take(self.coupled.turn(now).outputs)
                self.reports += self.coupled.take_reports()
                self.coupled.settle()
        except BaseException as error:
            self.error = error
        finally:
            self.mesh.leave()

    def _take(self, outputs: StepOutputs) -> None:
        for entries in outputs.outputs.values():
            for output in entries:
                self.texts.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    self.ended[output.request_id] = output.error or output.finish_reason.name

    def stop(self) -> None:
        self.stopped = True
        self._inbox.put(InboxItem(LinkEvent.REJOINED, None, -1))
        self.join(PATIENCE)
        self.mesh.close()


class Head(threading.Thread):
    """Forms groups of the ranks that live, by the GroupBook, as wire/head.py does."""

    def __init__(self, size: int, interval: int = 1) -> None:
        super().__init__(name="head", daemon=True)
        self.size, self.interval = size, interval
        self.book = GroupBook(size, KEY)
        self.ranks = [Rank(i, size, interval, lambda: None) for i in range(size)]
        self.epochs = [1] * size
        self.lost: set[int] = set()
        self._stopped = False

    def run(self) -> None:
        while not self._stopped:
            for rank in self.ranks:
                if rank.index not in self.lost:
                    self.book.heard(rank.index, rank.mesh.seen, rank.mesh.left)
            ready = {r.index: (self.epochs[r.index], r.mesh.endpoint) for r in self.ranks if r.index not in self.lost}
            self.book.update(ready, ", ".join(f"rank {i} (LOST)" for i in self.lost))
            for rank in self.ranks:
                table = self.book.news_for(rank.index)
                if table is not None and rank.index not in self.lost:
                    rank.mesh.announce(GroupTable(table.epoch, table.key, table.members, table.missing))
            time.sleep(0.01)

    def lose(self, index: int) -> None:
        """The rank's process ends: its links close, the head hears of it."""
        self.ranks[index].stop()
        self.lost.add(index)

    def replace(self, index: int) -> Rank:
        """A new process for the rank, with nothing but its weights."""
        self.ranks[index] = Rank(index, self.size, self.interval, lambda: None)
        self.epochs[index] += 1
        self.book.heard(index, 0, 0)
        self.ranks[index].start()
        self.lost.discard(index)
        return self.ranks[index]

    def __enter__(self) -> list[Rank]:
        for rank in self.ranks:
            rank.start()
        self.start()
        return self.ranks

    def __exit__(self, *exc: object) -> None:
        self._stopped = True
        self.join(PATIENCE)
        for rank in self.ranks:
            if rank.is_alive():
                rank.stop()


def alone(prompts: list[list[int]], tokens: list[int]) -> list[list[int]]:
    """What one rank with all experts says."""
    core = make_core(None)
    texts: list[list[int]] = [[] for _ in prompts]
    for i, (prompt, count) in enumerate(zip(prompts, tokens, strict=True)):
        core.add(request(str(i), prompt, count), 0.0)
    while core.has_work():
        for entries in core.step(time.monotonic()).outputs.values():
            for output in entries:
                texts[int(output.request_id)] += output.new_token_ids
    return texts
