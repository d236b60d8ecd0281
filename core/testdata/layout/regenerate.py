#!/usr/bin/env python3
"""Writes the goldens of this folder from the reference evaluator of the layout vocabulary.

    regenerate.py REFERENCE      # a folder with layout_eval.py and hf_tables.py; needs pyyaml

small/NAME.json  a document and a small tensor table; small/NAME.txt  what every rank of it holds
full.txt         the presets on whole models: document, model, rank, sha256 of the same listing of that rank
"""
import hashlib, json, os, sys

import yaml

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, sys.argv[1])
import hf_tables  # noqa: E402
import layout_eval  # noqa: E402

PRESETS = os.path.join(HERE, "..", "..", "presets")
NAMES = {"BF16": "bf16", "F8_E4M3": "f8e4m3", "F32": "f32"}


def merged(runs):
    """Neighbours that touch on both sides are one run, empty runs none."""
    out = []
    for local, hf, n in runs:
        if n == 0:
            continue
        if out and out[-1][0] + out[-1][2] == local and out[-1][1] + out[-1][2] == hf:
            out[-1][2] += n
        else:
            out.append([local, hf, n])
    return out


def listing(doc, table, rank):
    side = layout_eval.Side(doc)
    locals_, pieces = layout_eval.regions(side, table, rank)
    index = {name: i for i, (name, *_) in enumerate(table)}
    # The reference names the target of an alias that the table lacks; here the first such alias carries it.
    for name, target in doc.get("alias", {}).items():
        if name in index and target not in index:
            index[target] = index[name]
    lines = [f"rank {rank}"]
    for name in sorted(locals_, key=lambda n: n.encode()):
        lines.append(f"local {name} {list(locals_[name])}".replace(", ", ","))
    key = lambda p: (index[p[0]], p[1].encode(), -1 if p[2] is None else p[2])
    for hf, to, lead, dims in sorted(pieces, key=key):
        runs = [merged(d) for d in dims]
        if all(runs):
            text = " x ".join(" ".join(f"{l}:{h}+{n}" for l, h, n in d) for d in runs)
            lines.append(f"piece {table[index[hf]][0]} > {to}{'' if lead is None else f'[{lead}]'} {text}".rstrip())
    return "\n".join(lines) + "\n"


def small(name, doc, table):
    os.makedirs(os.path.join(HERE, "small"), exist_ok=True)
    path = os.path.join(HERE, "small", name)
    tensors = [{"name": n, "shape": list(s), "dtype": NAMES[t]} for n, s, t in table]
    with open(path + ".json", "w") as f:
        rows = ",\n".join("  " + json.dumps(t) for t in tensors)
        f.write('{"document": ' + json.dumps(doc) + ',\n "tensors": [\n' + rows + "\n]}\n")
    with open(path + ".txt", "w") as f:
        for rank in range(doc["world"]):
            f.write(listing(doc, table, rank))


def preset(name, **changes):
    with open(os.path.join(PRESETS, name + ".yaml")) as f:
        doc = yaml.safe_load(f)
    return {**doc, **changes}


DENSE = dict(fam="dense", h=8, L=4, nq=8, nkv=4, d=2, I=16, V=150, tie=True, qkn=True)
MOE = dict(fam="moe", h=8, L=4, nq=16, nkv=2, d=2, I=0, Im=8, E=8, V=150, tie=False, qkn=True)
MLA = dict(fam="mla", h=256, L=61, nq=4, rq=128, rkv=128, dn=64, dr=64, dv=64, I=256, Im=128, E=4, S=1, kd=3, V=300, tie=False, mtp=1)
SLICES = {0, 2, 3, 59, 60, 61}  # layers of the small DeepSeek table: dense, expert, last, and the MTP layer


def mla(fp8):
    keep = lambda n: not n.startswith("model.layers.") or int(n.split(".")[2]) in SLICES
    return [t for t in hf_tables.tensors(MLA, fp8, True) if keep(t[0])]


