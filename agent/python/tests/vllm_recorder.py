"""A vLLM model in this process, and what is recorded of it; driven by JSON lines, as vllm_engine.py.

    vllm_recorder.py '{"model": DIRECTORY, "dtype": "bfloat16"}'
"""

import json
import os
import sys

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    OMP_NUM_THREADS="1",
)

import fleet  # noqa: F401  finds the package
from vllm import LLM, SamplingParams
from vllm.config import set_current_vllm_config

import weightrefit
from weightrefit.vllm.checkpoint import tensors
from weightrefit.vllm.live import LiveModel


class Recorder:
    def __init__(self, settings):
        self.model = settings["model"]
        self.llm = LLM(
            model=self.model,
            dtype=settings.get("dtype", "bfloat16"),
            max_model_len=128,
            enforce_eager=True,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            block_size=32,
            seed=0,
        )
        worker = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        self.config = worker.vllm_config
        self.module, self.live = worker.model_runner.model, None
        self.live_model = lambda: LiveModel(self.module, worker.model_runner.model_config, worker.device)

    def pointers(self):
        held = [*self.module.named_parameters(), *self.module.named_buffers()]
        return {name: (tensor.data_ptr(), list(tensor.shape)) for name, tensor in held}

    def record(self, without=(), renamed=None):
        """What is recorded of the model's own checkpoint, with changes."""
        renamed = renamed or {}
        checkpoint = [
            weightrefit.Tensor(renamed.get(t.name, t.name), t.dtype, t.shape) for t in tensors(self.model) if t.name not in without
        ]
        before, self.live = self.pointers(), self.live_model()
        try:
            recorded = self.live.record(checkpoint)
        except Exception as error:
            return {"raised": type(error).__name__, "message": str(error), "moved": before != self.pointers()}
        return {
            "tensors": [
                {"name": t.name, "dtype": t.dtype, "shape": t.shape, "pieces": [piece.json() for piece in t.pieces]} for t in recorded
            ],
            "groups": {group.name: group.kind.value for group in self.live.groups},
            "explained": self.live.explained,
            "parameters": sorted(name for name, _ in self.module.named_parameters()),
            "moved": before != self.pointers(),
        }

    def apply(self, directory):
        """Applies another checkpoint by what was recorded, put together here from its pieces."""
        import torch
        from safetensors.torch import load_file

        from weightrefit.pytorch import TORCH_DTYPES

        checkpoint, staging, before = load_file(f"{directory}/model.safetensors"), {}, self.pointers()
        for tensor in self.live.tensors:
            local = torch.zeros(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype])
            for piece in tensor.pieces:
                source, part = checkpoint[piece.tensor], local if piece.lead is None else local[piece.lead]
                part = part if piece.permute is None else part.permute([piece.permute.index(dim) for dim in range(source.dim())])
                positions = [[(to + i, origin + i) for to, origin, n in runs for i in range(n)] for runs in piece.runs]
                where = torch.meshgrid(*(torch.tensor([to for to, _ in each]) for each in positions), indexing="ij")
                whence = torch.meshgrid(*(torch.tensor([origin for _, origin in each]) for each in positions), indexing="ij")
                part[where] = source[whence].to(local.dtype)
            staging[tensor.name] = bytes(local.view(torch.uint8).numpy())
        staging = self.staged(staging)
        with set_current_vllm_config(self.config):
            self.live.begin()
            self.live.apply(staging)
            self.live.finish()
        return {"moved": before != self.pointers()}

    def staged(self, contents):
        """As an agent would show it."""
        tensors = {tensor.name: tensor for tensor in self.live.tensors}
        placed = weightrefit.place(tensors.values())
        for each in placed:
            each.buffer[:] = contents[each.tensor.name]
        entries = [{"name": each.tensor.name, "offset": each.offset, "bytes": each.tensor.nbytes} for each in placed]
        memory = placed[0].memory
        return weightrefit.Staging({"type": "staging", "bytes": memory.nbytes, "tensors": entries}, [memory.fd], tensors, self.live.groups)

    def generate(self, prompts, tokens=24):
        parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    self = Recorder(json.loads(sys.argv[1]))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(self, command.pop("do"))(**command)), flush=True)
