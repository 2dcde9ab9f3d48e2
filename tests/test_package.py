"""The package as a whole: what importing it does, what it names, what it may use."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import jax
import pytest

import engram_jax

ROOT = Path(engram_jax.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in SOURCES]


def run_python(code: str) -> str:
    """Runs code in a fresh interpreter, warnings being errors, and gives its output."""
    command = [sys.executable, "-W", "error::DeprecationWarning:engram_jax", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def imported_modules(path: Path) -> set[str]:
    """Lists what a file imports, wherever in it, by absolute name."""
    package = ["engram_jax", *path.relative_to(ROOT).parent.parts]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            found.update(f"{module}.{alias.name}" for alias in node.names)
    return found


def is_within(module: str, package: str) -> bool:
    """Tells whether a module is the package or lies in it."""
    return module == package or module.startswith(package + ".")


# --- Importing ------------------------------------------------------------------------


def test_importing_starts_no_backend_and_loads_no_other_framework():
    """A program may still choose its platform, and PyTorch costs nothing."""
    loaded = run_python(
        "import sys, jax, engram_jax\n"
        "jax.config.update('jax_platforms', 'cpu')\n"
        # Refused by JAX once a backend runs.
        "jax.config.update('jax_num_cpu_devices', 3)\n"
        "assert jax.device_count() == 3\n"
        "print(' '.join({name.split('.')[0] for name in sys.modules}))"
    ).split()
    for framework in (
        "torch",
        "tensorflow",
        "transformers",
        "matplotlib",
        "safetensors",
    ):
        assert framework not in loaded
    loaded = run_python("import sys, engram_jax; print(' '.join(sys.modules))").split()
    assert "jax.experimental.pallas" not in loaded, "kernels are imported on demand"


def test_importing_costs_little_more_than_flax():
    """At most 1.5 times `import flax.nnx`, each at its best of several."""
    code = "import time; t = time.time(); import {}; print(time.time() - t)"
    flax, ours = (
        min(float(run_python(code.format(name))) for _ in range(3))
        for name in ("flax.nnx", "engram_jax")
    )
    assert ours < 1.5 * flax, f"engram_jax {ours:.2f} s, flax.nnx {flax:.2f} s"


def test_every_file_imports_alone():
    """No file relies on another one having been imported first."""
    modules = [
        ".".join(["engram_jax", *path.relative_to(ROOT).with_suffix("").parts])
        for path in SOURCES
        if path.name not in ("__init__.py", "__main__.py", "torch_interop.py")
    ]
    # One process each would cost a minute; forgetting the package's modules suffices.
    run_python(
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    for old in [m for m in sys.modules if m.split('.')[0] == 'engram_jax']:\n"
        "        del sys.modules[old]\n"
        "    importlib.import_module(name)\n"
    )


# --- Names ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "EngramConfig.from_pretrained",
        "EngramConfig.from_dict",
        "EngramLayout.from_config",
        "find_next_prime",
        "compute_hash_multipliers",
        "build_compressed_token_map",
        "NgramHashState.__call__",
        "NgramHashState.hash_sequence",
        "NgramHashState.dummy_hashes",
        "NgramHashState.init_slot_cache",
        "NgramHashState.advance_lookback",
        "kernels.lookup",
        "kernels.lookup_packed",
        "kernels.wkv",
        "kernels.gate",
        "mxfp8.quantize",
        "mxfp8.dequantize",
        "mxfp8.pack",
        "mxfp8.unpack",
        "mxfp8.to_f8_128x4",
        "mxfp8.from_f8_128x4",
        "Engram.__call__",
        "EngramStack",
        "EngramBatch",
        "ParallelEngramEmbedding",
        "load_engram",
        "save_engram",
    ],
)
def test_public_names_exist_and_are_documented(name):
    """Users' code relies on these spellings."""
    thing = engram_jax
    for part in name.split("."):
        thing = getattr(thing, part)
    assert inspect.getdoc(thing)


def test_torch_interop_is_a_module_of_its_own(monkeypatch):
    """It imports PyTorch when used; where there is none it says what to install."""
    interop = importlib.import_module("engram_jax.torch_interop")
    for name in ("to_jax", "to_torch", "load_state_dict"):
        assert inspect.getdoc(getattr(interop, name))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"torch"):
        interop.to_torch(jax.numpy.zeros(2))


def test_the_exported_names_are_the_public_ones():
    """What has no leading underscore at the top level is exported on purpose."""
    tree = ast.parse((ROOT / "__init__.py").read_text())
    exported = {
        alias.asname
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert None not in exported, "`from .x import y as y` marks a public name"
    modules = {Path(name).parts[0].removesuffix(".py") for name in NAMES}
    public = {name for name in vars(engram_jax) if not name.startswith("_")}
    # The run-time shape checks of the tests import jaxtyping into every module.
    assert public - exported - {"jaxtyping"} <= modules


# --- What each file may use -----------------------------------------------------------


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_imports_keep_to_their_places(path):
    """PyTorch and Pallas have one place each, JAX's private modules none."""
    name = str(path.relative_to(ROOT))
    for module in imported_modules(path):
        # Named here only, to forbid it.
        assert not is_within(module, "jax._src"), module
        if is_within(module, "torch"):
            assert name == "torch_interop.py", module
        gpu = any(
            is_within(module, package)
            for package in ("jax.experimental.pallas", "jax.experimental.mosaic")
        )
        if gpu:
            assert fnmatch(name, "kernels/*_pallas.py"), module


def test_imports_go_down():
    """A lower layer knows nothing of the ones above it."""
    order = [
        ["config"],
        ["vocabulary", "layout"],
        ["mxfp8", "kernels"],
        ["hash_state", "embedding", "host_storage"],
        ["layer"],
        ["stack", "training"],
        ["checkpoint"],
        ["torch_interop"],
    ]
    level = {name: depth for depth, names in enumerate(order) for name in names}
    for path in SOURCES:
        own = level.get(path.relative_to(ROOT).with_suffix("").parts[0])
        if own is None:
            continue
        for module in imported_modules(path):
            parts = module.split(".")
            if parts[0] == "engram_jax" and len(parts) > 1:
                assert level.get(parts[1], 0) <= own, f"{path.name} imports {module}"


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_files_are_short_and_named_for_what_they_do(path):
    """Fewer than 500 lines each; nothing is called utils, common, helpers or misc."""
    assert len(path.read_text().splitlines()) < 500
    assert not re.search(r"util|common|helper|misc", path.stem)


def test_the_oracle_is_independent():
    """The loops import neither JAX nor the package that they check."""
    tree = ast.parse((Path(__file__).parent / "numpy_reference.py").read_text())
    roots = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            roots.add(str(node.module).split(".")[0])
    assert roots <= {"__future__", "dataclasses", "math", "numpy"}


def test_tests_have_eight_devices():
    """Sharding tests need them, and a test of theirs must not quietly run on one."""
    assert len(jax.devices("cpu")) == 8
