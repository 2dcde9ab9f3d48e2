"""What the host's memory gives: huge pages, whole or in part, and why not."""

from __future__ import annotations

import mmap
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from engram_jax import host_memory
from engram_jax.host_memory import HostMapping, HostMemoryOptions

HUGE = 2 << 20
SIZE = 8 * HUGE
OFF = HostMemoryOptions(huge_pages=False, interleave=False, prefault=False)


def fill(mapping: HostMapping) -> str:
    """Touches all memory; gives the report's line on huge pages."""
    mapping.populate(0, len(mapping.buffer))
    np.frombuffer(mapping.buffer, np.uint8)[::4096] = 7
    mapping.settle()
    return mapping.report.huge_pages


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Sets what the kernel's files say."""

    def change(**texts: str) -> None:
        for name, text in texts.items():
            monkeypatch.setattr(
                host_memory, f"_{name.upper()}", write(tmp_path / name, text)
            )

    change(
        huge_pages="always [madvise] never\n",
        shared_huge_pages="always within_size advise [never] deny force\n",
        huge_page_bytes=f"{HUGE}\n",
    )
    return change


@pytest.fixture
def descriptor(tmp_path):
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, SIZE)
    yield descriptor
    os.close(descriptor)


def chosen(path: Path) -> str:
    try:
        return path.read_text().split("[")[1].split("]")[0]
    except (OSError, IndexError):
        return "never"


SWITCHED_OFF = chosen(host_memory._HUGE_PAGES) == "never"


@pytest.mark.skipif(SWITCHED_OFF, reason="huge pages are switched off")
def test_private_memory_has_huge_pages_and_the_report_counts_them():
    mapping = HostMapping(None, SIZE, HostMemoryOptions())
    found = fill(mapping)
    assert found.startswith("on, for ")
    assert int(found.split()[2].rstrip("%")) >= 80
    assert "on" not in fill(HostMapping(None, SIZE, OFF))


def test_report_counts_what_was_given_not_what_was_asked_for(settings):
    """Pitfall: advice that the kernel takes, and then does not follow."""
    mapping = HostMapping(None, SIZE, HostMemoryOptions())
    assert mapping.report.huge_pages == "on"
    mapping.buffer.madvise(mmap.MADV_NOHUGEPAGE)
    assert fill(mapping) == "not available: the kernel gave small ones"


def test_part_of_the_memory_is_told_as_such(settings, tmp_path, monkeypatch):
    mapping = HostMapping(None, SIZE, HostMemoryOptions())
    first = host_memory._address(mapping.buffer)
    settings(
        mappings=f"1000-2000 r-xp 00000000 fe:00 1234 /lib/some name: of it\n"
        "Rss:                4000 kB\nAnonHugePages:       4000 kB\n"
        f"{first:x}-{first + HUGE:x} rw-p 00000000 00:00 0\n"
        "Rss:                2048 kB\nAnonHugePages:       2048 kB\n"
        f"{first + HUGE:x}-{first + SIZE:x} rw-p 00000000 00:00 0\n"
        "Rss:                2048 kB\nAnonHugePages:          0 kB\n"
        "ShmemPmdMapped:      512 kB\nVmFlags: rd wr hg\n"
        f"{first + SIZE:x}-{first + 2 * SIZE:x} rw-p 00000000 00:00 0\n"
        "Rss:                2048 kB\nAnonHugePages:          0 kB\n"
    )
    mapping.settle()
    assert mapping.report.huge_pages == "on, for 62% of the memory"
    monkeypatch.setattr(host_memory, "_MAPPINGS", tmp_path / "none")
    mapping = HostMapping(None, SIZE, HostMemoryOptions())
    assert fill(mapping) == "on"


def test_private_memory_without_huge_pages_says_why(settings, tmp_path, monkeypatch):
    assert fill(HostMapping(None, HUGE - 1, HostMemoryOptions())) == (
        "not needed: smaller than one"
    )
    settings(huge_pages="always madvise [never]\n")
    path = host_memory._HUGE_PAGES
    assert fill(HostMapping(None, SIZE, HostMemoryOptions())) == (
        f"not available: {path} is never (echo madvise > {path})"
    )
    monkeypatch.setattr(host_memory, "_HUGE_PAGES", tmp_path / "none")
    found = fill(HostMapping(None, SIZE, HostMemoryOptions()))
    assert found == "not available: this kernel has none"


