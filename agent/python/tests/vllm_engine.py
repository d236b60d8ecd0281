"""One vLLM engine in a process, driven by JSON lines on standard input; answers are JSON lines on standard output.

    vllm_engine.py '{"model": DIRECTORY, "tp": 2, "agent": SOCKET or null, ...}'
"""

import asyncio
import json
import multiprocessing
import os
import sys
import time

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="WARNING", OMP_NUM_THREADS="1"
)

import vllm.v1.engine.utils
import vllm.v1.executor.multiproc_executor
from vllm import SamplingParams
from vllm.config import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

import weightrefit.vllm

# vLLM's CPU platform asks for `spawn`, and every process would then import vLLM again, 20 s each.
for module in (vllm.v1.engine.utils, vllm.v1.executor.multiproc_executor):
    module.get_mp_context = lambda: multiprocessing.get_context("fork")


def break_when(file):
    """Workers, which are forks of this process, fail to apply while the file exists."""
    from weightrefit.vllm.live import LiveModel

    whole = LiveModel.apply

    def apply(self, staging):
        whole(self, staging)
        if os.path.exists(file):
            raise RuntimeError("broken by the test")

    LiveModel.apply = apply


class Engine:
    def __init__(self, settings):
        if file := settings.get("broken"):
            break_when(file)
        arguments = AsyncEngineArgs(
            model=settings["model"],
            tensor_parallel_size=settings["tp"],
            dtype=settings.get("dtype", "bfloat16"),
            max_model_len=512,
            max_num_seqs=8,
            block_size=32,
            enforce_eager=True,
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
            seed=0,
            distributed_executor_backend="mp",
            weight_transfer_config=WeightTransferConfig(backend=weightrefit.vllm.BACKEND),
        )
        self.engine = AsyncLLM.from_engine_args(arguments)
        self.streams, self.tokens = {}, {}
        self.controller = None
        self.settings = settings

    async def start(self):
        if agent := self.settings.get("agent"):
            options = {name: self.settings[name] for name in ("checkpoint", "cast") if name in self.settings}
            self.controller = weightrefit.vllm.Controller(self.engine, replica=self.settings["replica"], socket=agent, **options)
            await self.controller.start(timeout=None)
            return {"explained": self.controller.explained}
        return {}

    async def generate(self, prompts, tokens=24):
        """Greedy tokens, and the logprobs of the five likeliest at each."""
        parameters = SamplingParams(temperature=0, max_tokens=tokens, logprobs=5, ignore_eos=True, detokenize=False)

        async def one(prompt):
            async for output in self.engine.generate({"prompt_token_ids": prompt}, parameters, f"{time.monotonic_ns()}"):
                last = output.outputs[0]
            probabilities = [{str(token): value.logprob for token, value in each.items()} for each in last.logprobs]
            return list(last.token_ids), probabilities

        return [await one(prompt) for prompt in prompts]

    async def stream(self, name, prompt, tokens):
        """Begins a request and goes on."""
        parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        self.tokens[name] = []

        async def run():
            async for output in self.engine.generate({"prompt_token_ids": prompt}, parameters, name):
                self.tokens[name] = list(output.outputs[0].token_ids)
            return output.outputs[0].finish_reason

        self.streams[name] = asyncio.create_task(run())

    async def so_far(self, name):
        return self.tokens[name]

    async def finished(self, name):
        return await self.streams[name], self.tokens[name]

    async def version(self):
        return await self.engine.get_weight_version()

    async def checksums(self):
        """Of every parameter, per rank."""
        return await self.engine.collective_rpc("compute_weight_checksums")


async def main(settings):
    self = Engine(settings)
    print(json.dumps("loaded"), flush=True)
    try:
        print(json.dumps(await self.start()), flush=True)
    except weightrefit.WeightrefitError as error:
        print(json.dumps({"refused": {"code": error.code, "message": error.message, "rank": error.rank, "remedy": error.remedy}}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        print(json.dumps(await getattr(self, command.pop("do"))(**command)), flush=True)
    if self.controller:
        await self.controller.close()
    self.engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