def rule(hf, to, **more):
    return {"hf": hf, "to": to, **more}


def variations():
    """The small variations of layouts.md D4, and the kinds that no preset uses."""
    expert = r"model\.layers\.(?P<L>\d+)\.mlp\.experts\.(?P<e>\d+)\."
    rest = rule("(?P<n>.*)", "{n}")
    moe = hf_tables.tensors({**MOE, "L": 2}, False)
    base = dict(layout="v1", vars={"E": 8, "Im": 8}, stages={"axis": "none", "layers": [[0, 99]]}, axes={"none": []})
    yield "vpp", {**base, "sizes": {"pp": 2, "tp": 2}, "world": 4, "grids": {"all": ["tp", "pp"]},
                  "stages": {"axis": "pp", "layers": [[[0, 1], [2, 3]], [[1, 2], [3, 4]]]},
                  "rules": [rule(r"model\.layers\.(?P<L>\d+)\.(?P<x>.*)", "v{v}/decoder.layers.{l}.{x}", cut=[{"dim": 0, "by": "tp", "kind": "balanced"}]),
                            rule("(?P<n>.*)", "{n}", at=["first", "last"])]}, hf_tables.tensors(DENSE, False)
    glu = {"by": "ep", "of": "E", "stack": True}
    for name, extra in [("glu-interleave", dict(pack=2, cut=[{"dim": 0, "by": "dp"}])), ("join-first", dict(pack="Im", cut=[{"dim": 0, "by": "dp", "kind": "chunk"}]))]:
        pack = extra.pop("pack")
        yield name, {**base, "sizes": {"dp": 3 if name == "join-first" else 2, "ep": 2}, "world": 6 if name == "join-first" else 4, "grids": {"all": ["dp", "ep"]},
                     "rules": [rule(expert + r"gate_proj\.weight", "layers.{L}.fc1", expert=glu, pack={"slot": 0, "stripe": pack}, **extra),
                               rule(expert + r"up_proj\.weight", "layers.{L}.fc1", expert=glu, pack={"slot": 1, "stripe": pack}, **extra), rest]}, moe
    w13 = dict(expert={"by": "xs", "of": "E", "stack": True}, grain={"dim": 0, "to": 5})
    yield "width-padding", {**base, "sizes": {"dp_shard": 2, "ep": 2, "tp": 2}, "world": 8, "grids": {"all": ["tp", "dp_shard", "ep"]},
                            "axes": {"none": [], "xs": ["dp_shard", "ep"]},
                            "rules": [rule(expert + r"gate_proj\.weight", "{L}.w13", pack={"slot": 1}, cut=[{"dim": 0, "by": "tp"}], **w13),
                                      rule(expert + r"up_proj\.weight", "{L}.w13", pack={"slot": 0}, cut=[{"dim": 0, "by": "tp"}], **w13),
                                      rule(expert + r"down_proj\.weight", "{L}.w2", expert={"by": "xs", "of": "E", "stack": True}, cut=[{"dim": 1, "by": "tp", "unit": 3, "kind": "chunk"}], grain={"dim": 1, "to": 16}),
                                      rest]}, moe
    yield "round-robin", {**base, "sizes": {"ep": 3, "tp": 2}, "world": 6, "grids": {"all": ["tp", "ep"]},
                          "rules": [rule(expert + r"(?P<p>\w+)\.weight", "{L}.{p}", expert={"by": "ep", "of": 8, "kind": "round_robin", "stack": True}), rest]}, moe
    yield "join-columns", {**base, "sizes": {"tp": 2}, "world": 4, "grids": {"all": ["tp", "dp"]}, "alias": {"lm_head.weight": "absent.weight", "model.norm.weight": "absent.norm"},
                           "rules": [rule(r"model\.layers\.(?P<L>\d+)\.mlp\.(?P<x>gate|up)_proj\.weight", "{L}.{x}", cut=[{"dim": 1, "by": "tp", "kind": "chunk"}, {"dim": 0, "by": "dp", "kind": "chunk"}]),
                                     rule(r"model\.layers\.(?P<L>\d+)\.self_attn\.(?P<x>k)_proj\.weight", "{L}.kv", pack={"slot": 0, "dim": 1}, cut=[{"dim": 1, "by": "tp"}], only="L>=1"),
                                     rule(r"model\.layers\.(?P<L>\d+)\.self_attn\.(?P<x>v)_proj\.weight", "{L}.kv", pack={"slot": 1, "dim": 1}, cut=[{"dim": 1, "by": "tp"}], only="L>=1"),
                                     rest]}, hf_tables.tensors(DENSE, False)


