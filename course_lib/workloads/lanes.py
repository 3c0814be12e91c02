"""DataParallel's mechanics on a CPU: scatter, replicate, parallel apply, gather.

`nn.DataParallel` passes straight through to the module when there is no GPU. Lanes do on one CPU what it does on
several GPUs, with threads in the place of devices. They show how it works, and nothing gets faster.
"""

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


class CpuLanes(nn.DataParallel[nn.Module]):
    """`module` applied to `lanes` parts of each batch, in threads; gradients add up in the one set of weights."""

    def __init__(self, module: nn.Module, lanes: int) -> None:
        super().__init__(module)
        self.lanes = lanes
        # The lanes are threads already; more threads inside each would only get in each other's way.
        torch.set_num_threads(max(1, torch.get_num_threads() // lanes))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's output for the (N, ...) batch, put together from the lanes' (N/lanes, ...) parts."""
        parts = scatter(inputs[0], self.lanes)
        return gather(parallel_apply(replicate(self.module, len(parts)), parts, self.module))


def scatter(batch: Tensor, lanes: int) -> list[Tensor]:
    """Split along dimension 0; a batch with fewer samples than lanes makes fewer parts."""
    return list(batch.chunk(lanes))


def replicate(module: nn.Module, lanes: int) -> list[nn.Module]:
    """A copy of the module for each lane, made anew in every step, as DataParallel does.

    The first lane works on the module itself, so that its buffers (batch statistics) are those that stay.
    """
    return [module] + [copy.deepcopy(module) for _ in range(lanes - 1)]


def parallel_apply(replicas: list[nn.Module], parts: list[Tensor], module: nn.Module) -> list[Tensor]:
    """Run each replica on its part in a thread of its own.

    The replicas borrow the weights of `module`, so that autograd adds up the gradients of all lanes there.
    """
    weights: dict[str, Tensor] = dict(module.named_parameters())
    grad = torch.is_grad_enabled()

    def lane(replica: nn.Module, part: Tensor) -> Tensor:
        with torch.set_grad_enabled(grad):  # a new thread starts with gradients on
            output: Tensor = functional_call(replica, weights, (part,))
            return output

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(lane, replicas, parts))


def gather(outputs: list[Tensor]) -> Tensor:
    """The lanes' outputs as one batch again."""
    return torch.cat(outputs)
