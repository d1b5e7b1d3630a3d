"""Parameters that the first and the last stage of a pipeline both have, and that stay equal."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtcp.dtensor import local_part


class TiedParameters:
    """This rank's copies: of its first or its last stage; none on the ranks in between.

    Parameters are looked up each time: ``to_empty`` and ``to`` may put others in their places.
    """

    def __init__(
        self, stage: nn.Module | None, names: Mapping[str, str], group: dist.ProcessGroup, *, is_first: bool
    ) -> None:
        """Take the stage.

        Args:
            stage: The first or last one, if this rank holds it.
            names: Of the parameters in the last stage, by those in the first.
            group: The pp ranks, the first stage on the first and the last on the last.
            is_first: Whether ``stage`` is the first.
        """
        self.names = dict(names)
        self._stage, self._group, self._is_first = stage, group, is_first
        self._is_checked = False

    def parameters(self) -> dict[str, nn.Parameter]:
        """The copies here, by the names in the first stage."""
        if self._stage is None:
            return {}
        names = {first: first if self._is_first else last for first, last in self.names.items()}
        return {first: self._stage.get_parameter(name) for first, name in names.items()}

    def copies(self) -> set[nn.Parameter]:
        """Those here that the first stage has too, and counts."""
        return set() if self._is_first else set(self.parameters().values())

    @torch.no_grad()
    def check_once(self) -> ValueError | None:
        """Return an error, on both ranks, if the copies are not equal to begin with. Sends them, the first time."""
        if self._is_checked:
            return None
        self._is_checked = True
        for name, parameter in self.parameters().items():
            own = local_part(parameter)
            if not torch.equal(own, self._exchanged(own)):
                return ValueError(
                    f"{name} of the first stage and {self.names[name]} of the last are tied, and begin with different "
                    "weights; give both the same: load them from one checkpoint, or draw them by their name in the "
                    "first stage"
                )
        return None

    def set_gradients_aside(self) -> dict[str, Tensor | None]:
        """What earlier microbatches of the step left has been added up over both stages already."""
        gradients = {name: parameter.grad for name, parameter in self._trained().items()}
        for parameter in self._trained().values():
            parameter.grad = None
        return gradients

    def add_gradients(self, before: Mapping[str, Tensor | None]) -> None:
        """Add up those of both stages, and what was set aside."""
        for name, parameter in self._trained().items():
            if parameter.grad is None:  # the other stage may have used it
                parameter.grad = torch.zeros_like(parameter)
            own = local_part(parameter.grad)
            own.add_(self._exchanged(own))
            if (earlier := before[name]) is not None:
                parameter.grad = parameter.grad + earlier

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.parameters().items() if parameter.requires_grad}

    def _exchanged(self, own: Tensor) -> Tensor:
        """The other rank's, for this rank's."""
        peer = self._group.size() - 1 if self._is_first else 0
        other = torch.empty_like(own, memory_format=torch.contiguous_format)
        transfers = [
            dist.P2POp(dist.isend, own.detach().contiguous(), group=self._group, group_peer=peer),
            dist.P2POp(dist.irecv, other, group=self._group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
        return other
