"""What a step-time model assumes of a machine: peaks by its maker's data sheet, and what of them is reached in what
others have published. The second is a range each, with its sources beside it. Nothing here was measured by this
project.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.planner.ranges import Range, is_number

LINKS = ("switch", "mesh", "pcie")

# SOURCES says where these are from.
_MEMORY_SHARE = Range(0.5, 0.9)
_SEQUENCE_SHARE = Range(0.04, 0.9)
_ATTENTION_S = Range(10e-6, 62e-6)
_COLLECTIVE_S = Range(5e-6, 27e-6)
_LINK_SHARE = Range(0.4, 0.9)
_PACKET_TRIP_S = Range(2.4e-6, 7.5e-6)


@dataclass(frozen=True)
class Hardware:
    """One accelerator of a machine of equals.

    Args (bytes, seconds):
        name: how it is called in reports.
        memory_gib: GiB of memory, as its driver shows them.
        memory_bandwidth: peak of its memory, bytes/s.
        link: "switch": every peer can be reached at full link bandwidth. "mesh": a link of its own to each peer, so
            that a group of a few ranks uses a few links. "pcie": as a switch.
        link_bandwidth: peak to all peers together, in one direction, bytes/s.
        num_links: links that this is the sum of; of a mesh, the most peers there are.
        memory_share: of memory_bandwidth, what attention over a large batch reads at.
        sequence_share: the same for one sequence alone. A kernel that cuts a sequence into few splits leaves most of
            the device idle; the batch has to fill it.
        attention_s: of one call of attention, however short the context.
        gather_s, merge_s: of one query gather, one merge of partial outputs, however few the bytes.
        link_share: of link_bandwidth, what a collective moves bytes at.
        packet_trip_s: what a merge saves whose packets bring their flags along (wire="packet"), against rows and a flag
            behind them.
        packet_bytes: the packet to try on this machine (docs/protocol.md#packets).

    Raises DcpInvalidArgument for a field that is not of its kind.
    """

    name: str
    memory_gib: float
    memory_bandwidth: float
    link: str
    link_bandwidth: float
    num_links: int = 1
    memory_share: Range = _MEMORY_SHARE
    sequence_share: Range = _SEQUENCE_SHARE
    attention_s: Range = _ATTENTION_S
    gather_s: Range = _COLLECTIVE_S
    merge_s: Range = _COLLECTIVE_S
    link_share: Range = _LINK_SHARE
    packet_trip_s: Range = _PACKET_TRIP_S
    packet_bytes: int = 8

    def __post_init__(self) -> None:
        for name in ("memory_gib", "memory_bandwidth", "link_bandwidth"):
            if not is_number(getattr(self, name)) or getattr(self, name) <= 0:
                raise DcpInvalidArgument(f"hardware: {name} must be a number above 0 (got {getattr(self, name)!r})")
        if self.link not in LINKS:
            raise DcpInvalidArgument(f"hardware: link must be one of {LINKS} (got {self.link!r})")
        if not isinstance(self.num_links, int) or isinstance(self.num_links, bool) or self.num_links < 1:
            raise DcpInvalidArgument(f"hardware: num_links must be a whole number >= 1 (got {self.num_links!r})")
        if self.packet_bytes not in (8, 16, 128):
            raise DcpInvalidArgument(f"hardware: packet_bytes must be 8, 16 or 128 (got {self.packet_bytes!r})")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type != "Range":
                continue
            if not isinstance(value, Range):
                raise DcpInvalidArgument(f"hardware: {field.name} must be a Range (got {value!r})")
            if field.name.endswith("_share") and not (0 < value.low and value.high <= 1):
                raise DcpInvalidArgument(
                    f"hardware: {field.name} must be in 0 .. 1, and not 0 (got {value.low} .. {value.high})"
                )
            if value.low < 0:
                raise DcpInvalidArgument(f"hardware: {field.name} must be at least 0 (got {value.low})")

    def link_seconds(self, peer_bytes: float, num_peers: int, share: float) -> float:
        """Time for `peer_bytes` from each of `num_peers` peers, at `share` of the peak."""
        if self.link == "mesh":  # side by side, each on a link of its own
            return peer_bytes / (self.link_bandwidth / self.num_links * share)
        return num_peers * peer_bytes / (self.link_bandwidth * share)

    def to_dict(self) -> dict[str, Any]:
        """For JSON. Ranges as {low, high}; with the sources."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            **{name: value.to_dict() if isinstance(value, Range) else value for name, value in values.items()},
            "sources": SOURCES,
        }


