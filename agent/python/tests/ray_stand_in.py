"""What the adapters use of Ray, for environments without it: an actor is an object on a thread with an event loop, and
whatever goes in or out is pickled. Tests that run on this run on Ray where it is installed."""

import asyncio
import inspect
import pickle
import threading
from concurrent.futures import Future


def remote(cls):
    """A class whose instances are actors."""
    return _Class(cls)


def get(references):
    """What was returned, or raises what was raised."""
    if isinstance(references, Future):
        return pickle.loads(references.result())
    return [get(reference) for reference in references]


def kill(actor):
    """Ends an actor."""
    def end():
        for task in asyncio.all_tasks():
            task.cancel()
        actor._loop.call_soon(actor._loop.stop)

    actor._loop.call_soon_threadsafe(end)
    actor._thread.join()
    actor._loop.close()


class _Class:
    def __init__(self, cls):
        self._cls = cls

    def options(self, **_):
        return self

    def remote(self, *arguments):
        return _Actor(self._cls, arguments)


class _Actor:
    def __init__(self, cls, arguments):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._instance = None

        async def construct():
            self._instance = cls(*arguments)

        asyncio.run_coroutine_threadsafe(construct(), self._loop).result()

    def __getattr__(self, name):
        if name == "__ray_call__":
            # Not on the event loop, as in Ray.
            return _Method(self, lambda instance, function, *arguments: asyncio.to_thread(function, instance, *arguments))
        return _Method(self, lambda instance, *arguments, **named: getattr(instance, name)(*arguments, **named))


class _Method:
    def __init__(self, actor, call):
        self._actor, self._call = actor, call

    def remote(self, *arguments, **named):
        sent = pickle.dumps((arguments, named))

        async def run():
            arguments, named = pickle.loads(sent)
            result = self._call(self._actor._instance, *arguments, **named)
            return pickle.dumps(await result if inspect.isawaitable(result) else result)

        return asyncio.run_coroutine_threadsafe(run(), self._actor._loop)
