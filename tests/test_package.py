"""Built packages install, import and name their repository; all files use the same repository address."""

from __future__ import annotations

import email
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tigon import __version__
from tigon.install import REPOSITORY, install

ROOT = Path(__file__).parents[1]
TEXTS = [
    path
    for folder in ("src", "docs", "examples", "tests", "benchmarks", ".github")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".md", ".yml", ".yaml", ".ipynb", ".svg")
] + [path for path in sorted(ROOT.iterdir()) if path.suffix in (".md", ".yml", ".toml", ".cff")]


def test_the_address_of_the_project_stands_everywhere_alike():
    named = {}
    for path in TEXTS:
        for owner in re.findall(r"github(?:usercontent)?\.com/([\w.-]+)/tigon\b", path.read_text()):
            named.setdefault(owner, set()).add(path.name)
    owner = REPOSITORY.split("/")[-2]
    assert set(named) == {owner}, named
    assert {"pyproject.toml", "mkdocs.yml", "CITATION.cff", "install.py", "SECURITY.md"} <= named[owner]
    configuration = (ROOT / "mkdocs.yml").read_text()
    assert f"\nrepo_url: {REPOSITORY}\n" in configuration
    assert f"\nsite_url: https://{owner}.github.io/tigon/\n" in configuration


def test_no_message_or_page_names_an_install_that_does_not_exist():
    """Valid while no package index serves Tigon. Once an index does, `install` and this test change together."""
    assert install("train") == "pip install '.[train]' in a checkout of Tigon"
    served = re.compile(r"""(?:pip|uv) (?:pip )?(?:install|add) (?:-U )?["']?tigon\b""")
    assert not {path.name: found for path in TEXTS if (found := served.findall(path.read_text()))}


def test_every_extra_that_is_advised_exists():
    toml = (ROOT / "pyproject.toml").read_text()
    extras = set(re.findall(r"^(\w+) = \[", toml.partition("[project.optional-dependencies]")[2].split("\n[")[0], re.M))
    advised = {
        extra
        for path in TEXTS
        for pair in re.findall(r"""install\(["'](\w+)["']\)|pip install ["']\.\[(\w+)\]["']""", path.read_text())
        for extra in pair
        if extra
    }
    assert advised >= {"train", "hf", "deepspeed"}
    assert advised <= extras


def test_the_citation_is_of_this_version():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


# -------------------------------------------------------------------------------------------------------------- built


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    for module in ("hatchling", "hatch_fancy_pypi_readme"):
        pytest.importorskip(module)
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", str(folder), cwd=ROOT)
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, source


def run(*command: str, **options) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TRITON_", "TIGON_"))}
    done = subprocess.run(command, env=kept, capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_source_distribution_has_what_the_wheel_is_built_from_and_nothing_else(built):
    with tarfile.open(built[1]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    package = {
        str(p.relative_to(ROOT)) for p in (ROOT / "src/tigon").rglob("*") if p.suffix in (".py", ".pyi", ".typed")
    }
    beside = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "PKG-INFO", ".gitignore"}
    assert package <= names
    assert {name for name in names if not name.startswith("src/tigon/")} <= beside
    assert not [name for name in names if re.search(r"__pycache__|\.pyc$|\.egg-info|\.ipynb", name)]


def test_the_wheel_has_the_package_alone_and_its_readme_stands_by_itself(built):
    with zipfile.ZipFile(built[0]) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        about = email.message_from_bytes(archive.read(metadata))
    assert {name.split("/")[0] for name in names} == {"tigon", f"tigon-{__version__}.dist-info"}
    assert {"tigon/py.typed", "tigon/__init__.pyi"} <= set(names)
    assert about["Version"] == __version__
    assert about["Author"] == "Tigon contributors"
    assert about.get_all("Project-URL") == [f"Homepage, {REPOSITORY}"]
    text = about.get_payload()
    links = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", text)
    assert len(links) > 20
    assert not [link for pair in links for link in pair if link and not link.startswith(("https://", "#"))]
    assert f"{REPOSITORY}/blob/main/docs/limits.md" in text


def test_it_installs_into_a_fresh_environment(built, tmp_path):
    """Installed without dependencies: a path file adds this interpreter's packages, but no editable install."""
    fresh = tmp_path / "fresh"
    run(sys.executable, "-m", "venv", "--without-pip", str(fresh))
    python = str(fresh / "bin" / "python")
    packages = json.loads(run(python, "-c", "import json, sysconfig; print(json.dumps(sysconfig.get_path('purelib')))"))
    (Path(packages) / "installed_here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "-q", str(built[0]))
    say = "import tigon; print(tigon.__version__, tigon.__file__, tigon.rms_norm.__name__)"
    version, file, name = run(python, "-c", say, cwd=tmp_path).split()
    assert (version, name) == (__version__, "rms_norm")
    assert Path(file).is_relative_to(fresh)
    if find_spec("typer"):
        assert "doctor" in run(str(fresh / "bin" / "tigon"), "--help", cwd=tmp_path)