# What the ranges rest on. Times and bandwidths are their authors'; the words of one source may serve several machines.
SOURCES = {
    "memory_share": (
        "FlashMLA's README: 3000 GB/s of 3350 on H800, which is 0.9. vLLM #41778, MLA over 80k tokens in fp8, "
        "Blackwell: 4.3 to 5.0 TB/s of 8 in batches of 16 to 64, which is 0.5 to 0.6."
    ),
    "sequence_share": (
        "0.04 (321 GB/s) fits the times that vLLM #50484 published of Kimi-K3 on 8 ranks, one sequence of 120k tokens: "
        "215 us a layer. vLLM #41778: 0.42 and 0.74 TB/s at 80k, by kernel. flashinfer #4390: 4.5 TB/s at 1000k in "
        "bf16. A kernel that fills the device reads one sequence as it reads many: 14 us a layer at 5 TB/s."
    ),
    "attention_s": (
        "aiter #2039, MLA decode over 21 tokens: 10 us on MI355X, 13 us on MI300X. vLLM #41778: 62 us for one sequence "
        "as for two."
    ),
    "gather_s, merge_s (switch)": (
        "NCCL's samples of an all-to-all: 3.7 to 4.6 us on 8 GB200. FlashInfer #4929, fused merge: 10 to 17 us on 4 "
        "H100. SGLang #33069, query gather on 4 GB200: 17 us direct, 24 us by all-gather. Both of Kimi-K3 in vLLM "
        "#50484, with the rest that DCP adds: about 53 us by the fit above, so 27 us each at most."
    ),
    "gather_s, merge_s (mesh)": (
        "vLLM #54889: 4.3 us for a captured kernel on ROCm, and an op may be two. A port of a direct merge to MI355X: "
        "80 us. vLLM #56906, RCCL: 95 to 101 us. A rank that is late costs far more than that."
    ),
    "gather_s, merge_s (pcie)": "b12x on 8 RTX PRO 6000: gather 11 us, merge 14 us; on 16, 34 and 25 us.",
    "link_share": "SGLang #33069: 20 us more for 127 more tokens, which is 0.6 of the peak of GB200.",
    "packet_trip_s": (
        "NCCL's samples, a flag in the data against put and barrier: 2.4 to 3.1 us less on 8 GB200, 4.7 to 7.5 us on "
        "32. On a mesh or PCIe a guess."
    ),
}

_MESH = {"gather_s": Range(9e-6, 100e-6), "merge_s": Range(9e-6, 100e-6), "packet_trip_s": Range(1e-6, 8e-6)}
_TB, _GB = 1e12, 1e9

# Memory as nvidia-smi and amd-smi show it (B200: 183,359 MiB; GB200: 189,471; B300: 275,040; GB300: 284,208; H200:
# 143,771; RTX PRO 6000: 97,887). NVLink 5: 1.8 TB/s in both directions together; NVLink 4: 900 GB/s. Infinity Fabric
# (xGMI): 7 links of 64 GB/s each way on MI300X, of 76.8 GB/s on MI355X. PCIe 5.0 x16: 64 GB/s each way. The makers'
# data sheets. (RTX PRO 6000: the Server Edition; 1.8 TB/s in a workstation's.) Packets of 128 bytes are for NVLink
# alone; AMD's GPUs store no more than 8 bytes at once for sure.
PRESETS: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        Hardware("b200", 179, 8.0 * _TB, "switch", 900 * _GB, packet_bytes=128),
        Hardware("gb200", 185, 8.0 * _TB, "switch", 900 * _GB, packet_bytes=128),
        Hardware("b300", 268.6, 8.0 * _TB, "switch", 900 * _GB, packet_bytes=128),
        Hardware("gb300", 277.5, 8.0 * _TB, "switch", 900 * _GB, packet_bytes=128),
        Hardware("h200", 140.4, 4.8 * _TB, "switch", 450 * _GB, packet_bytes=128),
        Hardware("mi300x", 192, 5.3 * _TB, "mesh", 7 * 64 * _GB, 7, **_MESH),
        Hardware("mi355x", 288, 8.0 * _TB, "mesh", 7 * 76.8 * _GB, 7, **_MESH),
        Hardware(
            "rtx-pro-6000",
            95.6,
            1.6 * _TB,
            "pcie",
            64 * _GB,
            gather_s=Range(11e-6, 34e-6),
            merge_s=Range(14e-6, 34e-6),
            link_share=Range(0.3, 0.9),
            packet_trip_s=Range(1e-6, 8e-6),
            packet_bytes=16,
        ),
    )
}


def preset(name: str) -> Hardware:
    """The machine of that name, in any case. Raises DcpInvalidArgument, which lists the names."""
    if not isinstance(name, str) or name.lower() not in PRESETS:
        raise DcpInvalidArgument(f"hardware: name must be one of {', '.join(PRESETS)} (got {name!r})")
    return PRESETS[name.lower()]
