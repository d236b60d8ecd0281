"""Applies the boxes that `weightrefit plan` prints, with NumPy, and looks at every element of every rank."""

import copy
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import numpy as np
import yaml

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import owners  # noqa: E402
import random_documents  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = pathlib.Path(os.environ.get("WEIGHTREFIT_BIN", ROOT / "target/release"), "weightrefit")
BYTES = {"f32": 4, "bf16": 2}
RANDOM_PAIRS = 200
EMPTY = -2  # a place that nothing was written to


def manifest(training, inference):
    def side(document):
        return {"ranks": {"type": "Registered"}, "layout": {"type": "Inline", "inline": document}}

    pools = [
        {"name": f"pool-{at}", "ranksPerReplica": document["world"], "minReplicas": 1, **side(document)}
        for at, document in enumerate(inference)
    ]
    return {
        "apiVersion": "weightrefit.dev/v1alpha1",
        "kind": "WeightRefit",
        "metadata": {"name": "boxes", "namespace": "default"},
        "spec": {
            "model": {"type": "Registered"},
            "training": {"worldSize": training["world"], **side(training)},
            "inference": {"pools": pools},
        },
    }


def planned(tensors, training, inference, replicas):
    """The text that the command prints, the same twice."""
    with tempfile.TemporaryDirectory() as folder:
        refit, table = pathlib.Path(folder, "refit.json"), pathlib.Path(folder, "tensors.json")
        refit.write_text(json.dumps(manifest(training, inference)))
        table.write_text(json.dumps({"tensors": tensors}))
        command = [BINARY, "plan", "-f", refit, "--tensors", table, "--replicas", str(replicas)]
        run = lambda: subprocess.run([*command, "-o", "json", "--boxes"], capture_output=True, text=True)  # noqa: E731
        first, second = run(), run()
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout, "two runs differ"
    return json.loads(first.stdout)


class Boxes(unittest.TestCase):
    def check(self, tensors, training, inference, replicas=2):
        plan = planned(tensors, training, inference, replicas)
        train = owners.Side(training)
        codes, start = {}, 0
        for tensor in tensors:
            size = int(np.prod(tensor["shape"], dtype=np.int64))
            codes[tensor["name"]] = np.arange(start, start + size).reshape(tensor["shape"])
            start += size
        dtypes = {tensor["name"]: tensor["dtype"] for tensor in tensors}
        sources = [owners.held(train, codes, dtypes, rank) for rank in range(train.world)]
        # An inference side wants what the training side keeps under its own alias of the name.
        wanted_codes = {name: codes[train.carrier(name, codes)] for name in codes}
        wanted, minimum = {}, 0
        for pool, document in enumerate(inference):
            side = owners.Side(document)
            for rank in range(side.world):
                locals_ = owners.held(side, wanted_codes, dtypes, rank)
                for replica in range(replicas):
                    wanted[f"pool-{pool}", replica, rank] = locals_
                elements = sum(BYTES[dtype] * int((array >= 0).sum()) for array, dtype in locals_.values())
                minimum += replicas * elements
        self.assertEqual(plan["bytes"]["minimum"], minimum)
        self.assertEqual(plan["bytes"]["planned"], minimum)
        got = {
            key: {name: np.full(array.shape, EMPTY) for name, (array, _) in locals_.items()}
            for key, locals_ in wanted.items()
        }
        self.apply(plan, sources, got, {name: codes[train.carrier(name, codes)] for name in codes})
        for key, locals_ in wanted.items():
            for name, (array, _) in locals_.items():
                written = np.where(array >= 0, array, EMPTY)
                np.testing.assert_array_equal(got[key][name], written, err_msg=f"{key} {name}")

    def apply(self, plan, sources, got, codes):
        routes = plan["routes"]
        seen = [[0, 0] for _ in routes]
        for box in plan["boxes"]:
            source, destination = (routes[box["route"]][end] for end in ("source", "destination"))
            array, _ = sources[source["rank"]][box["source"]["tensor"]]
            block = array[window(box["source"]["start"], box["shape"])]
            target = got[destination["pool"], destination["replica"], destination["rank"]][box["destination"]["tensor"]]
            place = window(box["destination"]["start"], box["shape"])
            self.assertTrue((target[place] == EMPTY).all(), f"written twice: {box}")
            target[place] = block
            self.assertEqual(block.flat[0], codes[box["tensor"]][tuple(box["hf"])], box)
            seen[box["route"]][0] += 1
            seen[box["route"]][1] += block.size * BYTES[box["dtype"]]
        self.assertEqual(seen, [[route["boxes"], route["bytes"]] for route in routes])

    def test_random_pairs(self):
        for seed in range(RANDOM_PAIRS):
            with self.subTest(seed=seed):
                self.check(*random_documents.refit(seed), replicas=1 + seed % 3)

    def test_named_pairs(self):
        for training, inference, tensors, change in NAMED:
            with self.subTest(training=training, inference=inference):
                sides = [change(document(name), name) for name in (training, inference)]
                self.check(tensors(), sides[0], [sides[1]], replicas=1)


