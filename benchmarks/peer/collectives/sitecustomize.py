"""Two collectives that vLLM 0.32 for CPUs lacks, on those of gloo; without them a mixture on two ranks ends at its
first step. Put this folder on PYTHONPATH of a `vllm serve`. Nothing of the protocol between ranks and head is touched.
"""

import importlib.abc
import importlib.machinery
import sys

MODULE = "vllm.distributed.device_communicators.cpu_communicator"


def _add(module) -> None:
    import torch
    import torch.distributed as dist

    def gather(group, tensor, sizes):
        """Rows of all ranks in rank order; `sizes` of them."""
        padded = tensor.new_zeros((max(sizes), *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def all_gatherv(self, input_, dim=0, sizes=None):
        assert dim == 0
        several = isinstance(input_, list)
        tensors = input_ if several else [input_]
        gathered = [gather(self.cpu_group, t, sizes or [t.shape[0]] * self.world_size) for t in tensors]
        return gathered if several else gathered[0]

    def reduce_scatterv(self, input_, dim=0, sizes=None):
        assert dim in (0, -1)
        sizes = sizes or [input_.shape[0] // self.world_size] * self.world_size
        whole = input_.contiguous().clone()
        dist.all_reduce(whole, group=self.cpu_group)
        first = sum(sizes[: self.rank_in_group])
        return whole[first : first + sizes[self.rank_in_group]]

    module.CpuCommunicator.all_gatherv = all_gatherv
    module.CpuCommunicator.reduce_scatterv = reduce_scatterv


class _AfterImport(importlib.abc.MetaPathFinder):
    """Lets the module be imported as always, then adds to it."""

    def find_spec(self, name, path=None, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            _add(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _AfterImport())
