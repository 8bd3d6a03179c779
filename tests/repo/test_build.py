"""The build, on a copy of the source, where nothing is compiled: every mode of ACCUMFUSED_NATIVE does as it says."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from building import MODULE, REASON, build_in_place, copy_of_the_source, needs_source, setup_py

pytestmark = needs_source


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """A source folder with a module and a reason that an earlier build has left."""
    source = copy_of_the_source(tmp_path)
    (source / MODULE).write_bytes(b"stale")
    (source / REASON).write_text("stale")
    return source


@pytest.mark.parametrize(
    ("mode", "name", "value", "reason"),
    [
        ("auto", "CXX", "false", "false cannot compile C++17"), ("1", "CXX", "false", "false cannot compile C++17"),
        ("auto", "CXX", "no-such-compiler", "no C++17 compiler was found"),
        ("auto", "CXXFLAGS", "-std=c++14", "this compiler has no C++17"),
    ],
)  # fmt: skip
def test_without_a_compiler_that_will_do_pure_python_installs_unless_a_module_was_asked_for(
    fresh: Path, mode: str, name: str, value: str, reason: str
) -> None:
    done = build_in_place(fresh, ACCUMFUSED_NATIVE=mode, **{name: value})
    assert (done.returncode == 0) == (mode == "auto"), done.stderr
    assert reason in (done.stderr if mode == "1" else (fresh / REASON).read_text())
    assert not (fresh / MODULE).exists()


NVCC = r"""#!/bin/sh
case "$*" in
  --version) echo 'Cuda compilation tools, release 12.4, V12.4.131' ;;
  --list-gpu-arch) printf 'compute_50\ncompute_90\n' ;;
  *-E*) echo "host_config.h:143:2: error: #error -- unsupported GNU version! gcc versions later than 13 are not \
supported! The nvcc flag '-allow-unsupported-compiler' can be used"; exit 1 ;;
esac
"""


@pytest.mark.parametrize(
    ("archs", "reason"),
    [
        ("90", "(unsupported GNU version! gcc versions later than 13 are not supported); set CXX to"),
        ("90 120", "does not build for compute capability 120, but for 50 to 90; change ACCUMFUSED_CUDA_ARCHS"),
    ],
)
def test_an_nvcc_that_does_not_fit_is_refused_with_the_remedy(
    fresh: Path, tmp_path: Path, archs: str, reason: str
) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(NVCC)
    nvcc.chmod(0o755)
    done = build_in_place(fresh, ACCUMFUSED_CUDA="1", CUDACXX=str(nvcc), ACCUMFUSED_CUDA_ARCHS=archs)
    assert done.returncode != 0
    assert reason in done.stderr


def test_mode_0_makes_a_pure_python_wheel(fresh: Path) -> None:
    done = setup_py(fresh, "bdist_wheel", ACCUMFUSED_NATIVE="0")
    assert done.returncode == 0, done.stderr
    (wheel,) = (fresh / "dist").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("ACCUMFUSED_NATIVE", "yes", "ACCUMFUSED_NATIVE='yes': use one of auto, 0, 1"),
        ("ACCUMFUSED_CUDA_ARCHS", "hopper", "ACCUMFUSED_CUDA_ARCHS='hopper': use compute capabilities like \"80 90\""),
        ("ACCUMFUSED_NATVIE", "1", "ACCUMFUSED_NATVIE is set, which is no setting of accumfused: use one of ACCUM"),
    ],
)
def test_a_wrong_environment_variable_is_refused(fresh: Path, name: str, value: str, text: str) -> None:
    done = setup_py(fresh, "--version", **{name: value})
    assert done.returncode != 0
    assert text in done.stderr


def test_the_source_distribution_has_every_source(fresh: Path) -> None:
    done = setup_py(fresh, "sdist")
    assert done.returncode == 0, done.stderr
    (archive,) = (fresh / "dist").iterdir()
    with tarfile.open(archive) as tar:
        packed = {name.partition("/")[2] for name in tar.getnames()}
    sources = {path.relative_to(fresh).as_posix() for path in (fresh / "csrc").rglob("*.*")}
    assert "csrc/rules.h" in sources
    assert sources <= packed
    assert {"setup.py", "pyproject.toml", "LICENSE", "NOTICE", "README.md", "accumfused/py.typed"} <= packed
    assert MODULE not in packed


def test_the_description_for_a_package_index_has_no_link_or_picture_that_leads_nowhere(fresh: Path) -> None:
    (fresh / "README.md").write_text(
        "See [the\ndocs](docs/index.md#here), [torch](https://pytorch.org).\n![A picture](docs/a.png)\n"
    )
    done = setup_py(fresh, "egg_info")
    assert done.returncode == 0, done.stderr
    text = (fresh / "accumfused.egg-info/PKG-INFO").read_text().partition("\n\n")[2]
    assert text.strip() == "See the\ndocs, [torch](https://pytorch.org)."


def test_a_build_without_pybind11_says_what_to_install(fresh: Path) -> None:
    (fresh / "pybind11.py").write_text("raise ImportError")
    done = setup_py(fresh, "build_ext", "--inplace", PYTHONPATH=str(fresh))
    assert done.returncode == 0, done.stderr
    assert (fresh / REASON).read_text() == "pybind11 was not found; pip install pybind11\n"
