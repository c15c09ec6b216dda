"""What a failed call of the CUDA driver means, and what to do about it: words for people, by error number.

A driver says "operation not permitted" for a missing device node, and "system not yet initialized" for a daemon that is
not running. Whoever meets that at start-up is no CUDA programmer; each text says where to look.
"""

from __future__ import annotations

from dcpkernels.errors import DcpDeviceError, DcpError, DcpUnsupported

_FABRIC_MANAGER = (
    "the NVLink switches are not set up: see `systemctl status nvidia-fabricmanager` (its version must be the driver's) "
    "and `nvidia-smi -q -i 0 | grep -A3 Fabric`; restarting it needs all GPU processes gone"
)
_IMEX = (
    "fabric handles need an IMEX channel: `systemctl status nvidia-imex` on every host, and the device node "
    "/dev/nvidia-caps-imex-channels/channel0 in the container, readable by this user"
)

# Numbers of CUresult.
_ADVICE = {
    1: "the driver refuses these arguments; see the notes on the call in docs/targets/cuda.md",
    2: "free memory of the device: other processes, and what PyTorch's allocator keeps (also in expandable segments), "
    "hold it; a smaller configuration needs a smaller region (Workspace.size)",
    3: "CUDA must be initialised in this process; a process forked after CUDA was used cannot use it (start method spawn)",
    4: "the process is ending and the driver is shut down already",
    34: "libcuda.so.1 is the stub library of the toolkit: take .../lib64/stubs out of LD_LIBRARY_PATH",
    35: "the driver is older than what the CUDA library needs: update the driver",
    36: "this call needs a newer driver: update the driver",
    46: "another process holds the device, or it is in exclusive mode: see `nvidia-smi -q -d COMPUTE`",
    100: "no GPU is visible: see `nvidia-smi -L`, CUDA_VISIBLE_DEVICES, and the container's --gpus or NVIDIA_VISIBLE_DEVICES",
    101: "a device, of this rank or of a peer, is not visible in this process: see CUDA_VISIBLE_DEVICES and the "
    "container's --gpus; a multicast team takes only devices of one NVLink domain",
    201: "a CUDA context must be current on this thread",
    217: "these devices cannot reach each other's memory: see `nvidia-smi topo -p2p rw`; MIG devices never can",
    304: "an operating system call failed: see the limits of open files and locked memory (ulimit -n, -l) and `dmesg`",
    401: _FABRIC_MANAGER,
    700: "an earlier kernel of this process has read or written a wrong address; the context is lost",
    719: "an earlier kernel of this process has failed; the context is lost",
    800: "the process may not do this: see the container's seccomp profile and capabilities, and the device nodes it has",
    801: "this driver and device cannot do it; MIG, vGPU and confidential computing switch parts off",
    802: _FABRIC_MANAGER,
    803: "the kernel module and libcuda.so.1 are of different versions: reboot, or reload the module after the update",
    804: "the forward compatibility package does not support this device: remove it from LD_LIBRARY_PATH",
    805: "the MPS server does not answer: see `nvidia-cuda-mps-control`",
}

# The machine cannot do it, today and tomorrow: another backend may take over. All else is a fault of the device.
_UNSUPPORTED = {34, 35, 36, 100, 101, 217, 801, 804}


def advice(number: int, *, fabric: bool = False) -> str:
    """What to do about it; `fabric` as for `call_error`."""
    return _IMEX if fabric and number in (800, 801) else _ADVICE.get(number, "see `dmesg | grep -i xid`")


def call_error(
    call: str, name: str, number: int, *, where: str, nbytes: int | None = None, fabric: bool = False, more: str = ""
) -> DcpError:
    """The error for a call that returned `number`. `where` names the device; `fabric`: the call was about a fabric
    handle, where "not permitted" and "not supported" have a meaning of their own; `more` is what else was given."""
    size = f" of {nbytes} bytes" if nbytes is not None else ""
    got = ", ".join(filter(None, [f"{name}, error {number}", more]))
    text = f"{call}{size} must succeed on {where} (got {got}): {advice(number, fabric=fabric)}"
    unsupported = number in _UNSUPPORTED or (fabric and number == 800)
    return (DcpUnsupported if unsupported else DcpDeviceError)(text)
