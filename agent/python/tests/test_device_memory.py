"""Tensors of a training rank on a GPU, registered with a real agent; GPU and driver are the tests' double."""

import ctypes
import os
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import fleet  # noqa: E402
from fleet import together  # noqa: E402
from tiny import REPLICA_RANKS, TRAINING_RANKS, EngineRank, TrainerRank, full, replica_names, training_part  # noqa: E402

import weightrefit  # noqa: E402
from weightrefit import DeviceMemory, Misuse, Outcome, Placed, Tensor  # noqa: E402

# Of the UUIDs: agents and this process see the same GPUs.
SEED = "11"


def setUpModule():
    os.environ["FAKEGPU_SEED"] = SEED
    unittest.addModuleCleanup(os.environ.pop, "FAKEGPU_SEED")


def double():
    return fleet.binary("libweightrefit_fakegpu.so")


def take(nbytes, **options):
    return DeviceMemory(nbytes, library=double(), **options)


class Gpu:
    """Copies to the double's memory, through pinned memory and a stream, as the double wants it."""

    def __init__(self):
        self.cuda = ctypes.CDLL(double())
        context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)
        self.stream = ctypes.c_void_p()
        self.call("cuStreamCreateWithPriority", ctypes.byref(self.stream), 1, 0)

    def call(self, name, *arguments):
        code = getattr(self.cuda, name)(*arguments)
        assert code == 0, (name, code)

    def upload(self, address, data):
        pinned = ctypes.c_void_p()
        self.call("cuMemAllocHost_v2", ctypes.byref(pinned), ctypes.c_size_t(len(data)))
        ctypes.memmove(pinned, data, len(data))
        self.call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(address), pinned, ctypes.c_size_t(len(data)), self.stream)
        fleet.wait_for("copy", lambda: self.cuda.cuStreamQuery(self.stream) == 0)
        self.call("cuMemFreeHost", pinned)


class DeviceRank(TrainerRank):
    """A training rank whose tensors lie on its GPU."""

    def __init__(self, of, rank, gpu):
        super().__init__(of, rank)
        self.gpu = gpu
        self.memory = take(self.placed[0].memory.nbytes)
        self.placed = [Placed(tensor, self.memory, offset) for tensor, _, offset in self.placed]

    def publish(self, step):
        tensors = full(step)
        for tensor, memory, offset in self.placed:
            self.gpu.upload(memory.address + offset, training_part(tensors[tensor.name], self.rank).tobytes())
        self.client.publish(step)


