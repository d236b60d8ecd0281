"""What each rank holds by a layout document, element by element, by cutting real arrays.

An array of element codes (one number per element of every HF tensor) goes through the steps of a rule as the tensor
itself would: pad, cut, round up, stack. It knows no regions and no boxes, so it checks those of the planner.
"""

import functools
import math
import re

import numpy as np

PAD = -1  # a place that no element of the model fills


def expression(text, variables):
    if isinstance(text, int):
        return text
    assert re.fullmatch(r"[\w+*/() ]+", text), text
    return int(eval(text.replace("/", "//"), {"__builtins__": {}}, variables))  # names and integers only, see above


def padded(array, dim, multiple):
    extra = -array.shape[dim] % multiple
    return np.pad(array, [(0, extra if d == dim else 0) for d in range(array.ndim)], constant_values=PAD)


def part(extent, index, parts, kind, unit, spread):
    """The range of `extent` that part `index` of `parts` takes."""
    if kind == "chunk":
        size = math.ceil(math.ceil(extent / unit) / parts) * unit
        return min(extent, index * size), min(extent, (index + 1) * size)
    if kind == "balanced":
        taken = np.array_split(np.arange(extent), parts)
        return sum(map(len, taken[:index])), sum(map(len, taken[: index + 1]))
    units, rest = divmod(extent, unit)
    assert rest == 0, f"{extent} is no multiple of {unit}"
    if spread and units < parts:
        assert parts % units == 0
        index, parts = index // (parts // units), units
    assert units % parts == 0, f"{units} units over {parts}"
    width = units // parts * unit
    return index * width, (index + 1) * width


