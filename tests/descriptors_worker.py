"""One of several processes that give each other files.

    python descriptors_worker.py FOLDER PROCESSES RANK FILES SECONDS FAULT

FAULT: "", "silent" (process 1 never connects) or "ends" (it does, and ends).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def meet(folder: Path, count: int, rank: int, name: str) -> dict[int, str]:
    """Tells the others the name of this process's socket; gives theirs."""
    folder.mkdir(exist_ok=True)
    written = folder / f"writing {rank}"
    written.write_text(name)
    written.rename(folder / str(rank))
    names, end = {}, time.monotonic() + 60
    while len(names) < count - 1:
        assert time.monotonic() < end
        for other in range(count):
            if other != rank and (folder / str(other)).exists():
                names[other] = (folder / str(other)).read_text()
        time.sleep(0.02)
    return names


def make_file(content: str) -> int:
    """Makes a file without a name; returns its descriptor."""
    file = os.memfd_create("file")
    os.write(file, content.encode())
    return file


def main(folder: str, count: str, rank: str, files: str, seconds: str, fault: str):
    """Takes all steps, and checks what came."""
    import descriptors  # pyright: ignore[reportMissingImports]

    own = int(rank)
    given = [make_file(f"{own} {number}") for number in range(int(files))]
    with descriptors.open_exchange(own, seconds=float(seconds)) as exchange:
        names = meet(Path(folder), int(count), own, exchange.name)
        if fault != "silent" or own != 1:
            exchange.connect(names)
        meet(Path(folder) / "connected", int(count), own, "")
        if fault == "silent" and own == 1:
            return
        if fault == "ends" and own == 1:
            os._exit(9)
        exchange.give(given)
        taken = exchange.take()
        found = {
            peer: [os.pread(file, 99, 0).decode() for file in some]
            for peer, some in taken.items()
        }
    assert sorted(found) == sorted(set(range(int(count))) - {own})
    for peer, contents in found.items():
        assert contents == [f"{peer} {number}" for number in range(int(files))]
    sys.stdout.write("all came\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
