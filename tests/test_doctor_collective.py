"""`dcpkernels doctor --collective`: real ranks, a wrong one, one that hangs."""

from __future__ import annotations

import re
import time

from dcpkernels.cli import main
from dcpkernels.cli.doctor import collective, run
from dcpkernels.cli.doctor.check import FAIL, ok
from tests.doctor_facts import machine


def test_collective_runs_every_op_on_real_ranks(monkeypatch, tmp_path, capsys):
    facts = machine(tmp_path)
    monkeypatch.setattr(run, "this_machine", lambda: facts)
    assert main(["doctor", "--collective", "--ranks", "2"]) == 0
    assert re.search(
        r"^ok    collective cpu: all ops are right on 2 rank processes \(\w+\)$", capsys.readouterr().out, re.MULTILINE
    )


def _wrong(group, device):
    """Rank 1 takes the right merge for a wrong one."""
    from dcpkernels import reference

    right = reference.a2a_lse_reduce
    if group.rank() == 1:
        reference.a2a_lse_reduce = lambda *args, **options: (right(*args, **options)[0] + 1, right(*args, **options)[1])
    return collective.check_rank(group, device)


def test_collective_with_a_wrong_result():
    found = collective.collective("cpu", "cpu", 2, body=_wrong)
    assert found.status == FAIL and "docs/errors.md" in found.fix
    assert (
        "DcpError: self_check failed on rank 1: a2a_lse_reduce: the result must be the merge of all ranks" in found.text
    )


def _hang(group, device):
    if group.rank() == 1:
        time.sleep(60)
    return "v3"


def test_collective_with_a_rank_that_hangs():
    found = collective.collective("cpu", "cpu", 2, body=_hang, timeout_s=0.5)
    assert found.status == FAIL and re.match(r"rank \d of 2 still running after", found.text)


def test_ranks_that_cannot_start_are_a_failure(monkeypatch):
    def refuse(*args, **options):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("dcpkernels.testing.run_ranks", refuse)
    found = collective.collective("cpu", "cpu", 16)
    assert found.status == FAIL and "16 rank processes must start (OSError: [Errno 24] Too many" in found.text


def test_what_failed_is_not_an_echo():
    fates = {
        0: "raised DcpPeerLost: rank 1 is gone",
        1: "killed by signal 9 (SIGKILL)",
        2: "returned",
    }
    assert collective._what_failed(fates) == "rank 1 of 3 killed by signal 9 (SIGKILL)"
    assert collective._what_failed({0: fates[0], 1: "returned"}) == "rank 0 of 2 raised DcpPeerLost: rank 1 is gone"
    assert collective._what_failed(fates | {2: "raised DcpError: x"}).startswith("rank 2 of 3 raised")


def test_collective_takes_the_targets_that_are_ready(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(collective, "collective", lambda *args: asked.append(args) or ok("well"))
    card = {"driver": "13.0", "devices": [{}] * 3, "usable": ""}
    torch = {"build": {"cuda": "13.0", "hip": None}}
    facts = machine(tmp_path, sections={"cuda": card, "torch": torch})
    assert [result.name for result in collective.run(facts, 5)] == ["collective cpu", "collective cuda"]
    assert asked == [("cpu", "cpu", 5), ("cuda", "cuda", 3)]
    facts = machine(tmp_path, sections={"cuda": card, "cpu": {"built": False}})
    assert collective.run(facts, 5) == []