@pytest.mark.parametrize(
    ("mount", "setting", "wanted"),
    [
        (
            "/a\\040b rw - tmpfs tmpfs rw,size=9k",
            "never",
            "remount,huge=advise '/a b')",
        ),
        ("/shm rw shared:2 - tmpfs tmpfs rw,huge=never", "advise", "mounted without"),
        ("/shm rw - tmpfs none rw,huge=advise", "deny", "is deny (echo never > "),
        ("/shm rw - tmpfs  rw,huge=advise,size=9k", "never", "on"),
        ("/shm rw - tmpfs tmpfs rw,huge=within_size", "never", "on"),
        ("/shm rw - tmpfs tmpfs rw,huge=always", "never", "on"),
        ("/shm rw - tmpfs tmpfs rw", "force", "on"),
        ("/ rw - ext4 /dev/vda rw", "advise", "/ is no tmpfs (ext4)"),
    ],
)
def test_files_have_huge_pages_where_their_mount_has_them(
    settings, descriptor, mount, setting, wanted
):
    """Pitfall: shmem_enabled is about memory without a mount."""
    status = os.fstat(descriptor).st_dev
    number = f"{os.major(status)}:{os.minor(status)}"
    settings(
        mounts=f"20 1 0:4 / /proc rw - proc proc rw\n21 1 {number} / {mount}\n",
        shared_huge_pages=f"[{setting}]",
    )
    report = HostMapping(descriptor, SIZE, HostMemoryOptions()).report
    assert wanted in report.huge_pages
    assert (wanted == "on") == (report.huge_pages == "on")


def test_unknown_mounts_say_so(settings, descriptor, tmp_path, monkeypatch):
    settings(mounts="")
    found = HostMapping(descriptor, SIZE, HostMemoryOptions()).report.huge_pages
    assert found == "not available: its directory is no tmpfs (unknown)"
    monkeypatch.setattr(host_memory, "_MOUNTS", tmp_path / "none")
    assert "unknown" in (
        HostMapping(descriptor, SIZE, HostMemoryOptions()).report.huge_pages
    )


@pytest.fixture(params=["huge=advise", "huge=never"])
def mounted(request, tmp_path):
    """A file system in memory, and whether it has huge pages."""
    path = tmp_path / "mounted"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", request.param, "tmpfs", str(path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip(reason="mounting a file system is not allowed here")
    yield path, request.param == "huge=advise"
    subprocess.run(["umount", str(path)], check=True)


def test_report_on_a_mount_is_what_the_kernel_does(mounted):
    folder, huge = mounted
    descriptor = os.open(folder / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, SIZE)
    found = fill(HostMapping(descriptor, SIZE, HostMemoryOptions()))
    reader = HostMapping(descriptor, SIZE, HostMemoryOptions(), writable=False)
    reader.settle()
    os.close(descriptor)
    if huge:
        assert found == reader.report.huge_pages == "on, for 100% of the memory"
    else:
        assert found == (
            f"not available: {folder} is mounted without (mount -o "
            f"remount,huge=advise {folder})"
        )


@pytest.mark.parametrize("private", [True, False])
def test_discarded_memory_is_given_back_though_it_is_referred_to(private, descriptor):
    """Pitfall: the traceback of Ctrl-C keeps half a table alive."""
    mapping = HostMapping(None if private else descriptor, SIZE, OFF)
    seen = np.frombuffer(mapping.buffer, np.uint8)
    seen[:] = 3
    mapping.discard()
    assert not private or host_memory._huge_share(seen.ctypes.data, SIZE) is None
    assert not seen.any()
    if not private:
        assert os.fstat(descriptor).st_blocks == 0


def test_more_than_the_process_may_have_is_an_error():
    with pytest.raises(MemoryError, match=r"no address space for .* ulimit -v"):
        HostMapping(None, 1 << 60, OFF)
