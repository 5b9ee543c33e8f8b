"""What it costs that ranks step together: syncs, exchanges, and the dummy steps of ranks without work.

Starts real rank processes on loopback with a random mixture of experts. Rank 0 decodes; the others have no work and
take part with `idle` (experts only), or as vLLM does with a dummy token through the whole model. Prints microseconds;
what the machine does besides shows in them, so compare rows of one run only.

    python benchmarks/lockstep.py --size 2 4 --layers 8
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dpi_engine.wire.exchange.mesh import Mesh
from dpi_engine.wire.group import GroupTable, Member


def config(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 2048,
        "hidden_size": args.hidden, "intermediate_size": 2 * args.hidden, "num_hidden_layers": args.layers,
        "num_attention_heads": args.hidden // 64, "num_key_value_heads": max(1, args.hidden // 128), "head_dim": 64,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "hidden_act": "silu", "attention_bias": False,
        "tie_word_embeddings": False, "torch_dtype": "float32", "num_experts": args.experts,
        "num_experts_per_tok": args.top_k, "moe_intermediate_size": args.inner, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip


def link(rank: int, size: int, folder: Path) -> Mesh:
    """This rank's mesh; endpoints are exchanged by files."""
    mesh = Mesh(rank, size, "127.0.0.1", 0)
    (folder / f"new{rank}").write_text(mesh.endpoint)
    os.rename(folder / f"new{rank}", folder / f"at{rank}")
    members = []
    for r in range(size):
        while not (folder / f"at{r}").exists():
            time.sleep(0.01)
        members.append(Member(r, 1, (folder / f"at{r}").read_text()))
    mesh.announce(GroupTable(1, bytes(16), members))
    while not mesh.form(1.0):
        pass
    return mesh


