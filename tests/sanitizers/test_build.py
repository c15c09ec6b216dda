"""DCPKERNELS_SANITIZE of setup.py, on a small project of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.packaging_project import Project

UNDEFINED = "-fsanitize=undefined,float-cast-overflow"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.mark.parametrize(
    "env, args, text",
    [
        ({"DCPKERNELS_SANITIZE": "adress"}, (), "names must be among address, undefined, thread (got adress)"),
        ({"DCPKERNELS_SANITIZE": "address,thread"}, (), "thread must be alone (got 2 names)"),
        ({"DCPKERNELS_SANITIZE": "undefined"}, ("--inplace",), "the build must not be in place"),
        (
            {"DCPKERNELS_SANITIZE": "thread", "DCPKERNELS_TARGETS": "cpu,hip"},
            (),
            "must be cpu with DCPKERNELS_SANITIZE (got hip)",
        ),
    ],
)
def test_wrong_request_fails_by_name(project: Project, env: dict[str, str], args: tuple[str, ...], text: str) -> None:
    code, output = project.setup("build_ext", *args, **env)
    assert code != 0 and text in output and "Traceback" not in output


def test_a_build_under_sanitizers_leaves_the_module_alone(project: Project) -> None:
    project.build()
    before, plain = project.module().read_bytes(), project.load()["build_id"]
    project.record.unlink(missing_ok=True)
    project.build(
        "--variants", "baseline", DCPKERNELS_SANITIZE="undefined", DCPKERNELS_CXX=str(project.folder / "recorder")
    )
    lines = project.record.read_text().splitlines()
    steps = [line for line in lines if "-c csrc" in line or "-shared" in line]
    assert len(steps) == 4 and all(UNDEFINED in line and "-O0" in line for line in steps)
    assert project.module().read_bytes() == before
    built = project.load("build/sanitize-undefined")  # by itself UBSan needs no library first
    assert built["build_id"] != plain  # so ranks of the two do not meet
    assert project.build()[0] == []
