"""What a failed call of the HIP runtime means, and what to do about it: words for people, by error number."""

from __future__ import annotations

from dcpkernels.errors import DcpDeviceError, DcpError, DcpUnsupported

_VISIBLE = "HIP_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES"

# Numbers of hipError_t.
_ADVICE = {
    1: "the runtime refuses these arguments; see 'Memory' in docs/targets/hip.md",
    2: "free memory of the device: other processes, and what PyTorch's allocator keeps, hold it (`amd-smi process`, "
    "`rocm-smi --showpids`); a smaller configuration needs a smaller region (Workspace.size)",
    3: "HIP must be initialised in this process; a process forked after HIP was used cannot use it (start method spawn)",
    4: "the process is ending and the runtime is shut down already",
    17: "the runtime does not know this address; a process forked after HIP was used cannot use it (start method spawn)",
    35: "the amdgpu driver is older than what the HIP runtime needs: update the driver (`dkms status`, `modinfo amdgpu`)",
    100: "no GPU is visible: see `rocminfo`; the user must be in the groups video and render, a container must have "
    f"/dev/kfd and /dev/dri/renderD* (--device=/dev/kfd --device=/dev/dri --group-add video); and see {_VISIBLE}",
    101: f"the device is not visible in this process: see {_VISIBLE}, of which the later ones number what the earlier ones "
    "have left",
    205: "memory could not be mapped: see `dmesg | grep -i -e amdgpu -e kfd`, and the limits of locked memory (ulimit -l)",
    217: "these devices cannot reach each other's memory: see `amd-smi topology`, and large BAR and IOMMU (iommu=pt) for "
    "links by PCIe",
    304: "an operating system call failed: see the limits of open files and locked memory (ulimit -n, -l) and `dmesg`",
    400: "the runtime does not know this handle; a process forked after HIP was used cannot use it (start method spawn)",
    700: "an earlier kernel of this process has read or written a wrong address; nothing runs on the device any more",
    701: "the device has not the resources for it",
    704: "peer access is enabled already",
    719: "an earlier kernel of this process has failed; nothing runs on the device any more",
    801: "this runtime and device cannot do it: see the requirements in docs/targets/hip.md",
    900: "it may not be done while a graph is captured: make and close workspaces outside of captures",
    901: "a capture of a graph has been broken: make and close workspaces outside of captures",
    906: "it may not be done while a graph is captured: make and close workspaces outside of captures",
    999: "see `dmesg | grep -i -e amdgpu -e kfd`",
}

# What an IPC handle fails with says little; this is what it mostly was.
_IPC = (
    "IPC handles: HSA_ENABLE_IPC_MODE_LEGACY=1, which some images set, breaks them on some systems (unset it); every rank's "
    "GPU should be visible to every rank (so choose by the device's number, or hide by HIP_VISIBLE_DEVICES and not by "
    "ROCR_VISIBLE_DEVICES); containers need --ipc=host, a common PID namespace and a profile that allows it (--security-opt "
    "seccomp=unconfined, --cap-add=SYS_PTRACE); see also `dmesg | grep -i -e amdgpu -e kfd`"
)
_IPC_CALLS = {"hipIpcGetMemHandle", "hipIpcOpenMemHandle"}
_IPC_NUMBERS = {1, 17, 101, 205, 400, 999, 1052, 1053}

# The machine cannot do it, today and tomorrow: another backend may take over. All else is a fault of the device.
_UNSUPPORTED = {35, 100, 101, 217, 801}


def advice(number: int, *, ipc: bool = False) -> str:
    """What to do about it; `ipc`: it was a call for an IPC handle."""
    return _IPC if ipc and number in _IPC_NUMBERS else _ADVICE.get(number, _ADVICE[999])


def call_error(call: str, name: str, number: int, *, where: str, nbytes: int | None = None, more: str = "") -> DcpError:
    """The error for a call that returned `number`. `where` names the device, `more` is what else was given."""
    size = f" of {nbytes} bytes" if nbytes is not None else ""
    is_ipc = call in _IPC_CALLS and number in _IPC_NUMBERS
    got = ", ".join(filter(None, [f"{name}, error {number}", more]))
    text = f"{call}{size} must succeed on {where} (got {got}): {advice(number, ipc=is_ipc)}"
    return (DcpUnsupported if is_ipc or number in _UNSUPPORTED else DcpDeviceError)(text)
