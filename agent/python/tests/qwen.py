"""A tiny Qwen3 with real code on both sides: its config, a checkpoint of it, and the resource that refits it."""

import json
import pathlib

import yaml

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "vocab_size": 500,  # padded to 512 by vLLM, and 167 + 167 + 166 rows on three ranks
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}

# The same with experts.
EXPERTS = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}


def model(seed, **changes):
    """The model in float32, with weights that make it say something: the same on every rank."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {name: value for name, value in (CONFIG | changes).items() if name not in ("torch_dtype", "model_type")}
    torch.manual_seed(seed)
    kind = AutoConfig.for_model((CONFIG | changes)["model_type"], **config)
    made = AutoModelForCausalLM.from_config(kind).float()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
        # As large as that, a tied head would say nothing but the word before.
        made.model.embed_tokens.weight.normal_(0, 0.1 if made.config.tie_word_embeddings else 1)
    return made


def checkpoint(tensors):
    """A model's tensors as a checkpoint names them: of each expert its own, where transformers holds them fused."""
    out = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for expert, both in enumerate(tensor):
                out[f"{prefix}.{expert}.gate_proj.weight"], out[f"{prefix}.{expert}.up_proj.weight"] = both.chunk(2)
        elif last == "down_proj":
            out |= {f"{prefix}.{expert}.down_proj.weight": one for expert, one in enumerate(tensor)}
        else:
            out[name] = tensor
    return out


def fused(name, tensors):
    """A tensor of the model out of a checkpoint's."""
    import torch

    def expert(number, part):
        return tensors[f"{name.rpartition('.')[0]}.{number}.{part}_proj.weight"]

    numbers = range(EXPERTS["num_experts"])
    if name.endswith("gate_up_proj"):
        return torch.stack([torch.cat([expert(number, "gate"), expert(number, "up")]) for number in numbers])
    return torch.stack([expert(number, "down") for number in numbers]) if name.endswith("experts.down_proj") else tensors[name]


def experts(seed):
    """Tensors of a checkpoint with experts; in float32."""
    return checkpoint(model(seed, **EXPERTS).state_dict())


def save(directory, tensors, **changes):
    """A checkpoint: the whole model's tensors, as they are."""
    from safetensors.torch import save_file

    directory = pathlib.Path(directory)
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file({name: tensor.clone().contiguous() for name, tensor in checkpoint(tensors).items()}, directory / "model.safetensors", metadata={"format": "pt"})


def resource(file, world, tensor_parallel, layout, config=CONFIG, commit=None, trained=1):
    """Writes a resource: FSDP2 in float32 over `world` ranks, each `trained` of them tensor-parallel; one pool of engines."""
    fused = "(?P<p>.*\\.mlp\\.experts)\\.(?P<e>\\d+)\\."
    expert = {"by": "dp_shard", "of": EXPERTS["num_experts"], "kind": "chunk", "stack": True}
    column, row = ({"dim": dim, "by": "tp", "kind": "chunk"} for dim in (0, 1))
    shard = {"dim": 0, "by": "dp_shard", "kind": "chunk"}
    fsdp2 = {
        "layout": "v1",
        "dtype": "f32",
        "sizes": {"tp": trained, "dp_shard": world // trained},
        "world": world,
        "grids": {"all": ["tp", "dp_shard"]},
        "axes": {"none": []},
        "stages": {"axis": "none", "layers": [[0, 9]]},
        "rules": [
            {"hf": f"{fused}gate_proj\\.weight", "to": "{p}.gate_up_proj", "expert": expert, "pack": {"slot": 0}},
            {"hf": f"{fused}up_proj\\.weight", "to": "{p}.gate_up_proj", "expert": expert, "pack": {"slot": 1}},
            {"hf": f"{fused}down_proj\\.weight", "to": "{p}.down_proj", "expert": expert},
            {"hf": "(?P<n>.*\\.([qkv]|gate|up)_proj\\.weight)", "to": "{n}", "cut": [column, shard]},
            {"hf": "(?P<n>.*\\.(o|down)_proj\\.weight)", "to": "{n}", "cut": [row, shard]},
            {"hf": "(?P<n>.*)", "to": "{n}", "cut": [shard]},
        ],
    }
    pool = {
        "name": "default",
        "ranksPerReplica": tensor_parallel,
        "minReplicas": 1,
        "ranks": {"type": "StatefulSet", "ranksPerPod": tensor_parallel},
        "layout": layout,
    }
    key = {"configMapKeyRef": {"name": "qwen-config", "key": "config.json"}}
    seconds = {name: 60 for name in ("prepare", "pause", "transfer", "verify", "commit", "resume")} | {"publish": 10, "total": 300}
    refit = {
        "apiVersion": "weightrefit.dev/v1alpha1",
        "kind": "WeightRefit",
        "metadata": {"name": "qwen", "namespace": "tests"},
        "spec": {
            "model": {"type": "HuggingFaceConfig", "huggingFaceConfig": key},
            "training": {
                "worldSize": world,
                "ranks": {"type": "StatefulSet", "ranksPerPod": 1},
                "layout": {"type": "Inline", "inline": fsdp2},
            },
            "inference": {"pools": [pool]},
            "commit": commit or {},
            "timeouts": {f"{name}Seconds": value for name, value in seconds.items()},
        },
    }
    model = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "qwen-config", "namespace": "tests"},
        "data": {"config.json": json.dumps(config)},
    }
    pathlib.Path(file).write_text(yaml.safe_dump_all([refit, model]))
    return file


def preset(tensor_parallel, name="vllm/qwen-dense"):
    return {"type": "Preset", "preset": {"name": name, "revision": 1, "sizes": {"tp": tensor_parallel}}}
