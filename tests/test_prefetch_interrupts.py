"""Ctrl-C at every line of `EngramPrefetch`: no hang follows, and no wrong row."""

from __future__ import annotations

import contextlib
import itertools
import linecache
import signal
import sys
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from prefetch_cases import random_hashes, same, warmed, with_storage
from small_stack import make_stack

import engram_jax
from engram_jax import hot_rows, prefetch, row_fetcher
from engram_jax.host_storage import PinnedHostTable

SECONDS = 300
"""What hangs for so long is an error."""
FILES = {str(module.__file__) for module in (hot_rows, prefetch, row_fetcher)}


@pytest.fixture(scope="module")
def stack() -> engram_jax.EngramStack:
    return with_storage(
        make_stack(), lambda layer_id, values, scales: PinnedHostTable(values, scales)
    )


@pytest.fixture(autouse=True)
def limit():
    """Ends a test that hangs."""

    def end(*_):
        raise TimeoutError(f"nothing went on for {SECONDS} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


class Interrupt:
    """Raises KeyboardInterrupt before the nth line that this thread comes to."""

    def __init__(self, line: int):
        self.left = line

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)

    def trace(self, frame, event, _):
        file = frame.f_code.co_filename
        if file not in FILES:
            return None
        # Python lets no signal come between the end of a block and its `__exit__`.
        block = linecache.getline(file, frame.f_lineno).lstrip().startswith("with ")
        if event == "line" and not block:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
        return self.trace


def check_rows(fetching, stack, hashes) -> None:
    """Compares what is fetched with the tables."""
    rows = fetching.start(hashes).result().rows
    for index, layer in enumerate(stack.layers.values()):
        actual = np.asarray(rows[index].packed())
        wanted = np.empty_like(actual).reshape(-1, actual.shape[-1])
        layer.embedding.storage.read_into(hashes[:, index].reshape(-1), wanted)
        same(actual.reshape(wanted.shape), wanted)


def test_who_helps_may_be_interrupted(stack):
    """With early copies, as these wait for what shares say of themselves."""
    with prefetch.EngramPrefetch(stack, threads=2, early_copies=2) as fetching:
        for line in itertools.count(1):
            warmed(fetching, random_hashes(100, 0))
            gate = threading.Event()
            for _ in "ab":
                fetching._fetcher._gatherers.submit(gate.wait)
            pending = fetching.start(random_hashes(100, 7))
            assert isinstance(pending._future, row_fetcher.Gathering)
            assert len(pending._future._shares) == 2
            with contextlib.suppress(KeyboardInterrupt), Interrupt(line) as interrupt:
                pending.result()
            gate.set()
            fetching.join()
            check_rows(fetching, stack, random_hashes(100, 8))
            if interrupt.left > 0:
                break


def test_a_cache_stays_right_whatever_is_interrupted(stack):
    for line in itertools.count(1):
        with prefetch.EngramPrefetch(
            stack, threads=1, hot_rows=2 * 64 * 33
        ) as fetching:
            hashes = random_hashes(20, 0)
            fetching.start(hashes).result()
            with contextlib.suppress(KeyboardInterrupt), Interrupt(line) as interrupt:
                fetching.start(hashes).result()
            fetching.join()
            check_rows(fetching, stack, hashes)
            assert fetching.counters.hits
        if interrupt.left > 0:
            break


def test_a_cache_stays_right_when_a_batch_cannot_be_made(stack, monkeypatch):
    """Rows that it is to have were chosen before."""
    with prefetch.EngramPrefetch(stack, threads=1, hot_rows=2 * 64 * 33) as fetching:
        hashes = random_hashes(20, 0)
        fetching.start(hashes).result()

        def fail(_):
            raise MemoryError("no room on the device")

        with monkeypatch.context() as full:
            full.setattr(jnp, "asarray", fail)
            pending = fetching.start(hashes, token_mask=np.ones(20, bool))
            with pytest.raises(MemoryError, match="no room"):
                pending.result()
        check_rows(fetching, stack, hashes)
        assert fetching.counters.hits
