"""One actor rank of verl, with real FSDP2 over gloo: what its shard export becomes in shared memory, as one JSON object.

    verl_rank.py MODE RANK WORLD FILE      as torch_rank.py
"""

import importlib.util
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import torch
import torch.distributed as dist
import torch_rank

from weightrefit import Misuse, pytorch
from weightrefit.integrations.verl_shards import ExportedShards


def described_by_verl():
    """verl's own `ShardSpec`, which needs nothing but torch."""
    home = pathlib.Path(importlib.util.find_spec("verl").origin).parent
    spec = importlib.util.spec_from_file_location("verl_spec", home / "workers/engine/spec.py")
    sys.modules["verl_spec"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ShardSpec


class FsdpEngine:
    """Exports what verl's FSDP engine does: flat bfloat16 shards, one by one, under every name."""

    def __init__(self, module, **changes):
        self.module, self.changes, self.spec = module, changes, described_by_verl()

    def get_per_tensor_param_shard(self):
        return self.export(), None

    def export(self):
        for name, parameter in self.module.state_dict().items():
            spec = self.spec.from_param(parameter)
            vars(spec).update(self.changes)
            yield name, parameter.to(torch.bfloat16).to_local().reshape(-1), spec


def refusal(call):
    try:
        call()
    except Misuse as error:
        return str(error)
    return None


def main(mode, rank, world, file):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=int(rank), world_size=int(world))
    model = torch_rank.sharded(mode, int(world))
    shards, engine = pytorch.Shards(model), FsdpEngine(model)
    exported = ExportedShards(engine)
    wrong = []
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        shards.snapshot()
        copied = exported.snapshot()
        want = {p.tensor.name: (p.tensor.shape, pytorch.read_only(p.buffer, torch.float32).bfloat16()) for p in shards.placed if p.tensor.nbytes}
        got = {p.tensor.name: (p.tensor.shape, pytorch.read_only(p.buffer, torch.bfloat16)) for p in exported.placed if p.tensor.nbytes}
        wrong += [name for name in want | got if name not in want or name not in got or want[name][0] != got[name][0] or not want[name][1].equal(got[name][1])]
    with torch.no_grad():
        pieces = {
            "placed": refusal(lambda: ExportedShards(FsdpEngine(model, place=0))),
            "fused": refusal(lambda: ExportedShards(FsdpEngine(model, hf_slots=[]))),
            "larger": refusal(lambda: ExportedShards(FsdpEngine(model, full_shape=(4096, 256)))),
        }
    engine.module = model.layers
    told = {
        "tensors": len(exported.placed),
        "dtypes": sorted({p.tensor.dtype for p in exported.placed}),
        "wrong": wrong,
        "copied": copied,
        "bytes": sum(p.tensor.nbytes for p in exported.placed),
        "changed": refusal(exported.snapshot),
        **pieces,
    }
    print(json.dumps(told), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