class Side:
    def __init__(self, document):
        self.document = document
        self.world = document["world"]
        self.variables = document.get("vars", {})
        self.grids = {name: self.sized(order) for name, order in document["grids"].items()}
        self.rules = [*self.flat_rules()]
        self.ignore = [re.compile(pattern) for pattern in document.get("ignore", [])]
        self.find = functools.cache(self.find)

    def sized(self, order):
        sizes = {axis: self.document.get("sizes", {}).get(axis) for axis in order}
        known = math.prod(size for size in sizes.values() if size)
        return {axis: size or self.world // known for axis, size in sizes.items()}

    def flat_rules(self):
        suffix = self.document.get("suffix")
        for entry in self.document["rules"]:
            for prefix in entry.get("prefix", [{}]):
                for rule in entry["rules"] if "prefix" in entry else [entry]:
                    hf, to = prefix.get("hf", "") + rule["hf"], prefix.get("to", "") + rule["to"]
                    if suffix:
                        hf, to = hf.replace("~", suffix["hf"]), to.replace("~", suffix["to"])
                    yield {**prefix, **rule, "hf": re.compile(hf), "to": to}

    def find(self, name):
        """(rule, captures), or None where the side ignores the tensor."""
        for rule in self.rules:
            match = rule["hf"].fullmatch(name)
            if match and self.applies(rule, match.groupdict()):
                return rule, match.groupdict()
        assert any(pattern.fullmatch(name) for pattern in self.ignore), f"no rule for {name}"
        return None

    @staticmethod
    def applies(rule, captures):
        if "only" not in rule:
            return True
        group, operator, bound = re.fullmatch(r"(\w+)(<|>=)(\d+)", rule["only"]).groups()
        if captures.get(group) is None:
            return False
        return (int(captures[group]) < int(bound)) == (operator == "<")

    def coordinates(self, rank, grid):
        out = {}
        for axis, size in self.grids[grid].items():
            out[axis] = rank % size, size
            rank //= size
        for axis, parts in self.document.get("axes", {}).items():
            index, size = 0, 1
            for name in parts:
                index, size = index + out[name][0] * size, size * out[name][1]
            out[axis] = index, size
        return out

    def carrier(self, name, names):
        """The tensor that holds the bytes of `name` on this side."""
        alias = self.document.get("alias", {})
        target = alias.get(name)
        if target is None or target in names:
            return target or name
        return next(other for other in names if alias.get(other) == target)


def stage(side, rule, captures, coordinates):
    """Captures completed with the place of the layer, or None on ranks of other stages."""
    index, count = coordinates[side.document["stages"]["axis"]]
    if "L" in captures and "at" not in rule:
        chunks = side.document["stages"]["layers"][index]
        chunks = chunks if isinstance(chunks[0], list) else [chunks]
        for v, (low, high) in enumerate(chunks):
            if low <= int(captures["L"]) < high:
                return {**captures, "v": v, "l": int(captures["L"]) - low}
        return None
    at = rule.get("at", "all")
    at = [at] if isinstance(at, str) else at
    here = "all" in at or ("first" in at and index == 0) or ("last" in at and index == count - 1)
    return captures if here else None


def expert(side, rule, captures, coordinates):
    """(captures completed with the local expert, lead), or None on ranks that do not own it."""
    if "expert" not in rule:
        return captures, None
    wanted = rule["expert"]
    (index, parts), number = coordinates[wanted["by"]], int(captures["e"])
    count, kind = expression(wanted["of"], side.variables), wanted.get("kind", "even")
    if kind == "round_robin":
        own = range(index, count, parts)
    else:
        own = range(*part(count, index, parts, kind, 1, False))
    if number not in own:
        return None
    local = own.index(number)
    return {**captures, "le": local}, local if wanted.get("stack") else None


def cut(side, array, rule, coordinates):
    for step in rule.get("cut", []):
        index, parts = coordinates[step["by"]]
        unit = expression(step.get("unit", 1), side.variables)
        kind = step.get("kind", "even")
        low, high = part(array.shape[step["dim"]], index, parts, kind, unit, step.get("spread", False))
        array = array[(slice(None),) * step["dim"] + (slice(low, high),)]
    return array


def packed(side, slots):
    """One local tensor (of one lead) from the tensors of its slots."""
    rules = [slots[slot][1] for slot in sorted(slots)]
    pack = rules[0].get("pack", {})
    dim = pack.get("dim", 0)
    arrays = [slots[slot][0] for slot in sorted(slots)]
    coordinates = slots[0][2]
    if "stripe" in pack:
        stripes = [expression(rule["pack"]["stripe"], side.variables) for rule in rules]
        groups = [np.split(a, a.shape[dim] // stripe, axis=dim) for a, stripe in zip(arrays, stripes)]
        joined = np.concatenate([piece for group in zip(*groups, strict=True) for piece in group], axis=dim)
        return cut(side, joined, rules[0], coordinates)
    parts = []
    for array, rule in zip(arrays, rules):
        if "pad" in rule:
            array = padded(array, rule["pad"]["dim"], expression(rule["pad"]["to"], side.variables))
        array = cut(side, array, rule, coordinates)
        if "grain" in rule:
            array = padded(array, rule["grain"]["dim"], expression(rule["grain"]["to"], side.variables))
        parts.append(array)
    return np.concatenate(parts, axis=dim) if len(parts) > 1 else parts[0]


def held(side, codes, dtypes, rank):
    """{local name: (array of codes, dtype)} of one rank; `codes` is {HF name: array}."""
    locals_, kinds = {}, {}
    for name, array in codes.items():
        if side.carrier(name, codes) != name:
            continue
        alias = side.document.get("alias", {})
        found = side.find(alias.get(name, name))
        if found is None:
            continue
        rule, captures = found
        coordinates = side.coordinates(rank, rule.get("grid", next(iter(side.grids))))
        captures = stage(side, rule, captures, coordinates)
        owned = captures is not None and expert(side, rule, captures, coordinates)
        if not owned:
            continue
        captures, lead = owned
        to, slot = rule["to"].format(**captures), rule.get("pack", {}).get("slot", 0)
        slots = locals_.setdefault(to, {}).setdefault(lead, {})
        assert slot not in slots, (to, slot)
        slots[slot] = array, rule, coordinates
        kinds[to] = rule.get("dtype", side.document.get("dtype", dtypes[name]))
    out = {}
    for to, leads in locals_.items():
        arrays = {lead: packed(side, slots) for lead, slots in leads.items()}
        out[to] = (arrays[None] if None in arrays else np.stack([arrays[i] for i in range(len(arrays))])), kinds[to]
    return out
