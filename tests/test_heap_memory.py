"""Memory limits: read from /proc and cgroup files as a host, a container and a pod show them."""

import pytest

from dcpkernels.errors import DcpError
from dcpkernels.heap.memory import Limit, limits, require

GIB = 1 << 30
V1_UNLIMITED = 9223372036854771712


def machine(tmp_path, *, cgroup, mountinfo, files, meminfo="MemTotal: 9 kB\nMemAvailable:    1048576 kB\n"):
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(meminfo)
    (proc / "self" / "cgroup").write_text(cgroup)
    (proc / "self" / "mountinfo").write_text(mountinfo.replace("TOP", str(tmp_path).replace(" ", "\\040")))
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    host, *groups = limits(str(proc))
    assert host.available == GIB and "MemAvailable" in host.label
    where = [limit.label.removeprefix("cgroup ").replace(str(tmp_path), "TOP") for limit in groups]
    return [(limit.available, label) for limit, label in zip(groups, where, strict=True)]


V2 = "30 23 0:26 / TOP/cg rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.mark.parametrize("blank", ["", "with blank"])
def test_v2_walks_up_and_does_not_count_page_cache(tmp_path, blank):
    top = tmp_path / blank if blank else tmp_path
    found = machine(
        top,
        cgroup="0::/pod/engine\n",
        mountinfo="21 1 8:1 / / rw - ext4 /dev/sda rw\n" + V2,
        files={
            "cg/pod/engine/memory.max": "1000\n",
            "cg/pod/engine/memory.current": "900\n",
            "cg/pod/engine/memory.stat": "anon 100\nfile 800\ninactive_file 500\nactive_file 100\n",
            "cg/pod/memory.max": "max\n",
            "cg/pod/memory.current": "900\n",
            "cg/memory.max": "5000\n",
            "cg/memory.current": "6000\n",  # over it already
        },
    )
    assert found == [(700, "TOP/cg/pod/engine (memory.max)"), (0, "TOP/cg (memory.max)")]


def test_v1_takes_the_memory_controller_only(tmp_path):
    found = machine(
        tmp_path,
        cgroup="9:cpu,cpuacct:/elsewhere\n4:hugetlb,memory:/jobs/7\n0::/\n",
        mountinfo="40 23 0:30 / TOP/cpu rw - cgroup cgroup rw,cpu\n41 23 0:31 / TOP/mem rw - cgroup cgroup rw,memory\n",
        files={
            "mem/jobs/7/memory.limit_in_bytes": "4000\n",
            "mem/jobs/7/memory.usage_in_bytes": "3000\n",
            "mem/jobs/7/memory.stat": "inactive_file 1\ntotal_inactive_file 500\ntotal_active_file 0\n",
            "mem/memory.limit_in_bytes": f"{V1_UNLIMITED}\n",
            "mem/memory.usage_in_bytes": "9\n",
            "cpu/elsewhere/memory.limit_in_bytes": "1\n",
            "cpu/elsewhere/memory.usage_in_bytes": "0\n",
        },
    )
    assert found == [(1500, "TOP/mem/jobs/7 (memory.limit_in_bytes)")]


@pytest.mark.parametrize(
    "path, root",
    [("/docker/abc", "/docker/abc"), ("/docker/abc", "/other"), ("/", "/docker/abc"), ("/../../else", "/")],
)
def test_in_a_container_the_top_of_the_mount_is_the_own_cgroup(tmp_path, path, root):
    found = machine(
        tmp_path,
        cgroup=f"0::{path}\n",
        mountinfo=V2.replace("0:26 /", f"0:26 {root}"),
        files={"cg/memory.max": "800\n", "cg/memory.current": "300\n"},
    )
    assert found == [(500, "TOP/cg (memory.max)")]


def test_a_machine_that_says_nothing_is_given_the_benefit_of_the_doubt(tmp_path):
    (only,) = limits(str(tmp_path))
    require("op", [[only]] * 8, 1 << 40)


def test_this_machine_has_memory():
    host = limits()[0]
    assert 1 << 20 < host.available < 1 << 50


HOST = Limit((), "host memory", 10_000 * 4096)


def test_ranks_add_up_where_they_share_a_limit():
    pods = [[HOST, Limit((1, pod), f"pod {pod}", 5000 * 4096)] for pod in (1, 1, 2, 2)]
    require("op", pods, 2500 * 4096)
    with pytest.raises(DcpError) as caught:
        require("op", pods, 2500 * 4096 + 1)  # a whole page more
    assert str(caught.value) == (
        f"op: host memory must have room for 4 regions of {2501 * 4096} bytes "
        f"({4 * 2501 * 4096} bytes needed, {10_000 * 4096} bytes available)"
    )
    assert caught.value.ranks == (0, 1, 2, 3)
    pods[2][1] = Limit((1, 2), "pod 2", 100 * 4096)  # the smallest of what the sharers saw counts
    with pytest.raises(DcpError, match="pod 2 must have room for 2 regions") as caught:
        require("op", pods, 60 * 4096)
    assert caught.value.ranks == (2, 3)