def rank_main(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from dpi_engine.config.experts import ExpertPlacement
    from dpi_engine.config.model_spec import ModelSpec
    from dpi_engine.core.coupled import CoupledCore
    from dpi_engine.core.engine import EngineCore
    from dpi_engine.core.limits import SchedulerConfig
    from dpi_engine.core.lockstep import Lockstep
    from dpi_engine.core.scheduler import Scheduler
    from dpi_engine.models.registry import load_model
    from dpi_engine.ops import select_ops
    from dpi_engine.wire.exchange.experts import MeshExperts, Way
    from dpi_engine.wire.messages import EngineCoreRequest, SamplingParams
    from dpi_engine.worker.runner import Runner

    torch.set_num_threads(1)
    size, rank = args.size[0], args.rank
    ops = select_ops(torch.device("cpu"), "float32", args.ops, 1, Path(args.cache))
    spec = ModelSpec.from_config(config(args))
    mesh = link(rank, size, Path(args.folder)) if size > 1 else None
    placement = ExpertPlacement(args.experts, size, rank)
    exchange = MeshExperts(mesh, placement, Way(args.way)) if mesh is not None else None
    model = load_model(None, spec, ops, load_format="dummy", exchange=exchange)
    limits = {"max_num_seqs": 16, "max_model_len": 2048, "max_num_batched_tokens": 256}
    runner = Runner(model, ops, num_blocks=400, **limits)
    core = EngineCore(Scheduler(SchedulerConfig(num_blocks=400, block_size=16, vocab_size=2048, **limits)), runner)
    if args.full_dummy and size > 1:
        runner.idle = lambda: runner.dummy(1)  # type: ignore[method-assign]
    result: dict[str, Any] = {"rank": rank}
    if mesh is not None:
        for name, once in (("sync_us", lambda: mesh.all_reduce_max([1, 2, 3, 4, 5])),):
            for _ in range(50):
                once()
            began = time.perf_counter()
            for _ in range(args.rounds):
                once()
            result[name] = (time.perf_counter() - began) / args.rounds * 1e6
        assert exchange is not None
        for rows in (1, 16, 256):
            hidden = torch.randn(rows, args.hidden)
            ids = torch.stack([torch.randperm(args.experts)[: args.top_k] for _ in range(rows)]).to(torch.int32)
            weights = torch.rand(rows, args.top_k)
            rounds = max(20, args.rounds // (1 + rows // 16))
            began = time.perf_counter()
            for _ in range(rounds):
                batch = exchange.dispatch(hidden, ids, weights)
                exchange.combine(batch.hidden, batch)
            result[f"exchange_{rows}_us"] = (time.perf_counter() - began) / rounds * 1e6
    sequences = args.batch if rank == 0 else 0
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    for i in range(sequences):
        core.add(EngineCoreRequest(str(i), [7, 8, 9 + i], sampling_params=params), time.monotonic())
    if mesh is None:
        core.step(time.monotonic())
        began, cpu, steps = time.perf_counter(), time.process_time(), 0
        while core.has_work():
            core.step(time.monotonic())
            steps += 1
        result |= {"step_us": (time.perf_counter() - began) / steps * 1e6}
        result |= {"cpu_us": (time.process_time() - cpu) / steps * 1e6, "steps": steps}
        return result
    coupled = CoupledCore(core, mesh, Lockstep(rank, size, args.interval), lambda: None)
    coupled.lockstep.formed(mesh.group)
    reader, _writer = os.pipe()
    began, cpu, waited = time.perf_counter(), time.process_time(), mesh.waited_s
    while coupled.group and not (rank == 0 and not core.has_work() and not coupled.lockstep.engaged):
        if coupled.idle():
            if coupled.counts.steps + coupled.counts.dummy_steps:
                break  # the wave is over
            coupled.rest(time.monotonic(), 1.0, reader)
        else:
            coupled.turn(time.monotonic())
    steps = coupled.counts.steps + coupled.counts.dummy_steps
    result |= {
        "step_us": (time.perf_counter() - began) / steps * 1e6,
        "cpu_us": (time.process_time() - cpu) / steps * 1e6,
        "waited_us": (mesh.waited_s - waited) / steps * 1e6,
        "steps": coupled.counts.steps,
        "dummy_steps": coupled.counts.dummy_steps,
    }
    mesh.close()
    return result


def run(args: argparse.Namespace, size: int, **changes: Any) -> list[dict[str, Any]]:
    """One run of `size` rank processes; their results by rank."""
    values = {**vars(args), "size": size, **changes}
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(size):
            command = [sys.executable, __file__, "--rank", str(rank), "--folder", folder]
            for name, value in values.items():
                if name in ("rank", "folder", "json"):
                    continue
                flag = f"--{name.replace('_', '-')}"
                command += [flag] * bool(value) if isinstance(value, bool) else [flag, str(value)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "20000"}
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        try:
            results = []
            for process in processes:
                out, _ = process.communicate(timeout=300)
                if process.returncode:
                    raise SystemExit(f"a rank ended with {process.returncode}")
                results.append(json.loads(out.splitlines()[-1]))
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--inner", type=int, default=192)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=200, help="decoded per sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences on rank 0")
    parser.add_argument("--interval", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--way", choices=("auto", "all-gather", "all-to-all"), default="auto")
    parser.add_argument("--ops", default="auto")
    parser.add_argument("--cache", default=str(Path.home() / ".cache/dpinference"))
    parser.add_argument("--full-dummy", action="store_true", help="idle ranks run a token through the whole model")
    parser.add_argument("--json", help="write all results to this file")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank >= 0:
        print(json.dumps(rank_main(args)))
        return
    everything: dict[str, Any] = {"arguments": vars(args)}
    alone = run(args, 1)[0]
    everything["1"] = alone
    print(
        f"model: {args.layers} layers, hidden {args.hidden}, {args.experts} experts of {args.inner}, top {args.top_k}"
    )
    print(f"one rank alone: {alone['step_us']:.0f} us a step of {args.batch} sequences\n")
    print("ranks  idle ranks do         sync  exchange of 1/16/256 tokens   step  CPU of rank 0  CPU of an idle rank")
    for size in args.size:
        for full, interval in ((False, args.interval), (True, args.interval)):
            ranks = run(args, size, full_dummy=full, interval=interval)
            everything[f"{size} {'dummy token' if full else 'experts only'}"] = ranks
            first, idle = ranks[0], ranks[1:]
            exchanges = "/".join(f"{first[f'exchange_{n}_us']:.0f}" for n in (1, 16, 256))
            print(
                f"{size:5}  {'a dummy token' if full else 'experts only':19}{first['sync_us']:7.0f}  {exchanges:>27}"
                f"{first['step_us']:7.0f}{first['cpu_us']:15.0f}{sum(r['cpu_us'] for r in idle) / len(idle):21.0f}"
            )
        for interval in (1, 16, 32):
            ranks = run(args, size, interval=interval)
            everything[f"{size} interval {interval}"] = ranks
            first = ranks[0]
            print(
                f"{size:5}  sync each {interval:2} steps: {first['step_us']:.0f} us a step, "
                f"{first['dummy_steps']} dummy steps of rank 0 after its last token"
            )
    if args.json:
        Path(args.json).write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
