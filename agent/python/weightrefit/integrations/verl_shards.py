"""verl's shard export in shared memory: what each rank holds, converted by verl to bfloat16 and to checkpoint names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from ..errors import Misuse
from ..memory import place
from ..pytorch import box, dtype_name, tied, writable
from ..tensor import Tensor


class ExportedShards:
    """What `get_per_tensor_param_shard` of a verl training engine yields, step after step.

    Attributes:
        placed: for `Trainer.register`, in the export's order.
    """

    def __init__(self, engine: Any):
        """Describes the export and makes room for it. No communication, no full tensor.

        Args:
            engine: verl's training engine.

        Raises:
            Misuse: a shard is no box of its tensor (experts that are fused or cut by hand, Megatron's); its name is in
                the message.
        """
        self._engine = engine
        # verl exports these under each of their names.
        self._aliases = tied(engine.module)
        self.placed = place(_described(name, local, spec) for name, local, spec in self._export())
        self._views = [writable(placed) for placed in self.placed]

    @torch.no_grad()
    def snapshot(self) -> int:
        """Copies the export to where it is placed.

        Raises:
            Misuse: the export is not what was registered.
        """
        copied = 0
        export = self._export()
        for placed, view in zip(self.placed, self._views):
            name, local, spec = next(export, ("nothing", torch.empty(0), None))
            tensor = placed.tensor
            if name != tensor.name or local.numel() != math.prod(tensor.shape):
                raise Misuse("PointerMoved", f"verl exports `{name}` where it exported `{tensor.name}` {list(tensor.shape)}")
            if view is not None:
                view.copy_(local.view(view.shape))
                copied += tensor.nbytes
        return copied

    def _export(self) -> Iterator[tuple[str, torch.Tensor, Any]]:
        export, adapter = self._engine.get_per_tensor_param_shard()
        if adapter is not None:
            raise Misuse("Unsupported", "verl trains an adapter (LoRA), and what is refitted is a whole model")
        return (entry for entry in export if entry[0] not in self._aliases)


def _described(name: str, local: torch.Tensor, spec: Any) -> Tensor:
    if spec.place is not None or spec.gather_group is not None or spec.to_hf_chunk is not None or spec.hf_slots is not None:
        raise Misuse(
            "LayoutRejected",
            f"verl exports `{name}` as a part that it would have to convert or place by itself",
            remedy="Train with verl's FSDP engine, or override `training_rank` with shards whose layout the resource has.",
        )
    shape = tuple(spec.full_shape)
    if spec.mesh is not None:
        _, shape = box(shape, spec.mesh, spec.placements)
    if math.prod(shape) != local.numel():
        raise Misuse("LayoutRejected", f"`{name}` has {local.numel()} elements here, its placements say {list(shape)}")
    return Tensor(name, dtype_name(name, local), shape)
