"""The ops between the GPUs of this machine, a process for each: starts n_gpus.py by torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
SCRIPT = Path(__file__).with_name("n_gpus.py")


@pytest.mark.parametrize("wanted", [2, 4, 8])
def test_ops_between_gpus(num_gpus: int, wanted: int, tmp_path: Path) -> None:
    if wanted > num_gpus:
        pytest.skip(f"needs {wanted} GPUs (here: {num_gpus})")
    result = tmp_path / "n_gpus.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={wanted}", str(SCRIPT)]
    done = subprocess.run(
        [*command, "--json", str(result)],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=SCRIPT.parents[2],
    )
    print(done.stdout[-4000:])
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    report = json.loads(result.read_text())
    assert report["passed"], report
