"""Which endpoints a pod's sockets bind and connect to. Pure.

Between processes of one pod everything is an ipc path in the private run directory. Only a head with remote ranks opens
tcp ports too: the declared ones, on the address that the ranks know it by. Where every pod has front ends of its own,
requests and outputs stay within the pod.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dpi_engine.config.network import tcp_endpoint
from dpi_engine.config.parallel import Mode, ParallelConfig, Ports
from dpi_engine.launch.spec import CoordinatorEndpoints
from dpi_engine.wire.head import HeadAddresses


@dataclass(frozen=True, slots=True)
class PodAddresses:
    """All endpoints of one pod. `host` is a head's own IP where remote ranks exist, else None."""

    run_dir: Path
    ports: Ports
    parallel: ParallelConfig
    host: str | None

    def _ipc(self, name: str) -> str:
        return f"ipc://{self.run_dir / name}"

    def _both(self, name: str, port: int) -> list[str]:
        return [self._ipc(name)] + ([tcp_endpoint(self.host, port)] if self.host else [])

    @property
    def _internal(self) -> bool:
        return self.parallel.mode is Mode.INTERNAL

    def control(self) -> str:
        return self._ipc("control")

    def handshake(self) -> list[str]:
        """Bind list; the first is what local ranks connect to."""
        return self._both("handshake", self.ports.handshake)

    def inputs(self, api: int) -> list[str]:
        return self._both(f"in{api}", self.ports.requests(api))[: None if self._internal else 1]

    def outputs(self, api: int) -> list[str]:
        return self._both(f"out{api}", self.ports.outputs(api))[: None if self._internal else 1]

    def coordinator(self) -> CoordinatorEndpoints:
        front, back, pull = (
            self._both(name, port)
            for name, port in (
                ("front", self.ports.frontend_stats_publish),
                ("back", self.ports.coordinator_input),
                ("pull", self.ports.coordinator_output),
            )
        )
        if self._internal:
            front = front[:1]  # all front ends are in this pod
        return CoordinatorEndpoints(
            front_bind=front,
            back_bind=back,
            pull_bind=pull,
            front_connect=front[0],
            front_remote=front[-1],
            back_local=back[0],
            pull_local=pull[0],
            back_remote=back[-1],
            pull_remote=pull[-1],
        )

    def head_addresses(self, coordinator: bool) -> HeadAddresses:
        """What the handshake hands out. A front end whose pod is not the head's has no coordinator to name."""
        parallel = self.parallel
        apis = range(parallel.api_server_count)
        ends = self.coordinator() if coordinator else None
        addresses = HeadAddresses(
            inputs=[self.inputs(i)[-1] for i in apis] if self._internal else [],
            outputs=[self.outputs(i)[-1] for i in apis] if self._internal else [],
            coordinator_input=ends.back_remote if ends else None,
            coordinator_output=ends.pull_remote if ends else None,
            stats_publish=ends.front_remote if ends else None,
            local_inputs=[self.inputs(i)[0] for i in apis],
            local_outputs=[self.outputs(i)[0] for i in apis],
            local_coordinator_input=ends.back_local if ends else None,
            local_coordinator_output=ends.pull_local if ends else None,
            local_stats_publish=ends.front_connect if ends else None,
        )
        if parallel.mode is Mode.MULTI_PORT:
            for i in apis:
                (rank,) = parallel.front_end_ranks(i)
                addresses.own_inputs[rank] = self.inputs(i)[:1]
                addresses.own_outputs[rank] = self.outputs(i)[:1]
        return addresses