def window(start, shape):
    """Slices of a box, the lead first where there is one."""
    lead = len(start) - len(shape)
    return (*start[:lead], *(slice(low, low + size) for low, size in zip(start[lead:], shape)))


def document(name):
    return yaml.safe_load((ROOT / "core/presets" / f"{name}.yaml").read_text())


def tensor(name, *shape, dtype="bf16"):
    return {"name": name, "shape": list(shape), "dtype": dtype}


def mlp(at, hidden, width):
    return [
        tensor(f"{at}.gate_proj.weight", width, hidden),
        tensor(f"{at}.up_proj.weight", width, hidden),
        tensor(f"{at}.down_proj.weight", hidden, width),
    ]


def ends(vocabulary, hidden):
    return [
        tensor("model.embed_tokens.weight", vocabulary, hidden),
        tensor("model.norm.weight", hidden),
        tensor("lm_head.weight", vocabulary, hidden),
    ]


def norms(at, hidden):
    return [tensor(f"{at}.{name}_layernorm.weight", hidden) for name in ("input", "post_attention")]


def qwen3(layers, heads, kv_heads, experts, head=4, hidden=24, width=32):
    out = ends(301, hidden)
    for layer in layers:
        at = f"model.layers.{layer}"
        out += norms(at, hidden)
        for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            out.append(tensor(f"{at}.self_attn.{part}_proj.weight", count * head, hidden))
        out.append(tensor(f"{at}.self_attn.o_proj.weight", hidden, heads * head))
        out += [tensor(f"{at}.self_attn.{part}_norm.weight", head) for part in "qk"]
        if experts:
            out.append(tensor(f"{at}.mlp.gate.weight", experts, hidden))
            for expert in range(experts):
                out += mlp(f"{at}.mlp.experts.{expert}", hidden, 6)
        else:
            out += mlp(f"{at}.mlp", hidden, width)
    return out


def deepseek_v3(layers, experts, heads=8, hidden=16):
    out = ends(300, hidden)
    for layer in layers:
        at = f"model.layers.{layer}"
        attention = f"{at}.self_attn"
        out += norms(at, hidden)
        out += [
            tensor(f"{attention}.q_a_proj.weight", 12, hidden),
            tensor(f"{attention}.q_a_layernorm.weight", 12),
            tensor(f"{attention}.q_b_proj.weight", heads * 3, 12),
            tensor(f"{attention}.kv_a_proj_with_mqa.weight", 10, hidden),
            tensor(f"{attention}.kv_a_layernorm.weight", 8),
            tensor(f"{attention}.kv_b_proj.weight", heads * 4, 8),
            tensor(f"{attention}.o_proj.weight", hidden, heads * 2),
        ]
        if layer < 3:
            out += mlp(f"{at}.mlp", hidden, 24)
            continue
        out.append(tensor(f"{at}.mlp.gate.weight", experts, hidden))
        out.append(tensor(f"{at}.mlp.gate.e_score_correction_bias", experts, dtype="f32"))
        out += mlp(f"{at}.mlp.shared_experts", hidden, 8)
        for expert in range(experts):
            out += mlp(f"{at}.mlp.experts.{expert}", hidden, 2)
    at = "model.layers.61"
    out += [tensor(f"{at}.{norm}.weight", hidden) for norm in ("enorm", "hnorm", "shared_head.norm")]
    out.append(tensor(f"{at}.eh_proj.weight", hidden, 2 * hidden))
    out.append(tensor(f"{at}.embed_tokens.weight", 300, hidden))
    out.append(tensor(f"{at}.shared_head.head.weight", 300, hidden))
    return out


def small(**variables):
    """The document with small sizes in place of the model's, and in bf16 where it holds fp8 with scales."""

    def change(found, _name):
        out = copy.deepcopy(found)
        known = out.get("vars", {})
        out["vars"] = {**known, **{name: value for name, value in variables.items() if name in known}}
        if "suffix" in out:
            out["suffix"] = {"hf": "weight", "to": "weight"}
        return out

    return change


DENSE = lambda: qwen3(range(28), 16, 8, 0)[:120]  # noqa: E731
MOE = lambda: qwen3([0, 30, 93], 16, 4, 64)  # noqa: E731
NAMED = [
    ("megatron-qwen-dense", "vllm-qwen-dense", DENSE, small(d=4)),
    ("megatron-qwen3-moe", "vllm-qwen3-moe", MOE, small(nq=16, d=4, E=64)),
    ("megatron-qwen3-moe", "sglang-qwen3-moe", MOE, small(nq=16, d=4, E=64)),
    ("fsdp2-hf", "vllm-qwen3-moe", MOE, small(d=4, E=64)),
    ("fsdp2-hf", "vllm-qwen-dense", DENSE, small(d=4)),
    ("megatron-deepseek-v3", "vllm-deepseek-v3", lambda: deepseek_v3([0, 3, 60, 61], 64), small(E=64)),
]

if __name__ == "__main__":
    unittest.main()
