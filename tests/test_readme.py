"""README.md and the notebooks: what they show runs, and names what exists."""

import ast
import json
import re
from pathlib import Path

import numpy as np
import pytest

import engram_jax
from engram_jax import layout

PROJECT = Path(__file__).parent.parent
README = (PROJECT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """What the README's Python blocks define, run one after another."""
    from make_checkpoint import main

    folder = tmp_path_factory.mktemp("readme")
    assert "python scripts/make_checkpoint.py demo_checkpoint" in README
    namespace: dict = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["demo_checkpoint"]) == 0
        for number, block in enumerate(BLOCKS):
            exec(compile(block, f"README block {number}", "exec"), namespace)
    return namespace


def test_the_example_runs(names):
    config = names["stack"].config
    tokens = len(names["ids"])
    shape = (tokens, config.num_layers, config.n_hash_cols)
    assert names["batch"].hash_ids.shape == shape


def test_the_example_is_short():
    lines = [line for line in BLOCKS[0].splitlines() if line.strip()]
    assert len(lines) <= 15


def test_the_serving_loop_compiles_once_and_remembers(names):
    assert names["step"]._cache_size() == 1
    slots = np.asarray(names["slot_cache"])
    token_map = np.asarray(names["stack"].hash_state.token_map[...])
    written = [80, 81, 82, 83, 32, 33]
    ids = [671, 87763, 13823, 14, 270, 5701]
    np.testing.assert_array_equal(slots[written], token_map[ids])


def test_the_decode_loop_moves_its_windows(names):
    assert names["decode"]._cache_size() == 1
    assert names["window"].tolist() == [[87763, 671, -1], [270, 14, -1]]


def test_the_training_step_learns(names):
    losses = [float(loss) for loss in names["losses"]]
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == 3


@pytest.mark.parametrize("path", re.findall(r"\]\(([^:)]+)\)", README))
def test_links_lead_somewhere(path):
    assert (PROJECT / path).exists()


@pytest.mark.parametrize(
    "name", sorted(set(re.findall(r"`((?:\w+/)*[\w*]+\.(?:py|sh))`", README)))
)
def test_files_that_are_named_exist(name):
    assert any(list(base.glob(name)) for base in (PROJECT, PROJECT / "engram_jax",
               PROJECT / "engram_jax" / "kernels"))  # fmt: skip


def test_the_table_of_speeds_is_the_measured_one():
    import benchmark_record

    results = benchmark_record.latest(benchmark_record.results_file("cpu"))
    assert benchmark_record.markdown(results) in README
    assert all(result.holds is not False for result in results)


def test_the_legend_states_v41(v41):
    config = engram_jax.EngramConfig.from_dict(v41["config"])
    rows = re.findall(r"^\| (\w) \| .* \| ([\d,]+) \|$", README, re.MULTILINE)
    legend = {letter: int(value.replace(",", "")) for letter, value in rows}
    assert legend == {
        "L": config.num_layers,
        "n": config.max_ngram_size,
        "H": config.n_heads,
        "C": config.n_hash_cols,
        "D": config.head_dim,
        "G": config.head_dim // 32,
        "P": config.head_dim + config.head_dim // 32,
        "M": config.hc_mult,
        "E": config.hidden_size,
        "N": (config.hc_mult + 1) * config.hidden_size,
        "V": config.vocab_size,
        "K": config.compressed_vocab_size,
    }


def test_the_scripts_state_v41(v41):
    from v41 import V41_CONFIG

    assert v41["config"] == V41_CONFIG
    config = engram_jax.EngramConfig.from_dict(V41_CONFIG)
    assert layout.EngramLayout.from_config(config).num_rows == config.num_embeddings


@pytest.mark.parametrize(
    "path", sorted((PROJECT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem
)
def test_notebooks_agree_with_their_scripts_and_have_their_pictures(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    script = path.with_suffix(".py").read_text(encoding="utf-8")
    outputs = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            assert source in script
            outputs += cell["outputs"]
        else:
            text = "".join(f"# {line}".rstrip() + "\n" for line in source.split("\n"))
            assert text.strip() in script
    kinds = [output["output_type"] for output in outputs]
    assert "error" not in kinds
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 1


def imported_files(path: Path) -> set[str]:
    """Gives the package's files and folders that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom):
            continue
        module = node.module or ""
        if node.level == 1 and path.parent.name == "engram_jax":
            module = f"engram_jax.{module}".rstrip(".")
        if module == "engram_jax":
            names |= {alias.name for alias in node.names}
        elif module.startswith("engram_jax."):
            names.add(module.split(".")[1])
    return names


def test_every_file_has_its_place_and_imports_none_from_below():
    table = README.split("## Where a line of code belongs")[1].split("\n\nTests")[0]
    package = PROJECT / "engram_jax"
    row_of: dict[str, int] = {}
    for number, line in enumerate(table.splitlines()):
        for pattern in re.findall(r"`([\w*]+(?:\.py|/))`", line.split(" | ")[0]):
            for path in package.glob(pattern):
                assert path.stem not in row_of, f"{path.stem} has two places"
                row_of[path.stem] = number
    assert {path.stem for path in package.glob("*.py")} - set(row_of) == {"__init__"}
    for path in package.glob("**/*.py"):
        own = path.stem if path.parent == package else path.parent.name
        for other in imported_files(path) & set(row_of):
            assert own not in row_of or row_of[other] <= row_of[own], (path, other)
