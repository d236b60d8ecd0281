"""One rank of tests/local/tiny.yaml in a process of its own, with an executor on the double of GPUs; driven by lines on
standard input, each answered by one of JSON.

    executor_rank.py SEAT SOCKET

    publish N      a trainer's step
    released       waits for the end of the publication
    differing N    waits until an engine serves the step; elements that are not those of it
    error          code of what the executor works no more by
    stop           stops the executor, and goes on without
"""

import json
import sys

import fleet
from tiny import EngineRank, TrainerRank

import weightrefit


class Where:
    """Stands for a fleet of one agent."""

    def __init__(self, socket):
        self.socket_of = lambda seat: socket


class Rank:
    def __init__(self, seat, socket):
        side, *rest = seat.split("/")
        if side == "training":
            self.rank = TrainerRank(Where(socket), int(rest[0]))
        else:
            self.rank = EngineRank(Where(socket), rest[1], int(rest[2]))
        self.client = self.rank.client
        double = fleet.binary("libweightrefit_fakegpu.so")
        self.client.start_executor(
            0,
            library=fleet.binary("libweightrefit.so"),
            cuda_library=double,
            nccl_library=double,
            window_bytes=1 << 20,
            timeout=fleet.PATIENCE,
        )
        self.rank.register()

    def publish(self, step):
        try:
            self.rank.publish(int(step))
        except weightrefit.ExecutorFailed as error:
            return error.code
        return "published"

    def released(self):
        return self.rank.wait_released().value

    def differing(self, step):
        self.client.wait_served(int(step), fleet.PATIENCE)
        return self.rank.differing(int(step))

    def error(self):
        error = self.client._executor.error()
        return error and error.code

    def stop(self):
        self.client._executor.stop()
        return "stopped"


def main(seat, socket):
    self = Rank(seat, socket)
    print(json.dumps("registered"), flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        print(json.dumps(getattr(self, command)(*arguments)), flush=True)
    self.client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
