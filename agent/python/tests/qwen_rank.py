"""One training rank of a tiny Qwen3 in FSDP2 over gloo, in float32; driven by lines on standard input.

    qwen_rank.py RANK WORLD FILE SOCKET CONFIG TP

CONFIG is a name of qwen.py; TP ranks at a time are tensor-parallel, below FSDP2. FILE is where the process group meets, and FILE.NAME are checkpoints in bfloat16, gathered for the check only. Commands:

    save NAME       writes the present weights as a checkpoint
    train           one AdamW step
    load NAME       takes weights back from a checkpoint
    publish STEP    publishes the present weights
    refused STEP    does so, and says why it was refused
"""

import json
import sys

import fleet  # noqa: F401  finds the package
import qwen
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import weightrefit
from weightrefit import pytorch


def shard(model, world, tensor_parallel):
    mesh = init_device_mesh("cpu", (world // tensor_parallel, tensor_parallel), mesh_dim_names=("shard", "tp"))
    columns, rows = ("q", "k", "v", "gate", "up"), ("o", "down")
    plan = {f"*.{name}_proj": ColwiseParallel() for name in columns} | {f"*.{name}_proj": RowwiseParallel() for name in rows}
    for layer in model.model.layers:
        if tensor_parallel > 1:
            parallelize_module(layer, mesh["tp"], plan)
            # A rank sees its own heads alone, and the gradients of these would have to be added up.
            layer.self_attn.q_norm.requires_grad_(False)
            layer.self_attn.k_norm.requires_grad_(False)
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])


class Rank:
    def __init__(self, rank, world, file, socket, config, tensor_parallel):
        self.rank, self.file, self.config = rank, file, getattr(qwen, config)
        self.data = rank // tensor_parallel
        self.model = qwen.model(seed=7, **self.config)
        shard(self.model, world, tensor_parallel)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.05)
        self.shards = pytorch.Shards(self.model)
        self.client = weightrefit.Trainer(rank, pytorch.world_token(), socket=socket)
        # Engines take their time to start, and there is no membership without them.
        self.client.register(self.shards.placed, timeout=None)

    def save(self, name):
        pytorch.reshard(self.model)
        full = {name: p.full_tensor().detach().bfloat16() for name, p in self.model.named_parameters()}
        if self.rank == 0:
            qwen.save(f"{self.file}.{name}", full, **self.config)
        dist.barrier()

    def train(self):
        torch.manual_seed(self.data)
        tokens = torch.randint(2, 500, (4, 16))
        self.optimizer.zero_grad()
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()

    def load(self, name):
        pytorch.reshard(self.model)
        saved = load_file(f"{self.file}.{name}/model.safetensors")
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                start, extent = pytorch.box(parameter.shape, parameter.device_mesh, parameter.placements)
                part = tuple(slice(first, first + length) for first, length in zip(start, extent))
                parameter.to_local().copy_(qwen.fused(name, saved)[part])

    def publish(self, step):
        self.shards.snapshot()
        self.client.publish(int(step))
        return self.client.wait_released(fleet.PATIENCE).value

    def refused(self, step):
        """The code that a publication is refused with, or how it ended."""
        self.shards.snapshot()
        self.client.publish(int(step))
        try:
            return self.client.wait_released(fleet.PATIENCE).value
        except weightrefit.PublishRefused as error:
            return error.code


def main(rank, world, file, socket, config, tensor_parallel):
    torch.set_num_threads(1)
    rank, world = int(rank), int(world)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    self = Rank(rank, world, file, socket, config, int(tensor_parallel))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        print(json.dumps(getattr(self, command)(*arguments)), flush=True)
    self.client.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
