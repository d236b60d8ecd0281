"""One training rank of a real process group (gloo), with a real PyTorch model; driven by lines on standard input.

    torch_rank.py MODE RANK WORLD FILE [SOCKET]

MODE is how the model is sharded: `fsdp` (FSDP2), `hsdp` (2 replicas of shards), `tp` (FSDP2 over 2 tensor-parallel
ranks), each with `-adopt` to keep parameters in shared memory. FILE is where the process group meets. Commands:

    step N    an AdamW step; its result is published as step N; then the whole model is written beside FILE, gathered
              for the check only
    check     everything that can be said of the shards without an agent, as one JSON object
"""

import json
import pathlib
import sys

import fleet  # noqa: F401  finds the package
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import weightrefit
from weightrefit import pytorch


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(256, 256, bias=False) for _ in "qkvo")

    def forward(self, x):
        return x + self.o(torch.tanh(self.q(x)) * self.k(x) + self.v(x))


class Model(nn.Module):
    """The tensors of tests/local/tiny.yaml. The head is tied to the embedding; what a checkpoint lacks stays here."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(2000, 256)
        self.layers = nn.ModuleList([Block()])
        self.norm = nn.RMSNorm(256)
        self.head = nn.Linear(256, 2000, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(4), persistent=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Largest(TorchDispatchMode):
    """The most bytes of any tensor that an operation made."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                self.nbytes = max(self.nbytes, tensor.numel() * tensor.element_size())
        return result


def sharded(mode, world):
    torch.manual_seed(7)
    model = Model()
    if mode == "tp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "o": RowwiseParallel()}
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], plan)
        mesh = mesh["dp"]
    elif mode == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def gathered(model):
    pytorch.reshard(model)
    named = {name: tensor for name, tensor in model.named_parameters()}
    return {name: p.full_tensor().detach().clone() if isinstance(p, DTensor) else p.detach() for name, p in named.items()}


class Rank:
    def __init__(self, mode, rank, world, file, socket=None):
        self.rank, self.file = rank, file
        mode, _, adopt = mode.partition("-")
        self.model = sharded(mode, world)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.full = gathered(self.model)
        with Largest() as largest, CommDebugMode() as collectives:
            self.shards = pytorch.Shards(self.model, adopt=bool(adopt))
            self.shards.snapshot()
        self.seen = {"largest": largest.nbytes, "collectives": collectives.get_total_counts()}
        self.client = weightrefit.Trainer(rank, pytorch.world_token(), socket=socket)
        self.client.register(self.shards.placed, timeout=fleet.PATIENCE)

    def train(self):
        torch.manual_seed(self.rank)
        tokens = torch.randint(0, 2000, (4, 16))
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten()).backward()
        self.optimizer.step()

    def step(self, number):
        self.train()
        copied = self.shards.snapshot()
        self.client.publish(number)
        outcome = self.client.wait_released(fleet.PATIENCE)
        full = gathered(self.model)
        if self.rank == 0:
            np.savez(f"{self.file}.{number}.npz", **{name: tensor.numpy() for name, tensor in full.items()})
        dist.barrier()
        return {"outcome": outcome.value, "copied": copied}

    def check(self):
        """Against the gathered tensors: boxes, bytes, and what a training step changes."""
        before = self.differing(self.full)
        self.train()
        stale = sum(p.tensor.nbytes for p, held in zip(self.shards.placed, self.locals()) if not same(p, held))
        with Largest() as largest, CommDebugMode() as collectives:
            copied = self.shards.snapshot()
        named = dict(self.model.named_parameters())
        boxes = {}
        for shard in self.shards.shards:
            tensor = named[shard.tensor.name]
            shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            boxes[shard.tensor.name] = (shard.tensor.shape, shard.start) == (tuple(shape), tuple(start))
        storages = {s.tensor.name: held.untyped_storage().nbytes() for s, held in zip(self.shards.shards, self.locals())}
        return self.seen | {
            "names": [shard.tensor.name for shard in self.shards.shards],
            "shapes": [shard.tensor.shape for shard in self.shards.shards],
            "starts": [shard.start for shard in self.shards.shards],
            "whole": [shard.shape for shard in self.shards.shards],
            "aliases": self.shards.aliases,
            "differing": before + self.differing(gathered(self.model)),
            "boxes_that_torch_has_too": sum(boxes.values()),
            "stale_before_the_snapshot": stale,
            "copied": copied,
            "later": {"largest": largest.nbytes, "collectives": collectives.get_total_counts()},
            "bytes": sum(shard.tensor.nbytes for shard in self.shards.shards),
            "padded_bytes": sum(storages.values()),
        }

    def locals(self):
        named = dict(self.model.named_parameters())
        with torch.no_grad():
            return [named[shard.tensor.name].to_local() for shard in self.shards.shards]

    def differing(self, full):
        """Tensors whose bytes in shared memory are not those of their box of the whole tensor."""
        wrong = 0
        for shard, placed in zip(self.shards.shards, self.shards.placed):
            box = tuple(slice(at, at + n) for at, n in zip(shard.start, shard.tensor.shape))
            wrong += not same(placed, full[shard.tensor.name][box])
        return wrong


def same(placed, tensor):
    return bytes(placed.buffer) == tensor.detach().contiguous().numpy().tobytes()


def main(mode, rank, world, file, *socket):
    torch.set_num_threads(1)
    rank, world = int(rank), int(world)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    self = Rank(mode, rank, world, file, *socket)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        print(json.dumps(getattr(self, command)(*map(int, arguments))), flush=True)
    self.client.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    main(*sys.argv[1:])
