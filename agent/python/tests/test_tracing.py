"""A loader that runs on real torch tensors without content."""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import fleet  # noqa: E402, F401  finds the package

from weightrefit.recording import Piece, Unrecordable  # noqa: E402

try:
    import torch
except ImportError:
    torch = None
else:
    from weightrefit.tracing import Tracing

needs_torch = unittest.skipIf(torch is None, "torch is not installed: `make test-torch` fetches it and runs this")


@needs_torch
class Traced(unittest.TestCase):
    def traced(self, loader, source=(4, 6), target=(8, 6), device="cpu"):
        """What a loader's copying of one tensor to another leaves behind."""
        tracing = Tracing()
        local = torch.full(target, 7.0, device=device)
        tracing.target("local", local)
        weight = tracing.source("weight", source, torch.bfloat16)
        with tracing, torch.no_grad():
            loader(local, weight)
        if device == "cpu":
            self.assertTrue(bool((local == 7).all()), "nothing is written")
        return tracing.recorded["local"]

    def test_what_is_copied_is_recorded_and_nothing_is_written(self):
        rows = Piece("weight", None, (((4, 0, 4),), ((0, 0, 6),)))
        loaders = [
            lambda local, weight: local[4:].copy_(weight),
            lambda local, weight: local.data.narrow(0, 4, 4).copy_(weight.to(torch.float32)),
            lambda local, weight: torch.nn.Parameter(local, requires_grad=False)[4:].data.copy_(weight),
            lambda local, weight: local.__setitem__(slice(4, None), weight),
            lambda local, weight: local[4:].copy_(weight.t().contiguous().t()),
            lambda local, weight: local[4:].copy_(weight.clone().view(2, 2, 6).reshape(4, 6)),
            lambda local, weight: [local[4:].view(24)[at : at + 6].copy_(weight.view(24)[at : at + 6]) for at in (0, 6, 12, 18)],
        ]
        for device in ("cpu", "meta"):
            for loader in loaders:
                recorded = self.traced(loader, device=device)
                self.assertEqual(recorded.registered().pieces, (rows,))
                self.assertEqual(recorded.missing, 24)

    def test_a_copy_that_was_cut_is_looked_through(self):
        recorded = self.traced(lambda local, weight: local.copy_(weight.t().contiguous()[2:].clone()), target=(4, 4))
        self.assertEqual(recorded.pieces, [Piece("weight", None, (((0, 0, 4),), ((0, 2, 4),)), (1, 0))])

    def test_padding_that_the_loader_zeroes_is_no_lack(self):
        def loader(local, weight):
            local[:4].copy_(weight)
            local[4:].fill_(0)

        self.assertEqual(self.traced(loader).missing, 0)

    def test_what_is_not_copying_is_refused_and_named(self):
        rows = [
            (lambda local, weight: local[:4].copy_(weight * 2), "`local` is given what the loader computes"),
            (lambda local, weight: local[:4].copy_(torch.cat([weight[:2], weight[2:]])), "`local` is given what the loader computes"),
            (lambda local, weight: local.fill_(1.0), "fills a part of `local` with 1"),
            (lambda local, weight: local.fill_(weight[0, 0].item()), "reads the content of `weight`"),
            (lambda local, weight: local.copy_(weight[:1]), "copied to several places"),
            (lambda local, weight: local[:4].copy_(weight).add_(1), "changes `local` by `aten.add_`"),
            (lambda local, weight: local[:4].copy_(weight.clone().mul_(2)), "changes `weight` by `aten.mul_`"),
        ]
        for loader, message in rows:
            with self.assertRaisesRegex(Unrecordable, message):
                self.traced(loader)

    def test_a_target_must_have_memory_of_its_own(self):
        tracing = Tracing()
        whole = torch.zeros(4, 4)
        tracing.target("whole", whole)
        for name, tensor in (("part", whole[1:]), ("other", torch.zeros(4, 4).t()), ("same", whole.view(16))):
            with self.assertRaisesRegex(Unrecordable, f"`{name}`"):
                tracing.target(name, tensor)


if __name__ == "__main__":
    unittest.main()
