"""Random tables and pairs of layout documents that plan, from a seed."""

import random

def refit(seed):
    """(tensors, training document, [inference documents])."""
    chance = random.Random(seed)
    model = Model(chance)
    training = model.document(dtype=chance.choice(["f32", "bf16"]))
    inference = [model.document(dtype=chance.choice(["f32", "bf16"])) for _ in range(chance.choice([1, 1, 2]))]
    return model.tensors, training, inference


class Model:
    """A small made-up transformer: sizes are chosen so that heads can be cut evenly, nothing else need be."""

    def __init__(self, chance):
        self.chance = chance
        self.layers = chance.randint(1, 4)
        self.experts = chance.choice([0, 3, 4, 6])
        self.head = chance.choice([1, 2, 3])
        self.groups = chance.choice([1, 2, 4])
        self.per_group = chance.choice([1, 2])
        self.hidden = chance.randint(2, 9)
        self.tensors = []
        self.extra = []
        self.add("embed.weight", self.vocabulary(), self.hidden)
        self.add("head.weight", *self.tensors[0]["shape"])
        self.add("scale")
        for at in range(chance.randint(0, 3)):
            self.extra.append(f"extra.{at}")
            self.add(self.extra[-1], *(chance.randint(1, 9) for _ in range(chance.randint(1, 4))))
        for layer in range(self.layers):
            self.add_layer(f"layers.{layer}")

    def vocabulary(self):
        return self.chance.randint(3, 40)

    def add(self, name, *shape):
        self.tensors.append({"name": name, "shape": list(shape), "dtype": "bf16"})

    def add_layer(self, at):
        heads = self.groups * self.per_group
        self.add(f"{at}.norm", self.hidden)
        self.add(f"{at}.q.weight", heads * self.head, self.hidden)
        self.add(f"{at}.k.weight", self.groups * self.head, self.hidden)
        self.add(f"{at}.v.weight", self.groups * self.head, self.hidden)
        self.add(f"{at}.o.weight", self.hidden, heads * self.head)
        for mlp in [f"{at}.expert.{e}" for e in range(self.experts)] or [f"{at}.mlp"]:
            self.add(f"{mlp}.gate.weight", 6, self.hidden)
            self.add(f"{mlp}.up.weight", 6, self.hidden)
            self.add(f"{mlp}.down.weight", self.hidden, 6)

    def document(self, dtype):
        """One side's document, each of its rules drawn by chance."""
        chance = self.chance
        tp = chance.choice([size for size in (1, 2, 4) if size <= self.groups or chance.random() < 0.3])
        pp = chance.choice([1, 1, 2])
        sizes = {"tp": tp, "pp": pp, "ep": chance.choice([1, 2, 3]), "rest": chance.choice([1, 1, 2])}
        world = tp * pp * sizes["ep"] * sizes["rest"]
        split = chance.randint(1, self.layers) if pp == 2 else self.layers
        stages = [[0, split], [split, self.layers]][:pp]
        document = {
            "layout": "v1",
            "dtype": dtype,
            "vars": {"d": self.head, "q": self.per_group * self.head, "E": max(1, self.experts)},
            "sizes": {axis: size for axis, size in sizes.items() if axis != "rest"},
            "world": world,
            "grids": {"a": ["tp", "ep", "rest", "pp"], "b": ["ep", "tp", "rest", "pp"]},
            "axes": {"both": ["tp", "ep"], "one": []},
            "stages": {"axis": "pp", "layers": stages},
            "rules": [],
        }
        if chance.random() < 0.4:
            document["alias"] = {"head.weight": "embed.weight"}
        for name in ["embed.weight", "head.weight"]:
            self.rule(document, name, name, 2, at=chance.choice(["first", "last", ["first", "last"], "all"]))
        self.rule(document, "scale", "scale", 0)
        for name in self.extra:
            rank = next(len(tensor["shape"]) for tensor in self.tensors if tensor["name"] == name)
            self.rule(document, name, f"x.{name}", rank)
        self.layer_rules(document, tp)
        return document

    def rule(self, document, hf, to, dims, **more):
        """A rule with up to two cuts of any dim, padded or rounded up at times."""
        chance = self.chance
        rule = {"hf": hf.replace(".", r"\."), "to": to, "grid": chance.choice(["a", "b"]), **more}
        steps = self.cuts(*(chance.randrange(dims) for _ in range(chance.randint(0, 2)) if dims))
        if steps:
            rule["cut"] = steps
        for key in ["pad", "grain"]:
            if dims and chance.random() < 0.2:
                rule[key] = {"dim": chance.randrange(dims), "to": chance.choice([2, 5, "2*d"])}
        document["rules"].append(rule)

    def cuts(self, *dims, taken=()):
        """One cut per dim given, by axes that share no rank: else some corner of the tensor would be nobody's."""
        chance = self.chance
        axes = chance.choice([["both", "rest"], ["tp", "ep", "rest"]])
        axes = [axis for axis in axes if not (set(taken) & {axis, *(["tp", "ep"] if axis == "both" else ["both"])})]
        chance.shuffle(axes)
        out = []
        for dim, by in zip(dims, axes):
            out.append({"dim": dim, "by": by, "kind": chance.choice(["chunk", "balanced"])})
            if out[-1]["kind"] == "chunk" and chance.random() < 0.3:
                out[-1]["unit"] = chance.choice([2, "d"])
        return out

    def layer_rules(self, document, tp):
        chance, rules = self.chance, document["rules"]
        at = r"layers\.(?P<L>\d+)\."
        place = chance.choice(["blocks.{l}.", "blocks.{L}."])
        rules.append({"hf": at + "norm", "to": place + "norm", "cut": self.cuts(0)})
        style = chance.choice(["apart", "stacked", "striped"])
        for slot, (part, stripe) in enumerate([("q", "q"), ("k", "d"), ("v", "d")]):
            rule = {"hf": at + part + r"\.weight", "to": place + ("qkv" if style != "apart" else part)}
            if style == "apart":
                rule["cut"] = self.cuts(0, 1)
            elif style == "stacked" or tp > self.groups:
                rule["pack"] = {"slot": slot}
                spread = {} if part == "q" else {"spread": True}
                rule["cut"] = [{"dim": 0, "by": "tp", "unit": "d", **spread}]
                if part == "q" and tp > self.groups * self.per_group:
                    rule["cut"][0]["spread"] = True
            else:
                rule["pack"] = {"slot": slot, "stripe": stripe}
                rule["cut"] = [{"dim": 0, "by": "tp"}]
            rules.append(rule)
        rules.append({"hf": at + r"o\.weight", "to": place + "o", "cut": self.cuts(1, 0)})
        self.mlp_rules(document, at, place)

    def mlp_rules(self, document, at, place):
        chance = self.chance
        more = {"grid": chance.choice(["a", "b"])}
        hf, to = at + r"mlp\.", place + "mlp."
        if self.experts:
            stack = chance.random() < 0.5
            by, kind = chance.choice(["ep", "both", "one"]), chance.choice(["balanced", "round_robin", "chunk"])
            more["expert"] = {"by": by, "of": "E", "kind": kind, "stack": stack}
            hf, to = at + r"expert\.(?P<e>\d+)\.", place + "experts."
            to += "" if stack else chance.choice(["{e}.", "{le}."])
        joined = chance.random() < 0.6
        taken = [more["expert"]["by"]] if self.experts else []
        cuts = [self.cuts(dim, taken=taken) if chance.random() < 0.7 else [] for dim in (0, 1)]
        for slot, part in enumerate(["gate", "up"]):
            rule = {"hf": f"{hf}{part}\\.weight", "to": to + ("w13" if joined else part), "cut": cuts[0], **more}
            if joined:
                rule["pack"] = {"slot": slot}
            document["rules"].append(rule)
        document["rules"].append({"hf": hf + r"down\.weight", "to": to + "w2", "cut": cuts[1], **more})
