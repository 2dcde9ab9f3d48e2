"""One process of a job of two, each with two CPU devices.

    python multiprocess_worker.py ADDRESS PROCESSES RANK JOB

JOB is JSON: checkpoint, token_map (.npy), result (.npz), fault ("", "killed" or
"memory", in process 1).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import jax
import numpy as np
from flax import nnx

import engram_jax
from engram_jax import checkpoint, processes

HEARTBEAT_SECONDS = 10


def main(address: str, count: int, rank: int, job: dict) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    processes.initialize(address, count, rank, heartbeat_seconds=HEARTBEAT_SECONDS)
    devices = jax.make_mesh(
        tuple(job["mesh"]), ("tp", "dp"), (jax.sharding.AxisType.Auto,) * 2
    )
    rows_read = []
    read_rows = checkpoint.read_rows

    def counted(info, start, stop):
        if ".embed." in info.name and stop > start:
            if job["fault"] == "killed" and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            rows_read.append((info.name, start, stop))
        return read_rows(info, start, stop)

    checkpoint.read_rows = counted
    if job["fault"] == "memory" and rank == 1:
        checkpoint.available_host_memory = lambda: 100_000
    directory, token_map = job["checkpoint"][rank], np.load(job["token_map"])
    place: Any = devices
    if job["cut_projection"]:
        config = engram_jax.EngramConfig.from_pretrained(directory)
        layout = engram_jax.EngramLayout.from_config(config, int(token_map.max()) + 1)
        place = engram_jax.EngramSharding.on(devices, layout, shard_projection=True)
    stack = engram_jax.load_engram(directory, tokenizer=token_map, mesh=place)
    table = stack.layers[1].embedding.weight[...]
    graph, state = nnx.split(stack)

    @jax.jit
    def run(state, ids, dead, hidden):
        stack = nnx.merge(graph, state)
        tokens = ids.shape[0]
        batch = stack.batch(ids, np.arange(tokens), [0, tokens], dead_mask=dead)
        outputs = [stack(layer, hidden, batch) for layer in stack.layers]
        # Whole in every process, so that each can look at it.
        everywhere = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec())
        return jax.lax.with_sharding_constraint(
            (outputs, batch.rows, batch.hash_ids), everywhere
        )

    with np.load(job["batch"]) as batch:
        hidden = jax.numpy.asarray(batch["hidden"].view(jax.numpy.bfloat16))
        outputs, rows, hashes = run(
            state, batch["ids"], batch["dead"], np.asarray(hidden)
        )
    np.savez(
        f"{job['result']}.{rank}.npz",
        outputs=np.stack([np.asarray(x).view(np.uint16) for x in outputs]),
        rows=np.asarray(rows),
        hashes=np.asarray(hashes),
        bytes_held=sum(shard.data.nbytes for shard in table.addressable_shards),
        rows_read=json.dumps(rows_read),
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
