"""What the inventory finds: on this machine, in made-up folders, and from a made-up driver."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from llmd.daemon.devices import (
    Device,
    Inventory,
    amd,
    available_memory_bytes,
    control_groups,
    cpu,
    total_memory_bytes,
    visible,
)

GB = 10**9


def test_this_machine_has_a_processor_and_memory() -> None:
    host = Inventory().probe()[-1]
    assert (host.id, host.kind) == ("cpu", "cpu")
    assert 0 < host.free_bytes <= host.total_bytes <= psutil.virtual_memory().total
    assert host.name


def write(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")
    return folder


def test_the_control_group_limits_what_there_is(tmp_path: Path) -> None:
    new = write(
        tmp_path / "new",
        memory__max=2 * GB,
        memory__current=GB,
        memory__stat=f"anon {GB // 2}\ninactive_file {GB // 4}",
    )
    assert total_memory_bytes((new,)) == 2 * GB
    assert available_memory_bytes((new,)) == 2 * GB - (GB - GB // 4)
    old = write(tmp_path / "old", memory__limit_in_bytes=3 * GB, memory__usage_in_bytes=4 * GB)
    assert total_memory_bytes((old, new)) == 2 * GB
    assert available_memory_bytes((old, new)) == 0, "a group that is over its limit has no room"
    unlimited = write(tmp_path / "none", memory__max="max", memory__limit_in_bytes=2**63 - 4096)
    assert total_memory_bytes((unlimited,)) == psutil.virtual_memory().total


def test_a_process_is_in_all_groups_above_its_own(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    leaf = root / "user.slice" / "app.service"
    leaf.mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text("3:cpu:/x\n0::/user.slice/app.service\n")
    assert control_groups(own, root) == (leaf, leaf.parent, root)
    own.write_text("0::/of/the/host/and/not/here\n")
    assert control_groups(own, root) == (root,)
    assert control_groups(tmp_path / "nothing", root) == ()


def test_cards_of_amd_are_read_from_the_kernels_files(tmp_path: Path) -> None:
    for number, vendor in ((0, "0x1002"), (1, "0x10de"), (2, "0x1002")):
        write(
            tmp_path / f"card{number}" / "device",
            vendor=vendor,
            mem_info_vram_total=16 * GB,
            mem_info_vram_used=number * GB,
            product_name="Radeon",
        )
    (tmp_path / "card0-DP-1").mkdir()
    assert amd(tmp_path) == [
        Device("cuda:0", "Radeon", 16 * GB, 16 * GB, "rocm"),
        Device("cuda:1", "Radeon", 16 * GB, 14 * GB, "rocm"),
    ]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (None, ["GPU-a", "GPU-b"]),
        ("1", ["GPU-b"]),
        ("1,0", ["GPU-b", "GPU-a"]),
        ("GPU-b", ["GPU-b"]),
        ("", []),
        ("-1", []),
        ("0,7,1", ["GPU-a"]),
    ],
)
def test_only_the_cards_that_the_variable_lets_through_are_there(
    wanted: str | None, expected: list[str]
) -> None:
    cards = [
        Device(f"cuda:{n}", "x", GB, GB, "cuda", uuid) for n, uuid in enumerate(("GPU-a", "GPU-b"))
    ]
    found = visible(cards, wanted)
    assert [card.uuid for card in found] == expected
    assert [card.id for card in found] == [f"cuda:{number}" for number in range(len(expected))]


def test_a_scripted_inventory_is_read_again_at_each_probe(tmp_path: Path) -> None:
    script = tmp_path / "devices.json"
    script.write_text("[]")
    inventory = Inventory(script)
    assert [device.id for device in inventory.probe()] == ["cpu"]
    script.write_text(json.dumps([{"id": "cuda:0", "total_bytes": 8e9, "free_bytes": 5e9}]))
    card, host = inventory.probe()
    assert (card.id, card.kind, card.free_bytes) == ("cuda:0", "cuda", 5 * GB)
    assert host.total_bytes == cpu().total_bytes
    script.write_text("{")
    assert [device.id for device in inventory.probe()] == ["cpu"], "what is damaged lists nothing"


def test_a_driver_with_two_cards_and_a_third_one_that_appears_late(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("no C compiler")
    source = Path(__file__).with_name("fake_nvml.c")
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    count = tmp_path / "cards"
    count.write_text("2")
    code = (
        "from pathlib import Path; from llmd.daemon.devices import Inventory; import sys\n"
        "inventory = Inventory()\n"
        "print(*[(d.id, d.name, d.free_bytes) for d in inventory.probe()[:-1]], sep='\\n')\n"
        "Path(sys.argv[1]).write_text('3')\n"
        "print(len(inventory.probe()) - 1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(count)],
        env={
            **{key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"},
            "LD_LIBRARY_PATH": str(tmp_path),
            "FAKE_NVML_CARDS": str(count),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "('cuda:0', 'Made-up card 1', 6000000000)",
        "('cuda:1', 'Made-up card 2', 6000000000)",
        "3",
    ]
