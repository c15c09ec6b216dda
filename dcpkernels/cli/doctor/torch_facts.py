"""What the child asks of torch. Importing it may end a process; asking for devices starts a driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dcpkernels.cli.doctor.probe import gather


def build(kinds: Sequence[str]) -> dict[str, Any]:
    """`kinds`: attributes of torch.version, each the version of what torch is built for."""

    def version() -> str:
        import torch

        return str(torch.__version__)

    def build_() -> dict[str, str | None]:
        import torch

        return {kind: getattr(torch.version, kind, None) for kind in kinds}

    return gather(version=version, build=build_)


def device() -> dict[str, Any]:
    def count() -> int:
        import torch

        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    return gather(count=count)