def smalls():
    dense, moe = hf_tables.tensors(DENSE, False), hf_tables.tensors(MOE, False)
    pp2 = {"axis": "pp", "layers": [[0, 2], [2, 4]]}
    one = {"axis": "pp", "layers": [[0, 4]]}
    yield "megatron-qwen-dense", preset("megatron-qwen-dense", vars={"nq": 8, "nkv": 4, "d": 2, "tp": 2}, stages=pp2), dense
    yield "megatron-qwen3-moe", preset("megatron-qwen3-moe", vars={"nq": 16, "nkv": 2, "d": 2, "E": 8, "V": 150, "tp": 4}, stages=pp2,
                                       sizes={"tp": 4, "cp": 1, "pp": 2, "ep": 4, "etp": 2}, world=16), moe
    yield "megatron-deepseek-v3", preset("megatron-deepseek-v3", vars={"E": 4, "tp": 2, "vpad": 20}, sizes={"tp": 2, "cp": 1, "pp": 2, "ep": 2, "etp": 1}, world=8,
                                         stages={"axis": "pp", "layers": [[0, 30], [30, 61]]}), mla(True)
    yield "vllm-qwen-dense", preset("vllm-qwen-dense", vars={"d": 2}, sizes={"tp": 2, "pp": 2, "dp": 2}, world=8, stages=pp2), dense
    yield "vllm-qwen3-moe", preset("vllm-qwen3-moe", vars={"d": 2, "E": 8}, sizes={"tp": 4, "pcp": 1, "pp": 1, "dp": 2}, world=8, stages=one), moe
    yield "vllm-deepseek-v3", preset("vllm-deepseek-v3", vars={"E": 4, "b": 128}, sizes={"tp": 2, "pcp": 1, "pp": 1, "dp": 2}, world=4), mla(True)
    yield "sglang-qwen3-moe", preset("sglang-qwen3-moe", vars={"d": 2, "E": 8}, stages=one), moe
    yield "fsdp2-hf", preset("fsdp2-hf", vars={"E": 8}), hf_tables.tensors({**MOE, "L": 1, "E": 8}, False)
    yield from variations()


def fulls():
    """Document, model, whether FP8, whether with MTP."""
    yield "megatron-qwen-dense", "qwen3-0.6b"
    yield "vllm-qwen-dense", "qwen3-0.6b"
    yield "megatron-qwen3-moe", "qwen3-235b-a22b"
    yield "vllm-qwen3-moe", "qwen3-235b-a22b"
    yield "sglang-qwen3-moe", "qwen3-235b-a22b"
    yield "fsdp2-hf", "qwen3-30b-a3b"
    yield "fsdp2-hf", "qwen3-32b"
    yield "megatron-deepseek-v3", "deepseek-v3"
    yield "vllm-deepseek-v3", "deepseek-v3"


def main():
    for name, doc, table in smalls():
        small(name, doc, table)
    with open(os.path.join(HERE, "full.txt"), "w") as f:
        for name, model in fulls():
            doc, table = preset(name), hf_tables.tensors(hf_tables.CFG[model])
            world = doc["world"]
            for rank in sorted({0, 1, 3, 13, world // 2, world - 2, world - 1} & set(range(world))):
                digest = hashlib.sha256(listing(doc, table, rank).encode()).hexdigest()
                f.write(f"{name} {model} {rank} {digest}\n")


main()
