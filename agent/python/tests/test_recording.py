"""Pieces from views: numpy's own copies say what they must give."""

import itertools
import pathlib
import random
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import fleet  # noqa: E402, F401  finds the package

import numpy as np  # noqa: E402

from weightrefit import Misuse, Tensor  # noqa: E402
from weightrefit.recording import Piece, Recorded, Unrecordable, View, complete, merged, piece  # noqa: E402


def view(root, part):
    """A numpy view in elements of its root."""
    offset = part.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    return View(part.shape, tuple(stride // root.itemsize for stride in part.strides), offset // root.itemsize)


def numbered(shape, first=1):
    return np.arange(first, first + int(np.prod(shape)), dtype=np.int64).reshape(shape)


def filled(shape, pieces, sources):
    """A local tensor as its pieces say it."""
    local = np.zeros(shape, np.int64)
    for one in pieces:
        source = sources[one.tensor]
        positions = [[(to + i, origin + i) for to, origin, length in runs for i in range(length)] for runs in one.runs]
        order = one.permute or tuple(range(source.ndim))
        for index in itertools.product(*positions):
            at = tuple(index[dim][0] for dim in order)
            at = at if one.lead is None else (one.lead, *at)
            local[at] = source[tuple(origin for _, origin in index)]
    return local


def copied(source_shape, local_shape, take, put):
    """The piece of a copy, and whether it says what numpy did."""
    source, local = numbered(source_shape), np.zeros(local_shape, np.int64)
    part, place = take(source), put(local)
    made = piece("w", source_shape, view(source, part), local_shape, view(local, place))
    place[...] = part
    return made, np.array_equal(local, filled(local_shape, [made] if made else [], {"w": source}))


class Copies(unittest.TestCase):
    ROWS = [
        # What a loader does, the pieces' lead, runs and permute.
        ("a whole tensor", (6, 4), (6, 4), lambda s: s, lambda t: t, None, (((0, 0, 6),), ((0, 0, 4),)), None),
        ("rows into a fused tensor", (8, 4), (12, 4), lambda s: s[4:8], lambda t: t[8:12], None, (((8, 4, 4),), ((0, 0, 4),)), None),
        ("columns", (6, 8), (6, 4), lambda s: s[:, 4:], lambda t: t, None, (((0, 0, 6),), ((0, 4, 4),)), None),
        ("less rows than padded ones", (5, 4), (8, 4), lambda s: s, lambda t: t[:5], None, (((0, 0, 5),), ((0, 0, 4),)), None),
        ("an expert", (3, 4), (2, 6, 4), lambda s: s, lambda t: t[1][3:], 1, (((3, 0, 3),), ((0, 0, 4),)), None),
        ("an expert of fused ones", (4, 3, 2), (2, 3, 2), lambda s: s[3], lambda t: t[1], None, (((1, 3, 1),), ((0, 0, 3),), ((0, 0, 2),)), None),
        ("transposed", (6, 4), (4, 6), lambda s: s.T, lambda t: t, None, (((0, 0, 6),), ((0, 0, 4),)), (1, 0)),
        ("a transposed expert", (6, 4), (3, 4, 6), lambda s: s.T, lambda t: t[2], 2, (((0, 0, 6),), ((0, 0, 4),)), (1, 0)),
        ("a scalar", (), (3,), lambda s: s, lambda t: t[2, ...], 2, (), None),
        ("a single element", (1,), (3,), lambda s: s, lambda t: t[2:3], None, (((2, 0, 1),),), None),
        ("every other row", (8, 4), (4, 4), lambda s: s[1::2], lambda t: t, None, (((0, 1, 1), (1, 3, 1), (2, 5, 1), (3, 7, 1)), ((0, 0, 4),)), None),
        ("heads in another order", (6, 2), (6, 2), lambda s: s.reshape(3, 2, 2).transpose(1, 0, 2), lambda t: t.reshape(2, 3, 2), None, (((0, 0, 1), (1, 2, 1), (2, 4, 1), (3, 1, 1), (4, 3, 1), (5, 5, 1)), ((0, 0, 2),)), None),
        ("flattened", (4, 6), (4, 6), lambda s: s.reshape(24), lambda t: t.reshape(24), None, (((0, 0, 4),), ((0, 0, 6),)), None),
        ("a flattened half", (4, 6), (8, 6), lambda s: s.reshape(24), lambda t: t.reshape(48)[24:], None, (((4, 0, 4),), ((0, 0, 6),)), None),
    ]

    def test_what_a_loader_does_is_said_by_its_piece(self):
        for what, source, local, take, put, lead, runs, permute in self.ROWS:
            with self.subTest(what):
                made, right = copied(source, local, take, put)
                self.assertEqual(made, Piece("w", lead, runs, permute))
                self.assertTrue(right)

    def test_an_empty_copy_has_no_piece(self):
        self.assertEqual(copied((4, 3), (4, 3), lambda s: s[4:], lambda t: t[:0]), (None, True))

    def test_what_no_piece_says_is_refused(self):
        rows = [
            ("one element at several places", lambda: copied((1, 4), (6, 4), lambda s: np.broadcast_to(s, (6, 4)), lambda t: t)),
            ("a diagonal", lambda: copied((4, 4), (4,), lambda s: np.diagonal(s), lambda t: t)),
            ("two dims in one", lambda: copied((2, 3), (6,), lambda s: s.reshape(6), lambda t: t)),
            ("half a row and the next", lambda: copied((4, 6), (2, 6), lambda s: s.reshape(24)[3:15], lambda t: t.reshape(12))),
            ("an expert in the middle", lambda: copied((3, 4), (3, 2, 4), lambda s: s, lambda t: t[:, 1])),
        ]
        for what, call in rows:
            with self.subTest(what), self.assertRaises(Unrecordable) as raised:
                call()
            self.assertEqual(raised.exception.code, "LayoutRejected")

    def test_any_views_of_any_tensors_are_said_right_or_refused(self):
        random.seed(11)
        refused = 0
        for _ in range(3000):
            shape = tuple(random.choice((1, 2, 3, 4, 6)) for _ in range(random.randint(1, 3)))
            source = numbered(shape)
            part = self.anything(source)
            local_shape = tuple(extent + random.choice((0, 0, 3)) for extent in part.shape)
            if random.random() < 0.3:
                local_shape = (random.randint(1, 3), *local_shape)
            local = np.zeros(local_shape, np.int64)
            place = local[random.randrange(local_shape[0])] if local.ndim > part.ndim else local
            place = place[tuple(slice(random.randint(0, whole - extent), None) for whole, extent in zip(place.shape, part.shape))]
            place = place[tuple(slice(0, extent) for extent in part.shape)]
            try:
                made = piece("w", shape, view(source, part), local_shape, view(local, place))
            except Unrecordable:
                refused += 1
                continue
            place[...] = part
            self.assertTrue(np.array_equal(local, filled(local_shape, [made] if made else [], {"w": source})), (shape, made))
        self.assertLess(refused, 1500, "most of what loaders do can be said")

    def anything(self, part):
        for _ in range(random.randint(0, 3)):
            what = random.random()
            dim = random.randrange(part.ndim) if part.ndim else None
            if dim is None:
                break
            if what < 0.4:
                low = random.randrange(part.shape[dim])
                cut = [slice(None)] * part.ndim
                cut[dim] = slice(low, random.randint(low + 1, part.shape[dim]), random.choice((1, 1, 2)))
                part = part[tuple(cut)]
            elif what < 0.7:
                part = part.transpose(random.sample(range(part.ndim), part.ndim))
            elif part.shape[dim] % 2 == 0:
                split = (*part.shape[:dim], 2, part.shape[dim] // 2, *part.shape[dim + 1 :])
                other = part.view()
                try:
                    other.shape = split
                except AttributeError:
                    continue  # not without a copy
                part = other
        return part

    def test_a_copy_on_the_way_is_looked_through(self):
        source, local = numbered((6, 4)), np.zeros((2, 3, 4), np.int64)
        columns = source[:, ::-1][:, ::-1].T  # 4 x 6
        copy = np.ascontiguousarray(columns[:, 2:])  # 4 x 4
        part = copy[1:3].T[1:]  # 3 x 2
        place = local[1][:, 1:3]
        made = piece("w", (6, 4), view(copy, part), (2, 3, 4), view(local, place), [(copy.shape, view(source, columns[:, 2:]))])
        place[...] = part
        self.assertTrue(np.array_equal(local, filled((2, 3, 4), [made], {"w": source})))


class Whole(unittest.TestCase):
    def test_pieces_that_continue_each_other_become_one(self):
        def expert(to, origin):
            return Piece("w", None, (((to, origin, 1),), ((0, 0, 4),)))

        self.assertEqual(merged([expert(0, 2), expert(1, 3)]), [Piece("w", None, (((0, 2, 2),), ((0, 0, 4),)))])
        self.assertEqual(merged([expert(0, 2), expert(1, 7)]), [Piece("w", None, (((0, 2, 1), (1, 7, 1)), ((0, 0, 4),)))])
        for apart in ([expert(1, 2), expert(0, 3)], [expert(0, 2), expert(0, 2)], [expert(0, 2), Piece("v", None, expert(1, 3).runs)]):
            self.assertEqual(merged(apart), apart)

    def test_a_tensor_that_lacks_elements_is_named(self):
        whole = Piece("w", None, (((0, 0, 4),),))
        fine = Recorded(Tensor("fine", "bf16", (4,)), [whole])
        padded = Recorded(Tensor("padded", "bf16", (6,)), [whole], zeroed=2)
        half = Recorded(Tensor("half", "bf16", (6,)), [whole])
        nothing = Recorded(Tensor("nothing", "bf16", (6,)))
        self.assertEqual([t.name for t in complete([fine, padded], {}, [])], ["fine", "padded"])
        self.assertEqual([t.name for t in complete([fine, nothing], {"nothing": "made by the engine"}, [])], ["fine"])
        with self.assertRaises(Misuse) as raised:
            complete([fine, half, nothing], {}, ["nothing_old", "z"])
        self.assertEqual(raised.exception.code, "RegistrationMismatch")
        want = "the checkpoint does not fill 2 tensors of the engine: `half` lacks 2 of 6 elements; `nothing` is given nothing. It has 2 tensors that the engine does not take, as `nothing_old`"
        self.assertEqual(raised.exception.message, want)


if __name__ == "__main__":
    unittest.main()