class OnDevice(fleet.FleetTest):
    def setUp(self):
        self.ARGUMENTS = ["--cuda-library", double(), "--allow-time-slicing"]
        super().setUp()

    def test_every_element_is_right_where_one_rank_publishes_from_its_gpu(self):
        of, gpu = self.fleet, Gpu()
        trainers = [DeviceRank(of, 0, gpu), *(TrainerRank(of, rank) for rank in range(1, TRAINING_RANKS))]
        engines = [EngineRank(of, name, rank) for name in replica_names(of) for rank in range(REPLICA_RANKS)]
        refit = weightrefit.Refit(socket=of.socket_of("training/0"))
        for client in [refit, *(rank.client for rank in trainers + engines)]:
            self.addCleanup(client.close)
        together(*(rank.register for rank in trainers + engines))
        for step in (3, 4):
            for rank in trainers:
                rank.publish(step)
            self.assertEqual(refit.sync(step, timeout=fleet.PATIENCE).outcome, "Committed")
            self.assertEqual(together(*(rank.wait_released for rank in trainers)), [Outcome.READ] * TRAINING_RANKS)
            for rank in engines:
                self.assertEqual(rank.differing(step), 0)

    def test_what_is_no_such_memory_is_refused_and_named(self):
        class Claimed:
            """Memory whose frame says what a test wants."""

            def __init__(self, memory, **claims):
                self.memory, self.nbytes, self.fd = memory, memory.nbytes, memory.fd
                self.frame = {**memory.frame, **claims}

        memory, host = take(1 << 20), weightrefit.Memory(4096)
        other = take(1 << 20, ordinal=1)
        rows = [
            ("another GPU", memory, {"device": other.device}, "GpuNotVisible", f"memory is on {other.device}, the GPU of rank 0"),
            ("in truth another GPU", other, {"device": memory.device}, "GpuNotVisible", "lies on device 1 of this process"),
            ("less", memory, {"bytes": memory.nbytes + 1}, "RegistrationMismatch", "has fewer than the 2097153 bytes"),
            ("of the host", host, {"device": memory.device}, "RegistrationMismatch", "is no device memory that can be passed"),
            ("beside memory of the host", memory, {}, "RegistrationMismatch", "memory 1 lies elsewhere than those before it"),
            ("none of the host", memory, {"device": None}, "RegistrationMismatch", "lacks the seals"),
        ]
        for name, held, claims, code, text in rows:
            with self.subTest(name):
                rank = TrainerRank(self.fleet, 0)
                frame = {key: value for key, value in claims.items() if value is not None}
                claimed = Claimed(held, **frame)
                if claims.get("device", "") is None:
                    del claimed.frame["device"]
                rank.placed = [Placed(tensor, claimed, 0) for tensor, _, _ in rank.placed[-1:]]
                rank.placed += TrainerRank(self.fleet, 0).placed[:-1]
                with self.assertRaises(weightrefit.Refused) as refused:
                    rank.register()
                rank.client.close()
                self.assertEqual(refused.exception.code, code, refused.exception)
                self.assertIn(text, refused.exception.message)


class Unable(fleet.FleetTest):
    """Of an agent that cannot use the GPU."""

    CODE, TEXT = "TransportUnavailable", "--allow-time-slicing was not given"

    def test_a_registration_is_refused_with_the_reason(self):
        rank = DeviceRank(self.fleet, 0, None)
        self.addCleanup(rank.client.close)
        with self.assertRaises(weightrefit.Refused) as refused:
            rank.register()
        self.assertEqual(refused.exception.code, self.CODE)
        self.assertIn(self.TEXT, refused.exception.message)


class WithoutDriver(Unable):
    ARGUMENTS = ("--allow-time-slicing", "--cuda-library", "/nowhere/libcuda.so.1")
    CODE, TEXT = "GpuNotVisible", "cannot open /nowhere/libcuda.so.1"


class Taken(unittest.TestCase):
    def test_memory_that_cannot_be_passed_is_refused_before_it_is_registered(self):
        gpu = Gpu()
        address = ctypes.c_uint64()
        gpu.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(4096))
        with self.assertRaisesRegex(Misuse, "cannot be passed to another process"):
            DeviceMemory.of(address.value, library=double())
        with self.assertRaisesRegex(Misuse, "no CUDA driver"):
            DeviceMemory(1, library="libcuda-that-is-not-there.so")
        with self.assertRaisesRegex(Misuse, "cuDeviceGet failed with CUDA error 101"):
            take(1, ordinal=99)

    def test_the_allocation_of_an_address_is_found_and_a_tensor_beyond_it_named(self):
        own = take(3 << 20)
        found = DeviceMemory.of(own.address + 100, library=double())
        self.assertEqual((found.address, found.nbytes, found.device), (own.address, 4 << 20, own.device))
        self.assertEqual(found.offset(own.address + 100, 50), 100)
        with self.assertRaisesRegex(Misuse, "not all in the allocation") as refused:
            found.offset(own.address + 100, 4 << 20)
        self.assertIn("Expandable segments", refused.exception.remedy)
        with self.assertRaisesRegex(Misuse, "has no buffer"):
            _ = Placed(Tensor("w", "u8", (8,)), own, 0).buffer


if __name__ == "__main__":
    unittest.main()
